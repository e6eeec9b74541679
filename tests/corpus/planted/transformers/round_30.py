"""A thirtieth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "openvinotoolkit/openvino#37377",
    "hybrid-tails",
    "attention_seq_len_wrong",
    "window_read_wrong",
    origin="OpenVINO",
)
def length_in_the_window_is_rounded_up_to_whole_blocks(fired: Fired) -> None:
    """A step of one token takes for the length of its context in a layer with a window what the blocks have room for, not how much of them has been filled. The last block's tail is read with it, where nothing of this request
    has been stored yet."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    owner = sliding_attention.SlidingAttentionCacheAllocator

    def room(allocator, past, count):
        """Return how many stored tokens are read by a step."""
        if count > 1 or past >= allocator.sliding_window:
            return min(past, allocator.sliding_window - 1)
        return min(-(-past // allocator.tokens_per_page) * allocator.tokens_per_page, allocator.sliding_window)

    @replaces(owner, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past_length, query_length):
        return query_length + room(allocator, past_length, query_length)

    @replaces(owner, "get_read_indices")
    def get_read_indices(before, allocator, request, past_length, query_length):
        count = room(allocator, past_length, query_length)
        if past_length >= allocator.sliding_window or count == past_length:
            return before(allocator, request, past_length, query_length)
        fired()
        places = allocator._token_indices_to_physical_indices(request, 0, count)
        return places + [allocator.sentinel_index] * query_length


@bug(
    "vllm-project/vllm#30692",
    "offload-qwen-grow",
    "layout_misread",
    "stored_wrong",
    "load_landed_elsewhere",
    "transfer_wrong_stride",
    origin="vLLM",
)
def number_of_a_block_is_taken_for_that_of_a_part(fired: Fired) -> None:
    """A block is made of several parts, as the kernel wants them, and what copies blocks to the host and back takes one such part for a block: the number of a block is looked up as if all were that small. Other places than the
    request's own are stored, and other places than its own are filled when it comes back."""
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    def in_parts(before, manager, *args):
        """Copy as if a block had the size of one layer's page."""
        kept = []
        for name, allocator in manager.cache.cache_allocators.items():
            kept.append((name, allocator, allocator.bytes_per_block, allocator._copy_view, manager._cpu_views[name]))
            size = allocator.bytes_per_page
            allocator.bytes_per_block = size
            allocator._copy_view = allocator._copy_view.view(-1, size)
            manager._cpu_views[name] = manager._cpu_tensor.view(-1, size)
        try:
            return before(manager, *args)
        finally:
            for name, allocator, size, view, host in kept:
                allocator.bytes_per_block, allocator._copy_view, manager._cpu_views[name] = size, view, host

    @replaces(OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, *args):
        return in_parts(before, manager, *args)

    @replaces(OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        if any(future.state.is_cpu_offloaded for future in requests_in_batch):
            fired()
        return in_parts(before, manager, requests_in_batch)
