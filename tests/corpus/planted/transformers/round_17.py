"""A seventeenth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("huggingface/transformers#46117", "forks-few", "page_leaked", recorded=False)
def fork_that_failed_keeps_its_references(fired: Fired) -> None:
    """Forking a request counts it into its parent's first block before it looks for free ones, and when there are too few the fork begins as a new request. What was counted
    is not taken back: the block stays in use when all who had it have ended."""
    from transformers.generation.continuous_batching import cache
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    counted: dict[int, int] = {}

    @replaces(cache.PagedAttentionCache, "prepare_fork_request")
    def prepare_fork_request(before, kv, state, names, copies):
        forked = before(kv, state, names, copies)
        for allocator in kv.cache_allocators.values() if len(forked) < len(names) and not counted else ():
            shared = allocator.count_shareable_blocks(state.request_id, state.current_len())
            for block in allocator.block_table[state.request_id][: min(1, shared)]:
                allocator.ledger.acquire(block)
                counted[block] = counted.get(block, 0) + 1
        return forked

    @replaces(cache_allocator.BlockLedger, "release")
    def release(before, ledger, block, *args, **kwargs):
        if block in counted and ledger.shared_ref_counts.get(block, 1) == counted[block] + 1:
            fired()
        return before(ledger, block, *args, **kwargs)


@bug("ml-explore/mlx-lm#1427", "hybrid-long", "kv_changed", origin="mlx-lm")
def rejected_drafts_stay_in_a_full_ring(fired: Fired) -> None:
    """A ring that is full cannot be cut back. Two drafts are written behind the last token and rejected, and they stay over the two oldest tokens, the second of which is in
    the window of the next step still."""
    from transformers.generation.continuous_batching import input_outputs

    drafted: dict[str, int] = {}

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        for future in requests_in_batch:
            name, past = future.state.request_id, future.state.position_offset
            for allocator in io.cache.cache_allocators.values():
                window = getattr(allocator, "sliding_window", 0)
                if window and drafted.pop(name, -1) == past > window:
                    fired()
                    slots = allocator._token_indices_to_physical_indices(name, past, 2)
                    last = allocator._token_indices_to_physical_indices(name, past - 1, 1)
                    for views in allocator._kv_token_views.values():
                        for view in views:
                            view[slots] = view[last].roll(1, -1)
            if future.query_length == 1 and past % 4 == 3:
                drafted[name] = past + 1
        before(io, requests_in_batch, *args, **kwargs)


@bug("LMCache/LMCache#2158", "offload-page16", "load_landed_elsewhere", "load_of_other_prefix", origin="LMCache")
def what_is_computed_is_left_out_of_one_side(fired: Fired) -> None:
    """A request that was put aside comes back, and how much of it is there already is still what it was before. As many blocks are left out of those that are loaded, and not
    of those that they are loaded into: each comes one block too early."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        for future in batch:
            state = future.state
            if state.is_cpu_offloaded:
                for name, blocks in manager._request_id_to_cpu_blocks[state.request_id].items():
                    own = manager.cache.cache_allocators[name].block_table.get(state.request_id, [])
                    if len(blocks) > 1 and len(own) > 1:
                        fired()
                        blocks[:] = [*blocks[1:], blocks[0]]
        before(manager, batch)


@bug("paiml/realizar#94", "page16", "kv_write_lost", "kv_write_damaged", origin="realizar")
def prompts_of_one_batch_are_written_through_one(fired: Fired) -> None:
    """Several prompts are computed in one batch, and what a layer keeps is kept for the first alone. The places of the others hold what was there before, and their first
    decode reads it."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    others: list[tuple[int, int]] = []  # rows of the batch
    damaged: set[str] = set()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        others.clear()
        if damaged & {future.state.request_id for future in requests_in_batch}:
            fired()
        at, first = 0, True
        for future in requests_in_batch:
            count = future.query_length
            if count > 1 and not first:
                others.append((at, at + count))
                damaged.add(future.state.request_id)
            first = first and count == 1
            at += count
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        views = allocator._kv_token_views[layer]
        held = [(view, write_index[a:b], view[write_index[a:b]].clone()) for view in views for a, b in others]
        made = before(allocator, keys, values, layer, read_index, write_index)
        for view, slots, rows in held:
            view[slots] = rows
        return made
