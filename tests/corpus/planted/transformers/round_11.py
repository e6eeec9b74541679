"""An eleventh round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("LMCache/LMCache#4467", "offload", "layout_misread", origin="LMCache")
def heads_taken_for_keys_and_values(fired: Fired) -> None:
    """A page has an axis of keys and values and an axis of heads, and both are of two. The copy back from the host takes the one for the
    other, and V of the first head and K of the second come in one another's places."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        names = [future.state.request_id for future in batch if future.state.is_cpu_offloaded]
        counts = {name: dict(manager._request_id_to_cpu_blocks[name]) for name in names}
        before(manager, batch)
        for name in names:
            for kind, allocator in manager.cache.cache_allocators.items():
                heads, width = allocator.num_key_value_heads, allocator.head_dim
                shape = (allocator.pages_per_block, 2, allocator.tokens_per_page, heads, width)
                for block in allocator.block_table[name][: len(counts[name].get(kind, ()))]:
                    fired()
                    row = allocator._copy_view[block].view(allocator.cache_dtype)
                    row.copy_(row.view(shape).transpose(1, 3).contiguous().view(-1))


@bug(
    "Avarok-Cybersecurity/atlas#373",
    "few-twins",
    "eviction_of_locked_page",
    "free_too_early",
    "page_given_twice",
    origin="Atlas",
)
def not_counted_for_the_block_that_it_takes(fired: Fired) -> None:
    """A request has computed a block that the cache has already, and takes the cache's in its place. Its reference is counted for its own
    block, which it leaves, and the cache's has one too few: it is evicted while the request reads it."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    uncounted: dict[str, set[int]] = {}
    gone: set[int] = set()

    @replaces(cache_allocator.CacheAllocator, "mark_complete_blocks")
    def mark_complete_blocks(before, allocator, name, tokens, count):
        old, ledger = list(allocator.block_table[name]), allocator.ledger
        unread = set(ledger.cached_blocks)
        before(allocator, name, tokens, count)
        for own, taken in zip(old, allocator.block_table[name], strict=True):
            if own == taken:
                continue
            uncounted.setdefault(name, set()).add(taken)
            if taken in unread:
                ledger.cached_blocks[taken] = None
                continue
            left = ledger.shared_ref_counts.pop(taken) - 1
            if left > 1:
                ledger.shared_ref_counts[taken] = left

    @replaces(cache_allocator.BlockLedger, "evict_cached_blocks")
    def evict_cached_blocks(before, ledger):
        evicted = before(ledger)
        gone.update(evicted)
        return evicted

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(gone & uncounted.get(future.state.request_id, set()) for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("1bit-MONSTER/1bit-MONSTER#2436", "qwen", "kv_write_damaged", "not_of_the_model", origin="1bit-MONSTER")
def keys_staged_where_the_values_come_next(fired: Fired) -> None:
    """K and V go through one buffer on their way to the cache, and V is put into it while K is still being copied out. What is left of the
    copy brings V: the last of a chunk's tokens have V for their K."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    late: list[str] = []

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        if keys.shape[0] <= 16:
            return before(allocator, keys, values, layer, read_index, write_index)
        late.append("a chunk")
        staged = keys.clone()
        staged[-4:] = values[-4:]
        read = before(allocator, staged, values, layer, read_index, write_index)
        return read if read_index.numel() else (keys, values)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, *args, **kwargs):
        if late:
            fired()
        before(io, *args, **kwargs)


@bug("sgl-project/sglang#23346", "offload", "async_resume_wrong_input", origin="SGLang")
def next_token_kept_as_a_view(fired: Fired) -> None:
    """The token that a request goes on from when it comes back is kept as a view into a buffer of slots, and its slot is handed out while
    it waits. It is fed the token of the request that had the slot after it."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        others = [f.state for f in batch if not f.state.is_cpu_offloaded and f.state.generated_tokens]
        for future in batch:
            state = future.state
            if state.is_cpu_offloaded and len(state.tokens_to_process) == 1 and others:
                foreign = others[-1].generated_tokens[-1]
                if foreign != state.tokens_to_process[0]:
                    fired()
                    state.tokens_to_process = [foreign]
        before(manager, batch)
