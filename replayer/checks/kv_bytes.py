"""What a forward left in the slots that it writes, byte for byte."""

import numpy as np

from ...kernels.arrays import ByteArray, record_words
from ...kernels.constants import RECORD_TOKEN, UNKNOWN_TOKEN
from ...recorder.state.writes import stays
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, by_request, register
from .view import ForwardView, GroupReads


@register
class WriteLost(HistoryCheck):
    """A forward wrote a token into a slot, and the slot's KV bytes are still those of another token.

    Invariant: what a forward leaves in a slot that it writes is not, byte for byte, what another token had left there. A
    kernel that skips a token shows here and nowhere else: the stale bytes are recorded as those written, and record and
    bytes agree from then on. Evidence: the forward, and the write before it. Legitimate exceptions: the same token written
    again, since the first layer's V depends on nothing else; unknown tokens (-1); slots that hold only zeros; slots that
    nobody has written in this trace.
    """

    kind = "write_lost"
    finds = "a forward wrote a token, and the slot's bytes are still those of another one"
    covered = Covered.COMPILED

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request whose tokens left no trace in some of their slots."""
        streams, findings = self.history.header.streams(view.forward.runner), []
        for group in view.groups:
            left = [view.forward.kv_bytes[n] for n, (index, _) in enumerate(streams) if index == group.pool.index]
            if left:
                findings += self._lost(view, group, left)
        return findings

    def _lost(self, view: ForwardView, group: GroupReads, left: list[ByteArray]) -> list[Finding]:
        forward, pool, slots = view.forward, group.pool.pool, group.request_slots
        known = (slots > 0) & (slots < group.pool.num_slots)
        at = np.where(known, slots, 0)
        known &= (pool.writers[at, 0] > 0) & ~pool.unknown[at]
        tokens = record_words(pool.tail[group.pool.group.halves[0]], written=False)[at, RECORD_TOKEN]
        fed = forward.input_ids[: len(slots)]
        other = np.flatnonzero(known & (tokens != fed) & (tokens != UNKNOWN_TOKEN) & (fed != UNKNOWN_TOKEN))
        if not len(other):
            return []
        stale = np.zeros(len(other), np.bool_)
        for before, after in zip(pool.kv, left, strict=True):
            rows = before[at[other]]
            stale |= (rows == after[other]).all(axis=1) & rows.any(axis=1)
        lost, findings = other[stale], []
        for request, mine in by_request(group.writers(lost), lost):
            token, slot = int(mine[0]), int(slots[mine[0]])
            event = int(pool.writers[slot, 0]) - 1
            findings.append(
                self.of_request(
                    forward,
                    request,
                    f"wrote token {fed[token]}, the bytes are still those of token {tokens[token]}, written in event {event}",
                    group=group.pool.index,
                    position=int(forward.positions[token]),
                    slot=slot,
                    count=len(mine),
                    events=[event],
                    cause=Cause(token=int(tokens[token]), expected_token=int(fed[token])),
                )
            )
        return findings


@register
class WriteDamaged(HistoryCheck):
    """A forward left other bytes in a slot than the model handed to the cache.

    Invariant: what the pool holds after a forward is what the model handed in for the last token written to the slot. Damage
    done between the two is recorded as what was written, so that record and bytes agree from then on: it shows here and
    nowhere else. Evidence: the forward, which holds both. Legitimate exceptions: padding; a slot that a later token of the
    same forward took; streams whose submitted bytes the recording has not, which is all of them unless an adapter records
    them.
    """

    kind = "write_damaged"
    finds = "a forward left other bytes in a slot than the model handed to the cache"
    covered = Covered.COMPILED  # which stops in front of a forward that has submitted bytes

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request some of whose tokens are not stored as they were handed in."""
        if not view.forward.kv_submitted:
            return []
        return [finding for group in view.groups for finding in self._damaged(view, group)]

    def _damaged(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward, slots = view.forward, group.request_slots
        judged = stays(group.written, group.pool.group)[: len(slots)]
        first: dict[int, str] = {}
        for number, (index, stream) in enumerate(self.history.header.streams(forward.runner)):
            if index != group.pool.index:
                continue
            stored, given = forward.kv_bytes[number][: len(slots)], forward.kv_submitted[number][: len(slots)]
            for token in np.flatnonzero(judged & (stored != given).any(axis=1)).tolist():
                byte = int(np.argmax(stored[token] != given[token]))
                what = f"{stream.half} of layer {stream.layer} holds {stored[token, byte]:#04x} in byte {byte}"
                first.setdefault(token, f"{what}, the model handed in {given[token, byte]:#04x}")
        found = np.array(sorted(first), np.int64)
        return [
            self.of_request(
                forward,
                request,
                first[int(mine[0])],
                group=group.pool.index,
                position=int(forward.positions[mine[0]]),
                slot=int(slots[mine[0]]),
                count=len(mine),
            )
            for request, mine in by_request(group.writers(found), found)
        ]
