"""How transformers' paged cache lies in memory, in the trace's words: groups, slots, streams of bytes; and what a step reads.

A block is one page of K and V for each layer of its group; the engine indexes rows of `[kv_heads, head_dim]`, a block
being `block_physical_stride` rows and its first `tokens_per_page` rows the tokens of the group's first layer. A slot
here is `block * tokens_per_page + offset`, the same for all layers. Blocks of the first sector are never given out, so
slot 0 is free for padding, and the write-trash row maps to it.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.ops.hash.kv_source import KvSource
from ...capture.attention import paged_read
from ...capture.forward_input import AttentionInput, TableRead
from ...capture.host_arrays import own_int64, ragged_index
from ...capture.kv_tensor import KvTensor
from ...trace.header import EngineInfo, KvStream, ModelInfo, NotWatched, PoolGroup, StateTable, TraceHeader

logger = logging.getLogger("kvcanary")

ALIGN_BYTES = 16
MASKED: Final = ("sdpa", "paged|sdpa", "paged|eager")  # kinds of attention that get a mask, or none and look at all


class TransformersGroup:
    """One allocator of the cache: a pool group with a table of its own.

    `name` is the type of its layers; `window` the number of cached tokens that a forward reads, 0 for all of them;
    `ring_size` the number of slots that a sliding group's request goes round in, 0 for a full group.
    """

    def __init__(self, index: int, name: str, allocator: Any) -> None:
        self.name = name
        self.allocator = allocator
        self.index = index
        self.page_size = int(allocator.tokens_per_page)
        self.stride = int(allocator.block_physical_stride)
        self.trash_row = int(allocator.write_trash_index)
        self.ring_size = int(getattr(allocator, "sliding_window", 0) or 0)
        self.window = self.ring_size - 1 if self.ring_size else 0
        self.kind = "swa" if self.ring_size else "full"
        self.first_slot = 2 * int(allocator.blocks_per_sector) * self.page_size  # behind what is there for padding
        self.num_slots = int(allocator._copy_view.shape[0]) * self.page_size
        if self.ring_size == 1:
            raise ValueError("a sliding window of 1 reads nothing from the cache, so there is nothing to record")

    def rows_to_slots(self, rows: Int64Array) -> Int64Array:
        """Return the slot of each physical row; a row that is no token of the group lands beyond the pool."""
        block, offset = np.divmod(rows, self.stride)
        slots = np.where(offset < self.page_size, block * self.page_size + offset, self.num_slots + np.abs(rows))
        slots[rows == self.trash_row] = 0
        return slots

    def block_slots(self, blocks: list[int]) -> tuple[Int64Array, Int64Array]:
        """Return the slots of whole blocks as runs `(starts, counts)`, block by block."""
        starts = np.array(blocks, np.int64) * self.page_size
        return starts, np.full(starts.size, self.page_size, np.int64)

    def table(self, request: str) -> list[int]:
        """Return the blocks of a request as they are now."""
        return self.allocator.block_table.get(request, [])

    def ring_slot(self, request: str, position: int) -> int:
        """Return the slot of a position in a request's ring; -1 if it has no block for it."""
        blocks = self.table(request)
        page, offset = divmod(position % self.ring_size, self.page_size)
        return blocks[page] * self.page_size + offset if page < len(blocks) else -1

    def streams(self, layers: tuple[int, ...], capture_bytes: int, dtype: str) -> list[tuple[KvStream, KvSource]]:
        """Return K and V of each of the layers, with where their bytes lie; none if a token's K is no row of 16 bytes."""
        blocks = self.allocator._copy_view  # [blocks, bytes_per_block] uint8
        page_bytes = int(self.allocator.bytes_per_page) // 2
        token_bytes = page_bytes // self.page_size
        if token_bytes % ALIGN_BYTES:
            return []
        read = min(capture_bytes, token_bytes)
        found = []
        for layer in layers:
            first = 2 * page_bytes * self.allocator.layer_indices.index(layer)
            for half, begin in (("K", first), ("V", first + page_bytes)):
                rows = blocks[:, begin : begin + page_bytes]
                stream = KvStream(half=half, layer=layer, bytes_per_token=token_bytes, capture_bytes=read, dtype=dtype)
                source = KvSource(tensor=rows, page_size=self.page_size, bytes_per_token=token_bytes, read_bytes=read)
                found.append((stream, source))
        return found

    def samples(self, seed: int, dtype: str) -> list[tuple[KvStream, KvTensor]]:
        """Return what samples K and V of all layers, with where they lie; none if the cache is not the host's."""
        blocks, layers = self.allocator._copy_view, tuple(map(int, self.allocator.layer_indices))
        page_bytes = int(self.allocator.bytes_per_page) // 2
        if blocks.device.type != "cpu":
            return []
        found = []
        for half, first in (("K", 0), ("V", page_bytes)):
            begins = [2 * page_bytes * place + first for place in range(len(layers))]
            pages = (blocks[:, begin : begin + page_bytes].unflatten(1, (self.page_size, -1)) for begin in begins)
            source = KvTensor(tensor=tuple(pages), axes="block slot byte")
            found.append((source.sampling_stream(half, layers=layers, seed=seed, dtype=dtype), source))
        return found


class StepTensors:
    """What a step of asynchronous batching gets: the tensors of the device's side, and the requests of the host's.

    Tokens that the step before has sampled are filled into `input_ids` on the device, when the step runs.
    """

    def __init__(self, pair: Any) -> None:
        self._device = pair.device_io
        self.requests_in_batch = pair.host_io.requests_in_batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def step_tensors(processor: Any) -> Any:
    """Return what the step that a processor is about to run gets."""
    io = processor.inputs_and_outputs
    return StepTensors(io.io_pairs[io.current_pair]) if processor.use_async_batching else io


def describe_engine(
    processor: Any, *, layers: tuple[int, ...] | None, capture_bytes: int, seed: int | None = None
) -> tuple[TraceHeader, list[TransformersGroup], dict[tuple[int, int], KvSource | KvTensor]]:
    """Return the header of a `ContinuousBatchProcessor`'s trace, its groups' layouts and its KV sources.

    Captured are the leading bytes of each token's K and V, 0 for none, of `layers`, None for each group's first; of all
    layers samples, unless `seed` is None.

    Raises:
        ValueError: a layer that the model does not have.
    """
    import transformers

    cache, config = processor.cache, processor.config
    groups: list[PoolGroup] = []
    sources: dict[tuple[int, int], KvSource | KvTensor] = {}
    layouts: list[TransformersGroup] = []
    not_watched: list[NotWatched] = []
    dtype = str(cache.dtype).removeprefix("torch.")
    unknown = sorted(set(layers or ()) - set(cache.layer_to_allocator))
    if unknown:
        raise ValueError(f"layers {unknown} asked for, the model has {len(cache.layer_to_allocator)} cached layers")
    for index, (name, allocator) in enumerate(cache.cache_allocators.items()):
        layout = TransformersGroup(index, name, allocator)
        layouts.append(layout)
        wanted = tuple(n for n in allocator.layer_indices if capture_bytes and (layers is None or n in layers))
        streams: list[tuple[KvStream, KvSource | KvTensor]] = []
        streams += layout.streams(wanted[:1] if layers is None else wanted, capture_bytes, dtype)
        if streams and seed is not None and layers is None:
            streams += layout.samples(seed, dtype)
        if wanted and not streams:
            reason = f"a token's K is no multiple of {ALIGN_BYTES} bytes"
            not_watched.append(NotWatched(what="bytes", name=name, reason=reason))
        sources |= {(index, number): source for number, (_, source) in enumerate(streams)}
        offloading = processor.offloading_manager
        groups.append(
            PoolGroup(
                name=name,
                kind=layout.kind,
                window=layout.window,
                table=index,
                num_slots=layout.num_slots,
                page_size=layout.page_size,
                streams=tuple(stream for stream, _ in streams),
                reads_before_write=layout.kind == "swa",
                num_layers=len(allocator.layer_indices),
                host_num_slots=offloading._num_cpu_sectors * allocator.blocks_per_sector * layout.page_size,
            )
        )
    kind = str(getattr(config, "_attn_implementation", ""))
    if kind not in MASKED or cache.device.type != "cpu":
        reason = f"{kind} gets a window in its place" if kind not in MASKED else "they are read on the host alone"
        not_watched.append(NotWatched(what="other", name="the masks of attention", reason=reason))
    rows = 2 * int(step_tensors(processor).max_requests_per_batch) + 1
    width = int(cache.max_tokens_read)
    if all(layout.ring_size for layout in layouts):  # a ring holds requests of any length
        width = max(width, int(getattr(config, "max_position_embeddings", 0) or 0))
    overlap = ", and steps no longer overlap" if processor.use_async_batching else ""
    waits = (f"every forward waits for the device{overlap}",) if cache.device.type != "cpu" else ()
    for note in waits:
        logger.warning("kvcanary: %s", note)
    header = TraceHeader(
        engine=EngineInfo(name="transformers", version=transformers.__version__),
        model=ModelInfo(name=str(config.model_type), dtype=dtype),
        groups=tuple(groups),
        tables=tuple(StateTable(name=group.name, rows=rows, width=width) for group in groups),
        truth_table=StateTable(name="truth", rows=rows, width=width + 1),
        not_watched=tuple(not_watched),
        notes=("slot = block * page_size + offset in the page; slot 0 stands for the write-trash row", *waits),
    )
    return header, layouts, sources


def written_slots(layout: TransformersGroup, io: Any, bs: int) -> Int64Array:
    """Return the slot of each token of the step, `[T]`, of `bs` requests."""
    if io.use_block_table:  # the kernel writes each request's token behind those that it attends to
        ends = np.diff(own_int64(io.cumulative_seqlens_k[layout.name][: bs + 1]))
        return own_int64(_through_table(layout, io, ends, ends - 1).slots)
    return layout.rows_to_slots(own_int64(io.write_index_storage[layout.index, : io.true_write_sizes[layout.index]]))


def table_read(layout: TransformersGroup, io: Any, prefix: Int64Array, extend: Int64Array) -> TableRead:
    """Return the slots of the cached tokens that the step reads.

    They are the block table's; of a ring, whose table says less than that, what the step will index the pool with.
    """
    if not layout.ring_size:
        tables = [layout.table(future.state.request_id) for future in io.requests_in_batch]
        found = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int64)
        for row, table in zip(found, tables, strict=True):
            row[: len(table)] = table
        return paged_read(found, layout.page_size, prefix)
    read = own_int64(io.read_index_storage[layout.index, : io.true_read_sizes[layout.index]])
    ends = own_int64(io.cumulative_seqlens_k[layout.name][1 : prefix.size + 1])
    if not read.size or not io.max_kv_read:
        nothing = np.zeros_like(prefix)
        return TableRead(starts=nothing, counts=nothing, slots=read[:0])
    starts = ends - np.diff(ends, prepend=0)
    counts = np.clip(ends - starts - extend, 0, prefix)
    slots = layout.rows_to_slots(read[ragged_index(starts, counts)])
    first = prefix - counts
    whole = first <= prefix - layout.window  # to less than the window nothing is added that would make it look whole
    slots, first, counts = _with_predecessors(layout, io, slots, first, counts, np.flatnonzero(whole & (first > 0)))
    return TableRead(starts=first, counts=counts, slots=slots)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowsRead:
    """What a step's indices say of the rows that a group's cache hands to attention.

    `read` are their slots; of a ring, to which this step's tokens come as they are handed in, where those are written. `at`
    `[n]` are their places among all rows, `tokens` `[n]` which of the step's tokens they are handed in as, -1 for none.
    """

    read: TableRead
    at: Int64Array
    tokens: Int64Array


def rows_read(
    layout: TransformersGroup, io: Any, prefix: Int64Array, extend: Int64Array, written: Int64Array
) -> RowsRead | None:
    """Return the rows that attention gets of a group, whose tokens are `written` to; None on the decode fast path.

    Of a ring requests are left out whose length there does not fit: nothing says which positions their rows have.
    """
    if io.use_block_table:
        return None
    bounds = own_int64(io.cumulative_seqlens_k[layout.name][: prefix.size + 1])
    got = np.maximum(np.diff(bounds), 0)
    size = int(io.true_read_sizes[layout.index]) if io.max_kv_read else 0  # else all of it is in the step itself
    read = own_int64(io.read_index_storage[layout.index, :size])
    counts = np.clip(size - bounds[:-1], 0, got)
    starts = np.zeros_like(counts)
    if layout.ring_size:
        cached = got - extend
        counts[(cached < 0) | (cached > prefix) | (counts < got)] = 0
        starts = np.where(counts > 0, prefix - cached, 0)
    at = ragged_index(np.minimum(bounds[:-1], size), counts)
    slots = layout.rows_to_slots(read[at])
    tokens = np.full_like(at, -1)
    if layout.ring_size:
        own = ragged_index(starts - prefix, counts) >= 0
        tokens[own] = ragged_index(np.cumsum(extend) - extend + starts - prefix, counts)[own]
        slots[own] = written[tokens[own]]
    return RowsRead(read=TableRead(starts=starts, counts=counts, slots=slots), at=at, tokens=tokens)


def attention_lens(
    layouts: Sequence[TransformersGroup], io: Any, prefix: Int64Array, extend: Int64Array
) -> AttentionInput:
    """Return the lengths that the attention of the step gets: its `cu_seq_lens_q` and `cu_seq_lens_k`.

    Layers with a sliding window get the window's length, of which `table_read` says what it reads of the ring; if the lengths
    do not fit what is read, what one is off by is what the request's is off by.
    """
    bs = prefix.size
    seq_lens = end = prefix + extend
    for layout in layouts:
        bounds = own_int64(io.cumulative_seqlens_k[layout.name][: bs + 1])
        got = np.diff(bounds)
        off = got - extend - (np.minimum(prefix, layout.window) if layout.window else prefix)
        if layout.window and io.max_kv_read and bounds[bs] == io.true_read_sizes[layout.index]:
            off[(got >= extend) & (got <= end)] = 0
        seq_lens = np.where(seq_lens == end, end + off, seq_lens)
    query_lens = np.diff(own_int64(io.cumulative_seqlens_q[: bs + 1]))
    return AttentionInput(seq_lens=np.maximum(seq_lens, 0), query_lens=query_lens)


def indexed_read(layout: TransformersGroup, io: Any, rows: RowsRead | None, bs: int) -> TableRead | None:
    """Return the slots that attention gets of `bs` requests: by the `read_index`, or by the block table of the decode fast path.

    None of a ring: nothing else says which slots it ought to read.
    """
    if layout.ring_size:
        return None
    if rows is not None:
        return rows.read
    return _through_table(layout, io, np.maximum(np.diff(own_int64(io.cumulative_seqlens_k[layout.name][: bs + 1])), 0))


def _with_predecessors(
    layout: TransformersGroup, io: Any, slots: Int64Array, first: Int64Array, counts: Int64Array, sliding: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Put the slot before the windows of `sliding` in front: not read, but still in the ring, where this step's first token goes."""
    before = [layout.ring_slot(io.requests_in_batch[r].state.request_id, int(first[r]) - 1) for r in sliding]
    offsets = (np.cumsum(counts) - counts)[sliding]
    first, counts = first.copy(), counts.copy()
    first[sliding] -= 1
    counts[sliding] += 1
    return np.insert(slots, offsets, np.array(before, np.int64)), first, counts


def _through_table(layout: TransformersGroup, io: Any, ends: Int64Array, starts: Int64Array | None = None) -> TableRead:
    """Return the slots of positions up to `ends`, `[bs]`, through the block table that the decode fast path's kernel gets.

    An entry counts in pages, of which a block has one for each layer and half.
    """
    read = paged_read(io.block_table[layout.index, : ends.size], layout.page_size, ends, starts=starts)
    return dataclasses.replace(read, slots=layout.rows_to_slots(own_int64(read.slots)))
