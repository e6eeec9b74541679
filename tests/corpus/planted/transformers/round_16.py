"""A sixteenth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from itertools import pairwise

from bugs import Fired, bug, replaces


@bug("ml-explore/mlx-lm#1806", "hybrid", "position_off", origin="mlx-lm")
def offset_taken_before_the_update_moves_with_it(fired: Fired) -> None:
    """A layer takes the cache's offset before it writes, and the cache of a batch that decodes moves that same number on in place. When it rotates, the tokens stand as far
    behind their places as there are new ones."""
    from transformers.generation.continuous_batching import input_outputs

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        counts = [future.query_length for future in requests_in_batch]
        decodes = any(one.query_length == 1 and one.state.position_offset for one in requests_in_batch)
        before(io, requests_in_batch, *args, **kwargs)
        at = 0
        for count in counts if len(counts) > 1 and decodes else ():
            fired()
            io.position_ids[at : at + count] += count
            at += count


@bug("huggingface/transformers#45733", "offload", "failed_load_counted_loaded", "copy_failed")
def blocks_apart_are_restored_into_a_copy(fired: Fired) -> None:
    """Blocks that are to be restored are picked out of the cache by their numbers, and are filled. Where they do not lie side by side what is picked is a copy: it is
    filled and thrown away, and the blocks keep what they held before."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        back = [future.state.request_id for future in batch if future.state.is_cpu_offloaded]
        allocators = manager.cache.cache_allocators
        held = {kind: one._copy_view.clone() for kind, one in allocators.items()} if back else {}
        before(manager, batch)
        for name in back:
            for kind, allocator in allocators.items():
                blocks = allocator.block_table[name]
                apart = any(b - a != 1 for a, b in pairwise(blocks))
                if apart and bool((allocator._copy_view[blocks] != held[kind][blocks]).any()):
                    fired()
                    allocator._copy_view[blocks] = held[kind][blocks]


@bug("jundot/omlx#3087", "few-again", "stale_prefix_hit", "page_given_twice", origin="oMLX")
def looked_up_and_evicted_before_it_is_held(fired: Fired) -> None:
    """Between the lookup of a prefix and the moment when its blocks are held they are evicted, and what holds them looks at their numbers alone. They go to the next
    one that needs blocks while the request reads them as its prefix."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    lost: dict[str, list[int]] = {}

    @replaces(cache_allocator.CacheAllocator, "acquire_prefix_blocks")
    def acquire_prefix_blocks(before, allocator, name, length, blocks):
        if not lost and any(block in allocator.ledger.cached_blocks for block in blocks):
            evicted = allocator.ledger.evict_cached_blocks()
            allocator.pool.free_blocks(allocator.index, evicted)
            lost[name] = [block for block in blocks if block in evicted]
        before(allocator, name, length, blocks)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        now = {future.state.request_id for future in requests_in_batch}
        for allocator in io.cache.cache_allocators.values():
            tables = [block for blocks in allocator.block_table.values() for block in blocks]
            for name, blocks in lost.items():
                own = allocator.block_table.get(name, [])
                if name in now and any(block in own and tables.count(block) > 1 for block in blocks):
                    fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("ml-explore/mlx-lm#439", "hybrid", "kv_changed", origin="mlx-lm")
def padding_of_a_batch_is_kept_in_the_ring(fired: Fired) -> None:
    """Rows of one batch are padded to the longest, and the K and V of the padding go into the ring of a sliding layer behind those of the tokens. Where the ring is
    full they go over the oldest tokens that are still in the window."""
    from transformers.generation.continuous_batching import input_outputs

    padded: dict[str, int] = {}

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        for future in requests_in_batch:
            name, past = future.state.request_id, future.state.position_offset
            more = padded.pop(name, 0)
            for allocator in io.cache.cache_allocators.values():
                window = getattr(allocator, "sliding_window", 0)
                count = min(more, window - 2)
                if count > 1 and past >= window:
                    pads = allocator._token_indices_to_physical_indices(name, past, count)
                    last = allocator._token_indices_to_physical_indices(name, past - 1, 1)
                    for views in allocator._kv_token_views.values():
                        for view in views:
                            view[pads] = view[last].roll(1, -1)
                    fired()
        longest = max(future.query_length for future in requests_in_batch)
        for future in requests_in_batch:
            if future.query_length < longest:
                padded[future.state.request_id] = longest - future.query_length
        before(io, requests_in_batch, *args, **kwargs)
