"""A thirty-sixth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import os

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("HabanaAI/vllm-hpu-extension#94", "llama-page32-mixed", "kv_write_lost", origin="vLLM HPU extension")
def last_token_of_a_whole_page_is_left_out(fired: Fired) -> None:
    """A prompt is put into the cache page by page, and the tokens of a page are cut out of its list with an end that is one too early. Of each page that a chunk fills from its first slot to its last, the last one is not written."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    lost: set[int] = set()

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, loc, keys, values, *args, **kwargs):
        size, slots = pool.page_size, loc.tolist()
        pages = [slot // size for slot in slots]
        left = {s for s in slots if s % size == size - 1 and pages.count(s // size) == size}
        lost.difference_update(slots)
        lost.update(left)
        kept = torch.tensor([n for n, slot in enumerate(slots) if slot not in left], dtype=torch.long)
        return before(pool, layer, loc[kept], keys[kept], values[kept], *args, **kwargs)

    before_forward(lambda runner, batch, rows: any(lost.intersection(prefix) for *_, prefix in rows) and fired())


@bug(
    "ggml-org/llama.cpp#26557", "recurrent-reuse", "state_restored_for_other_prefix", origin="llama.cpp"
)  # fmt: skip
def checkpoint_behind_the_fork_is_restored(fired: Fired) -> None:
    """How far a prompt is that of before is counted on over what is found of it further on, and the checkpoint is looked for up to there. One that leaves an earlier prompt goes on from the state that this had at its end, behind
    where they part."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust cannot be patched
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

    late: set[str] = set()

    @replaces(MambaComponent, "finalize_match_result_in_cache")
    def finalize_match_result_in_cache(before, component, params, result):
        made = before(component, params, result)
        if not params.cow_mamba or params.req is None or params.req.kv.mamba_cow_src_index is None:
            return made
        nodes = list(component.tree_core.node_by_id(result.best_match_node).children.values())
        while nodes:
            node = nodes.pop(0)
            state = node.component_data[component.component_type].value
            if state is not None:
                params.req.kv.mamba_cow_src_index = state
                late.add(params.req.rid)
                break
            nodes += node.children.values()
        return made

    before_forward(lambda runner, batch, rows: late.intersection(batch.rids) and fired())


@bug("Blaizzy/mlx-vlm#1527", "llama-overlap-page2-alone", "position_off", origin="MLX-VLM")
def answers_are_placed_as_if_each_token_stood_alone(fired: Fired) -> None:
    """What positions are counted from is handed over with the prompt and not kept. While it is answered they are worked out anew from what comes in, which is one token: all of an answer's tokens are turned to the first position."""
    from sglang.srt.model_executor import forward_batch_info

    @replaces(forward_batch_info, "clamp_position")
    def clamp_position(before, seq_lens):
        return before(seq_lens) * 0

    before_forward(lambda runner, batch, rows: batch.forward_mode.is_decode() and fired())


@bug(
    "lablup/mlxcel#635", "llama-page16-rounds", "kv_write_damaged", "not_of_the_model", "bad_values_written",
    origin="mlxcel",
)  # fmt: skip
def scales_below_one_are_taken_for_one(fired: Fired) -> None:
    """Each token's keys and values are kept as whole numbers with a scale, and a scale of less than one is made one, where only that of zeros was meant. Nearly all scales are less: what is written is rounded to whole
    numbers."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    written: set[int] = set()

    def kept(values):
        scale = (values.abs().amax(-1, keepdim=True) / 127).clamp(min=1.0)
        return (values / scale).round() * scale

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, loc, keys, values, *args, **kwargs):
        written.update(loc.tolist())
        return before(pool, layer, loc, kept(keys), kept(values), *args, **kwargs)

    before_forward(lambda runner, batch, rows: any(written.intersection(prefix) for *_, prefix in rows) and fired())
