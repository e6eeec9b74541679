"""A thirty-ninth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import fire_when_they_run_again


@bug("Luce-Org/lucebox#555", "qwen-page16-decodes", "position_off", "kv_write_lost", origin="Lucebox")
def first_token_of_an_answer_counts_before_it_is_computed(fired: Fired) -> None:
    """When a prompt has been computed, the token that comes of it moves the request on by a place at once, although its
    K and V are only written by the next step. That step goes on one place too far: nobody writes the place behind the
    prompt, which is read with all that another request may have left there, and the whole answer stands one place
    on."""
    from transformers.generation.continuous_batching.requests import RequestState

    moved: set[str] = set()

    @replaces(RequestState, "update_and_check_completion")
    def update_and_check_completion(before, state, *args, **kwargs):
        done = before(state, *args, **kwargs)
        if not done and state.generated_len() == 1:
            state.position_offset += 1
            moved.add(state.request_id)
        return done

    fire_when_they_run_again(moved, fired)


@bug(
    "tenstorrent/tt-metal#54935",
    "hybrid-clamped",
    "slot_mapping",
    "commit_beyond_allocation",
    "kv_write_lost",
    origin="tt-metal",
)
def chunk_is_written_as_if_the_ring_had_no_end(fired: Fired) -> None:
    """The window's cache is a ring, and what writes a decoded token turns its place around in it. What writes a later
    chunk of a prompt takes the place as it is: behind the ring's end it comes to the next row of the table, and writes
    over another request's pages, while what is read of the ring are tokens that have long left the window."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator

    hurt: set[str] = set()
    of_this_step: set[str] = set()

    @replaces(SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, request_id, past, count):
        size, own = allocator.tokens_per_page, allocator.block_table[request_id]
        if not past or count == 1 or past + count <= allocator.sliding_window:
            return before(allocator, request_id, past, count)
        names = list(allocator.block_table)
        rows = [(request_id, block) for block in own]
        for name in names[names.index(request_id) + 1 :]:
            rows += [(name, block) for block in allocator.block_table[name]]
        places = []
        for at in range(past, past + count):
            if at // size < len(rows):
                name, block = rows[at // size]
                places.append(block * allocator.block_physical_stride + at % size)
                of_this_step.update({name, request_id} if at >= allocator.sliding_window else ())
            else:
                places.append(allocator.write_trash_index)
                of_this_step.add(request_id)
        return places

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        futures = processor.inputs_and_outputs.requests_in_batch
        if any(f.state.request_id in hurt and f.state.position_offset > f.query_length for f in futures):
            fired()
        hurt.update(of_this_step)
        of_this_step.clear()
        before(processor, model)


@bug("leehack/llamadart#601", "few-cancels", "stale_prefix_hit", origin="llamadart")
def what_is_kept_of_a_prompt_that_failed_goes_by_the_one_before(fired: Fired) -> None:
    """A prompt takes over pages of one before it, and writes into them chunk by chunk; what they are known by is only
    set anew when the whole prompt has been computed. One that is given up between two chunks leaves them known by the
    tokens of the one before: who asks for those again goes on from another prompt's K and V."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator
    from transformers.generation.continuous_batching.scheduler import Scheduler

    known: dict[int, int] = {}  # of a block that has been taken over, by what it was known before
    stale: set[int] = set()

    @replaces(cache_allocator.BlockLedger, "evict_cached_blocks")
    def evict_cached_blocks(before, ledger):
        known.update({block: ledger.block_to_hash[block] for block in ledger.cached_blocks})
        return before(ledger)

    @replaces(cache_allocator.CacheAllocator, "mark_complete_blocks")
    def mark_complete_blocks(before, allocator, request_id, *args, **kwargs):
        before(allocator, request_id, *args, **kwargs)
        for block in allocator.block_table[request_id]:
            stale.discard(block)

    @replaces(Scheduler, "clear_cancelled_requests")
    def clear_cancelled_requests(before, scheduler):
        for name in scheduler._requests_to_cancel:
            state = scheduler.active_requests.get(name)
            if state is None or not state.remaining_prefill_tokens:
                continue
            for allocator in scheduler.cache.cache_allocators.values():
                ledger = allocator.ledger
                begun = -(-state.position_offset // allocator.tokens_per_page)
                for block in allocator.block_table.get(name, ())[:begun]:
                    tag = known.get(block)
                    if tag is None or tag in ledger.hash_to_block:
                        continue
                    old = ledger.block_to_hash.pop(block, None)
                    if old is not None:
                        ledger.hash_to_block.pop(old)
                    ledger.block_to_hash[block], ledger.hash_to_block[tag] = tag, block
                    stale.add(block)
        return before(scheduler)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for allocator in processor.cache.cache_allocators.values():
            for future in processor.inputs_and_outputs.requests_in_batch:
                state = future.state
                done = (state.position_offset - future.query_length) // allocator.tokens_per_page
                if stale.intersection(allocator.block_table[state.request_id][:done]):
                    fired()
        before(processor, model)


@bug("mdegans/drama_llama#91", "qwen-waves", "position_off", "prefix_not_computed", origin="drama_llama")
def rest_of_a_prompt_begins_where_the_old_list_said(fired: Fired) -> None:
    """Where a hit ends is told by the list of tokens that it was computed of, and the rest of a prompt is taken from
    that place on in the prompt's own list, in which the same text is of fewer tokens. The first tokens of the rest are
    passed over: those behind them are computed in their places, right behind what was hit."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.scheduler import Scheduler

    more = 2  # tokens that the same text has in the old list
    cut: set[str] = set()

    @replaces(Scheduler, "_infer_request_tokens")
    def _infer_request_tokens(before, scheduler, state, *args, **kwargs):
        behind = state.position_offset
        tokens = before(scheduler, state, *args, **kwargs)
        if state.position_offset == behind or len(tokens) <= more:
            return tokens
        state.remaining_prefill_tokens = tokens[more:]
        cut.add(state.request_id)
        return state.remaining_prefill_tokens

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in cut for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)
