"""What the history checks share: the slot ledger, the rows, the event being judged, and one look at each forward."""

from dataclasses import dataclass

from ...kernels.arrays import Int64Array, record_words
from ...kernels.replay_pass.ledger import judge_reads, judge_writes
from ...recorder.state.events import SlotEvent, TransferEvent
from ...recorder.state.forward import BatchTokens, batch_tokens
from ...recorder.state.history import SlotHistory
from ...recorder.state.requests import RequestTable
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView
from .view import ForwardView, GroupReads


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What is wrong with one group's part of a forward.

    `reads` are indices of plan entries, `writes` of tokens, ascending; `read_bits` and `write_bits` say what is wrong
    with each, by the constants of `kernels/replay_pass/ledger.py`. `ledger` is the group's, as before this forward.
    """

    group: GroupReads
    ledger: Int64Array
    reads: Int64Array
    read_bits: Int64Array
    writes: Int64Array
    write_bits: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSlots:
    """Slots of one group that the event being judged names; ledger and transfers are as before it.

    `ledger` `[num_slots, 8]` and `transfers` `[num_slots]` are the whole group's and are read a column at a time: an event
    may name every slot, and a copy of its rows would take as much memory as the ledger.
    """

    group: int
    slots: Int64Array
    repeated: Int64Array
    ledger: Int64Array
    transfers: Int64Array

    def column(self, column: int) -> Int64Array:
        """Return a column of each slot's ledger row, `[n] int64`."""
        values: Int64Array = self.ledger[self.slots, column]
        return values

    def row(self, index: int) -> Int64Array:
        """Return the ledger row of slot `index` among these, `[8] int64`."""
        return self.ledger[int(self.slots[index])].copy()

    @property
    def transfer(self) -> Int64Array:
        """The event + 1 of the start of the transfer that each slot is under, `[n] int64`, 0 for none."""
        values: Int64Array = self.transfers[self.slots]
        return values


class History(SlotHistory):
    """Everything that was recorded so far, as the checks need it.

    `named` holds the slots that the event being judged names, where the trace is complete or has transfers; `serial` is
    the last number that slots of the ledger were stamped with.
    """

    def __init__(self, header: TraceHeader, request_table: RequestTable, *, backend: str) -> None:
        super().__init__(header, backend=backend)
        self.header = header
        self.request_table = request_table
        self.named: list[NamedSlots] = []
        self.serial = 0
        self._transfers = False
        self._view: ForwardView | None = None
        self._judged: list[Judged] = []
        self._tokens: BatchTokens | None = None

    def open(self, view: EventView) -> None:
        """Read an event; raise `UnusableEventError` where it contradicts itself or the pools."""
        super().open(view)
        self.named = []
        self._transfers = self._transfers or isinstance(self.known, TransferEvent)
        if (self.complete or self._transfers) and isinstance(self.known, SlotEvent | TransferEvent):
            self.named = [
                NamedSlots(
                    group=p.group,
                    slots=p.slots,
                    repeated=p.repeated,
                    ledger=self.ledger.rows[p.group],
                    transfers=self.ledger.transfers[p.group],
                )
                for p in self.known.parts
            ]

    def tokens(self, view: ForwardView) -> BatchTokens:
        """Return which request and position each token of a forward belongs to; worked out once."""
        if self._tokens is None:
            self._tokens = batch_tokens(view.forward)
        return self._tokens

    def judge(self, view: ForwardView) -> list[Judged]:
        """Return what is wrong with each group's part of a forward; worked out once, whoever asks."""
        if view is not self._view:
            self._view = view
            self.serial += 1
            self._judged = [self._judge(group, view) for group in view.groups]
        return self._judged

    def _judge(self, group: GroupReads, view: ForwardView) -> Judged:
        forward, pool = view.forward, group.pool
        ledger = self.ledger.rows[pool.index]
        writes, write_bits = judge_writes(
            slots=group.written,
            offsets=group.write_offsets,
            request_ids=forward.request_ids,
            serial=self.serial,
            from_start=self.ledger.from_start,
            ledger=ledger,
            backend=self.backend,
        )
        slots = group.slots
        reads, read_bits = judge_reads(
            slots=slots,
            positions=group.positions,
            tokens=group.plan.expected_tokens[: len(slots)],
            offsets=group.plan.request_offsets,
            request_ids=forward.request_ids,
            fresh_from=self.rows.fresh_from(forward),
            seen=self.rows.seen(forward),
            serial=self.serial,
            complete=self.complete,
            from_start=self.ledger.from_start,
            ledger=ledger,
            writers=pool.pool.writers,
            records=record_words(pool.pool.tail[pool.group.halves[0]], written=False),
            backend=self.backend,
        )
        group.mark(reads)
        return Judged(
            group=group, ledger=ledger, reads=reads, read_bits=read_bits, writes=writes, write_bits=write_bits
        )

    def apply_view(self, view: ForwardView) -> None:
        """Move on by a forward that was judged."""
        self.apply_forward(
            view.forward, [(group.pool.index, group.written, len(group.request_slots)) for group in view.groups]
        )
        self._drop_view()

    def forget(self) -> None:
        """Take everything for unknown."""
        super().forget()
        self.named = []
        self._drop_view()

    def _drop_view(self) -> None:
        self._view = None
        self._tokens = None
        self._judged = []
