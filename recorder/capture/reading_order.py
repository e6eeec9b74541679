"""Steps in which one request reads what another writes, for engines that store before they attend.

Where each layer stores K and V of all tokens of a forward before any of them attends, a request may be given a prefix
that another request of the same forward computes. A replay reads before it writes: such a forward is recorded as several,
writers first.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.capture.changes import RowRuns
from .forward_input import BlockTable, ForwardInput, TableRead, TruthTokens, copy_read
from .host_arrays import own_int64, picked, shares


def in_reading_order(given: ForwardInput) -> list[tuple[ForwardInput, Int64Array]]:
    """Split a forward into those that read only what earlier ones have written.

    Args:
        given: the whole forward; padding rows and tokens come last.

    Returns:
        Each forward with the indices `[n] int64` of its requests, ascending; `given` itself if nobody reads what
        another writes. Of several, the last has the padding, and none says what attention got.
    """
    prefix, extend = own_int64(given.prefix_lens), own_int64(given.extend_lens)
    lent = given.req_pool_indices is None  # then padding has no id
    rows = (own_int64(given.request_ids) >= 0).astype(np.int64) if lent else own_int64(given.req_pool_indices)
    lens = np.where(rows == 0, 0, np.maximum(extend, 0))
    level, start = np.zeros(rows.size, np.int64), np.zeros_like(prefix)
    waits = {
        pair
        for read, written in zip(given.reads, given.out_cache_loc, strict=True)
        for pair in _waits(copy_read(read, rows, prefix, start), own_int64(written)[: int(lens.sum())], lens)
    }
    for _ in range(rows.size):  # a circle, which only a broken table has, ends here too
        before = level.copy()
        for reader, writer in waits:
            level[reader] = max(int(level[reader]), 1 + int(level[writer]))
        if np.array_equal(before, level):
            break
    if not level.any():
        return [(given, np.arange(rows.size, dtype=np.int64))]
    level[rows == 0] = level.max()
    waves = np.unique(level).tolist()
    return [
        _part(given, lens, np.flatnonzero(level == wave), part=number, padded=wave == waves[-1])
        for number, wave in enumerate(waves)
    ]


def _waits(read: RowRuns, written: Int64Array, lens: Int64Array) -> set[tuple[int, int]]:
    """Return pairs of requests of which the first reads a slot that the second, another, writes."""
    if not written.size:
        return set()
    order = np.argsort(written, kind="stable")
    at = np.minimum(np.searchsorted(written, read.values, sorter=order), order.size - 1)
    hit = (written[order[at]] == read.values) & (read.values > 0)
    requests = np.arange(lens.size, dtype=np.int64)
    reader, writer = np.repeat(requests, read.counts)[hit], np.repeat(requests, lens)[order[at[hit]]]
    other = reader != writer
    return set(zip(reader[other].tolist(), writer[other].tolist(), strict=True))


def _part(
    given: ForwardInput, lens: Int64Array, chosen: Int64Array, *, part: int, padded: bool
) -> tuple[ForwardInput, Int64Array]:
    tokens = np.arange(own_int64(given.input_ids).size, dtype=np.int64)
    padding = tokens[int(lens.sum()) :] if padded else tokens[:0]
    tokens = np.append(shares(tokens, lens, chosen), padding)
    truth = None
    if given.truth is not None:
        known = own_int64(given.truth.lens)
        truth = TruthTokens(flat=shares(own_int64(given.truth.flat), known, chosen), lens=known[chosen])
    made = replace(
        given,
        req_pool_indices=None if given.req_pool_indices is None else own_int64(given.req_pool_indices)[chosen],
        request_ids=own_int64(given.request_ids)[chosen],
        prefix_lens=own_int64(given.prefix_lens)[chosen],
        extend_lens=own_int64(given.extend_lens)[chosen],
        input_ids=own_int64(given.input_ids)[tokens],
        positions=own_int64(given.positions)[tokens],
        out_cache_loc=tuple(own_int64(slots)[tokens] for slots in given.out_cache_loc),
        reads=tuple(_chosen(read, chosen) for read in given.reads),
        truth=truth,
        attention=None,
        states=tuple(state and state.of(chosen, ran=part > 0) for state in given.states),
        part=part,
    )
    return made, chosen


def _chosen(read: Any, chosen: Int64Array) -> Any:
    if isinstance(read, BlockTable):
        return read if read.blocks is None else replace(read, blocks=picked(read.blocks, chosen))
    if not isinstance(read, TableRead):
        return read
    counts = np.maximum(own_int64(read.counts), 0)
    slots = shares(own_int64(read.slots), counts, chosen)
    return TableRead(starts=own_int64(read.starts)[chosen], counts=counts[chosen], slots=slots)
