"""A second round of public bugs made anew in transformers 5.23, on other models: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import once_written_twice


@bug("xLLM-AI/xllm#1984", "forks-qwen", "copy_failed", "fork_copy_missing", origin="xLLM")
def copied_from_an_old_source(fired: Fired) -> None:
    """The source blocks of a fork's copy are not cleared when its sequence is reset. A later fork is given a copy of the
    block that an earlier one had as its source."""
    from transformers.generation.continuous_batching import cache, continuous_api

    old: dict[str, int] = {}
    wrong: list[int] = []

    @replaces(cache.PagedAttentionCache, "perform_cache_copy")
    def perform_cache_copy(before, paged, copies):
        stale = {}
        for name, (sources, destinations) in copies.items():
            if sources and old.get(name, sources[0]) != sources[0]:
                wrong.append(1)
                stale[name] = ([old[name]] * len(sources), destinations)
            elif sources:
                old[name] = sources[0]
        before(paged, {**copies, **stale})

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if wrong:
            fired()
        before(processor, model)


@bug(
    "dingodb/DingoCache#76",
    "offload-qwen-page16",
    "stored_wrong",
    "host_copy_overwritten",
    "failed_load_counted_loaded",
    "copy_failed",
    origin="DingoCache",
)
def saved_after_the_blocks_were_reused(fired: Fired) -> None:
    """A preempted request's blocks are given to another before the save of them to the host has run. What is saved under its
    name is what the next forward wrote there."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager

    late: list = []
    mixed: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        gone = before(manager, victims, tables)
        for name in gone:
            pairs = {
                k: (list(tables[name][k]), list(ids)) for k, ids in manager._request_id_to_cpu_blocks[name].items()
            }
            late.append((manager, name, pairs))
        return gone

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        if any(future.state.is_cpu_offloaded and future.state.request_id in mixed for future in batch):
            fired()
        before(manager, batch)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        before(processor, model)
        for waiting in list(late):
            manager, name, pairs = waiting
            views = {kind: manager.cache.cache_allocators[kind]._copy_view for kind in pairs}
            if any(
                bool((manager._cpu_views[kind][place] != views[kind][block]).any())
                for kind, (blocks, ids) in pairs.items()
                for block, place in zip(blocks, ids, strict=True)
            ):  # they are another's by now
                late.remove(waiting)
                mixed.add(name)
                for kind, (blocks, ids) in pairs.items():
                    for block, place in zip(blocks, ids, strict=True):
                        manager._cpu_views[kind][place] = views[kind][block]


@bug("tenstorrent/tt-metal#54742", "qwen-page16", "kv_write_damaged", "kv_write_lost", origin="tt-metal")
def heads_written_past_their_border(fired: Fired) -> None:
    """The writer of a chunk goes on to the next head by the input's stride, and the cache's is larger. The second head's last
    rows land in the first head's place, and their own keep what stood there."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    steps: list[int] = []

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        steps.append(1)
        if len(steps) > 1:
            fired()
        before(processor, model)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        rows = write_index[-4:]
        views = allocator._kv_token_views[layer]
        kept = [view[rows].clone() for view in views]
        done = before(allocator, keys, values, layer, read_index, write_index)
        if len(write_index) > 20:
            for view, old, new in zip(views, kept, (keys, values), strict=True):
                view[rows, 0], view[rows, 1] = new[-4:, 1], old[:, 1]
        return done


@bug(
    "apache/tvm#16666",
    "forks-few",
    "eviction_of_locked_page",
    "page_given_twice",
    "free_too_early",
    origin="MLC-LLM",
)
def fork_is_not_counted(fired: Fired) -> None:
    """A fork does not add itself to the users of the blocks that it shares. The first of the two to end leaves them without a
    user, and they are given away under the other."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator.CacheAllocator, "fork_blocks")
    def fork_blocks(before, allocator, source, destination, past):
        made = before(allocator, source, destination, past)
        for block in allocator.block_table[destination]:
            if allocator.ledger.shared_ref_counts.get(block, 1) == 2:
                del allocator.ledger.shared_ref_counts[block]
        return made

    once_written_twice(fired)
