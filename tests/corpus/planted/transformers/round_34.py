"""A thirty-fourth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "vllm-project/vllm-gaudi#1546",
    "qwen-contexts",
    "attention_table_overwritten",
    origin="vLLM Gaudi",
)
def context_of_a_prompt_is_read_from_the_front_of_the_pool(fired: Fired) -> None:
    """A fast path reads as many blocks as a request has from the front of the pool, which is right for decodes whose blocks are laid out that way. The part of a prompt that has been computed before goes through it as well, though its blocks
    lie anywhere: the next part attends to others' K and V."""
    from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool
    from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator

    front: list[int] = []  # the pool's blocks as it gives them out

    @replaces(CachePool, "get_free_blocks")
    def get_free_blocks(before, pool, index, count):
        given = before(pool, index, count)
        front.extend(block for block in given if block not in front)
        return given

    @replaces(FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        size, own = allocator.tokens_per_page, allocator.block_table[request_id]
        whole = past // size if count > 1 else 0
        if whole and own[:whole] != front[:whole]:
            allocator.block_table[request_id] = front[:whole] + own[whole:]
            fired()
        read = before(allocator, request_id, past, count)
        allocator.block_table[request_id] = own
        return read


@bug(
    "ggml-org/llama.cpp#25297",
    "offload-hybrid-turned",
    "load_landed_elsewhere",
    "layout_misread",
    origin="llama.cpp",
)
def window_that_has_turned_is_put_back_from_the_front(fired: Fired) -> None:
    """A window's tokens lie in a ring, each where its place falls when it is divided by the window. They are kept from the oldest to the newest and put back one behind another from the ring's first slot: when the ring had turned, each
    comes to lie in another's slot, and the next token overwrites one that is still in the window."""
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    @replaces(OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        back = [future.state for future in batch if future.state.is_cpu_offloaded]
        before(manager, batch)
        for state in back:
            for allocator in manager.cache.cache_allocators.values():
                if not isinstance(allocator, SlidingAttentionCacheAllocator):
                    continue
                size, end = allocator.sliding_window, state.position_offset
                if end <= size:
                    continue
                ring = allocator._token_indices_to_physical_indices(state.request_id, end - size, size)
                line = allocator._token_indices_to_physical_indices(state.request_id, 0, size)
                for halves in allocator._kv_token_views.values():
                    for half in halves:
                        kept = half[ring].clone()
                        if not kept.equal(half[line]):
                            fired()
                        half[line] = kept
