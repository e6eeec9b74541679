"""A fifth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("alibaba/rtp-llm#1174", "qwen-page16", "position_off", origin="RTP-LLM")
def positions_moved_past_their_end(fired: Fired) -> None:
    """The position ids of a request's rows are moved up by one with a length that counts more rows than it has. The next
    request's first token gets the position of the one behind it."""
    from transformers.generation.continuous_batching import continuous_api

    @replaces(continuous_api.ContinuousBatchProcessor, "prepare_next_batch")
    def prepare_next_batch(before, processor):
        ready = before(processor)
        io, at = processor.inputs_and_outputs, 0
        for future in io.requests_in_batch if ready else ():
            if at and future.query_length > 4:
                io.position_ids[at : at + 3] = io.position_ids[at + 1 : at + 4].clone()
                fired()
            at += future.query_length
        return ready


@bug("tenstorrent/tt-metal#44746", "page16", "slot_mapping", origin="tt-metal")
def users_of_a_prefill_changed_places(fired: Fired) -> None:
    """A prefill of several users at once puts their K and V into the cache in the order of its shards. One user's tokens go to
    another one's blocks."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    last: list[tuple[str, int, int]] = []

    @replaces(full_attention.FullAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, name, past, query):
        other = last[-1] if last else None
        last.append((name, past, query))
        if other and other[0] in allocator.block_table and other[0] != name and 4 < query <= other[2] and not past:
            fired()
            return before(allocator, other[0], other[1], query)
        return before(allocator, name, past, query)


@bug(
    "huggingface/transformers#45940",
    "hybrid",
    "attention_seq_len_wrong",
    "window_read_wrong",
    late="the first reads go to the right slot, only more often than they should",
)
def window_counted_full(fired: Fired) -> None:
    """The length of a sliding layer's keys is the window's before the window is full. Attention reads places that nobody has
    written yet."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, query):
        if 0 < past < allocator.sliding_window - 1:
            fired()
            return query + allocator.sliding_window - 1
        return before(allocator, past, query)

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        places = before(allocator, name, past, query)
        missing = allocator.sliding_window - 1 - past
        return [places[0]] * missing + places if past > 0 and missing > 0 else places


@bug(
    "sgl-project/sglang#13231",
    "offload-qwen",
    "read_before_landed",
    "failed_load_counted_loaded",
    "copy_failed",
    origin="SGLang",
)
def told_before_it_had_come(fired: Fired) -> None:
    """The receiver of a transfer is told of its end before the bytes are there. Its first forward reads what stood in the
    blocks, and they come behind it."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager

    coming: list = []

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        views = {kind: a._copy_view for kind, a in manager.cache.cache_allocators.items()}
        stood = {kind: view.clone() for kind, view in views.items()}
        due = any(future.state.is_cpu_offloaded for future in batch)
        before(manager, batch)
        if due:
            fired()
            for kind, view in views.items():
                changed = (view != stood[kind]).any(dim=1)
                coming.append((view, changed, view[changed].clone()))
                view[changed] = stood[kind][changed]

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        before(processor, model)
        for view, changed, rows in coming:
            view[changed] = rows
        coming.clear()


@bug("NVIDIA/TensorRT-LLM#15018", "qwen-page16", "page_leaked", origin="TensorRT-LLM", recorded=False)
def orphaned_blocks(fired: Fired) -> None:
    """A block whose place in the index another block has taken meanwhile is nobody's when its request ends. It is neither cached
    nor given back."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    ended: list[int] = []

    @replaces(cache_allocator.CacheAllocator, "free_blocks")
    def free_blocks(before, allocator, name, no_cache=False):
        ended.append(1)
        if len(ended) == 2 and len(allocator.block_table.get(name, ())) > 1:
            fired()
            allocator.block_table[name] = allocator.block_table[name][:-1]
        before(allocator, name, no_cache)
