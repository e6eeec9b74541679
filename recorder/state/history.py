"""The history of slots and rows, and all else that a replay holds at one point of a trace."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.dispatch import select
from ...kernels.replay_pass.ledger import note_writes_loops
from ..trace.batch import TraceBatch
from ..trace.header import TraceHeader
from ..trace.reader import EventView
from ..trace.schema import SLOT_HISTORIES, SlotHistoryTold
from .events import CopyEvent, KnownEvent, SampleEvent, SlotEvent, StatusEvent, TransferEvent, read_known_event
from .forward import BatchTokens, Forward, UnusableEventError, batch_tokens, read_forward
from .ledger import DroppedSlots, SlotLedger
from .pools import GroupPool
from .recurrent import StateSlots
from .requests import RequestTable
from .tables import StateTables

# Columns of `last[runner]`, a row's last forward: event + 1 (0: none), request id, prefix, end, end at which it sampled.
ROW_EVENT, ROW_REQUEST, ROW_PREFIX, ROW_END, ROW_SAMPLED_END, ROW_VERIFY = range(6)
ROW_FAILED: Final = 2  # in place of 1 for a target-verify forward, which may go back
# Columns of `status`: event + 1 (0: nothing is known), request id, whether the row is that request's now.
STATUS_EVENT, STATUS_REQUEST, STATUS_GIVEN = range(3)


class RowOwners:
    """`last[runner]` `[rows, 6] int64` and `status` `[rows, 3] int64`; rows outside the tables are nobody's."""

    def __init__(self, header: TraceHeader) -> None:
        rows = max([1, *(table.rows for table in header.tables)])  # row 0 is looked up in place of any that is none
        self.last = [np.zeros((rows, 6), np.int64) for _ in header.runners]
        self.status = np.zeros((rows, 3), np.int64)
        self._asked: Forward | None = None
        self._answer = (np.zeros((0, 6), np.int64), np.zeros(0, np.bool_))

    def forget(self) -> None:
        """Take everything for unknown."""
        self.last = [np.zeros(last.shape, np.int64) for last in self.last]
        self.status = np.zeros(self.status.shape, np.int64)
        self._asked = None

    def inside(self, forward: Forward) -> BoolArray:
        """Say for each request, `[bs] bool`, whether it has a row of the tables that is not the padding row."""
        rows = forward.req_pool_indices
        inside: BoolArray = (rows > 0) & (rows < len(self.status))
        return inside

    def same(self, forward: Forward) -> tuple[Int64Array, BoolArray]:
        """Return what was last run on each request's row, `[bs, 6]`, and whether that was the same request. Neither may
        be changed: both are kept for whoever asks about the same forward again.
        """
        if forward is self._asked:
            return self._answer
        inside = self.inside(forward)
        last = self.last[forward.runner][np.where(inside, forward.req_pool_indices, 0)]
        self._asked = forward
        self._answer = last, inside & (last[:, ROW_EVENT] > 0) & (last[:, ROW_REQUEST] == forward.request_ids)
        return self._answer

    def fresh_from(self, forward: Forward) -> Int64Array:
        """Return the first position, `[bs] int64`, that each request has neither read nor written on its row before."""
        last, same = self.same(forward)
        if forward.runner == 0:  # a draft goes back to verify; a target that does has started over
            same = same & (forward.prefix_lens >= last[:, ROW_PREFIX])
        return np.where(same, last[:, ROW_END], 0)

    def seen(self, forward: Forward) -> Int64Array:
        """Return the event + 1 of each request's forward before this one on its row, `[bs] int64`; 0 for none."""
        last, same = self.same(forward)
        return np.where(same, last[:, ROW_EVENT], 0)

    def given(self, forward: Forward) -> BoolArray:
        """Say for each request, `[bs] bool`, whether its row was reported to be its own, and nothing else since."""
        inside = self.inside(forward)
        status = self.status[np.where(inside, forward.req_pool_indices, 0)]
        mine: BoolArray = inside & (status[:, STATUS_GIVEN] != 0) & (status[:, STATUS_REQUEST] == forward.request_ids)
        return mine

    def apply_forward(self, forward: Forward) -> None:
        """Move on by a forward."""
        last, same = self.same(forward)
        inside = self.inside(forward)
        end = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        if forward.runner:
            end = np.where(same, np.maximum(end, last[:, ROW_END]), end)
        sampled = forward.sampled_lens > 0 if len(forward.sampled_lens) else np.zeros(len(end), np.bool_)
        sampled_end = np.where(sampled, end, np.where(same, last[:, ROW_SAMPLED_END], 0))
        took = ROW_FAILED if forward.failed else int(forward.mode == "target_verify")
        verify = np.full(len(end), took, np.int64)
        seen = np.full(len(end), forward.event + 1, np.int64)
        values = np.stack((seen, forward.request_ids, forward.prefix_lens, end, sampled_end, verify), axis=1)
        self.last[forward.runner][forward.req_pool_indices[inside]] = values[inside]
        self._asked = None

    def apply_status(self, event: StatusEvent) -> None:
        """Move on by what became of a request: it starts from nothing, or is gone."""
        for last in self.last:
            last[(last[:, ROW_EVENT] > 0) & (last[:, ROW_REQUEST] == event.request_id), ROW_EVENT] = 0
        if 0 < event.row < len(self.status):
            self.status[event.row] = event.event + 1, event.request_id, int(event.status == "admitted")


# Columns of `LastSamples.last`; the event that reported it + 1 is 0 if nothing is known, and negative where nothing is
# known since the row's request ended: - (that event + 1).
SAMPLE_REQUEST, SAMPLE_POSITION, SAMPLE_TOKEN, SAMPLE_FORWARD, SAMPLE_EVENT = range(5)

# How many forwards back a sample event may reach: no engine overlaps that many.
MAX_LATE: Final = 64

# What is kept of a forward until its samples are known; of its slots, those in the first table.
FED_COLUMNS: Final = ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "input_ids", "positions")


@dataclass(slots=True, kw_only=True)
class FedForward:
    """A target forward whose own samples, or those before it, may come yet; `told` once its own came."""

    forward: Forward
    tokens: BatchTokens
    told: bool

    @classmethod
    def of(cls, forward: Forward) -> "FedForward":
        """Keep of a forward what does not keep its batch in memory."""
        kept: dict[str, Any] = {name: getattr(forward, name).copy() for name in FED_COLUMNS}
        kept["out_cache_loc"] = tuple(slots.copy() for slots in forward.out_cache_loc[:1])
        kept |= dict.fromkeys(("truth_lens", "attention", "windows", "recurrent", "values", "identity"))
        kept |= dict.fromkeys(("sampled_lens", "sampled_tokens"), np.empty(0, np.int64))
        slim = replace(forward, **kept, kv_bytes=(), kv_submitted=())
        return cls(forward=slim, tokens=batch_tokens(forward), told=len(forward.sampled_lens) > 0)


class Unread(NamedTuple):
    """A target forward in row `row` of a batch that nobody has asked about yet."""

    batch: TraceBatch
    row: int
    header: TraceHeader


class LastSamples:
    """`last` `[rows, 5] int64`: the last token sampled for each row, and whose it was."""

    def __init__(self, header: TraceHeader) -> None:
        rows = max([1, *(table.rows for table in header.tables)])
        self.last: Int64Array = np.zeros((rows, 5), dtype=np.int64)
        self._fed: deque[FedForward | Unread] = deque(maxlen=MAX_LATE)

    def forget(self) -> None:
        """Take every sampled token for unknown."""
        self.last = np.zeros(self.last.shape, dtype=np.int64)
        self._fed.clear()

    def apply_forward(self, forward: Forward) -> None:
        """Move on by a target forward with requests."""
        if len(forward.sampled_lens):
            self._remember(forward, forward.sampled_lens, forward.sampled_tokens, forward.event)
        self._fed.append(FedForward.of(forward))

    @property
    def fed(self) -> Sequence[FedForward]:
        """The last target forwards, those that nobody asked about before read now."""
        read = [
            FedForward.of(read_forward(one.batch.event(one.row), one.header)) if isinstance(one, Unread) else one
            for one in self._fed
        ]
        self._fed = deque(read, maxlen=MAX_LATE)
        return read

    def put_off(self, batch: TraceBatch, rows: Int64Array, header: TraceHeader) -> None:
        """Move on by target forwards, rows `[n] int64` of a batch, whose samples are in `last` already; read them
        later. The batch stays in memory for as long as one of these is among the last.
        """
        self._fed.extend(Unread(batch, row, header) for row in rows[-MAX_LATE:].tolist())

    def apply_sample(self, event: SampleEvent) -> list[FedForward]:
        """Learn tokens that arrive late; return the forwards behind the one that sampled them, none if it is gone.
        Raises `UnusableEventError` if they do not fit the forward that sampled them.
        """
        behind = list(dropwhile(lambda fed: fed.forward.forward != event.forward, self.fed))
        if not behind:
            return []
        sampler = behind[0].forward
        if len(event.lens) != len(sampler.req_pool_indices):
            raise UnusableEventError(
                f"sampled_lens has {len(event.lens)} entries, forward {event.forward} had "
                f"{len(sampler.req_pool_indices)} requests"
            )
        behind[0].told = True
        self._remember(sampler, event.lens, event.tokens, event.event)
        return behind[1:]

    def apply_status(self, event: StatusEvent) -> None:
        """Forget what was sampled for a request that begins or ends, and what is reported late of it: an id may come again."""
        ended = (self.last[:, SAMPLE_EVENT] > 0) & (self.last[:, SAMPLE_REQUEST] == event.request_id)
        if 0 < event.row < len(self.last):
            ended[event.row] = True
        self.last[ended, SAMPLE_EVENT] = -(event.event + 1)

    def waiting(self) -> list[FedForward]:
        """Return the forwards from the first on whose samples are still to come; a sample event may name them."""
        return list(dropwhile(lambda one: one.told, self.fed))

    def put_back(self, forward: Forward, *, told: bool) -> None:
        """Take a forward over that was waiting when a keyframe was written."""
        fed = FedForward.of(forward)
        fed.told = told
        self._fed.append(fed)

    def _remember(self, forward: Forward, counts: Int64Array, sampled: Int64Array, event: int) -> None:
        rows = forward.req_pool_indices
        inside = (rows > 0) & (rows < len(self.last))
        # What was sampled by a later forward is news already, and what was before the row's request ended is nobody's.
        known = self.last[np.where(inside, rows, 0)]
        inside &= (known[:, SAMPLE_FORWARD] <= forward.forward) & (known[:, SAMPLE_EVENT] > -(forward.event + 1))
        if forward.mode == "target_verify":
            self.last[rows[inside], SAMPLE_EVENT] = 0
            return
        chosen = np.flatnonzero((counts > 0) & inside)
        ends = np.cumsum(counts)
        after = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        numbers = np.full(len(chosen), forward.forward), np.full(len(chosen), event + 1)
        tokens = sampled[ends[chosen] - 1]
        found = (forward.request_ids[chosen], (after + counts - 1)[chosen], tokens, *numbers)
        self.last[rows[chosen]] = np.stack(found, axis=1)


class SlotHistory:
    """Who holds which slot and row, as far as it was recorded.

    `complete`: the trace promises to report every slot, `tells` asks for less; `known`: the event being read, None for one
    that says nothing about slots; `last_forward`: the last forward's number, -1 before the first; `had_gap`: something was
    lost; `ended`: the requests that are gone, with the event that said so; `samples`: what was sampled last for each row;
    `fed_since`: the forwards behind the one whose samples the event reports; `dropped`: what requests still held when it
    left their rows, moved on by who judges.
    """

    def __init__(self, header: TraceHeader, *, backend: str) -> None:
        self.backend = backend
        self._told = SLOT_HISTORIES.index(header.slot_history)
        self.complete = self.tells("complete")
        self.ledger = SlotLedger(header.groups, complete=self.complete)
        self.rows = RowOwners(header)
        self.samples = LastSamples(header)
        self.dropped = DroppedSlots()
        self.states = StateSlots(header)
        self.known: KnownEvent | None = None
        self.fed_since: list[FedForward] = []
        self.last_forward = -1
        self.had_gap = False
        self.ended: dict[int, int] = {}
        self._groups = header.groups

    def tells(self, told: SlotHistoryTold) -> bool:
        """Say whether the trace promises at least so much."""
        return self._told >= SLOT_HISTORIES.index(told)

    def open(self, view: EventView) -> None:
        """Read an event and the samples that it reports; raise `UnusableEventError` where it contradicts itself or the pools."""
        self.known = read_known_event(view, self._groups)
        self.fed_since = self.samples.apply_sample(self.known) if isinstance(self.known, SampleEvent) else []

    def apply_forward(
        self, forward: Forward, written: Iterable[tuple[int, Int64Array, int]], tables: StateTables
    ) -> None:
        """Move on by a forward; `written` gives each group's index, slots, and how many of them are no padding."""
        self.states.apply(forward, tables.truth)
        if forward.runner == 0 and len(forward.req_pool_indices):
            self.samples.apply_forward(forward)
        for group, slots, end in written:
            select(note_writes_loops, self.backend)(slots, end, forward.event + 1, self.ledger.rows[group])
        self.rows.apply_forward(forward)
        self.last_forward = forward.forward

    def apply_event(self, view: EventView) -> None:
        """Move on by the event that was opened."""
        known = self.known
        if isinstance(known, SlotEvent):
            self.ledger.apply_slots(known)
        elif isinstance(known, CopyEvent | TransferEvent):
            self.ledger.apply_content(known)
        elif isinstance(known, StatusEvent):
            self.rows.apply_status(known)
            self.samples.apply_status(known)
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
        self.states.forget()
        self.dropped.by_request.clear()
        self.ended.clear()
        self.known = None
        self.had_gap = True


DECODING: Final = frozenset({"decode", "target_verify", "mixed"})


_NO_WALK_SEEN: Final = -(1 << 40)  # so few forwards since the last walk that none is ever missed


class RunnerActivity:
    """`ran` counts each runner's forwards with requests; `since_sweep` those of the first since the last walk."""

    def __init__(self, num_runners: int) -> None:
        self.ran = [0] * num_runners
        self.decoded = False
        self.since_sweep = 0

    def forward(self, forward: Forward) -> None:
        """Count a forward that has requests."""
        self.ran[forward.runner] += 1
        if forward.runner == 0:
            self.decoded |= forward.mode in DECODING
            self.since_sweep += 1

    def sweep(self, runner: int) -> None:
        """Count a walk of the prefix cache."""
        if runner == 0:
            self.since_sweep = 0

    def forget(self) -> None:
        """After a gap nobody knows how long ago the last walk was, nor whether walks are still told: one must be seen first."""
        self.since_sweep = _NO_WALK_SEEN


@dataclass(slots=True, kw_only=True)
class ReplayState:
    """The parts that a keyframe holds; `history` is None for a replay without history checks."""

    header: TraceHeader
    tables: StateTables
    pools: list[GroupPool]
    request_table: RequestTable
    activity: RunnerActivity
    history: SlotHistory | None
