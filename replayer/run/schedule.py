"""What the ranks of one engine were given to run must be the same on each: forward by forward, field by field.

Tensor-parallel ranks run the same requests at the same positions in the same slots. Of each forward a digest a field is
kept of the first rank replayed; the others are held against it as they are replayed.
"""

import hashlib
from collections.abc import Callable
from typing import Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.state.forward import Forward
from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import TraceHeader
from ..report.findings import Finding, forward_finding

FIELDS: Final = (
    *("mode", "req_pool_indices", "request_ids", "prefix_lens", "extend_lens"),
    *("positions", "out_cache_loc", "input_ids"),
)
_DIGEST_BYTES: Final = 8


class ScheduleLog:
    """The digests of one rank's forwards by their numbers; `requests` are all that it ran, `name` is for findings."""

    def __init__(self, name: str, header: TraceHeader) -> None:
        self.name = name
        self.plain = header.tokens == "plain"
        self.requests: set[int] = set()
        self.digests: dict[int, bytes] = {}

    def note(self, forward: Forward) -> None:
        """Keep a forward's digests."""
        self.digests[forward.forward] = digests(forward)
        self.requests |= requests_of(forward)


class Schedule:
    """One rank's part in the comparison: keeps its digests in `log`, or holds them against those of rank `other`.

    `compared` and `differing` count forwards; the first that differs is a finding, for whose words `values` gives the other
    rank's values of a forward's field. `unrelated`: nothing was alike and no request in common, as of two servers of one kind
    that record into one folder, which are not compared.
    """

    def __init__(
        self,
        header: TraceHeader,
        *,
        log: ScheduleLog | None = None,
        other: ScheduleLog | None = None,
        values: Callable[[int, str], Int64Array | str | None] | None = None,
    ) -> None:
        self.compared, self.differing, self.unrelated = 0, 0, False
        self._alike = False  # whether a forward with requests was the same on both
        self.log = log
        self.other = other
        self._plain = header.tokens == "plain"
        self._values = values

    def forward(self, forward: Forward, request_table: RequestTable) -> list[Finding]:
        """Take a forward; return a finding where it is the first that is not the other rank's."""
        if self.log is not None:
            self.log.note(forward)
        if self.other is None or self.unrelated or (theirs := self.other.digests.get(forward.forward)) is None:
            return []
        differs = np.frombuffer(digests(forward), np.uint64) != np.frombuffer(theirs, np.uint64)
        if not (self._plain and self.other.plain):  # each process salts its own hashes
            differs[FIELDS.index("input_ids")] = False
        mine = requests_of(forward)
        if not differs.any():
            self.compared += 1
            self._alike |= bool(mine)
            return []
        if not self._alike and not self.differing and mine.isdisjoint(self.other.requests):
            self.unrelated, self.compared = bool(mine), 0  # before the first request nobody can tell
            return []
        self.compared += 1
        self.differing += 1
        if self.differing > 1:
            return []
        return [self._finding(forward, [FIELDS[i] for i in np.flatnonzero(differs)], self.other.name, request_table)]

    def _finding(self, forward: Forward, fields: list[str], other: str, request_table: RequestTable) -> Finding:
        detail = f"is not what {other} ran as forward {forward.forward}: {', '.join(fields)} differ"
        theirs = self._values(forward.forward, fields[0]) if self._values is not None else None
        mine = field_values(forward, fields[0])
        request, position, slot = -1, -1, -1
        if isinstance(theirs, str) and isinstance(mine, str):
            detail += f"; {fields[0]} is {mine} here, {theirs} there"
        elif isinstance(theirs, np.ndarray) and isinstance(mine, np.ndarray):
            if len(theirs) != len(mine):
                detail += f"; {fields[0]} has {len(mine)} values here, {len(theirs)} there"
            elif (theirs != mine).any():
                at = int(np.flatnonzero(theirs != mine)[0])
                detail += f"; {fields[0]}[{at}] is {mine[at]} here, {theirs[at]} there"
                request, position, slot = _whose(forward, fields[0], at)
        return forward_finding(
            "ranks_disagree", forward, detail, request_table, request=request, position=position, slot=slot
        )


def requests_of(forward: Forward) -> set[int]:
    """Return the ids of a forward's requests, without its padding."""
    return set(forward.request_ids[forward.req_pool_indices != 0].tolist())


def digests(forward: Forward) -> bytes:
    """Return a digest of each field of a forward, one behind the other."""
    values = [field_values(forward, name) for name in FIELDS]
    data = [value.encode() if isinstance(value, str) else value.tobytes() for value in values]
    return b"".join(hashlib.blake2b(one, digest_size=_DIGEST_BYTES).digest() for one in data)


def field_values(forward: Forward, name: str) -> Int64Array | str:
    """Return a field of a forward as it is compared."""
    if name == "mode":
        return f"{forward.mode} (runner {forward.runner})"
    if name == "out_cache_loc":
        return np.concatenate([np.empty(0, np.int64), *forward.out_cache_loc])
    value: Int64Array = getattr(forward, name)
    return value


def _whose(forward: Forward, name: str, at: int) -> tuple[int, int, int]:
    """Return which request, position and slot entry `at` of a field belongs to, -1 for none."""
    bs = len(forward.request_ids)
    if name in ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens"):
        return at, int(forward.prefix_lens[at]), -1
    token = at % max(forward.num_tokens, 1)
    ends = np.cumsum(np.where(forward.req_pool_indices == 0, 0, np.maximum(forward.extend_lens, 0)))
    request = int(np.searchsorted(ends, token, side="right"))
    slot = int(forward.out_cache_loc[0][token]) if forward.out_cache_loc else -1
    return (request if request < bs else -1), int(forward.positions[token]), slot
