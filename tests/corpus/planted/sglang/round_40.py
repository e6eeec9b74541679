"""A fortieth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import os

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


def once_it_reads_what_was_computed_for_others(fired: Fired) -> None:
    """Say that the damage is read by the first forward with a slot in a prefix that was computed behind other tokens."""
    from sglang.srt.managers.schedule_batch import Req

    asked: dict[str, Req] = {}
    computed: dict[int, tuple] = {}  # of a slot, the tokens up to the one that was computed there

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    def look(runner, batch, rows):
        table = runner.req_to_token_pool.req_to_token
        for row, rid, (past, end, prefix) in zip(batch.req_pool_indices.tolist(), batch.rids, rows, strict=True):
            tokens = (*asked[rid].origin_input_ids, *asked[rid].output_ids) if rid in asked else ()
            held = [(slot, tokens[: place + 1]) for place, slot in enumerate(prefix)]
            if any(computed.get(slot, own) != own for slot, own in held if tokens):
                fired()
            computed.update({slot: tokens[: past + n + 1] for n, slot in enumerate(table[row, past:end].tolist())})

    before_forward(look)


def once_it_reads_what_came_back_wrong(fired: Fired) -> None:
    """Say that the damage is read by the first forward with a slot that came from the host with keys that are not its own."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    asked: dict[str, Req] = {}
    right: dict[tuple, torch.Tensor] = {}  # of a prefix, the last layer's keys of its last token
    written: list[tuple[int, tuple]] = []  # in the step before: a slot, and the prefix that ends there
    landed: set[int] = set()

    @replaces(MHATokenToKVPoolHost, "load_to_device_per_layer")
    def load_to_device_per_layer(before, host, pool, host_indices, device_indices, *args, **kwargs):
        landed.update(device_indices.tolist())
        return before(host, pool, host_indices, device_indices, *args, **kwargs)

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    def look(runner, batch, rows):
        keys, table = runner.token_to_kv_pool.k_buffer[-1], runner.req_to_token_pool.req_to_token
        for slot, prefix in written:
            right.setdefault(prefix, keys[slot].clone())
        written.clear()
        for row, rid, (past, end, prefix) in zip(batch.req_pool_indices.tolist(), batch.rids, rows, strict=True):
            tokens = (*asked[rid].origin_input_ids, *asked[rid].output_ids) if rid in asked else ()
            for place, slot in enumerate(prefix):
                known = right.get(tokens[: place + 1])
                if slot in landed and known is not None and (keys[slot] - known).abs().max() > 0.1 * known.abs().max():
                    fired()
            own = table[row, past:end].tolist()
            landed.difference_update(own)
            written.extend((slot, tokens[: past + n + 1]) for n, slot in enumerate(own) if past + n < len(tokens))

    before_forward(look)


@bug(
    "ggml-org/llama.cpp#27705",
    "llama-page4-bursts",
    "next_token_swap",
    origin="llama.cpp",
    late="not found: what a row of the sampler is computed from is not recorded",
)
def order_of_an_earlier_steps_outputs_is_applied_once_more(fired: Fired) -> None:
    """A batch of prompts is computed in an order of its own, by length, and that order is noted so that its outputs can
    be put back. The other path, which computes a batch as it is, does not drop the note: the outputs of the next step
    are exchanged by the order of the one before, and requests go on with one another's tokens."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    noted: list[list[int]] = []  # where the outputs of the last batch of prompts stood
    wrong: list[bool] = []

    @replaces(ModelRunner, "sample")
    def sample(before, runner, output, batch):
        logits = output.next_token_logits
        if batch.forward_mode.is_extend():
            lengths = batch.extend_seq_lens.tolist()
            noted[:] = [sorted(range(len(lengths)), key=lengths.__getitem__)]
        elif noted:
            order = noted.pop()
            rows = list(range(len(logits)))
            rows[: len(order)] = order[: len(rows)] if max(order) < len(rows) else rows[: len(order)]
            output.next_token_logits = logits[rows]
            if not output.next_token_logits.argmax(-1).equal(logits.argmax(-1)):
                wrong.append(True)
        return before(runner, output, batch)

    before_forward(lambda runner, batch, rows: wrong and fired())


@bug("sgl-project/sglang#38161", "llama-page8-forks", "shared_page_written")
def prompt_forks_inside_a_page_and_goes_on_in_it(fired: Fired) -> None:
    """Where a prompt leaves what the tree has is not rounded to the group of tokens that is stored as one. When it
    forks in the middle of a page, it takes the page along for its first tokens and writes the ones behind the fork into
    the rest of it: what the first prompt had there is overwritten."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust cannot be asked for children
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    begun: dict[str, torch.Tensor] = {}  # of a request, the slots of the page in which it forks

    @replaces(UnifiedRadixCache, "match_prefix")
    def match_prefix(before, cache, params):
        result = before(cache, params)
        if params.req is None:
            return result
        begun.pop(params.req.rid, None)
        count, size = result.device_prefix_len, cache.page_size
        rest = list(params.key.raw_token_ids())[count : count + size]
        for child in cache.tree_core.node_by_id(result.last_device_node).children.values():
            page = list(child.key.raw_token_ids())[:size]
            alike = next((n for n, (a, b) in enumerate(zip(rest, page, strict=False)) if a != b), len(rest))
            slots = child.component_data[0].value
            if 0 < alike < size and slots is not None and alike > len(begun.get(params.req.rid, ())):
                begun[params.req.rid] = slots[:alike]
        if params.req.rid in begun:
            alike = len(begun[params.req.rid])
            result = result._replace(device_prefix_len=count + alike, cache_protected_len=count)
        return result

    @replaces(UnifiedRadixCache, "prefix_device_indices")
    def prefix_device_indices(before, cache, req):
        if req.rid not in begun:
            return before(cache, req)
        req.prefix_len -= len(begun[req.rid])
        try:
            whole = torch.cat([before(cache, req), begun[req.rid]])
        finally:
            req.prefix_len += len(begun[req.rid])
        del begun[req.rid]
        return whole

    once_it_reads_what_was_computed_for_others(fired)


@bug("vllm-project/vllm#51899", "llama-page4-pictures", "identity_not_in_key", origin="vLLM")
def picture_is_known_by_what_it_says_of_itself(fired: Fired) -> None:
    """What a picture is put into the cache under is a name that is written in the picture, and not made of what is to
    be seen in it. Who sends another one that has the same name, with the same prompt, hits K and V of the first one."""
    from sglang.srt.managers.schedule_batch import Req

    shown: dict[str, tuple] = {}  # what a request's picture is
    made: dict[int, tuple] = {}  # of a slot, of which picture

    @replaces(Req, "__init__")
    def init(before, req, *args, **kwargs):
        before(req, *args, **kwargs)
        picture = req.positional_embed_overrides
        if picture is not None:
            shown[req.rid] = tuple(picture.embeds.flatten().tolist())
            req.extra_key = f"picture {picture.embeds[0, 0]:.2f}"
            req.skip_radix_cache_insert = False

    @replaces(Req, "init_next_round_input")
    def init_next_round_input(before, req, *args, **kwargs):
        picture, req.positional_embed_overrides = req.positional_embed_overrides, None
        try:
            return before(req, *args, **kwargs)
        finally:
            req.positional_embed_overrides = picture

    def look(runner, batch, rows):
        table = runner.req_to_token_pool.req_to_token
        for row, rid, (past, end, prefix) in zip(batch.req_pool_indices.tolist(), batch.rids, rows, strict=True):
            own = shown.get(rid, ())
            if any(place > 5 and made.get(slot, own) != own for place, slot in enumerate(prefix)):
                fired()
            made.update(dict.fromkeys(table[row, past:end].tolist(), own))

    before_forward(look)


@bug("ggml-org/llama.cpp#28498", "llama-host-halves-storage", "layout_misread", "stored_wrong", origin="llama.cpp")
def turned_heads_are_read_as_if_they_were_not(fired: Fired) -> None:
    """Whoever writes the files keeps keys and values turned by a matrix, head by head, and nothing in the file says so.
    Whoever reads them does without, and takes what is there for keys and values as they are."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    width = 32
    turn = torch.ones(1, 1)
    while len(turn) < width:
        turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
    turn = turn / width**0.5

    @replaces(HiCacheFile, "set")
    def set_(before, storage, key, value=None, *args, **kwargs):
        turned = (value.reshape(-1, width) @ turn).reshape(value.shape)
        return before(storage, key, turned, *args, **kwargs)

    once_it_reads_what_came_back_wrong(fired)


# A write that is left out has no kind of its own: the slot keeps what it held, and this forward reads that.
@bug("tenstorrent/tt-metal#56095", "llama-page4-bursts", "kv_write_lost", "kv_write_damaged", origin="TT-Transformers")
def replayed_prefill_stores_for_who_was_there_at_its_capture(fired: Fired) -> None:
    """Prompts that come together are computed by a trace, of which there is one for each padded length. Its loop that
    puts K and V into the cache is captured with the places that were taken then; a replay gets other tokens and other
    tables, and still stores for these places alone. Who has another place finds nothing in the cache."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    captured: dict[int, set[int]] = {}  # by padded length: rows
    left: set[int] = set()

    def look(runner, batch, rows):
        left.clear()
        if not batch.forward_mode.is_extend() or len(rows) < 2:
            return
        own = batch.req_pool_indices.tolist()
        padded = max(8, 1 << (max(end - past for past, end, _ in rows) - 1).bit_length())
        places = captured.setdefault(padded, set(own))
        table = runner.req_to_token_pool.req_to_token
        for row, (past, end, _) in zip(own, rows, strict=True):
            if row not in places:
                left.update(table[row, past:end].tolist())
        if left:
            fired()

    @replaces(MHATokenToKVPool, "_store_kv_layer")
    def _store_kv_layer(before, pool, layer, loc, keys, values, *args, **kwargs):
        kept = torch.tensor([n for n, slot in enumerate(loc.tolist()) if slot not in left], dtype=torch.long)
        return before(pool, layer, loc[kept], keys[kept], values[kept], *args, **kwargs)

    before_forward(look)


@bug("sgl-project/sglang#39342", "recurrent-tails-mixed", "state_restored_for_other_prefix")
def checkpoint_of_a_mixed_batch_is_claimed_and_not_written(fired: Fired) -> None:
    """A prompt claims a slot for the state at its end before it is known whether decodes are computed along with it. If
    they are, which states are to be saved is dropped from the batch and the slot is never written; it is given to the
    tree at its depth all the same, and who hits it goes on from what the slot held."""
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    mixed: set[str] = set()  # prompts of the last batch, if it was mixed
    unwritten: list[bool] = [False]
    saved: list[list[int]] = []
    hit: set[str] = set()

    def look(runner, batch, rows):
        mixed.clear()
        if hit.intersection(batch.rids):
            fired()
        if batch.forward_mode.is_mixed():
            counts = batch.extend_seq_lens.tolist()
            decodes = sum(n == 1 and past > 0 for n, (past, *_) in zip(counts, rows, strict=True))
            mixed.update(name for name, n in zip(batch.rids, counts, strict=True) if n > 1 and decodes)

    before_forward(look)

    @replaces(MambaPool, "copy_from")
    def copy_from(before, pool, *args, **kwargs):
        return None if unwritten[0] else before(pool, *args, **kwargs)

    @replaces(MambaComponent, "prepare_for_caching_req")
    def prepare_for_caching_req(before, component, req, insert_params, token_ids_len, is_finished):
        unwritten[0] = not is_finished and req.rid in mixed
        if unwritten[0]:
            saved.append(list(req.full_untruncated_fill_ids[:token_ids_len]))
        try:
            return before(component, req, insert_params, token_ids_len, is_finished)
        finally:
            unwritten[0] = False

    @replaces(UnifiedRadixCache, "match_prefix")
    def match_prefix(before, cache, params):
        result = before(cache, params)
        if params.req is not None and list(params.key.token_ids[: result.device_prefix_len]) in saved:
            hit.add(params.req.rid)
        return result


@bug("rajveer43/VeloxQuant-MLX#463", "hybrid-page4-far", "window_read_wrong", origin="VeloxQuant-MLX")
def window_is_left_out_where_a_single_token_is_computed(fired: Fired) -> None:
    """Where a single token is computed no mask is made, since it may look at all that stands before it. A layer with a
    window has its window in the mask, and loses it: prompts are computed within the window, and each token of an answer
    looks at everything that the layer still has."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    @replaces(TorchNativeAttnBackend, "_run_sdpa_forward_decode")
    def _run_sdpa_forward_decode(
        before, backend, query, output, keys, values, table, rows, ends, *args, sliding_window_size=None, **kwargs
    ):
        if sliding_window_size is None:
            return before(backend, query, output, keys, values, table, rows, ends, *args, **kwargs)
        there = backend.token_to_kv_pool.full_to_swa_index_mapping > 0
        held = [table[row, :end] for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        held = [slots[there[slots]] for slots in held]
        counts = ends.new_tensor([len(slots) for slots in held])
        table = torch.nn.utils.rnn.pad_sequence(held, batch_first=True)
        rows = torch.arange(len(held))
        return before(backend, query, output, keys, values, table, rows, counts, *args, **kwargs)

    def look(runner, batch, rows):
        if not batch.forward_mode.is_decode():
            return
        there = runner.token_to_kv_pool.full_to_swa_index_mapping > 0
        window = runner.sliding_window_size
        if any(
            there[torch.tensor(prefix[: max(0, past - window)], dtype=torch.long)].any() for past, _, prefix in rows
        ):
            fired()

    before_forward(look)


@bug(
    "sgl-project/sglang#26009",
    "llama-host-halves-flushed-storage",
    "double_free",
    "host_copy_overwritten", "page_given_twice",
)  # fmt: skip
def pages_wait_to_be_released_over_a_flush(fired: Fired) -> None:
    """What a fetch that was broken off had on the host is put into a queue, out of which it is given back later. A
    flush makes all of the host free and leaves the queue as it is. What is in it is given back once more: its pages are
    in the list twice, and two prompts are stored there."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    @replaces(HybridCacheController, "reset")
    def reset(before, controller):
        waiting = list(controller.host_mem_release_queue.queue) if controller.host_mem_release_queue else []
        before(controller)
        for page in waiting:
            controller.host_mem_release_queue.put(page)

    # A pool that does not look whether it has a page already, as it was then.
    @replaces(HostKVCache, "free")
    def free(before, pool, indices):
        pool.slot_used[indices.cpu()] = True
        return before(pool, indices)

    @replaces(HostKVCache, "alloc")
    def alloc(before, pool, count):
        used, pool.slot_used = pool.slot_used, torch.zeros_like(pool.slot_used)
        given = before(pool, count)
        pool.slot_used |= used
        return given

    once_it_reads_what_came_back_wrong(fired)
