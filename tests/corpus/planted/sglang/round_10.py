"""A tenth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

import os

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("sgl-project/sglang#24226", "llama-no-tree", "free_too_early", "page_given_twice", "double_free")
def prompt_freed_when_it_was_offloaded(fired: Fired) -> None:
    """After some decodes what a request has is copied to the host for the first time, and the slots of its prompt are given back. The
    request goes on decoding and reads them, and others are given them."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.model_executor.model_runner import ModelRunner

    stride = 4
    prompts: dict[int, int] = {}
    decoded: dict[int, int] = {}
    given_back: dict[int, int] = {}

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        rows = batch.req_pool_indices.tolist()
        if any(row in given_back for row in rows):
            fired()
        done = before(runner, batch, *args, **kwargs)
        for row, end in zip(rows, batch.seq_lens.tolist(), strict=True):
            if not batch.forward_mode.is_decode():
                prompts[row], decoded[row] = end, 0
                continue
            decoded[row] += 1
            if decoded[row] == stride:
                given_back[row] = prompts[row]
                runner.token_to_kv_pool_allocator.free(runner.req_to_token_pool.req_to_token[row, : prompts[row]])
        return done

    @replaces(BasePrefixCache, "free_kv_row")
    def free_kv_row(before, cache, kv, ranges):
        first = given_back.pop(int(kv.req_pool_idx), 0)
        return before(cache, kv, [(max(start, first), end) for start, end in ranges if end > first])


@bug("NVIDIA/Megatron-LM#6584", "recurrent", "state_restored_for_other_prefix", origin="Megatron-LM")
def slot_to_clear_kept_as_a_view(fired: Fired) -> None:
    """The slot of a new request's recurrent state is kept as a view into the list of free slots until it is cleared, and the list changes
    under it. What is cleared is the state of a request that is running."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    owners: dict[int, int] = {}
    running: list[int] = []
    cleared: set[int] = set()

    @replaces(MambaPool, "clear_slots")
    def clear_slots(before, pool, indices):
        if running and not cleared:
            cleared.add(running[-1])
            indices = torch.cat([indices[:-1], indices.new_tensor(running[-1:])])
        before(pool, indices)

    def look(runner, batch, rows):
        pool, own = runner.req_to_token_pool, batch.req_pool_indices.tolist()
        slots = pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        if cleared & {slot for slot, (prefix, *_) in zip(slots, rows, strict=True) if prefix}:
            fired()
        owners.update(zip(own, slots, strict=True))
        gone = {*pool.free_slots, *own}
        running[:] = [slot for row, slot in owners.items() if row not in gone]

    before_forward(look)


# Two chunks of the first request go to the same wrong slot: in the forward that is marked it reads its own state there.
@bug("tenstorrent/vllm#454", "recurrent", "state_restored_for_other_prefix", origin="tenstorrent/vllm", reads=2)
def prefill_takes_the_first_state_slots(fired: Fired) -> None:
    """A prefill is not told the slots of its requests' recurrent states, and takes as many as it needs from the first on. It overwrites the
    states of those that decode there, and its own requests go on from what stands in theirs."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    prefilling: list[int] = []
    wrong: set[int] = set()

    def look(runner, batch, rows):
        own = runner.req_to_token_pool.req_index_to_mamba_index_mapping[batch.req_pool_indices].tolist()
        prefilling[:] = [] if batch.forward_mode.is_decode() else range(1, len(own) + 1)
        for (prefix, *_), slot, taken in zip(rows, own, prefilling or own, strict=True):
            if prefix and (taken != slot or slot in wrong):
                fired()
        wrong.update(slot for pair in zip(own, prefilling, strict=False) if len(set(pair)) > 1 for slot in pair)

    before_forward(look)

    @replaces(HybridReqToTokenPool, "get_mamba_indices")
    def get_mamba_indices(before, pool, rows):
        own = before(pool, rows)
        return own.new_tensor(prefilling) if len(prefilling) == own.numel() else own


@bug("sgl-project/sglang#29352", "llama-twins", "free_too_early", "eviction_of_locked_page")
def node_takes_the_newer_slots(fired: Fired) -> None:
    """A prompt is inserted that the tree has already, and its node takes the newer slots and gives back the ones that it had. A running
    request that holds the node goes on reading these."""
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"  # the one in Rust cannot be patched
    from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

    gone: set[int] = set()

    @replaces(UnifiedTreeCore, "_insert_overlap_step")
    def _insert_overlap_step(before, tree, state):
        data = state.overlap_node.component_data[tree.components[0].component_type]
        own, known = state.value[: state.overlap_prefix_len].clone(), len(state.pending_actions)
        before(tree, state)
        for at, action in enumerate(state.pending_actions[known:], known):
            if isinstance(action, FreeDeviceKV) and data.lock_ref and not gone:
                count = sum(part.numel() for part in action.indices)
                had = data.value[-count:].clone()
                data.value = torch.cat([data.value[:-count], own[-count:]])
                state.pending_actions[at] = FreeDeviceKV([had])
                gone.update(had.tolist())

    before_forward(lambda runner, batch, rows: any(gone & set(prefix) for *_, prefix in rows) and fired())


@bug("ROCm/ATOM#2267", "llama", "kv_changed", "pad_rows_keep_last_blocks", origin="ATOM")
def captured_through_the_last_batchs_slots(fired: Fired) -> None:
    """Graphs are captured anew, which runs the model, and the buffer that says where it writes still has the last batch's slots. K and V
    of the capture are written over those of requests that go on."""
    last: list = []
    steps: list[int] = []

    def look(runner, batch, rows):
        if batch.forward_mode.is_decode():
            steps.append(1)
            if len(steps) == 5:
                pool = runner.token_to_kv_pool
                for buffer in (*pool.k_buffer, *pool.v_buffer):
                    buffer[last[0]] = buffer.new_full(buffer[last[0]].shape, 0.125)
                fired()
        last[:] = [batch.out_cache_loc.clone()]

    before_forward(look)
