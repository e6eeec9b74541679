"""Merged violations back to one row a forward: exactly the rows, in exactly the order, that stepwise replay writes.

A merged row says since which event it was found and in how many forwards: the next forwards of its runner that hold its
request on its row (of a sweep's row: the next sweeps of the runner), so that the trace's batches say the rest. The trace is
read once, a batch of events at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ....kernels.arrays import BoolArray, Int64Array
from ....recorder.errors import TraceError
from ....recorder.trace.reader import TraceBatch
from ...run.streams import SegmentStream
from ..violations import PARQUET_ERRORS, VIOLATION_SCHEMA
from .turns import SWEEP_TAGS, are_writes, first_places, launch_ranks

# Rows that a table given has at most, but for a single event that has more.
MAX_ROWS: Final = 1 << 18
_SWEEP_MODE: Final = "sweep"


class ExpansionError(Exception):
    """A report's rows cannot be expanded with this trace; `str()` says why."""


def expand(violations: pa.Table, trace: Path | Sequence[Path]) -> pa.Table:
    """Return one row a violation and forward, as stepwise replay has them.

    `violations` are rows as in `violations.parquet`, merged or not, in the file's order; `trace` is the trace that they were
    found in, or its segments in their order. Raises `ExpansionError` if they were not found in this trace, `TraceError` if it
    cannot be read at all.
    """
    tables = list(expand_tables([violations], trace))
    return pa.concat_tables(tables) if tables else VIOLATION_SCHEMA.empty_table()


def read_violations(path: Path) -> Iterator[pa.Table]:
    """Yield a report's violations, a row group at a time; raise `ExpansionError` if the file is no report's or missing."""
    try:
        # Opened here, not by pyarrow, which takes no path that is not UTF-8.
        with path.open("rb") as file, pq.ParquetFile(file) as parquet:
            missing = sorted(set(VIOLATION_SCHEMA.names) - set(parquet.schema_arrow.names))
            if missing:
                raise ExpansionError(
                    f"{path}: expected the columns of a report, {', '.join(missing)} missing; replay the trace again"
                )
            for group in range(parquet.num_row_groups):
                yield parquet.read_row_group(group, columns=VIOLATION_SCHEMA.names)
    except FileNotFoundError:
        raise ExpansionError(f"{path}: missing; name the folder that kvcanary-replay wrote") from None
    except PARQUET_ERRORS as error:
        raise ExpansionError(f"{path}: no Parquet file of a report ({error}); replay the trace again") from None


def expand_tables(violations: Iterable[pa.Table], trace: Path | Sequence[Path]) -> Iterator[pa.Table]:
    """Yield the rows of `expand` in tables of about `MAX_ROWS`; see there. Memory is the rows that go on, and one table."""
    stream = SegmentStream([trace] if isinstance(trace, Path) else list(trace))
    source = _Source(violations)
    under_way = _UnderWay(launch_ranks(stream.header))
    for batch in stream.stream():
        if not isinstance(batch, TraceBatch):
            continue
        if source.ended and not len(under_way):
            return
        under_way.add(source.until(batch.first_event + batch.num_events), batch.first_event)
        if len(under_way):
            yield from under_way.step(batch)
    left = source.until(None)
    if left.num_rows or len(under_way):
        event = left["event"][0].as_py() if left.num_rows else under_way.first_event
        raise ExpansionError(
            f"a violation of event {event} was found in more forwards than the trace has: it is another trace, or was "
            "cut short since; replay it again"
        )


class _Source:
    """The merged rows, taken in their order by the events they begin in."""

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self._tables = iter(tables)
        self._left: pa.Table = VIOLATION_SCHEMA.empty_table()
        self.ended = False

    def until(self, event: int | None) -> pa.Table:
        """Return the rows that begin before an event, all for None, that were not yet returned."""
        parts = []
        while True:
            if not self._left.num_rows:
                table = next(self._tables, None)
                if table is None:
                    self.ended = True
                    break
                self._left = table.select(VIOLATION_SCHEMA.names).cast(VIOLATION_SCHEMA)
            events = self._left["event"].to_numpy()
            count = len(events) if event is None else int(np.searchsorted(events, event))
            parts.append(self._left.slice(0, count))
            self._left = self._left.slice(count)
            if self._left.num_rows:
                break
        return pa.concat_tables(parts) if parts else VIOLATION_SCHEMA.empty_table()


class _UnderWay:
    """The rows that begin in the batch at hand, and those that go on into it, in the file's order."""

    def __init__(self, ranks: Int64Array) -> None:
        self._ranks = ranks
        self._set(VIOLATION_SCHEMA.empty_table(), np.zeros(0, np.int64), np.zeros(0, np.bool_))

    def __len__(self) -> int:
        return self._table.num_rows

    @property
    def first_event(self) -> int:
        """The first event of the first row under way."""
        return int(self._numbers["event"][0])

    def add(self, new: pa.Table, first_event: int) -> None:
        """Add rows that begin in the batch that begins with `first_event`."""
        if not new.num_rows:
            return
        counts = new["num_forwards"].to_numpy()
        if int(new["event"][0].as_py()) < first_event or bool((counts < 1).any()):
            raise ExpansionError(
                f"a violation of event {new['event'][0].as_py()} comes before event {first_event}, or counts for no "
                "forward: the report is of another trace, or not in its order; replay the trace again"
            )
        self._set(
            pa.concat_tables([self._table, new]),
            np.concatenate([self._left, counts]),
            np.concatenate([self._begun, np.zeros(new.num_rows, np.bool_)]),
        )

    def step(self, batch: TraceBatch) -> Iterator[pa.Table]:
        """Yield what a batch's events have of these rows, in order; what ends in it is no longer under way."""
        seen = _Seen(batch, self._numbers, (self._left > 1) | self._begun)
        first, last = self._occurrences(seen)
        bounds = _bounds(seen.event, first, last, batch.num_events)
        for begin, end in pairwise(bounds):
            yield self._emit(seen, first, last, begin, end)
        counts = last - first
        left = self._left - counts
        ended = (left == 0) & (counts > 0)
        found = seen.forward[np.maximum(last - 1, 0)]
        wrong = ended & (self._numbers["last_forward"] != found) & (seen.own[np.maximum(last - 1, 0)] < 0)
        if wrong.any():
            raise ExpansionError(
                f"a violation of event {int(self._numbers['event'][wrong][0])} ends in another forward than the report "
                "says: it is of another trace; replay the trace again"
            )
        keep = np.flatnonzero(left > 0)
        self._set(self._table.take(pa.array(keep)), left[keep], np.ones(len(keep), np.bool_))

    def _set(self, table: pa.Table, left: Int64Array, begun: BoolArray) -> None:
        self._table, self._left, self._begun = table, left, begun
        self._numbers = {name: table[name].to_numpy().astype(np.int64, copy=False) for name in _NUMBERS}

    def _occurrences(self, seen: "_Seen") -> tuple[Int64Array, Int64Array]:
        """Return the stretch of `seen` that each row has in the batch, `[n] int64` each."""
        begins = np.where(self._begun, 0, self._numbers["event"] - seen.first_event)
        first = seen.find(np.arange(len(self)), begins)
        behind = seen.find(np.arange(len(self)), np.full(len(self), seen.num_events))
        last = np.minimum(behind, first + self._left)
        missing = ~self._begun & ((first == last) | (seen.event[first] != begins))
        if missing.any():
            raise ExpansionError(
                f"event {int(self._numbers['event'][missing][0])} of the trace does not hold the request of a violation "
                "found there: the report is of another trace; replay the trace again"
            )
        return first, last

    def _emit(self, seen: "_Seen", first: Int64Array, last: Int64Array, begin: int, end: int) -> pa.Table:
        """Return the rows of the batch's events `begin` to `end - 1`, in order."""
        first = np.maximum(first, np.minimum(seen.find(np.arange(len(self)), np.full(len(self), begin)), last))
        last = np.minimum(last, np.maximum(seen.find(np.arange(len(self)), np.full(len(self), end)), first))
        counts = last - first
        rows = np.repeat(np.arange(len(self)), counts)
        at = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + first[rows]
        events = seen.event[at]
        goes_on = events + seen.first_event != self._numbers["event"][rows]
        order = np.lexsort((*reversed(self._order(seen, rows, events, goes_on)), events))
        rows, at, goes_on = rows[order], at[order], goes_on[order]
        table = self._table.take(pa.array(rows))
        new: dict[str, Any] = {"event": seen.event[at] + seen.first_event, "num_forwards": np.ones(len(at), np.int64)}
        own = {name: table[name].to_numpy() for name in ("forward", "time_ns")}
        new["forward"] = np.where(goes_on, seen.forward[at], own["forward"])
        new["time_ns"] = np.where(goes_on, seen.time_ns[at], own["time_ns"])
        new["first_forward"] = new["last_forward"] = new["forward"]
        modes = pa.array([*seen.modes, _SWEEP_MODE])
        chosen = np.where(seen.is_sweep[at], len(seen.modes), seen.event[at])
        new["mode"] = pa.array(modes.take(pa.array(chosen)))
        for name, values in new.items():
            column = table.schema.get_field_index(name)
            table = table.set_column(column, table.schema.field(column), pa.array(values))
        return table

    def _order(
        self, seen: "_Seen", rows: Int64Array, events: Int64Array, goes_on: BoolArray
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Return what rows of one event are sorted by: launch, place in the batch, position, number in the file.

        In a launch in which every row begins the file's order is theirs.
        """
        numbers = {name: values[rows] for name, values in self._numbers.items()}
        writes = are_writes(numbers["fail_reason_bits"])
        rank = self._ranks[numbers["group"], numbers["launch_tag"], writes.astype(np.int64)]
        place, position = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        launch = events * (int(self._ranks.max()) + 1) + rank
        mixed = np.flatnonzero(np.isin(launch, np.unique(launch[goes_on])))
        if len(mixed):
            mine = {name: values[mixed] for name, values in numbers.items()}
            place[mixed] = seen.places(events[mixed], mine)
            position[mixed] = np.where(SWEEP_TAGS[mine["launch_tag"]], 0, mine["expected_position"])
        return rank, place, position, rows


_NUMBERS: Final = (
    *("event", "last_forward", "launch_tag", "fail_reason_bits", "runner", "group", "request_id", "req_pool_idx"),
    *("expected_position", "slot"),
)


class _Seen:
    """Where a batch of events holds the requests of rows: occurrences `[m]`, sorted by request and then by event.

    `event` is counted from the batch's first; a row that stands for one forward has an occurrence of its own, `own`
    being its place among the rows, and needs nothing of the trace.
    """

    def __init__(self, batch: TraceBatch, rows: dict[str, Int64Array], lasting: BoolArray) -> None:
        self._batch = batch
        self.first_event, self.num_events = batch.first_event, batch.num_events
        self.modes = batch.strings("mode")
        kinds = np.array(batch.kinds)
        self._sweep_events = np.flatnonzero(kinds == "sweep")
        self._forward_events = np.flatnonzero(kinds == "forward")
        sweeps = SWEEP_TAGS[rows["launch_tag"]]
        keys = np.stack([rows["runner"], rows["request_id"], rows["req_pool_idx"], sweeps], axis=1)
        wanted, self._code = np.zeros((0, 4), np.int64), np.zeros(len(sweeps), np.int64)
        if lasting.any():
            wanted, inverse = np.unique(keys[lasting], axis=0, return_inverse=True)
            self._code[lasting] = inverse.reshape(-1)
        single = np.flatnonzero(~lasting)
        self._code[single] = len(wanted) + np.arange(len(single))
        code, event = self._held(wanted)
        own_event = rows["event"][single] - batch.first_event
        order = np.lexsort((event, code))
        # Behind all others stands one that is nobody's, so that there is always one to look at.
        self.event = np.concatenate([event[order], own_event, np.zeros(1, np.int64)])
        code = np.concatenate([code[order], self._code[single], np.full(1, len(wanted) + len(single))])
        self.own = np.concatenate([np.full(len(event), -1), single, np.full(1, -1)])
        self._sorted = code * (self.num_events + 1) + self.event
        inside = np.clip(self.event, 0, max(self.num_events - 1, 0))
        self.forward = batch.scalar_ints("forward")[inside]
        self.time_ns = batch.scalar_ints("time_ns")[inside]
        self.is_sweep = (kinds == "sweep")[inside]

    def find(self, rows: Int64Array, events: Int64Array) -> Int64Array:
        """Return the first occurrence of each row's request in an event or behind it, or where it would stand."""
        found: Int64Array = np.searchsorted(self._sorted, self._code[rows] * (self.num_events + 1) + events)
        return found

    def places(self, events: Int64Array, rows: dict[str, Int64Array]) -> Int64Array:
        """Return the place of rows in the batches of requests, or in the lists of sweeps, of events, `[n] int64`."""
        found = np.zeros(len(events), np.int64)
        sweeps = np.isin(events, self._sweep_events)
        for event in np.unique(events[sweeps]).tolist():
            at = events == event
            view = self._batch.event(event)
            columns = [view.ints(f"sweep_{name}") for name in ("group", "slot", "position")]
            asked = [rows[name][at] for name in ("group", "slot", "expected_position")]
            found[at] = _first_match(columns, asked)
        forwards = np.flatnonzero(~sweeps)
        if len(forwards):
            values, offsets = self._batch.values("req_pool_indices"), self._batch.offsets("req_pool_indices")
            of_event = np.repeat(np.arange(self.num_events), np.diff(offsets))
            used = np.isin(of_event, events[forwards])
            match = _first_match([of_event[used], values[used]], [events[forwards], rows["req_pool_idx"][forwards]])
            found[forwards] = match
        return found

    def _held(self, wanted: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return which wanted requests (or sweeps) each event holds, once each: code and event, `[m] int64` each."""
        if not len(wanted):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        batch = self._batch
        runners = batch.scalar_ints("runner")
        rows, offsets = batch.values("req_pool_indices"), batch.offsets("req_pool_indices")
        ids, id_offsets = batch.values("request_ids"), batch.offsets("request_ids")
        lengths, id_lengths = np.diff(offsets), np.diff(id_offsets)
        usable = np.zeros(self.num_events, np.bool_)
        usable[self._forward_events] = True
        usable &= lengths == id_lengths  # an event that contradicts itself was not replayed
        event = np.repeat(np.arange(self.num_events), lengths)
        chosen = usable[event] & np.isin(rows, wanted[:, 2])
        event, rows = event[chosen], rows[chosen]
        ids = ids[np.flatnonzero(chosen) - offsets[event] + id_offsets[event]]
        found = np.stack([runners[event], ids, rows, np.zeros(len(rows), np.int64)], axis=1)
        sweeps = self._sweep_events
        none = np.full(len(sweeps), -1)
        found = np.concatenate([found, np.stack([runners[sweeps], none, none, np.ones_like(none)], axis=1)])
        event = np.concatenate([event, sweeps])
        joined = np.concatenate([wanted, found])
        first = first_places(joined)
        known = first[len(wanted) :] < len(wanted)
        pairs = np.unique(np.stack([first[len(wanted) :][known], event[known]], axis=1), axis=0)
        return pairs[:, 0], pairs[:, 1]


def _first_match(columns: Sequence[Int64Array], asked: Sequence[Int64Array]) -> Int64Array:
    """Return the first place where all columns are as asked, `[n] int64`, counted from 0."""
    found = first_places(np.concatenate([np.stack(columns, axis=1), np.stack(asked, axis=1)]))
    return found[len(columns[0]) :]


def _bounds(events: Int64Array, first: Int64Array, last: Int64Array, num_events: int) -> list[int]:
    """Return where to cut a batch's events, so that the rows between two cuts are `MAX_ROWS` or one event's."""
    change = np.zeros(len(events) + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last, -1)
    rows = np.bincount(events, weights=np.cumsum(change)[:-1], minlength=num_events).astype(np.int64)
    bounds, held = [0], 0
    for event in np.flatnonzero(rows).tolist():
        if held and held + int(rows[event]) > MAX_ROWS:
            bounds.append(event)
            held = 0
        held += int(rows[event])
    return [*bounds, num_events] if held else bounds


__all__ = ["ExpansionError", "TraceError", "expand", "expand_tables", "read_violations"]
