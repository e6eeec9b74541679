"""An eleventh round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("LMCache/LMCache#5249", "recurrent", "state_restored_for_other_prefix", origin="LMCache")
def last_token_goes_into_the_state_twice(fired: Fired) -> None:
    """A request hits all that it asks for, and computes its last token anew. That is right for attention, where it overwrites the token's
    own K and V; but the recurrent state that was restored has the token in it, and takes it in once more."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    cut: list[int] = []

    @replaces(UnifiedRadixCache, "match_prefix")
    def match_prefix(before, cache, params):
        result = before(cache, params)
        if params.cow_mamba and result.device_prefix_len > 1:
            cut.append(result.device_prefix_len - 1)
            return result._replace(device_prefix_len=result.device_prefix_len - 1)
        return result

    before_forward(
        lambda runner, batch, rows: (
            not batch.forward_mode.is_decode() and any(prefix in cut for prefix, *_ in rows) and fired()
        )
    )


@bug("sgl-project/sglang#30986", "recurrent", "state_restored_for_other_prefix")
def load_given_up_behind_its_slot(fired: Fired) -> None:
    """A hit's slot for the recurrent state is named to the request before its copy is sure to run, and when that is given up nobody takes
    the slot back. The request goes on from what the last owner of the slot has left there."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    @replaces(HybridReqToTokenPool, "copy_mamba_state")
    def copy_mamba_state(before, pool, source, destination):
        if source.numel():
            fired()


@bug("deepbeepmeep/Wan2GP#1628", "llama-page16", "bad_values_written", origin="Wan2GP")
def masked_by_adding_to_what_nobody_wrote(fired: Fired) -> None:
    """A decode reads its last page to the end and adds minus infinity to the scores behind the sequence. Where nobody has written a slot
    yet it holds what is not a number, which that does not hide, and so the layers above write it for the token."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    written: set[int] = set()
    poisoned: list[int] = []
    wrong: list[int] = []

    def look(runner, batch, rows):
        size = runner.token_to_kv_pool_allocator.page_size
        if poisoned:
            fired()
        written.update(batch.out_cache_loc.tolist())
        wrong.clear()
        if batch.forward_mode.is_decode():
            for row, slot in enumerate(batch.out_cache_loc.tolist()):
                page = slot // size * size
                # Of what nobody wrote some is not a number, and most is zero.
                if slot % size > 8 and not set(range(page, page + size)) <= written:
                    wrong.append(row)
                    poisoned.append(slot)

    before_forward(look)

    @replaces(RadixAttention, "forward")
    def forward(before, layer, q, k, v, batch, *args, **kwargs):
        out = before(layer, q, k, v, batch, *args, **kwargs)
        if wrong and layer.layer_id == 0:
            out[wrong] = torch.nan
        return out
