"""The sweep: every so many forwards, all that the prefix cache holds is named, so that it can be verified unused."""

import numpy as np
import numpy.typing as npt

from ...capture.recorder import Recorder
from .layout import DRAFT, TARGET
from .memory import KvMemory
from .radix import NO_PAGE, Node

Int64Array = npt.NDArray[np.int64]

FIRST = -1  # the slot before position 0


class Sweeper:
    """Walks the prefix cache and tells the recorder what it holds, group by group."""

    def __init__(self, recorder: Recorder, memory: KvMemory) -> None:
        self._recorder = recorder
        self._memory = memory

    def sweep(self) -> None:
        """Tell of every page that the cache holds in the pool; also where there is none, so that the walk shows."""
        memory, layout = self._memory, self._memory.layout
        nodes = [node for node in memory.cache.tree.walk() if node.page != NO_PAGE]
        slots, prev_slots, positions = self.entries(nodes)
        locked = self._each([node.lock > 0 for node in nodes])
        target: list[tuple[int, Int64Array, Int64Array, Int64Array]] = []
        if layout.full_group >= 0:
            target.append((layout.full_group, slots, prev_slots, locked))
        if layout.swa_group >= 0:
            before = np.where(prev_slots == FIRST, FIRST, memory.lut[np.maximum(prev_slots, 0)])
            in_window = self._each([node.window_lock > 0 for node in nodes])
            target.append((layout.swa_group, memory.lut[slots], before, in_window))
        self._tell(target, positions, runner=TARGET)
        if layout.draft_group >= 0:
            self._tell([(layout.draft_group, slots, prev_slots, locked)], positions, runner=DRAFT)
        memory.counters.sweeps += 1
        memory.counters.swept_slots += slots.size

    def entries(self, nodes: list[Node]) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return `(slots, previous slots, positions)` of nodes' pages, slots of the full pool."""
        size, offsets = self._memory.page_size, np.arange(self._memory.page_size, dtype=np.int64)
        pages = np.array([(node.page, node.parent.page, node.depth) for node in nodes if node.parent], np.int64)
        page, parent, depth = pages.reshape(-1, 3).T
        slots = (page[:, None] * size + offsets).reshape(-1)
        positions = ((depth - 1)[:, None] * size + offsets).reshape(-1)
        before = slots - 1
        before[::size] = np.where(depth == 1, FIRST, (parent + 1) * size - 1)
        return slots, before, positions

    def _each(self, of_pages: list[bool]) -> Int64Array:
        return np.repeat(np.array(of_pages, np.int64), self._memory.page_size)

    def _tell(
        self, parts: list[tuple[int, Int64Array, Int64Array, Int64Array]], positions: Int64Array, *, runner: int
    ) -> None:
        groups = [np.full(slots.size, group, np.int64) for group, slots, _, _ in parts]
        self._recorder.sweep(
            groups=np.concatenate(groups),
            slots=np.concatenate([slots for _, slots, _, _ in parts]),
            positions=np.tile(positions, len(parts)),
            prev_slots=np.concatenate([before for _, _, before, _ in parts]),
            locked=np.concatenate([locked for _, _, _, locked in parts]),
            runner=runner,
        )
