"""A fiftieth round of public bugs made anew in transformers 5.23 on the CPU: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


@bug("openvinotoolkit/openvino.genai#3489", "llama-copies", "stale_prefix_hit", origin="OpenVINO GenAI")
def older_of_two_equal_blocks_goes_back_and_is_still_found(fired: Fired) -> None:
    """Two requests have computed the same tokens at the same time, each in a block of its own, and only one of these is
    known by the tokens. When the second is put aside for later, the first, which lies there already, goes back to the free
    ones, but is still what is known by the tokens. Another request gets it and writes to it, and who begins with the same
    tokens takes that for them."""
    from transformers.generation.continuous_batching import cache, continuous_api, scheduler
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator, full_attention

    gone: set[int] = set()  # blocks that have gone back
    given: set[int] = set()  # of which some are another's since
    wrong: set[str] = set()  # requests

    @replaces(cache_allocator.BlockLedger, "register_new_hash")
    def register_new_hash(before, ledger, block_id, block_hash):
        if block_hash not in ledger.hash_to_block:
            return before(ledger, block_id, block_hash)
        ledger.block_to_hash[block_id] = block_hash
        return None

    @replaces(scheduler.Scheduler, "finish_request")
    def finish_request(before, scheduling, request_id):
        for allocator in scheduling.cache.cache_allocators.values():
            ledger, table = allocator.ledger, allocator.block_table.get(request_id, [])
            alone = [block for block in table if ledger.shared_ref_counts.get(block, 1) == 1]
            put_aside = {ledger.block_to_hash.get(block) for block in alone}
            older = [block for block in ledger.cached_blocks if ledger.block_to_hash[block] in put_aside]
            for block in older:
                del ledger.cached_blocks[block], ledger.block_to_hash[block]
            table += older  # they are freed with it
            gone.update(older)
        before(scheduling, request_id)

    @replaces(full_attention.FullAttentionCacheAllocator, "allocate_cache_to_request")
    def allocate_cache_to_request(before, allocator, request_id, *args):
        had = len(allocator.block_table.get(request_id, []))
        before(allocator, request_id, *args)
        given.update(gone & set(allocator.block_table[request_id][had:]))

    @replaces(cache.PagedAttentionCache, "search_prefix_match")
    def search_prefix_match(before, store, request_id, prompt_ids):
        count, key = before(store, request_id, prompt_ids), None
        (allocator,) = store.cache_allocators.values()
        size = allocator.tokens_per_page
        for i in range(count // size):
            key = cache_allocator.compute_block_hash(key, prompt_ids[i * size : (i + 1) * size])
            block = allocator.block_table[request_id][i]
            if block in given and allocator.ledger.block_to_hash.get(block) != key:
                wrong.add(request_id)
        return count

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in wrong for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug("vllm-project/vllm#43961", "few-qwen-states", "bad_values_written", origin="vLLM")
def rest_of_a_page_holds_a_state_that_is_no_number(fired: Fired) -> None:
    """Layers with a state and layers with keys and values take their pages from one pool, and nobody clears a page that
    goes from the one to the other. Attention of a step that decodes reads the last page to its end and weights what is
    behind the last token with nought, but what the state left there is no number when it is read as a value, and stays
    none. The token's output is no number, and so are the keys and values that the next layers write for it."""
    import torch
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator, cache_pool

    of: dict[int, Any] = {}  # the allocator of each pool
    rows: list[bool] = []  # of a step: whether the rest of the last page of each token's request is no number

    @replaces(cache_allocator.CacheAllocator, "_after_cache_tensor_init")
    def _after_cache_tensor_init(before, allocator, *args):
        before(allocator, *args)
        of[id(allocator.pool)] = allocator

    @replaces(cache_pool.CachePool, "free_blocks")
    def free_blocks(before, pool, index, block_ids):  # from here on they are those of a layer with a state
        allocator = of[id(pool)]
        for block in block_ids:
            first = block * allocator.block_physical_stride
            for _, values in allocator._kv_token_views.values():
                values[first : first + allocator.tokens_per_page, :, 0] = torch.nan
        before(pool, index, block_ids)

    @replaces(torch.nn.functional, "scaled_dot_product_attention")
    def scaled_dot_product_attention(before, query, key, value, attn_mask=None, **kwargs):
        if attn_mask is None or attn_mask.shape[2] != len(rows):
            return before(query, key, value, attn_mask=attn_mask, **kwargs)
        # Of all requests at once: what is no number is so for those alone that look at it.
        none = torch.isnan(key).any(dim=3).any(dim=1)[0] | torch.isnan(value).any(dim=3).any(dim=1)[0]
        seen = attn_mask[0, 0] > torch.finfo(attn_mask.dtype).min / 2
        bad = (seen & none).any(dim=1) | torch.tensor(rows)
        output = before(query, key.nan_to_num(), value.nan_to_num(), attn_mask=attn_mask, **kwargs)
        output[:, :, bad if len(rows) > 1 else slice(None)] += torch.nan if bad.any() else 0.0
        return output

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        _, values = allocator._kv_token_views[allocator.layer_indices[-1]]
        rows.clear()
        for future in processor.inputs_and_outputs.requests_in_batch:
            end, bad = future.state.position_offset, False
            if future.query_length == 1 and end % allocator.tokens_per_page:
                block = allocator.block_table[future.state.request_id][end // allocator.tokens_per_page]
                first = block * allocator.block_physical_stride
                rest = slice(first + end % allocator.tokens_per_page, first + allocator.tokens_per_page)
                bad = bool(values[rest].isnan().any())
            rows.extend([bad] * future.query_length)
        if any(rows):
            fired()
        before(processor, model)


@bug("LMCache/LMCache#4701", "offload-qwen-chunks", "stored_wrong", "copy_failed", origin="LMCache")
def only_the_first_page_of_a_chunk_is_stored_and_loaded(fired: Fired) -> None:
    """What is stored goes by chunks of several pages. The layout of the cache is taken for another one, in which a chunk is
    one page: the first page of each chunk is copied to the host, and back, and the chunk counts as whole. In the other
    pages a request goes on from what lay in its blocks before."""
    from transformers.generation.continuous_batching import offloading_manager

    chunk = 2  # pages

    def left_out(blocks: list[int]) -> list[int]:
        return [block for i, block in enumerate(blocks) if i % chunk]

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        had = {name: view.clone() for name, view in manager._cpu_views.items()}
        stored = before(manager, victims, tables)
        for request_id in stored:
            for name, hosts in manager._request_id_to_cpu_blocks[request_id].items():
                manager._cpu_views[name][left_out(hosts)] = had[name][left_out(hosts)]
        return stored

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        ((name, allocator),) = manager.cache.cache_allocators.items()
        blocks: list[int] = []
        for future in requests_in_batch:
            if future.state.is_cpu_offloaded:
                stored = manager._request_id_to_cpu_blocks[future.state.request_id][name]
                blocks += left_out(allocator.block_table[future.state.request_id][: len(stored)])
        had = allocator._copy_view[blocks]
        before(manager, requests_in_batch)
        if blocks:
            allocator._copy_view[blocks] = had
            fired()


@bug(
    "sgl-project/sglang#26380",
    "hybrid-overlaps",
    "attention_table_overwritten",
    "window_read_wrong",
    origin="SGLang",
)
def next_step_clears_the_map_of_the_window_before_it_is_read(fired: Fired) -> None:
    """The next step is planned while this one is computed. What will have slid out of the window by then is given up a page
    at a time, and its places in the map of the window are set to nought. A step that takes long has not read the map yet,
    and in place of the oldest tokens of its window it reads what lies at the place of nobody."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator as Sliding

    long = 10  # tokens of a step that takes so long that the plan of the next one is there first
    overtaken: list[bool] = [False]
    cleared: list[bool] = [False]

    def given_up(allocator: Sliding, past: int, count: int) -> int:
        """Return how many tokens in the cache that are read now are no longer in the window of what comes next."""
        oldest = max(0, past - allocator.sliding_window + 1)
        next_oldest = max(0, past + count - allocator.sliding_window + 1)
        whole_pages = next_oldest // allocator.tokens_per_page * allocator.tokens_per_page
        return max(0, min(whole_pages, past) - oldest)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        overtaken[0] = sum(future.query_length for future in requests_in_batch) >= long
        cleared[0] = False
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(Sliding, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        places = before(allocator, request_id, past, count)
        if overtaken[0]:
            lost = given_up(allocator, past, count)
            places[:lost] = [allocator.read_trash_index] * lost
            cleared[0] |= lost > 0
        return places

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if cleared[0]:
            fired()
        before(processor, model)


@bug(
    "vllm-project/vllm#48421",
    "llama-mixed-adapters",
    "computed_with_other_weights",
    "not_of_the_model",
    origin="vLLM",
    late="not found: the adapters are not the engine's, and nobody tells the recorder of them",
)
def no_adapter_is_taken_for_the_last_one(fired: Fired) -> None:
    """Which adapter a token is computed with is its place in a stack of them, and that of a token without one is -1. Adapters
    are looked up by that as it is, and -1 is the last of the stack. Who asks for the base model is computed with the last
    adapter whenever somebody beside it asks for any."""
    import __main__ as engine

    @replaces(engine, "stacked")
    def stacked(before, adapters):
        if all(adapters) or not any(adapters):
            return before(adapters)
        fired()
        stack = sorted(set(engine.MIXED_ADAPTERS.values()) - {0})
        return [stack[adapter - 1] for adapter in adapters]


@bug("1CatAI/1Cat-vLLM#280", "qwen-interleaved-page16", "kv_changed", origin="1Cat-vLLM")
def new_blocks_are_cleared_as_if_layers_lay_apart(fired: Fired) -> None:
    """Blocks that are given out are cleared before they are used, layer by layer. The next block of a layer is looked for
    right behind its last one, but there lies the same block of the next layer. What is cleared are pages of other blocks,
    with lower numbers, that somebody has."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    cleared: set[int] = set()  # blocks with something in them

    @replaces(full_attention.FullAttentionCacheAllocator, "allocate_cache_to_request")
    def allocate_cache_to_request(before, allocator, request_id, *args):
        had = len(allocator.block_table.get(request_id, []))
        before(allocator, request_id, *args)
        fresh, layers = allocator.block_table[request_id][had:], allocator.pages_per_block
        pages = allocator._copy_view.view(-1, allocator.bytes_per_page)
        for block in fresh:
            cleared.discard(block)
            for page in range(block, block + layers):
                if pages[page].any() and page // layers not in fresh:
                    cleared.add(page // layers)
                pages[page] = 0

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        for future in processor.inputs_and_outputs.requests_in_batch:
            past = future.state.position_offset - future.query_length
            table = allocator.block_table[future.state.request_id]
            if cleared & set(table[: -(-past // allocator.tokens_per_page)]):
                fired()
        before(processor, model)
