"""The published sweep over a simulated engine's prefix cache, and the published figures of sliding-window divergence."""

import sys
from functools import cache
from types import ModuleType, SimpleNamespace

import numpy as np
from kvcanary.recorder.engines.simulated.memory import KvMemory
from kvcanary.recorder.engines.simulated.radix import NO_PAGE, Node

from .step import Step

_CACHE_MODULE = "sglang.srt.mem_cache.unified_radix_cache"
_INTERFACE_MODULE = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface"


class WalkedCache:
    """Stands in for the engine's own radix cache: what a sweep asks of it, answered from a simulated engine's tree."""

    def __init__(self, memory: KvMemory) -> None:
        import torch

        self._memory = memory
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.from_numpy(memory.req_to_token))
        self.tree_core = self

    def walk_for_kv_canary(self, *, unlocked_only: bool, swa_resident_only: bool):
        """Depth first, every slot with its position and the slot before it, full pool; evicted nodes hold no slots."""
        import torch

        assert (unlocked_only, swa_resident_only) == (False, False)
        size = self._memory.page_size
        slots: list[int] = []
        positions: list[int] = []
        prev_slots: list[int] = []

        def walk(node: Node, depth: int, prev: int) -> None:
            for child in node.children.values():
                last = prev
                if child.page != NO_PAGE:
                    for offset in range(size):
                        slots.append(child.page * size + offset)
                        positions.append(depth + offset)
                        prev_slots.append(last)
                        last = slots[-1]
                walk(child, depth + size, last)

        walk(self._memory.cache.tree.root, 0, -1)
        return SimpleNamespace(
            slot_indices=torch.tensor(slots, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            prev_slot_indices=torch.tensor(prev_slots, dtype=torch.int64),
        )


@cache
def _plan_builder():
    """Import the published plan builder without the engine's radix cache, which cannot be imported on a CPU."""
    interface, unified = ModuleType(_INTERFACE_MODULE), ModuleType(_CACHE_MODULE)
    interface.RadixCacheWalkResult = SimpleNamespace
    unified.UnifiedRadixCache = WalkedCache
    with_stand_ins = {_INTERFACE_MODULE: interface, _CACHE_MODULE: unified}
    before = {name: sys.modules.get(name) for name in with_stand_ins}
    sys.modules.update(with_stand_ins)
    try:
        from sglang.srt.kv_canary.sweep_plan_builder import build_verify_plan_radix_sweep
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return build_verify_plan_radix_sweep


def build_sweep_plan(radix_cache: WalkedCache, *, window: int, lut):
    """Return the published sweep plan of one group."""
    return _plan_builder()(
        radix_cache=radix_cache,
        swa_window_size=window,
        full_to_swa_index_mapping=lut if window else None,
    )


def divergence_figures(memory: KvMemory, step: Step) -> tuple[int, int]:
    """Return (tokens out of the window, tokens of another index), as published, after a forward has run.

    The slots that the forward wrote stand in the table where it wrote them: a trace knows no other entry for them.
    """
    import torch
    from sglang.srt.kv_canary.runner.swa_divergence import (
        compute_swa_full_idx_divergence,
        compute_swa_out_of_window_tokens,
    )

    table = memory.req_to_token.astype(np.int64)
    ends = np.cumsum(step.extend_lens)
    for row, prefix, end, count in zip(step.rows, step.prefix_lens, ends, step.extend_lens, strict=True):
        if row:
            table[row, prefix : prefix + count] = step.slots[end - count : end]
    lens = (step.prefix_lens + step.extend_lens)[: step.num_requests]
    given = {
        "swa_allocator": SimpleNamespace(full_to_swa_index_mapping=torch.from_numpy(memory.lut)),
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.from_numpy(table)),
        "maybe_inaccurate_forward_batch": SimpleNamespace(
            req_pool_indices=torch.from_numpy(step.rows[: step.num_requests]), seq_lens=torch.from_numpy(lens)
        ),
    }
    return int(compute_swa_out_of_window_tokens(**given)), int(compute_swa_full_idx_divergence(**given))
