"""A walk of vLLM's prefix cache: every block that it holds, so that damage is found before a request reads it."""

import numpy as np

from ...capture.host_arrays import Int64Array
from ...capture.recorder import Recorder
from .blocks import BlockHistory, CachedBlock
from .layout import Layout


class PrefixCacheWalk:
    """Walks the cache every `interval` forwards, 0 never; what it holds is known from the slot history."""

    def __init__(self, history: BlockHistory | None, layout: Layout, interval: int, recorder: Recorder) -> None:
        self._history = history
        self._layout = layout
        self._interval = interval
        self._recorder = recorder
        self._left = interval

    def after_step(self, forwards: int) -> None:
        """Count the forwards of a step, and walk where it is time."""
        if not self._interval or self._history is None:
            return
        self._left -= forwards
        if self._left <= 0:
            self._left = self._interval
            self._walk(self._history)

    def _walk(self, history: BlockHistory) -> None:
        own = len(self._layout.groups)  # a draft's own group comes behind them
        parts = [
            self._block(history, block, known) for block, known in sorted(history.cached.items()) if known.group < own
        ]
        if not parts:  # told all the same: that it was looked at is what a replay wants to know
            self._recorder.sweep(groups=[], slots=[], positions=[], prev_slots=[], locked=[])
            return
        groups, slots, positions, previous, locked = (np.concatenate(column) for column in zip(*parts, strict=True))
        self._recorder.sweep(groups=groups, slots=slots, positions=positions, prev_slots=previous, locked=locked)

    def _block(self, history: BlockHistory, block: int, known: CachedBlock) -> tuple[Int64Array, ...]:
        """Return group, slot, position, slot of the position before, and lock of each token of a block."""
        size = self._layout.groups[known.group].block_size
        slots = block * size + np.arange(size, dtype=np.int64)
        previous = slots - 1
        before = history.cached.get(known.before)
        if not known.first:
            previous[0] = -1
        elif before is not None and before.serial == known.before_serial:
            previous[0] = known.before * size + size - 1
        else:  # the cache has given up the block before: nothing is known of it
            previous[0] = 0
        return (
            np.full(size, known.group, np.int64),
            slots,
            known.first + np.arange(size, dtype=np.int64),
            previous,
            np.full(size, int(history.in_use(block)), np.int64),
        )
