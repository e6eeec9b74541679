"""A forty-ninth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


@bug(
    "gittensor-ai-lab/sparkinfer#33",
    "llama-rows",
    "attention_table_overwritten",
    "req_to_token",
    origin="SparkInfer",
)
def table_that_has_grown_runs_into_the_next_row(fired: Fired) -> None:
    """A row of the device's table has room for so many blocks. Whether they fit is asked of those that a request takes at
    once, and not of all that it has: when it has grown past that, its row is written to its end and on into that of the
    next slot, whose request finds another's block in place of its first. When that one's row is written anew it is the
    other way round."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator, full_attention

    room, seats = 7, range(16)
    device: list[int] = [0] * (room * 2 * len(seats))  # all rows, one behind the other
    seat: dict[str, int] = {}
    written: dict[int, tuple[str, int]] = {}  # by place: whose token lies there, and which

    @replaces(full_attention.FullAttentionCacheAllocator, "allocate_cache_to_request")
    def allocate_cache_to_request(before, allocator, request_id, *args):
        had = len(allocator.block_table.get(request_id, []))
        before(allocator, request_id, *args)
        table = allocator.block_table[request_id]
        if len(table) > had:
            first = room * seat.setdefault(request_id, min(set(seats) - set(seat.values())))
            device[first : first + len(table)] = table

    @replaces(cache_allocator.CacheAllocator, "free_blocks")
    def free_blocks(before, allocator, request_id, *args, **kwargs):
        seat.pop(request_id, None)
        before(allocator, request_id, *args, **kwargs)

    def by_the_row(before: Any, allocator: Any, request_id: str, past: int, count: int) -> list[int]:
        table, first = allocator.block_table[request_id], room * seat[request_id]
        allocator.block_table[request_id] = device[first : first + len(table)]
        places = before(allocator, request_id, past, count)
        allocator.block_table[request_id] = table
        return places

    replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")(by_the_row)
    replaces(full_attention.FullAttentionCacheAllocator, "get_write_indices")(by_the_row)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        batch = []
        for future in processor.inputs_and_outputs.requests_in_batch:
            count = future.query_length
            batch.append((future.state.request_id, future.state.position_offset - count, count))
        for name, past, count in batch:
            for i, place in enumerate(allocator.get_write_indices(name, past, count)):
                written[place] = (name, past + i)
        for name, past, count in batch:
            places = allocator.get_read_indices(name, past, count)
            if any(written.get(place) != (name, i) for i, place in enumerate(places)):
                fired()
        before(processor, model)


@bug("LMCache/LMCache#1068", "offload-qwen-layers", "stored_wrong", "copy_failed", origin="LMCache")
def next_layer_is_stored_before_it_is_computed(fired: Fired) -> None:
    """What is computed of a prompt is stored layer by layer. When the first is done, the store copies it and goes on at
    once to the next, which has not been computed yet, and so on: of all layers but the first it keeps what lay in the
    blocks before the prompt came to them."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager
    from transformers.generation.continuous_batching.requests import RequestStatus

    lay: dict[tuple[str, int], list[Any]] = {}  # by request and place in it: what was there, of layers behind the first
    wrong: set[int] = set()  # blocks of the host

    def later(allocator: Any) -> list[Any]:
        """Return the keys and the values of all layers but the first."""
        return [view for layer in allocator.layer_indices[1:] for view in allocator._kv_token_views[layer]]

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        ((kind, allocator),) = manager.cache.cache_allocators.items()
        right = []
        for state in victims:
            name = state.request_id
            if state.status == RequestStatus.FINISHED:
                length = min(len(tables[name][kind]) * allocator.tokens_per_page, len(state.initial_tokens))
                for i, place in enumerate(allocator.get_read_indices(name, length, 0)):
                    for view, old in zip(later(allocator), lay[name, i], strict=True):
                        right.append((view, place, view[place].clone()))
                        view[place] = old
        stored = before(manager, victims, tables)
        differ = any((view[place] != had).any() for view, place, had in right)
        for view, place, had in right:
            view[place] = had
        if differ:
            for name in stored:
                wrong.update(manager._request_id_to_cpu_blocks[name][kind])
        return stored

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        for future in requests_in_batch:
            hosts = manager._request_id_to_cpu_blocks.get(future.state.request_id, {})
            if future.state.is_cpu_offloaded and wrong & {block for blocks in hosts.values() for block in blocks}:
                fired()
        before(manager, requests_in_batch)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        for future in processor.inputs_and_outputs.requests_in_batch:
            name, count = future.state.request_id, future.query_length
            past = future.state.position_offset - count
            for i, place in enumerate(allocator.get_write_indices(name, past, count)):
                lay[name, past + i] = [view[place].clone() for view in later(allocator)]
        before(processor, model)


@bug(
    "osaurus-ai/vmlx-swift#287",
    "offload-qwen-records",
    "failed_load_counted_loaded",
    "copy_failed",
    origin="vmlx-swift",
)
def layer_that_is_missing_in_a_record_is_passed_over(fired: Fired) -> None:
    """A record of a prompt has lost one layer's keys and values. That layer is passed over when it is restored; how many
    tokens have been restored is taken from the layers beside it, and the request goes on behind all of them. In one layer
    it attends to what lay in its blocks."""
    from transformers.generation.continuous_batching import offloading_manager

    missing = 1  # the layer

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        ((kind, allocator),) = manager.cache.cache_allocators.items()
        part = slice(missing * allocator.bytes_per_page, (missing + 1) * allocator.bytes_per_page)
        blocks: list[int] = []
        for future in requests_in_batch:
            if future.state.is_cpu_offloaded:
                stored = manager._request_id_to_cpu_blocks[future.state.request_id][kind]
                blocks += allocator.block_table[future.state.request_id][: len(stored)]
        had = allocator._copy_view[blocks]
        before(manager, requests_in_batch)
        if blocks:
            come = allocator._copy_view[blocks]
            if (come[:, part] != had[:, part]).any():
                fired()
            come[:, part] = had[:, part]
            allocator._copy_view[blocks] = come


@bug("ml-explore/mlx-examples#977", "offload-buffers", "position_off", "prefix_not_computed", origin="mlx-examples")
def rest_of_the_buffer_is_saved_and_counts_as_tokens(fired: Fired) -> None:
    """A cache grows by steps, and all of its buffer is saved, with what no token has come to yet. When it is read back its
    length is taken from the buffer's: the next token gets a place that is too high by the rest of the last step, and
    attends to what is there as if it were tokens."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager

    step = 20  # tokens
    rests: dict[str, tuple[int, int]] = {}  # what no token has come to, by request that has been saved
    counted: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "offload_requests")
    def offload_requests(before, manager):
        active = list(manager.scheduler.active_requests.values())
        done = before(manager)
        for state in active:
            rest = -state.position_offset % step
            if state.request_id in manager.scheduler.waiting_requests and state.is_cpu_offloaded and rest:
                rests[state.request_id] = (state.position_offset, rest)
                state.position_offset += rest
        return done

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        before(manager, requests_in_batch)
        (allocator,) = manager.cache.cache_allocators.values()
        for future in requests_in_batch:
            if future.state.request_id in rests:
                past, rest = rests.pop(future.state.request_id)
                places = allocator.get_write_indices(future.state.request_id, past, rest)
                for keys, values in allocator._kv_token_views.values():
                    keys[places], values[places] = 0, 0
                counted.add(future.state.request_id)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in counted for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug(
    "huggingface/transformers#25104",
    "llama-stretched",
    "not_of_the_model",
    late="not found: a longer request may have other angles where nothing is wrong, too",
)
def base_of_the_angles_grows_and_the_keys_in_the_cache_stay(fired: Fired) -> None:
    """Past the length that a model was trained with, the base of its angles grows with the longest that is fed. Keys are
    kept as they were turned when they came: each is turned by the base of its own step, and the tokens of a long request
    are compared with keys of as many bases as there were steps. Who is fed beside it is turned by its base, too."""
    import torch
    from transformers.generation.continuous_batching import continuous_api
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    trained, factor = 64, 2.0

    @replaces(LlamaRotaryEmbedding, "forward")
    def forward(before, rotary, hidden, position_ids):
        length = int(position_ids.max()) + 1
        if length <= trained:
            return before(rotary, hidden, position_ids)
        size, base = 2 * len(rotary.inv_freq), rotary.config.rope_parameters["rope_theta"]
        base *= (factor * length / trained - (factor - 1)) ** (size / (size - 2))
        had, rotary.inv_freq = rotary.inv_freq, 1.0 / base ** (torch.arange(0, size, 2) / size)
        angles = before(rotary, hidden, position_ids)
        rotary.inv_freq = had
        return angles

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(f.state.position_offset > trained for f in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug("osaurus-ai/osaurus#1989", "offload-qwen-rebaked", "cache_kept_over_new_weights", origin="Osaurus")
def what_is_kept_is_known_by_the_name_of_the_model(fired: Fired) -> None:
    """What is kept of prompts is known by their tokens and by the model's name, layout and sizes. Other weights come under
    the same name: what the device holds goes with the old ones, and what is kept behind it is found as before. A request
    goes on from KV that the old weights have made."""
    from transformers.generation.continuous_batching import offloading_manager

    import __main__ as engine

    old: set[int] = set()  # blocks of the host

    @replaces(engine, "forget_kept")
    def forget_kept(before):
        old.update(engine.KEPT.values())

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        for future in requests_in_batch:
            hosts = manager._request_id_to_cpu_blocks.get(future.state.request_id, {})
            if future.state.is_cpu_offloaded and old & {block for blocks in hosts.values() for block in blocks}:
                fired()
        before(manager, requests_in_batch)
