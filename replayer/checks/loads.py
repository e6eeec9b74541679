"""A load that failed, whose slots are read all the same."""

from collections.abc import Iterator

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.state.events import CopyEvent, TransferEvent
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
    and one that begins later must compute the tokens anew. If the history of slots is complete, `hit_never_written` says it.
    Failures before a keyframe that begins a trace are not known, nor are those in a group behind a full-to-SWA table.
    """

    kind = "failed_load_read"
    finds = "a forward reads a slot whose load has failed, and that nobody has written since"
    covered = Covered.COMPILED  # which does not run while a pool has slots of which nothing is known
    events = frozenset({"transfer", "kv_copy", "loss"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._failed: dict[int, Int64Array] = {}  # by group: of each slot the event of its failure + 1, 0 for none

    def event(self, view: EventView) -> Iterator[Finding]:
        """Remember the slots of a load that failed, and forget those that are loaded again, or that a copy fills."""
        event = self.history.known
        if view.kind == "loss":  # the slots that it lists may have been filled, and are unknown for that from now on
            self._failed.clear()
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

    def forward(self, view: ForwardView) -> Iterator[Finding]:
        forward = view.forward
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
        return any(failed.any() for failed in self._failed.values())

    def forget(self) -> None:
        super().forget()
        self._failed.clear()
