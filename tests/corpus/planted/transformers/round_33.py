"""A thirty-third round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("ikawrakow/ik_llama.cpp#2186", "hybrid-together", "window_read_wrong", origin="ik_llama.cpp")
def window_is_cut_from_the_cells_of_all(fired: Fired) -> None:
    """What a layer with a window reads is cut to the last cells of the cache, as many as one window has, and that is counted over all requests of a step. With two or three of them each is left its share: the older part of what
    is inside its window is not read."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
        SlidingAttentionCacheAllocator,
    )

    together = [1]

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, ios, requests_in_batch, *args, **kwargs):
        together[0] = len(requests_in_batch)
        try:
            return before(ios, requests_in_batch, *args, **kwargs)
        finally:
            together[0] = 1

    def left_out(allocator, past: int) -> int:
        return max(0, min(past, allocator.sliding_window - 1) - allocator.sliding_window // together[0])

    @replaces(SlidingAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        return before(allocator, past, count) - left_out(allocator, past)

    @replaces(SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, count):
        if left_out(allocator, past):
            fired()
        return before(allocator, name, past, count)[left_out(allocator, past) :]


@bug("awslabs/keys_values#140", "hybrid-rings-page16", "slot_mapping", origin="keys_values")
def chunk_that_does_not_fill_a_ring_is_put_in_its_middle(fired: Fired) -> None:
    """The layers with a window keep a ring of as many tokens. As long as it is not full a chunk goes where it belongs. Into a full ring a chunk that is shorter than the ring is put a chunk's length too far on: it takes the places
    of tokens that are inside the window, and those that have left it stay and are read."""
    from transformers.generation.continuous_batching.cache_allocators.sliding_attention import (
        SlidingAttentionCacheAllocator,
    )

    written: dict[str, dict[int, int]] = {}  # by request: what position each place of its ring has

    @replaces(SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, name, past, count):
        window, ring = allocator.sliding_window, written.setdefault(name, {})
        if any(ring[position % window] != position for position in range(max(0, past - window + 1), past)):
            fired()  # what is read in this step, before it writes
        beside = count if 1 < count < window <= past else 0
        for position in range(past + max(0, count - window), past + count):
            ring[(position + beside) % window] = position
        return before(allocator, name, past + beside, count)
