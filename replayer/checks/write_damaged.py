"""A forward left other bytes in a slot than the model handed to the cache.

Invariant: what the pool holds after a forward is what the model handed in for the last token written to the slot. Damage
done between the two is recorded as what was written, so that record and bytes agree from then on: it shows here and
nowhere else. Evidence: the forward, which holds both. Legitimate exceptions: padding; a slot that a later token of the
same forward took; streams whose submitted bytes the recording has not, which is all of them unless an adapter tells.
"""

import numpy as np

from ...recorder.state.writes import stays
from ..report.findings import Finding
from .check import Covered, HistoryCheck
from .reporting import forward_finding
from .view import ForwardView, GroupReads


class WriteDamaged(HistoryCheck):
    """Compares the bytes that a forward left with those that it was given to store."""

    covered = Covered.COMPILED  # which stops in front of a forward that has submitted bytes

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request some of whose tokens are not stored as they were handed in."""
        if not view.forward.kv_submitted:
            return []
        return [finding for group in view.groups for finding in self._damaged(view, group)]

    def _damaged(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward = view.forward
        bs = len(forward.request_ids)
        slots = group.written[: int(group.write_offsets[bs])]
        judged = stays(group.written, group.pool.group)[: len(slots)]
        streams = self._history.header.streams(forward.runner)
        differs = np.zeros(len(slots), np.bool_)
        first: dict[int, str] = {}
        for number, (index, stream) in enumerate(streams):
            if index != group.pool.index:
                continue
            stored, given = forward.kv_bytes[number][: len(slots)], forward.kv_submitted[number][: len(slots)]
            for token in np.flatnonzero(judged & (stored != given).any(axis=1)).tolist():
                differs[token] = True
                if token not in first:
                    byte = int(np.argmax(stored[token] != given[token]))
                    first[token] = (
                        f"{stream.half} of layer {stream.layer} holds {stored[token, byte]:#04x} in byte {byte}, the model "
                        f"handed in {given[token, byte]:#04x}"
                    )
        found = np.flatnonzero(differs)
        requests = np.searchsorted(group.write_offsets[1 : bs + 1], found, side="right")
        findings = []
        for request in np.unique(requests).tolist():
            mine = found[requests == request]
            token = int(mine[0])
            findings.append(
                forward_finding(
                    "write_damaged",
                    forward,
                    self._history.request_table,
                    request=request,
                    group=group.pool.index,
                    position=int(forward.positions[token]),
                    slot=int(slots[token]),
                    detail=first[token],
                    count=len(mine),
                )
            )
        return findings
