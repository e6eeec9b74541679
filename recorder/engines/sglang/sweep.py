"""What SGLang's prefix cache holds, walked with the walker of its own canary, at the very steps of its sweep."""

from typing import Any

import numpy as np

from ...capture.device.recorder import DeviceRecorder
from ...capture.forward_input import translate
from ...capture.host_arrays import own_int64
from ...capture.recorder import Recorder
from .layout import Layout, RunnerLayout, online_sweep_interval


class PrefixCacheWalk:
    """Walks the prefix cache every so many target forwards; where the engine's own canary sweeps, right after it."""

    def __init__(
        self, target: Any, tree_cache: Any, layout: Layout, every: int, recorder: Recorder | DeviceRecorder
    ) -> None:
        self._target = target
        self._tree_cache = tree_cache
        self._layout = layout
        self._runner: RunnerLayout = layout.runners[id(target)]
        self._recorder = recorder
        self._online = online_sweep_interval(target) > 0
        self._every = every
        self._forwards = 0
        self._passes = self._online_passes()
        self._walk: Any = self._walker() if self._online or every else None

    @property
    def walks(self) -> bool:
        """Whether the prefix cache is walked at all."""
        return self._walk is not None

    def _walker(self) -> Any:
        from sglang.srt.kv_canary.radix_cache_walker import walk_radix_cache_for_canary

        return walk_radix_cache_for_canary

    def _online_passes(self) -> int:
        sweeps = getattr(getattr(self._target, "canary_manager", None), "_sweep_orchestrator", None)
        return int(getattr(sweeps, "sweep_passes", 0))

    def after_forward(self) -> None:
        """Walk if it is time; called after each forward of the target, at its very end.

        Raises:
            NotImplementedError: this SGLang's walker does not know the prefix cache's type.
        """
        if self._walk is None:
            return
        if self._online:
            passes = self._online_passes()
            due, self._passes = passes != self._passes, passes
        else:
            due = self._forwards % self._every == 0
        self._forwards += 1
        if due:
            self._tell(self._walk(radix_cache=self._tree_cache, unlocked_only=False))

    def _tell(self, found: Any) -> None:
        slots = own_int64(found.slot_indices)
        positions, prev = own_int64(found.positions), own_int64(found.prev_slot_indices)
        unlocked = self._walk(radix_cache=self._tree_cache, unlocked_only=True)
        locked = (~np.isin(slots, own_int64(unlocked.slot_indices))).astype(np.int64)
        parts = []
        for number in self._runner.groups.values():
            lut = self._layout.groups[number].lut
            table = self._layout.luts[lut] if lut >= 0 else None
            own = np.full(slots.size, number, np.int64), translate(table, slots), positions
            parts.append((*own, np.where(prev < 0, prev, translate(table, prev)), locked))
        groups, own_slots, at, before, held = (np.concatenate(column) for column in zip(*parts, strict=True))
        self._recorder.sweep(
            groups=groups, slots=own_slots, positions=at, prev_slots=before, locked=held, runner=self._runner.index
        )
