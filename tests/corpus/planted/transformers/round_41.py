"""A forty-first round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "gittensor-ai-lab/sparkinfer#147",
    "qwen-new-weights",
    "computed_with_other_weights",
    "cache_kept_over_new_weights",
    origin="SparkInfer",
    late="by which weights a step is computed is not recorded; that they were changed in place and back is, and shows at the next hit",
)
def graph_of_decodes_keeps_the_weights_it_was_captured_with(fired: Fired) -> None:
    """The graph that decodes are run with holds the places of the weights as they were when it was captured, and new
    weights do not make anyone capture it again. Prompts are computed by the new weights, and every step that only
    decodes is computed by the old ones."""
    import torch
    from transformers.generation.continuous_batching import continuous_api

    import __main__ as engine

    captured: list[torch.Tensor] = []
    reloaded: list[bool] = [False]

    @replaces(engine, "empty_prefix_cache")  # which is what is done behind new weights
    def empty_prefix_cache(before, processor):
        reloaded[0] = True
        before(processor)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        only_decodes = all(f.query_length == 1 for f in processor.inputs_and_outputs.requests_in_batch)
        if not only_decodes:
            before(processor, model)
            return
        if not captured:
            captured.extend(weights.detach().clone() for weights in model.parameters())
        if not reloaded[0]:
            before(processor, model)
            return
        fired()
        with torch.no_grad():
            new = [weights.detach().clone() for weights in model.parameters()]
            for weights, old in zip(model.parameters(), captured, strict=True):
                weights.copy_(old)
            before(processor, model)
            for weights, right in zip(model.parameters(), new, strict=True):
                weights.copy_(right)


@bug(
    "lightseekorg/tokenspeed#506",
    "qwen-page16-decodes",
    "slot_mapping",
    "commit_beyond_allocation",
    origin="TokenSpeed",
)
def tokens_behind_the_last_page_go_into_it(fired: Fired) -> None:
    """A request's row of the table has so many pages and no more, and so that nobody looks up one that is not there, the
    page's number is cut to the last. What comes behind the row's end is put into the last page from its start on,
    over tokens of the same request that are still read."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    pages = 8  # of a row
    owner = full_attention.FullAttentionCacheAllocator

    def places(allocator, name: str, begin: int, end: int) -> list[int]:
        size, table = allocator.tokens_per_page, allocator.block_table[name]
        return [
            table[min(at // size, pages - 1)] * allocator.block_physical_stride + at % size for at in range(begin, end)
        ]

    @replaces(owner, "_compute_blocks_needed")
    def _compute_blocks_needed(before, allocator, allocated, past, count):
        return min(before(allocator, allocated, past, count), max(0, pages - allocated))

    @replaces(owner, "get_write_indices")
    def get_write_indices(before, allocator, request_id, past, count):
        return places(allocator, request_id, past, past + count)

    @replaces(owner, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        return places(allocator, request_id, 0, past + count)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        room = pages * allocator.tokens_per_page
        if any(f.state.position_offset > room for f in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug(
    "tenstorrent/tt-metal#54565",
    "llama-seats",
    "next_token_swap",
    "async_resume_wrong_input",
    "future_map_overrun",
    origin="tt-metal",
)
def token_that_is_left_on_the_device_is_taken_for_the_newest(fired: Fired) -> None:
    """Where the device's place for a row goes on from the host's, the device's token is taken for newer than the host's
    and is fed instead. Nothing runs ahead here, and what lies there is the last token of a request that had the row
    before and happened to end at that place: a new request begins its answer with another's token."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.requests import RequestState
    from transformers.generation.continuous_batching.scheduler import Scheduler

    rows: dict[str, int] = {}
    device: dict[int, tuple[int, int]] = {}  # of a row: its next place, and the token that belongs there
    fed: list[bool] = [False]

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, inputs, requests_in_batch, *args, **kwargs):
        fed[0] = False
        for future in requests_in_batch:
            state = future.state
            row = rows.setdefault(state.request_id, min({*range(len(rows) + 1)} - {*rows.values()}))
            place, token = device.get(row, (-1, -1))
            first = state.generated_len() == 1 and future.query_length == 1
            if first and place == state.position_offset and state.tokens_to_process != [token]:
                state.tokens_to_process = [token]
                fed[0] = True
        return before(inputs, requests_in_batch, *args, **kwargs)

    @replaces(RequestState, "update_and_check_completion")
    def update_and_check_completion(before, state, token, *args, **kwargs):
        if state.generated_len():  # by a decode: prompts leave nothing on the device
            device[rows[state.request_id]] = (state.position_offset, token)
        return before(state, token, *args, **kwargs)

    @replaces(Scheduler, "finish_request")
    def finish_request(before, scheduler, request_id):
        rows.pop(request_id, None)
        return before(scheduler, request_id)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if fed[0]:
            fired()
        before(processor, model)


@bug(
    "Lightning-AI/litgpt#2182",
    "hybrid-wide-page16",
    "window_read_wrong",
    origin="LitGPT",
)
def chunk_is_read_out_of_the_ring_that_it_has_gone_round(fired: Fired) -> None:
    """A chunk is written into the window's ring before anything is read, and all is read from there. One that goes
    further than round the ring has by then written its last tokens over what its first ones are to see: these attend
    to tokens that come after them."""
    import torch
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator as Sliding

    layout: list[
        tuple[int, int, bool]
    ] = []  # of each request of a step: new tokens, what is read, and out of the ring?

    def goes_round(allocator, past: int, count: int) -> bool:
        return count > 1 and past + count > allocator.sliding_window

    @replaces(Sliding, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        if not goes_round(allocator, past, count):
            return before(allocator, request_id, past, count)
        kept = min(past, allocator.sliding_window - 1)
        return allocator._token_indices_to_physical_indices(request_id, past - kept, kept + count)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, inputs, requests_in_batch, *args, **kwargs):
        layout.clear()
        for allocator in inputs.cache.cache_allocators.values():
            if isinstance(allocator, Sliding):
                for future in requests_in_batch:
                    past, count = future.state.position_offset, future.query_length
                    layout.append((count, allocator.get_seqlen_k(past, count), goes_round(allocator, past, count)))
        if any(ring for *_, ring in layout):  # there is something to read, though nothing was there before
            kwargs["max_kv_read"] = max(1, kwargs["max_kv_read"])
        return before(inputs, requests_in_batch, *args, **kwargs)

    @replaces(Sliding, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        if not any(ring for *_, ring in layout):
            return before(allocator, keys, values, layer, read_index, write_index)
        handed = torch.cat([torch.full((count,), not ring) for count, _, ring in layout])
        from_ring = torch.cat([torch.full((length,), ring) for _, length, ring in layout])
        made = []
        for view, states in zip(allocator._kv_token_views[layer], (keys, values), strict=True):
            read = view.index_select(0, read_index)
            read[(read_index == allocator.sentinel_index) & ~from_ring] = states[handed]
            view.index_copy_(0, write_index, states)
            read[from_ring] = view.index_select(0, read_index[from_ring])
            made.append(read)
        return tuple(made)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(ring for *_, ring in layout):
            fired()
        before(processor, model)


@bug("mybigday/llama.rn#362", "qwen-goes-on", "hit_before_written", "prefix_not_computed", origin="llama.rn")
def last_token_of_an_answer_that_is_cut_short_counts_as_kept(fired: Fired) -> None:
    """The token that was sampled last is put down with those that are in the cache, and would be computed by the next
    step. An answer that ends for its length has no next step: who goes on from it takes over one token more than
    there is, and reads a place that nobody has written."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash
    from transformers.generation.continuous_batching.scheduler import Scheduler

    short: set[int] = set()  # blocks that have a token less than is said

    @replaces(Scheduler, "finish_request")
    def finish_request(before, scheduler, request_id):
        state = scheduler.active_requests.get(request_id)
        tokens = state.initial_tokens + state.generated_tokens if state and state.generated_tokens else []
        for allocator in scheduler.cache.cache_allocators.values():
            size, table = allocator.tokens_per_page, allocator.block_table.get(request_id, [])
            if len(table) < 2 or len(tokens) != len(table) * size:
                continue
            parent = allocator.ledger.block_to_hash.get(table[-2])
            if allocator.ledger.register_new_hash(table[-1], compute_block_hash(parent, tokens[-size:])) is None:
                short.add(table[-1])
        return before(scheduler, request_id)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for allocator in processor.cache.cache_allocators.values():
            short.intersection_update(allocator.ledger.block_to_hash)
            for future in processor.inputs_and_outputs.requests_in_batch:
                if short.intersection(allocator.block_table[future.state.request_id]):
                    fired()
        before(processor, model)


@bug(
    "vllm-project/vllm#49716",
    "few",
    "kv_changed",
    "layer_changed",
    origin="vLLM",
    late="what is overwritten first lies where it is not looked at, or is written in the same forward",
)
def scales_lie_as_if_pages_were_not_padded(fired: Fired) -> None:
    """A token's scale is kept at the end of its row. Pages are padded to the size of another group's, and the places of
    the scales are reckoned from the form of the cache as if they were not: the scales of a block lie in one of about
    half its number, and when many blocks are in use they are written over K and V of others."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    true_page, reckoned_page = 264192, 133120  # bytes
    spoilt: set[int] = set()

    def reckoned(allocator, slot: int) -> int:
        block, offset = divmod(slot, allocator.block_physical_stride)
        return block * reckoned_page // true_page * allocator.block_physical_stride + offset

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        made = before(allocator, keys, values, layer, read_index, write_index)
        places = [reckoned(allocator, slot) for slot in write_index.tolist()]
        for view, states in zip(allocator._kv_token_views[layer], (keys, values), strict=True):
            view[places, :, -1] = states.abs().amax(-1) / 127
        if not read_index.numel():
            return made
        return tuple(view.index_select(0, read_index) for view in allocator._kv_token_views[layer])

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        inputs = processor.inputs_and_outputs
        (allocator,) = processor.cache.cache_allocators.values()
        written = inputs.write_index_storage[0, : inputs.true_write_sizes[0]].tolist()
        read = inputs.read_index_storage[0, : inputs.true_read_sizes[0]].tolist() if inputs.max_kv_read else []
        spoilt.difference_update(written)
        spoilt.update(reckoned(allocator, slot) for slot in written)
        if spoilt.intersection(read):
            fired()
        before(processor, model)
