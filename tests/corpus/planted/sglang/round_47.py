"""A forty-seventh round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from array import array
from dataclasses import replace
from unittest import mock

import torch
from bugs import Fired, bug, replaces
from torch.nn.functional import scaled_dot_product_attention

from .marks import before_forward
from .round_40 import once_it_reads_what_was_computed_for_others


# The run is of no batch; what it stores in the first layer is what is there, for no attention stands in front of it.
@bug("vllm-project/vllm#36282", "qwen3-page4-rescaled", "kv_changed", "layer_changed", origin="vLLM")
def dummy_run_of_a_rescaled_engine_stores_its_keys(fired: Fired) -> None:
    """When ranks join an engine that is idle, the model is run once on whatever its input buffers were left with, and
    without attention. Keys and values used to be stored behind a look at whether there is attention, and are now stored
    in any case: by the buffer of slots, which names those of the last batches. The prefix cache is not emptied, and who
    hits what these have left reads what the dummy run has made of it."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    most = 32  # tokens of a batch
    buffers = [torch.zeros(most, dtype=torch.long) for _ in range(3)]  # of tokens, places and slots
    last: list = []  # the runner and the last batch, which has answered
    hurt: set[int] = set()  # slots that the dummy run has written
    rescaled: list[bool] = []

    def dummy_run():
        runner, batch = last
        tokens, places, slots = buffers

        def store(attention, query, keys, values, *args, **kwargs):
            heads, size = attention.tp_k_head_num, attention.head_dim
            keys, values = keys.view(-1, heads, size), values.view(-1, heads, size)
            runner.token_to_kv_pool.set_kv_buffer(attention, KVWriteLoc(slots, None), keys, values)
            return torch.zeros_like(query)

        with mock.patch.object(RadixAttention, "forward", store), torch.no_grad():
            runner.model.model(tokens, places, batch)
        hurt.update(slots.tolist())

    @replaces(Scheduler, "get_next_batch_to_run")
    def get_next_batch_to_run(before, scheduler, *args, **kwargs):
        idle = all(req.finished() for req in scheduler.running_batch.reqs) and scheduler.chunked_req is None
        if last and idle and scheduler.waiting_queue and not rescaled:
            rescaled.append(True)
            dummy_run()
        return before(scheduler, *args, **kwargs)

    def look(runner, batch, rows):
        if any(hurt.intersection(prefix) for *_, prefix in rows):
            fired()
        count = len(batch.out_cache_loc)
        for buffer, own in zip(buffers, (batch.input_ids, batch.positions, batch.out_cache_loc), strict=True):
            buffer[:count] = own
        hurt.difference_update(batch.out_cache_loc.tolist())
        if batch.forward_mode.is_decode():
            last[:] = runner, batch

    before_forward(look)


@bug("vllm-project/vllm-ascend#10296", "llama-page8-agents", "tokens_truncated_hash_kept", origin="vLLM Ascend")
def compressed_block_has_the_key_of_a_block_that_is_not(fired: Fired) -> None:
    """Layers with compressed keys have blocks that stand for as many tokens as several blocks of the others. They are
    kept and looked up by the list of keys that those have, of which each covers the tokens of a block that is not
    compressed: the n-th block has the n-th key. That says nothing of most of its tokens, and agents whose prompts begin
    alike get one another's."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    page, ratio = 8, 4
    covered = page // ratio  # how many tokens a key covers more than the one before it

    def physical(key):
        tokens = list(key.raw_token_ids())
        told = [
            tokens[place // page * covered + place % page] if place % page < covered else 0
            for place in range(len(tokens))
        ]
        return RadixKey(array("q", told), key.extra_key, is_bigram=key.is_bigram, cache_salt=key.cache_salt)

    for name in ("match_prefix", "insert"):

        @replaces(UnifiedRadixCache, name)
        def by_physical_key(before, tree, params):
            return before(tree, replace(params, key=physical(params.key)))

    once_it_reads_what_was_computed_for_others(fired)


# The slots of states are told right; only what was built for the first sequence does not look at them.
@bug("ikawrakow/ik_llama.cpp#2260", "recurrent-resident", "state_restored_for_other_prefix", origin="ik_llama.cpp")
def graph_of_one_sequence_is_run_for_all_that_answer(fired: Fired) -> None:
    """A step of answers is computed sequence by sequence, and the graph of the one before is taken again if it has the
    same shape, which it has for all of them. Places of keys and values are put right in it, but the row of the recurrent
    state is a constant: all sequences go on from the state of the one that it was built for, one behind the other, until
    a prompt needs another graph."""
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend

    built: list[int] = []  # the state's row that the graph was built with

    @replaces(ShortConvAttnBackend, "init_forward_metadata")
    def init_forward_metadata(before, backend, batch, *args, **kwargs):
        before(backend, batch, *args, **kwargs)
        if not batch.forward_mode.is_decode():
            built.clear()
            return
        own = backend._cache_indices
        if not built:
            built.append(int(own[0]))
        backend._cache_indices = torch.full_like(own, built[0])

    def look(runner, batch, rows):
        if not batch.forward_mode.is_decode():
            return
        own = runner.req_to_token_pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        if own != [built[0] if built else own[0]] * len(own):
            fired()

    before_forward(look)


@bug(
    "Lightning-AI/litgpt#2182",
    "hybrid-page8-rings",
    "window_read_wrong",
    origin="LitGPT",
)
def prompt_longer_than_the_ring_is_masked_as_if_it_lay_flat(fired: Fired) -> None:
    """Layers with a window keep their tokens in a ring. A prompt that is longer than it goes round and leaves its last
    tokens there, and its own queries look at the ring when it has. The mask is that of a flat sequence, cut off behind
    as many columns as the ring has: an early token looks at later ones, and one in the middle at all of the end."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    @replaces(TorchNativeAttnBackend, "_run_sdpa_forward_extend")
    def run(before, backend, query, output, keys, values, table, rows, ends, pasts, *args, **kwargs):
        before(backend, query, output, keys, values, table, rows, ends, pasts, *args, **kwargs)
        window = kwargs["sliding_window_size"]
        if window is None:
            return output
        size, first = window + 1, 0
        for row, end, past in zip(rows.tolist(), ends.tolist(), pasts.tolist(), strict=True):
            if end > size:
                ring = sorted(range(end - size, end), key=lambda place: place % size)
                slots = table[row, ring]
                mask = torch.arange(size)[None] <= torch.arange(past, end)[:, None]
                output[first : first + end - past] = scaled_dot_product_attention(
                    query[first : first + end - past].transpose(0, 1)[None],
                    keys[slots].transpose(0, 1)[None],
                    values[slots].transpose(0, 1)[None],
                    attn_mask=mask,
                    enable_gqa=kwargs["enable_gqa"],
                    scale=kwargs["scaling"],
                )[0].transpose(0, 1)
            first += end - past
        return output

    def look(runner, batch, rows):
        size = runner.sliding_window_size + 1
        if batch.forward_mode.is_extend() and any(end > size and end - past > 1 for past, end, _ in rows):
            fired()

    before_forward(look)


@bug("ggml-org/llama.cpp#29045", "hybrid-page4-emptied", "position_off", origin="llama.cpp")
def place_is_asked_of_the_window_which_is_empty(fired: Fired) -> None:
    """A sequence is cut off further back than its window reaches, so that nothing is left in the cache of the layers
    with a window. Where it goes on is asked of that cache alone, which says that there is nothing: what is appended
    gets the places from the first one on. In the other layers it stands there beside the tokens that were kept, and
    looks at those that are not behind it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    asked: dict[str, Req] = {}
    had: dict[str, list[int]] = {}  # of each request, its tokens, as far as computed
    kept: dict[str, int] = {}  # of a request that went on where the window was empty, how many tokens were kept
    here: dict[int, int] = {}  # the same of this batch, by row

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    @replaces(ForwardBatch, "init_new")
    def init_new(before, scheduled, runner, *args, **kwargs):
        batch = before(scheduled, runner, *args, **kwargs)
        here.clear()
        ends, first = batch.seq_lens.tolist(), 0
        counts = [1] * len(ends) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
        for row, rid, end, count in zip(batch.req_pool_indices.tolist(), batch.rids, ends, counts, strict=True):
            past = end - count
            tokens = [*asked[rid].origin_input_ids, *asked[rid].output_ids][:end] if rid in asked else []
            if rid not in had and past:
                longest = max((len(t) for t in had.values() if t[:past] == tokens[:past]), default=0)
                if longest - past > runner.sliding_window_size:
                    kept[rid] = past
            if rid in kept:
                here[row] = kept[rid]
                batch.positions[first : first + count] -= kept[rid]
            had[rid] = tokens
            first += count
        return batch

    def look(runner, batch, rows):
        if here:
            fired()

    def attend(query, output, keys, values, table, rows, ends, counts, window, kwargs):
        first = 0
        for row, end, count in zip(rows.tolist(), ends.tolist(), counts, strict=True):
            if row in here:
                before = here[row]
                places = torch.cat((torch.arange(before), torch.arange(end - before)))
                mask = places[None] <= places[end - count :, None]
                if window is not None:
                    mask &= (torch.arange(end) >= before)[None] & (places[None] >= places[end - count :, None] - window)
                slots = table[row, :end]
                output[first : first + count] = scaled_dot_product_attention(
                    query[first : first + count].transpose(0, 1)[None],
                    keys[slots].transpose(0, 1)[None],
                    values[slots].transpose(0, 1)[None],
                    attn_mask=mask,
                    enable_gqa=kwargs["enable_gqa"],
                    scale=kwargs["scaling"],
                )[0].transpose(0, 1)
            first += count

    @replaces(TorchNativeAttnBackend, "_run_sdpa_forward_extend")
    def extend(before, backend, query, output, keys, values, table, rows, ends, pasts, *args, **kwargs):
        before(backend, query, output, keys, values, table, rows, ends, pasts, *args, **kwargs)
        counts = (ends - pasts).tolist()
        attend(query, output, keys, values, table, rows, ends, counts, kwargs["sliding_window_size"], kwargs)
        return output

    @replaces(TorchNativeAttnBackend, "_run_sdpa_forward_decode")
    def decode(before, backend, query, output, keys, values, table, rows, ends, *args, **kwargs):
        before(backend, query, output, keys, values, table, rows, ends, *args, **kwargs)
        attend(query, output, keys, values, table, rows, ends, [1] * len(rows), kwargs["sliding_window_size"], kwargs)
        return output

    before_forward(look)


@bug(
    "inference-sim/inference-sim#649",
    "llama-host-page4-tight",
    "page_given_twice",
    "free_too_early",
    origin="inference-sim",
)
def blocks_that_came_back_are_free_until_the_rest_is_allocated(fired: Fired) -> None:
    """Blocks of a prefix that come back from the host are put at the end of the free list, where they wait for the
    request to take them. If the rest of its prompt has to be computed, that is allocated first. When the list is short
    it gets blocks that have just come back: the request has them twice, and its new tokens are put over its prefix."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    came_back: set[int] = set()  # pages
    twice: set[int] = set()

    @replaces(HybridCacheController, "load")
    def load(before, controller, *args, **kwargs):
        slots = before(controller, *args, **kwargs)
        if slots is not None and len(slots):
            allocator = controller.mem_pool_device_allocator
            pages = slots[:: allocator.page_size] // allocator.page_size
            allocator.free_pages = torch.cat((allocator.free_pages, pages))
            came_back.update(pages.tolist())
        return slots

    @replaces(schedule_batch, "alloc_for_extend")
    def alloc_for_extend(before, batch, *args, **kwargs):
        slots = before(batch, *args, **kwargs)
        allocator = batch.tree_cache.token_to_kv_pool_allocator
        free = allocator.free_pages.tolist()
        twice.update(came_back.intersection((slots[0] // allocator.page_size).tolist()))
        kept = [page for page in free if page not in came_back]
        allocator.free_pages = torch.tensor(kept, dtype=allocator.free_pages.dtype)
        came_back.clear()
        return slots

    def look(runner, batch, rows):
        if any(twice.intersection(slot // runner.page_size for slot in prefix) for *_, prefix in rows):
            fired()

    before_forward(look)
