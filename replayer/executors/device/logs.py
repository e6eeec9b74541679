"""The violation logs of launches under way: filled on the device forward after forward, read all at once."""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.constants import VIOLATION_FIELDS
from ....kernels.ops.hash.kv_source import KvSource
from ....kernels.ops.plan_verify.reference import CanaryBuffer
from ....kernels.ops.violation_log import ViolationLog
from ....recorder.state.pools import Endpoint, GroupPool, launch_tag
from .mirror import PoolMirror

FEWEST_ROWS: Final = 1 << 16  # of a log, to begin with
MOST_ROWS: Final = 1 << 20  # unless one launch alone may find more
AT_ONCE: Final = 512  # forwards
_ENDPOINTS: Final[tuple[Endpoint, ...]] = ("HEAD", "TAIL")
# What is counted of a buffer, each at a multiple of 16 bytes: rows of verify, what it found beyond the pool, the same of write.
_COUNTS: Final = 4


@dataclass(slots=True, kw_only=True)
class GroupBuffers:
    """A group's canary buffers as verify and as write take them, in one order; `numbers` are their places in the counts."""

    names: list[tuple[Endpoint, str]]
    numbers: list[int]
    verify: list[CanaryBuffer]
    write: list[CanaryBuffer]
    plan_beyond: Any


class Logs:
    """The logs of all groups: where launches leave their rows, and which forward each row is of.

    Rows go on from forward to forward; `mark` notes how far they have come, `read` takes them all and empties the logs.
    """

    def __init__(self, pools: list[GroupPool], mirrors: list[PoolMirror], device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device
        buffers = sum(2 * len(pool.group.halves) for pool in pools)
        self._counts = torch.zeros((buffers + len(pools), _COUNTS, 2), dtype=torch.int64, device=device)
        self._marks = torch.zeros((AT_ONCE, *self._counts.shape), dtype=torch.int64, device=device)
        self._unused = torch.zeros((buffers, 2, 2), dtype=torch.int64, device=device)
        self._num_marks = 0
        self.rows = {"verify": FEWEST_ROWS, "write": FEWEST_ROWS}
        self._used = [{"verify": 0, "write": 0} for _ in pools]
        at = 0
        self.groups = []
        for pool, mirror in zip(pools, mirrors, strict=True):
            names = [(endpoint, half) for half in pool.group.halves for endpoint in _ENDPOINTS]
            numbers = list(range(at, at + len(names)))
            at += len(names)
            sides = [
                [self._buffer(pool, mirror, name, number, kind) for name, number in zip(names, numbers, strict=True)]
                for kind in ("verify", "write")
            ]
            beyond = self._counts[buffers + pool.index, 0, :1]
            self.groups.append(
                GroupBuffers(names=names, numbers=numbers, verify=sides[0], write=sides[1], plan_beyond=beyond)
            )

    def _buffer(
        self, pool: GroupPool, mirror: PoolMirror, name: tuple[Endpoint, str], number: int, kind: str
    ) -> CanaryBuffer:
        endpoint, half = name
        streams = zip(mirror.kv, pool.group.streams, strict=True)
        sources = tuple(
            KvSource(
                tensor=words.view(self._torch.uint8),
                page_size=1,
                bytes_per_token=stream.capture_bytes,
                read_bytes=stream.capture_bytes,
            )
            for words, stream in streams
            if stream.half == half and endpoint == "TAIL" and not stream.samples
        )
        return CanaryBuffer(
            canary=(mirror.head if endpoint == "HEAD" else mirror.tail)[half],
            tag=launch_tag(endpoint, half, pool.group.kind),
            sources=sources,
            kv_hash_mode=pool.kv_hash_mode,
            violations=self._log(number, kind),
            slot_counter=self._unused[number, 0, :1],
            kernel_counter=self._unused[number, 1, :1],
        )

    def _log(self, number: int, kind: str) -> ViolationLog:
        counts = self._counts[number, 0 if kind == "verify" else 2 :]
        rows = self.rows[kind]
        return ViolationLog(
            rows=self._torch.empty((rows, VIOLATION_FIELDS), dtype=self._torch.int64, device=self._device),
            entries=self._torch.empty(rows, dtype=self._torch.int64, device=self._device),
            write_index=counts[0, :1],
            out_of_range=counts[1, :1],
        )

    def has_room(self, group: int, *, entries: int, tokens: int) -> bool:
        """Whether another forward's rows find room, whatever it finds."""
        used = self._used[group]
        fits = used["verify"] + entries <= self.rows["verify"] and used["write"] + 2 * tokens <= self.rows["write"]
        return fits and self._num_marks < AT_ONCE

    def make_room(self, *, entries: int, tokens: int) -> None:
        """Grow the logs, which are empty, for a forward as large, and for several where that costs little."""
        for kind, wanted in (("verify", entries), ("write", 2 * tokens)):
            rows = max(wanted, min(8 * wanted, MOST_ROWS))
            if rows > self.rows[kind]:
                self.rows[kind] = rows
                for group in self.groups:
                    mine = group.verify if kind == "verify" else group.write
                    mine[:] = [
                        replace(buffer, violations=self._log(number, kind))
                        for buffer, number in zip(mine, group.numbers, strict=True)
                    ]

    def count(self, group: int, *, entries: int, tokens: int) -> None:
        """Note what a group's launches may leave in the logs."""
        self._used[group]["verify"] += entries
        self._used[group]["write"] += 2 * tokens

    def mark(self) -> None:
        """Note how far the logs have come with this forward's launches."""
        self._marks[self._num_marks].copy_(self._counts)
        self._num_marks += 1

    def read(self) -> "FoundRows | None":
        """Wait for all launches, take what they found, None for nothing, and empty the logs."""
        count, self._num_marks = self._num_marks, 0
        for used in self._used:
            used.update(verify=0, write=0)
        counts = self._counts.cpu().numpy()
        if not counts.any():
            return None
        marks = self._marks[:count].cpu().numpy()[..., 0]
        rows: dict[tuple[int, str], tuple[Int64Array, Int64Array]] = {}
        for group in self.groups:
            for place, number in enumerate(group.numbers):
                for kind, at in (("verify", 0), ("write", 2)):
                    end = int(counts[number, at, 0])
                    if end:
                        log = (group.verify if kind == "verify" else group.write)[place].violations
                        rows[number, kind] = (log.rows[:end].cpu().numpy(), log.entries[:end].cpu().numpy())  # type: ignore[attr-defined]  # tensors
        self._counts.zero_()
        return FoundRows(marks, rows, self.groups)


class FoundRows:
    """What launches found, forward by forward: `marks` `[forwards, buffers, counts]`, the rows of each buffer's logs."""

    def __init__(
        self, marks: Int64Array, rows: dict[tuple[int, str], tuple[Int64Array, Int64Array]], groups: list[GroupBuffers]
    ) -> None:
        self._ends = marks
        self._begins = np.concatenate([np.zeros_like(marks[:1]), marks[:-1]])
        self._rows = rows
        self._groups = groups

    def any_of(self, forward: int) -> bool:
        """Whether a forward's launches found anything."""
        return not np.array_equal(self._begins[forward], self._ends[forward])

    def log(self, forward: int, group: int, endpoint: Endpoint, half: str, kind: str) -> ViolationLog | None:
        """Return the rows of one launch, of `kind` "verify" or "write", None for none."""
        mine = self._groups[group]
        number = mine.numbers[mine.names.index((endpoint, half))]
        at = 0 if kind == "verify" else 2
        begin, end = int(self._begins[forward, number, at]), int(self._ends[forward, number, at])
        if begin == end:
            return None
        rows, entries = self._rows[number, kind]
        counts = np.array([end - begin, 0], np.int64)
        return ViolationLog(
            rows=rows[begin:end], entries=entries[begin:end], write_index=counts[:1], out_of_range=counts[1:]
        )

    def out_of_range(self, forward: int, group: int) -> bool:
        """Whether a forward's launches asked for a slot or a table entry that there is not."""
        mine = self._groups[group]
        found = (self._ends - self._begins)[forward]
        beyond = len(self._ends[0]) - len(self._groups) + group
        return bool(found[mine.numbers][:, [1, 3]].any()) or bool(found[beyond, 0])
