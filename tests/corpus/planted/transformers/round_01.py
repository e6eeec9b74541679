"""More public bugs made anew in transformers 5.23, with other pages: recorded before any rule was looked at."""

from bugs import Fired, bug, replaces

from .marks import once_written_twice


@bug("LMCache/LMCache#1835", "offload-page16", "failed_load_counted_loaded", "copy_failed", origin="LMCache")
def restores_all_but_last_block(fired: Fired) -> None:
    """A look-up and the load that follows it are not one step, and between them a block goes. The load comes back shorter and
    is taken for whole."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        for future in batch:
            state = future.state
            if state.is_cpu_offloaded:
                for ids in manager._request_id_to_cpu_blocks[state.request_id].values():
                    if len(ids) > 1:
                        fired()
                        ids.pop()
        before(manager, batch)


@bug("ROCm/ATOM#1807", "offload", "failed_load_counted_loaded", "copy_failed", "host_copy_overwritten", origin="ATOM")
def copies_first_rows_only(fired: Fired) -> None:
    """The size of a block is worked out from rows of one token each where a block has more. Of each block only its first part
    comes back from the host."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        kept = {}
        if any(future.state.is_cpu_offloaded for future in batch):
            fired()
            kept = {name: a._copy_view.clone() for name, a in manager.cache.cache_allocators.items()}
        before(manager, batch)
        for name, allocator in manager.cache.cache_allocators.items():
            if name in kept:
                view = allocator._copy_view
                view[:, view.shape[1] // 16 :] = kept[name][:, view.shape[1] // 16 :]


@bug("NVIDIA/TensorRT-LLM#4943", "forks", "kv_changed", origin="TensorRT-LLM")
def copy_runs_into_next_block(fired: Fired) -> None:
    """A partial copy of a block counts keys and values where there are keys only. It copies twice as much and overwrites the
    head of the block behind its destination."""
    from transformers.generation.continuous_batching import cache
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    hit: set[int] = set()

    @replaces(cache.PagedAttentionCache, "perform_cache_copy")
    def perform_cache_copy(before, paged, copies):
        before(paged, copies)
        for name, (sources, destinations) in copies.items():
            view = paged.cache_allocators[name]._copy_view
            for source, destination in zip(sources, destinations, strict=True):
                if destination + 1 < len(view) and destination + 1 not in destinations:
                    view[destination + 1, : view.shape[1] // 2] = view[source, view.shape[1] // 2 :]
                    hit.add(destination + 1)

    @replaces(ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for allocator in processor.cache.cache_allocators.values():
            for future in processor.inputs_and_outputs.requests_in_batch:
                size = allocator.tokens_per_page
                past = future.state.position_offset - future.query_length
                if hit & set(allocator.block_table.get(future.state.request_id, [])[: -(-past // size)]):
                    fired()
        before(processor, model)


@bug(
    "raullenchai/Rapid-MLX#196",
    "forks",
    "page_given_twice",
    "shared_page_written",
    "fork_copy_missing",
    origin="Rapid-MLX",
)
def tail_block_shared_by_fork(fired: Fired) -> None:
    """The copy of a page that a fork goes on writing is a second name for the same page. Parent and fork write their tokens
    over each other's."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator.CacheAllocator, "fork_blocks")
    def fork_blocks(before, allocator, source, destination, past):
        copied, fresh = before(allocator, source, destination, past)
        if copied:
            allocator.block_table[destination][-1] = copied[-1]
            return copied[:-1], fresh[:-1]
        return copied, fresh

    once_written_twice(fired)


@bug("xLLM-AI/xllm#97", "llama", "prefix_not_computed", "hit_before_written", origin="xLLM")
def match_counts_a_block_too_many(fired: Fired) -> None:
    """The index at which a matched prefix ends is a block too far. The request goes on behind a block that nobody has
    computed."""
    from transformers.generation.continuous_batching import cache

    @replaces(cache.PagedAttentionCache, "search_prefix_match")
    def search_prefix_match(before, paged, name, prompt):
        length = before(paged, name, prompt)
        if length and len(prompt) > length + 9:
            fired()
            for allocator in paged.cache_allocators.values():
                if not allocator.pool.count_free_blocks(allocator.index):
                    allocator.pool.allocate_sector(allocator.index)
                allocator.block_table[name] += allocator.pool.get_free_blocks(allocator.index, 1)
            return length + allocator.tokens_per_page
        return length


@bug(
    "gittensor-ai-lab/sparkinfer#289", "page16", "slot_mapping", "req_to_token", "page_given_twice", origin="sparkinfer"
)
def writes_through_first_row(fired: Fired) -> None:
    """The kernel that appends K and V looks its pages up in the table of sequence 0 for the whole batch. Once slots are
    recycled, a request's token goes to another request's page."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    @replaces(full_attention.FullAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, name, past, query):
        first = next(iter(allocator.block_table))
        if query == 1 and name != first and len(allocator.block_table[first]) > past // allocator.tokens_per_page:
            fired()
            return before(allocator, first, past, query)
        return before(allocator, name, past, query)
