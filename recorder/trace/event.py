"""One event on its way into a trace: what the recorder fills and the writer encodes."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from .schema import BYTE_LISTS, EVENT_KINDS, INT_LISTS, SCALARS

# What a row costs beside its own values: the scalar columns, and one offset for each list column.
ROW_BYTES: Final = 8 * len(SCALARS) + 4 * len(INT_LISTS) + 8 * len(BYTE_LISTS)

# For events without lists that come with every request: each dict of its own brings the next garbage collection of the
# engine's process nearer, which may look at a million objects.
NO_LISTS: Final[Any] = MappingProxyType({})

INT64_MIN: Final = -(1 << 63)
INT64_MAX: Final = (1 << 63) - 1

# Comparing with a dtype is many times faster than with a scalar type, and every list of every event is looked at.
_INT64 = np.dtype(np.int64)
_UINT8 = np.dtype(np.uint8)
_KINDS = frozenset(EVENT_KINDS)
_SCALAR_TYPES: Final = {name: type(default) for name, (_, default) in SCALARS.items() if name not in ("event", "kind")}
_INT_LISTS = frozenset(INT_LISTS)
_BYTE_LISTS = frozenset(BYTE_LISTS)


@dataclass(slots=True, kw_only=True)
class TraceEvent:
    """One event; the writer gives it its number.

    `scalars` holds the scalar columns that differ from their defaults (without `event` and `kind`), `ints` the
    non-empty int64 list columns as 1-D int64 arrays, `bytes` the non-empty uint8 list columns as 1-D uint8 arrays.
    Whoever hands the event to a writer hands the arrays over with it: they are read later, in another thread.
    """

    kind: str
    time_ns: int = 0
    scalars: dict[str, int | str] = field(default_factory=dict)
    ints: dict[str, Int64Array] = field(default_factory=dict)
    bytes: dict[str, ByteArray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Memory that the event holds in a queue, and about what its row takes before compression."""
        total = ROW_BYTES
        for value in self.scalars.values():
            if isinstance(value, str):
                total += 4 * len(value)
        for lists in (self.ints, self.bytes):
            for array in lists.values():
                total += array.nbytes
        return total

    def problem(self) -> str | None:
        """Return why no trace can hold this event, or None when one can."""
        if self.kind not in _KINDS:
            return f"unknown event kind {self.kind!r}, expected one of {', '.join(EVENT_KINDS)}"
        if not _fits(self.time_ns):
            return f"{self.kind} event: time_ns is {self.time_ns!r}, expected a 64-bit int"
        for name, value in self.scalars.items():
            expected = _SCALAR_TYPES.get(name)
            if expected is None:
                return f"{self.kind} event: no scalar column {name!r}"
            if not (_fits(value) if expected is int else isinstance(value, str)):
                return f"{self.kind} event: {name} is {value!r}, expected {expected.__name__}"
        for lists, known, dtype in ((self.ints, _INT_LISTS, _INT64), (self.bytes, _BYTE_LISTS, _UINT8)):
            array: Any
            for name, array in lists.items():
                if name not in known:
                    return f"{self.kind} event: no {dtype} list column {name!r}"
                if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype):
                    return f"{self.kind} event: {name} is {_describe(array)}, expected a 1-D {dtype} array"
        return None


def loss_event(*, lost_events: int, note: str, time_ns: int = 0) -> TraceEvent:
    """Return the event that says how many events are missing at its place (-1: unknown) and why."""
    return TraceEvent(kind="loss", time_ns=time_ns, scalars={"lost_events": lost_events, "note": note})


def _fits(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and INT64_MIN <= value <= INT64_MAX


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} with shape {list(value.shape)}"
    return type(value).__name__
