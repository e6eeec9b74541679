"""Steps in which one request reads what another writes, for engines that store before they attend.

Where each layer stores K and V of all tokens of a forward before any of them attends, a request may be given a prefix
that another request of the same forward computes. A replay reads before it writes: such a forward is recorded as several,
writers first.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ...kernels.arrays import Int64Array
from .forward_input import ForwardInput, TableRead, TruthTokens
from .host_arrays import own_int64, ragged_index, read_runs


def in_reading_order(given: ForwardInput) -> list[tuple[ForwardInput, Int64Array]]:
    """Split a forward into those that read only what earlier ones have written.

    Args:
        given: the whole forward; padding rows and tokens come last.

    Returns:
        Each forward with the indices `[n] int64` of its requests, ascending; `given` itself if nobody reads what
        another writes. Of several, the last has the padding, and none says what attention got.
    """
    rows, prefix, extend = (own_int64(part) for part in (given.req_pool_indices, given.prefix_lens, given.extend_lens))
    lens = np.where(rows == 0, 0, np.maximum(extend, 0))
    reads = [_read(read, rows, prefix) for read in given.reads]
    level = _levels(rows, lens, reads, [own_int64(slots) for slots in given.out_cache_loc])
    if not level.any():
        return [(given, np.arange(rows.size, dtype=np.int64))]
    level[rows == 0] = level.max()
    waves = np.unique(level).tolist()
    return [_part(given, reads, lens, np.flatnonzero(level == wave), padded=wave == waves[-1]) for wave in waves]


def _read(read: Any, rows: Int64Array, prefix: Int64Array) -> TableRead:
    if isinstance(read, TableRead):
        return TableRead(starts=own_int64(read.starts), counts=own_int64(read.counts), slots=own_int64(read.slots))
    starts = np.zeros_like(prefix)
    counts = np.where(rows == 0, 0, np.clip(prefix, 0, int(read.shape[1])))
    return TableRead(starts=starts, counts=counts, slots=read_runs(read, rows, starts, counts))


def _levels(rows: Int64Array, lens: Int64Array, reads: list[TableRead], written: list[Int64Array]) -> Int64Array:
    """Return `[bs]` how many others, one after another, must have written before a request can read."""
    level = np.zeros(rows.size, np.int64)
    writer = np.repeat(np.arange(rows.size, dtype=np.int64), lens)
    needs: set[tuple[int, int]] = set()
    for read, slots in zip(reads, written, strict=True):
        order = np.argsort(slots[: writer.size], kind="stable")
        ascending = slots[: writer.size][order]
        if not ascending.size:
            continue
        at = np.minimum(np.searchsorted(ascending, read.slots), ascending.size - 1)
        hit = (ascending[at] == read.slots) & (read.slots > 0)
        reader = np.repeat(np.arange(rows.size, dtype=np.int64), np.maximum(read.counts, 0))
        needs |= set(zip(reader[hit].tolist(), writer[order[at[hit]]].tolist(), strict=True))
    waits = [(r, other) for r, other in needs if r != other]
    for _ in range(rows.size if waits else 0):  # a circle, which only a broken table has, ends here too
        before = level.copy()
        for r, other in waits:
            level[r] = max(int(level[r]), 1 + int(level[other]))
        if np.array_equal(before, level):
            break
    return level


def _part(
    given: ForwardInput, reads: list[TableRead], lens: Int64Array, chosen: Int64Array, *, padded: bool
) -> tuple[ForwardInput, Int64Array]:
    tokens = ragged_index((np.cumsum(lens) - lens)[chosen], lens[chosen])
    if padded:
        total = own_int64(given.input_ids).size
        tokens = np.append(tokens, np.arange(int(lens.sum()), total, dtype=np.int64))
    truth = None
    if given.truth is not None:
        known = own_int64(given.truth.lens)
        at = ragged_index((np.cumsum(known) - known)[chosen], known[chosen])
        truth = TruthTokens(flat=own_int64(given.truth.flat)[at], lens=known[chosen])
    part = replace(
        given,
        req_pool_indices=own_int64(given.req_pool_indices)[chosen],
        request_ids=own_int64(given.request_ids)[chosen],
        prefix_lens=own_int64(given.prefix_lens)[chosen],
        extend_lens=own_int64(given.extend_lens)[chosen],
        input_ids=own_int64(given.input_ids)[tokens],
        positions=own_int64(given.positions)[tokens],
        out_cache_loc=tuple(own_int64(slots)[tokens] for slots in given.out_cache_loc),
        reads=tuple(
            read if not isinstance(read, TableRead) else _chosen(mine, chosen)
            for read, mine in zip(given.reads, reads, strict=True)
        ),
        truth=truth,
        attention=None,
    )
    return part, chosen


def _chosen(read: TableRead, chosen: Int64Array) -> TableRead:
    counts = np.maximum(read.counts, 0)
    at = ragged_index((np.cumsum(counts) - counts)[chosen], counts[chosen])
    return TableRead(starts=read.starts[chosen], counts=counts[chosen], slots=read.slots[at])
