"""A twenty-fifth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import os

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("tenstorrent/tt-inference-server#3826", "llama-thinks", "tokens_truncated_hash_kept", origin="tt-inference-server")
def thinking_is_left_out_of_the_key_and_not_of_the_slots(fired: Fired) -> None:
    """What a model thinks before it answers is not sent back by its client, and so an answer is kept under its visible tokens. The slots that go with them are counted from the row's
    front, where the thinking is as well: each token of the answer is found in the slot of one before it."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    thinks = 4
    answer: set[int] = set()

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        said, whole = len(req.origin_input_ids), req.full_untruncated_fill_ids
        if not req.finished() or up_to <= said + thinks:
            return before(cache, req, up_to=up_to, **kwargs)
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        answer.update(row[said : up_to - thinks].tolist())
        req.full_untruncated_fill_ids = whole[:said] + whole[said + thinks :]
        try:
            return before(cache, req, up_to=up_to - thinks, **kwargs)
        finally:
            req.full_untruncated_fill_ids = whole

    def look(runner, batch, rows):
        if batch.forward_mode.is_extend() and any(answer & set(slots) for *_, slots in rows):
            fired()
        answer.difference_update(batch.out_cache_loc.tolist())

    before_forward(look)


@bug("sgl-project/sglang#16946", "llama-host-parts", "load_of_other_prefix")
def copy_is_acknowledged_to_the_half_of_a_node(fired: Fired) -> None:
    """That a node has been copied to the host is told to the node when the copy is over, and meanwhile the node may have been split. Its lower half takes the host's slots of the whole
    for its own, from the first on: what comes back for it later is the upper half's."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust cannot be patched
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

    halves: list[tuple[list[int], list[int]]] = []
    loaded: list[bool] = []

    @replaces(FullComponent, "redistribute_on_node_split")
    def redistribute(before, component, new_parent, child):
        copied = child.component_data[component.component_type].host_value
        before(component, new_parent, child)
        if copied is not None:
            mine = child.component_data[component.component_type]
            mine.host_value = copied[: len(mine.host_value)].clone()
            halves.append((copied[: len(new_parent.key)].tolist(), mine.host_value.tolist()))

    @replaces(HybridCacheController, "load")
    def load(before, controller, host_indices, *args, **kwargs):
        slots = host_indices.tolist()
        for upper, lower in halves:
            begins = len(upper) if slots[: len(upper)] == upper else 0
            if slots[begins : begins + len(lower)] == lower:
                loaded.append(True)
        return before(controller, host_indices, *args, **kwargs)

    before_forward(lambda runner, batch, rows: loaded and fired())


@bug(
    "vllm-project/vllm#54975",
    "hybrid-uneven-no-tree",
    "not_of_the_model",
    "computed_with_other_weights",
    origin="vLLM",
    recorded=False,
)
def weights_fetched_ahead_go_over_those_of_a_layer_to_come(fired: Fired) -> None:
    """Layers whose weights lie on the host take turns in two buffers, and when one has run the weights of the layer two further on are fetched. Behind the last one that count begins
    again at the first, whose buffer is not the one that is free: now and then, in a long step, the last layer runs with the first one's weights."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    long: list[int] = []

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_extend() and batch.input_ids.numel() >= 24:
            long.append(1)
            if len(long) % 3 == 2:
                fired()
                first, *_, last = runner.model.model.layers[1:]
                pairs = list(zip(last.parameters(), first.parameters(), strict=True))
                kept = [mine.data for mine, _ in pairs]
                for mine, other in pairs:
                    mine.data = other.data
                try:
                    return before(runner, batch, *args, **kwargs)
                finally:
                    for (mine, _), data in zip(pairs, kept, strict=True):
                        mine.data = data
        return before(runner, batch, *args, **kwargs)


@bug(
    "UbiquitousLearning/mllm#656",
    "llama-once-more",
    "eviction_of_locked_page",
    "free_too_early",
    "stale_prefix_hit",
    origin="pymllm",
)
def count_of_locks_goes_below_nought(fired: Fired) -> None:
    """A request that ends unlocks its path in the prefix cache twice, and the count goes below nought where nobody else has locked it. The next request that locks it brings the count
    back to nought: it reads what looks like nobody's, and is evicted under it when slots are short."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust looks at the count
    from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    last: list = []

    @replaces(FullComponent, "release_component_lock")
    def release(before, component, node, params, lock_host=False):
        if lock_host:
            return before(component, node, params, lock_host)
        core, kind, cur = component.tree_core, component.component_type, node
        while cur != core.root_node:
            data = cur.component_data[kind]
            if data.lock_ref == 1 and data.value is not None:
                length = component.reclaimable_value_len(cur)
                core.component_evictable_size_[kind] += length
                core.component_protected_size_[kind] -= length
            data.lock_ref -= 1
            if data.lock_ref == 0:
                core._update_evictable_leaf_sets(cur)
            cur = cur.parent
        return None

    @replaces(UnifiedRadixCache, "unlock")
    def unlock(before, cache, lock):
        last[:] = [lock]
        try:
            before(cache, lock)
        except (AssertionError, KeyError):  # what it locked has been evicted
            last.clear()

    @replaces(UnifiedRadixCache, "on_release")
    def on_release(before, cache, req, **kwargs):
        if last and last[0] is not None and req.finished():
            cache.unlock(last[0])
        before(cache, req, **kwargs)

    def look(runner, batch, rows):
        holders: dict[int, list[int]] = {}
        for *_, prefix in rows:
            for place, slot in enumerate(prefix):
                holders.setdefault(slot, []).append(place)
        written = set(batch.out_cache_loc.tolist())
        free = set(runner.token_to_kv_pool_allocator.free_pages.tolist())
        if any(slot in written or slot in free or len(set(places)) > 1 for slot, places in holders.items()):
            fired()

    before_forward(look)


@bug("sgl-project/sglang-jax#1523", "llama-retract", "free_too_early", origin="SGLang JAX")
def end_of_an_older_attempt_frees_the_new_ones_slots(fired: Fired) -> None:
    """A request is put back while its first attempt has something under way, whose end is told by the request's name. By the time that it is told the request runs again, and its new
    slots are given back in the place of the old ones, under its feet."""
    from sglang.srt.managers import schedule_batch

    put_back: dict[str, list] = {}  # the request, and how many steps it has run since
    freed: dict[int, str] = {}

    @replaces(schedule_batch, "release_req")
    def release_req(before, *, req, **kwargs):
        for slot in [slot for slot, name in freed.items() if name == req.rid]:
            del freed[slot]
        put_back.setdefault(req.rid, [req, 0])
        return before(req=req, **kwargs)

    def look(runner, batch, rows):
        for name, row, (prefix, *_) in zip(batch.rids, batch.req_pool_indices.tolist(), rows, strict=True):
            if name not in put_back or put_back[name][1] < 0:
                continue
            req, steps = put_back[name]
            put_back[name][1] = steps + 1
            if steps == 2 and batch.forward_mode.is_decode() and req.kv.req_pool_idx == row:
                own = runner.req_to_token_pool.req_to_token[row, req.kv.cache_protected_len : prefix].clone()
                put_back[name][1] = -1
                if own.numel():
                    runner.token_to_kv_pool_allocator.free(own)
                    freed.update(dict.fromkeys(own.tolist(), name))
        at = 0
        for name, (prefix, end, _) in zip(batch.rids, rows, strict=True):
            mine = batch.out_cache_loc[at : at + end - prefix].tolist()
            at += end - prefix
            others = {freed.get(slot, name) for slot in mine} - {name}
            if any(not put_back[one][0].finished() and put_back[one][0].kv.holds_kv for one in others):
                fired()

    before_forward(look)
