"""Public bugs made anew in the continuous batching of transformers 5.23: allocators, ledger, index tensors, offloading."""

from bugs import Fired, bug, replaces

from .marks import once_written_twice


@bug("huggingface/transformers#47708", "hybrid", "window_read_wrong")
def ring_start_shifted(fired: Fired) -> None:
    """The start of the reads in a sliding group's ring is the past length modulo the window, one short once the ring has
    wrapped. Attention reads the window one position off, oldest token and newest in the wrong places."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        if past < allocator.sliding_window:
            return before(allocator, name, past, query)
        fired()
        start, count = past % allocator.sliding_window, allocator.sliding_window - 1
        places = allocator._token_indices_to_physical_indices(name, start, count)
        return places + [allocator.sentinel_index] * query


@bug("huggingface/transformers#44379", "forks", "copy_failed", "fork_copy_missing")
def fork_without_copy(fired: Fired) -> None:
    """With asynchronous batches a fork's copy is left out: it gets fresh blocks for the page that its parent had begun,
    and nothing is copied into them."""
    from transformers.generation.continuous_batching import cache

    @replaces(cache.PagedAttentionCache, "perform_cache_copy")
    def perform_cache_copy(before, paged, copies):
        """Leave the copies out."""

    from transformers.generation.continuous_batching import continuous_api

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any("__child" in future.state.request_id for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug("NVIDIA/TensorRT-LLM#9056", "offload", "host_copy_overwritten", origin="TensorRT-LLM")
def two_in_one_host_block(fired: Fired) -> None:
    """Two device blocks are offloaded to one host block; the second overwrites the first before that is loaded back. A
    request goes on from another's K and V."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "_reserve_cpu_blocks")
    def _reserve_cpu_blocks(before, manager, counts):
        given = before(manager, counts)
        if given is not None:
            given = {name: [ids[0]] * len(ids) for name, ids in given.items()}
        return given

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        if any(
            f.state.is_cpu_offloaded
            and len(next(iter(manager._request_id_to_cpu_blocks[f.state.request_id].values()))) > 1
            for f in batch
        ):
            fired()
        before(manager, batch)


@bug(
    "NVIDIA/TensorRT-LLM#8813",
    "offload",
    "failed_load_counted_loaded",
    "host_copy_overwritten",
    "load_of_other_prefix",  # what the patch has it read are other pages
    origin="TensorRT-LLM",
)
def read_before_it_landed(fired: Fired) -> None:
    """A request that was offloaded to the host is scheduled before its blocks have come back. It reads what stood in the
    blocks that it was given."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        waiting = [future for future in batch if future.state.is_cpu_offloaded]
        if waiting:
            fired()
            manager._cpu_views = {name: view.roll(3, 0) for name, view in manager._cpu_views.items()}
        before(manager, batch)


@bug("LMCache/LMCache#4463", "offload", "layout_misread", origin="LMCache")
def packed_layout_misread(fired: Fired) -> None:
    """Blocks come back from the host in another layout than they were stored in: within a block the bytes of keys and
    values have changed places."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        if any(future.state.is_cpu_offloaded for future in batch):
            fired()
            manager._cpu_views = {n: v.roll(v.shape[1] // 2, 1) for n, v in manager._cpu_views.items()}
        before(manager, batch)


@bug("LMCache/LMCache#4086", "llama", "tokens_truncated_hash_kept", origin="LMCache")
def short_hash(fired: Fired) -> None:
    """A block's key keeps only a few bits of what it is made of, so that blocks of different prompts have one key. A
    request hits blocks of another prompt."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator, "compute_block_hash")
    def compute_block_hash(before, parent, tokens):
        return before(parent, [tokens[0] % 2])

    @replaces(cache_allocator.CacheAllocator, "acquire_prefix_blocks")
    def acquire_prefix_blocks(before, allocator, name, count, blocks):
        fired()
        before(allocator, name, count, blocks)


@bug("vllm-project/vllm#37076", "few", "page_given_twice", "eviction_of_locked_page", origin="vLLM")
def evicted_while_read(fired: Fired) -> None:
    """Under pressure the pool takes back blocks whose count of users it reads too late. A running request's block is given
    to another."""
    from transformers.generation.continuous_batching import cache

    @replaces(cache.PagedAttentionCache, "evict_cached_blocks")
    def evict_cached_blocks(before, paged):
        done = before(paged)
        for allocator in paged.cache_allocators.values():
            if not getattr(paged, "taken", 0) and len(allocator.block_table) > 1:
                blocks = max(allocator.block_table.values(), key=len)
                paged.taken = 1
                allocator.pool.free_blocks(allocator.index, [blocks[0]])
        return True if getattr(paged, "taken", 0) == 1 else done

    once_written_twice(fired)


@bug(
    "Avarok-Cybersecurity/atlas#373",
    "llama",
    "free_too_early",
    "page_given_twice",
    "radix_insert_then_free",
    origin="Atlas",
)
def counted_once_too_few(fired: Fired) -> None:
    """A request that joins cached blocks is not counted among their users. When the first user leaves, the blocks go back
    to the pool under the second."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator.CacheAllocator, "free_blocks")
    def free_blocks(before, allocator, name, no_cache=False):
        mine = allocator.block_table.get(name, [])
        others = {b for other, blocks in allocator.block_table.items() if other != name for b in blocks}
        shared = [b for b in mine if b in others]
        before(allocator, name, no_cache)
        if shared and not getattr(allocator, "lost", False):
            allocator.lost = True
            allocator.pool.free_blocks(allocator.index, shared[:1])

    once_written_twice(fired)


@bug("LMCache/LMCache#4921", "llama", "slot_mapping", origin="LMCache")
def absolute_slots(fired: Fired) -> None:
    """A slot mapping that begins behind the cached prefix is indexed with absolute positions, so that each token of a later
    chunk goes to the slot of one further on."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    @replaces(full_attention.FullAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, name, past, query):
        places = before(allocator, name, past, query)
        if past and query > 6:
            fired()
            places = places[3:] + places[-1:] * 3
        return places


@bug("tanishqkumar/ssd#23", "llama", "attention_table_overwritten", origin="ssd")
def reads_wrong_rows(fired: Fired) -> None:
    """A prefill with a cached prefix gets the whole paged cache without its block table. Attention reads rows as they lie
    in memory instead of those that the table names."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        places = before(allocator, name, past, query)
        if past > 12 and query > 1:
            fired()
            places = [places[0] + i for i in range(past)] + places[past:]
        return places


@bug("vllm-project/vllm#42571", "few", "double_free", "page_given_twice", origin="vLLM")
def same_block_twice(fired: Fired) -> None:
    """A list of blocks to give back names one block twice, and the pool puts it into its free list twice. Two requests are
    given the same block."""
    from transformers.generation.continuous_batching.cache_allocators import cache_pool

    twice: list[int] = []

    @replaces(cache_pool.CachePool, "free_blocks")
    def free_blocks(before, pool, index, blocks):
        blocks = list(blocks)
        if blocks and not twice:
            twice.append(blocks[0])
            blocks = [blocks[0], *blocks]
        before(pool, index, blocks)

    @replaces(cache_pool.CachePool, "get_free_blocks")
    def get_free_blocks(before, pool, index, count):
        given = before(pool, index, count)
        pool.handed = getattr(pool, "handed", 0) + sum(block in twice for block in given)
        if pool.handed > 1:
            fired()
        return given


@bug("LMCache/LMCache#1361", "few", "async_resume_wrong_input", origin="LMCache")
def resumed_with_stale_token(fired: Fired) -> None:
    """A request that was put back comes back with the tokens that were known when it was put back, not with the one that
    was sampled since. It is fed a stale token."""
    from transformers.generation.continuous_batching import requests

    back: set[str] = set()

    @replaces(requests.RequestState, "create_equivalent_initial_request")
    def create_equivalent_initial_request(before, state):
        made = before(state)
        if len(made.initial_tokens) > 4 and state.generated_tokens:
            made.initial_tokens[-1] = made.initial_tokens[-2]
            made.remaining_prefill_tokens = list(made.initial_tokens)
            back.add(made.request_id)
        return made

    from transformers.generation.continuous_batching import continuous_api

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for future in processor.inputs_and_outputs.requests_in_batch:
            state = future.state
            if state.request_id in back and state.position_offset >= len(state.initial_tokens):
                fired()
        before(processor, model)


@bug("vllm-project/vllm#41657", "hybrid", "groups_alias", "kv_changed", origin="vLLM")
def groups_overlap(fired: Fired) -> None:
    """Two KV-cache groups map to the same bytes: what one writes changes what the other holds."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention, sliding_attention

    theirs: dict = {}

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        done = before(allocator, keys, values, layer, read_index, write_index)
        if (
            "rows" in theirs
            and layer == allocator.layer_indices[0]
            and type(allocator) is full_attention.FullAttentionCacheAllocator
        ):
            for view, new in zip(theirs["views"], (keys, values), strict=True):
                view[theirs["rows"]] = new[:1]
            theirs["hit"] = True
        return done

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        places = before(allocator, name, past, query)
        import torch

        if past > 12 and query == 1:
            if theirs.get("hit"):
                fired()
            theirs["views"] = allocator._kv_token_views[allocator.layer_indices[0]]
            theirs["rows"] = torch.tensor(places[-4:-3])
        return places


@bug("rajveer43/VeloxQuant-MLX#389", "llama", "position_off", "draft_position_plus_one", origin="VeloxQuant-MLX")
def positions_fall_behind(fired: Fired) -> None:
    """After an eviction the next position is taken from the number of rows that are kept, and falls behind the true one.
    Every later token is rotated for a place that is not its own."""
    from transformers.generation.continuous_batching import continuous_api

    @replaces(continuous_api.ContinuousBatchProcessor, "prepare_next_batch")
    def prepare_next_batch(before, processor):
        ready = before(processor)
        io, at = processor.inputs_and_outputs, 0
        for future in io.requests_in_batch if ready else ():
            if future.query_length == 1 and future.state.position_offset > 60:
                io.position_ids[at] -= 5
                fired()
            at += future.query_length
        return ready


@bug("vllm-project/vllm#37076", "few", "page_given_twice", "free_too_early", origin="vLLM")
def taken_from_cache_twice(fired: Fired) -> None:
    """A cached block that a request uses is taken for one without users when the pool runs short, and given out. One
    request writes it, another reads it."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    gone: list[int] = []

    @replaces(cache_allocator.BlockLedger, "evict_cached_blocks")
    def evict_cached_blocks(before, ledger):
        blocks = before(ledger)
        used = [block for block in ledger.block_to_hash if block not in blocks]
        if used and not gone:
            gone.append(used[-1])
            return [*blocks, used[-1]]
        return blocks

    once_written_twice(fired)


@bug("vllm-project/vllm#13922", "llama", "kv_write_damaged", "kv_write_lost", origin="vLLM")
def write_dropped(fired: Fired) -> None:
    """The kernel that stores K and V takes its number of tokens from the padded tensor's other side and leaves the last
    one out. Its slot keeps what stood there before."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    steps: list[int] = []

    @replaces(continuous_api.ContinuousBatchProcessor, "prepare_next_batch")
    def prepare_next_batch(before, processor):
        ready = before(processor)
        steps.append(1)
        if len(steps) == 8:
            fired()
        return ready

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        views = allocator._kv_token_views[layer]
        kept = [view[write_index[-1:]].clone() for view in views]
        done = before(allocator, keys, values, layer, read_index, write_index)
        for view, row in zip(views, kept, strict=True):
            if len(steps) >= 8:
                view[write_index[-1:]] = row
        return done
