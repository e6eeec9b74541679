"""An eighth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import os

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#36696", "llama", "req_to_token")
def node_split_one_slot_early(fired: Fired) -> None:
    """A node of the radix tree is split, and the slots of its lower part are cut one place too early. A request that hits that part
    gets the slot of each token for the one behind it."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust cannot be patched
    from sglang.srt.mem_cache.unified_cache.components.full import FullComponent

    @replaces(FullComponent, "redistribute_on_node_split")
    def redistribute(before, component, new_parent, child):
        value = child.component_data[component.component_type].value
        before(component, new_parent, child)
        if value is not None:
            cut = len(new_parent.key)
            child.component_data[component.component_type].value = value[cut - 1 : -1].clone()

    before_forward(lambda runner, batch, rows: any(len(set(prefix)) < len(prefix) for *_, prefix in rows) and fired())


@bug(
    "sgl-project/mini-sglang#52",
    "llama-small",
    "eviction_of_locked_page",
    "free_too_early",
    "stale_prefix_hit",
    origin="Mini-SGLang",
)
def lock_begins_at_the_parent(fired: Fired) -> None:
    """Locking a node of the radix tree goes to its parent before it counts, so that those above it are locked and it is not. When
    slots are short it is evicted under the request that reads it."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust does not tell a node's parent
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    @replaces(UnifiedRadixCache, "lock")
    def lock(before, cache, node_id, *args, **kwargs):
        node = cache.tree_core.node_by_id(node_id)
        return before(cache, node_id if node.parent is None else node.parent.id, *args, **kwargs)

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


@bug("sgl-project/sglang#39040", "llama-page16", "slot_mapping", "req_to_token")
def last_slot_looked_up_one_early(fired: Fired) -> None:
    """The slot behind which a decode goes on is looked up one place too early in its row. What is given out is the slot that the
    token before it has, and the row names it for both."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    @replaces(PagedTokenToKVPoolAllocator, "alloc_decode")
    def alloc_decode(before, allocator, seq_lens, seq_lens_cpu, last_loc, *args, **kwargs):
        early = (seq_lens % allocator.page_size) == 6
        if bool(early.any()):
            fired()
        return before(allocator, seq_lens, seq_lens_cpu, last_loc - early.to(last_loc.dtype), *args, **kwargs)


@bug("vllm-project/vllm#55506", "recurrent", "state_restored_for_other_prefix", origin="vLLM")
def states_of_the_batch_before(fired: Fired) -> None:
    """The slots of the recurrent states are looked up by the rows of the batch before. When a request has left it, those behind it go
    on from the state of the one before them."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    last: list = []

    @replaces(HybridReqToTokenPool, "get_mamba_indices")
    def get_mamba_indices(before, pool, rows):
        return before(pool, last[0][: rows.numel()] if last and last[1:] else rows)

    def look(runner, batch, rows):
        now = batch.req_pool_indices.clone()
        stale = bool(last) and batch.forward_mode.is_decode() and now.numel() < last[0].numel()
        if stale and bool((last[0][: now.numel()] != now).any()):
            fired()
            last[1:] = [True]
        else:
            last[:] = [now]

    before_forward(look)


@bug("alibaba/rtp-llm#587", "llama", "bad_values_written", origin="rtp-llm")
def values_overflow(fired: Fired) -> None:
    """The values of a chunk's last token overflow in half precision, and infinity is stored for it. Everything that looks at the token
    from then on is not a number."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(RadixAttention, "forward")
    def forward(before, layer, q, k, v, batch, *args, **kwargs):
        if v is not None and v.shape[0] == 32:
            v = v.clone()
            v[-1] = float("inf")
        return before(layer, q, k, v, batch, *args, **kwargs)

    written: list[int] = []

    @replaces(ModelRunner, "forward")
    def run(before, runner, batch, *args, **kwargs):
        if written:
            fired()
        done = before(runner, batch, *args, **kwargs)
        if batch.input_ids.numel() == 32:
            written.append(1)
        return done
