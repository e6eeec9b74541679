"""One step of transformers' in the recorder's words: which slots it writes and reads, and what its attention gets."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.attention import paged_read
from ...capture.forward_input import AttentionInput, TableRead
from ...capture.host_arrays import own_int64, ragged_index
from .layout import TransformersGroup


def written_slots(layout: TransformersGroup, io: Any, prefix: Int64Array, extend: Int64Array) -> Int64Array:
    """Return the slot of each token of the step, `[T]`."""
    if io.use_block_table:
        return layout.rows_to_slots(_allocator_rows(layout.allocator.get_write_indices, io, prefix, extend))
    return layout.rows_to_slots(own_int64(io.write_index_storage[layout.index, : io.true_write_sizes[layout.index]]))


def table_read(layout: TransformersGroup, io: Any, prefix: Int64Array, extend: Int64Array) -> TableRead:
    """Return the slots of the cached tokens that the step reads.

    They are the block table's; of a ring, whose table says less than that, what the step will index the pool with.
    """
    if not layout.ring_size and not io.use_block_table:
        tables = [layout.table(future.state.request_id) for future in io.requests_in_batch]
        found = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int64)
        for row, table in zip(found, tables, strict=True):
            row[: len(table)] = table
        return paged_read(found, layout.page_size, prefix)
    if io.use_block_table:
        read = _allocator_rows(layout.allocator.get_read_indices, io, prefix, extend)
        ends = np.cumsum(_lens(layout, prefix, extend))
    else:
        read = own_int64(io.read_index_storage[layout.index, : io.true_read_sizes[layout.index]])
        ends = own_int64(io.cumulative_seqlens_k[layout.allocator.layer_type][1 : prefix.size + 1])
    if not read.size or (not io.max_kv_read and not io.use_block_table):
        nothing = np.zeros_like(prefix)
        return TableRead(starts=nothing, counts=nothing, slots=read[:0])
    starts = ends - np.diff(ends, prepend=0)
    counts = np.clip(ends - starts - extend, 0, prefix)
    slots = layout.rows_to_slots(read[ragged_index(starts, counts)])
    first = prefix - counts
    if layout.ring_size:
        slots, first, counts = _with_predecessors(layout, io, slots, first, counts)
    return TableRead(starts=first, counts=counts, slots=slots)


def _lens(layout: TransformersGroup, prefix: Int64Array, extend: Int64Array) -> Int64Array:
    """Return `[bs]` how many positions the engine has each request attend to in a group."""
    lens = [layout.allocator.get_seqlen_k(p, e) for p, e in zip(prefix.tolist(), extend.tolist(), strict=True)]
    return np.array(lens, np.int64)


def attention_input(
    layouts: Sequence[TransformersGroup], io: Any, prefix: Int64Array, extend: Int64Array
) -> AttentionInput | None:
    """Return what the attention of the step gets: its `cu_seq_lens_q`, `cu_seq_lens_k` and `read_index`.

    Layers with a sliding window get the window's length; what it is off by is what the request's is off by. What they
    read comes from the ring in `table_read` and cannot be held against anything else. Nothing is known of the decode
    fast path, whose kernel has the block table alone.
    """
    if io.use_block_table:
        return None
    bs = prefix.size
    seq_lens = end = prefix + extend
    slots: list[TableRead | None] = []
    for layout in layouts:
        bounds = own_int64(io.cumulative_seqlens_k[layout.allocator.layer_type][: bs + 1])
        got = np.diff(bounds)
        seq_lens = np.where(seq_lens == end, end + got - _lens(layout, prefix, extend), seq_lens)
        if layout.ring_size:
            slots.append(None)
            continue
        size = int(io.true_read_sizes[layout.index]) if io.max_kv_read else 0  # else all of it is in the step itself
        read = own_int64(io.read_index_storage[layout.index, :size])
        counts = np.clip(size - bounds[:-1], 0, np.maximum(got, 0))
        rows = read[ragged_index(np.minimum(bounds[:-1], size), counts)]
        slots.append(TableRead(starts=np.zeros_like(counts), counts=counts, slots=layout.rows_to_slots(rows)))
    query_lens = np.diff(own_int64(io.cumulative_seqlens_q[: bs + 1]))
    return AttentionInput(seq_lens=np.maximum(seq_lens, 0), query_lens=query_lens, slots=tuple(slots))


def _with_predecessors(
    layout: TransformersGroup, io: Any, slots: Int64Array, first: Int64Array, counts: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Put the slot before each window in front of it: not read, but still in the ring, where this step's first token goes."""
    sliding = np.flatnonzero(first > 0)
    before = [layout.ring_slot(io.requests_in_batch[r].state.request_id, int(first[r]) - 1) for r in sliding]
    offsets = (np.cumsum(counts) - counts)[sliding]
    first, counts = first.copy(), counts.copy()
    first[sliding] -= 1
    counts[sliding] += 1
    return np.insert(slots, offsets, np.array(before, np.int64)), first, counts


def _allocator_rows(indices_of: Any, io: Any, prefix: Int64Array, extend: Int64Array) -> Int64Array:
    """Return the physical rows of a step on the decode fast path, which needs a GPU with flash attention; untested."""
    rows: list[int] = []
    for future, past, query in zip(io.requests_in_batch, prefix, extend, strict=True):
        rows.extend(indices_of(future.state.request_id, int(past), int(query)))
    return np.array(rows, np.int64)
