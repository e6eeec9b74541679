"""What the lane works on: the arrays of tables, pools, cells and history, as they are at the moment."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import record_words
from ....kernels.constants import KvHashMode
from ....kernels.dispatch import select
from ....kernels.replay_pass.layout import (
    MAX_BUFFERS,
    MAX_GROUPS,
    MAX_RUNNERS,
    MAX_STREAMS,
    MAX_TABLES,
)
from ....kernels.replay_pass.slots import fill_book_loops
from ....recorder.trace.header import TraceHeader
from ...checks.history import History
from .executor import IntervalExecutor

Int64Array = npt.NDArray[np.int64]
_NO_TABLE: Final = np.zeros((0, 0), np.int32)


def covers(header: TraceHeader) -> bool:
    """Say whether the lane knows what such a trace needs: no sliding windows, no rings, not too many of anything."""
    groups = header.groups
    plain = all(group.lut < 0 and not group.window and not group.reads_before_write for group in groups)
    streams = [stream for group in groups for stream in group.streams]
    return (
        plain
        and 0 < len(groups) <= MAX_GROUPS
        and 0 < len(header.tables) <= MAX_TABLES
        and len(header.runners) <= MAX_RUNNERS
        and len(streams) <= MAX_STREAMS
        and 2 * sum(len(group.halves) for group in groups) <= MAX_BUFFERS
        and all(stream.half in group.halves for group in groups for stream in group.streams)
        and all(0 <= runner.token_offset <= 1 for runner in header.runners)
        and max(group.num_slots for group in groups) < 1 << 31
    )


class LaneShape:
    """What a header says of groups, streams and runners, as the lane's arrays."""

    def __init__(self, header: TraceHeader) -> None:
        groups: list[tuple[int, ...]] = []
        streams: list[tuple[int, ...]] = []
        buffers = 0
        words_of = np.zeros(len(header.runners), np.int64)
        for group in header.groups:
            offset = header.runners[group.runner].token_offset
            groups.append(
                (
                    group.runner,
                    group.table,
                    group.num_slots,
                    buffers,
                    2 * len(group.halves),
                    len(streams),
                    len(group.streams),
                    offset,
                )
            )
            for stream in group.streams:
                tail = buffers + 2 * group.halves.index(stream.half) + 1
                words = stream.capture_bytes // 8
                streams.append((tail, words, int(words_of[group.runner])))
                words_of[group.runner] += words
            buffers += 2 * len(group.halves)
        self.groups = np.array(groups, np.int64)
        self.streams = np.array(streams, np.int64).reshape(-1, 3)
        self.words_of = words_of


def state_arrays(executor: IntervalExecutor, history: History) -> tuple[Any, ...]:
    """Return the arrays that the lane changes, in its order, from `tables` to `samples`."""
    pools, tables, cells = executor.pools, executor.tables, executor.watch.cells
    words = [
        record_words(records, written=True)
        for pool in pools
        for half in pool.group.halves
        for records in (pool.pool.head[half], pool.pool.tail[half])
    ]
    streams = [data.view(np.uint64) for pool in pools for data in pool.pool.kv]
    ledger = history.ledger
    return (
        _filled(tables.req_to_token, MAX_TABLES, _NO_TABLE),
        _NO_TABLE if tables.truth is None else tables.truth,
        _filled(words, MAX_BUFFERS, np.zeros((0, 4), np.int64)),
        _filled(streams, MAX_STREAMS, np.zeros((0, 2), np.uint64)),
        _filled(ledger.rows, MAX_GROUPS, np.zeros((0, 8), np.int64)),
        _filled(ledger.transfers, MAX_GROUPS, np.zeros(0, np.int64)),
        _filled([pool.pool.writers for pool in pools], MAX_GROUPS, np.zeros((0, 3), np.int64)),
        _filled([one.heads for one in cells], MAX_GROUPS, np.zeros(0, np.int32)),
        _filled([one.links for one in cells], MAX_GROUPS, np.zeros((0, 2), np.int32)),
        _filled([one.pending for one in cells], MAX_GROUPS, np.zeros((0, 0), np.uint8)),
        _filled([one.counts for one in cells], MAX_GROUPS, np.zeros((0, 0), np.int32)),
        _filled([one.book for one in cells], MAX_GROUPS, np.zeros((0, 10), np.int64)),
        _filled(history.rows.last, MAX_RUNNERS, np.zeros((0, 6), np.int64)),
        history.rows.status,
        history.samples.last,
    )


def rows_covered(executor: IntervalExecutor, history: History) -> int:
    """Return how many rows every array has that is by row."""
    tables = executor.tables
    sizes = [len(table) for table in tables.req_to_token]
    sizes += [len(cells.book) for cells in executor.watch.cells]
    sizes += [len(history.rows.status), len(history.samples.last)]
    if tables.truth is not None:
        sizes.append(len(tables.truth))
    return min(sizes)


def number_book(values: Mapping[int, tuple[int, ...]], columns: int, room_for: int, *, backend: str) -> Int64Array:
    """Return numbers by request as the lane looks them up, with room for as many more."""
    size = 16
    while size < 2 * (len(values) + room_for + 1):
        size *= 2
    book = np.zeros((size, 2 + columns), np.int64)
    if values:
        keys = np.fromiter(values, np.int64, len(values))
        select(fill_book_loops, backend)(keys, np.array(list(values.values()), np.int64).reshape(-1, columns), book)
    return book


def hashed_words(mode: KvHashMode) -> int:
    """Return how many 8-byte words of each stream are hashed at most."""
    return {KvHashMode.NONE: 0, KvHashMode.PARTIAL: 2, KvHashMode.ALL: 1 << 30}[mode]


def _filled(arrays: list[Any], count: int, nothing: Any) -> tuple[Any, ...]:
    return (*arrays, *[nothing] * (count - len(arrays)))
