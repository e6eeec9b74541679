"""A thirty-ninth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("kekzl/imp#501", "recurrent-few-slots", "state_restored_for_other_prefix", "kv_changed", origin="imp")
def state_is_cleared_where_its_number_used_to_say(fired: Fired) -> None:
    """A request's recurrent state used to lie where its number said, taken modulo the number of slots. Slots come from
    a list of free ones now, and what clears the state of a new request still goes by its number: it clears that of
    whoever has the slot, who goes on from nothing."""
    asked: list[str] = []
    cleared: set[int] = set()

    def look(runner, batch, rows):
        pool = runner.req_to_token_pool
        own = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        fresh = [rid for rid in batch.rids if rid not in asked]
        asked.extend(fresh)
        if batch.mamba_clear_indices is not None:
            new = [asked.index(rid) % pool.mamba_pool.size + 1 for rid in fresh][: len(batch.mamba_clear_indices)]
            cleared.update(new)
            batch.mamba_clear_indices = torch.tensor(new, dtype=batch.mamba_clear_indices.dtype)
        if batch.mamba_cow_src_indices is not None:
            copied = zip(batch.mamba_cow_src_indices.tolist(), batch.mamba_cow_dst_indices.tolist(), strict=True)
            for source, target in copied:
                (cleared.add if source in cleared else cleared.discard)(target)
        if any(past and slot in cleared for slot, (past, *_) in zip(own, rows, strict=True)):
            fired()
        cleared.difference_update(own)

    before_forward(look)


@bug("Avarok-Cybersecurity/atlas#156", "llama-page4-trimmed", "tokens_truncated_hash_kept", origin="Atlas")
def tokens_of_what_was_hit_are_not_in_the_key(fired: Fired) -> None:
    """A part of a prompt that is in the cache already need not be computed, and who passes over it passes over where
    its tokens are put down as well. When the request ends its tokens, which lack that part, are inserted with its whole
    table: each page stands for tokens that come behind its own."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    hits: dict[str, int] = {}
    asked: dict[str, Req] = {}
    computed: dict[int, tuple] = {}  # of a slot, the tokens up to the one that was computed there

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        short = hits.get(req.rid, 0)
        if not req.finished() or not short or up_to - short < req.kv.cache_protected_len:
            return before(cache, req, up_to=up_to, **kwargs)
        whole = req.full_untruncated_fill_ids
        req.full_untruncated_fill_ids = whole[short:]
        try:
            return before(cache, req, up_to=up_to - short, **kwargs)
        finally:
            req.full_untruncated_fill_ids = whole

    def look(runner, batch, rows):
        row_slots = runner.req_to_token_pool.req_to_token
        for row, rid, (past, end, prefix) in zip(batch.req_pool_indices.tolist(), batch.rids, rows, strict=True):
            hits.setdefault(rid, past)
            tokens = (*asked[rid].origin_input_ids, *asked[rid].output_ids) if rid in asked else ()
            held = [(slot, tokens[: place + 1]) for place, slot in enumerate(prefix)]
            if any(computed.get(slot, own) != own for slot, own in held if tokens):
                fired()
            own = row_slots[row, past:end].tolist()
            computed.update({slot: tokens[: past + n + 1] for n, slot in enumerate(own)})

    before_forward(look)


@bug(
    "NVIDIA/TensorRT-LLM#12834",
    "llama-host-page4-lists",
    "host_copy_overwritten",
    "page_given_twice",
    origin="TensorRT-LLM",
)
def page_of_the_host_is_taken_off_the_wrong_list(fired: Fired) -> None:
    """When a page leaves the device, it and a free one of the host's change places, and only then both are taken off
    the lists of free ones. Which list it is, is told by where a page lies, which is the other way around by then: the
    page of the host stays first in its list, and the next one that has to leave is stored over it."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    asked: dict[str, Req] = {}
    right: dict[tuple, torch.Tensor] = {}  # of a prefix, the last layer's keys of its last token
    written: list[tuple[int, tuple]] = []  # in the step before: a slot, and the prefix that ends there
    landed: set[int] = set()

    @replaces(HybridCacheController, "write")
    def write(before, controller, *args, **kwargs):
        taken = before(controller, *args, **kwargs)
        if taken is not None:
            pool = controller.mem_pool_host.anchor_entry.host_pool
            pool.slot_used[taken] = False
            pool.free_slots = torch.cat([taken, pool.free_slots])
        return taken

    @replaces(HostKVCache, "free")
    def free(before, pool, indices):
        pool.slot_used[indices.cpu()] = True
        return before(pool, indices)

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, *args, **kwargs):
        landed.update(device_indices.tolist())
        return before(host, pool, host_indices, device_indices, *args, **kwargs)

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    def look(runner, batch, rows):
        keys, row_slots = runner.token_to_kv_pool.k_buffer[-1], runner.req_to_token_pool.req_to_token
        for slot, prefix in written:
            right.setdefault(prefix, keys[slot].clone())
        written.clear()
        for row, rid, (past, end, prefix) in zip(batch.req_pool_indices.tolist(), batch.rids, rows, strict=True):
            tokens = (*asked[rid].origin_input_ids, *asked[rid].output_ids) if rid in asked else ()
            for place, slot in enumerate(prefix):
                known = right.get(tokens[: place + 1])
                if slot in landed and known is not None and (keys[slot] - known).abs().max() > 0.1 * known.abs().max():
                    fired()
            own = row_slots[row, past:end].tolist()
            landed.difference_update(own)
            written.extend((slot, tokens[: past + n + 1]) for n, slot in enumerate(own) if past + n < len(tokens))

    before_forward(look)
