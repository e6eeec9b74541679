"""A twenty-seventh round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from collections import deque

from bugs import Fired, bug, replaces


@bug("huggingface/transformers#47708", "hybrid-wide-page16", "slot_mapping", "window_read_wrong")
def long_chunk_is_stored_from_where_its_first_token_belongs(fired: Fired) -> None:
    """A window's tokens lie in a ring, each at its position modulo the window. Of a chunk that is longer than the window only the last tokens are stored, but from the place on that is the
    first token's of the whole chunk: the ring is turned by as many as were left out, and what is read and overwritten later is not what has left the window."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    turned: dict[str, int] = {}  # by how much a request's ring is, once a chunk was stored so

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, request_id, past_length, query_length):
        stored = min(query_length, allocator.sliding_window)
        left_out = query_length - stored
        if left_out:
            turned[request_id] = left_out
        first = past_length % allocator.sliding_window
        places = allocator._token_indices_to_physical_indices(request_id, first, stored)
        return [allocator.write_trash_index] * left_out + places

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(future.state.request_id in turned for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug(
    "huggingface/text-generation-inference#2489",
    "qwen-waves",
    "hit_before_written",
    "kv_write_lost",
    "stale_prefix_hit",
    origin="TGI",
)
def prompt_that_is_put_back_leaves_its_blocks_in_the_cache(fired: Fired) -> None:
    """A prompt that comes alone while others decode is not worth a batch and is put back into the queue, after it has got its blocks. They are given back as those of any request that has
    ended, under the hashes of its tokens: when it is taken up again it hits them, and nobody has ever computed them."""
    from transformers.generation.continuous_batching import input_outputs, scheduler

    put_back: dict[str, set[int]] = {}  # what each has left behind

    @replaces(scheduler.FIFOScheduler, "schedule_batch")
    def schedule_batch(before, plan, *args, **kwargs):
        waiting = list(plan.waiting_requests.values())
        if not plan.active_requests or len(waiting) != 1 or waiting[0].request_id in put_back:
            return before(plan, *args, **kwargs)
        (state,) = waiting
        name, tokens = state.request_id, state.initial_tokens
        put_back[name] = set()
        if plan.cache.can_store_request_tokens(state, len(tokens)):
            for allocator in plan.cache.cache_allocators.values():
                mine = set(allocator.block_table[name])
                allocator.mark_complete_blocks(name, tokens, len(tokens) // allocator.tokens_per_page)
                put_back[name] |= mine & set(allocator.ledger.block_to_hash)
            plan.cache.free_blocks(name)
        held, plan.block_new_requests = plan.block_new_requests, True
        try:
            return before(plan, *args, **kwargs)
        finally:
            plan.block_new_requests = held

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        for future in requests_in_batch:
            name, past = future.state.request_id, future.state.position_offset
            for allocator in io.cache.cache_allocators.values():
                hit = allocator.block_table[name][: past // allocator.tokens_per_page]
                if set(hit) & put_back.get(name, set()):
                    fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("taco-project/FlexKV#186", "offload-qwen-alike", "stored_wrong", "copy_failed", origin="FlexKV")
def own_blocks_are_stored_before_the_matched_ones(fired: Fired) -> None:
    """What goes to the other tier is put together of two parts, the blocks that were matched in the cache and those that the request has added, and copied pairwise to places in the order of
    the sequence. The parts are joined the wrong way round: the end of the sequence lies where its beginning should."""
    from transformers.generation.continuous_batching import input_outputs, offloading_manager, scheduler

    matched: dict[str, dict[str, int]] = {}
    mixed: set[str] = set()

    @replaces(scheduler.Scheduler, "_infer_request_tokens")
    def _infer_request_tokens(before, plan, state, removed):
        begun = state.position_offset
        tokens = before(plan, state, removed)
        if state.position_offset > begun:
            matched[state.request_id] = {
                kind: state.position_offset // allocator.tokens_per_page
                for kind, allocator in plan.cache.cache_allocators.items()
            }
        return tokens

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        joined = {}
        for name, own in tables.items():
            joined[name] = {}
            for kind, blocks in own.items():
                count = matched.get(name, {}).get(kind, 0)
                joined[name][kind] = blocks[count:] + blocks[:count]
        stored = before(manager, victims, joined)
        mixed.update(name for name in stored if joined[name] != tables[name])
        return stored

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(future.state.request_id in mixed for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("tenstorrent/tt-xla#5830", "prefill-first", "next_token_swap", "future_map_overrun", origin="tt-xla")
def row_that_waits_for_others_chunks_gets_a_token(fired: Fired) -> None:
    """A request that has its prompt behind it waits while others compute chunks of theirs. Its row has no tokens in such a step, and what is sampled from behind the end of the batch is
    token 0; only rows that are inside their prompt are left out, so that it is put behind the request's tokens, and fed to the model in its turn."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.requests import RequestStatus

    tokens: dict[str, deque[int]] = {}  # that are still to be fed, of a request that has waited
    zeros: set[str] = set()

    @replaces(continuous_api.ContinuousBatchProcessor, "update_batch")
    def update_batch(before, processor):
        ran = {f.state.request_id: f for f in processor.inputs_and_outputs.requests_in_batch}
        before(processor)
        for name, state in processor.scheduler.active_requests.items():
            if state.status != RequestStatus.DECODING or not state.generated_tokens:
                continue
            if name not in ran:
                tokens.setdefault(name, deque()).append(0)
                state.generated_tokens.append(0)
            elif name in tokens and ran[name].has_new_token:
                tokens[name].append(state.generated_tokens[-1])
                state.tokens_to_process = [tokens[name].popleft()]
                zeros.add(name)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(future.state.request_id in zeros for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("vllm-project/vllm#4761", "few-qwen-turns", "stale_prefix_hit", "page_given_twice", origin="vLLM")
def evicted_block_can_still_be_hit(fired: Fired) -> None:
    """When blocks run out those that nobody uses are evicted and given out anew, but they stay in the table of hashes. A prompt that begins as one did whose blocks are gone hits them, with
    what others have written there since, or still write."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    gone: dict[int, int] = {}  # hash of what an evicted block held
    began: set[str] = set()

    @replaces(cache_allocator.BlockLedger, "evict_cached_blocks")
    def evict_cached_blocks(before, ledger):
        known = dict(ledger.hash_to_block)
        evicted = before(ledger)
        for key, block in known.items():
            if block in evicted:
                ledger.hash_to_block[key] = block
                gone[block] = key
        return evicted

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        for future in requests_in_batch:
            name, past = future.state.request_id, future.state.position_offset
            if name in began:
                continue
            began.add(name)
            (allocator,) = io.cache.cache_allocators.values()
            if set(allocator.block_table[name][: past // allocator.tokens_per_page]) & set(gone):
                fired()
        before(io, requests_in_batch, *args, **kwargs)
