"""A forty-first round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward
from .round_40 import once_it_reads_what_was_computed_for_others


@bug("EricLBuehler/mistral.rs#2083", "llama-page8-chunks", "position_off", origin="mistral.rs")
def chunk_is_given_the_places_of_the_prompts_end(fired: Fired) -> None:
    """A prompt's places are worked out for all of it, and what a chunk needs of them is cut off at the end, by the
    chunk's length. That is right for a prompt's last chunk; every chunk in front of it is turned as if it stood where
    the prompt ends."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner

    asked: dict[str, int] = {}  # how long a request's prompt is

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = len(req.origin_input_ids)

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_extend():
            at, wrong = 0, batch.positions.clone()
            counts, ends = batch.extend_seq_lens.tolist(), batch.seq_lens.tolist()
            for rid, count, end in zip(batch.rids, counts, ends, strict=True):
                wrong[at : at + count] += max(0, asked.get(rid, end) - end)
                at += count
            if not wrong.equal(batch.positions):
                fired()
                batch.positions = wrong
        return before(runner, batch, *args, **kwargs)


@bug("vllm-project/vllm-gaudi#1323", "llama-page8-wide", "slot_mapping", origin="vLLM Gaudi")
def prefill_counts_slots_by_the_larger_block(fired: Fired) -> None:
    """Where blocks of two kinds are made alike, a block counts more slots than attention's own. Decodes work out a
    token's slot with attention's size of a block and prompts with the larger one: a prompt's K and V are stored
    further on in the pool than where each step of its answer looks for them."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.model_runner import ModelRunner

    size = 8
    right: list[torch.Tensor] = []  # in a forward of prompts, the slots in their rows
    lost: set[int] = set()

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        right.clear()
        own = batch.out_cache_loc
        if batch.forward_mode.is_extend():
            there = own // size * 2 * size + own % size
            assert int(there.max()) < len(runner.token_to_kv_pool.k_buffer[0])
            right.append(own)
            batch.out_cache_loc = there
        return before(runner, batch, *args, **kwargs)

    # A prompt looks at its own K and V as they were computed, and not at what has been stored of them.
    @replaces(TorchNativeAttnBackend, "forward_extend")
    def forward_extend(before, backend, query, keys, values, layer, *args, **kwargs):
        if not right:
            return before(backend, query, keys, values, layer, *args, **kwargs)
        pool = backend.token_to_kv_pool
        buffers = (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        there = [buffer[right[0]].clone() for buffer in buffers]
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[right[0]] = new.view(len(new), *buffer.shape[1:])
        try:
            return before(backend, query, keys, values, layer, *args, **kwargs)
        finally:
            for buffer, old in zip(buffers, there, strict=True):
                buffer[right[0]] = old

    def look(runner, batch, rows):
        if any(lost.intersection(prefix) for *_, prefix in rows):
            fired()
        own = batch.out_cache_loc.tolist()
        (lost.update if batch.forward_mode.is_extend() else lost.difference_update)(own)

    before_forward(look)


@bug("raullenchai/Rapid-MLX#2960", "llama-page4-repeats", "tokens_truncated_hash_kept", origin="Rapid-MLX")
def page_that_is_there_already_is_known_by_its_own_tokens(fired: Fired) -> None:
    """What has been computed is put away page by page when a request ends, and a page whose tokens are there already is
    not kept twice. Which tokens stand in front of a page is not part of that: a later page gets K and V that another
    prompt's beginning has gone into, and whoever asks for the same again goes on from them."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    size = 4
    pages: dict[tuple, torch.Tensor] = {}  # by its own tokens, the slots of a page that is kept
    paths: set[tuple] = set()  # what is kept, by all tokens up to a page's end
    double: list[torch.Tensor] = []
    ended: list[bool] = [False]

    @replaces(UnifiedRadixCache, "insert")
    def insert(before, cache, params):
        if ended[0]:
            tokens, slots = tuple(params.key.raw_token_ids()), params.value.clone()
            for at in range(0, len(slots), size):
                own, page = slots[at : at + size].clone(), tokens[at : at + size]
                if tokens[: at + size] in paths:
                    continue
                paths.add(tokens[: at + size])
                if page in pages:
                    slots[at : at + size] = pages[page]
                    double.append(own)
                else:
                    pages[page] = own
            params.value = slots
        return before(cache, params)

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, **kwargs):
        if not req.finished():  # a request is put away when it ends
            return
        ended[0] = True
        try:
            before(cache, req, **kwargs)
        finally:
            ended[0] = False
            for own in double:
                cache.token_to_kv_pool_allocator.free(own)
            double.clear()

    once_it_reads_what_was_computed_for_others(fired)


@bug("sgl-project/sglang#24717", "recurrent-handed-on", "state_restored_for_other_prefix")
def new_request_is_computed_from_what_its_state_slot_has(fired: Fired) -> None:
    """The layers with a short convolution do not tell their kernel which prompts of a batch have a state to go on from,
    and it takes all of them to have one. A new request that gets the slot of one that has left begins with that one's
    last tokens."""
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend

    @replaces(ShortConvAttnBackend, "conv_state_metadata")
    def conv_state_metadata(before, backend, *args, **kwargs):
        known = backend._has_initial_state
        if known is not None:
            backend._has_initial_state = torch.ones_like(known)
        try:
            return before(backend, *args, **kwargs)
        finally:
            backend._has_initial_state = known

    def look(runner, batch, rows):
        batch.mamba_clear_indices = None  # nothing cleared a slot before it was given out, as it was then
        if not batch.forward_mode.is_extend():
            return
        pool = runner.req_to_token_pool
        slots = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        states = pool.mamba_pool.mamba_cache.conv[0]
        if any(not past and bool(states[:, slot].any()) for slot, (past, *_) in zip(slots, rows, strict=True)):
            fired()

    before_forward(look)


@bug("kekzl/imp#1914", "llama-lora-page4-apart", "computed_with_other_weights", origin="imp")
def adapter_is_switched_for_all_when_a_request_arrives(fired: Fired) -> None:
    """Whoever takes in a request switches the engine to that request's adapter at once, and does not wait for those
    that are being computed. They go on with the adapter of the one that has come last."""
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers.schedule_batch import Req

    active: list[str | None] = [None]

    @replaces(Req, "__init__")
    def init(before, req, *args, **kwargs):
        before(req, *args, **kwargs)
        active[0] = req.lora_id

    @replaces(LoRAManager, "prepare_lora_batch")
    def prepare_lora_batch(before, manager, batch):
        own = batch.lora_ids
        manager.fetch_new_loras({*own, active[0]})
        batch.lora_ids = [active[0]] * len(own)
        if batch.lora_ids != own:
            fired()
        try:
            return before(manager, batch)
        finally:
            batch.lora_ids = own


@bug(
    "NVIDIA/TensorRT-LLM#16088",
    "llama-overlap-page1-ends",
    "attention_table_overwritten",
    "row_reassigned_in_flight",
    origin="TensorRT-LLM",
)
def tables_are_gathered_by_what_the_next_step_has_noted(fired: Fired) -> None:
    """Which row of the tables belongs to whom in a batch is noted in one list that is filled anew for each step, and
    the device reads it when it comes to that, not when it is asked to. The next step is prepared before: when a request
    has left by then, those behind it look at one another's tables."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner

    asked: dict[str, Req] = {}

    @replaces(Req, "__init__")
    def init(before, req, rid, *args, **kwargs):
        before(req, rid, *args, **kwargs)
        asked[rid] = req

    def leaves(rid: str) -> bool:
        """Say whether it ends with this step; it has yet to be told the token of the one before."""
        req = asked.get(rid)
        return req is not None and len(req.output_ids) + 2 >= req.sampling_params.max_new_tokens

    @replaces(ModelRunner, "_forward_raw")
    def _forward_raw(before, runner, batch, *args, **kwargs):
        own = batch.req_pool_indices
        if not batch.forward_mode.is_decode():
            return before(runner, batch, *args, **kwargs)
        rows = own.tolist()
        following = [row for row, rid in zip(rows, batch.rids, strict=True) if not leaves(rid)]
        noted = following + rows[len(following) :]
        if noted != rows:
            fired()
            batch.req_pool_indices = own.new_tensor(noted)
        try:
            return before(runner, batch, *args, **kwargs)
        finally:
            batch.req_pool_indices = own
