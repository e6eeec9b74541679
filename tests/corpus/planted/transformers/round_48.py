"""A forty-eighth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


@bug("karpathy/nanochat#187", "llama-grows", "layout_misread", "kv_changed", origin="nanochat")
def buffer_is_made_longer_without_moving_what_is_in_it(fired: Fired) -> None:
    """All layers, keys and values and heads of a request lie in one buffer, with room for so many tokens. When there are
    more, it is resized in place: the numbers stay in one row and only the length of that dimension is another. All that
    was stored is read by strides that it was not written by: but for the first head of the first layer's keys, each token
    gets another's, or another head's or layer's, and the last ones what nobody wrote."""
    import torch
    from transformers.generation.continuous_batching import continuous_api, input_outputs

    step = 32  # tokens
    room: dict[str, int] = {}
    resized: set[str] = set()

    def resize(allocator: Any, request: str, past: int, old: int, new: int) -> None:
        places = torch.tensor(allocator.get_read_indices(request, past, 0))
        stored = torch.stack(
            [torch.stack([view[places] for view in allocator._kv_token_views[i]]) for i in allocator.layer_indices]
        )
        layers, both, _, heads, size = stored.shape
        buffer = torch.zeros(layers, both, heads, old, size, dtype=stored.dtype)
        buffer[:, :, :, :past] = stored.transpose(2, 3)
        longer = torch.zeros(layers * both * heads * new * size, dtype=stored.dtype)
        longer[: buffer.numel()] = buffer.flatten()
        read = longer.view(layers, both, heads, new, size)[:, :, :, :past].transpose(2, 3)
        for row, i in enumerate(allocator.layer_indices):
            for kind, view in enumerate(allocator._kv_token_views[i]):
                view[places] = read[row, kind]

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (allocator,) = io.cache.cache_allocators.values()
        for future in requests_in_batch:
            request, past = future.state.request_id, future.state.position_offset
            needed = past + future.query_length
            had = room.setdefault(request, -(-needed // step) * step)
            if needed > had:
                room[request] = -(-needed // step) * step
                resize(allocator, request, past, had, room[request])
                resized.add(request)
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in resized for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug("ggml-org/llama.cpp#26790", "offload-hybrid-slots", "kv_changed", "bad_values_written", origin="llama.cpp")
def one_that_is_restored_clears_a_cache_of_all(fired: Fired) -> None:
    """A model has two kinds of caches, and a request is restored into both. The first takes back what is the request's; the
    second is emptied before that, for all requests at once, and then filled with the rows of this one. The others run on
    with their window and with zeros for all that is behind it."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager

    cleared: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        allocator = manager.cache.cache_allocators["full_attention"]
        away = [future for future in requests_in_batch if future.state.is_cpu_offloaded]
        for future in away:
            for name, table in allocator.block_table.items():
                state = manager.scheduler.active_requests.get(name)
                if state is None or state.is_cpu_offloaded or not state.position_offset:
                    continue
                allocator._copy_view[table] = 0
                cleared.add(name)
            before(manager, [future])
            cleared.discard(future.state.request_id)
        before(manager, requests_in_batch)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in cleared for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug("ml-explore/mlx-lm#1673", "hybrid-padded", "window_read_wrong", "attention_seq_len_wrong", origin="mlx-lm")
def window_is_trimmed_by_the_length_of_its_buffer(fired: Fired) -> None:
    """The buffer of a layer with a window grows by steps, and is cut back to the window's length from the front when it has
    come to be longer. What counts is the length of the buffer and not of what is in it: the rows at its end, which wait to
    be filled, are kept, and as many tokens at the front that are still in the window are cut off."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator as Sliding

    step = 24  # tokens
    buffers: dict[str, tuple[int, int]] = {}  # by request: the first token in it, and its length
    lacks: dict[str, int] = {}  # in this step: tokens of the window that were cut off, by request
    rows: list[int] = []  # the same, by row

    def fed(request: str, past: int, count: int, window: int) -> int:
        """Return how many tokens of the window are no longer in the buffer when the next ones are fed."""
        start, length = buffers.get(request, (0, 0))
        if length >= window:
            start, length = start + length - window, window
        held = past - start
        if held + count > length:
            length = (length if held % step == 0 else held) + -(-count // step) * step
        buffers[request] = (start, length)
        return max(0, start - max(0, past - window + 1))

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        window = io.cache.cache_allocators["sliding_attention"].sliding_window
        lacks.clear()
        for future in requests_in_batch:
            request, past = future.state.request_id, future.state.position_offset
            lacks[request] = fed(request, past, future.query_length, window)
        rows[:] = lacks.values()
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(Sliding, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        return before(allocator, past, count) - rows.pop(0)

    @replaces(Sliding, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        return before(allocator, request_id, past, count)[lacks.get(request_id, 0) :]

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(lacks.values()):
            fired()
        before(processor, model)


@bug("LMCache/LMCache#4955", "offload-qwen-saves", "stored_wrong", "abort_frees_during_transfer", origin="LMCache")
def blocks_of_a_preempted_request_are_read_when_they_are_anothers(fired: Fired) -> None:
    """A request's blocks are still being read, to be stored, when it gives way to others. They are free at once and given to
    these, who write to them: what is stored is in part theirs, under the name of the one that has left, and it goes on from
    that when it comes back."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager

    takes = 4  # steps
    now: list[int] = [0]
    reading: dict[str, tuple[int, list[int], list[int]]] = {}  # by request: when it ends, from where, and to where
    right: dict[str, Any] = {}
    wrong: set[str] = set()

    def finish(manager: Any, request: str) -> None:
        ((name, allocator),) = manager.cache.cache_allocators.items()
        _, blocks, hosts = reading.pop(request)
        manager._cpu_views[name][hosts] = allocator._copy_view[blocks]

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        stored = before(manager, victims, tables)
        ((name, _),) = manager.cache.cache_allocators.items()
        for request in stored:
            hosts = manager._request_id_to_cpu_blocks[request][name]
            reading[request] = (now[0] + takes, tables[request][name][:], hosts[:])
            right[request] = manager._cpu_views[name][hosts].clone()
        return stored

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        ((name, allocator),) = manager.cache.cache_allocators.items()
        back = {f.state.request_id: f.state.position_offset for f in requests_in_batch if f.state.is_cpu_offloaded}
        for request in [each for each, (end, _, _) in reading.items() if end <= now[0] or each in back]:
            finish(manager, request)
        for request, length in back.items():
            hosts = manager._request_id_to_cpu_blocks[request][name]
            other = manager._cpu_views[name][hosts] != right[request]
            other = other.view(
                len(hosts), -1, allocator.tokens_per_page, other.shape[1] // (2 * allocator.tokens_per_block)
            )
            if other.any(dim=3).any(dim=1).flatten()[:length].any():
                wrong.add(request)
        before(manager, requests_in_batch)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in wrong for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        now[0] += 1
        before(processor, model)


@bug("inference-sim/inference-sim#1061", "few-orphans", "page_leaked", "prefix_not_computed", origin="inference-sim")
def blocks_of_a_request_that_finds_no_room_are_forgotten(fired: Fired) -> None:
    """There is no room for a request's next token, and what this attempt has taken is rolled back. The whole entry of the
    request is deleted with it: the blocks that it had before belong to nobody from then on and never come back. Another
    gives way to it, and it goes on behind as many tokens as before, in blocks in which they are not."""
    from transformers.generation.continuous_batching import cache, continuous_api
    from transformers.generation.continuous_batching.requests import RequestStatus
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    failed: list[str] = []  # in this step: for the first of them others give way, before the next is tried
    forgotten: set[str] = set()

    @replaces(FIFOScheduler, "schedule_batch")
    def schedule_batch(before, scheduler, *args):
        failed.clear()
        return before(scheduler, *args)

    @replaces(cache.PagedAttentionCache, "can_store_request_tokens")
    def can_store_request_tokens(before, store, state, request_len, dry_run=False):
        fits = before(store, state, request_len, dry_run)
        if not fits and not failed and state.status == RequestStatus.DECODING:
            failed.append(state.request_id)
            for allocator in store.cache_allocators.values():
                if allocator.block_table.pop(state.request_id, []):
                    forgotten.add(state.request_id)
        return fits

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for future in processor.inputs_and_outputs.requests_in_batch:
            if future.state.position_offset == future.query_length:  # it is computed anew
                forgotten.discard(future.state.request_id)
            elif future.state.request_id in forgotten:
                fired()
        before(processor, model)


@bug(
    "vllm-project/vllm#56655",
    "qwen-rows",
    "identity_not_in_key",
    origin="vLLM",
    late="nobody tells of rows that are brought: seen where a token comes again",
)
def key_does_not_tell_tokens_from_rows_that_were_brought(fired: Fired) -> None:
    """A prompt may bring rows of its own for some of its places, in place of its tokens' embeddings. A block is known by its
    tokens and by the rows, but not by which places of it take the one and which the other: a request of the same tokens
    hits KV that was computed from other inputs than its own."""
    from transformers.generation.continuous_batching import cache, continuous_api

    import __main__ as engine

    told = engine.whose_rows
    of: dict[int, tuple] = {}  # by block: whose rows those of it and of what is before it are
    other: set[str] = set()

    def inputs(request: str, end: int) -> tuple:
        return tuple(told(request, 0, end))

    @replaces(engine, "whose_rows")
    def whose_rows(before, request_id, first, last):
        return []

    @replaces(cache.PagedAttentionCache, "search_prefix_match")
    def search_prefix_match(before, store, request_id, prompt_ids):
        count = before(store, request_id, prompt_ids)
        (allocator,) = store.cache_allocators.values()
        for i, block in enumerate(allocator.block_table.get(request_id, []) if count else []):
            if of.get(block) != inputs(request_id, (i + 1) * allocator.tokens_per_page):
                other.add(request_id)
        return count

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        size = allocator.tokens_per_page
        batch = processor.inputs_and_outputs.requests_in_batch
        if any(future.state.request_id in other for future in batch):
            fired()
        for future in batch:
            end, name = future.state.position_offset, future.state.request_id
            for i in range((end - future.query_length) // size, end // size):
                of[allocator.block_table[name][i]] = inputs(name, (i + 1) * size)
        before(processor, model)
