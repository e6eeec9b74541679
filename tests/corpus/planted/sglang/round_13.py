"""A thirteenth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, once_written_again


@bug("sgl-project/sglang#24221", "recurrent-chunks", "state_restored_for_other_prefix")
def chunks_state_kept_before_it_was_computed(fired: Fired) -> None:
    """The state of a chunk that is not a prompt's last is put into the prefix cache when the next batch is made, and nobody waits for the forward
    that computes it. What is kept for the chunk's end is the state that it began with."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import MambaPool

    began: list = []
    stashing: list[int] = []
    wrong: set[int] = set()

    def look(runner, batch, rows):
        if batch.mamba_cow_src_indices is not None and wrong & set(batch.mamba_cow_src_indices.tolist()):
            fired()
        cache = runner.req_to_token_pool.mamba_pool.mamba_cache
        began[:] = [[part.clone() for part in cache.conv], cache.temporal.clone()]

    before_forward(look)

    @replaces(Scheduler, "stash_chunked_request")
    def stash_chunked_request(before, scheduler, req):
        stashing.append(1)
        before(scheduler, req)
        stashing.pop()

    @replaces(MambaPool, "copy_from")
    def copy_from(before, pool, source, target):
        before(pool, source, target)
        if stashing and began:
            wrong.update(target.tolist())
            for part, old in zip(pool.mamba_cache.conv, began[0], strict=True):
                part[:, target] = old[:, source]
            if began[1].numel():
                pool.mamba_cache.temporal[:, target] = began[1][:, source]


@bug("sgl-project/sglang#38941", "llama-page16", "double_free", "page_given_twice")
def pieces_that_meet_inside_a_page_are_freed_apart(fired: Fired) -> None:
    """What a request that ends has behind what it gave to the cache is given back in two pieces, and they meet inside a page. Each gives the whole
    page back."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, ranges):
        ranges = list(ranges)
        row = cache.req_to_token_pool.req_to_token[kv.req_pool_idx].clone()
        before(cache, kv, ranges)
        for start, end in ranges:
            seam = start + (end - start) // 2
            if start < seam < end and seam % 16 and not lost:
                page = int(row[seam]) // 16 * 16
                lost.update(range(page, page + 16))
                cache.token_to_kv_pool_allocator.free(row[seam:end].long())


@bug("UbiquitousLearning/mllm#688", "llama-small", "double_free", "page_given_twice", origin="mllm")
def empty_entries_of_a_row_are_freed(fired: Fired) -> None:
    """A request's row is freed past its end, where it is nought, and the allocator takes the same number as often as it comes. The slot that is kept
    for padding is given out, to two tokens and more."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    @replaces(UnifiedRadixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, ranges):
        before(cache, kv, ranges)
        allocator = cache.token_to_kv_pool_allocator
        allocator.free(allocator.free_pages.new_zeros(2))
        free = allocator.free_pages  # what was given back is given out next
        allocator.free_pages = torch.cat((free[-2:], free[:-2]))

    writers: list[tuple[int, int]] = []

    def look(runner, batch, rows):
        table, own = runner.req_to_token_pool.req_to_token, batch.req_pool_indices.tolist()
        for row, (*_, slots) in zip(own, rows, strict=True):
            places = [(row, place) for place, slot in enumerate(slots) if slot == 0]
            if len(places) > 1 or (places and writers and writers[-1] not in places):
                fired()
        for row, (prefix, end, _) in zip(own, rows, strict=True):
            writers.extend((row, place) for place in range(prefix, end) if int(table[row, place]) == 0)

    before_forward(look)


@bug("sgl-project/sglang#24954", "recurrent", "state_restored_for_other_prefix")
def prefixs_state_copied_a_forward_late(fired: Fired) -> None:
    """The copy of a prefix's state into the slot of a request that hits it is put off to the next forward, and is not handed on to the one that the
    request is in. That goes on from what the slot held, and the copy comes when it is over."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    late: list = []
    copying: list[int] = []

    @replaces(HybridReqToTokenPool, "copy_mamba_state")
    def copy_mamba_state(before, pool, source, target):
        copying.append(1)
        before(pool, source, target)
        copying.pop()

    @replaces(MambaPool, "copy_from")
    def copy_from(before, pool, source, target):
        if copying:
            late.append((pool, source.clone(), target.clone()))
        else:
            before(pool, source, target)

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.mamba_cow_dst_indices is not None and len(batch.mamba_cow_dst_indices):
            fired()
        done = before(runner, batch, *args, **kwargs)
        while late:
            pool, source, target = late.pop(0)
            for part in pool.mamba_cache.conv:
                part[:, target] = part[:, source]
            if pool.mamba_cache.temporal.numel():
                pool.mamba_cache.temporal[:, target] = pool.mamba_cache.temporal[:, source]
        return done
