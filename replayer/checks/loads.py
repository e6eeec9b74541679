"""A load that failed, whose slots are read all the same, or whose readers keep what they have made of them."""

from collections.abc import Iterator

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.state.events import CopyEvent, StatusEvent, TransferEvent
from ...recorder.state.history import ROW_EVENT, ROW_PREFIX, ROW_REQUEST
from ...recorder.state.tables import look_up
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import RECEIVE, TIER_HOST
from ..report.findings import NO_CAUSE, Finding
from .check import Covered, Explained, HistoryCheck, register
from .history import ForwardView, History


@register
class FailedLoadRead(HistoryCheck):
    """A forward reads a slot whose load has failed, and which nothing has written or loaded since.

    The engine is told of the failure when the trace is: a forward that was under way by then, or had been, is none of these,
    and one that begins later must compute the tokens anew, also those that its request computed from such a slot before. If the
    history of slots is complete, `hit_never_written` says the first.
    Failures before a keyframe that begins a trace are not known, nor are those in a group behind a full-to-SWA table.
    """

    kind = "failed_load_read"
    finds = "a forward reads a slot whose load has failed, and that nobody has written since"
    covered = Covered.COMPILED  # which does not run while a pool has slots of which nothing is known
    events = frozenset({"transfer", "kv_copy", "loss", "status"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._failed: dict[int, Int64Array] = {}  # by group: of each slot the event of its failure + 1, 0 for none
        # Of requests whose last forward read such slots: where it began to compute, group and slot, and the event of the failure.
        self._spoilt: dict[int, tuple[int, int, int, int]] = {}

    def event(self, view: EventView) -> Iterator[Finding]:
        """Remember the slots of a load that failed, and forget those that are loaded again, or that a copy fills."""
        event = self.history.known
        if view.kind == "loss":  # the slots that it lists may have been filled, and are unknown for that from now on
            self._failed.clear()
        if isinstance(event, StatusEvent):  # who begins again may hit what others have computed
            self._spoilt.pop(event.request_id, None)
        if isinstance(event, TransferEvent) and event.direction == RECEIVE and event.status == "failed":
            self._note_readers(event, view.number)
        for copy in event.copies if isinstance(event, CopyEvent) else ():
            if copy.group in self._failed and copy.dst_tier != TIER_HOST:
                self._failed[copy.group][copy.dst] = 0
        if isinstance(event, TransferEvent) and event.direction == RECEIVE and not self.history.complete:
            if event.status == "failed" and event.group not in self._failed and len(event.slots):
                num_slots = self.history.header.groups[event.group].num_slots
                self._failed[event.group] = np.zeros(num_slots, np.int64)
            if event.group in self._failed:
                failed = self._failed[event.group]
                slots = event.slots[(event.slots > 0) & (event.slots < len(failed))]
                failed[slots] = view.number + 1 if event.status == "failed" else 0
        yield from ()

    def _note_readers(self, event: TransferEvent, number: int) -> None:
        """Note the requests whose last forward read slots of a load that has failed."""
        tables, group = self.history.tables, event.group
        if tables is None or group < 0 or self.history.header.groups[group].lut >= 0:
            return
        known = self.history.header.groups[group]
        rows, last = tables.req_to_token[known.table], self.history.rows.last[known.runner]
        for row in np.flatnonzero(last[:, ROW_EVENT] > 0).tolist():
            prefix = int(last[row, ROW_PREFIX])
            first = max(0, prefix - known.window) if known.window else 0  # slots in front of it are others' by now
            read = rows[row, first:prefix] if row < len(rows) else rows[0, :0]
            spoilt = read[np.isin(read, event.slots)]
            if len(spoilt):
                self._spoilt[int(last[row, ROW_REQUEST])] = (prefix, group, int(spoilt[0]), number)

    def _keeps(self, view: ForwardView) -> Iterator[Finding]:
        """Yield a finding for each request that goes on from what it computed from such slots."""
        forward = view.forward
        for r, request in enumerate(forward.request_ids.tolist()):
            began, group, slot, failed = self._spoilt.get(request, (0, -1, 0, 0))
            if group < 0 or self.history.header.groups[group].runner != forward.runner:
                continue
            del self._spoilt[request]
            if forward.prefix_lens[r] > began:
                said = (
                    f"reads what it computed from position {began} on with a slot whose load failed in event {failed}"
                )
                yield self.of_request(forward, r, said, group=group, slot=slot, position=began, events=[failed])

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        forward = view.forward
        if self._spoilt:
            yield from self._keeps(view)
        for group in view.groups if self._failed else ():
            failed, known = self._failed.get(group.pool.index), group.pool.group
            if failed is None or known.lut >= 0 or not group.pool.any_unknown:
                continue
            lens = np.where(forward.req_pool_indices > 0, np.maximum(forward.prefix_lens, 0), 0)
            first = np.maximum(lens - known.window, 0) if known.window else np.zeros_like(lens)
            requests = np.repeat(np.arange(len(lens), dtype=np.int64), lens - first)
            offsets = np.cumsum(lens - first) - (lens - first)
            positions = np.arange(len(requests), dtype=np.int64) - offsets[requests] + first[requests]
            rows = forward.req_pool_indices[requests]
            slots, inside = look_up(view.tables.req_to_token[known.table], rows, positions)
            inside &= (slots > 0) & (slots < len(failed))
            slots = np.where(inside, slots, 0)
            suspect = inside & (failed[slots] > 0) & group.pool.pool.unknown[slots]
            # What another request of the batch computes anew is there before anybody's attention looks.
            wrong = np.flatnonzero(suspect & ~np.isin(slots, group.request_slots))
            since = failed[slots[wrong]] - 1

            def explain(n: int, since: Int64Array = since) -> Explained:
                return f"reads a slot whose load failed in event {since[n]}", [int(since[n])], NO_CAUSE

            where = {"requests": requests[wrong], "positions": positions[wrong], "slots": slots[wrong]}
            yield from self.of_entries(view, group, explain, **where, repeats=self.repeats)
        for group in view.groups if self._failed else ():
            failed = self._failed.get(group.pool.index)
            if failed is not None:
                failed[group.written[(group.written > 0) & (group.written < len(failed))]] = 0

    def pending(self) -> bool:
        """Say whether a load has failed whose slots may be read in what follows, which no keyframe says."""
        return bool(self._spoilt) or any(failed.any() for failed in self._failed.values())

    def forget(self) -> None:
        super().forget()
        self._failed.clear()
        self._spoilt.clear()
