"""A ninth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#27779", "hybrid-page16", "double_free", "stale_swa_mapping", "page_given_twice")
def mapping_cleared_for_one_token_of_a_page(fired: Fired) -> None:
    """A page of the sliding pool is given back through one of its tokens, and of the page's full-to-SWA entries that token's alone is
    cleared. The others are given back later on, and with them the page once more."""
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    twice: set[int] = set()

    @replaces(SWATokenToKVPoolAllocator, "_free_swa_pages")
    def free_swa_pages(before, allocator, index, start_pos):
        page, pool = (
            int(allocator.full_to_swa_index_mapping[index[0]]) // allocator.page_size,
            allocator.swa_attn_allocator,
        )
        before(allocator, index, start_pos)
        if 1 < index.numel() < allocator.page_size and not twice:
            given_back = pool.free_pages.new_tensor([page, page])
            pool.free_pages = given_back.new_tensor(
                [*given_back.tolist(), *(p for p in pool.free_pages.tolist() if p != page)]
            )
            twice.add(page)

    def look(runner, batch, rows):
        allocator = runner.token_to_kv_pool_allocator
        held: list[int] = []
        for *_, prefix in rows:
            firsts = batch.out_cache_loc.new_tensor(prefix[:: allocator.page_size][-2:])
            held += (allocator.full_to_swa_index_mapping[firsts] // allocator.page_size).tolist()
        if any(held.count(page) > 1 for page in twice):
            fired()

    before_forward(look)


@bug("ggml-org/llama.cpp#22746", "recurrent", "state_restored_for_other_prefix", origin="llama.cpp")
def checkpoint_of_another_depth(fired: Fired) -> None:
    """The places of the checkpoints of a recurrent state are moved on by a rollback, and what is restored is taken from the one that
    lies a rollback further back. The request goes on from the state of another point."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    taken: list = []

    @replaces(HybridReqToTokenPool, "copy_mamba_state")
    def copy_mamba_state(before, pool, source, destination):
        if source.numel():
            taken.append(source.clone())
        if len(taken) > 1 and taken[-2].numel() == source.numel() and bool((taken[-2] != source).any()):
            fired()
            return before(pool, taken[-2], destination)
        return before(pool, source, destination)


@bug("lightseekorg/tokenspeed#630", "llama", "req_to_token", "row_reassigned_in_flight", origin="tokenspeed")
def row_gets_new_pages_alone(fired: Fired) -> None:
    """A row of the page table is told of the pages that are new to its request, and not of those that it has hit. Behind a cached prefix
    it goes on naming what the row's last request had."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    @replaces(ReqToTokenPool, "write")
    def write(before, pool, where, values):
        prefix = isinstance(where, tuple) and isinstance(where[1], slice) and where[1].start == 0
        if prefix and where[1].stop and bool((pool.req_to_token[where[0], : where[1].stop] > 0).all()):
            if bool((pool.req_to_token[where[0], : where[1].stop] != values).any()):
                fired()
            return
        before(pool, where, values)


@bug("vllm-project/vllm-ascend#6158", "llama", "attention_seq_len_wrong", origin="vLLM Ascend")
def lengths_of_a_larger_batch_stay(fired: Fired) -> None:
    """The lengths that attention gets are not cleared after a step. In a smaller batch behind a larger one a row keeps the larger
    length, and attention looks at what stands behind the request's end."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    last: list[int] = []

    @replaces(ModelRunner, "_forward_raw")
    def _forward_raw(before, runner, batch, *args, **kwargs):
        if not batch.forward_mode.is_decode():
            return before(runner, batch, *args, **kwargs)
        kept, own = batch.seq_lens, batch.seq_lens.tolist()
        carried = [max(n, last[i]) if len(last) > len(own) else n for i, n in enumerate(own)]
        last[:] = own
        if carried != own:
            fired()
            batch.seq_lens = kept.new_tensor(carried)
        try:
            return before(runner, batch, *args, **kwargs)
        finally:
            batch.seq_lens = kept


@bug("sgl-project/sglang#35204", "llama-retract", "page_leaked", recorded=False)
def released_as_far_as_its_tokens(fired: Fired) -> None:
    """How much a request gives back that is put back without an insert is counted by the tokens that it has, and its slots reach further.
    What lies behind is given back by nobody."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    owner = UnifiedRadixCache if "free_kv_row" in vars(UnifiedRadixCache) else BasePrefixCache

    @replaces(owner, "free_kv_row")
    def free_kv_row(before, cache, kv, ranges):
        if len(ranges) == 1 and ranges[0][1] - ranges[0][0] > 1:
            fired()
            ranges = [(ranges[0][0], ranges[0][1] - 1)]
        return before(cache, kv, ranges)
