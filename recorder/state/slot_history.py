"""The history of slots and rows: what alloc, free, transfer, copy, status and sample events and the forwards left."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.replay_pass.ledger import note_writes
from ..trace.header import TraceHeader
from ..trace.reader import EventView
from .dropped_slots import DroppedSlots
from .forward import Forward
from .ledger import SlotLedger
from .row_book import RowBook
from .sample_book import SampleBook
from .slot_events import CopyEvent, KnownEvent, SlotEvent, StatusEvent, TransferEvent, read_known_event

Int64Array = npt.NDArray[np.int64]


class SlotHistory:
    """Who holds which slot and row, as far as it was told.

    `complete` says that the trace promises to tell of every slot; `known` is the event being read, None for one that
    says nothing about slots; `last_forward` is the number of the last forward, -1 before the first; `had_gap` says that
    something was lost; `ended` holds the requests that are gone, with the event that said so; `samples` what was
    sampled last for each row, `dropped` what requests still held when it left their rows; these two are moved on by whoever
    judges by them, and samples of a request end with it.
    """

    def __init__(self, header: TraceHeader, *, backend: str) -> None:
        self.backend = backend
        self.complete = header.slot_history == "complete"
        self.ledger = SlotLedger(header.groups, complete=self.complete)
        self.rows = RowBook(header)
        self.samples = SampleBook(header)
        self.dropped = DroppedSlots()
        self.known: KnownEvent | None = None
        self.last_forward = -1
        self.had_gap = False
        self.ended: dict[int, int] = {}
        self._groups = header.groups

    def open(self, view: EventView) -> None:
        """Read an event; raise `UnusableEventError` where it contradicts itself or the pools."""
        self.known = read_known_event(view, self._groups)

    def take_forward(self, forward: Forward, written: Iterable[tuple[int, Int64Array, int]]) -> None:
        """Move on by a forward; `written` gives each group's index, slots, and how many of them are no padding."""
        for group, slots, end in written:
            note_writes(
                slots=slots, end=end, event=forward.event + 1, ledger=self.ledger.rows[group], backend=self.backend
            )
        self.rows.take_forward(forward)
        self.last_forward = forward.forward

    def take_event(self, view: EventView) -> None:
        """Move on by the event that was opened."""
        known = self.known
        if isinstance(known, SlotEvent):
            self.ledger.apply_slots(known)
        elif isinstance(known, CopyEvent):
            self.ledger.apply_copy(known)
        elif isinstance(known, TransferEvent):
            self.ledger.apply_transfer(known)
        elif isinstance(known, StatusEvent):
            self.rows.take_status(known)
            self.samples.take_status(known)
            self.take_end(known.request_id, known.status, known.event)
            if self.complete and known.status != "admitted":  # what it still holds has leaked, which is said once
                for part in self.ledger.held_slots(known.request_id):
                    self.ledger.lose_track(part.group, part.slots)
        elif view.kind == "loss" or (view.kind == "keyframe" and not view.scalar("status")):
            # Which allocations were lost is not said; nor does a keyframe say what was there that has no parts.
            self.forget()

    def take_end(self, request_id: int, status: str, event: int) -> None:
        """Note whether a request is gone, by its status."""
        if status in ("finished", "aborted"):
            self.ended[request_id] = event
        else:
            self.ended.pop(request_id, None)
        if status != "admitted":
            self.dropped.by_request.pop(request_id, None)

    def forget(self) -> None:
        """Take everything for unknown."""
        self.ledger.forget()
        self.rows.forget()
        self.samples.forget()
        self.dropped.by_request.clear()
        self.ended.clear()
        self.known = None
        self.had_gap = True
