"""`docs/internals/observed.md`, made of the adapters' tables."""

from typing import Final

from ..sglang.observed import CPU, GPU
from ..simulated.observed import SIMULATED
from ..transformers.observed import TRANSFORMERS
from ..vllm.observed import VLLM
from .observed import EVERY, USES, Source, Table, with_recorder
from .own_observed import OWN

ADAPTERS: Final[dict[str, Table]] = {
    "SGLang on the CPU": CPU,
    "SGLang on a GPU": GPU,
    "vLLM": VLLM,
    "transformers": TRANSFORMERS,
    "the simulated engine": SIMULATED,
    "your own engine": OWN,
}
_HEAD: Final = """# Where each value in a trace comes from

Made by `python docs/generate/observed_page.py` from the tables beside the adapters (`recorder/engines/*observed.py`): change those,
with the code that they speak of. A verdict rests on what was observed; so each column of each event is one of these:

- **observed**: read from the tensors or lists that the engine works with, at the place named.
- **told**: an argument or a field of the engine's host code, which may differ from what its kernels got.
- **numbered**: the recorder's own numbering, time or framing; nothing of the engine's is in it.
- **derived**: worked out. The header names such columns of a forward (`runners[].derived`), and nothing is judged from them
  (../replay.md#derived-columns); labels by which nothing is judged need no name there.
- **not recorded**: the column holds its default; the verdict's line `not watched` says so.

`event`, `kind` and `time_ns` of every event are the recorder's own.
"""


def observed_page() -> str:
    """Return the page."""
    parts = [_HEAD]
    for name, table in ADAPTERS.items():
        parts.append(f"\n## {name[0].upper()}{name[1:]}\n\n| event | columns | | where |\n|---|---|---|---|\n")
        for kind, entries in with_recorder(table).items():
            parts += [_row(kind, columns, source) for columns, source in entries.items()]
    return "".join(parts)


def _row(kind: str, columns: tuple[str, ...], source: Source) -> str:
    named = ", ".join(f"`{column}`" for column in columns)
    return f"| {kind} | {named} | {source.how.value} | {source.where} |\n"


__all__ = ["ADAPTERS", "EVERY", "USES", "observed_page"]
