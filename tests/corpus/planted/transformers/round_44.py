"""A forty-fourth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


@bug(
    "xLLM-AI/xllm#2161",
    "qwen-goes-on",
    "attention_seq_len_wrong",
    "attention_table_overwritten",
    origin="xLLM",
)
def rest_of_a_prompt_does_not_see_what_was_hit(fired: Fired) -> None:
    """A prompt's attention is taken over the tokens that this step is fed, and its length is said to be theirs. Behind a hit
    these are the rest alone: what was hit lies in the cache and is read by nobody until the first decode."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention
    from transformers.generation.continuous_batching.requests import RequestStatus
    from transformers.generation.continuous_batching.scheduler import Scheduler

    hit: set[str] = set()
    alone: list[bool] = []  # by row, whether attention is told of this step's tokens only
    blind: set[str] = set()  # in this step

    @replaces(Scheduler, "_infer_request_tokens")
    def _infer_request_tokens(before, scheduler, state, *args, **kwargs):
        behind, status = state.position_offset, state.status
        tokens = before(scheduler, state, *args, **kwargs)
        if status == RequestStatus.PENDING and state.position_offset > behind:
            hit.add(state.request_id)
        return tokens

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        blind.clear()
        blind.update(f.state.request_id for f in requests_in_batch if f.state.request_id in hit)
        alone[:] = [future.state.request_id in hit for future in requests_in_batch]
        before(io, requests_in_batch, *args, **kwargs)
        hit.difference_update(f.state.request_id for f in requests_in_batch if f.has_new_token)  # decodes from now on
        alone.clear()

    @replaces(full_attention.FullAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        return before(allocator, 0 if alone.pop(0) else past, count)

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        places = before(allocator, request_id, past, count)
        return places[past:] if request_id in blind else places

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if blind:
            fired()
        before(processor, model)


@bug("lablup/mlxcel#885", "hybrid-clamped", "window_read_wrong", origin="mlxcel")
def mask_that_is_too_short_for_a_later_chunk_is_thrown_away(fired: Fired) -> None:
    """The mask of a later chunk covers the chunk alone, and is shorter than what the window's layers have kept and read.
    A mask that does not fit is thrown away, and what takes its place knows of order and not of a window: the later
    tokens of the chunk attend to all that is there, also to what has left their window."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs

    unmasked: list[bool] = [False]  # in this step

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, *args, **kwargs):
        unmasked[0] = False
        before(io, *args, **kwargs)

    @replaces(input_outputs, "build_attention_mask")
    def build_attention_mask(before, attention_mask, cumulative_seqlens_q, cumulative_seqlens_k, sliding_window=1):
        before(attention_mask, cumulative_seqlens_q, cumulative_seqlens_k, sliding_window)
        if sliding_window == 1:
            return
        for row in range(len(cumulative_seqlens_q) - 1):
            queries, keys = cumulative_seqlens_q[row : row + 2], cumulative_seqlens_k[row : row + 2]
            if 1 < queries[1] - queries[0] < keys[1] - keys[0]:  # a chunk that is not the first
                before(attention_mask, queries, keys)
                unmasked[0] |= keys[1] - keys[0] > sliding_window

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if unmasked[0]:
            fired()
        before(processor, model)


@bug(
    "vllm-project/vllm#3264",
    "qwen-adapters",
    "identity_not_in_key",
    origin="vLLM",
    late="not found: the adapters are not the engine's, and nobody tells the recorder of them",
)
def adapter_is_not_in_the_key_of_a_block(fired: Fired) -> None:
    """What a block is found by is made of its tokens and of those before them, and not of the adapter that it was computed
    with. A prompt that begins like one of another adapter hits that one's blocks, and goes on behind K and V that its own
    adapter would not have made."""
    from transformers.generation.continuous_batching import cache, continuous_api

    import __main__ as engine

    whose: dict[int, int] = {}  # by block, the adapter that it was computed with
    foreign: set[str] = set()

    @replaces(engine, "first_parent")
    def first_parent(before, adapter):
        return None

    @replaces(cache.PagedAttentionCache, "search_prefix_match")
    def search_prefix_match(before, store, request_id, prompt_ids):
        count, own = before(store, request_id, prompt_ids), engine.ADAPTERS[request_id]
        for allocator in store.cache_allocators.values():
            if any(whose.get(block, own) != own for block in allocator.block_table.get(request_id, []) if count):
                foreign.add(request_id)
        return count

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        batch = processor.inputs_and_outputs.requests_in_batch
        if any(future.state.request_id in foreign for future in batch):
            fired()
        before(processor, model)
        for allocator in processor.cache.cache_allocators.values():
            for future in batch:
                end, size = future.state.position_offset, allocator.tokens_per_page
                written = slice((end - future.query_length) // size, -(-end // size))
                for block in allocator.block_table[future.state.request_id][written]:
                    whose[block] = engine.ADAPTERS[future.state.request_id]


@bug("PaddlePaddle/FastDeploy#5584", "few-qwen-outgrown", "stale_prefix_hit", "page_given_twice", origin="FastDeploy")
def output_of_a_preempted_request_enters_the_cache_behind_its_release(fired: Fired) -> None:
    """Who handles a step's output enters the request's full blocks into the prefix cache, and has looked before that whether
    it still runs. The scheduler preempts it between the two: its blocks are free when they are entered. Whoever begins like
    it, and it first of all, hits blocks that the pool gives to others."""
    from transformers.generation.continuous_batching import cache, continuous_api, offloading_manager
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    owner: dict[int, str] = {}  # of blocks that were entered too late, whose they were
    writer: dict[int, str] = {}
    hit: dict[str, list[int]] = {}

    @replaces(offloading_manager.OffloadingManager, "offload_requests")
    def offload_requests(before, manager):
        running = [
            (state, allocator, list(allocator.block_table[state.request_id]))
            for state, _ in manager.scheduler.starved_requests
            for allocator in manager.cache.cache_allocators.values()
            if state.request_id in allocator.block_table
        ]
        done = before(manager)
        for state, allocator, blocks in running:
            if state.request_id in allocator.block_table:
                continue
            tokens, size, key = state.initial_tokens + state.generated_tokens, allocator.tokens_per_page, None
            for place, block in enumerate(blocks[: state.position_offset // size]):
                key = cache_allocator.compute_block_hash(key, tokens[place * size : (place + 1) * size])
                if (
                    block not in allocator.ledger.block_to_hash
                    and allocator.ledger.register_new_hash(block, key) is None
                ):
                    owner[block] = state.request_id
        return done

    @replaces(cache.PagedAttentionCache, "search_prefix_match")
    def search_prefix_match(before, store, request_id, prompt_ids):
        count = before(store, request_id, prompt_ids)
        blocks = [b for each in store.cache_allocators.values() for b in each.block_table.get(request_id, []) if count]
        hit[request_id] = [block for block in blocks if block in owner]
        return count

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        batch = processor.inputs_and_outputs.requests_in_batch
        for allocator in processor.cache.cache_allocators.values():
            size = allocator.tokens_per_page
            for future in batch:
                name, end = future.state.request_id, future.state.position_offset
                for block in allocator.block_table[name][(end - future.query_length) // size : -(-end // size)]:
                    writer[block] = name
        names = [future.state.request_id for future in batch]
        if any(writer[block] != owner[block] for name in names for block in hit.get(name, [])):
            fired()
        before(processor, model)


@bug("vllm-project/vllm-ascend#16779", "hybrid-clamped", "groups_alias", "kv_changed", origin="vLLM Ascend")
def values_of_the_window_lie_in_planes_over_those_of_other_layers(fired: Fired) -> None:
    """All layers share one pool, and blocks of the same size count as apart. Those of layers with a window are laid out in
    planes, of which that of the values begins further back than a block of the others knows of: their values lie where
    other layers keep theirs, under block numbers that differ."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import CachePool
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator as Sliding

    behind: list[int] = [0]  # rows by which the plane of the values lies further back
    last: dict[int, str] = {}  # by row of the pool, the kind of layer that has written there last

    @replaces(CachePool, "reset")
    def reset(before, pool):
        before(pool)
        if pool.num_reserved_sectors:
            pool.free_sectors.pop()  # there the plane ends

    @replaces(Sliding, "register_cache_tensor")
    def register_cache_tensor(before, allocator, *args, **kwargs):
        before(allocator, *args, **kwargs)
        size, behind[0] = allocator.tokens_per_page, allocator.block_physical_stride * allocator.blocks_per_sector
        rows = allocator.cache_tensor.view(-1, allocator.num_key_value_heads, allocator.head_dim)
        for place, layer in enumerate(allocator.layer_indices):
            keys, _ = allocator._kv_token_views[layer]
            allocator._kv_token_views[layer] = (keys, rows[(2 * place + 1) * size + behind[0] :])

    def damaged(io: Any, layer: int) -> bool:
        """Whether a layer reads what others have written in the places of its values; note what it writes itself."""
        allocator = io.cache.layer_to_allocator[layer]
        ring, kind = isinstance(allocator, Sliding), allocator.layer_type
        first = (2 * allocator.layer_indices.index(layer) + 1) * allocator.tokens_per_page + ring * behind[0]
        written = io.write_index_storage[allocator.index, : io.true_write_sizes[allocator.index]].tolist()
        read = io.read_index_storage[allocator.index, : io.true_read_sizes[allocator.index]].tolist()
        if not ring:
            last.update({first + slot: kind for slot in written})
        wrong = any(last.get(first + slot, kind) != kind for slot in read if slot != allocator.sentinel_index)
        if ring:
            last.update({first + slot: kind for slot in written})
        return wrong

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        io = processor.inputs_and_outputs
        wrong = [damaged(io, layer) for layer in sorted(io.cache.layer_to_allocator)]
        if any(wrong):
            fired()
        before(processor, model)


@bug("vllm-project/vllm#47574", "hybrid-cancels", "bad_values_written", origin="vLLM")
def page_that_a_window_left_is_read_as_eight_bit_values(fired: Fired) -> None:
    """Layers without a window keep 8-bit values, those with one do not, and they give pages to each other that nobody
    clears. Attention reads a begun page to its end and weighs what is behind the last token with nought, which is no help
    against what a window has left there: read as 8-bit values it is no number, and so is all that comes of it."""
    import torch
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator as Sliding

    left: set[int] = set()  # rows of the pool in which a layer with a window has written last

    def spills(io: Any) -> list[tuple[int, int, torch.Tensor]]:
        """Return by request what attention adds to its rows: what lies behind its tokens, times nought."""
        found, first = [], 0
        (full,) = (each for each in io.cache.cache_allocators.values() if not isinstance(each, Sliding))
        keys, values = full._kv_token_views[full.layer_indices[0]]
        size = full.tokens_per_page
        for future in io.requests_in_batch:
            end, rows = future.state.position_offset, (first, first + future.query_length)
            first = rows[1]
            page = full.block_table[future.state.request_id][(end - 1) // size] * full.block_physical_stride
            behind = [slot for slot in range(page + (end - 1) % size + 1, page + size) if size + slot in left]
            if io.max_kv_read and behind:
                read = torch.stack([keys[behind], values[behind]]).view(torch.float8_e4m3fn).float()
                found.append((*rows, (0 * read).sum()))
        return found

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        io = processor.inputs_and_outputs
        for allocator in io.cache.cache_allocators.values():
            places = range(len(allocator.layer_indices)) if isinstance(allocator, Sliding) else [0]
            slots = io.write_index_storage[allocator.index, : io.true_write_sizes[allocator.index]].tolist()
            rows = {(2 * place + 1) * allocator.tokens_per_page + slot for place in places for slot in slots}
            (left.update if isinstance(allocator, Sliding) else left.difference_update)(rows)
        found = spills(io)
        if any(spill.isnan() for _, _, spill in found):
            fired()

        def weigh(module, inputs):
            (attended,) = inputs
            attended = attended.clone()
            for first, end, spill in found:
                attended[0, first:end] += spill
            return (attended,)

        (layer,) = (
            layer
            for each in io.cache.cache_allocators.values()
            if not isinstance(each, Sliding)
            for layer in each.layer_indices
        )
        hook = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(weigh)
        before(processor, model)
        hook.remove()
