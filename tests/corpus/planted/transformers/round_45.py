"""A forty-fifth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("pytorch/executorch#20346", "hybrid-long-chunks", "window_read_wrong", origin="ExecuTorch")
def long_chunk_overwrites_the_tail_of_the_one_before(fired: Fired) -> None:
    """Layers with a window keep a ring of twice its length, and a chunk is written into it before anything is read. When a
    chunk is longer than the window, it overwrites the end of what was there before it, which its own first tokens still
    have in their window: they attend to what is left, and to nothing in place of the rest."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator as Sliding

    lost: list[bool] = [False]  # in this step

    def lack(allocator: Sliding, past: int, count: int) -> int:
        """Return how many tokens of the window have been overwritten by those that are fed now."""
        before = min(past, allocator.sliding_window - 1)
        return max(0, before - max(0, 2 * allocator.sliding_window - count))

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, *args, **kwargs):
        lost[0] = False
        before(io, *args, **kwargs)

    @replaces(Sliding, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        lost[0] |= lack(allocator, past, count) > 0
        return before(allocator, past, count) - lack(allocator, past, count)

    @replaces(Sliding, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        return before(allocator, request_id, past, count)[lack(allocator, past, count) :]

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if lost[0]:
            fired()
        before(processor, model)


@bug("kvcache-ai/Mooncake#3876", "offload-qwen-store", "copy_failed", "failed_load_counted_loaded", origin="Mooncake")
def key_that_is_asked_for_twice_in_a_batch_fills_one_place(fired: Fired) -> None:
    """A batch of loads has its places in a map by key. Two requests that begin alike ask for the same keys in one batch,
    and the places of the second take those of the first in the map: these are never written to and count as loaded.
    The first goes on from what lay in its blocks before."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        ((name, allocator),) = manager.cache.cache_allocators.items()
        place: dict[int, int] = {}
        unfilled: list[int] = []
        for future in requests_in_batch:
            if future.state.is_cpu_offloaded:
                stored = manager._request_id_to_cpu_blocks[future.state.request_id][name]
                for key, block in zip(stored, allocator.block_table[future.state.request_id], strict=False):
                    if key in place:
                        unfilled.append(place[key])
                    place[key] = block
        had = allocator._copy_view[unfilled]
        before(manager, requests_in_batch)
        if (allocator._copy_view[unfilled] != had).any():
            fired()
        allocator._copy_view[unfilled] = had


@bug("sgl-project/sglang#32564", "offload-transfers", "abort_frees_during_transfer", "kv_changed", origin="SGLang")
def pages_of_an_aborted_request_are_free_while_they_are_sent_to(fired: Fired) -> None:
    """A request that waits for its KV is aborted, and its pages are free at once. What is on its way to them is not
    stopped: another request has them by then and has written to them, and what was sent lands over its KV."""
    from transformers.generation.continuous_batching import continuous_api

    import __main__ as engine

    hit: set[str] = set()

    @replaces(engine, "may_leave")
    def may_leave(before, landed):
        return True

    @replaces(engine, "land")
    def land(before, processor, blocks, sent):
        for allocator in processor.cache.cache_allocators.values():
            for name, table in allocator.block_table.items():
                state = processor.scheduler.active_requests.get(name)
                written = -(-state.position_offset // allocator.tokens_per_page) if state else 0
                if set(table[:written]) & set(blocks):
                    hit.add(name)
        before(processor, blocks, sent)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in hit for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug(
    "LMCache/LMCache#1866",
    "offload-qwen-behind-hits",
    "load_of_other_prefix",
    "load_landed_elsewhere",
    origin="LMCache",
)
def loads_behind_a_hit_are_taken_from_the_prompts_front(fired: Fired) -> None:
    """All chunks of a prompt are fetched ahead. Those that the device has already are passed over when they are handed
    out, and what is left is counted from nought: the first chunk behind the hit gets what was fetched for the first of
    the prompt, and so on."""
    from transformers.generation.continuous_batching import offloading_manager

    import __main__ as engine

    @replaces(engine, "kept_blocks")
    def kept_blocks(before, keys, hit):
        fetched = before(keys, hit)
        return fetched[:hit] + fetched[: len(fetched) - hit]

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        for future in requests_in_batch:
            stored = manager._request_id_to_cpu_blocks.get(future.state.request_id, {})
            if future.state.is_cpu_offloaded and any(len(blocks) > len(set(blocks)) for blocks in stored.values()):
                fired()
        before(manager, requests_in_batch)


@bug(
    "vllm-project/vllm-ascend#14039",
    "qwen-recycled",
    "layout_misread",
    "attention_table_overwritten",
    origin="vLLM Ascend",
)
def two_blocks_are_copied_in_by_one_move_from_the_lower_address(fired: Fired) -> None:
    """Attention copies blocks in by twos, both by one strided move that begins at the lower address. When the later one
    of the two lies lower, they come in the other way round. The mask goes by the order of the tokens: who stands within
    these blocks does not see tokens before its own, and sees some behind it."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    turned: list[bool] = [False]  # in this step, where the mask cuts through

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, *args, **kwargs):
        turned[0] = False
        before(io, *args, **kwargs)

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        places, size = before(allocator, request_id, past, count), allocator.tokens_per_page
        for first in range(0, len(places) - 2 * size + 1, 2 * size):
            middle, end = first + size, first + 2 * size
            if places[middle] < places[first]:
                places[first:end] = places[middle:end] + places[first:middle]
                turned[0] |= past < end - 1
        return places

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if turned[0]:
            fired()
        before(processor, model)


@bug("Integral2u/SharpMind#57", "llama-capped", "position_off", "not_of_the_model", origin="SharpMind")
def chunk_that_was_cut_is_passed_over_at_full_length(fired: Fired) -> None:
    """A prompt is fed in chunks of one length. A chunk is cut to the room that is left, and the loop goes on behind it by
    the full length: the tokens between are never fed, those that follow get their positions, and an answer may begin
    behind a token that is not the prompt's last."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.requests import RequestStatus
    from transformers.generation.continuous_batching.scheduler import Scheduler

    skipped: set[str] = set()
    cut: set[str] = set()  # in this step

    @replaces(Scheduler, "_process_candidates")
    def _process_candidates(before, scheduler, candidates, token_budget, *args):
        scheduler.full_length = token_budget
        return before(scheduler, candidates, token_budget, *args)

    @replaces(Scheduler, "_schedule_request")
    def _schedule_request(before, scheduler, state, request_tokens, token_budget, *args):
        before(scheduler, state, request_tokens, token_budget, *args)
        if token_budget < min(len(request_tokens), scheduler.full_length):
            state.remaining_prefill_tokens = request_tokens[scheduler.full_length :]
            if not state.remaining_prefill_tokens:
                state.status = RequestStatus.DECODING
            cut.add(state.request_id)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in skipped for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        skipped.update(cut)
        cut.clear()
        before(processor, model)
