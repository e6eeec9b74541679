"""A thirty-second round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("waybarrios/vllm-mlx#444", "qwen-bytes", "tokens_truncated_hash_kept", origin="vllm-mlx")
def only_the_last_byte_of_a_token_goes_into_the_key(fired: Fired) -> None:
    """What a block is found by is made of its tokens, of each of which only the lowest byte is taken. Two tokens that are 256 apart are the same to it: a prompt with other tokens hits the blocks of the one before and goes on
    behind K and V that are not its own."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    holds: dict[int, list[int]] = {}  # of a full block, the tokens that were written into it
    asked: dict[str, list[int]] = {}

    @replaces(cache_allocator, "compute_block_hash")
    def compute_block_hash(before, parent_hash, tokens):
        return before(parent_hash, [token & 0xFF for token in tokens])

    @replaces(cache_allocator.CacheAllocator, "mark_complete_blocks")
    def mark_complete_blocks(before, allocator, request_id, token_ids, new_new_blocks):
        size = allocator.tokens_per_page
        for place, block in enumerate(allocator.block_table[request_id]):
            if block not in allocator.ledger.block_to_hash:
                holds[block] = token_ids[place * size : (place + 1) * size]
        before(allocator, request_id, token_ids, new_new_blocks)

    @replaces(PagedAttentionCache, "search_prefix_match")
    def search_prefix_match(before, paged, request_id, prompt_ids):
        asked[request_id] = list(prompt_ids)
        return before(paged, request_id, prompt_ids)

    @replaces(PagedAttentionCache, "extend_read_and_write_indices")
    def extend_read_and_write_indices(before, paged, request_id, past, count, *args, **kwargs):
        for allocator in paged.cache_allocators.values():
            size, table = allocator.tokens_per_page, allocator.block_table[request_id]
            for place in range(min(past, len(asked[request_id])) // size):
                right = asked[request_id][place * size : (place + 1) * size]
                if holds.get(table[place], right) != right:
                    fired()
        return before(paged, request_id, past, count, *args, **kwargs)


@bug("microsoft/onnxruntime#32419", "hybrid-sawtooth", "window_read_wrong", origin="ONNX Runtime")
def oldest_of_the_window_is_looked_for_at_the_edge_of_a_block(fired: Fired) -> None:
    """Who reads a window that has gone round takes it that the oldest tokens are given up a block at a time. They are given up one by one: what is read begins at the edge of a block, takes in a token that has left the window and leaves
    out one that is in it."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past_length, query_length):
        right = before(allocator, request_id, past_length, query_length)
        window, size = allocator.sliding_window, allocator.tokens_per_page
        if past_length < window:
            return right
        start = (past_length + 1) // size * size % window
        wrong = allocator._token_indices_to_physical_indices(request_id, start, window - 1) + right[window - 1 :]
        if sorted(wrong) != sorted(right):
            fired()
        return wrong
