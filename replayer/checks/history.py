"""What the history checks are given: a forward as they see it, and what they share of all that was before it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array, record_words
from ...kernels.dispatch import select
from ...kernels.ops.plan.reference import VerifyPlan
from ...kernels.replay_pass.ledger import Found, Reads, judge_reads_loops, judge_writes_loops
from ...recorder.state.events import SlotEvent, TransferEvent
from ...recorder.state.forward import BatchTokens, Forward, batch_tokens
from ...recorder.state.history import SlotHistory
from ...recorder.state.pools import GroupPool
from ...recorder.state.requests import RequestTable
from ...recorder.state.tables import StateTables
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReads:
    """One pool group's part of a forward, before it runs.

    `plan`'s first `num_valid` entries are the prefix positions that it reads, request by request (`request_offsets`);
    slot 0 stands for entries that nobody can judge. `written` `[T] int64`: slots that the tokens go to, in the pool's
    own numbering; request r's are `write_offsets[r]` to `write_offsets[r + 1]`, padding comes behind them. The incremental
    pass leaves out entries that were verified before and have not changed since: in `marks` `[n] uint8`, None for nobody,
    a check notes the entries that it has to see again in the next forward.
    """

    pool: GroupPool
    plan: VerifyPlan
    written: Int64Array
    write_offsets: Int64Array
    marks: npt.NDArray[np.uint8] | None = None

    @property
    def slots(self) -> Int64Array:
        """The slots read, `[n] int64`."""
        return self.plan.slots[: int(self.plan.num_valid[0])]

    @property
    def positions(self) -> Int64Array:
        """The position of each slot read, `[n] int64`."""
        return self.plan.expected_positions[: int(self.plan.num_valid[0])]

    @property
    def request_slots(self) -> Int64Array:
        """The slots that tokens of requests go to, without those of padding."""
        return self.written[: int(self.write_offsets[-1])]

    def readers(self, entries: Int64Array) -> Int64Array:
        """Return whose plan entries `[m] int64` are: indices into the batch."""
        return np.searchsorted(self.plan.request_offsets[1 : len(self.write_offsets)], entries, side="right")

    def writers(self, tokens: Int64Array) -> Int64Array:
        """Return whose tokens `[m] int64` are: indices into the batch, its length for padding."""
        return np.searchsorted(self.write_offsets[1:], tokens, side="right")

    def mark(self, entries: Int64Array) -> None:
        """Note entries `[m] int64` that something is wrong with."""
        if self.marks is not None:
            self.marks[entries] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardView:
    """A forward about to run; `groups` are those of its runner. `event` is what the trace says of it, applied already."""

    event: EventView
    forward: Forward
    tables: StateTables
    groups: list[GroupReads]


class Judged(NamedTuple):
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


class NamedSlots(NamedTuple):
    """Slots of one group that the event being judged names; `ledger` and `transfers`, of the whole group, are as before it.

    They are read a column at a time: an event may name every slot, and a copy of its rows would be as large as the ledger.
    """

    group: int
    slots: Int64Array
    repeated: Int64Array
    ledger: Int64Array
    transfers: Int64Array

    def column(self, column: int) -> Int64Array:
        """Return a column of each slot's ledger row, `[n] int64`."""
        return self.ledger[self.slots, column]

    def row(self, index: int) -> Int64Array:
        """Return the ledger row of slot `index` among these, `[8] int64`."""
        return self.ledger[int(self.slots[index])].copy()

    @property
    def transfer(self) -> Int64Array:
        """The event + 1 of the start of the transfer that each slot is under, `[n] int64`, 0 for none."""
        return self.transfers[self.slots]


class History(SlotHistory):
    """Everything that was recorded so far, as the checks need it; `named` are the slots that the judged event names."""

    def __init__(
        self, header: TraceHeader, request_table: RequestTable, *, backend: str, oracle: str = "", model: str = ""
    ) -> None:
        super().__init__(header, backend=backend)
        self.header = header
        self.request_table = request_table
        self.oracle = oracle  # the name of one's own, which nobody loads unless the user names it
        self.model = model  # the path of the checkpoint that ran, which nobody loads unless the user names it
        self.tables: StateTables | None = None  # of who replays
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
        if (self.tells("allocator") or self._transfers) and isinstance(self.known, SlotEvent | TransferEvent):
            rows, transfers = self.ledger.rows, self.ledger.transfers
            self.named = [
                NamedSlots(p.group, p.slots, p.repeated, rows[p.group], transfers[p.group]) for p in self.known.parts
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
        ledger, from_start, requests = self.ledger.rows[pool.index], int(self.ledger.from_start), forward.request_ids
        found = Found.allocate(len(group.written))
        judge_writes = select(judge_writes_loops, self.backend)
        judge_writes(group.written, group.write_offsets, requests, self.serial, from_start, ledger, found)
        writes, write_bits = found.found()
        slots, plan = group.slots, group.plan
        asked = Reads(
            slots, group.positions, plan.expected_tokens[: len(slots)], plan.request_offsets, requests,
            self.rows.fresh_from(forward), self.rows.seen(forward),
        )  # fmt: skip
        records = record_words(pool.pool.tail[pool.group.halves[0]], written=False)
        found = Found.allocate(len(slots))
        judge_reads = select(judge_reads_loops, self.backend)
        judge_reads(asked, self.serial, int(self.complete), from_start, ledger, pool.pool.writers, records, found)
        reads, read_bits = found.found()
        group.mark(reads)
        return Judged(group, ledger, reads, read_bits, writes, write_bits)

    def apply_view(self, view: ForwardView) -> None:
        """Move on by a forward that was judged."""
        written = [(group.pool.index, group.written, len(group.request_slots)) for group in view.groups]
        self.apply_forward(view.forward, written, view.tables)
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
