"""Public bugs made anew in SGLang 0.5.23 on the CPU: its allocators, radix cache, rows, batches and attention."""

from bugs import H200, Fired, bug, replaces

from .marks import once_written_again


@bug("sgl-project/sglang#38319", "llama-retract", "radix_insert_then_free", "free_too_early")
def inserted_then_freed(fired: Fired) -> None:
    """A chunk's pages are inserted in the radix cache, and the request is retracted before it learns of it: all its pages
    are given back. The next hit reads what their new owner has written."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, segments):
        segments = list(segments)
        if segments and segments[0][0] >= 16 and segments[0][1] > segments[0][0] and not lost:
            first = segments[0][0]
            segments[0] = (first - 4, segments[0][1])
            lost.update(cache.req_to_token_pool.req_to_token[kv.req_pool_idx, first - 4 : first].tolist())
        return before(cache, kv, segments)


@bug("sgl-project/sglang#17850", "llama", "row_reassigned_in_flight", "req_to_token")
def row_given_twice(fired: Fired) -> None:
    """The row of a request in flight is taken for free and given to the next one, which writes its own slots into it. The
    first goes on reading through that row."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    used: list[int] = []

    @replaces(ReqToTokenPool, "alloc")
    def alloc(before, pool, reqs):
        rows = before(pool, reqs)
        if rows is not None:
            for at, (req, row) in enumerate(zip(reqs, rows, strict=True)):
                if row in used:
                    continue
                if len(used) == 2 and not getattr(pool, "doubled", False):
                    pool.doubled = True
                    pool.free_slots.insert(0, row)
                    rows[at] = used[0]
                    req.kv.req_pool_idx = used[0]
                    fired()
                used.append(row)
        return rows


@bug("sgl-project/sglang#22862", "llama-chunks", "slot_mapping", "resume_overwrites_tail", "req_to_token")
def chunk_written_one_early(fired: Fired) -> None:
    """A request that goes on behind its prefix writes its new slots into its row one position too early. The slot that
    stood there is lost, and every later position reads its neighbour's."""
    from sglang.srt.mem_cache import allocation

    @replaces(allocation, "write_cache_indices")
    def write_cache_indices(before, out, rows, rows_cpu, prefix, prefix_cpu, seq, seq_cpu, ext, ext_cpu, tensors, pool):
        before(out, rows, rows_cpu, prefix, prefix_cpu, seq, seq_cpu, ext, ext_cpu, tensors, pool)
        at = 0
        for i in range(len(rows_cpu)):
            first, count, row = int(prefix_cpu[i]), int(ext_cpu[i]), int(rows_cpu[i])
            if first > 8 and count > 2:
                pool.req_to_token[row, first - 1 : first - 1 + count] = out[at : at + count].to(pool.req_to_token.dtype)
                fired()
            at += count


# The allocator itself says the slot in its answer: it may as well have given out a held page.
@bug("sgl-project/sglang#28754", "llama-page4", "commit_beyond_allocation", "page_given_twice")
def decode_past_its_page(fired: Fired) -> None:
    """A decode that needs a new page takes the slot behind its last one, as if its allocation reached that far. It writes
    into the next page, which is another request's."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    done: list[int] = []

    @replaces(PagedTokenToKVPoolAllocator, "alloc_decode")
    def alloc_decode(before, allocator, seq_lens, seq_lens_cpu, last_loc):
        given = before(allocator, seq_lens, seq_lens_cpu, last_loc)
        for i in range(len(seq_lens_cpu)):
            beyond = int(last_loc[i]) + 1
            free = {page * 4 for page in allocator.free_pages.tolist()}
            crosses = int(seq_lens_cpu[i]) % 4 == 1 and int(given[i]) != beyond
            if crosses and beyond not in free and beyond < allocator.size and len(done) < 2:
                done.append(1)
                given[i] = beyond
                fired()
        return given


@bug("sgl-project/sglang#13483", "llama-small", "double_free", "page_given_twice")
def given_back_twice(fired: Fired) -> None:
    """Two paths give back the same indices at a request's end. The free list has them twice, and two requests get them."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        row, first = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx], req.kv.cache_protected_len
        before(cache, req, up_to=up_to, **kwargs)
        if req.finished() and not lost and up_to > first + 3:
            twice = row[first:up_to].long().clone()
            lost.update(twice.tolist())
            for _ in range(2):
                cache.token_to_kv_pool_allocator.free(twice)


@bug("sgl-project/sglang#22819", "llama", "attention_seq_len_wrong")
def prefix_of_one_block(fired: Fired) -> None:
    """A request whose cached prefix has a certain length is taken for one without a prefix when attention's lengths are
    made. Attention never looks at the prefix."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "_forward_raw")
    def _forward_raw(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_decode() and batch.batch_size > 1:
            kept = batch.seq_lens
            batch.seq_lens = kept.clone()
            batch.seq_lens[0] -= 8
            fired()
            try:
                return before(runner, batch, *args, **kwargs)
            finally:
                batch.seq_lens = kept
        return before(runner, batch, *args, **kwargs)


@bug("ggml-org/llama.cpp#3825", "llama", "position_off", "draft_position_plus_one", origin="llama.cpp")
def shift_applied_twice(fired: Fired) -> None:
    """A shift of positions is added up once for the cells and once more for what is computed next. From then on a
    request's tokens are given positions that are one too high."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_decode() and int(batch.seq_lens[0]) > 40:
            batch.positions[0] += 1
            fired()
        return before(runner, batch, *args, **kwargs)


@bug("sgl-project/sglang#27586", "hybrid", "stale_swa_mapping")
def mapping_kept(fired: Fired) -> None:
    """A slot that is given out anew keeps its old full-to-SWA entry. Two full slots lead to one sliding-window slot."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    last: list[int] = []

    @replaces(SWATokenToKVPoolAllocator, "alloc")
    def alloc(before, allocator, need):
        given = before(allocator, need)
        if given is not None and last and last != [-1] and need < 8:
            allocator.full_to_swa_index_mapping[int(given[0])] = allocator.full_to_swa_index_mapping[last[0]]
            last[:] = [-1]
            fired()
        elif given is not None and last != [-1]:
            last[:] = [int(given[-1])]
        return given


@bug("sgl-project/sglang#29860", "hybrid", "swa_window_off_by_one")
def frontier_too_far(fired: Fired) -> None:
    """The frontier below which sliding-window slots are given back is worked out with a window that is too small. Slots
    that the next forwards read are freed."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import common

    @replaces(common, "free_swa_out_of_window_slots")
    def free_swa_out_of_window_slots(before, req, pre_len, **kwargs):
        window = kwargs["sliding_window_size"]
        if pre_len > window:
            fired()
        return before(req, pre_len + 4, **kwargs)

    import sys

    for module in list(sys.modules.values()):
        if getattr(module, "free_swa_out_of_window_slots", None) is not None:
            module.free_swa_out_of_window_slots = common.free_swa_out_of_window_slots
    del schedule_batch


@bug("sgl-project/sglang#24193", "llama-retract", "radix_insert_then_free", "free_too_early", "page_given_twice")
def protected_len_stale(fired: Fired) -> None:
    """A waiting request is matched anew to a longer prefix and keeps its old, shorter protected length. When it leaves it
    gives back pages that the radix cache holds."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, segments):
        segments = list(segments)
        cache.rows = getattr(cache, "rows", 0) + 1
        if cache.rows > 2 and segments and segments[0][0] >= 8 and not lost:
            lost.update(cache.req_to_token_pool.req_to_token[kv.req_pool_idx, : segments[0][0]].tolist())
            segments[0] = (0, segments[0][1])
        return before(cache, kv, segments)


@bug("sgl-project/sglang#13713", "llama-overlap", "future_map_overrun", "next_token_swap")
def future_of_another(fired: Fired) -> None:
    """The ring of future tokens is overrun: a request is fed the token that was sampled for another."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_decode() and batch.batch_size > 2 and int(batch.seq_lens[0]) > 30:
            batch.input_ids = batch.input_ids.roll(1)
            fired()
        return before(runner, batch, *args, **kwargs)


@bug(
    "flashinfer-ai/flashinfer#527",
    "llama-small",
    "kv_changed",
    "kv_write_lost",
    "kv_write_damaged",
    origin="FlashInfer",
)
def append_with_wrong_stride(fired: Fired) -> None:
    """The kernel that appends K and V to a page works with the strides of a dense cache: the last row of a batch lands in
    the slot beside its own."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, info, *args, **kwargs):
        loc = getattr(info, "loc", info)
        if hasattr(loc, "numel") and 1 < loc.numel() < 5 and int(loc[-1]) > 90:
            moved = loc.clone()
            moved[-1] = max(1, int(moved[-1]) - 24)
            if info is loc:
                info = moved
            else:
                info.loc = moved
            fired()
        return before(pool, layer, info, *args, **kwargs)


@bug("sgl-project/sglang#30321", "llama-small", "page_given_twice", "radix_insert_then_free", "free_too_early")
def freed_but_still_in_tree(fired: Fired) -> None:
    """A node's slots are given back to the pool and the node stays in the tree. A later request with its prompt joins
    slots that are another's by then."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: set[int] = set()
    once_written_again(fired, lost)

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        before(cache, req, up_to=up_to, **kwargs)
        if req.finished() and not lost and up_to > 20:
            row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :8].long().clone()
            lost.update(row.tolist())
            cache.token_to_kv_pool_allocator.free(row)


def _revert(number: int) -> None:
    """Take back the mend of a bug, as SGLANG_DEBUG_REVERT_PR does."""
    from sglang.srt.debug_utils import pr_fix_toggle

    pr_fix_toggle._revert_pr_fix(number)


@bug("sgl-project/sglang#25015", H200, "draft_position_plus_one", reads=8)
def draft_positions(fired: Fired) -> None:
    """The positions of an EAGLE draft's steps are one too high, inside its CUDA graph. Each step rotates its token for a
    place that is the next one's."""
    _revert(25015)


@bug("sgl-project/sglang#26329", H200, "chunk_tail_predicted_token", reads=1)
def draft_chunk_tail(fired: Fired) -> None:
    """The last input of a chunk in an EAGLE draft's prefill is what the target predicts, though the prompt goes on. The
    draft computes the chunk's tail for a token that is not the prompt's."""
    _revert(26329)
