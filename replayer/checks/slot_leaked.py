"""A request is gone, or its row has moved on, and a slot is still held in its name.

Invariant: when a request finishes, is aborted or retracted, all it held was given back or handed to the prefix cache
before; and when a forward overwrites a row's entry, the slot that stood there is given back at the latest before the
request's next forward. Evidence: the slot's allocation and the status event, or the two forwards. Legitimate
exceptions: slots that are shared or cached are not the request's to give back; an entry overwritten by de-duplication
is freed at once. Judged only where the trace promises to tell of every slot.
"""

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import record_words
from ...kernels.constants import RECORD_POSITION
from ...kernels.ledger import ALLOC, CONTENT, HELD, OWNER, STATE
from ...recorder.reader import EventView
from ..findings import Finding
from ..forward import Forward
from ..slot_events import StatusEvent
from .check import HistoryCheck
from .history import History
from .reporting import event_finding, forward_finding
from .view import ForwardView, GroupReads

Int64Array = npt.NDArray[np.int64]


class SlotLeaked(HistoryCheck):
    """Looks at requests that leave, and at table entries that are overwritten."""

    judges = frozenset({"status"})

    def __init__(self, history: History) -> None:
        self._history = history
        # By request: (group, slots, their allocations) that a forward of it took out of its row.
        self._dropped: dict[int, list[tuple[int, Int64Array, Int64Array, int]]] = {}

    def event(self, view: EventView) -> list[Finding]:
        """Return a finding for each group in which a request that leaves still holds slots."""
        del view
        event, history = self._history.known, self._history
        if not history.complete or not isinstance(event, StatusEvent) or event.status == "admitted":
            return []
        self._dropped.pop(event.request_id, None)
        findings = []
        for part in history.ledger.held_slots(event.request_id):
            rows = history.ledger.rows[part.group][part.slots]
            findings.append(
                event_finding(
                    "slot_leaked",
                    event,
                    history,
                    group=part.group,
                    slots=part.slots,
                    detail=f"request {history.book.name(event.request_id)} is {event.status} and still holds it",
                    events=[int(rows[0, ALLOC]) - 1],
                )
            )
            history.ledger.lose_track(part.group, part.slots)
        return findings

    def forward(self, view: ForwardView) -> list[Finding]:
        """Return a finding for each request whose row dropped slots in its forward before that it still holds."""
        if not self._history.complete:
            return []
        findings = self._still_held(view.forward) if self._dropped else []
        for group in view.groups:
            if group.pool.group.lut < 0:
                self._note_dropped(view, group)
        return findings

    def _note_dropped(self, view: ForwardView, group: GroupReads) -> None:
        """Remember the slots that stand in the table, held by the request, where this forward writes others."""
        forward, pool = view.forward, group.pool
        table = view.tables.req_to_token[pool.group.table]
        if not table.size:
            return
        tokens = self._history.tokens(view)
        rows, positions = forward.req_pool_indices[tokens.request], tokens.position
        inside = (rows > 0) & (rows < table.shape[0]) & (positions >= 0) & (positions < table.shape[1])
        before = table[np.where(inside, rows, 0), np.where(inside, positions, 0)].astype(np.int64)
        ledger = self._history.ledger.rows[pool.index]
        changed = np.flatnonzero(
            inside & (before > 0) & (before < len(ledger)) & (before != group.written[: len(before)])
        )
        if not len(changed):
            return
        owner = forward.request_ids[tokens.request[changed]]
        slots = before[changed]
        kept = (ledger[slots, OWNER] == owner) & (ledger[slots, STATE] == HELD)
        if not kept.any():
            return
        kept &= ~np.isin(slots, group.written)
        # Given out anew to the same request, the slot may stand for another position now, or soon.
        records = record_words(pool.pool.tail[pool.group.halves[0]], written=False)
        kept &= (ledger[slots, CONTENT] > ledger[slots, ALLOC]) & (
            records[slots, RECORD_POSITION] == positions[changed]
        )
        for request_id in np.unique(owner[kept]).tolist():
            mine = slots[kept & (owner == request_id)]
            entry = (pool.index, mine, ledger[mine, ALLOC], forward.event)
            self._dropped.setdefault(request_id, []).append(entry)

    def _still_held(self, forward: Forward) -> list[Finding]:
        findings = []
        for r, request_id in enumerate(forward.request_ids.tolist()):
            for group, dropped, given, event in self._dropped.pop(request_id, []):
                slots, alloc = dropped, given
                ledger = self._history.ledger.rows[group]
                held = (ledger[slots, STATE] == HELD) & (ledger[slots, OWNER] == request_id)
                held &= ledger[slots, ALLOC] == alloc
                slots, alloc = slots[held], alloc[held]
                if not len(slots):
                    continue
                findings.append(
                    forward_finding(
                        "slot_leaked",
                        forward,
                        self._history.book,
                        request=r,
                        group=group,
                        position=-1,
                        slot=int(slots[0]),
                        detail="still holds a slot that its row no longer names",
                        count=len(slots),
                        events=[event, int(alloc[0]) - 1],
                    )
                )
                self._history.ledger.lose_track(group, slots)
        return findings

    def finish(self) -> list[Finding]:
        """Return a finding for each request that is gone and was given slots afterwards."""
        history = self._history
        if not history.complete:
            return []
        findings = []
        for request_id in sorted(set(history.ledger.held_by) & set(history.ended)):
            gone = StatusEvent(event=history.ended[request_id], time_ns=0, status="gone", request_id=request_id, row=-1)
            for part in history.ledger.held_slots(request_id):
                rows = history.ledger.rows[part.group][part.slots]
                findings.append(
                    event_finding(
                        "slot_leaked",
                        gone,
                        history,
                        group=part.group,
                        slots=part.slots,
                        detail=f"was given to request {history.book.name(request_id)}, which was gone, and never given back",
                        events=[int(rows[0, ALLOC]) - 1],
                    )
                )
        return findings

    def forget(self) -> None:
        """Forget which slots were dropped."""
        self._dropped.clear()
