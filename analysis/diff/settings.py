"""How two traces are compared."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from ..errors import AnalysisError

ALIGNMENTS: Final = ("auto", "id", "prompt")
KV_DTYPES: Final = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")

CONTENT_KINDS: Final = {
    "missing": "a request that only one trace has",
    "input": "the model was fed another token",
    "identity": "the KV of a token was computed with another adapter, cache salt, media or weights",
    "position": "a token was fed at another position",
    "table": "the block table led to other content: a foreign, stale or never written slot was read",
    "window": "other positions were read of a sliding window",
    "state": "the recurrent state behind the same tokens has other bytes",
    "values": "NaN, an infinity or a row of zeros was written, in one trace only",
    "sampled": "another token was sampled",
    "kv": "other KV bytes were written (or received) for the same token",
    "layer": "other KV bytes were written in a layer of which only some slots show some bytes",
    "kv_changed": "KV bytes changed after they were written, in one trace only",
    "layer_changed": "the same of a layer of which only some slots show some bytes",
    "length": "a request ended earlier, later, or otherwise",
}
TIMING_KINDS: Final = {
    "hit": "another part of the prompt came from the prefix cache",
    "schedule": "other chunks, another number of forwards, another order, retraction",
}
KINDS: Final = {**CONTENT_KINDS, **TIMING_KINDS}
BYTE_KINDS: Final = frozenset(
    {"state", "kv", "layer", "kv_changed", "layer_changed"}
)  # which are left out without KV bytes


class NotComparableError(AnalysisError):
    """Two traces that no comparison would say anything about; `str()` says why, and what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSettings:
    """How two traces are compared.

    `align`: requests by "id" (their name; between a prefill and a decode engine, their room), by "prompt", or "auto".
    `kinds` of `KINDS` make traces different. With `kv` bytes are compared, as values a and b if `kv_tolerance` is not None:
    they are equal if |a - b| <= tolerance * (1 + |b|); `kv_dtype` is the header's if empty. Of states there are hashes alone,
    which are compared if bytes are, and there is no tolerance. `requests` are names or ids of
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
