"""What the compiled pass works on: the arrays of tables, pools, entry states and history, as they are at the moment."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from ....kernels.arrays import Int64Array, record_words
from ....kernels.constants import KvHashMode
from ....kernels.dispatch import select
from ....kernels.ops.plan.reference import PlanArrays
from ....kernels.ops.violation_log import ViolationLog
from ....kernels.replay_pass.array_views import AddressTable
from ....kernels.replay_pass.context import RowState, Streams, Work
from ....kernels.replay_pass.entries import allocate_states
from ....kernels.replay_pass.ledger import Found
from ....kernels.replay_pass.slots import fill_book_loops
from ....recorder.trace.header import TraceHeader
from ...checks.history import History
from ...checks.tables import SwaMappingStale
from .batch_columns import BatchColumns
from .executor import IncrementalExecutor

_NOTHING: Final = np.zeros(0, np.int64)
_NO_PAIRS: Final = np.zeros((0, 2), np.int64)
_NO_KINDS: Final = np.zeros((0, 0), np.uint8)
_NO_STATES: Final = allocate_states(rows=0, width=0, slots=0)
# A forward with more entries due goes through the executor. The first one behind a keyframe verifies all that its
# requests have; memory that no forward needs is never touched.
MOST_DUE: Final = 1 << 22


def covers(header: TraceHeader) -> bool:
    """Say whether the pass knows what such a trace needs."""
    return bool(header.groups and header.tables and not header.states) and all(
        group.padding_slots == tuple(range(len(group.padding_slots)))
        and 0 in group.padding_slots
        and group.num_slots < 1 << 31
        and all(stream.half in group.halves for stream in group.streams)
        and 0 <= header.runners[group.runner].token_offset <= 1
        for group in header.groups
    )


def group_numbers(header: TraceHeader) -> tuple[Int64Array, Streams]:
    """Return what a header says of groups, but for where their arrays are, and of streams; see the pass's context."""
    groups: list[tuple[int, ...]] = []
    streams: list[tuple[int, ...]] = []
    whole = {group.table for group in header.groups if not group.window}
    words = [0 for _ in header.runners]
    for number, group in enumerate(header.groups):
        pool = (number, group.runner, group.table, group.lut, group.num_slots, group.window, group.reads_before_write)
        counted = (len(group.padding_slots), group.table in whole, header.runners[group.runner].token_offset)
        groups.append((0, *pool, *counted, 2 * len(group.halves), len(streams), len(group.streams)))
        for stream in group.streams:
            buffer = -1 if stream.samples else 2 * group.halves.index(stream.half) + 1
            streams.append((buffer, words[group.runner]))
            words[group.runner] += stream.capture_bytes // 8
    return np.array(groups, np.int64), Streams(*np.array(streams, np.int64).reshape(-1, 2).T.copy())


class WorkMemory:
    """Memory that a forward works with, large enough for every forward of a batch."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._room = (-1, -1, -1)
        self.most_due = 0
        self.arrays: Work

    def make_room(self, columns: BatchColumns, ids: int) -> None:
        """Have room for a batch that has so many tokens and requests in a forward, and so many ids in all."""
        asked = (columns.most_tokens, columns.most_requests, ids)
        if all(have >= want for have, want in zip(self._room, asked, strict=True)):
            return
        self._room = tuple(max(have, 2 * want) for have, want in zip(self._room, asked, strict=True))  # type: ignore[assignment]
        tokens, requests, ids = self._room
        groups, self.most_due = self._groups, max(2 * tokens, MOST_DUE)
        lengths = dict.fromkeys(("lens", "fresh_from", "seen", "run_starts", "run_lens", "run_indices"), requests)
        lengths |= {"write_offsets": requests + 1, "others": tokens, "hashes": tokens + self.most_due}
        lengths |= {"new_requests": ids, "totals": 2, "written": 1, "reads": groups}
        by_group = {"old_events": requests, "request_offsets": requests + 1, "seeds": requests, "own_slots": tokens}
        entries = [np.empty(self.most_due, np.int64) for _ in range(4)]
        counts = [np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64)]
        self.arrays = Work(
            **{name: np.empty(length, np.int64) for name, length in lengths.items()},
            **{name: np.empty((groups, length), np.int64) for name, length in by_group.items()},
            how=np.empty((groups, requests), np.uint8),
            found=Found.allocate(tokens + self.most_due),
            plan=PlanArrays._make([*entries, *counts]),
            num_requests=np.zeros(1, np.int32),
            marks=np.empty(self.most_due, np.uint8),
            log=ViolationLog.allocate(1),
        )


def fill_addresses(
    addresses: AddressTable,
    groups: Int64Array,
    columns: BatchColumns,
    executor: IncrementalExecutor,
    history: History,
    partners: SwaMappingStale | None,
    *,
    by_request: tuple[Int64Array, Int64Array, Int64Array],
    row_stamps: Int64Array,
    work: Work,
) -> dict[str, int]:
    """Put every array that the pass needs into a table of addresses; return their numbers, those of groups into `groups`."""
    tables, watch = executor.tables, executor.watch
    truth = np.zeros((0, 0), np.int32) if tables.truth is None else tables.truth
    by_row = (truth, history.rows.status, history.samples.last, row_stamps, *by_request)
    numbers = {
        "lists": addresses.add(*columns.lists, *columns.offsets),
        "tables": addresses.add(*tables.req_to_token),
        "luts": addresses.add(*tables.luts),
        "work": addresses.add(work),
        "rows": addresses.add(*(RowState(last, *by_row) for last in history.rows.last)),
    }
    for pool, group, numbers_of in zip(executor.pools, executor.header.groups, groups, strict=True):
        index, tier = pool.index, pool.pool
        lut = tables.luts[group.lut] if group.lut >= 0 else _NOTHING
        seen = _NO_PAIRS if partners is None else partners.partners.get(index, _NO_PAIRS)
        ledger, transfers = history.ledger.rows[index], history.ledger.transfers[index]
        states, full = watch.states[index], watch.full_states.get(index, _NO_STATES)
        buffers = [side[half] for half in pool.group.halves for side in (tier.head, tier.tail)]
        numbers_of[0] = addresses.add(
            *(tables.req_to_token[group.table], lut, states, ledger, transfers, tier.writers, seen),
            *(full, watch.kinds.get(index, _NO_KINDS)),
            *(record_words(records, written=True) for records in buffers),
            *(data.view(np.uint64) for data in tier.kv),
        )
    return numbers


def rows_covered(executor: IncrementalExecutor, history: History) -> int:
    """Return how many rows every array has that is by row."""
    tables, watch = executor.tables, executor.watch
    sizes = [len(table) for table in tables.req_to_token]
    sizes += [len(states.rows) for states in (*watch.states, *watch.full_states.values())]
    sizes += [len(history.rows.status), len(history.samples.last)]
    if tables.truth is not None:
        sizes.append(len(tables.truth))
    return min(sizes)


def numbers_by_request(values: Mapping[int, tuple[int, ...]], columns: int, room_for: int) -> Int64Array:
    """Return numbers by request as the pass looks them up, with room for as many more."""
    size = 16
    while size < 2 * (len(values) + room_for + 1):
        size *= 2
    found = np.zeros((size, 2 + columns), np.int64)
    if values:
        keys = np.fromiter(values, np.int64, len(values))
        numbers = np.array(list(values.values()), np.int64).reshape(-1, columns)
        select(fill_book_loops, "cpu")(keys, numbers, found)
    return found


def hashed_words(mode: KvHashMode) -> int:
    """Return how many 8-byte words of each stream are hashed at most."""
    return {KvHashMode.NONE: 0, KvHashMode.PARTIAL: 2, KvHashMode.ALL: 1 << 30}[mode]
