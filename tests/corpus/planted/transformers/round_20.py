"""A twentieth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("huggingface/transformers#45184", "offload", "position_off", "async_resume_wrong_input", "seq_len_backwards")
def restored_request_is_put_back_by_a_token(fired: Fired) -> None:
    """A request that is moved to the host is put back by one token, because the one of the step under way is thrown away. Nothing is under way, and the token that it was to be fed
    next is fed one place too early, over the last one."""
    from transformers.generation.continuous_batching import input_outputs, offloading_manager
    from transformers.generation.continuous_batching.requests import RequestStatus

    back: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "offload_requests")
    def offload_requests(before, manager):
        active = dict(manager.scheduler.active_requests)
        decoding = {name for name, state in active.items() if state.status == RequestStatus.DECODING}
        done = before(manager)
        for name, state in manager.scheduler.waiting_requests.items():
            if name in decoding and state is active[name] and state.is_cpu_offloaded and state.position_offset > 1:
                state.position_offset -= 1
                back.add(name)
        return done

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(future.state.request_id in back for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("huggingface/transformers#46587", "few", "stale_prefix_hit", "page_given_twice", "tokens_truncated_hash_kept")
def block_that_goes_straight_back_keeps_its_hash(fired: Fired) -> None:
    """Blocks of a request that makes room for others go straight back to the pool, and those of them that were complete keep their hash. Whoever has the same prefix finds them
    there, and they are free, or somebody else's."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    gone: set[int] = set()
    hit: set[str] = set()

    @replaces(cache_allocator.BlockLedger, "release")
    def release(before, ledger, block, no_cache=False):
        kept = ledger.block_to_hash.get(block)
        free = before(ledger, block, no_cache)
        if no_cache and free and kept is not None:
            ledger.block_to_hash[block] = kept
            ledger.hash_to_block[kept] = block
            gone.add(block)
        return free

    @replaces(cache_allocator.CacheAllocator, "acquire_prefix_blocks")
    def acquire_prefix_blocks(before, allocator, name, length, blocks):
        if gone & set(blocks[: length // allocator.tokens_per_page]):
            hit.add(name)
        before(allocator, name, length, blocks)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(future.state.request_id in hit for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)
