"""The machine in device memory: tables, records, bytes and writers, and how slots of it come to the host and back."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import record_words
from ....kernels.constants import RECORD_KV_HASH, UNKNOWN_TOKEN, KvHashMode
from ....kernels.gpu import step
from ....kernels.ops.hash.kv_source import fold_kv
from ....recorder.state.pools import GroupPool
from ....recorder.state.tables import StateTables
from ....recorder.trace.header import TraceHeader
from .host_hashes import carried_hashes

Int64Array = npt.NDArray[np.int64]
_AT_ONCE = 1 << 20  # slots


class UnlikeRecordsError(Exception):
    """HEAD and TAIL, K and V of a slot hold other tokens, positions or chain hashes: nothing that a kernel here knows."""


@dataclass(slots=True, kw_only=True)
class PoolOnDevice:
    """One group's pool; `slots` of it, all tensors.

    `records` `[slots, 4] int64`: token, position, prev_hash and the hash that a successor carries, of every half alike;
    `stored` and `now` map a half to `[slots] int64`: the KV hashes in the TAIL records, and those of the bytes as they
    are; `kv` `[slots, words] int64` a stream; `stamps`, `all_stamps` `[slots] int64`.
    """

    records: Any
    stamps: Any
    all_stamps: Any
    writers: Any
    unknown: Any
    kv: list[Any]
    stored: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)


def why_not(header: TraceHeader) -> str:
    """Return why the kernels cannot step such a trace, empty where they can."""
    if len(header.tables) > step.MAX_TABLES:
        return f"{len(header.tables)} block tables"
    for number, runner in enumerate(header.runners):
        groups = [group for group in header.groups if group.runner == number]
        streams = sum(len(group.streams) for group in groups)
        if len(groups) > step.MAX_GROUPS or streams > step.MAX_STREAMS:
            return f"{len(groups)} pool groups with {streams} streams of runner {runner.name}"
    return ""


class DeviceState:
    """All that the kernels change; `machines` `[runners, MACHINE_WORDS] int64` tells them where it lies."""

    def __init__(self, header: TraceHeader, pools: list[GroupPool], device: Any) -> None:
        import torch

        self.device = device
        self.header = header
        self._torch = torch
        self._modes = [pool.kv_hash_mode for pool in pools]
        int64 = {"dtype": torch.int64, "device": device}
        int32 = {"dtype": torch.int32, "device": device}
        self.tables = [torch.zeros((table.rows, table.width), **int32) for table in header.tables]
        self.luts = [torch.zeros(length, **int64) for length in header.lut_lens]
        truth = header.truth_table
        self.truth = None if truth is None else torch.zeros((truth.rows, truth.width), **int32)
        self.row_stamps = torch.zeros(max((table.rows for table in header.tables), default=1), **int64)
        self.pools = [self._allocate(pool, int64) for pool in pools]
        words = np.array([self._machine(runner) for runner in range(len(header.runners))], np.int64)
        self.machines = torch.from_numpy(words).to(device)

    def _allocate(self, pool: GroupPool, int64: dict[str, Any]) -> PoolOnDevice:
        zeros, count = self._torch.zeros, pool.num_slots
        made = PoolOnDevice(
            records=zeros((count, 4), **int64),
            stamps=zeros(count, **int64),
            all_stamps=zeros(count, **int64),
            writers=zeros((count, 3), **int64),
            unknown=zeros(count, dtype=self._torch.uint8, device=self.device),
            kv=[zeros((count, stream.capture_bytes // 8), **int64) for stream in pool.group.streams],
        )
        if pool.kv_hash_mode is not KvHashMode.NONE:
            for half in pool.group.halves:
                made.stored[half], made.now[half] = zeros(count, **int64), zeros(count, **int64)
        return made

    def groups_of(self, runner: int) -> list[int]:
        """Return the indices of a runner's groups, in the order in which its machine has them."""
        return [index for index, group in enumerate(self.header.groups) if group.runner == runner]

    def _machine(self, runner: int) -> list[int]:
        header = self.header
        words = [0] * step.MACHINE_WORDS
        groups = self.groups_of(runner)
        words[step.MACHINE_GROUPS] = len(groups)
        words[step.MACHINE_TABLES] = len(self.tables)
        words[step.MACHINE_ROW_STAMPS] = self.row_stamps.data_ptr()
        words[step.MACHINE_NUM_ROW_STAMPS] = len(self.row_stamps)
        words[step.MACHINE_TOKEN_OFFSET] = header.runners[runner].token_offset
        if self.truth is not None:
            place = step.MACHINE_TRUTH
            words[place : place + 3] = [self.truth.data_ptr(), *self.truth.shape]
        streams: list[list[int]] = []
        before = 0
        for number, index in enumerate(groups):
            at = step.POOLS_AT + number * step.POOL_WORDS
            words[at : at + step.POOL_WORDS] = self._pool_words(index)
            pool, mode = self.pools[index], self._modes[index]
            for stream, tensor in zip(header.groups[index].streams, pool.kv, strict=True):
                size = stream.capture_bytes // 8
                hashed = {KvHashMode.NONE: 0, KvHashMode.PARTIAL: 2, KvHashMode.ALL: size}[mode]
                half = header.groups[index].halves.index(stream.half)
                streams.append([tensor.data_ptr(), size, number, half, before, hashed])
                before += size
        words[step.MACHINE_STREAMS] = len(streams)
        for number, values in enumerate(streams):
            at = step.STREAMS_AT + number * step.STREAM_WORDS
            words[at : at + len(values)] = values
        for number, table in enumerate(self.tables):
            at = step.TABLES_AT + number * step.TABLE_WORDS
            words[at : at + 3] = [table.data_ptr(), *table.shape]
        return words

    def _pool_words(self, index: int) -> list[int]:
        group, pool = self.header.groups[index], self.pools[index]
        table = self.tables[group.table]
        shared = any(other.table == group.table and not other.window for other in self.header.groups)
        words = [0] * step.POOL_WORDS
        words[step.POOL_TABLE] = table.data_ptr()
        words[step.POOL_TABLE_WIDTH] = table.shape[1]
        words[step.POOL_TABLE_INDEX] = group.table
        words[step.POOL_WINDOW] = group.window
        if group.lut >= 0:
            words[step.POOL_LUT], words[step.POOL_LUT_LEN] = self.luts[group.lut].data_ptr(), len(self.luts[group.lut])
        words[step.POOL_SLOTS] = group.num_slots
        words[step.POOL_RECORDS] = pool.records.data_ptr()
        words[step.POOL_STAMPS] = pool.stamps.data_ptr()
        words[step.POOL_ALL_STAMPS] = pool.all_stamps.data_ptr()
        words[step.POOL_WRITERS] = pool.writers.data_ptr()
        words[step.POOL_UNKNOWN] = pool.unknown.data_ptr()
        words[step.POOL_RING] = int(group.reads_before_write)
        words[step.POOL_FULL_STARTS] = int(shared)
        for number, half in enumerate(group.halves):
            if half in pool.stored:
                at = step.POOL_HALVES + number * step.POOL_HALF_WORDS
                words[at : at + 2] = [pool.stored[half].data_ptr(), pool.now[half].data_ptr()]
        return words

    def pull_slots(self, pool: GroupPool, slots: Int64Array, *, with_bytes: bool = True) -> None:
        """Bring slots `[n] int64`, all of them the pool's, to the host, their KV bytes as well or all but them."""
        mine, tier = self.pools[pool.index], pool.pool
        for first in range(0, len(slots), _AT_ONCE):
            some = slots[first : first + _AT_ONCE]
            where = self._torch.from_numpy(some).to(self.device)
            records = mine.records[where].cpu().numpy()
            records[:, RECORD_KV_HASH] = 0
            for half in pool.group.halves:
                record_words(tier.head[half], written=True)[some] = records
                if half in mine.stored:
                    records[:, RECORD_KV_HASH] = mine.stored[half][where].cpu().numpy()
                record_words(tier.tail[half], written=True)[some] = records
                records[:, RECORD_KV_HASH] = 0
            for data, words in zip(tier.kv, mine.kv, strict=True) if with_bytes else ():
                data[some] = words[where].cpu().numpy().view(np.uint8)
            tier.writers[some] = mine.writers[where].cpu().numpy()
            tier.unknown[some] = mine.unknown[where].cpu().numpy() != 0

    def push_slots(self, pool: GroupPool, slots: Int64Array) -> None:
        """Bring slots `[n] int64` from the host; raise `UnlikeRecordsError` where the halves' records differ."""
        mine, tier, torch = self.pools[pool.index], pool.pool, self._torch
        for first in range(0, len(slots), _AT_ONCE):
            some = slots[first : first + _AT_ONCE]
            where = torch.from_numpy(some).to(self.device)
            base = record_words(tier.tail[pool.group.halves[0]], written=False)[some]
            self._check_alike(pool, some, base)
            records = base.copy()
            records[:, RECORD_KV_HASH] = carried_hashes(base)
            mine.records[where] = torch.from_numpy(records).to(self.device)
            for data, words in zip(tier.kv, mine.kv, strict=True):
                words[where] = torch.from_numpy(data[some].view(np.int64)).to(self.device)
            for half, stored in mine.stored.items():
                hashes = record_words(tier.tail[half], written=False)[some][:, RECORD_KV_HASH].copy()
                stored[where] = torch.from_numpy(hashes).to(self.device)
                now = np.empty(len(some), np.int64)
                fold_kv(sources=pool.sources[half], mode=pool.kv_hash_mode, slots=some, out=now)
                mine.now[half][where] = torch.from_numpy(now).to(self.device)
            mine.writers[where] = torch.from_numpy(tier.writers[some]).to(self.device)
            mine.unknown[where] = torch.from_numpy(tier.unknown[some].astype(np.uint8)).to(self.device)

    def _check_alike(self, pool: GroupPool, slots: Int64Array, base: Int64Array) -> None:
        stored = self.pools[pool.index].stored
        for half in pool.group.halves:
            head = record_words(pool.pool.head[half], written=False)[slots]
            tail = record_words(pool.pool.tail[half], written=False)[slots]
            same = np.array_equal(head[:, :3], base[:, :3]) and np.array_equal(tail[:, :3], base[:, :3])
            if not same or head[:, RECORD_KV_HASH].any() or (half not in stored and tail[:, RECORD_KV_HASH].any()):
                raise UnlikeRecordsError

    def pull_rows(self, tables: StateTables, rows: Int64Array) -> None:
        """Bring rows `[n] int64` of every block table and of the truth tokens to the host, and the full-to-SWA tables."""
        pairs = [*zip(tables.req_to_token, self.tables, strict=True)]
        if tables.truth is not None:
            pairs.append((tables.truth, self.truth))
        for here, there in pairs:
            some = rows[rows < len(here)]
            here[some] = there[self._torch.from_numpy(some).to(self.device)].cpu().numpy()
        for lut, theirs in zip(tables.luts, self.luts, strict=True):
            lut[:] = theirs.cpu().numpy()

    def push_rows(self, tables: StateTables, rows: Int64Array) -> None:
        """Bring rows `[n] int64` of every table from the host, and the full-to-SWA tables."""
        pairs = [*zip(tables.req_to_token, self.tables, strict=True)]
        if tables.truth is not None:
            pairs.append((tables.truth, self.truth))
        for here, there in pairs:
            some = rows[rows < len(here)]
            there[self._torch.from_numpy(some).to(self.device)] = self._torch.from_numpy(here[some]).to(self.device)
        for lut, theirs in zip(tables.luts, self.luts, strict=True):
            theirs.copy_(self._torch.from_numpy(lut))

    def every_row(self) -> Int64Array:
        """Return the rows of the largest table, `[n] int64`."""
        return np.arange(max([len(t) for t in self.tables] + [0 if self.truth is None else len(self.truth)]))

    def forget(self) -> None:
        """Take everything for unknown, as the host does."""
        for tensor in (*self.tables, *self.luts):
            tensor.zero_()
        if self.truth is not None:
            self.truth.fill_(UNKNOWN_TOKEN)
        for pool in self.pools:
            pool.unknown.fill_(1)
