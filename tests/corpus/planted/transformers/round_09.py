"""A ninth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import fire_when_they_run_again


@bug("inference-sim/inference-sim#197", "llama", "position_off", "future_map_overrun", origin="inference-sim")
def part_of_a_chunk_is_fed_again(fired: Fired) -> None:
    """How far a prompt has come is moved on by less than the tokens that were put into its blocks. The end of a chunk is computed once
    more at the next places, and all that is behind it stands too far on."""
    from transformers.generation.continuous_batching import scheduler

    again: set[str] = set()

    @replaces(scheduler.Scheduler, "_schedule_request")
    def schedule_request(before, self, state, tokens, budget, removed):
        before(self, state, tokens, budget, removed)
        if (
            len(state.remaining_prefill_tokens) > 2
            and len(state.tokens_to_process) > 4
            and state.request_id not in again
        ):
            state.remaining_prefill_tokens = state.tokens_to_process[-2:] + state.remaining_prefill_tokens
            again.add(state.request_id)

    fire_when_they_run_again(again, fired)


@bug(
    "ovg-project/kvcached#362",
    "few-again",
    "tokens_truncated_hash_kept",
    "stale_prefix_hit",
    origin="kvcached",
    reads=61,
)
def hash_is_written_once(fired: Fired) -> None:
    """A block that the prefix cache has evicted keeps its hash, which is written once. When it is full of other tokens it joins the
    cache under that, and the old prompt hits it."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    kept: dict[int, int] = {}
    wrong: set[int] = set()
    of_block = next(
        one for one in vars(cache_allocator).values() if isinstance(one, type) and hasattr(one, "register_new_hash")
    )

    @replaces(of_block, "evict_cached_blocks")
    def evict_cached_blocks(before, ledger):
        kept.update({block: ledger.block_to_hash[block] for block in ledger.cached_blocks})
        return before(ledger)

    @replaces(of_block, "register_new_hash")
    def register_new_hash(before, ledger, block, digest):
        old = kept.pop(block, digest)
        if old != digest and old not in ledger.hash_to_block:
            wrong.add(block)
            return before(ledger, block, old)
        wrong.discard(block)
        return before(ledger, block, digest)

    @replaces(cache_allocator.CacheAllocator, "acquire_prefix_blocks")
    def acquire_prefix_blocks(before, allocator, name, length, blocks):
        before(allocator, name, length, blocks)
        if wrong & set(blocks[: length // allocator.tokens_per_page]):
            fired()


@bug(
    "weicj/vLLM-2080Ti-Definitive#184",
    "forks",
    "copy_failed",
    "kv_changed",
    origin="vLLM-2080Ti-Definitive",
)
def copied_by_the_size_of_another_pool(fired: Fired) -> None:
    """The copy of a fork's blocks takes the pool for one of more blocks, each of which is smaller. Of a block that is copied the first
    half comes to its place, and the rest of that keeps what it held."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator.CacheAllocator, "copy_blocks")
    def copy_blocks(before, allocator, sources, targets):
        view, half = allocator._copy_view, allocator.tokens_per_page // 2
        if not sources:
            return
        rows = view.view(view.shape[0], allocator.pages_per_block * 2, allocator.tokens_per_page, -1)
        stood = {target: rows[target, :, half:].clone() for target in targets}
        before(allocator, sources, targets)
        for target, old in stood.items():
            rows[target, :, half:] = old

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any("__child" in future.state.request_id for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug("sgl-project/sglang#36135", "few", "free_too_early", "page_given_twice", "double_free", origin="SGLang")
def freed_by_what_the_row_names_later(fired: Fired) -> None:
    """What a request gives back is looked up when the batch of frees is closed, and not when it is put in. By then the request has come
    back, and the blocks that it was given anew go to the pool while it uses them."""
    from transformers.generation.continuous_batching import offloading_manager
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator, full_attention

    due: dict[str, int] = {}
    free: dict[int, str] = {}
    putting_back: list[int] = []

    @replaces(offloading_manager.OffloadingManager, "offload_requests")
    def offload_requests(before, manager):
        putting_back.append(1)
        try:
            return before(manager)
        finally:
            putting_back.pop()

    @replaces(cache_allocator.CacheAllocator, "free_blocks")
    def free_blocks(before, allocator, name, no_cache=False):
        if putting_back and not free and not due:
            due[name] = len(allocator.block_table.get(name, []))
        before(allocator, name, no_cache)

    @replaces(full_attention.FullAttentionCacheAllocator, "allocate_cache_to_request")
    def allocate_cache_to_request(before, allocator, name, past, query):
        had = len(allocator.block_table.get(name, []))
        before(allocator, name, past, query)
        given = allocator.block_table[name]
        if any(free.get(block, name) != name for block in given[had:]):
            fired()
        if due.pop(name, 0):
            allocator.pool.free_blocks(allocator.index, list(given))
            free.update(dict.fromkeys(given, name))


@bug(
    "1CatAI/1Cat-vLLM#598",
    "offload",
    "failed_load_counted_loaded",
    "kv_changed",
    "copy_failed",
    origin="1Cat-vLLM",
)
def zeroed_after_it_was_loaded(fired: Fired) -> None:
    """The blocks that a load goes to are cleared on the stream that computes, and the load does not wait for that. The zeros land on
    what has come from the host."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        allocators = manager.cache.cache_allocators.values()
        stood = [a._copy_view.clone() for a in allocators]
        due = any(future.state.is_cpu_offloaded for future in batch)
        before(manager, batch)
        for allocator, old in zip(allocators, stood, strict=True):
            rows = allocator._copy_view
            for block in (rows != old).any(dim=1).nonzero().flatten().tolist() if due else ():
                rows[block] = 0
                fired()
