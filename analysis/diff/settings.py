"""How two traces are compared."""

from dataclasses import dataclass
from typing import Any

from ..errors import AnalysisError
from .kinds import CONTENT_KINDS

ALIGNMENTS = ("auto", "id", "prompt")


class NotComparableError(AnalysisError):
    """Two traces that no comparison would say anything about; `str()` says why, and what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSettings:
    """How two traces are compared.

    Attributes:
        align: requests by "id" (their name; between a prefill and a decode engine, their room), by "prompt", or "auto".
        kinds: names of `KINDS` that make traces different.
        kv: whether KV bytes are compared.
        kv_tolerance: None for byte by byte; else values a and b are equal where |a - b| <= tolerance * (1 + |b|).
        kv_dtype: how bytes are read as values; empty: as the header says.
        requests: names or ids of the only requests that count; () for all.
        any_model: compare traces of models with different names.
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
        return {
            "align": self.align,
            "kinds": sorted(self.kinds),
            "kv": self.kv,
            "kv_tolerance": self.kv_tolerance,
            "kv_dtype": self.kv_dtype,
            "requests": list(self.requests),
            "any_model": self.any_model,
        }
