"""A fifteenth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import os

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#34760", "recurrent", "state_restored_for_other_prefix")
def state_hangs_on_a_shallower_node(fired: Fired) -> None:
    """A request gives its recurrent state to the cache under a key that is cut to whole pages of a larger size, and the state is that of all its tokens. A
    hit of the key goes on from there, and the tokens that were cut off go into the state a second time."""
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

    page = 4
    ahead: set[int] = set()

    @replaces(MambaComponent, "prepare_for_caching_req")
    def prepare_for_caching_req(before, component, req, insert_params, *args, **kwargs):
        length = before(component, req, insert_params, *args, **kwargs)
        if not length or insert_params.mamba_value is None:
            return length
        slots = set(insert_params.mamba_value.tolist())
        if length % page:
            ahead.update(slots)
        else:
            ahead.difference_update(slots)
        return length // page * page

    def look(runner, batch, rows):
        if batch.mamba_cow_src_indices is not None and ahead & set(batch.mamba_cow_src_indices.tolist()):
            fired()

    before_forward(look)


@bug("kekzl/imp#89", "llama-page16", "kv_write_damaged", "not_of_the_model", origin="imp", recorded=False)
def scale_of_the_warm_up_stays(fired: Fired) -> None:
    """The scale of a cache of eight bits is taken from what the warm-up writes, and never again. K and V of later requests are larger than it can say, and what
    is beyond is cut off."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    largest: dict[tuple[int, int], float] = {}
    forwards: list[int] = []

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, loc, cache_k, cache_v):
        kept = []
        for part, values in enumerate((cache_k, cache_v)):
            most = largest.setdefault((layer, part), float(values[:1].abs().max()) * 0.6)
            kept.append(values.clamp(-most, most) if len(forwards) > 1 else values)
        before(pool, layer, loc, *kept)

    def look(runner, batch, rows):  # attention reads a chunk's own tokens from the pool
        if forwards:
            fired()
        forwards.append(1)

    before_forward(look)


@bug("Pushkinist/rMLX#57", "llama-chunks", "kv_write_lost", "kv_write_damaged", origin="rMLX")
def later_layers_do_not_leave_the_prefill(fired: Fired) -> None:
    """In a prefill each layer's cache takes over what was staged for it, and the loop over the layers ends with the first that fails. The layers behind that one
    keep what stood in their slots, and that is what is read."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    failing: list[int] = []
    prefills: list[int] = []

    def look(runner, batch, rows):  # attention reads a chunk's own tokens from the pool
        failing.clear()
        if not batch.forward_mode.is_decode():
            prefills.append(1)
            if len(prefills) == 2:
                failing.append(1)
                fired()

    before_forward(look)

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, *args, **kwargs):
        if not failing or layer == 0:
            before(pool, layer, *args, **kwargs)


@bug(
    "sgl-project/sglang-jax#989",
    "hybrid",
    "radix_insert_then_free",
    "free_too_early",
    "page_given_twice",
    origin="SGLang-JAX",
)
def window_leaves_what_the_tree_has(fired: Fired) -> None:
    """A request gives back the sliding slots that its window has left from its first token on, those among them that are the prefix cache's. The tree goes on
    listing them, and whoever hits that prefix reads slots that are free or another's."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import common
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    window = 16
    gone: set[int] = set()

    @replaces(common, "free_swa_out_of_window_slots")
    def free_swa_out_of_window_slots(before, req, pre_len, **kwargs):
        kv = req.kv
        if not kv.holds_kv:
            return before(req, pre_len, **kwargs)
        protected, floor = kv.cache_protected_len, type(kv).swa_dead_lo
        first = kv.get_evicted_seqlen(ComponentType.SWA)
        kv.cache_protected_len = 0
        type(kv).swa_dead_lo = lambda *_: 0
        try:
            return before(req, pre_len, **kwargs)
        finally:
            kv.cache_protected_len = protected
            type(kv).swa_dead_lo = floor
            left = min(kv.get_evicted_seqlen(ComponentType.SWA), protected)
            gone.update(kwargs["req_to_token_pool"].req_to_token[kv.req_pool_idx, first:left].tolist())

    import sys

    for module in list(sys.modules.values()):
        if getattr(module, "free_swa_out_of_window_slots", None) is not None:
            module.free_swa_out_of_window_slots = common.free_swa_out_of_window_slots
    del schedule_batch

    def look(runner, batch, rows):
        gone.difference_update(batch.out_cache_loc.tolist())
        if any(gone & set(prefix[1 - window :]) for *_, prefix in rows):
            fired()

    before_forward(look)


@bug("sgl-project/sglang#17061", "hybrid", "swa_window_off_by_one", "stale_prefix_hit")
def count_goes_on_behind_a_gap(fired: Fired) -> None:
    """How many tokens of a match still have their sliding slots is not set to none where some have been given back. A match that ends right behind such a gap
    counts what lies before it, and the window of what follows reaches into slots that are not there."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust cannot be patched
    from sglang.srt.mem_cache.unified_cache.components.swa import SWAComponent

    window = 16

    @replaces(SWAComponent, "create_match_validator")
    def create_match_validator(before, component, match_device_only=False):
        kind = component.component_type

        def valid(node):
            return node.component_data[kind].value is not None

        return valid

    def look(runner, batch, rows):
        mapping = runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
        for prefix, _, slots in rows if not batch.forward_mode.is_decode() else ():
            if prefix and 0 in mapping[slots[1 - window :]].tolist():
                fired()

    before_forward(look)
