"""A twenty-sixth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "lightseekorg/tokenspeed#767",
    "llama-small",
    "eviction_of_locked_page",
    "free_too_early",
    origin="TokenSpeed",
)
def retraction_that_is_called_off_leaves_its_slots_to_the_tree(fired: Fired) -> None:
    """When slots are short a request is to be retracted: what it has computed goes over to the prefix cache, and only then is asked whether the host has room for it. It has none, and
    the request runs on; but it has locked the prefix that it began with and no more, and what it gave away is evicted under it."""
    from sglang.srt.managers.scheduler import Scheduler

    given: set[str] = set()

    @replaces(Scheduler, "process_batch_result")
    def process_batch_result(before, scheduler, *args, **kwargs):
        before(scheduler, *args, **kwargs)
        cache, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        for req in scheduler.running_batch.reqs:
            short = allocator.available_size() < 40
            if req.finished() or req.rid in given or len(req.output_ids) < 4 or not short:
                continue
            given.add(req.rid)
            began = req.last_node
            req.refresh_fill_ids()
            cache.checkpoint(req, up_to=req.kv.kv_committed_len)
            lock, req.lock, req.last_node = req.lock, cache.lock(began), began
            cache.unlock(lock)
            break

    def look(runner, batch, rows):
        free = set(runner.token_to_kv_pool_allocator.free_pages.tolist())
        written = set(batch.out_cache_loc.tolist())
        for name, (*_, slots) in zip(batch.rids, rows, strict=True):
            if name in given and (free | written) & set(slots):
                fired()

    before_forward(look)


@bug("ikawrakow/ik_llama.cpp#2459", "llama", "req_to_token", origin="ik_llama.cpp")
def context_is_shifted_and_its_count_stays(fired: Fired) -> None:
    """When the context is full a part behind its first tokens is dropped and what follows moves up. The list of tokens that the count is taken from is cut only for requests that keep
    their prompt, so that the others are as long as before: they go on at the old place, and are shifted anew with each token."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    full, keep, drop = 48, 4, 8
    whole: dict[str, list[int]] = {}  # what the row had named, for when it is given back

    def look(runner, batch, rows):
        if not batch.forward_mode.is_decode():
            return
        table = runner.req_to_token_pool.req_to_token
        for name, row, (past, end, slots) in zip(batch.rids, batch.req_pool_indices.tolist(), rows, strict=True):
            if past < full:
                continue
            fired()
            whole.setdefault(name, slots).append(int(table[row, end - 1]))
            table[row, keep : past - drop] = table[row, keep + drop : past].clone()

    @replaces(UnifiedRadixCache, "claim_kv_row")
    def claim_kv_row(before, cache, req):
        if req.rid in whole and req.kv.holds_kv:
            slots = whole.pop(req.rid)
            table = cache.req_to_token_pool.req_to_token
            table[req.kv.req_pool_idx, : len(slots)] = table.new_tensor(slots)
        return before(cache, req)

    before_forward(look)


@bug("ovg-project/kvcached#34", "llama-no-tree", "kv_changed", "layer_changed", origin="kvcached")
def slot_across_two_pages_counts_for_the_first(fired: Fired) -> None:
    """Memory is mapped in pages whose size is not a multiple of a slot's, and a slot that lies across two of them is counted for the first. When the last of the second page's own slots
    is given back that page is unmapped, and the end of the slot that reaches into it is nought from then on."""
    mapped: set[int] = set()
    cut: set[int] = set()

    def look(runner, batch, rows):
        pool, free = runner.token_to_kv_pool, set(runner.token_to_kv_pool_allocator.free_pages.tolist())
        for first in range(5, runner.token_to_kv_pool_allocator.size - 5, 11):  # a page has five slots and a half
            if not free >= set(range(first + 1, first + 6)):
                mapped.add(first)
            elif first in mapped:
                mapped.discard(first)
                if first not in free:
                    cut.add(first)
                    for layer in range(pool.layer_num):
                        for kept in (pool.k_buffer[layer], pool.v_buffer[layer]):
                            values = kept[first].view(-1)
                            values[values.numel() // 2 :] = 0
        cut.difference_update(free, batch.out_cache_loc.tolist())
        if any(cut & set(slots) for *_, slots in rows):
            fired()

    before_forward(look)
