"""Attention was given another slot than the block table holds, or than the forward writes, at a position that it reads.

Invariant: the slots in the attention backend's own metadata (its copy of the block table, its page indices) are those
of the request's row for the prefix and `out_cache_loc` for the tokens that the forward adds, through the full-to-SWA table
where a group has one. A copy that is overwritten in flight shows here and nowhere else: table and records stay whole.
Evidence: the forward, and what happened to the slot that was read instead. Legitimate exceptions: positions that the
forward neither reads nor writes; positions whose slot nobody told. Where the slots that a forward writes are worked out
and not observed, nothing is said of them.
"""

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import CACHED, HELD, STATE
from ...recorder.state.forward import Attention
from ..report.findings import NO_CAUSE, Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, forward_finding, happened, held_by, holder
from .view import ForwardView, GroupReads

Int64Array = npt.NDArray[np.int64]


class AttentionSlots(HistoryCheck):
    """Compares the slots that attention got with the tables as the forward finds and leaves them."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._repeats = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request of which attention got other slots."""
        got = view.forward.attention
        if (got is None or not len(got.slots)) and self._repeats.nothing_told:
            return []
        return [finding for group in view.groups for finding in self._of_group(view, group, got)]

    def _of_group(self, view: ForwardView, group: GroupReads, got: Attention | None) -> list[Finding]:
        forward, index = view.forward, group.pool.index
        flagged: dict[int, Int64Array] = {}
        wrong = np.empty(0, np.int64)
        if got is not None:
            mine = np.flatnonzero(got.groups == index)
            expected = self._expected(view, group, got.requests[mine], got.positions[mine])
            known = (expected > 0) | ((expected == 0) & (0 not in group.pool.group.padding_slots))
            differs = known & (got.slots[mine] != expected)
            wrong, expected = mine[differs], expected[differs]
            requests, slots = got.requests[wrong], got.slots[wrong]
            flagged = {int(r): slots[requests == r] for r in np.unique(requests)}
        fresh = self._repeats.new(index, forward, flagged)
        findings: list[Finding] = []
        if got is None:
            return findings
        for r in flagged:
            new = np.flatnonzero(requests == r)[fresh[r]]
            if not len(new):
                continue
            first = int(new[0])
            slot, position = int(slots[first]), int(got.positions[wrong[first]])
            what = "the block table has" if position < forward.prefix_lens[r] else "this forward writes"
            said, events, cause = self._who_has(index, slot)
            findings.append(
                forward_finding(
                    "attention_slots",
                    forward,
                    self._history.request_table,
                    request=r,
                    group=index,
                    position=position,
                    slot=slot,
                    detail=f"attention got slot {slot}{said}, {what} {int(expected[first])}",
                    count=len(new),
                    events=events,
                    cause=cause,
                )
            )
        return findings

    def _expected(
        self, view: ForwardView, group: GroupReads, requests: Int64Array, positions: Int64Array
    ) -> Int64Array:
        """Return the slot that each position of a request has after the forward, -1 where nobody told."""
        forward, pool = view.forward, group.pool.group
        rows, table = forward.req_pool_indices[requests], view.tables.req_to_token[pool.table]
        expected = np.full(len(rows), -1, np.int64)
        first = forward.prefix_lens[requests]
        inside = (rows > 0) & (rows < table.shape[0]) & (positions < np.minimum(first, table.shape[1]))
        expected[inside] = table[rows[inside], positions[inside]]
        if pool.lut >= 0:
            lut = view.tables.luts[pool.lut]
            known = (expected >= 0) & (expected < len(lut))
            expected = np.where(known, lut[np.where(known, expected, 0)], -1)
        derived = self._history.header.runners[forward.runner].derived
        own = positions - first
        written = (rows > 0) & (own >= 0) & (own < np.maximum(forward.extend_lens, 0)[requests])
        if "out_cache_loc" not in derived:
            expected[written] = group.written[group.write_offsets[requests[written]] + own[written]]
        return expected

    def _who_has(self, group: int, slot: int) -> tuple[str, list[int], Cause]:
        rows = self._history.ledger.rows[group]
        if not 0 <= slot < len(rows):
            return ", which the pool does not have", [], NO_CAUSE
        row = rows[slot]
        held = self._history.complete and row[STATE] in (HELD, CACHED)
        said, cause = (f" of {holder(row, self._history)}", held_by(row)) if held else ("", NO_CAUSE)
        return said, happened(row), cause

    def forget(self) -> None:
        """Forget what was reported."""
        self._repeats.forget()
