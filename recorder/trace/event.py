"""Events on their way into a trace: what the recorder fills, and the record batches that the writer makes of them."""

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...kernels.arrays import ByteArray, Int64Array
from . import schema as keys
from .checksum import batch_crc32c, column_forms, text_crc32c
from .header import TraceHeader
from .schema import BYTE_LISTS, EVENT_KINDS, INT_LISTS, SCALARS, trace_schema

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


class TraceEvent(msgspec.Struct, kw_only=True, gc=False):
    """One event; the writer gives it its number. `scalars` holds the scalar columns that differ from their defaults
    (without `event` and `kind`), `ints` the non-empty int64 list columns as 1-D int64 arrays, `bytes` the non-empty
    uint8 list columns as 1-D uint8 arrays. Whoever hands the event to a writer hands the arrays over with it: they are
    read later, in another thread. What waits in a queue is not seen by the collector of garbage, whose next round it
    would bring nearer: a round looks at all that an engine has loaded.
    """

    rows: ClassVar[int] = 1  # of the trace

    kind: str
    time_ns: int = 0
    scalars: dict[str, int | str] = msgspec.field(default_factory=dict)
    ints: dict[str, Int64Array] = msgspec.field(default_factory=dict)
    bytes: dict[str, ByteArray] = msgspec.field(default_factory=dict)

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
                    shape = f" with shape {list(array.shape)}" if isinstance(array, np.ndarray) else ""
                    came = f"{array.dtype}{shape}" if shape else type(array).__name__
                    return f"{self.kind} event: {name} is {came}, expected a 1-D {dtype} array"
        return None


class EventRows(msgspec.Struct, kw_only=True, gc=False):
    """Several events of one kind at once, `n` of them: what happens to many requests in one step. An event each would take
    several times as long to make, to check and to encode. `scalars` has a column's `[n] int64`, `n` texts, or one text for
    all; `ints` the values of all rows, one after another, and how many each row has, `[n] int64`.
    """

    kind: str
    times_ns: Int64Array  # [n], ascending
    scalars: dict[str, Int64Array | list[str] | str]
    ints: dict[str, tuple[Int64Array, Int64Array]]

    @property
    def rows(self) -> int:
        """How many events these are."""
        return len(self.times_ns)

    @property
    def time_ns(self) -> int:
        """The time of the last one."""
        return int(self.times_ns[-1])

    @property
    def nbytes(self) -> int:
        """As `TraceEvent.nbytes`, of all."""
        total = ROW_BYTES * self.rows
        for value in self.scalars.values():
            if isinstance(value, str):
                total += 4 * len(value) * self.rows
            elif isinstance(value, list):
                total += 4 * sum(map(len, value))
        return total + sum(values.nbytes for values, _ in self.ints.values())

    def problem(self) -> str | None:
        """As `TraceEvent.problem`, of all."""
        for name, value in self.scalars.items():
            if name not in _SCALAR_TYPES:
                return f"{self.kind} events: no scalar column {name!r}"
            if not isinstance(value, str) and len(value) != self.rows:
                return f"{self.kind} events: {len(value)} values of {name}, and {self.rows} events"
        for name, parts in self.ints.items():
            if name not in _INT_LISTS or any(part.ndim != 1 or part.dtype != _INT64 for part in parts):
                return f"{self.kind} events: {name} is no 1-D int64 list column"
            values, lens = parts
            if len(lens) != self.rows or lens.min(initial=0) < 0 or lens.sum() != len(values):
                return f"{self.kind} events: {name} is not divided among {self.rows} events"
        return None if self.kind in _KINDS else f"unknown event kind {self.kind!r}"

    def events(self) -> list[TraceEvent]:
        """Return them one by one."""
        columns: list[tuple[str, Sequence[int] | Sequence[str]]] = []
        for name, given in self.scalars.items():
            each = [given] * self.rows if isinstance(given, str) else given
            columns.append((name, each.tolist() if isinstance(each, np.ndarray) else each))
        lists = {name: np.split(values, np.cumsum(lens)[:-1]) for name, (values, lens) in self.ints.items()}
        return [
            TraceEvent(
                kind=self.kind,
                time_ns=int(time_ns),
                scalars={name: each[row] for name, each in columns},
                ints={name: parts[row] for name, parts in lists.items() if parts[row].size},
                bytes=NO_LISTS,
            )
            for row, time_ns in enumerate(self.times_ns)
        ]


AnyEvent = TraceEvent | EventRows


def num_rows(events: Iterable[AnyEvent]) -> int:
    """Return how many events these are."""
    return sum([event.rows for event in events])


def loss_event(*, lost_events: int, note: str, time_ns: int = 0) -> TraceEvent:
    """Return the event that says how many events are missing at its place (-1: unknown) and why."""
    return TraceEvent(kind="loss", time_ns=time_ns, scalars={"lost_events": lost_events, "note": note})


def _fits(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and INT64_MIN <= value <= INT64_MAX


def header_schema(header: TraceHeader) -> pa.Schema:
    """Return the trace schema with the header and its CRC in the metadata."""
    text = header.to_json().encode("ascii")
    return trace_schema().with_metadata({keys.HEADER_KEY: text, keys.HEADER_CRC_KEY: b"%d" % text_crc32c(text)})


def encode_events(
    events: Sequence[AnyEvent], first_event: int, schema: pa.Schema, breathe: Callable[[], None] = lambda: None
) -> pa.RecordBatch:
    """Return one record batch of `events`, numbered from `first_event`; every event must have passed `problem()`. A
    file's own schema may have more columns, of a newer minor version, or fewer, of an older one. `breathe` is called
    between two events, and two columns: in an engine's process others have more urgent things to do.
    """
    count = num_rows(events)
    scalars: dict[str, Any] = {
        name: np.full(count, default, np.int64) if pa.types.is_int64(kind) else [default] * count
        for name, (kind, default) in SCALARS.items()
    }
    scalars["event"] = np.arange(first_event, first_event + count, dtype=np.int64)
    lists: dict[str, tuple[Int64Array, list[npt.NDArray[Any]]]] = {}  # how many each row has, and the values
    behind = 0
    for event in events:
        breathe()
        row, behind = behind, behind + event.rows
        if isinstance(event, EventRows):
            _encode_rows(event, slice(row, behind), scalars, lists)
            continue
        scalars["kind"][row] = event.kind
        scalars["time_ns"][row] = event.time_ns
        for name, value in event.scalars.items():
            scalars[name][row] = value
        for given in (event.ints, event.bytes):
            for name, array in given.items():
                found = lists.get(name)
                if found is None:
                    found = lists[name] = np.zeros(count, np.int64), []
                found[0][row] = len(array)
                found[1].append(array)
    columns, nothing = [], (np.zeros(count, np.int64), list[npt.NDArray[Any]]())
    for column in schema:
        breathe()
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            columns.append(_list_array(column, *lists.get(column.name, nothing)))
        elif pa.types.is_string(column.type):
            columns.append(_text_array(scalars.get(column.name, [""] * count)))
        else:
            columns.append(pa.array(scalars.get(column.name, np.zeros(count, np.int64)), column.type))
    return pa.record_batch(columns, schema=schema)


def _encode_rows(
    event: EventRows, mine: slice, scalars: dict[str, Any], lists: dict[str, tuple[Int64Array, list[npt.NDArray[Any]]]]
) -> None:
    """Put events into the rows of a batch that are theirs."""
    rows, count = event.rows, len(scalars["time_ns"])
    scalars["kind"][mine] = [event.kind] * rows
    scalars["time_ns"][mine] = event.times_ns
    for name, given in event.scalars.items():
        scalars[name][mine] = [given] * rows if isinstance(given, str) else given
    for name, (values, lens) in event.ints.items():
        found = lists.setdefault(name, (np.zeros(count, np.int64), []))
        found[0][mine] = lens
        found[1].append(values)


def batch_metadata(batch: pa.RecordBatch, first_event: int, engine_events: int | None = None) -> dict[bytes, bytes]:
    """Return the custom metadata of a batch: first event number, event count and CRC, as decimal ASCII. `engine_events`
    is how many of the engine's events are in the recording up to this batch's end, from which the reader knows where
    its tail begins. Raises `ValueError` for a column type that no trace of this major version has.
    """
    known = {} if engine_events is None else {keys.ENGINE_EVENTS_KEY: b"%d" % engine_events}
    return {
        keys.FIRST_EVENT_KEY: b"%d" % first_event,
        keys.NUM_EVENTS_KEY: b"%d" % batch.num_rows,
        keys.CRC_KEY: b"%d" % batch_crc32c(batch, first_event, column_forms(batch.schema)),
        **known,
    }


def _text_array(values: list[str]) -> pa.Array:
    try:
        return pa.array(values, pa.utf8())
    except UnicodeEncodeError:  # lone surrogates, say from a request id that was decoded with surrogateescape
        return pa.array([value.encode("utf-8", "replace").decode("utf-8") for value in values], pa.utf8())


def _list_array(field: pa.Field, lengths: Int64Array, parts: list[npt.NDArray[Any]]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    if parts:
        np.cumsum(lengths, out=offsets[1:])
    values = pa.array(np.concatenate(parts)) if parts else pa.array([], field.type.value_type)
    if pa.types.is_large_list(field.type):
        return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=field.type)
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"column {field.name} would hold {offsets[-1]} values in one batch, expected less than 2^31")
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values, type=field.type)
