"""A thirty-seventh round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import fire_when_they_run_again


@bug(
    "Anbeeld/beellama.cpp#151",
    "hybrid-wide-page16",
    "kv_write_lost",
    "kv_write_damaged",
    "slot_mapping",
    origin="beellama.cpp",
)
def older_token_of_a_chunk_wins_its_place_in_the_ring(fired: Fired) -> None:
    """A chunk that is longer than the window comes to some of the ring's slots twice, and both tokens are handed to the operation that stores rows. Its threads take a part of the rows each, and who is last is not said: where the older token
    comes last, the one that belongs there is gone."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator

    threads = 3
    ends: dict[str, int] = {}  # of requests with such a chunk, where it ends
    wrong: list[bool] = []

    @replaces(SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, request_id, past, count):
        if count <= allocator.sliding_window:
            return before(allocator, request_id, past, count)
        ends[request_id] = past + count
        return allocator._token_indices_to_physical_indices(request_id, past, count)

    @replaces(SlidingAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        made = before(allocator, keys, values, layer, read_index, write_index)
        if write_index.unique().numel() == write_index.numel():
            return made
        k_cache, v_cache = allocator._kv_token_views[layer]
        right, count = k_cache[write_index].clone(), len(write_index)
        for part in reversed(range(threads)):
            rows = slice(part * count // threads, (part + 1) * count // threads)
            k_cache.index_copy_(0, write_index[rows], keys[rows])
            v_cache.index_copy_(0, write_index[rows], values[rows])
        wrong.append(not right.equal(k_cache[write_index]))
        return made

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for future in processor.inputs_and_outputs.requests_in_batch:
            past = future.state.position_offset - future.query_length
            if any(wrong) and past >= ends.get(future.state.request_id, past + 1):
                fired()
        before(processor, model)


@bug("mlc-ai/mlc-llm#2644", "forks-qwen-page16", "kv_changed", "copy_failed", "kv_write_damaged", origin="MLC LLM")
def copy_of_a_begun_page_runs_into_the_next_one(fired: Fired) -> None:
    """When an answer is forked off, the page that has been begun is copied by as many threads as fill whole thread blocks, and those that have nothing to copy do it all the same. They copy the beginning of whatever page lies behind the source
    onto the page behind the target, which is another request's."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    over = 5  # tokens that are copied too many, of the first head alone
    damaged: set[int] = set()  # tokens' places in the pool

    @replaces(cache_allocator.CacheAllocator, "copy_blocks")
    def copy_blocks(before, allocator, sources, targets):
        before(allocator, sources, targets)
        size, stride = allocator.tokens_per_page, allocator.block_physical_stride
        own = {block for table in allocator.block_table.values() for block in table} - {*targets}
        for source, target in zip(sources, targets, strict=True):
            if target + 1 >= allocator.num_blocks or source + 1 >= allocator.num_blocks:
                continue
            for halves in allocator._kv_token_views.values():
                for half in halves:
                    place, other = (target + 1) * stride, (source + 1) * stride
                    kept = half[place : place + over, 0].clone()
                    half[place : place + over, 0] = half[other : other + over, 0].clone()
                    if target + 1 in own | allocator.ledger.cached_blocks.keys():
                        changed = (half[place : place + over, 0] != kept).any(-1).nonzero().flatten().tolist()
                        damaged.update((target + 1) * size + at for at in changed)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        size, read = allocator.tokens_per_page, set()
        for future in processor.inputs_and_outputs.requests_in_batch:
            end, blocks = future.state.position_offset, allocator.block_table[future.state.request_id]
            places = [blocks[at // size] * size + at % size for at in range(end)]
            damaged.difference_update(places[end - future.query_length :])
            read.update(places)
        if damaged & read:
            fired()
        before(processor, model)


@bug(
    "NVIDIA/TensorRT-LLM#14937", "few-qwen-turns", "double_free", "page_given_twice", origin="TensorRT-LLM"
)  # fmt: skip
def block_that_is_released_twice_stands_in_the_queue_twice(fired: Fired) -> None:
    """A sequence's blocks are released one by one, and each that nobody refers to any more is put into the queue of free ones. A block that stands in the sequence's list more often than it was counted is put there twice:
    when it has been given to somebody it is still in the queue, and is given away again."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    lost: set[int] = set()
    holds: dict[int, tuple] = {}  # of a place in such a block, the tokens up to the one whose K and V are there

    @replaces(cache_allocator.CacheAllocator, "free_blocks")
    def free_blocks(before, allocator, request_id, no_cache=False):
        last = allocator.block_table.get(request_id, [])[-1:]
        before(allocator, request_id, no_cache)
        ledger = allocator.ledger
        if last and last[0] not in ledger.cached_blocks and last[0] not in ledger.shared_ref_counts:
            lost.update(last)
            allocator.pool.free_blocks(allocator.index, last)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        size, read = allocator.tokens_per_page, []
        for future in processor.inputs_and_outputs.requests_in_batch:
            state = future.state
            end, blocks = state.position_offset, allocator.block_table[state.request_id]
            tokens = (state.initial_tokens + state.generated_tokens)[:end]
            for at in range(end):
                if blocks[at // size] in lost:
                    place = blocks[at // size] * size + at % size
                    if at >= end - future.query_length:
                        holds[place] = (*tokens[: at + 1],)
                    read.append((place, (*tokens[: at + 1],)))
        if any(holds.get(place, tokens) != tokens for place, tokens in read):
            fired()
        before(processor, model)


@bug(
    "vllm-project/vllm-ascend#16929", "qwen-contexts", "not_of_the_model", "position_off", origin="vLLM Ascend"
)  # fmt: skip
def short_prompt_puts_its_angles_over_those_of_the_answers(fired: Fired) -> None:
    """The angles by which keys are turned are put into a buffer that is kept from step to step, one for all that counts as an answer. A prompt's short rest counts as one, and its own angles are made in the same buffer before the others have been used: the
    first rows of the step are turned by the places of that prompt."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    most = 8  # tokens of a prompt that counts as an answer
    rows: list[slice] = []

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        rows.clear()
        first = 0
        for future in processor.inputs_and_outputs.requests_in_batch:
            count = future.query_length
            if 1 < count <= most and first:
                rows.append(slice(first, first + count))
            first += count
        if rows:
            fired()
        before(processor, model)

    @replaces(Qwen3RotaryEmbedding, "forward")
    def forward(before, rotary, hidden, positions):
        cos, sin = before(rotary, hidden, positions)
        for own in rows:
            for angles in (cos, sin):
                angles[:, : own.stop - own.start] = angles[:, own].clone()
        return cos, sin


@bug(
    "ml-explore/mlx-swift-lm#629",
    "offload-qwen-suspends",
    "async_resume_wrong_input",
    "next_token_swap",
    origin="MLX Swift LM",
)
def request_is_suspended_without_its_next_input(fired: Fired) -> None:
    """A request that has to give way takes its K and V along, and all that says where it stands, but not the token that it is to be given next: that one stays in what the batch keeps, where those who go on have theirs. When it comes back
    it is given another one's."""
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    wrong: set[str] = set()

    @replaces(OffloadingManager, "offload_requests")
    def offload_requests(before, manager):
        ran = set(manager.scheduler.active_requests)
        made = before(manager)
        goes_on = [state.tokens_to_process for state in manager.scheduler.active_requests.values()]
        given = next((tokens[-1:] for tokens in goes_on if len(tokens) == 1), None)
        for name in ran & set(manager.scheduler.waiting_requests):
            state = manager.scheduler.waiting_requests[name]
            if given and state.is_cpu_offloaded and len(state.remaining_prefill_tokens) == 1:
                if state.remaining_prefill_tokens != given:
                    wrong.add(name)
                state.remaining_prefill_tokens = given[:]
        return made

    fire_when_they_run_again(wrong, fired)
