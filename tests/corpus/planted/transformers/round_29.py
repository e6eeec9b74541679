"""A twenty-ninth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import once_written_twice


@bug(
    "Avarok-Cybersecurity/atlas#692",
    "forks-qwen-page16",
    "shared_page_written",
    "fork_copy_missing",
    origin="Atlas",
)
def tail_that_is_begun_is_shared_like_full_blocks(fired: Fired) -> None:
    """What two answers to a prompt have in common is shared between them, and the block that has been begun and is not full is counted with it. Nobody copies it before it is written: both answers put their tokens in the same places,
    and each reads what the other one has put there last."""
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator.CacheAllocator, "count_shareable_blocks")
    def count_shareable_blocks(before, allocator, source, past_length):
        return before(allocator, source, past_length + allocator.tokens_per_page - 1)

    once_written_twice(fired)


@bug(
    "PaddlePaddle/FastDeploy#6226",
    "few-shared",
    "eviction_of_locked_page",
    "free_too_early",
    "page_given_twice",
    origin="FastDeploy",
)
def block_of_the_same_tokens_is_taken_over_without_a_reference(fired: Fired) -> None:
    """Two requests have the same tokens, and the cache keeps the block of the first one alone. The second one's table is pointed to it, but nobody counts that: when the first one has ended the block counts as unused, and is given to
    others while the second one goes on reading it."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    @replaces(cache_allocator.CacheAllocator, "mark_complete_blocks")
    def mark_complete_blocks(before, allocator, request, tokens, count):
        allocator.ledger.acquire = lambda block: None
        try:
            before(allocator, request, tokens, count)
        finally:
            del allocator.ledger.acquire

    taken: dict[int, str] = {}  # blocks of a request's table that another one has written, and which

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        size, tables = allocator.tokens_per_page, allocator.block_table
        batch = [
            (f.state.request_id, f.state.position_offset, f.query_length)
            for f in processor.inputs_and_outputs.requests_in_batch
        ]
        for name, end, count in batch:  # K and V are written before anybody reads
            for block in tables.get(name, [])[(end - count) // size : -(-end // size)]:
                taken.pop(block, None)
                if any(block in table for other, table in tables.items() if other != name):
                    taken[block] = name
        for name, end, _ in batch:
            if any(taken.get(block, name) != name for block in tables.get(name, [])[: end // size]):
                fired()
        before(processor, model)


@bug("taco-project/FlexKV#287", "offload-hybrid", "load_landed_elsewhere", origin="FlexKV")
def loaded_blocks_are_bound_to_the_other_end(fired: Fired) -> None:
    """A request that comes back has been given more blocks than were put away for it, as it needs room for its next token. What is loaded is bound to the blocks at the other end of its table than the one it belongs to, so that each block
    lands one or more places beside its own."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        kept = []
        for future in requests_in_batch:
            name = future.state.request_id
            stored = manager._request_id_to_cpu_blocks.get(name, {}) if future.state.is_cpu_offloaded else {}
            for kind, blocks in stored.items():
                tables = manager.cache.cache_allocators[kind].block_table
                table, extra = tables[name], len(tables[name]) - len(blocks)
                if extra > 0:
                    fired()
                    kept.append((tables, name, table))
                    tables[name] = table[extra:] + table[:extra]
        result = before(manager, requests_in_batch)
        for tables, name, table in kept:
            tables[name] = table
        return result
