"""A fourth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "ModelTC/LightLLM#997",
    "offload-qwen-page16",
    "failed_load_counted_loaded",
    "copy_failed",
    "host_copy_overwritten",
    origin="LightLLM",
)
def load_copies_the_other_way(fired: Fired) -> None:
    """What should load blocks from the host calls the kernel that stores them there. The device's blocks keep what stood in
    them, and the host's are overwritten with it."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        for future in batch:
            name = future.state.request_id
            if future.state.is_cpu_offloaded:
                fired()
                for kind, ids in manager._request_id_to_cpu_blocks[name].items():
                    allocator = manager.cache.cache_allocators[kind]
                    for place, block in zip(ids, allocator.block_table.get(name, ()), strict=False):
                        manager._cpu_views[kind][place] = allocator._copy_view[block]
        before(manager, batch)


@bug(
    "sgl-project/sglang#31427", "offload-page16", "host_copy_overwritten", "failed_load_counted_loaded", origin="SGLang"
)
def host_block_freed_before_its_load(fired: Fired) -> None:
    """The host's copy of a block is not locked while it waits to be loaded back. The host evicts it and stores another request's
    block there, and that is what the load brings."""
    from transformers.generation.continuous_batching import offloading_manager

    lost: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "_reserve_cpu_blocks")
    def _reserve_cpu_blocks(before, manager, counts):
        given = before(manager, counts)
        waiting = next(reversed(manager._request_id_to_cpu_blocks.items()), None)
        if given is not None and waiting is not None and not lost:
            lost.add(waiting[0])
            given = {kind: [*waiting[1][kind][:1], *ids[1:]] for kind, ids in given.items()}
        return given

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        if any(future.state.is_cpu_offloaded and future.state.request_id in lost for future in batch):
            fired()
        before(manager, batch)


# The ring is read before it is written: the step that is marked writes the damage, the next one reads it.
@bug("huggingface/transformers#37574", "hybrid-long", "slot_mapping", "window_read_wrong", reads=30)
def ring_turns_one_too_early(fired: Fired) -> None:
    """The cache of a sliding layer is rolled when the window's last place is to be filled, and not behind it. The token lands on
    the oldest one that the window still reads."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, name, past, query):
        if query == 1 and past == allocator.sliding_window - 1:
            fired()
            return before(allocator, name, past + 1, query)
        return before(allocator, name, past, query)


@bug("ml-explore/mlx-lm#390", "hybrid", "window_read_wrong", "attention_seq_len_wrong", origin="mlx-lm")
def window_has_one_too_many(fired: Fired) -> None:
    """The window's length is taken without the token itself, so that a token sees one more before it than it should. It is the
    one whose place in the ring is about to be overwritten."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, query):
        return query + min(past, allocator.sliding_window)

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        if past < allocator.sliding_window:
            return before(allocator, name, past, query)
        fired()
        count = allocator.sliding_window
        places = allocator._token_indices_to_physical_indices(name, past % count, count)
        return places + [allocator.sentinel_index] * query


@bug(
    "sgl-project/sglang#33970",
    "offload-qwen",
    "stored_wrong",
    "failed_load_counted_loaded",
    "copy_failed",
    "host_copy_overwritten",
    origin="SGLang",
)
def sent_before_it_was_written(fired: Fired) -> None:
    """The transfer of a chunk's blocks does not wait for the forward that writes them. What leaves is what stood in the blocks
    before it."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager

    stood: dict = {}
    stale: set[str] = set()

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for kind, allocator in processor.cache.cache_allocators.items():
            stood[kind] = allocator._copy_view.clone()
        before(processor, model)

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        gone = before(manager, victims, tables)
        for name in gone:
            for kind, ids in manager._request_id_to_cpu_blocks[name].items():
                for place, block in zip(ids, tables[name][kind], strict=True):
                    if bool((manager._cpu_views[kind][place] != stood[kind][block]).any()):
                        stale.add(name)
                        manager._cpu_views[kind][place] = stood[kind][block]
        return gone

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        if any(future.state.is_cpu_offloaded and future.state.request_id in stale for future in batch):
            fired()
        before(manager, batch)
