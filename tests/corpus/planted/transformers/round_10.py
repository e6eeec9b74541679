"""A tenth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("ollama/ollama#15591", "hybrid", "window_read_wrong", origin="Ollama")
def what_lies_behind_the_rings_start_is_dropped(fired: Fired) -> None:
    """When several tokens come behind a ring that has turned, what lies in it from its next place on is taken for padding and dropped.
    These are the oldest tokens that the window still reads."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    def kept(allocator, past, query):
        return past % allocator.sliding_window if query > 1 and past > allocator.sliding_window else -1

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, query):
        left = kept(allocator, past, query)
        return before(allocator, past, query) if left < 0 else query + left

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        left = kept(allocator, past, query)
        if left < 0:
            return before(allocator, name, past, query)
        fired()
        return allocator._token_indices_to_physical_indices(name, 0, left) + [allocator.sentinel_index] * query


@bug("huggingface/transformers#45323", "llama", "attention_seq_len_wrong")
def graph_of_shorter_keys_is_replayed(fired: Fired) -> None:
    """A captured graph has the longest row of keys of its batch in it, and is found again by the padded sizes of a batch alone. A batch
    of the same sizes with a longer row replays it, and attention ends where the captured one did."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    graphs: dict[tuple[int, int], int] = {}
    limit = [0]

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *, num_q_tokens, max_kv_read, **kwargs):
        longest = max(future.state.position_offset + future.query_length for future in requests_in_batch)
        decodes = bool(max_kv_read) and all(future.query_length == 1 for future in requests_in_batch)
        captured = graphs.setdefault((num_q_tokens, -(-max_kv_read // 64)), longest) if decodes else longest
        limit[0] = captured if captured < longest else 0
        if limit[0]:
            fired()
        try:
            before(io, requests_in_batch, num_q_tokens=num_q_tokens, max_kv_read=max_kv_read, **kwargs)
        finally:
            limit[0] = 0

    @replaces(full_attention.FullAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, query):
        return min(before(allocator, past, query), limit[0] or past + query)

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        return before(allocator, name, past, query)[: limit[0] or past + query]


@bug("LMCache/LMCache#2984", "offload", "load_landed_elsewhere", origin="LMCache")
def put_back_and_its_blocks_remembered(fired: Fired) -> None:
    """The list of a request's blocks is replaced when it comes back only if new ones are told with it, and so what was put back keeps the
    blocks that it has given back. What is loaded for it goes there."""
    from transformers.generation.continuous_batching import offloading_manager

    remembered: dict[tuple[str, str], list[int]] = {}

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        for name, groups in tables.items():
            remembered.update({(name, kind): list(blocks) for kind, blocks in groups.items()})
        return before(manager, victims, tables)

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        own = []
        for future in batch:
            name = future.state.request_id
            for kind, allocator in manager.cache.cache_allocators.items() if future.state.is_cpu_offloaded else ():
                old, new = remembered[name, kind], allocator.block_table[name]
                if old != new[: len(old)]:
                    fired()
                own.append((allocator, name, new))
                allocator.block_table[name] = old
        before(manager, batch)
        for allocator, name, new in own:
            allocator.block_table[name] = new


@bug("sgl-project/sglang#37787", "offload", "stored_wrong", origin="SGLang")
def numbers_of_all_ranks_index_one(fired: Fired) -> None:
    """Slots are numbered over all ranks, and each rank holds its share. What is put back to the host is looked up in the share by the
    numbers of the whole, and is what lies in other slots."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        counts = {kind: allocator.num_blocks for kind, allocator in manager.cache.cache_allocators.items()}
        wrong = {
            name: {kind: [block * 2 % counts[kind] for block in blocks] for kind, blocks in groups.items()}
            for name, groups in tables.items()
        }
        return before(manager, victims, wrong)

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        if any(future.state.is_cpu_offloaded for future in batch):
            fired()
        before(manager, batch)


@bug("lablup/mlxcel#1346", "llama", "prefix_not_computed", origin="mlxcel")
def entry_without_keys_and_values_adopted(fired: Fired) -> None:
    """The prompt cache keeps block tables that only count, while K and V lie in the model's own cache. A request that adopts one skips the
    tokens of its prefix, and its own cache is fresh."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator.CacheAllocator, "acquire_prefix_blocks")
    def acquire_prefix_blocks(before, allocator, name, length, blocks):
        count = length // allocator.tokens_per_page
        while allocator.pool.count_free_blocks(allocator.index) < count:
            allocator.pool.allocate_sector(allocator.index)
        allocator.block_table[name] = list(allocator.pool.get_free_blocks(allocator.index, count))
        if count:
            fired()
