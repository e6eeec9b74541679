"""From what the device took down to events: which forwards the trace can tell, and what it says of the others."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from ...trace.schema import ATTENTION_LENS, ATTENTION_SLOTS, PHASE_AFTER
from ..forward_input import CopiedForward, KvChange
from ..host_arrays import Int64Array
from ..recorder import Recorder
from .capture import DeviceCapture
from .forward import Flight
from .landing import Landed, Landing, split_kv_changes
from .table_changes import TableChanges
from .truth import TruthBook

LOST: Final = "something that was told has been lost"
_NOTHING = np.empty(0, np.int64)


class TakingDown:
    """Puts forwards that have landed into the trace; for the recorder's own thread.

    `follows`: a frame's changes go on from what the trace has. Where they do not, `said_lost`: the trace says that
    nothing before is to be relied on, and has had no forward since.
    """

    def __init__(self, recorder: Recorder, capture: DeviceCapture) -> None:
        self.follows = True
        self.said_lost = False
        self.landing = Landing(capture)
        self._recorder = recorder
        self._capture = capture
        self._header = recorder.header
        self._truth = TruthBook(self._header.truth_table)
        runners = capture.shadows.runners
        self._changes = TableChanges(self._header, [(runner.table, runner.luts) for runner in runners])
        self._why = LOST

    @property
    def goes_on(self) -> bool:
        """Whether what is told now can be held against what the trace has."""
        return self.follows or self.said_lost

    def take(self, flight: Flight, time_ns: int) -> None:
        """Put a forward into the trace, once the device has come to its end; or count it as lost."""
        try:
            landed = self.landing.land(flight)
        finally:
            self._capture.release(flight)
        if flight.fresh:
            if not self.said_lost:
                self.say_lost(self._why)
            self.follows = self.said_lost
            if not self.follows:
                self._capture.reset()
        if not self.follows:
            self._recorder.drop_captured(flight.number, {})
        elif not landed.complete:
            # What did not fit is told with the next forward that has room; until then nothing can be judged by it.
            self._changes.keep(flight.runner, landed)
            self._recorder.drop_captured(flight.number, self._lost_slots(flight, landed))
            self._capture.catch_up(still=True)
        elif self._put(flight, landed, time_ns):
            self.said_lost = False
            self._capture.catch_up(still=False)
        else:
            self._break_off()

    def say_what_is_due(self) -> None:
        """Before anything else is told: say that something is missing, where there was no room to say it."""
        if not self.goes_on:
            self.say_lost(self._why)

    def _break_off(self) -> None:
        """Pass over what is in flight; the next forward of the engine tells everything anew."""
        self.say_lost("the writer's queue was full")
        self._capture.reset()

    def say_lost(self, note: str) -> None:
        """Say that something is missing, nobody knows what; what is in flight does not go on from there."""
        self._truth.forget()
        self._changes.forget()
        self.follows = False
        self._why = note
        self.said_lost = self._recorder.start_over(note, tables=False)

    def _put(self, flight: Flight, landed: Landed, time_ns: int) -> bool:
        requests, runner = flight.requests, self._capture.shadows.runners[flight.runner]
        elsewhere = np.full(landed.out_cache_loc.size, -1, np.int64)
        tables = len(self._header.tables)
        ids = np.full(landed.rows.size, -1, np.int64)
        if requests is not None:
            known = requests.ids[: landed.rows.size]
            ids[: known.size] = known
        forward = CopiedForward(
            mode=flight.mode,
            runner=flight.runner,
            number=flight.number,
            time_ns=time_ns,
            rows=landed.rows,
            request_ids=ids,
            prefix_lens=landed.prefix_lens,
            extend_lens=landed.extend_lens,
            input_ids=landed.input_ids,
            positions=landed.positions,
            out_cache_loc=tuple(landed.out_cache_loc if t == runner.table else elsewhere for t in range(tables)),
            reads=(),
            luts=(),
            truth=None,
            kv_watched=flight.watched,
            note="; ".join(part for part in (flight.note, landed.note) if part),
        )
        forward.attention, forward.attention_watched = _attention(runner.groups, landed), landed.attention
        forward.changes = self._changes.take(flight.runner, landed)
        if requests is not None:
            lens = _truth_lens(flight, requests.known_lens)
            forward.changes |= self._truth.changes(landed.rows, requests.truth, lens)
        forward.kv_changes = [
            KvChange(stream=stream, phase=PHASE_AFTER, slots=slots, content=content)
            for stream, slots, content in split_kv_changes(landed, flight.layout)
        ]
        written = iter(landed.written)
        gathered = {g: [next(written) for _ in self._header.groups[g].streams] for g in runner.groups}
        written_to = self._written(flight.runner, landed)
        forward.written = tuple(written_to.get(g, _NOTHING) for g in range(len(self._header.groups)))
        return self._recorder.put_captured(forward, gathered)

    def _written(self, runner: int, landed: Landed) -> dict[int, Int64Array]:
        """Return the slots that a forward wrote, of each of its runner's groups."""
        groups = self._capture.shadows.runners[runner].groups
        return {g: self._changes.in_group(g, landed.out_cache_loc) for g in groups}

    def _lost_slots(self, flight: Flight, landed: Landed) -> dict[int, Int64Array]:
        """Return what a forward that is not told changed: slots that it wrote, and those that changed by themselves."""
        runner = self._capture.shadows.runners[flight.runner]
        lost = self._written(flight.runner, landed)
        for stream, slots, _ in split_kv_changes(landed, flight.layout):
            group = runner.groups[runner.on_device.streams[stream].group]
            lost[group] = np.concatenate((lost[group], slots))
        for group in runner.groups:  # without its table, nobody knows which
            if self._header.groups[group].lut >= 0 and not landed.all_luts:
                lost[group] = np.arange(self._header.groups[group].num_slots)
        return lost


def _attention(groups: Sequence[int], landed: Landed) -> dict[str, Int64Array]:
    """Return the columns that say what attention got; `groups` are the header's numbers of the runner's groups."""
    columns = {}
    if landed.attention & ATTENTION_LENS:
        columns = {"attention_seq_lens": landed.seq_lens, "attention_query_lens": landed.query_lens}
    found = landed.attention_slots
    if landed.attention & ATTENTION_SLOTS and len(found):
        found = found[np.lexsort((found[:, 2], found[:, 1], found[:, 0]))]
        first = np.ones(len(found), np.bool_)
        first[1:] = (np.diff(found[:, :2], axis=0) != 0).any(axis=1) | (np.diff(found[:, 2]) != 1)
        at = np.flatnonzero(first)
        columns |= {
            "attention_group": np.array(groups, np.int64)[found[at, 0]],
            "attention_request": found[at, 1],
            "attention_start": found[at, 2],
            "attention_count": np.diff(at, append=len(found)).astype(np.int64),
            "attention_slots": found[:, 3].copy(),
        }
    return columns


def _truth_lens(flight: Flight, known_lens: Int64Array | None) -> list[int]:
    told = flight.truth_lens
    lens = np.frombuffer(told, np.int64) if isinstance(told, bytes) else np.array(told, np.int64)
    if known_lens is not None:
        lens = known_lens + lens
    found: list[int] = lens.tolist()
    return found
