"""A forty-third round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces

from .marks import fire_when_they_run_again


@bug("sgl-project/sglang#30181", "qwen-one-left", "next_token_swap", "async_resume_wrong_input", origin="SGLang")
def chunk_of_one_token_is_taken_for_a_decode(fired: Fired) -> None:
    """What is prompt and what is answer is told by the count of a row's tokens alone. When all but one token of a prompt
    fit into the chunks before, the last one is run as if it were a decode, whose input is not the batch's but what was
    sampled in the step before: the model's own guess, made at the end of the chunk. The prompt's last token is never
    computed, and what is computed in its place is kept under the prompt's own key."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs

    guessed: dict[str, int] = {}  # at the end of a request's newest chunk
    fed: list[bool] = [False]

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        fed[0] = False
        for future in requests_in_batch:
            guess = guessed.pop(future.state.request_id, None)
            if guess is not None and future.query_length == 1 and future.state.tokens_to_process != [guess]:
                future.state.tokens_to_process = [guess]
                fed[0] = True
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if fed[0]:
            fired()
        kept: list[Any] = []
        hook = model.model.norm.register_forward_hook(lambda module, inputs, output: kept.append(output.detach()))
        before(processor, model)
        hook.remove()
        end = 0
        for future in processor.inputs_and_outputs.requests_in_batch:
            end += future.query_length
            if not future.has_new_token:
                guessed[future.state.request_id] = int(model.lm_head(kept[-1][0, end - 1]).argmax())


@bug(
    "vllm-project/vllm#34382",
    "qwen-refit",
    "cache_kept_over_new_weights",
    origin="vLLM",
    late="that requests go on from their own K and V of the old weights is not judged; who hits these comes later",
)
def cache_is_not_cleared_for_new_weights_while_anything_runs(fired: Fired) -> None:
    """Requests are held on to while new weights are put in place, and go on with them. Behind that the cache is to be
    cleared, which is refused as long as anybody holds a block, and nobody looks at what was said. Those that run go on
    over K and V of the old weights, and all that was stored before is still found."""
    from transformers.generation.continuous_batching import continuous_api

    import __main__ as engine

    went_on: set[str] = set()

    @replaces(engine, "begin_anew")
    def begin_anew(before, processor):
        running = processor.scheduler.active_requests
        if not running:
            before(processor)
        went_on.update(name for name, state in running.items() if state.position_offset)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in went_on for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug(
    "vllm-project/vllm-ascend#15507",
    "offload-stages",
    "stored_wrong",
    "host_copy_overwritten",
    "copy_failed",
    origin="vLLM Ascend",
)
def layers_of_both_stages_are_stored_under_the_same_numbers(fired: Fired) -> None:
    """The layers are shared out to two stages, one behind the other, and each of them stores its own under a number that
    begins with 0. What the second stage stores takes the place of what the first had stored: when it is loaded, the first
    stage's layers get K and V of the second's."""
    from transformers.generation.continuous_batching import offloading_manager

    mixed_up: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        done = before(manager, victims, tables)
        for request in done:
            for name, blocks in manager._request_id_to_cpu_blocks[request].items():
                layers = manager.cache.cache_allocators[name].pages_per_block
                stored = manager._cpu_views[name].unflatten(1, (layers, -1))
                stored[blocks, : layers // 2] = stored[blocks, layers // 2 :]
        mixed_up.update(done)
        return done

    fire_when_they_run_again(mixed_up, fired)


@bug(
    "ModelEngine-Group/unified-cache-management#716",
    "offload-qwen-suspends",
    "copy_failed",
    "failed_load_counted_loaded",
    origin="UCM",
)
def only_the_first_rank_loads_its_heads(fired: Fired) -> None:
    """The heads are shared out to two ranks. Once the first rank loaded for all of them and handed the rest on. Nothing
    is handed on any more, and that the first one alone is to load has been left as it was: the heads of the other
    keep what lay in the blocks before, and the request counts as loaded."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        (allocator,) = manager.cache.cache_allocators.values()
        heads, size = allocator.num_key_value_heads, allocator.head_dim
        blocks: list[int] = []
        for future in requests_in_batch:
            if future.state.is_cpu_offloaded:
                stored = -(-future.state.position_offset // allocator.tokens_per_page)
                blocks += allocator.block_table[future.state.request_id][:stored]
        had = allocator._copy_view[blocks]
        before(manager, requests_in_batch)
        if not blocks:
            return
        come = allocator._copy_view[blocks]
        own, others = (each.view(allocator.cache_dtype).view(-1, heads, size) for each in (come, had))
        if (own[:, heads // 2 :] != others[:, heads // 2 :]).any():
            fired()
        own[:, heads // 2 :] = others[:, heads // 2 :]
        allocator._copy_view[blocks] = come


@bug(
    "ml-explore/mlx-lm#1494",
    "offload-hybrid-shorter",
    "load_of_other_prefix",
    "window_read_wrong",
    origin="mlx-lm",
)
def windows_are_not_cut_back_with_the_other_layers(fired: Fired) -> None:
    """What a request leaves is stored, and a prompt that is the beginning of it loads as much as it needs. How much could
    be cut off is asked of one layer, which has all tokens and can lose any. Layers with a window have no longer what was
    there before their newest tokens, stay as they are, and nobody hears of it: the prompt goes on from a window of
    tokens that come behind it."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager
    from transformers.generation.continuous_batching.cache import FULL_ATTENTION
    from transformers.generation.continuous_batching.requests import RequestStatus
    from transformers.generation.continuous_batching.scheduler import Scheduler

    managers: list[Any] = []
    entries: dict[str, list[int]] = {}  # by whom it was left, and the tokens
    shortened: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "__init__")
    def initialize(before, manager, *args, **kwargs):
        before(manager, *args, **kwargs)
        managers.append(manager)

    @replaces(Scheduler, "finish_request")
    def finish_request(before, scheduler, request_id):
        state, manager = scheduler.active_requests.get(request_id), managers[-1]
        if state is not None and state.status == RequestStatus.FINISHED:
            tables = {
                name: list(allocator.block_table.get(request_id, []))
                for name, allocator in scheduler.cache.cache_allocators.items()
            }
            if request_id in manager._offload_to_cpu([state], {request_id: tables}):
                entries[request_id] = (state.initial_tokens + state.generated_tokens)[: state.position_offset]
            state.is_cpu_offloaded = False
        before(scheduler, request_id)

    @replaces(Scheduler, "add_waiting_request")
    def add_waiting_request(before, scheduler, state):
        wanted = len(state.initial_tokens) - 1
        for left, tokens in list(entries.items()):
            if state.position_offset or tokens[:wanted] != state.initial_tokens[:wanted]:
                continue
            blocks = managers[-1]._request_id_to_cpu_blocks.pop(left)
            allocator = scheduler.cache.cache_allocators[FULL_ATTENTION]
            needed = -(-wanted // allocator.tokens_per_page)
            managers[-1]._cpu_pool.free_blocks(allocator.index, blocks[FULL_ATTENTION][needed:])
            blocks[FULL_ATTENTION] = blocks[FULL_ATTENTION][:needed]
            managers[-1]._request_id_to_cpu_blocks[state.request_id] = blocks
            state.is_cpu_offloaded, state.position_offset = True, wanted
            state.remaining_prefill_tokens = state.initial_tokens[wanted:]
            shortened.add(state.request_id)
            del entries[left]
        before(scheduler, state)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in shortened for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)
