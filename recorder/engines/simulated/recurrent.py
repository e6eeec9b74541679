"""The state of recurrent layers: a slot for each row, and behind them checkpoints for nodes of the prefix cache.

A request that hits the cache can only go on from a node that has a checkpoint, which is copied into its own slot. A slot's
state is the sum of a word for each token and position that went into it.
"""

from typing import Final

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.recorder import Recorder
from ...capture.recurrent import StateAccess
from .config import EngineConfig
from .pools import WordArray
from .radix import Node

_FACTORS: Final = np.array([1, 0x9E3779B97F4A7C15], np.uint64)  # of a slot's words, which all sum up the same


class RecurrentStates:
    """`words` `[slots, 2] uint64`; slot 0 is padding, slot r the state of the request in row r."""

    def __init__(self, config: EngineConfig) -> None:
        self.words = np.zeros((config.state_slots, 2), np.uint64)
        self.recorder: Recorder | None = None
        self._rows = config.rows
        self.checkpoints: dict[Node, int] = {}  # used longest ago first

    def cut(self, path: list[Node]) -> list[Node]:
        """Return a path of the prefix cache down to the last node that has a checkpoint."""
        known = [depth for depth, node in enumerate(path, 1) if node in self.checkpoints]
        return path[: max(known, default=0)]

    def restore(self, row: int, node: Node) -> None:
        """Copy a node's checkpoint into a row's slot."""
        slot = self.checkpoints.pop(node)
        self.checkpoints[node] = slot
        self.copy(slot, row)

    def save(self, row: int, node: Node) -> None:
        """Keep a copy of a row's state as a node's checkpoint, unless it has one; in the place of the one used longest ago."""
        if node in self.checkpoints:
            return
        full = len(self.checkpoints) == len(self.words) - self._rows
        slot = self.checkpoints.pop(next(iter(self.checkpoints))) if full else self._rows + len(self.checkpoints)
        self.checkpoints[node] = slot
        self.copy(row, slot)

    def copy(self, source: int, slot: int) -> None:
        """Copy one slot to another."""
        self.words[slot] = self.words[source]
        if self.recorder is not None:
            self.recorder.state_changed("copy", pool=0, slots=[slot], sources=[source])

    def access(self, rows: Int64Array, prefix_lens: Int64Array) -> StateAccess:
        """Return which slots a batch reads and writes; a request that begins reads none."""
        return StateAccess(reads=np.where(prefix_lens > 0, rows, -1), writes=rows)

    def run(self, rows: Int64Array, prefix_lens: Int64Array, extend_lens: Int64Array, words: WordArray) -> None:
        """Let each token's word `[T] uint64` into the state of its request; all else is `[bs]`."""
        ends, access = np.cumsum(extend_lens), self.access(rows, prefix_lens)
        of_each = np.stack((access.reads, access.writes, ends - extend_lens, ends), axis=1)
        for read, write, begin, end in of_each.tolist():
            added = words[begin:end].sum(dtype=np.uint64)
            before = self.words[read] if read >= 0 else np.zeros(2, np.uint64)
            self.words[write] = before + added * _FACTORS
