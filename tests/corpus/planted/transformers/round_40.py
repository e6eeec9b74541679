"""A fortieth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces

from .marks import fire_when_they_run_again


@bug("unslothai/unsloth#5108", "few-qwen-outgrown", "prefix_not_computed", "position_off", origin="Unsloth")
def only_the_prompt_is_computed_again_after_a_preemption(fired: Fired) -> None:
    """A request that is preempted gives up its pages, and is put back with its prompt alone. How long it is still counts
    what it had been answered: when the prompt has been computed again it goes on behind all of that, and reads pages
    for the answer's tokens into which nobody has written them."""
    from transformers.generation.continuous_batching.requests import RequestState

    moved: set[str] = set()

    @replaces(RequestState, "create_equivalent_initial_request")
    def create_equivalent_initial_request(before, state):
        made = before(state)
        made.remaining_prefill_tokens = made.initial_tokens[: made._true_initial_tokens]
        return made

    @replaces(RequestState, "update_and_check_completion")
    def update_and_check_completion(before, state, *args, **kwargs):
        done = before(state, *args, **kwargs)
        length = len(state.initial_tokens)
        if not done and state.generated_len() == 1 and state.position_offset < length:
            state.position_offset = length
            moved.add(state.request_id)
        return done

    fire_when_they_run_again(moved, fired)


@bug("sgl-project/sglang#36885", "qwen-page16-decodes", "pad_slot_wraps", "pad_rows_keep_last_blocks", origin="SGLang")
def padding_goes_to_the_last_slot_which_is_not_spare(fired: Fired) -> None:
    """Rows that fill up a batch have slot -1, which is turned into the pool's last one, as if that were kept for them.
    It is the first that is kept for padding, and the last is given out like any other: whenever a batch is filled up,
    what the padding has is written over what a request keeps there."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    padded: list[bool] = [False]  # whether this step's batch is filled up
    damaged: list[bool] = [False]

    def last_block(allocator: Any) -> int:
        block: int = len(allocator._copy_view) - 1
        return block

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        batch = processor.inputs_and_outputs.requests_in_batch
        size, block = allocator.tokens_per_page, last_block(allocator)
        padded[0] = len(batch) & (len(batch) - 1) != 0  # batches are of a power of two
        read = written = False
        for future in batch:
            end, blocks = future.state.position_offset, allocator.block_table[future.state.request_id]
            at = blocks.index(block) * size + size - 1 if block in blocks else end
            read |= at < end
            written |= end - future.query_length <= at < end
        damaged[0] = padded[0] or (damaged[0] and not written)
        if damaged[0] and read:
            fired()
        before(processor, model)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        if not padded[0]:
            return before(allocator, keys, values, layer, read_index, write_index)
        slot = last_block(allocator) * allocator.block_physical_stride + allocator.tokens_per_page - 1
        made = before(allocator, keys, values, layer, read_index, write_index)
        for view, states in zip(allocator._kv_token_views[layer], (keys, values), strict=True):
            view[slot] = states[-1]
        if not read_index.numel():
            return made
        return tuple(view.index_select(0, read_index) for view in allocator._kv_token_views[layer])


@bug("pytorch/rl#4016", "qwen-new-weights", "cache_kept_over_new_weights", "identity_not_in_key", origin="TorchRL")
def one_way_of_taking_new_weights_leaves_the_prefix_cache(fired: Fired) -> None:
    """There are several ways in which new weights come to the engine, and one of them puts them in place and does not
    empty the prefix cache. Prompts that begin as others did before the update go on from K and V of the old
    weights."""
    from transformers.generation.continuous_batching import continuous_api

    import __main__ as engine

    old: set[int] = set()

    @replaces(engine, "empty_prefix_cache")
    def empty_prefix_cache(before, processor):
        for allocator in processor.cache.cache_allocators.values():
            old.update(allocator.ledger.block_to_hash)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for allocator in processor.cache.cache_allocators.values():
            old.intersection_update(allocator.ledger.block_to_hash)
            for future in processor.inputs_and_outputs.requests_in_batch:
                if old.intersection(allocator.block_table[future.state.request_id]):
                    fired()
        before(processor, model)


@bug(
    "tenstorrent/tt-mlir#7998",
    "qwen-waves",
    "kv_write_damaged",
    "not_of_the_model",
    origin="TT-MLIR",
)
def heads_of_a_prompt_are_written_without_the_gaps_between_them(fired: Fired) -> None:
    """A cache has each head's tokens side by side, as many as there is room for, and what fills it with a prompt writes
    head after head without a stop. Where the prompt does not fill the room, what belongs to the second head begins in
    the rest of the first one's, and all of the second head's tokens lie that far too early."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    filled: list[tuple[int, int, list[int]]] = []  # of this step's prompts: their rows, and the places that they have
    hurt: set[str] = set()
    hurt_now: set[str] = set()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (allocator,) = io.cache.cache_allocators.values()
        size, stride = allocator.tokens_per_page, allocator.block_physical_stride
        filled.clear()
        hurt_now.clear()
        first = 0
        for future in requests_in_batch:
            count, blocks = future.query_length, allocator.block_table[future.state.request_id]
            if not future.state.position_offset and 1 < count < len(blocks) * size:
                filled.append((first, first + count, [b * stride + at for b in blocks for at in range(size)]))
                hurt_now.add(future.state.request_id)
            first += count
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        io = processor.inputs_and_outputs
        if (hurt_now and io.max_kv_read) or any(future.state.request_id in hurt for future in io.requests_in_batch):
            fired()
        hurt.update(hurt_now)
        before(processor, model)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        views = allocator._kv_token_views[layer]
        kept = [[view[places].clone() for view in views] for _, _, places in filled]
        made = before(allocator, keys, values, layer, read_index, write_index)
        for (first, end, places), rooms in zip(filled, kept, strict=True):
            for view, room, states in zip(views, rooms, (keys, values), strict=True):
                lies = room.transpose(0, 1).reshape(-1, room.shape[-1])  # head by head
                rows = states[first:end].transpose(0, 1).reshape(-1, room.shape[-1])
                lies[: len(rows)] = rows
                view[places] = lies.view(room.shape[1], room.shape[0], -1).transpose(0, 1)
        if not filled or not read_index.numel():
            return made
        return tuple(view.index_select(0, read_index) for view in views)


@bug(
    "NVIDIA/TensorRT-LLM#16913",
    "offload-qwen-suspends",
    "copy_failed",
    "load_of_other_prefix",
    "failed_load_counted_loaded",
    origin="TensorRT-LLM",
)
def what_lies_on_the_host_is_sent_from_where_it_was_before(fired: Fired) -> None:
    """What sends a request's blocks to where it goes on takes them from the places that they have on the device. Those
    that have been moved to the host meanwhile are not brought back first: what is sent is whatever others have put into
    their old places, and it arrives as the request's own."""
    from transformers.generation.continuous_batching import offloading_manager

    homes: dict[str, dict[str, list[int]]] = {}  # of what lies on the host, where it was on the device

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        done = before(manager, victims, tables)
        homes.update({name: tables[name] for name in done})
        return done

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        views = manager._cpu_views
        sent = {kind: view.clone() for kind, view in views.items()}
        wrong = False
        for future in requests_in_batch:
            if not future.state.is_cpu_offloaded:
                continue
            name = future.state.request_id
            for kind, places in manager._request_id_to_cpu_blocks[name].items():
                sent[kind][places] = manager.cache.cache_allocators[kind]._copy_view[homes[name][kind]]
                wrong |= bool((sent[kind][places] != views[kind][places]).any())
        if wrong:
            fired()
        manager._cpu_views = sent
        before(manager, requests_in_batch)
        manager._cpu_views = views


@bug(
    "lablup/mlxcel#1324",
    "llama-places",
    "not_of_the_model",
    origin="mlxcel",
    late="not found: K is turned alike from beginning to end, which the model alone can tell (--model)",
)
def keys_are_turned_for_twice_their_place(fired: Fired) -> None:
    """The factor of a scaling that only sets in with long contexts is taken for one by which every place is multiplied.
    All keys and queries are turned for twice the place that they have, from the first token on."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    @replaces(LlamaRotaryEmbedding, "forward")
    def forward(before, rotary, hidden, position_ids):
        return before(rotary, hidden, 2 * position_ids)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        fired()
        before(processor, model)


@bug("JaydenLyh/Reward-Forcing#5", "hybrid-sawtooth", "window_read_wrong", "slot_mapping", origin="Reward-Forcing")
def newest_of_a_full_window_is_given_up(fired: Fired) -> None:
    """When the window is full, room for what comes next is made at the wrong end: the newest token is given up, and not
    the oldest. From then on each token takes the place of the one right before it, and what was there when the window
    filled up stays for ever."""
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator

    newest: dict[str, int] = {}  # where the newest token of a full window lies

    @replaces(SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, request_id, past, count):
        if past < allocator.sliding_window or count > 1:
            newest.pop(request_id, None)
            return before(allocator, request_id, past, count)
        place = newest.setdefault(request_id, (past - 1) % allocator.sliding_window)
        return allocator._token_indices_to_physical_indices(request_id, place, 1)

    @replaces(SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        if past < allocator.sliding_window or count > 1:
            return before(allocator, request_id, past, count)
        fired()
        oldest, kept = newest[request_id] + 1, allocator.sliding_window - 1
        places = allocator._token_indices_to_physical_indices(request_id, oldest, kept)
        return [*places, allocator.sentinel_index]


@bug("jundot/omlx#2484", "qwen-contexts", "position_off", origin="oMLX")
def second_attempt_goes_on_behind_what_the_first_one_left(fired: Fired) -> None:
    """The rest of a prompt behind a hit is computed in a faster way first, and when that fails half way it is computed
    again in the usual one. What the first attempt has put behind the hit is not taken away: the same tokens come once
    more behind it, and the whole rest stands that many places too far on."""
    from transformers.generation.continuous_batching.requests import RequestStatus
    from transformers.generation.continuous_batching.scheduler import Scheduler

    hit: set[str] = set()
    failed: set[str] = set()

    @replaces(Scheduler, "_infer_request_tokens")
    def _infer_request_tokens(before, scheduler, state, *args, **kwargs):
        behind = state.position_offset
        tokens = before(scheduler, state, *args, **kwargs)
        if state.position_offset > behind:
            hit.add(state.request_id)
        return tokens

    @replaces(Scheduler, "_schedule_request")
    def _schedule_request(before, scheduler, state, tokens, budget, *args, **kwargs):
        before(scheduler, state, tokens, budget, *args, **kwargs)
        name = state.request_id
        if name in hit - failed and len(tokens) > 1:
            failed.add(name)
            state.tokens_to_process = state.tokens_to_process[: len(tokens) // 2]
            state.remaining_prefill_tokens = tokens[:]
            state.status = RequestStatus.PREFILLING

    fire_when_they_run_again(failed, fired)
