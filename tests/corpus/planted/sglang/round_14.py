"""A fourteenth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, once_written_again


@bug("kekzl/imp#500", "recurrent", "state_restored_for_other_prefix", origin="imp")
def state_slot_by_number_modulo_the_capacity(fired: Fired) -> None:
    """The place of a sequence's state is its number modulo how many there may be, and numbers go on rising. Two that run at the same time have one
    place, and each goes on from what the other left there."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    running: list[int] = []
    shared: list[tuple[int, int]] = []

    def look(runner, batch, rows):
        own = batch.req_pool_indices.tolist()
        if any({*pair} <= {*own} and batch.forward_mode.is_decode() for pair in shared):
            fired()
        running[:] = own

    before_forward(look)

    @replaces(HybridReqToTokenPool, "alloc")
    def alloc(before, pool, reqs):
        index = before(pool, reqs)
        for row in index or ():
            others = [one for one in (*running, *index) if one != row]
            if others and not shared:
                shared.append((others[-1], row))
                pool.req_index_to_mamba_index_mapping[row] = pool.req_index_to_mamba_index_mapping[others[-1]]
        return index


@bug(
    "sgl-project/sglang-omni#1607",
    "llama-small",
    "radix_insert_then_free",
    "double_free",
    "page_given_twice",
    origin="SGLang-Omni",
)
def slot_of_the_overrun_step_freed_once_more(fired: Fired) -> None:
    """A request that has ended is in the next step already, and the slot of that step is given back by hand. What the request leaves behind reaches as far
    as that slot and has been put into the prefix cache: it has two owners, and is freed again when the cache lets go of it."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, ranges):
        ranges = list(ranges)
        row = cache.req_to_token_pool.req_to_token[kv.req_pool_idx].clone()
        before(cache, kv, ranges)
        last = ranges[-1][0] - 1 if ranges else 0
        if last > 0 and int(row[last]):
            lost.add(int(row[last]))
            allocator = cache.token_to_kv_pool_allocator
            allocator.free(row[last : last + 1].long())


@bug("tenstorrent/tt-metal#56324", "llama", "pad_rows_keep_last_blocks", "kv_changed", origin="tt-metal")
def padded_tail_goes_through_the_rows_old_columns(fired: Fired) -> None:
    """A prefill is padded to a round length, and the K and V of the padding are written as well. The columns behind the prompt's end name what the row's
    last owner had, and that is in the prefix cache by now."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    spoilt: set[int] = set()

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        table = runner.req_to_token_pool.req_to_token
        rows, ends = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        counts = [1] * len(rows) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
        spoilt.difference_update(batch.out_cache_loc.tolist())
        for row, end, count in zip(rows, ends, counts, strict=True):
            if spoilt & set(table[row, : end - count].tolist()):
                fired()
        own = set(batch.out_cache_loc.tolist())
        tails = []
        if not batch.forward_mode.is_decode():
            for row, end in zip(rows, ends, strict=True):
                tails += [s for s in table[row, end : -(-end // 32) * 32].tolist() if s and s not in own]
        done = before(runner, batch, *args, **kwargs)
        if tails:
            pool, last = runner.token_to_kv_pool, int(batch.out_cache_loc[-1])
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[tails] = buffer[last].clone()
            spoilt.update(tails)
        return done
