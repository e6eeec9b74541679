"""How two traces are compared."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from ..errors import AnalysisError

ALIGNMENTS: Final = ("auto", "id", "prompt")
KV_DTYPES: Final = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")

CONTENT_KINDS: Final = {
    "missing": "a request that only one trace has",
    "input": "the model was fed another token",
    "position": "a token was fed at another position",
    "table": "the block table led to other content: a foreign, stale or never written slot was read",
    "sampled": "another token was sampled",
    "kv": "other KV bytes were written (or received) for the same token",
    "kv_changed": "KV bytes changed after they were written, in one trace only",
    "length": "a request ended earlier, later, or otherwise",
}
TIMING_KINDS: Final = {
    "hit": "another part of the prompt came from the prefix cache",
    "schedule": "other chunks, another number of forwards, another order, retraction",
}
KINDS: Final = {**CONTENT_KINDS, **TIMING_KINDS}


class NotComparableError(AnalysisError):
    """Two traces that no comparison would say anything about; `str()` says why, and what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSettings:
    """How two traces are compared.

    `align`: requests by "id" (their name; between a prefill and a decode engine, their room), by "prompt", or "auto".
    `kinds` of `KINDS` make traces different. With `kv` bytes are compared, as values a and b if `kv_tolerance` is not None:
    they are equal if |a - b| <= tolerance * (1 + |b|); `kv_dtype` is the header's if empty. `requests` are names or ids of
    the only ones that count, () for all. `any_model`: the models may have different names.
    """

    align: str = "auto"
    kinds: frozenset[str] = frozenset(CONTENT_KINDS)
    kv: bool = True
    kv_tolerance: float | None = None
    kv_dtype: str = ""
    requests: tuple[str, ...] = ()
    any_model: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "kinds": sorted(self.kinds), "requests": list(self.requests)}
