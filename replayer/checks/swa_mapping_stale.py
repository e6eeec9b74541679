"""Two full slots that a forward uses lead to one sliding-window slot, or one inside the window leads nowhere.

Invariant: the full-to-SWA table is one to one over the slots that a forward reads within its window and writes, and
none of those it reads leads to slot 0. A recycled slot that keeps its old entry shows here. Evidence: the forward, and
the SWA slot's allocation and last write. Legitimate exceptions: requests that share a prefix share its full slots, too;
a table entry moved by de-duplication leaves 0 behind at a full slot that nobody uses any more; tokens of a long chunk
that are past the window already when it is written go to slot 0. A free or foreign SWA slot is for the read and write
checks to find.
"""

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.swa_partners import shared_halves
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck
from .history import History
from .reporting import Repeats, entry_findings, happened
from .view import ForwardView, GroupReads

Int64Array = npt.NDArray[np.int64]


class SwaMappingStale(HistoryCheck):
    """Looks at every group that is reached through a full-to-SWA table."""

    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._serial = 0
        groups = history.header.groups
        self._partners = {
            index: np.zeros((group.num_slots, 2), np.int64) for index, group in enumerate(groups) if group.lut >= 0
        }
        self._shared, self._nowhere = Repeats(), Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that uses a stale entry."""
        findings = []
        for group in view.groups:
            if group.pool.index in self._partners:
                findings += self._shared_slots(view, group)
                # After a gap the rebuilt table may lack entries that the engine's has.
                if not self._history.had_gap:
                    findings += self._leads_nowhere(view, group)
        return findings

    def _shared_slots(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward, index = view.forward, group.pool.index
        self._serial += 1
        written_full = forward.out_cache_loc[group.pool.group.table]
        slots, table = group.slots, view.tables.req_to_token[group.pool.group.table]
        found = shared_halves(
            slots=slots,
            positions=group.positions,
            offsets=group.plan.request_offsets,
            rows=forward.req_pool_indices,
            table=table,
            written=group.written,
            written_full=written_full,
            end=int(group.write_offsets[len(forward.request_ids)]),
            serial=self._serial,
            partners=self._partners[index],
            backend=self._history.backend,
        )
        reads, writes = found[found < len(slots)], found[found >= len(slots)] - len(slots)
        group.mark(reads)
        requests = np.append(
            self._readers(forward.request_ids, group, reads), _writers(forward.request_ids, group, writes)
        )
        at = np.append(slots[reads], group.written[writes])
        full = np.append(
            table[forward.req_pool_indices[requests[: len(reads)]], group.positions[reads]], written_full[writes]
        )

        def explain(row: Int64Array, number: int) -> tuple[str, list[int], Cause]:
            other = int(self._partners[index][at[number], 1])
            detail = f"full slots {other} and {int(full[number])} lead to SWA slot {int(at[number])}"
            return detail, happened(row), Cause("swa_slot_shared")

        return entry_findings(
            "swa_mapping_stale",
            forward,
            group,
            requests=requests,
            positions=np.append(group.positions[reads], forward.positions[writes]),
            slots=at,
            entries=np.arange(len(at)),
            ledger=self._history.ledger.rows[index],
            history=self._history,
            repeats=self._shared,
            explain=explain,
        )

    def _leads_nowhere(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward, lut = view.forward, view.tables.luts[group.pool.group.lut]
        entries = np.flatnonzero(group.slots == 0)
        table = view.tables.req_to_token[group.pool.group.table]
        if not len(entries) or not table.size or not len(lut):
            return []
        requests = self._readers(forward.request_ids, group, entries)
        rows, positions = forward.req_pool_indices[requests], group.positions[entries]
        inside = (rows > 0) & (rows < table.shape[0]) & (positions >= 0) & (positions < table.shape[1])
        full = np.where(inside, table[np.where(inside, rows, 0), np.where(inside, positions, 0)], 0).astype(np.int64)
        known = (full > 0) & (full < len(lut))
        nowhere = known & (lut[np.where(known, full, 0)] == 0)
        if not nowhere.any():
            self._nowhere.forget()
            return []

        def explain(row: Int64Array, number: int) -> tuple[str, list[int], Cause]:
            del row
            detail = f"full slot {int(full[number])}, inside the window, leads to no SWA slot"
            return detail, [], Cause("swa_slot_missing")

        return entry_findings(
            "swa_mapping_stale",
            forward,
            group,
            requests=requests[nowhere],
            positions=positions[nowhere],
            slots=full[nowhere],
            entries=np.flatnonzero(nowhere),
            ledger=np.zeros((len(lut), 1), np.int64),
            history=self._history,
            repeats=self._nowhere,
            explain=explain,
        )

    def _readers(self, request_ids: Int64Array, group: GroupReads, entries: Int64Array) -> Int64Array:
        return np.searchsorted(group.plan.request_offsets[1 : len(request_ids) + 1], entries, side="right")

    def forget(self) -> None:
        """Forget what was reported."""
        self._shared.forget()
        self._nowhere.forget()


def _writers(request_ids: Int64Array, group: GroupReads, tokens: Int64Array) -> Int64Array:
    return np.searchsorted(group.write_offsets[1 : len(request_ids) + 1], tokens, side="right")
