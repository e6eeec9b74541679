"""A forward's batch: requests, tokens, positions, slots, padding; and what attention gets for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....kernels.arrays import Int32Array, Int64Array
from ...capture.attention import row_read
from ...capture.forward_input import AttentionInput, TableRead
from ...capture.host_arrays import ragged_index
from ...trace.schema import Mode
from .config import EngineConfig
from .memory import KvMemory
from .requests import Request

NO_REQUEST = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a forward gets, padding included; `bs` rows, `T` tokens. The first `len(requests)` rows are requests."""

    mode: Mode
    runner: int
    requests: Sequence[Request]
    rows: Int64Array  # [bs]
    request_ids: Int64Array  # [bs]
    prefix_lens: Int64Array  # [bs]
    extend_lens: Int64Array  # [bs]
    input_ids: Int64Array  # [T]
    positions: Int64Array  # [T]
    slots: Int64Array  # [T], of the full pool
    truth: Int32Array  # [sum(truth_lens)]
    truth_lens: Int64Array  # [bs]

    @property
    def num_tokens(self) -> int:
        """Tokens of requests, padding not counted."""
        return int(self.extend_lens[: len(self.requests)].sum())

    @property
    def last_tokens(self) -> Int64Array:
        """Index of each request's last token, `[len(requests)] int64`."""
        return np.cumsum(self.extend_lens)[: len(self.requests)] - 1


class BatchBuilder:
    """Puts batches together. Each thing that a forward is fed has a method of its own."""

    def __init__(self, config: EngineConfig, req_to_token: Int32Array) -> None:
        self._sizes = tuple(sorted(config.graph_batch_sizes))
        self._req_to_token = req_to_token

    def build(
        self,
        mode: Mode,
        requests: Sequence[Request],
        *,
        prefix_lens: Sequence[int],
        tokens: Sequence[Int32Array],
        runner: int = 0,
        padded: bool = False,
    ) -> Batch:
        """Return the batch in which `requests[r]` gets `tokens[r]` behind its `prefix_lens[r]` cached tokens. With
        `padded` it has the captured batch size next to its own, if there is one.
        """
        bs = len(requests)
        extra = next((size - bs for size in self._sizes if size >= bs), 0) if padded and bs else 0
        per_row = max(map(len, tokens)) if extra else 0

        def of_requests(values: Sequence[int], padding: int = 0) -> Int64Array:
            return np.array([*values, *[padding] * extra], np.int64)

        def of_tokens(values: Int64Array) -> Int64Array:
            return np.append(values, np.zeros(extra * per_row, np.int64))

        rows, extend = of_requests([request.row for request in requests]), [len(part) for part in tokens]
        prefix = of_requests(prefix_lens)
        laid_out = prefix[:bs], np.array(extend, np.int64)
        slots = self.out_cache_loc(rows[:bs], *laid_out)
        truth = [request.known_tokens for request in requests]
        return Batch(
            mode=mode,
            runner=runner,
            requests=requests,
            rows=rows,
            request_ids=of_requests([request.request_id for request in requests], NO_REQUEST),
            prefix_lens=prefix,
            extend_lens=of_requests(extend, per_row),
            input_ids=of_tokens(np.concatenate(tokens, dtype=np.int64) if bs else np.empty(0, np.int64)),
            positions=of_tokens(self.positions(*laid_out)),
            slots=np.append(slots, self.padding_slots(extra * per_row)) if extra else slots,
            truth=np.concatenate(truth) if bs else np.empty(0, np.int32),
            truth_lens=of_requests([request.num_tokens for request in requests]),
        )

    def positions(self, prefix_lens: Int64Array, extend_lens: Int64Array) -> Int64Array:
        """Return the position of each token."""
        return ragged_index(prefix_lens, extend_lens)

    def out_cache_loc(self, rows: Int64Array, prefix_lens: Int64Array, extend_lens: Int64Array) -> Int64Array:
        """Return the slot that each token is written to, which the allocator has put in the table before."""
        places = ragged_index(prefix_lens, extend_lens)
        return self._req_to_token[np.repeat(rows, extend_lens), places].astype(np.int64)

    def padding_slots(self, count: int) -> Int64Array:
        """Return the slots that padding tokens are written to."""
        return np.zeros(count, np.int64)


def slot_before(attention: AttentionInput, pool: int) -> Int64Array:
    """Return the slot of the position before each request's first query token, `[bs]`; 0 for none."""
    read, seq_lens = attention.slots[pool], np.asarray(attention.seq_lens)
    if read is None or not read.slots.size:
        return np.zeros_like(seq_lens)
    before = seq_lens - attention.query_lens - 1 - read.starts
    places = np.cumsum(read.counts) - read.counts + before
    known = (before >= 0) & (before < read.counts)
    return np.maximum(np.where(known, read.slots[np.where(known, places, 0)], 0), 0)


class AttentionBackend:
    """Builds what attention gets in each forward."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory

    def plan(self, batch: Batch) -> AttentionInput:
        """Return what the kernels of a forward get."""
        seq_lens = self.seq_lens(batch)
        return AttentionInput(seq_lens=seq_lens, query_lens=batch.extend_lens, slots=self.reads(batch, seq_lens))

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
        """Return the slots of each pool that attention reads, None for other runners' pools."""
        memory = self._memory
        found: list[TableRead | None] = [None] * len(memory.pools)
        for pool in memory.pools:
            group = pool.group
            if group.runner == batch.runner:
                starts = self.first_read(seq_lens - batch.extend_lens, group.window) if group.window else None
                read = row_read(memory.req_to_token, batch.rows, seq_lens, starts=starts)
                if group.lut >= 0:
                    slots = np.where(read.slots < 0, -1, memory.lut[np.maximum(read.slots, 0)])
                    read = replace(read, slots=slots)
                found[pool.index] = read
        return tuple(found)
