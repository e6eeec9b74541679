"""Taking a batch's ordinary events through the compiled pass, and catching up on what it took.

The pass (`kernels/replay_pass/events.py`) takes events until one is not ordinary; that one goes through the executor and
the checks, and then the pass goes on. What it cannot work with in compiled code, names above all, is caught up on here.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.dispatch import is_kept, select
from ....kernels.replay_pass.array_views import AddressTable
from ....kernels.replay_pass.context import (
    ALLOC_EVENT,
    FORWARD_EVENT,
    REQUEST_EVENT,
    STATUS_EVENT,
    Figures,
    Progress,
    Settings,
    Tally,
)
from ....kernels.replay_pass.events import replay_events_loops
from ....kernels.replay_pass.ledger import PADDING_WRITER
from ....kernels.replay_pass.slots import KEY, VALUE
from ....recorder.state.forward import read_forward
from ....recorder.trace.batch import TraceBatch
from ...checks.check import CheckSet
from ...checks.history import History
from ...checks.tables import SwaMappingStale
from ...run.health import Health
from .batch_columns import BatchColumns, batch_columns, leave_hits
from .executor import IncrementalExecutor
from .state_arrays import WorkMemory, fill_addresses, group_numbers, hashed_words, numbers_by_request, rows_covered

_IN_BETWEEN: Final = frozenset({"request", "keyframe"})  # what may change what is known of requests
# To load the compiled pass takes longer than a small trace does without it: it waits for so many events, or for a batch
# that ends so far behind the file's beginning.
WARM_UP_EVENTS: Final = 1000
LARGE_BYTES: Final = 1 << 20
NOT_COMPILED: Final = 16  # times as much, if it has to be compiled first
# Batches that are prepared and not taken yet: one that waits, one that is being read, and what nobody asked for.
_MOST_AHEAD: Final = 4
# A pass that is left at once is not tried again for so many events, at most.
_MOST_PATIENCE: Final = 64

_log = logging.getLogger("kvcanary")


class CompiledPass:
    """Takes ordinary events of a trace past an executor with all checks; `executors.make_pass` says when there is one.

    Whoever replays counts what it took; `had_keyframe` says that the others were given a keyframe.
    """

    def __init__(
        self,
        executor: IncrementalExecutor,
        history: History,
        check_set: CheckSet,
        health: Health,
    ) -> None:
        self._executor = executor
        self._history = history
        self._check_set = check_set
        self._health = health
        self._request_ids = executor.results.request_ids
        self._merging = executor.results.merging
        self.had_keyframe = False
        self._header = header = executor.header
        self._request_table = executor.state.request_table
        self._groups, self._streams = group_numbers(header)
        self._loops: Callable[..., None] | None = None
        self._wait_factor = 1 if is_kept(replay_events_loops) else NOT_COMPILED
        self._passed_by = 0
        self._columns: BatchColumns | None = None
        self._ahead: deque[BatchColumns] = deque(maxlen=_MOST_AHEAD)
        self._facts = numbers_by_request({}, 2, 64)
        self._facts_known = 0
        self._facts_stale = True
        self._next_event = -1
        self._patience = self._wait = 0
        self._row_stamps = np.zeros(0, np.int64)
        self._work = WorkMemory(len(header.groups))
        self._partners = next((check for check in check_set.checks if isinstance(check, SwaMappingStale)), None)
        self._sliding = any(group.lut >= 0 for group in header.groups)

    def prepare(self, batch: TraceBatch) -> None:
        """Work out what `run` needs of a batch alone; for the thread that reads ahead, which has time for it."""
        if self._loops is not None or batch.end_byte >= LARGE_BYTES * self._wait_factor:
            self._ahead.append(batch_columns(batch, self._header))

    def run(self, batch: TraceBatch, at: int) -> int:
        """Take events from row `at` of a batch on, and return the row of the first that was not taken."""
        if self._loops is None:
            factor = self._wait_factor
            if batch.end_byte < LARGE_BYTES * factor and self._passed_by < WARM_UP_EVENTS * factor:
                self._passed_by += 1
                return at
            self._loops = select(replay_events_loops, "cpu", before_compiling=_report_compiling)
        others = batch.first_event + at != self._next_event
        self._facts_stale |= others and (at == 0 or batch.kinds[at - 1] in _IN_BETWEEN)
        if self._wait:
            self._wait -= 1
            return at
        if any(pool.any_unknown for pool in self._executor.pools) or self._check_set.pending():
            return at
        if self._columns is None or self._columns.batch is not batch:
            self._columns = self._prepared(batch) or batch_columns(batch, self._header)
            leave_hits(self._columns, self._request_table, decodes=self._header.role == "decode")
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

    def _prepared(self, batch: TraceBatch) -> BatchColumns | None:
        while self._ahead and self._ahead[0].batch.first_event <= batch.first_event:
            columns = self._ahead.popleft()
            if columns.batch is batch:
                return columns
        return None

    def _call(self, loops: Callable[..., None], columns: BatchColumns, at: int) -> int:
        history, executor = self._history, self._executor
        unusual = np.flatnonzero(columns.kind[at:] < 0)
        stop = at + int(unusual[0]) if len(unusual) else len(columns.kind)
        progress = Progress(*np.zeros((len(Progress._fields), 1), np.int64))
        progress.serial[0] = history.serial
        progress.since_sweep[0] = self._health.activity.since_sweep
        if self._partners is not None:
            progress.partner_serial[0] = self._partners.serial
        reported = self._check_set.requests_reported() | set(history.dropped.by_request)
        held_by, kinds = history.ledger.held_by, columns.kind[at:stop]
        counts = {request: (count,) for request, count in held_by.items()}
        held = numbers_by_request(counts, 1, int((kinds == ALLOC_EVENT).sum()))
        self._learn_facts(int((kinds == REQUEST_EVENT).sum()))
        rows = rows_covered(executor, history)
        if len(self._row_stamps) != rows:
            self._row_stamps = np.zeros(rows, np.int64)
        self._work.make_room(columns, 2 * int(columns.offsets[0][-1]))
        num_groups = len(self._header.groups)
        self._tally = Tally(*np.zeros((3, num_groups), np.int64))
        self._figures = Figures(*np.zeros((3, len(columns.kind) * self._sliding, num_groups), np.int64))
        addresses = AddressTable()
        numbers = fill_addresses(
            addresses,
            self._groups,
            columns,
            executor,
            history,
            self._partners,
            by_request=(held, self._facts, np.array(sorted(reported), np.int64)),
            row_stamps=self._row_stamps,
            work=self._work.arrays,
        )
        header, oracle = self._header, self._header.oracle
        settings = Settings(
            start=at,
            stop=stop,
            allocations=history.tells("allocator"),
            complete=history.complete,
            from_start=history.ledger.from_start,
            has_truth=header.truth_table is not None,
            vocab=0 if oracle is None else oracle.vocab_size,
            kv_words=max(hashed_words(pool.kv_hash_mode) for pool in executor.pools),
            stall_limit=self._health.stall_limit,
            padding_reported=PADDING_WRITER in reported,
            num_groups=len(header.groups),
            num_tables=len(header.tables),
            num_luts=len(header.lut_lens),
            num_runners=len(header.runners),
            most_due=self._work.most_due,
            **numbers,
        )
        given = (addresses.rows, self._groups, self._streams, columns.events, np.array(settings, np.int64))
        loops(*given, progress, self._tally, self._figures)
        history.serial = int(progress.serial[0])
        self._health.activity.since_sweep = int(progress.since_sweep[0])
        if self._partners is not None:
            self._partners.serial = int(progress.partner_serial[0])
        self._request_ids.update(self._work.arrays.new_requests[: int(progress.new_ids[0])].tolist())
        left = held[held[:, VALUE] > 0]
        held_by.clear()
        held_by.update(zip(left[:, KEY].tolist(), left[:, VALUE].tolist(), strict=True))
        return int(progress.at[0])

    def _learn_facts(self, more: int) -> None:
        """Have what is known of the requests at hand for the token oracle, and room for as many more."""
        facts = self._request_table.facts
        if self._header.oracle is None:
            facts = {}
        if self._facts_stale or len(facts) != self._facts_known or 2 * (len(facts) + more + 1) > len(self._facts):
            values = {i: (i if f.room < 0 else f.room, f.prompt_len) for i, f in facts.items()}
            self._facts = numbers_by_request(values, 2, len(facts) + more)
        self._facts_known, self._facts_stale = len(facts), False

    def _take_note(self, columns: BatchColumns, at: int, stop: int) -> None:
        """Catch up on what events `at .. stop - 1` mean outside compiled code."""
        batch, history = columns.batch, self._history
        kinds = columns.kind[at:stop]
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

    def _take_forwards(self, columns: BatchColumns, forwards: Int64Array) -> None:
        batch, header, executor = columns.batch, self._header, self._executor
        runners, modes = batch.scalar_ints("runner")[forwards], batch.strings("mode")
        last = read_forward(batch.event(int(forwards[-1])), header)
        self._history.last_forward = last.forward
        offsets, rows = batch.offsets("req_pool_indices"), batch.values("req_pool_indices")
        if self.had_keyframe:  # who ran before it is known to its rows, and so not new to the pass
            ids, at = batch.values("request_ids"), batch.offsets("request_ids")
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
        self._add_figures(batch, forwards)
        for pool, counted in zip(executor.pools, zip(*self._tally, strict=True), strict=True):
            reads, written, number = map(int, counted)
            executor.results.summary.entries_read += reads
            executor.launched(pool, forwards=number, reads=reads, written=written)

    def _add_figures(self, batch: TraceBatch, forwards: Int64Array) -> None:
        """Add what the pass counted of each forward to the divergence figures."""
        if not self._sliding:
            return
        groups, divergence = self._header.groups, self._executor.divergence
        runners, numbers = batch.scalar_ints("runner"), batch.scalar_ints("forward")
        for index in forwards.tolist():
            runner = int(runners[index])
            counted, none, other = (array[index].tolist() for array in self._figures)
            mine = [g for g, group in enumerate(groups) if group.runner == runner]
            reads = {g: counted[g] for g in mine}
            found = {g: (none[g], other[g]) for g in mine if groups[g].lut >= 0}
            divergence.add(batch.first_event + index, int(numbers[index]), runner, reads, found)


def compile_pass(largest_bytes: int) -> None:
    """Compile the pass if that was never done on this machine: once, for several processes that are about to use it.

    `largest_bytes` has the largest of their traces: small ones do without it.
    """
    if largest_bytes >= LARGE_BYTES * NOT_COMPILED and not is_kept(replay_events_loops):
        select(replay_events_loops, "cpu", before_compiling=_report_compiling)


def _report_compiling() -> None:
    _log.info("compiling the fast path for large traces, once on this machine: some 15 seconds")
