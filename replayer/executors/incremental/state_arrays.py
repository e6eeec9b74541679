"""What the compiled pass works on: the arrays of tables, pools, entry states and history, as they are at the moment."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import Int64Array, record_words
from ....kernels.constants import KvHashMode
from ....kernels.dispatch import select
from ....kernels.replay_pass.array_views import AddressTable
from ....kernels.replay_pass.entries import allocate_states
from ....kernels.replay_pass.layout import (
    FIRST_STREAM,
    GROUP_ARRAYS,
    GROUP_COLUMNS,
    GROUP_COUNTED_WHOLE,
    GROUP_LUT,
    GROUP_OFFSET,
    GROUP_PADDING,
    GROUP_RING,
    GROUP_RUNNER,
    GROUP_SLOTS,
    GROUP_TABLE,
    GROUP_WINDOW,
    LIST_ARRAYS,
    LUT_ARRAYS,
    NUM_BUFFERS,
    NUM_COUNTERS,
    NUM_STREAMS,
    REQUEST_ARRAYS,
    ROW_ARRAYS,
    RUNNER_ARRAYS,
    SCALAR_ARRAYS,
    TABLE_ARRAYS,
    WORK_ARRAYS,
)
from ....kernels.replay_pass.slots import fill_book_loops
from ....recorder.trace.header import TraceHeader
from ...checks.history import History
from ...checks.tables import SwaMappingStale
from .batch_columns import BatchColumns
from .executor import IncrementalExecutor

_NOTHING: Final = np.zeros(0, np.int64)
_NO_TABLE: Final = np.zeros((0, 0), np.int32)
_NO_STATES: Final = allocate_states(rows=0, width=0, slots=0)
# A forward with more entries due goes through the executor. The first one behind a keyframe verifies all that its
# requests have; memory that no forward needs is never touched.
MOST_DUE: Final = 1 << 22


def covers(header: TraceHeader) -> bool:
    """Say whether the pass knows what such a trace needs."""
    return bool(header.groups and header.tables) and all(
        group.padding_slots == tuple(range(len(group.padding_slots)))
        and 0 in group.padding_slots
        and group.num_slots < 1 << 31
        and all(stream.half in group.halves for stream in group.streams)
        and 0 <= header.runners[group.runner].token_offset <= 1
        for group in header.groups
    )


class HeaderArrays:
    """What a header says of groups, streams and runners: `groups`, `streams` and `words_of`, see the pass's layout."""

    def __init__(self, header: TraceHeader) -> None:
        self.groups = np.zeros((len(header.groups), GROUP_COLUMNS), np.int64)
        self.words_of = np.zeros(len(header.runners), np.int64)
        streams: list[tuple[int, ...]] = []
        whole = {group.table for group in header.groups if not group.window}
        for columns, group in zip(self.groups, header.groups, strict=True):
            columns[GROUP_RUNNER], columns[GROUP_TABLE], columns[GROUP_LUT] = group.runner, group.table, group.lut
            columns[GROUP_SLOTS], columns[GROUP_WINDOW] = group.num_slots, group.window
            columns[GROUP_RING], columns[GROUP_PADDING] = group.reads_before_write, len(group.padding_slots)
            columns[GROUP_COUNTED_WHOLE] = group.table in whole
            columns[GROUP_OFFSET] = header.runners[group.runner].token_offset
            columns[NUM_BUFFERS] = 2 * len(group.halves)
            columns[FIRST_STREAM], columns[NUM_STREAMS] = len(streams), len(group.streams)
            for stream in group.streams:
                words = stream.capture_bytes // 8
                tail = 2 * group.halves.index(stream.half) + 1
                streams.append((tail, words, int(self.words_of[group.runner])))
                self.words_of[group.runner] += words
        self.streams = np.array(streams, np.int64).reshape(-1, 3)


class WorkMemory:
    """Memory that a forward works with, large enough for every forward of a batch; `arrays` in the layout's order."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._room = (-1, -1, -1)
        self.arrays: list[npt.NDArray[np.generic]] = []
        self.new_requests = _NOTHING
        self.most_due = 0

    def make_room(self, columns: BatchColumns, ids: int) -> None:
        """Have room for a batch that has so many tokens and requests in a forward, and so many ids in all."""
        asked = (columns.most_tokens, columns.most_requests, ids)
        if all(have >= want for have, want in zip(self._room, asked, strict=True)):
            return
        self._room = tuple(max(have, 2 * want) for have, want in zip(self._room, asked, strict=True))  # type: ignore[assignment]
        tokens, requests, ids = self._room
        groups, due = self._groups, max(2 * tokens, MOST_DUE)
        self.most_due, self.new_requests = due, np.empty(ids, np.int64)
        by_request = [np.empty(requests, np.int64) for _ in range(3)]
        runs = [np.empty(requests, np.int64) for _ in range(3)]
        found = [np.empty(tokens + due, np.int64) for _ in range(3)]
        plan = [np.empty(due, np.int64) for _ in range(4)]
        self.arrays = [
            *by_request,
            np.empty((groups, requests), np.int64),
            np.empty((groups, requests), np.uint8),
            np.empty((groups, requests + 1), np.int64),
            np.empty(requests + 1, np.int64),
            np.empty((groups, requests), np.int64),
            *runs,
            np.empty((groups, tokens), np.int64),
            np.empty(tokens, np.int64),
            *found,
            *plan,
            np.empty(due, np.uint8),
            self.new_requests,
            np.zeros(NUM_COUNTERS, np.int64),
            np.zeros(3, np.int32),
            np.zeros((2, 8), np.int64),
            np.zeros(groups, np.int64),
        ]


def fill_addresses(
    addresses: AddressTable,
    settings: Int64Array,
    shape: HeaderArrays,
    columns: BatchColumns,
    executor: IncrementalExecutor,
    history: History,
    partners: SwaMappingStale | None,
    *,
    by_request: tuple[Int64Array, Int64Array, Int64Array],
    row_stamps: Int64Array,
    work: WorkMemory,
) -> None:
    """Put every array that the pass needs into a table of addresses, and their numbers into `settings` and `shape`."""
    tables = executor.tables
    settings[SCALAR_ARRAYS] = addresses.add(*columns.scalars)
    settings[LIST_ARRAYS] = addresses.add(*columns.lists, *columns.offsets)
    settings[TABLE_ARRAYS] = addresses.add(*tables.req_to_token)
    settings[LUT_ARRAYS] = addresses.add(_NOTHING, *tables.luts) + 1  # number -1 is no table
    settings[RUNNER_ARRAYS] = addresses.add(*history.rows.last)
    truth = _NO_TABLE if tables.truth is None else tables.truth
    settings[ROW_ARRAYS] = addresses.add(truth, history.rows.status, history.samples.last, row_stamps)
    settings[REQUEST_ARRAYS] = addresses.add(*by_request)
    settings[WORK_ARRAYS] = addresses.add(*work.arrays)
    for pool, group in zip(executor.pools, shape.groups, strict=True):
        index, tier = pool.index, pool.pool
        full = executor.watch.full_states.get(index, _NO_STATES)
        kinds = executor.watch.kinds.get(index, np.zeros((0, 0), np.uint8))
        seen = (
            np.zeros((0, 2), np.int64) if partners is None else partners.partners.get(index, np.zeros((0, 2), np.int64))
        )
        group[GROUP_ARRAYS] = addresses.add(
            history.ledger.rows[index],
            history.ledger.transfers[index],
            tier.writers,
            *executor.watch.states[index],
            *full,
            kinds,
            seen,
            *(
                record_words(records, written=True)
                for half in pool.group.halves
                for records in (tier.head[half], tier.tail[half])
            ),
            *(data.view(np.uint64) for data in tier.kv),
        )


def rows_covered(executor: IncrementalExecutor, history: History) -> int:
    """Return how many rows every array has that is by row."""
    tables, watch = executor.tables, executor.watch
    sizes = [len(table) for table in tables.req_to_token]
    sizes += [len(states.rows) for states in (*watch.states, *watch.full_states.values())]
    sizes += [len(history.rows.status), len(history.samples.last)]
    if tables.truth is not None:
        sizes.append(len(tables.truth))
    return min(sizes)


def numbers_by_request(
    values: Mapping[int, tuple[int, ...]], columns: int, room_for: int, *, backend: str
) -> Int64Array:
    """Return numbers by request as the pass looks them up, with room for as many more."""
    size = 16
    while size < 2 * (len(values) + room_for + 1):
        size *= 2
    found = np.zeros((size, 2 + columns), np.int64)
    if values:
        keys = np.fromiter(values, np.int64, len(values))
        numbers = np.array(list(values.values()), np.int64).reshape(-1, columns)
        select(fill_book_loops, backend)(keys, numbers, found)
    return found


def hashed_words(mode: KvHashMode) -> int:
    """Return how many 8-byte words of each stream are hashed at most."""
    return {KvHashMode.NONE: 0, KvHashMode.PARTIAL: 2, KvHashMode.ALL: 1 << 30}[mode]
