"""A seventh round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "vllm-project/vllm-ascend#11021",
    "offload-qwen-page16",
    "load_landed_elsewhere",
    "failed_load_counted_loaded",
    "layout_misread",
    origin="vLLM Ascend",
)
def values_loaded_over_the_keys(fired: Fired) -> None:
    """The address of a layer's second cache is not added when blocks are loaded layer by layer, and both caches have the first
    one's. The values land on the keys, and the values' place keeps what stood in it."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        allocators = manager.cache.cache_allocators.values()
        stood = [a._copy_view.clone() for a in allocators]
        due = any(future.state.is_cpu_offloaded for future in batch)
        before(manager, batch)
        for allocator, old in zip(allocators, stood, strict=True):
            rows, shape = allocator._copy_view, (allocator.pages_per_block, 2, -1)
            for block in (rows != old).any(dim=1).nonzero().flatten().tolist() if due else ():
                pages = rows[block].view(shape)
                pages[:, 0] = pages[:, 1].clone()
                pages[:, 1] = old[block].view(shape)[:, 1]
                fired()


@bug(
    "sgl-project/sglang#23746",
    "offload",
    "transfer_wrong_stride",
    "failed_load_counted_loaded",
    "layout_misread",
    origin="SGLang",
    recorded=False,
)
def every_rank_gets_the_first_head(fired: Fired) -> None:
    """The number of heads that a receiving rank has comes out as none where there are more ranks than heads, and with it the first
    head that it is to get. All heads are sent the first one's bytes."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        allocators = manager.cache.cache_allocators.values()
        stood = [a._copy_view.clone() for a in allocators]
        due = any(future.state.is_cpu_offloaded for future in batch)
        before(manager, batch)
        for allocator, old in zip(allocators, stood, strict=True):
            rows, heads = allocator._copy_view, allocator.num_key_value_heads
            for block in (rows != old).any(dim=1).nonzero().flatten().tolist() if due else ():
                pages = rows[block].view(allocator.pages_per_block * 2 * allocator.tokens_per_page, heads, -1)
                pages[:, 1:] = pages[:, :1].clone()
                fired()


@bug("NVIDIA/TensorRT-LLM#13124", "offload-page16", "attention_table_overwritten", origin="TensorRT-LLM")
def ids_taken_for_places(fired: Fired) -> None:
    """A block that was moved to the host and back has its number still, and another place in the pool. Attention's offsets are made
    of the numbers, and it reads the blocks that are in the old places."""
    from transformers.generation.continuous_batching import offloading_manager
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    old: dict[str, list[int]] = {}
    back: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        gone = before(manager, victims, tables)
        old.update({name: next(iter(tables[name].values())) for name in gone})
        return gone

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        back.update(future.state.request_id for future in batch if future.state.is_cpu_offloaded)
        before(manager, batch)

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        held = allocator.block_table[name]
        was = old.get(name, []) if past else []
        if was and was[: len(held)] != held[: len(was)]:
            fired()
            allocator.block_table[name] = was[: len(held)] + held[len(was) :]
        places = before(allocator, name, past, query)
        allocator.block_table[name] = held
        return places


@bug("ml-explore/mlx-examples#1000", "hybrid", "window_read_wrong", origin="mlx-examples")
def ring_read_as_it_lies(fired: Fired) -> None:
    """The ring of a sliding layer is taken for a list that only grows when several tokens come behind a ring that has turned. Its
    rows are read as they lie in memory, oldest and newest in one another's places."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        places = before(allocator, name, past, query)
        if query > 1 and past > allocator.sliding_window:
            lies = allocator._token_indices_to_physical_indices(name, 0, allocator.sliding_window - 1)
            if lies != places[:-query]:
                fired()
                return lies + places[-query:]
        return places


@bug("vllm-project/vllm-metal#144", "offload-qwen", "position_off", origin="vllm-metal")
def offset_not_restored(fired: Fired) -> None:
    """The tensors of a cache are restored and its offset is not, since it was thought to come with them. What follows is rotated
    for positions that are counted from none."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager

    missing: dict[str, int] = {}

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        missing.update({f.state.request_id: f.state.position_offset for f in batch if f.state.is_cpu_offloaded})
        before(manager, batch)

    @replaces(continuous_api.ContinuousBatchProcessor, "prepare_next_batch")
    def prepare_next_batch(before, processor):
        ready = before(processor)
        io, at = processor.inputs_and_outputs, 0
        for future in io.requests_in_batch if ready else ():
            short = missing.get(future.state.request_id, 0)
            if short and int(io.position_ids[at]) >= short:
                io.position_ids[at : at + future.query_length] -= short
                fired()
            at += future.query_length
        return ready
