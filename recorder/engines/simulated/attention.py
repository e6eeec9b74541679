"""The attention backend: what its kernels get of a forward, in tensors of its own, as real backends build them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...capture.attention import row_read
from ...capture.forward_input import TableRead
from .batch import Batch
from .memory import KvMemory

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """`seq_lens`, `query_lens` `[bs]`; `reads`: for each pool the slots of the positions read, None for other runners'."""

    seq_lens: Int64Array
    query_lens: Int64Array
    reads: tuple[TableRead | None, ...]

    def slot_before(self, pool: int) -> Int64Array:
        """Return the slot of the position before each request's first query token, `[bs]`; 0 for none."""
        read = self.reads[pool]
        if read is None:
            return np.zeros_like(self.seq_lens)
        before = self.seq_lens - self.query_lens - 1 - read.starts
        places = np.cumsum(read.counts) - read.counts + before
        known = (before >= 0) & (before < read.counts)
        found: Int64Array = np.where(known, read.slots[np.where(known, places, 0)] if read.slots.size else 0, 0)
        return np.maximum(found, 0)


class AttentionBackend:
    """Builds the metadata of each forward."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def plan(self, batch: Batch) -> AttentionMetadata:
        """Return what the kernels of a forward get."""
        seq_lens = self.seq_lens(batch)
        return AttentionMetadata(
            seq_lens=seq_lens,
            query_lens=batch.extend_lens,
            reads=self.reads(batch, seq_lens),
        )

    def seq_lens(self, batch: Batch) -> Int64Array:
        """Return how many tokens each request has, those of this forward included."""
        return batch.prefix_lens + batch.extend_lens

    def first_read(self, prefix_lens: Int64Array, window: int) -> Int64Array:
        """Return the first position that each request reads of its prefix."""
        return np.maximum(prefix_lens - window, 0)

    def prefix_read(self, batch: Batch) -> TableRead:
        """Return the slots of req_to_token that attention reads of each prefix, and of a window the one before it."""
        memory = self._memory
        window = max((p.group.window for p in memory.pools if p.group.runner == batch.runner), default=0)
        starts = np.maximum(self.first_read(batch.prefix_lens, window) - 1, 0) if window else None
        return row_read(memory.req_to_token, batch.rows, batch.prefix_lens, starts=starts)

    def reads(self, batch: Batch, seq_lens: Int64Array) -> tuple[TableRead | None, ...]:
        """Return the slots of each pool that attention reads."""
        memory = self._memory
        found: list[TableRead | None] = []
        for pool in memory.pools:
            group = pool.group
            if group.runner != batch.runner:
                found.append(None)
                continue
            starts = self.first_read(seq_lens - batch.extend_lens, group.window) if group.window else None
            read = row_read(memory.req_to_token, batch.rows, seq_lens, starts=starts)
            if group.lut >= 0:
                slots = np.where(read.slots < 0, -1, memory.lut[np.maximum(read.slots, 0)])
                read = TableRead(starts=read.starts, counts=read.counts, slots=slots)
            found.append(read)
        return tuple(found)
