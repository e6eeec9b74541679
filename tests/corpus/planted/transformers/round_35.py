"""A thirty-fifth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("lablup/mlxcel#679", "hybrid-clamped", "window_read_wrong", origin="mlxcel")
def chunk_and_what_is_before_it_are_clamped_to_one_window(fired: Fired) -> None:
    """A layer with a window hands out what it has kept together with the tokens of the chunk, and clamps both to the length of one window. That is right for a single token; of a chunk the first token loses as much of its window as
    the chunk is long, and the next ones a little less each."""
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator

    def kept(allocator, past, count):
        there = min(past, allocator.sliding_window - 1)
        return min(there, max(0, allocator.sliding_window - count)) if count > 1 else there

    @replaces(SlidingAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        return kept(allocator, past, count) + count

    @replaces(SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        read = before(allocator, request_id, past, count)
        clamped = read[len(read) - count - kept(allocator, past, count) :]
        if clamped != read:
            fired()
        return clamped


@bug(
    "NVIDIA/TensorRT-LLM#13592",
    "offload-qwen-suspends",
    "position_off",
    "prefix_not_computed",
    "slot_mapping",
    origin="TensorRT-LLM",
)
def token_that_was_sampled_last_counts_as_stored_after_a_suspension(fired: Fired) -> None:
    """A request that was in the step before has a token more than the cache, which is taken into account when it is computed. Whether it was there is told by its row in that step, and the row is not forgotten when the request is suspended: when it
    comes back its last token counts as stored, and is computed one place further on, behind a slot in which there is nothing."""
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    @replaces(OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        back = [future for future in batch if future.state.is_cpu_offloaded]
        before(manager, batch)
        for future in back:
            state = future.state
            room = min(
                len(allocator.block_table[state.request_id]) * allocator.tokens_per_page
                for allocator in manager.cache.cache_allocators.values()
            )
            if state.generated_tokens and state.position_offset + future.query_length < room:
                state.position_offset += 1
                fired()
