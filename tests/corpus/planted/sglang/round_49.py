"""A forty-ninth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward
from .round_40 import once_it_reads_what_came_back_wrong


@bug("ml-explore/mlx-lm#1169", "recurrent-joined", "state_restored_for_other_prefix", origin="mlx-lm")
def who_joins_without_a_state_goes_on_from_that_of_another(fired: Fired) -> None:
    """States of a batch lie in one array with a row for each sequence. When sequences join that have none yet, nothing is
    put behind the rows that are there, and the array stays as short as it was. It is asked for rows behind its end, which
    is no error on this device but begins again at the first row: the new ones go on from the states of the others."""
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend

    @replaces(ShortConvAttnBackend, "init_forward_metadata")
    def init_forward_metadata(before, backend, batch, *args, **kwargs):
        before(backend, batch, *args, **kwargs)
        if not batch.forward_mode.is_extend():
            return
        has_one = batch.extend_prefix_lens > 0
        rows, joined = backend._cache_indices[has_one], backend._cache_indices[~has_one]
        if len(rows) and len(joined):
            taken = rows[torch.arange(len(joined)) % len(rows)]
            for states in backend.req_to_token_pool.mamba_pool.mamba_cache.conv:
                states[:, joined] = states[:, taken]
            backend._has_initial_state = torch.ones_like(has_one)

    def look(runner, batch, rows):
        if batch.forward_mode.is_extend() and len({past > 0 for past, *_ in rows}) == 2:
            fired()

    before_forward(look)


@bug(
    "fla-org/flash-linear-attention#766",
    "qwen3-page2-upper",
    "position_off",
    "not_of_the_model",
    origin="flash-linear-attention",
    late="not found: the first layer's places are right, and so are those that are recorded",
)
def first_layer_counts_the_token_before_the_others_have_it(fired: Fired) -> None:
    """How many tokens have been seen is one number for all layers, and each layer asks for it to know at which place it is.
    It is counted up when the first layer stores the token of an answer, and not when the last one has: in the same step
    all layers behind the first turn their queries and keys for one place further on."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    turned: list[int] = []  # how many layers have turned theirs in this step, if it is one of an answer

    @replaces(RotaryEmbedding, "forward_native")
    def forward_native(before, rotary, positions, *args, **kwargs):
        if turned:
            turned[0] += 1
            positions = positions + int(turned[0] > 1)
        return before(rotary, positions, *args, **kwargs)

    def look(runner, batch, rows):
        turned.clear()
        if batch.forward_mode.is_decode():
            turned.append(0)
            fired()

    before_forward(look)


# The CPU's pool has no scales; the last numbers of a row stand for them.
@bug(
    "ormandj/sglang-glm53-flash-sm120#2",
    "llama-host-page4-scaled",
    "stored_wrong",
    "copy_failed",
    "layout_misread",
)
def host_rows_have_no_room_for_the_scales(fired: Fired) -> None:
    """A token's row has its scales behind its numbers. Rows of the host's pool are made as wide as the numbers alone, so
    that each store cuts off the scales, and a load puts back what is there: behind the numbers of a prefix that has come
    back stand the scales of whoever had the page before."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    scales = 4  # numbers at the end of a row

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, layer_id, *args, **kwargs):
        buffers = host.device_k_buffers[layer_id], host.device_v_buffers[layer_id]
        stale = [buffer[device_indices].flatten(1)[:, -scales:].clone() for buffer in buffers]
        before(host, pool, host_indices, device_indices, layer_id, *args, **kwargs)
        for buffer, left in zip(buffers, stale, strict=True):
            rows = buffer[device_indices]
            rows.flatten(1)[:, -scales:] = left
            buffer[device_indices] = rows

    once_it_reads_what_came_back_wrong(fired)


@bug("sgl-project/sglang#36731", "llama-host-page2-virtual", "load_landed_elsewhere", "stored_wrong")
def copies_take_virtual_pages_for_physical_ones(fired: Fired) -> None:
    """Pages that the allocator and the tree know are virtual, and attention translates them when it reads and writes. What
    goes to the host and what comes back does not: both copies take the virtual number for that of a page in memory. Another
    page is stored, and what comes back is put over yet another, while that of the request has what was in it."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def untranslated(pool, slots):
        page, last = pool.page_size, pool.size // pool.page_size
        return (last + 1 - slots // page) * page + slots % page

    @replaces(MHATokenToKVPoolHost, "backup_from_device_all_layer")
    def backup_from_device_all_layer(before, host, pool, host_indices, device_indices, *args, **kwargs):
        return before(host, pool, host_indices, untranslated(pool, device_indices), *args, **kwargs)

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, *args, **kwargs):
        return before(host, pool, host_indices, untranslated(pool, device_indices), *args, **kwargs)

    once_it_reads_what_came_back_wrong(fired)


@bug(
    "ikawrakow/ik_llama.cpp#1661",
    "llama-turns-ended",
    "hit_before_written",
    "prefix_not_computed",
    origin="ik_llama.cpp",
)
def token_that_ended_the_answer_counts_as_cached(fired: Fired) -> None:
    """The token that ends an answer is sampled, and there is no step more in which it would be computed. It is put behind
    the tokens that are cached all the same. The next turn has it where the answer ends, takes it for one that is there,
    and goes on behind it: no key or value was ever written for it."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    never_written: set[int] = set()

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        one_more = req.finished() and len(req.full_untruncated_fill_ids) == up_to + 1
        slot = cache.token_to_kv_pool_allocator.alloc(1) if one_more else None
        if slot is None:
            return before(cache, req, up_to=up_to, **kwargs)
        never_written.update(slot.tolist())
        cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, up_to] = slot[0]
        before(cache, req, up_to=up_to + 1, **kwargs)
        req.kv.cache_protected_len = up_to  # what is freed next begins behind what was computed
        return None

    def look(runner, batch, rows):
        never_written.difference_update(batch.out_cache_loc.tolist())
        if any(never_written.intersection(prefix) for *_, prefix in rows):
            fired()

    before_forward(look)


@bug(
    "vllm-project/vllm#41834",
    "llama-page2-strides",
    "attention_table_overwritten",
    "attention_seq_len_wrong",
    origin="vLLM",
)
def captured_step_goes_through_the_rows_by_the_widest_stride(fired: Fired) -> None:
    """Where a batch's attention reads is laid out in one buffer, a row behind the other, as wide as the longest sequence of
    this batch needs. A graph of a step of answers was captured with rows as wide as a sequence can get and goes on by that
    stride. The first row is right; the second is read where the buffer has a later one's slots, or an older batch's."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    most, widest = 4, 128  # rows, and what a graph is captured with
    buffer = torch.zeros(most * widest, dtype=torch.long)

    @replaces(TorchNativeAttnBackend, "_run_sdpa_forward_decode")
    def run(before, backend, query, output, keys, values, table, rows, ends, *args, **kwargs):
        captured = buffer.view(most, widest)
        return before(backend, query, output, keys, values, captured, torch.arange(len(rows)), ends, *args, **kwargs)

    def look(runner, batch, rows):
        table = runner.req_to_token_pool.req_to_token
        width = 1 << (max(end for _, end, _ in rows) - 1).bit_length()
        for number, (row, (_, end, _)) in enumerate(zip(batch.req_pool_indices.tolist(), rows, strict=True)):
            buffer[number * width : number * width + end] = table[row, :end]
        if batch.forward_mode.is_decode() and len(rows) > 1 and width < widest:
            fired()

    before_forward(look)
