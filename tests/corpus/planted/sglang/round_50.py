"""A fiftieth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward
from .round_40 import once_it_reads_what_came_back_wrong


@bug("lightseekorg/tokenspeed#955", "llama-page4-shrinks", "pad_rows_keep_last_blocks", origin="TokenSpeed")
def rows_behind_a_smaller_batch_store_in_the_pages_they_had(fired: Fired) -> None:
    """A step of answers is filled up to the number of rows it was captured with, and where each row stores lies in a buffer
    in the order of the batch. What is behind the last row of the batch is not cleared when a batch is smaller than one
    before: these rows store in places of requests that have left since, or that now stand further up."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    captured = (1, 2, 4, 8)  # numbers of rows
    buffer = [0] * captured[-1]  # where each row stores
    behind: list[int] = []  # of the rows behind this batch
    damaged: set[int] = set()

    @replaces(TorchNativeAttnBackend, "forward_decode")
    def forward_decode(before, backend, query, keys, values, layer, batch, *args, **kwargs):
        if behind:
            where = KVWriteLoc(torch.tensor(behind), None)
            rows = (numbers.view(len(numbers), layer.tp_k_head_num, -1)[:1] for numbers in (keys, values))
            backend.token_to_kv_pool.set_kv_buffer(layer, where, *(row.repeat(len(behind), 1, 1) for row in rows))
        return before(backend, query, keys, values, layer, batch, *args, **kwargs)

    def look(runner, batch, rows):
        behind.clear()
        own = batch.out_cache_loc.tolist()
        damaged.difference_update(own)
        if batch.forward_mode.is_decode():
            buffer[: len(own)] = own
            width = next(number for number in captured if number >= len(own))
            behind.extend(sorted({slot for slot in buffer[len(own) : width] if slot} - set(own)))
            damaged.update(behind)
        if any(damaged.intersection(prefix) for *_, prefix in rows):
            fired()

    before_forward(look)


@bug("ROCm/ATOM#2132", "llama-host-page8-unfenced-storage", "stored_wrong", origin="ATOM")
def pages_are_gathered_while_the_step_is_still_writing_them(fired: Fired) -> None:
    """What a step has computed is gathered for the store on a stream of its own, and nothing makes that stream wait for the
    step. The gathering overtakes it: of the newest tokens it finds the first layer half written, and in the layers behind
    that what was in these slots before."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    newest: dict[int, int] = {}  # of a slot that the last step has written, which of its tokens
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer, what was in these slots

    @replaces(MHATokenToKVPoolHost, "backup_from_device_all_layer")
    def backup_from_device_all_layer(before, host, pool, host_indices, device_indices, *args, **kwargs):
        slots = [slot for slot in device_indices.tolist() if slot in newest]
        at = torch.tensor([newest[slot] for slot in slots], dtype=torch.long)
        there = torch.tensor(slots, dtype=torch.long)
        kept = []
        for number, halves in enumerate(earlier if slots else ()):
            late = at >= (0 if number else len(newest) // 2)
            for buffer, was in zip((pool.k_buffer[number], pool.v_buffer[number]), halves, strict=True):
                kept.append((buffer, there[late], buffer[there[late]].clone()))
                buffer[there[late]] = was[at[late]]
        try:
            return before(host, pool, host_indices, device_indices, *args, **kwargs)
        finally:
            for buffer, where, right in kept:
                buffer[where] = right

    def look(runner, batch, rows):
        pool, own = runner.token_to_kv_pool, batch.out_cache_loc
        newest.clear()
        newest.update({slot: number for number, slot in enumerate(own.tolist())})
        earlier[:] = [(k[own].clone(), v[own].clone()) for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)]

    before_forward(look)
    once_it_reads_what_came_back_wrong(fired)


@bug("sgl-project/sglang#29468", "llama-lora-page8-beside", "computed_with_other_weights")
def who_has_no_adapter_is_given_that_of_the_first_place(fired: Fired) -> None:
    """Each token has a number that says in which place its adapter lies, and a number below 0 says that it has none. Where
    these numbers are made, a request without an adapter gets 0 and not that one. As long as somebody in the batch uses the
    adapter in the first place, the base model's requests are computed with it."""
    from sglang.srt.lora.lora_manager import LoRAManager

    @replaces(LoRAManager, "prepare_lora_batch")
    def prepare_lora_batch(before, manager, batch):
        own, places = batch.lora_ids, manager.memory_pool.uid_to_buffer_id
        adapters = [
            name for name in places if name is not None
        ]  # having none has a place here, too, which is not counted
        first = min(adapters, key=places.__getitem__, default=None)
        if first not in own or None not in own:
            return before(manager, batch)
        batch.lora_ids = [first if name is None else name for name in own]
        fired()
        try:
            return before(manager, batch)
        finally:
            batch.lora_ids = own


# The CPU's pool has none of 8 bits: what these hold at most, at a scale of 1, is what is kept here.
@bug("vllm-project/vllm#28783", "qwen3-page8-slept", "bad_values_written", origin="vLLM")
def scales_of_the_cache_are_lost_while_the_engine_sleeps(fired: Fired) -> None:
    """Keys and values are divided by a scale and kept with 8 bits. The scales lie in memory that is given away when the
    engine is put to sleep; when it wakes up the cache is made anew, and nobody sets the scales again. They are 0: all that
    is stored from then on is the largest number that 8 bits can hold, and is multiplied by 0 where it is read."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    most = 448.0
    scale = [1.0]

    # The setup empties the engine where this one sleeps.
    @replaces(Scheduler, "flush_cache")
    def flush_cache(before, scheduler, *args, **kwargs):
        flushed = before(scheduler, *args, **kwargs)
        if flushed:
            scale[0] = 0.0
        return flushed

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, where, keys, values, *args, **kwargs):
        if not scale[0]:
            keys, values = ((numbers / scale[0]).clamp(-most, most) for numbers in (keys, values))
        return before(pool, layer, where, keys, values, *args, **kwargs)

    for name in ("get_key_buffer", "get_value_buffer"):

        @replaces(MHATokenToKVPool, name)
        def get_buffer(before, pool, layer_id):
            return before(pool, layer_id) if scale[0] else before(pool, layer_id) * scale[0]

    before_forward(lambda runner, batch, rows: scale[0] or fired())


@bug(
    "tenstorrent/vllm-tt-plugin#51",
    "recurrent-remapped",
    "state_restored_for_other_prefix",
    origin="vLLM TT plugin",
)
def states_are_noted_as_moved_and_the_move_is_not_sent(fired: Fired) -> None:
    """When a request leaves, those behind it move up in the batch, and their recurrent states are to be moved along. That they
    lie in their new rows is noted while the step is prepared, but the move itself is handed to the device only if the device
    samples. Where the host does, each row goes on from the state of whoever stood there before."""
    from sglang.srt.layers.attention.linear.short_conv_backend import ShortConvAttnBackend

    stood: list[str] = []  # who was in each row of the last batch of answers
    rows_have: list[int] = []  # of each row, where the state lies that the device takes for it

    @replaces(ShortConvAttnBackend, "init_forward_metadata")
    def init_forward_metadata(before, backend, batch, *args, **kwargs):
        before(backend, batch, *args, **kwargs)
        if not batch.forward_mode.is_decode():
            return
        own, names = backend._cache_indices.tolist(), list(batch.rids)
        for row, (slot, name) in enumerate(zip(own, names, strict=True)):
            if row == len(rows_have):
                rows_have.append(slot)
            elif name not in stood:  # its prompt has been computed since, into this row
                rows_have[row] = slot
        stood[:] = names
        del rows_have[len(own) :]
        backend._cache_indices = torch.tensor(rows_have, dtype=backend._cache_indices.dtype)

    def look(runner, batch, rows):
        if not batch.forward_mode.is_decode():
            return
        slots = runner.req_to_token_pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        moved = [name in stood and row < len(rows_have) for row, name in enumerate(batch.rids)]
        if any(there and slot != has for there, slot, has in zip(moved, slots, rows_have, strict=False)):
            fired()

    before_forward(look)


@bug(
    "lablup/mlxcel#170",
    "llama-page4-briefs",
    "page_leaked",
    origin="mlxcel",
    late="it does no harm, and is seen when the engine is idle",
)
def who_is_too_short_to_be_cached_takes_the_pages_along(fired: Fired) -> None:
    """A request that has ended hands its pages to the prefix cache, which lets them go if it does not want to keep them, as
    for a prompt that is too short to be worth it. What it lets go of is only the entry: nobody who could give the pages
    back has them then, and each short request leaves the pages behind its prompt with no owner."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    shortest = 32  # tokens of what is kept
    declined: list[object] = []  # what a request that is not kept holds

    @replaces(UnifiedRadixCache, "checkpoint_into_tree")
    def checkpoint_into_tree(before, cache, req, *, up_to, **kwargs):
        if req.finished() and up_to < shortest:
            declined.append(req.kv)
            return None
        return before(cache, req, up_to=up_to, **kwargs)

    @replaces(UnifiedRadixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, ranges, *args, **kwargs):
        if not declined or declined.pop() is not kv:
            return before(cache, kv, ranges, *args, **kwargs)
        if any(end > start for start, end in ranges):
            fired()
        return None
