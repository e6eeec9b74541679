"""Taking a batch's ordinary events through the compiled lane, and keeping the books of what it took.

The lane (`kernels/lane`) takes events until one is unusual; that one goes through the executor and the checks, and
then the lane goes on. What it cannot work with in compiled code, names above all, is caught up on here.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....kernels.dispatch import is_kept, select_telling
from ....kernels.replay_pass.layout import (
    ALLOC_EVENT,
    AT,
    COMPLETE,
    COUNT_FORWARDS,
    COUNT_VERIFIED,
    COUNT_WRITTEN,
    FIRST_EVENT,
    FORWARD_EVENT,
    FROM_START,
    HAS_TRUTH,
    KV_WORDS,
    NEW_IDS,
    NUM_GROUPS,
    NUM_PROGRESS,
    NUM_SETTINGS,
    NUM_TABLES,
    PADDING_TOLD,
    REQUEST_EVENT,
    REQUESTS,
    ROWS,
    RUNNER,
    SERIAL,
    SINCE_SWEEP,
    STALL_LIMIT,
    START,
    STATUS_EVENT,
    STOP,
    VOCAB,
)
from ....kernels.replay_pass.ledger import PADDING_WRITER
from ....kernels.replay_pass.loops import lane_loops
from ....kernels.replay_pass.slots import KEY, VALUE
from ....recorder.state.forward import read_forward
from ....recorder.state.requests import RequestTable
from ....recorder.trace.batch import TraceBatch
from ...checks.check_set import CheckSet
from ...checks.history import History
from ...report.merged.merging import MergingSink
from ...report.summary import Summary
from ...run.coverage import count_forwards
from ...run.health import Health
from .executor import IntervalExecutor
from .lane_columns import LaneColumns, lane_columns
from .lane_state import LaneShape, covers, hashed_words, number_book, rows_covered, state_arrays

Int64Array = npt.NDArray[np.int64]

_IN_BETWEEN: Final = frozenset({"request", "keyframe"})  # what may change what is known of requests
# A forward that must look at more prefix entries goes through the executor. The first one behind a keyframe looks at all
# that its requests have; memory that no forward needs is never touched.
_MOST_LOOKS: Final = 1 << 22
# To load the compiled lane takes longer than a small trace does without it: it waits for so many events, or for a batch
# that ends so far behind the file's beginning.
WARM_UP_EVENTS: Final = 1000
LARGE_BYTES: Final = 1 << 20
# Batches that are prepared and not taken yet: one that waits, one that is being read, and what nobody asked for.
_MOST_AHEAD: Final = 4
# A lane that is left at once is not tried again for so many events, at most.
_MOST_PATIENCE: Final = 64

_log = logging.getLogger("kvcanary")


class Lane:
    """Takes ordinary events of a trace; make one with `open_lane`."""

    def __init__(
        self,
        executor: IntervalExecutor,
        history: History,
        panel: CheckSet,
        health: Health,
        summary: Summary,
        request_table: RequestTable,
        request_ids: set[int],
        merging: MergingSink | None,
        *,
        backend: str,
    ) -> None:
        self._executor = executor
        self._history = history
        self._panel = panel
        self._health = health
        self._summary = summary
        self._request_table = request_table
        self._request_ids = request_ids
        self._merging = merging
        self._backend = backend
        header = executor.header
        self._header = header
        self._shape = LaneShape(header)
        self._loops: Callable[..., None] | None = None
        self._passed_by = 0
        self._columns: LaneColumns | None = None
        self._ahead: deque[LaneColumns] = deque(maxlen=_MOST_AHEAD)
        self._facts = number_book({}, 2, 64, backend=backend)
        self._facts_known = 0
        self._facts_stale = True
        self._next_event = -1
        self._patience = self._wait = 0
        self._tally = np.zeros((len(header.groups), 3), np.int64)
        self._row_stamps = np.zeros(0, np.int64)
        self._scratch: tuple[Int64Array, ...] = ()
        self._room = (-1, -1, -1)

    def prepare(self, batch: TraceBatch) -> None:
        """Work out what `run` needs of a batch alone; for the thread that reads ahead, which has time for it."""
        if self._loops is not None or batch.end_byte >= LARGE_BYTES:
            self._ahead.append(lane_columns(batch))

    def run(self, batch: TraceBatch, at: int) -> int:
        """Take events from row `at` of a batch on, and return the row of the first that was not taken."""
        if self._loops is None:
            if batch.end_byte < LARGE_BYTES and self._passed_by < WARM_UP_EVENTS:
                self._passed_by += 1
                return at
            self._loops = select_telling(lane_loops, self._backend, _tell_of_compiling)
        others = batch.first_event + at != self._next_event
        self._facts_stale |= others and (at == 0 or batch.kinds[at - 1] in _IN_BETWEEN)
        if self._wait:
            self._wait -= 1
            return at
        if any(pool.any_unknown for pool in self._executor.pools) or self._panel.pending():
            return at
        if self._columns is None or self._columns.batch is not batch:
            self._columns = self._prepared(batch) or lane_columns(batch)
        columns = self._columns
        if columns.kind[at] < 0:
            return at
        stop = self._call(self._loops, columns, at)
        if stop > at:
            self._patience = 0
            self._take_note(columns, at, stop)
        else:
            self._patience = min(2 * self._patience + 1, _MOST_PATIENCE)
            self._wait = self._patience - 1
        if stop == len(columns.kind):
            self._columns = None
        self._next_event = batch.first_event + stop
        return stop

    def _prepared(self, batch: TraceBatch) -> LaneColumns | None:
        while self._ahead and self._ahead[0].batch.first_event <= batch.first_event:
            columns = self._ahead.popleft()
            if columns.batch is batch:
                return columns
        return None

    def _call(self, loops: Callable[..., None], columns: LaneColumns, at: int) -> int:
        history, executor = self._history, self._executor
        unusual = np.flatnonzero(columns.kind[at:] < 0)
        stop = at + int(unusual[0]) if len(unusual) else len(columns.kind)
        settings, progress = self._settings(columns, at, stop), np.zeros(NUM_PROGRESS, np.int64)
        progress[SERIAL] = history.serial
        progress[SINCE_SWEEP] = self._health.activity.since_sweep
        told = self._panel.requests_reported() | set(history.dropped.by_request)
        if PADDING_WRITER in told:
            settings[PADDING_TOLD] = 1
        held_by = history.ledger.held_by
        kinds = columns.kind[at:stop]
        held = number_book(
            {request: (count,) for request, count in held_by.items()},
            1,
            int((kinds == ALLOC_EVENT).sum()),
            backend=self._backend,
        )
        self._learn_facts(int((kinds == REQUEST_EVENT).sum()))
        self._make_room(columns)
        self._tally[:] = 0
        arguments: tuple[Any, ...] = (
            columns.scalars,
            columns.lists,
            columns.offsets,
            columns.kv,
            columns.kv_offsets,
            settings,
            self._shape.groups,
            self._shape.streams,
            self._shape.words_of,
            progress,
            self._tally,
            *state_arrays(executor, history),
            held,
            self._facts,
            np.array(sorted(told), np.int64),
            self._row_stamps,
            *self._scratch,
        )
        loops(*arguments)
        history.serial = int(progress[SERIAL])
        self._health.activity.since_sweep = int(progress[SINCE_SWEEP])
        self._request_ids.update(self._scratch[-1][: int(progress[NEW_IDS])].tolist())
        left = held[held[:, VALUE] > 0]
        held_by.clear()
        held_by.update(zip(left[:, KEY].tolist(), left[:, VALUE].tolist(), strict=True))
        return int(progress[AT])

    def _settings(self, columns: LaneColumns, at: int, stop: int) -> Int64Array:
        history, header = self._history, self._header
        settings = np.zeros(NUM_SETTINGS, np.int64)
        settings[FIRST_EVENT] = columns.batch.first_event
        settings[START], settings[STOP] = at, stop
        settings[COMPLETE] = history.complete
        settings[FROM_START] = history.ledger.from_start
        settings[HAS_TRUTH] = self._executor.tables.truth is not None
        settings[VOCAB] = 0 if header.oracle is None else header.oracle.vocab_size
        settings[KV_WORDS] = max(hashed_words(pool.kv_hash_mode) for pool in self._executor.pools)
        settings[STALL_LIMIT] = self._health.stall_limit
        settings[NUM_GROUPS] = len(header.groups)
        settings[NUM_TABLES] = len(header.tables)
        return settings

    def _learn_facts(self, more: int) -> None:
        """Have what is known of the requests at hand for the token oracle, and room for as many more."""
        facts = self._request_table.facts
        if self._header.oracle is None:
            facts = {}
        if self._facts_stale or len(facts) != self._facts_known or 2 * (len(facts) + more + 1) > len(self._facts):
            values = {i: (i if f.room < 0 else f.room, f.prompt_len) for i, f in facts.items()}
            self._facts = number_book(values, 2, len(facts) + more, backend=self._backend)
        self._facts_known, self._facts_stale = len(facts), False

    def _make_room(self, columns: LaneColumns) -> None:
        rows = rows_covered(self._executor, self._history)
        if len(self._row_stamps) != rows:
            self._row_stamps = np.zeros(rows, np.int64)
        asked = (columns.most_tokens, columns.most_requests, columns.most_changes)
        ids = len(columns.lists[ROWS])
        if any(have < want for have, want in zip(self._room, asked, strict=True)) or ids > len(self._scratch[-1]):
            tokens, requests, changes = self._room = tuple(  # type: ignore[assignment]  # of three, as asked
                max(have, 2 * want) for have, want in zip(self._room, asked, strict=True)
            )
            groups, looks = len(self._header.groups), max(2 * tokens, _MOST_LOOKS)
            self._scratch = (
                np.empty(changes, np.int64),
                np.empty(changes, np.int64),
                np.empty((groups, requests), np.int64),
                np.empty((groups, requests), np.int64),
                np.empty(requests, np.int64),
                np.empty(tokens, np.int64),
                np.empty(looks, np.int64),
                np.empty((groups, looks), np.int64),
                np.empty((groups, looks), np.int64),
                np.empty((groups, looks), np.int64),
                np.empty(2 * ids, np.int64),
            )

    def _take_note(self, columns: LaneColumns, at: int, stop: int) -> None:
        """Catch up on what events `at .. stop - 1` mean outside compiled code."""
        batch, history = columns.batch, self._history
        kinds = columns.kind[at:stop]
        self._summarize(columns, at, stop)
        for index in (at + np.flatnonzero(kinds == REQUEST_EVENT)).tolist():
            view = batch.event(index)
            self._request_ids.add(int(view.scalar("request_id")))
            self._request_table.learn(view)
        if self._header.oracle is not None:
            self._facts_known = len(self._request_table.facts)
        requests, status = batch.scalar_ints("request_id"), batch.strings("status")
        for index in (at + np.flatnonzero(kinds == STATUS_EVENT)).tolist():
            history.take_end(int(requests[index]), status[index], batch.first_event + index)
        forwards = at + np.flatnonzero(kinds == FORWARD_EVENT)
        if len(forwards):
            self._take_forwards(columns, forwards)

    def _take_forwards(self, columns: LaneColumns, forwards: Int64Array) -> None:
        batch, header, executor = columns.batch, self._header, self._executor
        runners = columns.scalars[RUNNER][forwards]
        modes = batch.strings("mode")
        last = read_forward(batch.event(int(forwards[-1])), header)
        self._history.last_forward = last.forward
        offsets, rows = columns.offsets[ROWS], columns.lists[ROWS]
        if "keyframe" in self._summary.events:  # who ran before it is known to its rows, and so not new to the lane
            ids, at = columns.lists[REQUESTS], columns.offsets[REQUESTS]
            for i in forwards.tolist():
                live = rows[offsets[i] : offsets[i + 1]] != 0
                self._request_ids.update(ids[at[i] : at[i + 1]][live].tolist())
        for runner in np.unique(runners).tolist():
            mine = forwards[runners == runner]
            self._health.take_forwards(runner, [modes[i] for i in mine.tolist()], last)
            if self._merging is not None:
                self._merging.pass_by(
                    runner, np.concatenate([rows[offsets[i] : offsets[i + 1]] for i in mine.tolist()])
                )
            if runner == 0:
                self._history.samples.put_off(batch, mine, header)
        for pool, counted in zip(executor.pools, self._tally.tolist(), strict=True):
            executor.launched(
                pool,
                forwards=counted[COUNT_FORWARDS],
                reads=counted[COUNT_VERIFIED],
                written=counted[COUNT_WRITTEN],
            )

    def _summarize(self, columns: LaneColumns, at: int, stop: int) -> None:
        summary, batch = self._summary, columns.batch
        for kind, count in Counter(batch.kinds[at:stop]).items():
            summary.events[kind] = summary.events.get(kind, 0) + count
        times = batch.scalar_ints("time_ns")[at:stop]
        summary.first_time_ns = summary.first_time_ns or next((int(t) for t in times if t), 0)
        summary.last_time_ns = max(summary.last_time_ns, int(times.max()))
        modes, forwards = batch.strings("mode"), at + np.flatnonzero(columns.kind[at:stop] == FORWARD_EVENT)
        for mode, count in Counter(modes[index] for index in forwards.tolist()).items():
            summary.forwards_by_mode[mode] = summary.forwards_by_mode.get(mode, 0) + count
        summary.forwards += len(forwards)
        if len(forwards):
            summary.last_forward = int(batch.scalar_ints("forward")[forwards[-1]])
        count_forwards(summary.figures, batch, forwards, self._header)
        summary.forwards_watched += int(np.count_nonzero(batch.scalar_ints("kv_watched")[forwards]))
        summary.tokens += int(np.diff(batch.offsets("input_ids"))[forwards].sum())


def compile_lane() -> None:
    """Compile the lane where that was never done on this machine: once, for several processes that are about to use it."""
    if not is_kept(lane_loops):
        select_telling(lane_loops, "cpu", _tell_of_compiling)


def _tell_of_compiling() -> None:
    _log.info("compiling the fast path for large traces, once on this machine: about half a minute")


def open_lane(
    executor: object,
    health: Health,
    summary: Summary,
    request_table: RequestTable,
    request_ids: set[int],
    merging: MergingSink | None,
    *,
    every_check: bool,
    backend: str,
) -> Lane | None:
    """Return a lane for a replay, None where it has nothing to offer: another executor or backend, too few checks."""
    if not isinstance(executor, IntervalExecutor) or backend != "cpu" or not every_check:
        return None
    history, panel = executor.history, executor.panel
    if not isinstance(history, History) or panel is None or not covers(executor.header):
        return None
    if not rows_covered(executor, history):
        return None
    return Lane(executor, history, panel, health, summary, request_table, request_ids, merging, backend=backend)
