"""A twenty-first round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "sgl-project/sglang#12107",
    "llama-flush",
    "free_too_early",
    "eviction_of_locked_page",
    "page_given_twice",
)
def flushed_between_the_chunks_of_a_prompt(fired: Fired) -> None:
    """Whether an engine is idle enough to flush its cache is seen by its queue and by what decodes. A prompt that is between two of its chunks is in neither, and its slots are all
    given back under it: its next chunks get them again."""
    from contextlib import suppress

    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    lost: dict[str, set[int]] = {}  # slots of those that were flushed

    @replaces(Scheduler, "is_fully_idle")
    def is_fully_idle(before, scheduler, *args, **kwargs):
        chunked = scheduler.chunked_req
        idle = scheduler.running_batch.is_empty() and not scheduler.waiting_queue and chunked is not None
        if idle and chunked.kv.req_pool_idx is not None:
            row = scheduler.req_to_token_pool.req_to_token[chunked.kv.req_pool_idx]
            lost[chunked.rid] = set(row[: chunked.kv.kv_allocated_len].tolist())
        return idle or before(scheduler, *args, **kwargs)

    @replaces(UnifiedRadixCache, "unlock")
    def unlock(before, cache, lock):
        with suppress(KeyError):  # its node has gone with the flush
            before(cache, lock)

    def look(runner, batch, rows):
        written = set(batch.out_cache_loc.tolist())
        if any(
            name in lost and lost[name] & (written | set(slots))
            for name, (*_, slots) in zip(batch.rids, rows, strict=True)
        ):
            fired()

    before_forward(look)


@bug("sgl-project/sglang#8263", "llama-lora", "computed_with_other_weights")
def buffer_of_an_adapter_is_found_by_its_name(fired: Fired) -> None:
    """Which adapters lie in the pool's buffers is told by their names. One is unloaded, another is loaded by the same name, and it is taken for the one that lies there: its
    requests are computed with the old one's weights."""
    from sglang.srt.lora.mem_pool import LoRAMemoryPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    buffers: dict[str, int] = {}  # by name
    names: dict[str, str] = {}
    stale: set[str] = set()

    @replaces(LoRAMemoryPool, "remove_lora")
    def remove_lora(before, pool, uid):
        return None  # it stays where it is

    @replaces(LoRAMemoryPool, "prepare_lora_batch")
    def prepare_lora_batch(before, pool, cur_uids, lora_adapters, lora_modules, lora_refs, *args, **kwargs):
        for uid in cur_uids:
            if uid is not None and uid not in pool.uid_to_buffer_id:
                name = names[uid] = lora_refs[uid].lora_name
                if name in buffers:
                    pool.uid_to_buffer_id[uid] = buffers[name]
                    stale.add(uid)
        before(pool, cur_uids, lora_adapters, lora_modules, lora_refs, *args, **kwargs)
        for uid, name in names.items():
            if uid in pool.uid_to_buffer_id:
                buffers[name] = pool.uid_to_buffer_id[uid]

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if stale & set(batch.lora_ids or ()):
            fired()
        return before(runner, batch, *args, **kwargs)


@bug("lightseekorg/tokenspeed#667", "llama", "kv_write_lost", "slot_mapping", "kv_changed", origin="TokenSpeed")
def replayed_prefill_stores_where_it_was_captured(fired: Fired) -> None:
    """A prefill is padded to a round length and captured in a graph, and the store of K and V with it, with the slots of that prefill. When another of that length is replayed its K
    and V go over those of the first one, and its own slots keep what they held."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    captured: dict[int, Any] = {}
    replayed: list = []

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        replayed.clear()
        if batch.forward_mode.is_extend() and batch.batch_size == 1:
            slots = batch.out_cache_loc
            bucket = -(-slots.numel() // 16)
            if bucket in captured:
                fired()
                tail = slots.new_zeros(16)
                replayed.append(torch.cat([captured[bucket], tail])[: slots.numel()])
            else:
                captured[bucket] = slots.clone()
        return before(runner, batch, *args, **kwargs)

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, info, *args, **kwargs):
        slots = getattr(info, "loc", info)
        if replayed and slots.numel() == replayed[0].numel():
            if info is slots:
                info = replayed[0]
            else:
                info.loc = replayed[0]
        return before(pool, layer, info, *args, **kwargs)


@bug("vllm-project/vllm#14645", "llama-mixed", "next_token_swap", origin="vLLM")
def tokens_handed_on_in_the_order_of_what_was_scheduled(fired: Fired) -> None:
    """Whose tokens are whose is told by the order in which requests were scheduled, which has those that decode before those that begin. The batch has them the other way round where
    both are in it, and for its next step each request is fed a token that another has sampled."""
    from sglang.srt.managers.scheduler import Scheduler

    wrong: dict[str, int] = {}

    @replaces(Scheduler, "_relay_forward_payload")
    def relay(before, scheduler, batch, rows, result):
        own = result.next_token_ids
        for req in batch.reqs:
            wrong.pop(req.rid, None)
        if batch.forward_mode.is_mixed() and own is not None and own.numel() == len(batch.reqs):
            decodes = sum(n == 1 for n in batch.extend_lens)
            result.next_token_ids = own.roll(-(len(batch.reqs) - decodes))
            for req, fed, token in zip(batch.reqs, result.next_token_ids.tolist(), own.tolist(), strict=True):
                if fed != token:
                    wrong[req.rid] = fed
        before(scheduler, batch, rows, result)
        result.next_token_ids = own

    def look(runner, batch, rows):
        at = 0
        for name, (prefix, end, _) in zip(batch.rids, rows, strict=True):
            if end - prefix == 1 and wrong.get(name) == int(batch.input_ids[at]):
                fired()
            at += end - prefix

    before_forward(look)


@bug("sgl-project/sglang#28468", "llama-host", "host_copy_overwritten")
def host_slots_of_a_copy_under_way_are_given_to_the_next(fired: Fired) -> None:
    """Nodes that have to leave the device are copied to the host one behind another, and nothing holds the host's slots of a copy that is still under way. The next node of the same
    sweep gets them, and what comes back of the first later is the second's."""
    import torch
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    under_way: list = []
    overwritten: set[int] = set()
    loaded: list[bool] = []

    @replaces(UnifiedRadixCache, "_evict")
    def evict(before, cache, *args, **kwargs):  # at the end of a sweep it waits for all copies
        under_way.clear()
        return before(cache, *args, **kwargs)

    @replaces(HybridCacheController, "write")
    def write(before, controller, device_indices, *args, **kwargs):
        pool = controller.mem_pool_host.anchor_entry.host_pool
        again = torch.cat(under_way) if under_way else None
        if again is not None:
            pool.slot_used[again] = False
            pool.free_slots = torch.cat([again, pool.free_slots])
        under_way.clear()
        given = before(controller, device_indices, *args, **kwargs)
        if given is not None:
            if again is not None:
                overwritten.update(set(again.tolist()) & set(given.tolist()))
            under_way.append(given.clone())
        return given

    @replaces(HybridCacheController, "load")
    def load(before, controller, host_indices, *args, **kwargs):
        if overwritten & set(host_indices.tolist()):
            loaded.append(True)
        return before(controller, host_indices, *args, **kwargs)

    before_forward(lambda runner, batch, rows: loaded and fired())
