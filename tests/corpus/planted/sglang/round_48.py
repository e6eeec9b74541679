"""A forty-eighth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, once_written_again


def _spread(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values of a sequence, `[tokens, their heads, size]`, as `[heads, tokens, size]`."""
    return rows.repeat_interleave(heads // rows.shape[1], 1).transpose(0, 1)


@bug("sgl-project/sglang#34067", "llama-twins-grouped", "radix_insert_then_free", "free_too_early")
def slots_to_be_freed_are_looked_up_when_the_row_is_another(fired: Fired) -> None:
    """While the results of a batch are looked through, what is to be freed is put off to the end, and what is put off is
    not a list of slots but a part of the request's row. Two that computed the same prompt at a time: the second one's
    slots are put off, its row is then made to name the first one's, which the tree has, and these are freed in the end."""
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    rows: list[torch.Tensor] = []  # of the request that is put into the tree
    put_off: list[tuple[torch.Tensor, torch.Tensor]] = []  # a part of a row, and what it was
    lost: set[int] = set()

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        rows.append(cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to])
        try:
            return before(cache, req, up_to=up_to, **kwargs)
        finally:
            rows.pop()

    @replaces(TokenToKVPoolAllocator, "free")
    def free(before, allocator, slots):
        if allocator.free_group is not None and rows and slots.numel():
            at = (rows[-1] == slots[0]).nonzero().flatten().tolist()
            part = rows[-1][at[0] : at[0] + len(slots)] if at else rows[-1][:0]
            if part.tolist() == slots.tolist():
                allocator.free_group.append(part)
                put_off.append((part, part.clone()))
                return
        before(allocator, slots)

    @replaces(TokenToKVPoolAllocator, "free_group_end")
    def free_group_end(before, allocator):
        for part, was in put_off:
            lost.update(set(part.tolist()) - set(was.tolist()))
        put_off.clear()
        before(allocator)

    once_written_again(fired, lost)


@bug("sgl-project/sglang#36207", "llama-page2-tiles", "bad_values_written")
def rows_that_pad_a_batch_store_nan_in_the_slot_that_pads_tiles(fired: Fired) -> None:
    """Slot 0 is nobody's: rows that fill up a batch to the width of its graph are stored there, and tiles that are not
    full take it for what is missing, with a weight of 0. One of the ways to store does not leave out slot 0, and what
    stands in the rows that fill up is not a number: 0 times that is none either, and all short sequences get it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    width, tile = 4, 16  # rows of a graph, and places of a tile

    @replaces(TorchNativeAttnBackend, "forward_decode")
    def forward_decode(before, backend, query, keys, values, layer, batch, *args, **kwargs):
        if len(batch.seq_lens) < width:
            nothing = torch.full((1, layer.tp_k_head_num, layer.qk_head_dim), torch.nan, dtype=query.dtype)
            where = KVWriteLoc(torch.zeros(1, dtype=torch.long), None)
            backend.token_to_kv_pool.set_kv_buffer(layer, where, nothing, nothing.clone())
        return before(backend, query, keys, values, layer, batch, *args, **kwargs)

    @replaces(TorchNativeAttnBackend, "_run_sdpa_forward_decode")
    def run(before, backend, query, output, keys, values, table, rows, ends, *args, **kwargs):
        for number, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
            slots = torch.zeros(-(-end // tile) * tile, dtype=torch.long)
            slots[:end] = table[row, :end]
            heads = query.shape[1]
            scores = (_spread(keys[slots], heads) @ query[number][:, :, None])[:, :, 0] * kwargs["scaling"]
            scores[:, end:] = -torch.inf
            weights = scores.softmax(-1)
            output[number] = (weights[:, None] @ _spread(values[slots], heads))[:, 0]
        return output

    def look(runner, batch, rows):
        if batch.forward_mode.is_decode() and len(rows) < width and any(end % tile for _, end, _ in rows):
            fired()

    before_forward(look)


# What is stored are the same numbers at two scales; nothing changes where they lie. The CPU's pool has none of 8 bits:
# these lie in one of 16.
@bug(
    "Avarok-Cybersecurity/atlas#372",
    "llama-page4-bf16",
    "bad_values_written",
    "not_of_the_model",
    origin="Atlas",
)
def first_tokens_are_stored_by_a_scale_they_are_not_read_by(fired: Fired) -> None:
    """Keys and values are kept with 8 bits, and by which scale is found out while the first tokens are computed. Until
    then a scale of 2 is taken to be on the safe side, and then one that is made of the largest value so far. What has
    been stored before is left as it is and is read by the new scale from then on, also by who hits it."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    until, provisional, most = 40, 2.0, 448.0  # tokens that are waited for, the scale meanwhile, and what 8 bits hold
    seen: dict[int, int] = {}  # of a layer, tokens
    largest: dict[tuple[int, str], float] = {}  # of a layer and keys or values
    stored_before: set[int] = set()  # slots

    def scale(layer: int, half: str) -> float:
        return provisional if seen.get(layer, 0) < until else 2 * largest[layer, half] / most

    def in_8_bits(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.clamp(-most, most).to(torch.float8_e4m3fn).to(numbers.dtype)

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, where, keys, values, *args, **kwargs):
        number = layer.layer_id
        if seen.get(number, 0) < until:
            seen[number] = seen.get(number, 0) + len(keys)
            for half, new in (("keys", keys), ("values", values)):
                largest[number, half] = max(largest.get((number, half), 0.0), float(new.abs().max()))
        keys, values = in_8_bits(keys / scale(number, "keys")), in_8_bits(values / scale(number, "values"))
        return before(pool, layer, where, keys, values, *args, **kwargs)

    @replaces(MHATokenToKVPool, "get_key_buffer")
    def get_key_buffer(before, pool, layer_id):
        return before(pool, layer_id).float() * scale(layer_id, "keys")

    @replaces(MHATokenToKVPool, "get_value_buffer")
    def get_value_buffer(before, pool, layer_id):
        return before(pool, layer_id).float() * scale(layer_id, "values")

    def look(runner, batch, rows):
        own = batch.out_cache_loc.tolist()
        if seen.get(0, 0) + len(own) < until:
            stored_before.update(own)
            return
        if any(stored_before.intersection(prefix) for *_, prefix in rows):
            fired()
        stored_before.difference_update(own)

    before_forward(look)


@bug("1bit-MONSTER/1bit-MONSTER#2089", "recurrent-ubatches", "state_restored_for_other_prefix", origin="1bit-MONSTER")
def state_is_cleared_in_front_of_every_part_of_a_prompt(fired: Fired) -> None:
    """A prompt is computed in parts. Whether its recurrent state has to be cleared first is told by whether the cell
    that it lies in counts as used, which it does not before an answer has begun: it is cleared for each of the parts, and
    each goes on from nothing, while its keys and values are looked at by the next ones as they should be."""
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend

    @replaces(ShortConvAttnBackend, "conv_state_metadata")
    def conv_state_metadata(before, backend, *args, **kwargs):
        known = backend._has_initial_state
        if known is not None:
            backend._has_initial_state = torch.zeros_like(known)
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
        if any(past and bool(states[:, slot].any()) for slot, (past, *_) in zip(slots, rows, strict=True)):
            fired()

    before_forward(look)


@bug(
    "lablup/mlxcel#1358",
    "qwen3-page4-regimes",
    "identity_not_in_key",
    "not_of_the_model",
    origin="mlxcel",
    late="not found: nobody tells by which factors a request turns its keys",
)
def prefix_is_handed_to_who_turns_its_keys_by_other_factors(fired: Fired) -> None:
    """Places are turned by one of two lists of factors, and by which of them is told by how long a request's prompt is.
    The prefix cache has no word of that in its keys: a long prompt goes on behind what a short one has left, whose keys
    were turned by the other list, and the other way round."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.managers.schedule_batch import Req

    first_context = 64
    is_long: dict[str, bool] = {}  # of a request
    here: list[torch.Tensor] = []  # of the batch, whether each token is a long request's
    turned: dict[int, bool] = {}  # of a slot, by which factors
    tables: dict[int, torch.Tensor] = {}  # of a rotary embedding, cosines and sines for short ones, then long ones

    def both(rotary):
        pace = rotary._compute_inv_freq(rotary.base)
        places = torch.arange(len(rotary.cos_sin_cache), dtype=torch.float)
        angles = torch.outer(places, pace / torch.linspace(1.0, 16.0, len(pace)))
        long = torch.cat((angles.cos(), angles.sin()), -1).to(rotary.cos_sin_cache.dtype)
        return torch.cat((rotary.cos_sin_cache, long))

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        is_long[rid] = len(req.origin_input_ids) > first_context

    @replaces(RotaryEmbedding, "forward_native")
    def forward_native(before, rotary, positions, *args, **kwargs):
        if not here or len(here[0]) != len(positions):
            return before(rotary, positions, *args, **kwargs)
        short = rotary.cos_sin_cache
        if id(rotary) not in tables:
            tables[id(rotary)] = both(rotary)
        rotary.cos_sin_cache = tables[id(rotary)]
        try:
            return before(rotary, positions + len(short) * here[0].to(positions.dtype), *args, **kwargs)
        finally:
            rotary.cos_sin_cache = short

    def look(runner, batch, rows):
        own, table = [], runner.req_to_token_pool.req_to_token
        for row, rid, (past, end, prefix) in zip(batch.req_pool_indices.tolist(), batch.rids, rows, strict=True):
            long = is_long.get(rid, False)
            if any(turned.get(slot, long) != long for slot in prefix):
                fired()
            own += [long] * (end - past)
            turned.update(dict.fromkeys(table[row, past:end].tolist(), long))
        here[:] = [torch.tensor(own)]

    before_forward(look)


@bug(
    "ikawrakow/ik_llama.cpp#2096",
    "llama-page2-captured",
    "attention_seq_len_wrong",
    "attention_table_overwritten",
    origin="ik_llama.cpp",
)
def captured_graph_sums_the_values_it_had_at_its_capture(fired: Fired) -> None:
    """A graph is run again as long as its nodes look alike, and how many keys and values there are is seen only in what
    goes into them, which is not compared: what comes out of the product of weights and values is as large as before.
    When a sequence grows into the next tile, the values of its newest tokens are left out of the sum."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    tile = 16  # to whole ones of which the number of keys is rounded up
    captured: list[int] = []  # how many rows, and how many values

    @replaces(TorchNativeAttnBackend, "_run_sdpa_forward_decode")
    def run(before, backend, query, output, keys, values, table, rows, ends, *args, **kwargs):
        heads = query.shape[1]
        for number, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
            slots = table[row, :end]
            scores = (_spread(keys[slots], heads) @ query[number][:, :, None])[:, :, 0] * kwargs["scaling"]
            count = min(end, captured[1])
            weights = scores.softmax(-1)[:, :count]
            output[number] = (weights[:, None] @ _spread(values[slots[:count]], heads))[:, 0]
        return output

    def look(runner, batch, rows):
        if not batch.forward_mode.is_decode():
            captured.clear()
            return
        longest = max(end for _, end, _ in rows)
        if not captured or captured[0] != len(rows):
            captured[:] = len(rows), -(-longest // tile) * tile
        if longest > captured[1]:
            fired()

    before_forward(look)
