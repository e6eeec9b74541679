"""A twenty-second round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("sgl-project/sglang-jax#1297", "page16", "attention_table_overwritten", origin="SGLang-Jax")
def list_of_whole_pages_is_cut_by_the_tokens(fired: Fired) -> None:
    """For a batch of decodes the slots of all requests are put behind one another in whole pages, and where each request's begin is summed up from their tokens. All but the first
    read from too far in front, the more so the more last pages before them are not full: the ends of others' pages, and not their own last tokens."""
    from transformers.generation.continuous_batching import input_outputs

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        before(io, requests_in_batch, *args, **kwargs)
        if len(requests_in_batch) < 2 or any(future.query_length > 1 for future in requests_in_batch):
            return
        (allocator,) = io.cache.cache_allocators.values()
        size, listed, right = allocator.tokens_per_page, [], []
        for future in requests_in_batch:
            end, table = future.state.position_offset, allocator.block_table[future.state.request_id]
            for block in table[: -(-end // size)]:
                start = block * allocator.block_physical_stride
                listed += range(start, start + size)
            right += allocator.get_read_indices(future.state.request_id, end - 1, 1)
        if listed[: len(right)] != right:
            fired()
            stored = io.read_index_storage
            stored[0, : len(right)] = stored.new_tensor(listed[: len(right)])


@bug("RBLN-SW/vllm-rbln#154", "llama-again", "kv_changed", "pad_rows_keep_last_blocks", origin="vLLM RBLN")
def padding_goes_into_a_block_that_is_cached(fired: Fired) -> None:
    """Decodes are padded to an even number of rows, and the padding's K and V go into some block that no request has. A block that only the prefix cache has is such a one: its first
    token is written over, and whoever hits it reads that."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    damaged: dict[int, int] = {}  # by block the hash that it had
    padded: list[int] = []  # where this step's padding goes

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (allocator,) = io.cache.cache_allocators.values()
        ledger = allocator.ledger
        for block, known in list(damaged.items()):
            if ledger.block_to_hash.get(block) != known:
                del damaged[block]  # it went back to the pool
        if any(damaged.keys() & set(allocator.block_table[future.state.request_id]) for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)
        padded.clear()
        if len(requests_in_batch) % 2 and all(future.query_length == 1 for future in requests_in_batch):
            unused = next(iter(ledger.cached_blocks), None)
            if unused is not None:
                damaged[unused] = ledger.block_to_hash[unused]
                padded.append(unused * allocator.block_physical_stride)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, key_states, value_states, layer, *args, **kwargs):
        for slot in padded:
            for view, states in zip(allocator._kv_token_views[layer], (key_states, value_states), strict=True):
                view[slot] = states[-1]
        return before(allocator, key_states, value_states, layer, *args, **kwargs)
