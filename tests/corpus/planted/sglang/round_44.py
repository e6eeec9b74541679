"""A forty-fourth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import itertools

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


# A write that is undone within the forward is, behind it, one that was left out.
@bug("mudler/vllm.cpp#2669", "llama-page8-chunks", "kv_write_lost", "kv_write_damaged", origin="vllm.cpp")
def tokens_of_a_short_chunk_rewrite_their_page_over_one_another(fired: Fired) -> None:
    """What is left of a prompt, if it is short, is stored by the kernel for answers, as if each of its tokens were a
    request of its own. That kernel reads a page, puts its token into it and writes the page back, for all of them at the
    same time: of a page only the last token stays, and in the places of the others is what was there before."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    few = 16  # from how many tokens on a chunk is stored page by page
    lost: set[int] = set()

    def look(runner, batch, rows):
        lost.clear()
        if not batch.forward_mode.is_extend():
            return
        table, size = runner.req_to_token_pool.req_to_token, runner.page_size
        for row, (past, end, _) in zip(batch.req_pool_indices.tolist(), rows, strict=True):
            if end - past < few:
                own = table[row, past:end].tolist()
                lost.update(a for a, b in itertools.pairwise(own) if a // size == b // size)
        if lost:
            fired()

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, loc, keys, values, *args, **kwargs):
        kept = torch.tensor([n for n, slot in enumerate(loc.tolist()) if slot not in lost], dtype=torch.long)
        return before(pool, layer, loc[kept], keys[kept], values[kept], *args, **kwargs)

    before_forward(look)


@bug(
    "sgl-project/sglang-jax#1098",
    "llama-page4-turns",
    "page_leaked",
    late="it does no harm, and is seen when the engine is idle",
    origin="SGLang JAX",
)
def pages_of_an_answer_are_not_in_the_requests_counts(fired: Fired) -> None:
    """Each step of an answer gets its place from the allocator and does not raise the request's counts of what it has
    and of what is written: they stay at what the prompt took. Who leaves gives back what is counted, and the pages
    behind the prompt belong to nobody."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    real: dict[str, int] = {}

    @replaces(schedule_batch, "alloc_for_decode")
    def alloc_for_decode(before, batch, *args, **kwargs):
        counts = [(req.kv.kv_committed_len, req.kv.kv_allocated_len) for req in batch.reqs]
        real.update({req.rid: length + 1 for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)})
        slots = before(batch, *args, **kwargs)
        for req, (committed, allocated) in zip(batch.reqs, counts, strict=True):
            req.kv.kv_committed_len, req.kv.kv_allocated_len = committed, allocated
        return slots

    @replaces(ReqToTokenPool, "free")
    def free(before, pool, req):
        before(pool, req)
        counted = req.kv.kv_allocated_len or req.kv.kv_committed_len
        if -(-real.pop(req.rid, 0) // 4) > -(-counted // 4):
            fired()


@bug(
    "vllm-project/vllm-metal#488",
    "recurrent-resumed-retract-no-tree",
    "state_restored_for_other_prefix",
    origin="vLLM Metal",
    late="the state that is gone on from first is another request's, too: what both have read last is one token again and again",
)
def preempted_request_keeps_its_state_and_begins_again_with_it(fired: Fired) -> None:
    """Only a request that has ended gives the slot of its recurrent state back, and only a slot that is given out is
    cleared. One that is preempted keeps its slot as it is, and when it is resumed its prompt is computed from the first
    token on: that goes on from the state at the end of what it had answered."""
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    preempted: list[str] = []  # which is about to be
    kept: dict[str, torch.Tensor] = {}  # of a preempted request, its slot
    resumed: set[str] = set()

    @replaces(schedule_batch, "release_req")
    def release_req(before, *, req, **kwargs):
        preempted.append(req.rid)
        try:
            return before(req=req, **kwargs)
        finally:
            preempted.clear()

    @replaces(HybridReqToTokenPool, "free_mamba_cache")
    def free_mamba_cache(before, pool, req, *args, **kwargs):
        if req.rid not in preempted:
            return before(pool, req, *args, **kwargs)
        kept[req.rid], req.kv.mamba_pool_idx = req.kv.mamba_pool_idx, None
        return None

    @replaces(HybridReqToTokenPool, "alloc")
    def alloc(before, pool, reqs):
        for req in reqs:
            if req.rid in kept and not req.kv.holds_mamba:
                req.kv.mamba_pool_idx = kept.pop(req.rid)
                resumed.add(req.rid)
        return before(pool, reqs)

    @replaces(ShortConvAttnBackend, "conv_state_metadata")
    def conv_state_metadata(before, backend, *args, **kwargs):
        known = backend._has_initial_state
        if known is not None:  # whatever is in the slot is gone on from
            backend._has_initial_state = torch.ones_like(known)
        try:
            return before(backend, *args, **kwargs)
        finally:
            backend._has_initial_state = known

    def look(runner, batch, rows):
        if not batch.forward_mode.is_extend():
            return
        pool = runner.req_to_token_pool
        slots = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        states = pool.mamba_pool.mamba_cache.conv[0]
        for name, slot, (past, *_) in zip(batch.rids, slots, rows, strict=True):
            if name in resumed and not past and bool(states[:, slot].any()):
                fired()

    before_forward(look)


# The places that are asked for are right, and so are the tables: only the kernel knows where it has put it.
@bug("lightseekorg/tokenspeed#748", "llama-page2-many", "slot_mapping", "kv_write_lost", origin="TokenSpeed")
def place_in_the_cache_is_counted_in_too_few_bits(fired: Fired) -> None:
    """The kernel that turns keys and stores them multiplies a slot's number by the size of its row, and both have 32
    bits. From a certain slot on the product does not fit and begins again at the front: K and V of these slots are put
    into the first ones, whoever has them, and their own stay as they were."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    fit = 96  # slots, of a smaller pool's

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, loc, keys, values, *args, **kwargs):
        return before(pool, layer, loc % fit, keys, values, *args, **kwargs)

    def look(runner, batch, rows):
        if int(batch.out_cache_loc.max()) >= fit:
            fired()

    before_forward(look)


@bug("vllm-project/vllm#50696", "llama-host-page4-lists", "kv_changed", "copy_failed", origin="vLLM")
def new_slots_are_cleared_when_their_load_has_landed(fired: Fired) -> None:
    """Slots that are given out are cleared on the stream that computes. A load from the host goes by a stream of its own
    that does not wait for that one. When it is done first, the clearing comes behind it, and the request looks at zeros
    where the prefix is that it has hit."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    given: list[torch.Tensor] = []  # to loads, and not cleared so far

    @replaces(HybridCacheController, "load")
    def load(before, controller, *args, **kwargs):
        slots = before(controller, *args, **kwargs)
        if slots is not None:
            given.append(slots.clone())
        return slots

    def look(runner, batch, rows):
        if not given:
            return
        slots = torch.cat(given)
        given.clear()
        for layer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
            layer[slots] = 0
        if any(set(prefix).intersection(slots.tolist()) for *_, prefix in rows):
            fired()

    before_forward(look)
