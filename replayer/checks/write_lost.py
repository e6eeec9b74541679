"""A forward wrote a token into a slot, and the slot's KV bytes are still those of another token.

Invariant: what a forward leaves in a slot that it writes is not, byte for byte, what another token had left there. A
kernel that skips a token shows here and nowhere else: the stale bytes are recorded as those written, and record and
bytes agree from then on. Evidence: the forward, and the write before it. Legitimate exceptions: the same token written
again, since the first layer's V depends on nothing else; unknown tokens (-1); slots that hold only zeros; slots that
nobody has written in this trace.
"""

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import record_words
from ...kernels.constants import RECORD_TOKEN, UNKNOWN_TOKEN
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .reporting import forward_finding
from .view import ForwardView, GroupReads

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


class WriteLost(HistoryCheck):
    """Compares what each write left with what was there before."""

    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request whose tokens left no trace in some of their slots."""
        streams = self._history.header.streams(view.forward.runner)
        findings = []
        for group in view.groups:
            numbers = [number for number, (index, _) in enumerate(streams) if index == group.pool.index]
            if numbers:
                findings += self._lost(view, group, [view.forward.kv_bytes[number] for number in numbers])
        return findings

    def _lost(self, view: ForwardView, group: GroupReads, written: list[ByteArray]) -> list[Finding]:
        forward, pool = view.forward, group.pool.pool
        bs = len(forward.request_ids)
        slots = group.written[: int(group.write_offsets[bs])]
        known = (slots > 0) & (slots < group.pool.num_slots)
        at = np.where(known, slots, 0)
        known &= (pool.writers[at, 0] > 0) & ~pool.unknown[at]
        tokens = record_words(pool.tail[group.pool.group.halves[0]], written=False)[at, RECORD_TOKEN]
        fed = forward.input_ids[: len(slots)]
        other = np.flatnonzero(known & (tokens != fed) & (tokens != UNKNOWN_TOKEN) & (fed != UNKNOWN_TOKEN))
        if not len(other):
            return []
        stale = np.zeros(len(other), np.bool_)
        for before, after in zip(pool.kv, written, strict=True):
            rows = before[at[other]]
            stale |= (rows == after[other]).all(axis=1) & rows.any(axis=1)
        lost = other[stale]
        requests = np.searchsorted(group.write_offsets[1 : bs + 1], lost, side="right")
        findings = []
        for request in np.unique(requests):
            mine = lost[requests == request]
            token, slot = int(mine[0]), int(slots[mine[0]])
            event = int(pool.writers[slot, 0]) - 1
            findings.append(
                forward_finding(
                    "write_lost",
                    forward,
                    self._history.request_table,
                    request=int(request),
                    group=group.pool.index,
                    position=int(forward.positions[token]),
                    slot=slot,
                    detail=f"wrote token {forward.input_ids[token]}, the bytes are still those of token {tokens[token]}, "
                    f"written in event {event}",
                    count=len(mine),
                    events=[event],
                    cause=Cause(token=int(tokens[token]), expected_token=int(forward.input_ids[token])),
                )
            )
        return findings
