"""Entries of the full-to-SWA table that have outlived their slot."""

import numpy as np

from ...kernels.replay_pass.swa_partners import shared_halves
from ..report.findings import Cause, Finding
from .check import Covered, Explained, HistoryCheck, Repeats, happened, register
from .history import History
from .view import ForwardView, GroupReads


@register
class SwaMappingStale(HistoryCheck):
    """Two full slots that a forward uses lead to one sliding-window slot, or one inside the window leads nowhere.

    Invariant: the full-to-SWA table is one to one over the slots that a forward reads within its window and writes, and
    none of those it reads leads to slot 0. A recycled slot that keeps its old entry shows here. Evidence: the forward, and
    the SWA slot's allocation and last write. Legitimate exceptions: requests that share a prefix share its full slots, too;
    a table entry moved by de-duplication leaves 0 behind at a full slot that nobody uses any more; tokens of a long chunk
    that are past the window already when it is written go to slot 0. A free or foreign SWA slot is for the read and write
    checks to find.
    """

    kind = "swa_mapping_stale"
    finds = "two full slots in use lead to one SWA slot, or one inside the window leads nowhere"
    covered = Covered.COMPILED

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self.serial = 0
        groups = history.header.groups
        self.partners = {
            index: np.zeros((group.num_slots, 2), np.int64) for index, group in enumerate(groups) if group.lut >= 0
        }
        self.nowhere = Repeats()

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request that uses a stale entry."""
        findings = []
        for group in view.groups:
            if group.pool.index in self.partners:
                findings += self._shared_slots(view, group)
                # After a gap the rebuilt table may lack entries that the engine's has.
                if not self.history.had_gap:
                    findings += self._leads_nowhere(view, group)
        return findings

    def _shared_slots(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward, index = view.forward, group.pool.index
        self.serial += 1
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
            end=len(group.request_slots),
            serial=self.serial,
            partners=self.partners[index],
            backend=self.history.backend,
        )
        reads, writes = found[found < len(slots)], found[found >= len(slots)] - len(slots)
        group.mark(reads)
        requests = np.append(group.readers(reads), group.writers(writes))
        at = np.append(slots[reads], group.written[writes])
        full = np.append(
            table[forward.req_pool_indices[requests[: len(reads)]], group.positions[reads]], written_full[writes]
        )

        def explain(n: int) -> Explained:
            other = int(self.partners[index][at[n], 1])
            detail = f"full slots {other} and {int(full[n])} lead to SWA slot {int(at[n])}"
            return detail, happened(self.history.ledger.rows[index][at[n]]), Cause("swa_slot_shared")

        positions = np.append(group.positions[reads], forward.positions[writes])
        return self.of_entries(view, group, explain, requests=requests, positions=positions, slots=at)

    def _leads_nowhere(self, view: ForwardView, group: GroupReads) -> list[Finding]:
        forward, lut = view.forward, view.tables.luts[group.pool.group.lut]
        entries = np.flatnonzero(group.slots == 0)
        table = view.tables.req_to_token[group.pool.group.table]
        if not len(entries) or not table.size or not len(lut):
            return []
        requests = group.readers(entries)
        rows, positions = forward.req_pool_indices[requests], group.positions[entries]
        inside = (rows > 0) & (rows < table.shape[0]) & (positions >= 0) & (positions < table.shape[1])
        full = np.where(inside, table[np.where(inside, rows, 0), np.where(inside, positions, 0)], 0).astype(np.int64)
        known = (full > 0) & (full < len(lut))
        nowhere = known & (lut[np.where(known, full, 0)] == 0)
        if not nowhere.any():
            self.nowhere.forget()
            return []

        requests, positions, full = requests[nowhere], positions[nowhere], full[nowhere]

        def explain(n: int) -> Explained:
            detail = f"full slot {int(full[n])}, inside the window, leads to no SWA slot"
            return detail, [], Cause("swa_slot_missing")

        return self.of_entries(
            view, group, explain, requests=requests, positions=positions, slots=full, repeats=self.nowhere
        )

    def forget(self) -> None:
        """Forget what was reported."""
        super().forget()
        self.nowhere.forget()
