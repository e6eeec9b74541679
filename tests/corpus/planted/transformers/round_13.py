"""A thirteenth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("rajveer43/VeloxQuant-MLX#137", "hybrid", "position_off", origin="VeloxQuant-MLX")
def rotated_by_the_count_of_rows_that_are_kept(fired: Fired) -> None:
    """A cache that lets go of old tokens counts the rows that it keeps, and the model takes that count for the place of the next token. From
    when the first is let go on, all tokens get the position behind a full cache."""
    from transformers.generation.continuous_batching import input_outputs

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        starts = [(future.state.position_offset, future.query_length) for future in requests_in_batch]
        before(io, requests_in_batch, *args, **kwargs)
        kept = min(getattr(one, "sliding_window", 1 << 30) for one in io.cache.cache_allocators.values())
        at = 0
        for past, count in starts:
            if past > kept:
                fired()
                io.position_ids[at : at + count] -= past - kept
            at += count


@bug(
    "huggingface/transformers#46612",
    "forks-hybrid",
    "fork_copy_missing",
    "copy_failed",
)
def cache_of_another_name_is_not_reordered(fired: Fired) -> None:
    """When sequences part, only the cache that has the usual name is put in their order. What a model keeps beside it stays as it lay: in their
    windows the new sequences have what somebody left there."""
    from transformers.generation.continuous_batching import cache, input_outputs

    parted: list[str] = []

    @replaces(cache.PagedAttentionCache, "perform_cache_copy")
    def perform_cache_copy(before, paged, pairs):
        names = [name for name, one in paged.cache_allocators.items() if one.layer_type == "sliding_attention"]
        parted.extend(name for name in names if pairs[name][0])
        before(paged, {name: ([], []) if name in names else pair for name, pair in pairs.items()})

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if parted and any("__child#" in future.state.request_id for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("sgl-project/sglang#38243", "offload", "load_landed_elsewhere", "failed_load_counted_loaded", origin="SGLang")
def two_rows_get_one_place_of_the_plan(fired: Fired) -> None:
    """The places that a load goes to are counted by groups at once, and one group reads its offset before it has been summed up. Two rows are
    brought to the same place, and what was to get the second keeps what it had."""
    import torch
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        back = [future.state.request_id for future in batch if future.state.is_cpu_offloaded]
        views = {kind: one._copy_view for kind, one in manager.cache.cache_allocators.items()}
        held = {kind: view.clone() for kind, view in views.items()} if back else {}
        before(manager, batch)
        for name in back:
            for kind, allocator in manager.cache.cache_allocators.items():
                blocks = allocator.block_table[name]
                if len(blocks) > 2 and not torch.equal(held[kind][blocks[2]], views[kind][blocks[2]]):
                    fired()
                    views[kind][blocks[1]] = views[kind][blocks[2]]
                    views[kind][blocks[2]] = held[kind][blocks[2]]


@bug("huggingface/transformers#48700", "forks", "copy_failed")
def copies_are_rounded_once_more(fired: Fired) -> None:
    """A cache of few bits is put into the order of its sequences by way of full precision, and rounded again where it is stored. What a sequence gets
    of another is not what that had."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    copied: list[int] = []

    @replaces(cache_allocator.CacheAllocator, "copy_blocks")
    def copy_blocks(before, allocator, source, target):
        before(allocator, source, target)
        for block in target:
            row = allocator._copy_view[block].view(allocator.cache_dtype)
            step = row.abs().max() / 127
            row.copy_((row / step).round() * step)
        copied.extend(target)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if copied and any("__child#" in future.state.request_id for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)
