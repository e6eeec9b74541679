"""A twelfth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("jundot/omlx#2272", "offload", "load_landed_elsewhere", "load_of_other_prefix", origin="oMLX")
def block_of_another_form_is_passed_over(fired: Fired) -> None:
    """Stored blocks are put together again one behind another, and one whose form is not the expected one is passed over without a word. What
    follows it moves up into its place, and the last of the request's blocks gets nothing."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        for future in batch:
            name = future.state.request_id
            for kind, blocks in (
                manager._request_id_to_cpu_blocks[name] if future.state.is_cpu_offloaded else {}
            ).items():
                if len(blocks) > 2:
                    fired()
                    manager._cpu_pool.free_blocks(manager.cache.cache_allocators[kind].index, [blocks.pop(1)])
        before(manager, batch)


@bug("sgl-project/sglang#34820", "offload", "stored_wrong", origin="SGLang")
def kept_in_half_the_precision(fired: Fired) -> None:
    """What is kept of a request is kept in the type of the activations, which has fewer bits than what was computed. It comes back rounded, and
    the request goes on from that."""
    import torch
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        done = before(manager, victims, tables)
        for name in done:
            for kind, blocks in manager._request_id_to_cpu_blocks[name].items():
                rows = manager._cpu_views[kind].view(manager.cache.cache_allocators[kind].cache_dtype)
                rows[blocks] = rows[blocks].to(torch.bfloat16).to(rows.dtype)
        return done

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        if any(future.state.is_cpu_offloaded for future in batch):
            fired()
        before(manager, batch)


@bug("vllm-project/vllm-ascend#11791", "llama", "kv_write_damaged", "not_of_the_model", origin="vLLM Ascend")
def sharing_layer_writes_as_well(fired: Fired) -> None:
    """A layer that has no cache of its own reads that of an earlier layer, and its K and V are written all the same. They go over those of the
    layer that the cache belongs to."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    written: list[int] = []

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        read = before(allocator, keys, values, layer, read_index, write_index)
        if layer == 1:
            k_cache, v_cache = allocator._kv_token_views[0]
            k_cache.index_copy_(0, write_index, keys)
            v_cache.index_copy_(0, write_index, values)
            written.append(layer)
        return read

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, *args, **kwargs):
        if written:
            fired()
        before(io, *args, **kwargs)


@bug("alibaba/rtp-llm#1256", "qwen", "bad_values_written", "kv_write_damaged", origin="rtp-llm")
def scale_of_nought(fired: Fired) -> None:
    """The scales of a cache of eight bits are set to nought when they are made, and the path that is to set them is not taken. What is written
    through one, from the second step on, is nothing at all."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    steps: list[int] = []

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        if len(steps) > 1:
            values = values * 0.0
        return before(allocator, keys, values, layer, read_index, write_index)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, *args, **kwargs):
        steps.append(1)
        if len(steps) > 2:
            fired()
        before(io, *args, **kwargs)
