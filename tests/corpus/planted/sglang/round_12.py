"""A twelfth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import os

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("mratsim/tattletale#93", "llama", "tokens_truncated_hash_kept", origin="tattletale")
def whole_node_taken_for_a_part(fired: Fired) -> None:
    """A lookup goes down into a node that begins as the prompt does, and takes all of its slots, however few of its tokens are the prompt's. The
    request joins K and V of tokens that it does not have."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust cannot be patched
    from sglang.srt.mem_cache.unified_cache import unified_tree_core

    looking: list[int] = []
    wrong: set[int] = set()

    @replaces(unified_tree_core.UnifiedTreeCore, "_match_prefix_helper")
    def _match_prefix_helper(before, tree, key, params):
        looking[:] = [0]
        result = before(tree, key, params)
        if looking.pop():
            wrong.add(result.device_prefix_len)
        return result

    @replaces(unified_tree_core.RadixKey, "match_at")
    def match_at(before, node_key, key, offset, **kwargs):
        matched = before(node_key, key, offset, **kwargs)
        if looking and 0 < matched < len(node_key) < len(key) - offset:
            looking[0] += 1
            return len(node_key)
        return matched

    before_forward(
        lambda runner, batch, rows: (
            not batch.forward_mode.is_decode() and any(prefix in wrong for prefix, *_ in rows) and fired()
        )
    )


@bug("sgl-project/sglang#37836", "recurrent", "state_restored_for_other_prefix")
def states_of_a_batch_on_one_grid(fired: Fired) -> None:
    """The states that a prefill leaves behind lie on one grid over the whole batch, and are looked up as if each request had a grid of its own.
    For all but the first what joins the cache is another request's state."""
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    batches: list[list[int]] = []
    wrong: set[int] = set()

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        pool = runner.req_to_token_pool
        done = before(runner, batch, *args, **kwargs)
        if not batch.forward_mode.is_decode():
            batches[:] = [pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()]
        return done

    @replaces(MambaPool, "copy_from")
    def copy_from(before, pool, source, target):
        slots = batches[0] if batches else []
        if wrong & set(source.tolist()):
            fired()
        elif source.numel() == 1 and int(source) in slots[1:]:
            wrong.add(int(target))
            source = source.new_tensor([slots[slots.index(int(source)) - 1]])
        return before(pool, source, target)


@bug("sgl-project/sglang#30093", "llama", "slot_mapping")
def chained_step_writes_where_its_row_was_not_told(fired: Fired) -> None:
    """A decode that is chained to the one before it does not wait for its row to be filled, and takes what stands there for the slot of its
    token. Where the row has had another owner that is a slot of another request."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    stood: dict[tuple[int, int], int] = {}

    @replaces(ReqToTokenPool, "write")
    def write(before, pool, where, values):
        rows, places = where
        if not isinstance(places, slice) and not isinstance(rows, int) and hasattr(rows, "tolist"):
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                stood[row, place] = int(pool.req_to_token[row, place])
        before(pool, where, values)

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_decode():
            slots = batch.out_cache_loc.clone()
            for number, (row, end) in enumerate(
                zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
            ):
                old = stood.get((row, end - 1), 0)
                if old and old != int(slots[number]) and end % 2:
                    slots[number] = old
                    fired()
            batch.out_cache_loc = slots
        return before(runner, batch, *args, **kwargs)


@bug("sgl-project/sglang#29633", "llama", "bad_values_written")
def one_row_comes_back_as_no_number(fired: Fired) -> None:
    """A prompt hits all but one of its tokens, and a product for a single row is done by a kernel that returns what is not a number. The
    layers above write K and V of the token from that."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    single: list[int] = []
    written: list[int] = []

    def look(runner, batch, rows):
        if written:
            fired()
        at = 0
        single.clear()
        for prefix, end, _ in rows if not batch.forward_mode.is_decode() else ():
            if end - prefix == 1:
                single.append(at)
                written.append(at)
            at += end - prefix

    before_forward(look)

    @replaces(RadixAttention, "forward")
    def forward(before, layer, q, k, v, batch, *args, **kwargs):
        out = before(layer, q, k, v, batch, *args, **kwargs)
        if single and layer.layer_id == 0:
            out[single] = torch.nan
        return out
