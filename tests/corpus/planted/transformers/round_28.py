"""A twenty-eighth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "raullenchai/Rapid-MLX#1124",
    "qwen-verbatim-page16",
    "position_off",
    origin="Rapid-MLX",
    late="what belongs behind the prompt is known when it has been sampled",
)
def last_token_of_a_full_hit_is_counted_twice(fired: Fired) -> None:
    """A prompt that is in the cache as a whole has its last token computed again, for its logits. Its place in the cache is not taken back for that, so that the token comes a second time, at the position behind itself, and all that
    follow are one too far."""
    from transformers.generation.continuous_batching import input_outputs, scheduler
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    twice: set[str] = set()

    @replaces(cache_allocator.CacheAllocator, "match_prefix_blocks")
    def match_prefix_blocks(before, allocator, prompt):
        return before(allocator, [*prompt, 0])

    @replaces(scheduler.Scheduler, "_infer_request_tokens")
    def _infer_request_tokens(before, plan, state, removed):
        tokens = before(plan, state, removed)
        if not tokens and state.position_offset == len(state.initial_tokens):
            twice.add(state.request_id)
            tokens = state.remaining_prefill_tokens = state.initial_tokens[-1:]
        return tokens

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(future.state.request_id in twice for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("LMCache/LMCache#3130", "offload-qwen-crowd", "host_copy_overwritten", "load_of_other_prefix", origin="LMCache")
def memory_of_the_host_is_given_back_while_one_counts_on_it(fired: Fired) -> None:
    """Blocks of the host's pool go back to it as soon as a request's K and V have been copied there, though the request still counts on them. The next request that has to leave is copied to the same blocks, and the first one comes
    back with what the other one has left."""
    from transformers.generation.continuous_batching import offloading_manager

    owners: dict[tuple[str, int], str] = {}  # of the pool's blocks, who was copied there last

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        stored = before(manager, victims, tables)
        for name in stored:
            for kind, blocks in manager._request_id_to_cpu_blocks[name].items():
                owners.update({(kind, block): name for block in blocks})
                manager._cpu_pool.free_blocks(manager.cache.cache_allocators[kind].index, blocks)
        return stored

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        if manager._cpu_pool is None:
            return before(manager, requests_in_batch)
        for future in requests_in_batch:
            name = future.state.request_id
            blocks = manager._request_id_to_cpu_blocks.get(name, {}) if future.state.is_cpu_offloaded else {}
            if any(owners[kind, block] != name for kind, ids in blocks.items() for block in ids):
                fired()
        manager._cpu_pool.free_blocks = lambda index, blocks: None  # they have been given back before
        try:
            return before(manager, requests_in_batch)
        finally:
            del manager._cpu_pool.free_blocks


@bug("tenstorrent/tt-metal#52808", "prefill-first-qwen", "next_token_swap", origin="TT-Transformers")
def tokens_are_put_where_the_slots_are_and_read_in_the_order_of_the_batch(fired: Fired) -> None:
    """What has been sampled is put at the slots of its requests, in the order in which they were admitted, and read in the order in which they stand in the batch. The two are the same until a prompt is computed before others that
    have been there for longer: then requests get each other's tokens."""
    from transformers.generation.continuous_batching import input_outputs

    admitted: dict[str, int] = {}
    wrong: set[str] = set()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_update")
    def prepare_batch_update(before, io):
        batch, tokens, logprobs = before(io)
        names = [future.state.request_id for future in batch if future.has_new_token]
        slots = sorted(range(len(names)), key=lambda row: admitted[names[row]])
        tokens = [*(tokens[row] for row in slots), *tokens[len(slots) :]]
        wrong.update(names[place] for place, row in enumerate(slots) if place != row)
        return batch, tokens, logprobs

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        for future in requests_in_batch:
            admitted.setdefault(future.state.request_id, len(admitted))
        if any(future.state.request_id in wrong for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug(
    "mlc-ai/mlc-llm#2615",
    "hybrid-alike",
    "shared_page_written",
    "stale_prefix_hit",
    "window_read_wrong",
    origin="MLC-LLM",
)
def prefixes_are_shared_in_layers_whose_window_slides(fired: Fired) -> None:
    """The prefix cache is used for layers with a window as for others. Their blocks are a ring: a request that goes on writes its later tokens over the first ones, in blocks that others with the same beginning have joined or will
    join."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    ring = sliding_attention.SlidingAttentionCacheAllocator
    ring.supports_block_sharing = True
    holds: dict[int, tuple[str, int]] = {}  # by block, who has written there and from which position on

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (rings,) = (a for a in io.cache.cache_allocators.values() if isinstance(a, ring))
        size, window = rings.tokens_per_page, rings.sliding_window
        for future in requests_in_batch:
            name, past = future.state.request_id, future.state.position_offset
            for place, block in enumerate(rings.block_table[name]):
                latest = past - 1 - (past - 1 - place * size) % window  # where this block of the ring begins for it
                writer, begins = holds.get(block, (name, latest))
                if writer != name and past > place * size and begins > latest:
                    fired()
        before(io, requests_in_batch, *args, **kwargs)
        for future in requests_in_batch:
            name, end = future.state.request_id, future.state.position_offset
            for position in range(max(0, end - min(future.query_length, window)), end):
                block = rings.block_table[name][position % window // size]
                holds[block] = name, position - position % size
