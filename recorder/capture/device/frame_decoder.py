"""From frames to events: which forwards the trace can hold, and what it says of the others."""

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ....kernels.arrays import ByteArray, Int64Array
from ....kernels.capture.changes import RowRuns, cells_to_runs
from ....kernels.capture.frames import STATE_BEFORE, RunnerOnDevice
from ...trace.header import StateTable, TraceHeader
from ..forward_event import lut_columns, table_columns, truth_columns
from ..forward_input import CopiedForward, OutputRead
from ..host_arrays import ragged_index, wrapped
from ..privacy import IdentityValue, chosen_identity
from ..recorder import Recorder
from .capture import DeviceCapture
from .forward import ForwardPart, FrameInFlight, TokenSource, tokens_of
from .frame_reader import Fetched, Frame, FrameReader

LOST: Final = "something that happened has been lost"
_NOTHING = np.empty(0, np.int64)
_NO_CELLS = np.empty((0, 3), np.int64)


class _Ahead(NamedTuple):
    """Requests of several forwards, one behind the other, and the tokens that they have by the last of them."""

    truth: Sequence[TokenSource]
    rows: bytes
    chosen: Int64Array  # [n] places of those with tokens
    sources: list[TokenSource]  # n
    starts: Int64Array  # [n] first position of the tokens found
    ends: Int64Array  # [n] behind the last
    before: Int64Array  # [n] where a request's tokens begin in `found`, less `starts`
    found: Int64Array

    def tokens(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
        """As `tokens_of` the sources."""
        if (starts < self.starts).any() or (stops > self.ends).any():
            return tokens_of(self.sources, starts, stops)
        counts, first = np.maximum(stops - starts, 0), self.before + starts
        return self.found[first if (counts == 1).all() else ragged_index(first, counts)], counts


class RecordedTruth:
    """What of each row's tokens the trace has: their request, and how many.

    A row that is another request's, or a request that has fewer tokens than before, is recorded from the beginning. No
    request is kept alive: its tokens may be many, and its row may stay unused for long.
    """

    def __init__(self, table: StateTable | None) -> None:
        self._table = table
        self._sources: dict[int, weakref.ref[TokenSource]] = {}
        self._counts = np.zeros(0 if table is None else table.rows, np.int64)
        self._ahead: _Ahead | None = None

    def changes(
        self,
        rows: Int64Array,
        truth: Sequence[TokenSource] | None,
        lens: Sequence[int] | Int64Array,
        *,
        last_lens: Sequence[int] | Int64Array | None = None,
    ) -> dict[str, Int64Array]:
        """Return a forward's truth columns, its tokens as they are; nothing if the engine does not know them.

        `rows` are `[bs]`, `truth` and `lens` at most as many: the requests, and how many tokens each had. One that has fewer
        by now is recorded with those. `last_lens` are those of a later forward with the same `truth` that will come here, too:
        tokens up to there are asked for once, and kept until then.
        """
        if truth is None or self._table is None:
            return {}
        truth_lens = np.zeros(rows.size, np.int64)
        truth_lens[: len(lens)] = lens
        ahead = self._ahead
        if ahead is None or ahead.truth is not truth or ahead.rows != rows.tobytes():
            ahead = self._look_ahead(rows, truth, lens, lens if last_lens is None else last_lens)
        self._ahead = None if last_lens is None else ahead
        chosen = ahead.chosen
        where, had = rows[chosen], truth_lens[chosen]
        starts, stops = self._counts[where], np.minimum(had, self._table.width)
        starts[starts > had] = 0
        found, counts = ahead.tokens(starts, stops)
        fewer = starts + counts < stops  # they no longer have so many
        if fewer.any():
            truth_lens[chosen[fewer]] = (starts + counts)[fewer]
        self._counts[where] = truth_lens[chosen]
        runs = RowRuns(where, starts, counts, found)
        if not counts.all():
            runs = RowRuns(where[counts > 0], starts[counts > 0], counts[counts > 0], found)
        return truth_columns(truth_lens, runs)

    def _look_ahead(self, rows: Int64Array, truth: Sequence[TokenSource], lens: Any, last_lens: Any) -> _Ahead:
        rows_there, width = self._counts.size, 0 if self._table is None else self._table.width
        chosen = np.flatnonzero((rows > 0) & (rows < rows_there))
        chosen = chosen[chosen < min(len(lens), len(truth), len(last_lens))]
        sources = [truth[r] for r in chosen.tolist()]
        for row, source in zip(rows[chosen].tolist(), sources, strict=True):
            known = self._sources.get(row)
            if known is None or known() is not source:
                self._sources[row] = weakref.ref(source)
                self._counts[row] = 0
        starts = self._counts[rows[chosen]]
        starts[starts > np.asarray(lens, np.int64)[chosen]] = 0
        found, counts = tokens_of(sources, starts, np.minimum(np.asarray(last_lens, np.int64)[chosen], width))
        before = np.cumsum(counts) - counts - starts
        return _Ahead(truth, rows.tobytes(), chosen, sources, starts, starts + counts, before, found)

    def forget(self) -> None:
        """Record everything anew."""
        self._sources.clear()
        self._ahead = None


class TableChanges:
    """Keeps what could not be recorded with its own forward, and a copy of the full-to-SWA tables."""

    def __init__(self, header: TraceHeader, runners: Sequence[RunnerOnDevice]) -> None:
        self._header = header
        self._runners = runners
        self._luts = [np.zeros(length, np.int64) for length in header.lut_lens]
        self._table_cells: list[list[Int64Array]] = [[] for _ in header.tables]
        self._lut_cells: list[Int64Array] = []

    def columns(self, runner: int, frame: Frame) -> dict[str, Int64Array]:
        """Return the columns of everything that is not yet recorded, this forward's changes included."""
        self._take_luts(runner, frame)
        for table, found in zip(self._runners[runner].tables, frame.table_changes, strict=True):
            self._table_cells[table.number].append(found)
        columns: dict[str, Int64Array] = {}
        if any(len(part) for cells in self._table_cells for part in cells):
            columns |= table_columns([cells_to_runs(*_latest(cells).T) for cells in self._table_cells])
        if any(map(len, self._lut_cells)):
            columns |= lut_columns([cells_to_runs(*_latest(self._lut_cells).T)])
        for cells in self._table_cells:
            cells.clear()
        self._lut_cells.clear()
        return columns

    def keep(self, runner: int, frame: Frame) -> None:
        """Keep the changes of a forward that is not recorded, and what it itself put into the table."""
        self._take_luts(runner, frame)
        for table, cells in zip(self._runners[runner].tables, frame.table_changes, strict=True):
            self._table_cells[table.number].append(cells)
        lens = frame.forward.new_lens
        lens = np.minimum(lens, np.maximum(frame.slots.shape[1] - (np.cumsum(lens) - lens), 0))
        self.keep_written(runner, frame, np.zeros_like(lens), lens)

    def keep_written(
        self, runner: int, frame: Frame, first: Int64Array, lens: Int64Array, *, lowest: int | None = None
    ) -> None:
        """Keep what a forward put into the table for each request's tokens from `first` to before `lens`, `[bs]` each.

        Slots below the `lowest` are left out.
        """
        forward, more = frame.forward, np.maximum(lens - first, 0)
        rows, positions = np.repeat(forward.rows, more), ragged_index(forward.prefix_lens + first, more)
        tokens = ragged_index(np.cumsum(lens) - lens + first, more)
        for (number, *_), slots in zip(self._runners[runner].tables, frame.slots, strict=True):
            written = np.stack((rows, positions, wrapped(slots[tokens])), axis=1)
            shape = self._header.tables[number]
            inside = (rows > 0) & (rows < shape.rows) & (positions >= 0) & (positions < shape.width)
            if lowest is not None:
                inside &= written[:, 2] >= lowest
            self._table_cells[number].append(written[inside])

    def forget(self) -> None:
        """Start anew, as the device does after a reset."""
        for lut in self._luts:
            lut.fill(0)
        for cells in self._table_cells:
            cells.clear()
        self._lut_cells.clear()

    def in_group(self, group: int, slots: Int64Array) -> Int64Array:
        """Return slots in a group's own numbering, -1 if its full-to-SWA table has no entry for one."""
        lut = self._header.groups[group].lut
        if lut < 0:
            return slots
        inside = (slots >= 0) & (slots < self._luts[lut].size)
        return np.where(inside, self._luts[lut][np.where(inside, slots, 0)], -1)

    def _take_luts(self, runner: int, frame: Frame) -> None:
        for place, lut in enumerate(self._runners[runner].luts):
            cells = frame.lut_changes[frame.lut_changes[:, 0] == place]
            cells[:, 0] = lut.number
            self._luts[lut.number][cells[:, 1]] = cells[:, 2]
            self._lut_cells.append(cells)


def _latest(parts: Sequence[Int64Array]) -> Int64Array:
    """Return entries of two keys and a value ordered by their keys, each pair of keys once, with its last value."""
    cells = np.concatenate(parts) if parts else _NO_CELLS
    cells = cells[np.lexsort((cells[:, 1], cells[:, 0]))]
    last = np.ones(len(cells), np.bool_)
    last[:-1] = (cells[1:, :2] != cells[:-1, :2]).any(axis=1)
    return cells[last]


class FrameDecoder:
    """Puts forwards into the trace once their frames are complete; for the recorder's own thread."""

    def __init__(self, recorder: Recorder, capture: DeviceCapture) -> None:
        self.follows = True  # a frame's changes continue what the trace has
        # They do not; the trace says that nothing before is to be relied on, and has had no forward since.
        self.loss_recorded = False
        self.before_each: Callable[[CopiedForward], None] = lambda _: None
        self.breathe: Callable[[], None] = lambda: None  # called often
        self.reader = FrameReader(capture)
        self.fetched: deque[Fetched] = deque()  # frames that are complete, in order
        self._recorder = recorder
        self._capture = capture
        self._header = recorder.header
        self._truth = RecordedTruth(self._header.truth_table)
        runners = capture.shadows.runners
        self._changes = TableChanges(self._header, runners)
        self._why, self._why_status = LOST, ""

    @property
    def continues(self) -> bool:
        """Whether what is recorded now can be compared with what the trace has."""
        return self.follows or self.loss_recorded

    def fetch(self, frames: Sequence[FrameInFlight]) -> int:
        """Wait until the first of the frames in flight is complete, and fetch it and what else is; return how many."""
        self.fetched.extend(found := self.reader.fetch(frames))
        self.breathe()
        return len(found)

    def decode(self, in_flight: FrameInFlight, time_ns: int) -> None:
        """Put a forward, the first that is `fetched`, into the trace; or count it as lost."""
        try:
            frame = self.reader.read(self.fetched.popleft(), time_ns)
        finally:
            self._capture.release(in_flight)
        self.breathe()
        outputs = None
        if in_flight.probed and self._capture.probe is not None:
            outputs = self._capture.probe.read(in_flight.probed, frame.forward, self.breathe)
        for (record, _), values in zip(in_flight.carried, frame.carried, strict=True):
            record(values)
        if in_flight.fresh:
            if not self.loss_recorded:
                self.record_loss(self._why, self._why_status)
            self.follows = self.loss_recorded
            if not self.follows:
                self._capture.reset()
        if not self.follows:
            self._recorder.drop_captured(in_flight.last, {})
        elif not frame.complete:
            # What did not fit is in the next frame that has room; until then nothing can be judged by it.
            self._changes.keep(in_flight.runner, frame)
            self._recorder.drop_captured(in_flight.last, self._lost_slots(in_flight, frame))
            self._capture.catch_up(still=True)
        elif self._put(in_flight, frame, outputs):
            self.loss_recorded = False
            self._capture.catch_up(still=False)
        else:  # pass over what is in flight; the next forward of the engine holds everything anew
            self.record_loss("the writer's queue was full")
            self._capture.reset()

    def record_due_loss(self) -> None:
        """Before anything else is recorded: record that something is missing, if there was no room to do so."""
        if not self.continues:
            self.record_loss(self._why, self._why_status)

    def record_loss(self, note: str, status: str = "") -> None:
        """Record that something is missing, nobody knows what; what is in flight does not continue from there."""
        self._truth.forget()
        self._changes.forget()
        self.follows = False
        self._why, self._why_status = note, status
        self.loss_recorded = self._recorder.start_over(note, tables=False, status=status)

    def _put(self, in_flight: FrameInFlight, frame: Frame, outputs: Sequence[OutputRead] | None) -> bool:
        forward, requests = frame.forward, in_flight.requests
        runner = self._capture.shadows.runners[in_flight.runner]
        out_cache_loc = [np.full(forward.input_ids.size, -1, np.int64)] * len(self._header.tables)
        for table, slots in zip(runner.tables, frame.slots, strict=True):
            out_cache_loc[table.number] = slots
        forward.out_cache_loc = tuple(out_cache_loc)
        forward.changes = self._changes.columns(in_flight.runner, frame)
        truth, lens, last_lens, kept = None, _NOTHING, None, None
        identity: Sequence[IdentityValue] = getattr(requests, "identity", ())
        if requests is not None:
            known = requests.ids[: forward.rows.size]
            forward.request_ids[: known.size] = known
            truth, lens = requests.truth, _truth_lens(in_flight, requests.known_lens)
            last = next((one for one, *_ in reversed(self.fetched) if one.requests is requests), None)
            last_lens = None if last is None or in_flight.parts else _truth_lens(last, requests.known_lens)
            settle: Any = getattr(requests, "settle", None)
            if settle is not None:
                kept, lens = settle(forward, lens)
                self._changes.keep_written(in_flight.runner, frame, kept, forward.extend_lens, lowest=0)
        written, written_to = iter(frame.written), self._written(in_flight.runner, frame)
        gathered = {g: [next(written) for _ in self._header.groups[g].streams] for g in written_to}
        forward.written = tuple(written_to.get(g, _NOTHING) for g in range(len(self._header.groups)))
        for one, content, places, tokens in _forwards(forward, gathered, in_flight.parts, kept):
            if not one.failed:
                one.values = self._recorder.values_found(one, frame.values, tokens)
            chosen = truth if truth is None or places is None else [truth[r] for r in places]
            own = lens if places is None else lens[places]
            one.changes |= self._truth.changes(one.rows, chosen, own, last_lens=last_lens)
            if identity:
                mine = identity if places is None else chosen_identity(identity, places)
                one.identity = self._recorder.identity_columns(mine) if mine else {}
            if outputs is not None and not one.failed:
                self._recorder.add_outputs(one, _of_places(outputs, places), compared=int(one.number == forward.number))
            self.breathe()
            self.before_each(one)
            if not self._recorder.put_captured(one, content):
                return False
        return True

    def _written(self, runner: int, frame: Frame) -> dict[int, Int64Array]:
        """Return the slots that a forward wrote, of each of its runner's groups."""
        groups = self._capture.shadows.runners[runner].groups
        return {group.number: self._changes.in_group(group.number, frame.slots[group.table]) for group in groups}

    def _lost_slots(self, in_flight: FrameInFlight, frame: Frame) -> dict[int, Int64Array]:
        """Return what a forward that is not recorded changed: slots that it wrote, and those that changed by themselves."""
        runner = self._capture.shadows.runners[in_flight.runner]
        lost = self._written(in_flight.runner, frame)
        for change in frame.forward.kv_changes:
            group = runner.groups[runner.streams[change.stream].group].number
            lost[group] = np.concatenate((lost[group], change.slots))
        for group in lost:  # without its table, nobody knows which
            if self._header.groups[group].lut >= 0 and not frame.all_luts:
                lost[group] = np.arange(self._header.groups[group].num_slots)
        return lost


def _forwards(
    forward: CopiedForward,
    gathered: dict[int, list[ByteArray]],
    parts: Sequence[ForwardPart],
    kept: Int64Array | None,
) -> Iterator[tuple[CopiedForward, dict[int, list[ByteArray]], list[int] | None, Int64Array | None]]:
    """Yield the forwards that a frame holds, their bytes, and the places of their requests and of their tokens, None for all.

    What changed without a write, of tables and bytes, goes with the first. Of each request's tokens the first `kept` `[bs]`
    are left, and none of a request without any; None for all.
    """
    if len(parts) < 2 and kept is None:
        yield forward, gathered, None, None
        return
    begins = np.cumsum(forward.extend_lens) - forward.extend_lens
    extend = forward.extend_lens if kept is None else kept
    for number, (mode, whole) in enumerate(parts or [ForwardPart(forward.mode, np.arange(extend.size))]):
        places = whole if kept is None else whole[kept[whole] > 0]
        tokens, left_out = ragged_index(begins[places], extend[places]), forward.extend_lens[places] - extend[places]
        one = dataclasses.replace(
            forward,
            mode=mode,
            number=forward.number + number,
            rows=forward.rows[places],
            request_ids=forward.request_ids[places],
            prefix_lens=forward.prefix_lens[places],
            extend_lens=extend[places],
            input_ids=forward.input_ids[tokens],
            positions=forward.positions[tokens],
            out_cache_loc=tuple(slots[tokens] for slots in forward.out_cache_loc),
            written=tuple(slots[tokens] if slots.size else slots for slots in forward.written),
            states=tuple(_of_part(values[:, places], number) for values in forward.states),
            # Of slots that attention got otherwise there are none: such frames are of lengths alone.
            attention={name: lens[places] - left_out for name, lens in forward.attention.items() if lens.size},
            changes={} if number else forward.changes,
            kv_changes=[] if number else forward.kv_changes,
        )
        content = {g: [rows[tokens] for rows in streams] for g, streams in gathered.items()}
        yield one, content, places.tolist(), tokens


def _of_places(outputs: Sequence[OutputRead], places: list[int] | None) -> Sequence[OutputRead]:
    """Return what outputs say of a part's requests, by their places in the batch, None for all."""
    if places is None:
        return outputs
    return [one._replace(request=places.index(one.request)) for one in outputs if one.request in places]


def _of_part(values: Int64Array, number: int) -> Int64Array:
    """Return what a part's requests did to states, `[3, n]`: what a later part reads, an earlier one may have written."""
    if number:
        values[STATE_BEFORE] = 0
    return values


def _truth_lens(in_flight: FrameInFlight, known_lens: Int64Array | None) -> Int64Array:
    given = in_flight.truth_lens
    lens = np.frombuffer(given, np.int64) if isinstance(given, bytes) else np.array(given, np.int64)
    return lens if known_lens is None else known_lens + lens
