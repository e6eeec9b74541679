"""A whole, checked batch of events as numpy (or torch) arrays, without a loop over rows."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from .checksum import column_forms
from .schema import ADDED, BYTE_LISTS, FAILED, SCALARS, trace_schema

if TYPE_CHECKING:
    import torch

CUT: Final = "cut"
LIVE: Final = "live"
_NO_INTS: Final = np.empty(0, np.int64)
_NO_BYTES: Final = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False, repr=False)
class TraceBatch:
    """Events `first_event` to `first_event + num_events - 1`. Arrays are read-only views of what was read and checked:
    never write to them. They stay good after the reader is closed, whatever becomes of the file. `end_byte` is the
    batch's end in the file, for progress bars. `engine_events` is how many of the engine's events the recording holds
    up to the batch's end, None if it does not say. If `unread_at` is not -1, the values of `kv_bytes` were not read, and
    lie in the file from there on.
    """

    record_batch: pa.RecordBatch
    _: KW_ONLY
    first_event: int
    end_byte: int = 0
    buffer_bytes: Int64Array | None = None  # what each buffer takes in the file
    engine_events: int | None = None
    unread_at: int = -1
    empty: frozenset[str] = frozenset()  # list columns that are known to have no values: most of them, as a rule
    num_events: int = field(init=False)
    _cache: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.num_events = self.record_batch.num_rows

    def __len__(self) -> int:
        return self.num_events

    def __iter__(self) -> "Iterator[EventView]":
        return (EventView(self, index) for index in range(self.num_events))

    def event(self, index: int) -> "EventView":
        """Return the event in row `index`, 0 to num_events - 1; raise `IndexError` for another."""
        if not 0 <= index < self.num_events:
            raise IndexError(f"event {index} of a batch of {self.num_events}")
        return EventView(self, index)

    @property
    def kinds(self) -> list[str]:
        """The kind of each event."""
        return self.strings("kind")

    @property
    def failed(self) -> BoolArray:
        """Which events are forwards that failed, `[num_events] bool`: what they wrote is unknown."""
        status = self.strings("status")
        if FAILED not in status:
            return np.zeros(self.num_events, np.bool_)
        pairs = zip(status, self.kinds, strict=True)
        return np.array([one == FAILED and kind == "forward" for one, kind in pairs], np.bool_)

    def scalar_ints(self, name: str) -> Int64Array:
        """Return an int64 scalar column, [num_events] int64."""
        if name not in self._cache:
            self._cache[name] = self._column(name).to_numpy(zero_copy_only=True)
        return self._cache[name]

    def strings(self, name: str) -> list[str]:
        """Return a text column, one str an event."""
        if name not in self._cache:
            self._cache[name] = self._column(name).to_pylist()
        return self._cache[name]

    def values(self, name: str) -> npt.NDArray[Any]:
        """Return a list column's flat values, [offsets[-1]] int64 or uint8."""
        return self._list(name)[0]

    def offsets(self, name: str) -> Int64Array:
        """Return a list column's exclusive prefix sums, [num_events + 1] int64; the first is 0."""
        return self._list(name)[1]

    def stored_bytes(self) -> dict[str, int]:
        """Return the bytes that each column takes in the file, after compression."""
        if self.buffer_bytes is None:
            return {}
        schema = self.record_batch.schema
        ends = np.cumsum([form.num_buffers for form in column_forms(schema)])
        sums = (int(part.sum()) for part in np.split(self.buffer_bytes, ends[:-1]))
        return dict(zip(schema.names, sums, strict=True))

    def to_torch(self, name: str) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return a list column as torch tensors `(values, offsets)`, int64 or uint8, and int64. They share memory with
        the batch: never write to them.
        """
        import torch

        values, offsets = self._list(name)
        # torch warns about read-only numpy memory; DLPack from Arrow shares the same memory without a copy.
        return torch.from_dlpack(pa.array(values)), torch.from_dlpack(pa.array(offsets))

    def _column(self, name: str) -> pa.Array:
        places: dict[str, int] | None = self._cache.get("")
        if places is None:
            places = self._cache[""] = {one: at for at, one in enumerate(self.record_batch.schema.names)}
        if name in ADDED and name not in places:
            default: Any = SCALARS[name][1] if name in SCALARS else []  # from before there was such a column
            return pa.array([default] * self.num_events, trace_schema().field(name).type)
        return self.record_batch.column(places[name])

    def _list(self, name: str) -> tuple[npt.NDArray[Any], Int64Array]:
        found: tuple[npt.NDArray[Any], Int64Array] | None = self._cache.get(name)
        if found is None and name in self.empty:
            offsets = np.zeros(self.num_events + 1, np.int64)
            offsets.flags.writeable = False
            found = self._cache[name] = (_NO_BYTES if name in BYTE_LISTS else _NO_INTS, offsets)
        if found is None:
            column = self._column(name)
            offsets = np.zeros(1, np.int64)  # Arrow allows an empty column to come without its single offset
            if len(column):
                offsets = column.offsets.to_numpy(zero_copy_only=True).astype(np.int64, copy=False)
            first, last = int(offsets[0]), int(offsets[-1])
            values = column.values.to_numpy(zero_copy_only=True)[first:last]
            if first:
                offsets = offsets - first
            offsets.flags.writeable = False
            found = self._cache[name] = (values, offsets)
        return found


@dataclass(slots=True, eq=False, repr=False)
class EventView:
    """One event of a batch; cheap, and good for as long as the batch is kept."""

    batch: TraceBatch
    index: int

    @property
    def number(self) -> int:
        """The event's number in its trace."""
        return self.batch.first_event + self.index

    @property
    def kind(self) -> str:
        """The event's kind, one of `EVENT_KINDS` or one that a newer minor version added."""
        return self.batch.kinds[self.index]

    @property
    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return int(self.batch.scalar_ints("time_ns")[self.index])

    def scalar(self, name: str) -> Any:
        """Return a scalar column's value, int or str."""
        if isinstance(SCALARS[name][1], str):
            return self.batch.strings(name)[self.index]
        return int(self.batch.scalar_ints(name)[self.index])

    def ints(self, name: str) -> Int64Array:
        """Return an int64 list column's values of this event, 1-D int64."""
        values, offsets = self.batch._list(name)
        return values[offsets[self.index] : offsets[self.index + 1]]

    def bytes(self, name: str) -> ByteArray:
        """Return a uint8 list column's values of this event, 1-D uint8."""
        values, offsets = self.batch._list(name)
        return values[offsets[self.index] : offsets[self.index + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGap:
    """Something between two batches, or at the end, that could not be given.

    `after_event` is the last event given before it (-1: none); `missing_events` is how many are missing, None when
    nobody can know, 0 when no event is (a lost footer, a batch given twice). `kind` is "torn" (the file ends too
    early), "damaged" or "numbering" (whole batches, but numbers that do not follow one another). `cause` is a
    whole sentence for the user, `advice` what to do about it, or empty. `ends` is CUT if the recording's process died there
    (what is missing was never recorded, or is lost), LIVE if it is being written, and goes on; else empty.
    """

    after_event: int
    missing_events: int | None
    kind: str
    cause: str
    advice: str = ""
    ends: str = ""

    @property
    def reason(self) -> str:
        """The cause and, behind it, what to do."""
        return f"{self.cause}; {self.advice}" if self.advice else self.cause
