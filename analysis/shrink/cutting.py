"""A part of a trace that is a trace: events and requests left out as a recorder leaves them out that has lost them.

Nothing is worked out. Of a slot that something left out has touched and something kept names later, a `loss` event says that
nobody knows what it holds; table entries that a kept forward reads are those that the whole trace has for it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...recorder.state.events import CopyEvent, KnownEvent, SlotEvent, StatusEvent, TransferEvent, read_known_event
from ...recorder.state.forward import Forward, UnusableEventError, read_forward
from ...recorder.state.recurrent import COPY, OP, POOL, REQUEST, SLOT, SOURCE, STEP
from ...recorder.trace.batch import EventView
from ...recorder.trace.event import TraceEvent, loss_event
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.schema import ALLOC_FRESH, SLOTS_LISTED, TIER_HOST, TIER_POOL
from .losses import Losses
from .parts import (
    ADDED_EVENT,
    LEFT_OUT,
    NOBODY,
    NOTHING,
    PADDING,
    EventCopies,
    Part,
    Slots,
    changed_slots,
    keep_runs,
    listed_slots,
    members_of,
)
from .tables import TwoTables

_PER_REQUEST: Final = ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "truth_lens")
_OF_ATTENTION: Final = ("attention_seq_lens", "attention_query_lens")

# Whether event `number` is kept for a member of it, a request's id, NOBODY or PADDING, that touches these slots.
Keep = Callable[[int, int, Slots], bool]


class Cutter:
    """Cuts a trace: `keep` says what stays; of requests that are not in `requests`, None for all, no names are kept."""

    def __init__(self, header: TraceHeader, keep: Keep, requests: frozenset[int] | None) -> None:
        self.header = header
        self.losses = Losses(header)
        self._keep = keep
        self._requests = requests
        self._tables = TwoTables(header)
        self._copies = EventCopies()
        self._events: list[TraceEvent] = []
        self._numbers: list[int] = []
        self._masks: dict[int, BoolArray] = {}  # which requests of a forward stayed
        self._host = [np.zeros(group.host_num_slots, np.bool_) for group in header.groups]  # what is unknown there
        self._states = [np.zeros(pool.num_slots, np.bool_) for pool in header.states]  # the same of recurrent state

    def cut(self, views: Iterable[tuple[EventView, int]]) -> Part:
        """Return what is kept of a trace's events, given with their numbers in the whole trace."""
        for view, number in views:
            try:
                self._take(view, number)
            except UnusableEventError:
                self._forget(loss_event(lost_events=-1, note=LEFT_OUT, time_ns=view.time_ns), ADDED_EVENT)
        return Part(self.header, *self.losses.put_between(self._events, self._numbers, ADDED_EVENT))

    def _take(self, view: EventView, number: int) -> None:
        kind = view.kind
        if kind == "forward":
            self._forward(view, number)
            return
        self._tables.whole.apply_changes(view)
        if kind == "loss" and view.scalar("status") == SLOTS_LISTED and view.scalar("note") == LEFT_OUT:
            self.losses.drop(
                listed_slots(view) or {self.losses.rows: np.arange(1, len(self._tables.whole.req_to_token[0]))}
            )
        elif kind == "loss" and view.scalar("status") == SLOTS_LISTED:
            self._put(view, number)
        elif kind == "loss" or (kind == "keyframe" and not view.scalar("status")):
            self._forget(self._copies.copy(view), number)
        elif kind == "request":
            if self._requests is None or int(view.scalar("request_id")) in self._requests:
                self._put(view, number)
        elif kind == "sample":
            self._sample(view, number)
        elif kind not in ("mark", "keyframe", "segment"):
            self._between(view, number)

    def _between(self, view: EventView, number: int) -> None:
        """Take an event that names slots, or a request's status."""
        known, request, losses = read_known_event(view, self.header.groups), int(view.scalar("request_id")), self.losses
        touched: dict[int, Int64Array] = {part.group: part.slots for part in known.parts} if known else {}
        if isinstance(known, StatusEvent):
            touched = {losses.rows: np.array([known.row])}
        named = dict(touched)
        for copy in known.copies if isinstance(known, CopyEvent) else ():
            if copy.src_tier == TIER_POOL:
                named[copy.group] = np.union1d(named.get(copy.group, NOTHING), copy.src)
        if view.kind == "sweep":
            of = view.ints("sweep_group")
            named = {g: np.unique(view.ints("sweep_slot")[of == g]) for g in np.unique(of).tolist()}
        for group, slots in changed_slots(view, self.header).items():
            named[group], touched[group] = (np.union1d(part.get(group, NOTHING), slots) for part in (named, touched))
        if isinstance(known, CopyEvent):
            losses.fill(touched)
        if not self._keep(number, request, {} if isinstance(known, StatusEvent) else named):
            losses.drop(touched)
            self._copies_dropped(known)
            return
        begins = isinstance(known, StatusEvent) or (
            isinstance(known, SlotEvent) and known.kind == "alloc" and known.status == ALLOC_FRESH
        )
        losses.name(named, len(self._events), begins=begins)
        if isinstance(known, SlotEvent | StatusEvent):
            losses.give(touched, request, back=isinstance(known, SlotEvent) and known.kind != "alloc")
        if isinstance(known, StatusEvent):  # what a request that leaves still holds is judged
            losses.name(losses.held(request), len(self._events), begins=True)
        event = self._put(view, number)
        if isinstance(known, CopyEvent):
            self._copied(known)
        elif isinstance(known, TransferEvent):
            event.scalars.pop("room", None)  # the other side is not here

    def _copied(self, known: CopyEvent) -> None:
        """Follow what is unknown through a kept copy."""
        for copy in known.copies:
            host = self._host[copy.group]
            unknown = host[copy.src] if copy.src_tier == TIER_HOST else np.zeros(len(copy.src), np.bool_)
            if copy.dst_tier == TIER_HOST:
                host[copy.dst] = unknown
            elif unknown.any():
                self.losses.drop({copy.group: copy.dst[unknown]})

    def _copies_dropped(self, known: KnownEvent | None) -> None:
        for copy in known.copies if isinstance(known, CopyEvent) else ():
            if copy.dst_tier == TIER_HOST:
                self._host[copy.group][copy.dst] = True

    # --- forwards

    def _forward(self, view: EventView, number: int) -> None:
        forward = read_forward(view, self.header)
        self._tables.whole.apply_changes(view)
        rows = forward.req_pool_indices
        extend = np.where(rows == 0, 0, np.maximum(forward.extend_lens, 0))
        owner = np.append(np.repeat(np.arange(len(rows)), extend), np.full(forward.num_tokens - int(extend.sum()), -1))
        members = np.append(np.where(rows > 0, forward.request_ids, PADDING), PADDING)
        written = self._written(forward)
        stays = {m: self._keep(number, m, written) for m in np.unique(members).tolist()}
        mask = np.array([stays[m] for m in members.tolist()], np.bool_)
        chosen, tokens = mask[:-1], mask[owner]
        if any(stays[m] for m in members_of(view)):
            self._part_of_forward(self._put(view, number), forward, chosen, tokens)
            self.losses.drop(self._written(_chosen(forward, ~chosen, ~tokens)))
            self._masks[forward.forward] = chosen
        else:
            for slots in (written, changed_slots(view, self.header)):
                self.losses.drop(slots)
            self._kept_ops(forward, chosen)
        self._tables.whole.apply_forward(forward)

    def _part_of_forward(self, event: TraceEvent, forward: Forward, chosen: BoolArray, tokens: BoolArray) -> None:
        """Make of the copy of a forward, the last event, what some of its requests and tokens are."""
        part, ints, data = _chosen(forward, chosen, tokens), event.ints, event.bytes
        for name in (*_PER_REQUEST, *_OF_ATTENTION):
            if len(values := ints.get(name, NOTHING)) == len(chosen):
                ints[name] = values[chosen]
        ints["input_ids"], ints["positions"] = part.input_ids, part.positions
        ints["out_cache_loc"] = np.concatenate([NOTHING, *part.out_cache_loc])
        if len(forward.sampled_lens):
            ints["sampled_lens"], ints["sampled_tokens"] = part.sampled_lens, part.sampled_tokens
            _keep_logprobs(ints, np.repeat(chosen, forward.sampled_lens))
        for name, streams in (("kv_bytes", forward.kv_bytes), ("kv_submitted_bytes", forward.kv_submitted)):
            if streams:
                data[name] = np.concatenate([rows[tokens].reshape(-1) for rows in streams])
        at = np.cumsum(chosen) - 1
        keep_runs(ints, "attention", chosen, at, "attention_slots")
        keep_runs(ints, "window", chosen, at, None)
        cells, written, place = self._tables.prefixes(part), self._written(part), len(self._events) - 1
        attended = np.repeat(ints.get("attention_group", NOTHING), ints.get("attention_count", NOTHING))
        self.losses.name({self.losses.rows: np.unique(part.req_pool_indices)}, place, begins=True)
        for group, slots in written.items():
            reads = [self._tables.reads(part, group, cells), ints.get("attention_slots", NOTHING)[attended == group]]
            read = self._inside(group, np.concatenate(reads))
            self.losses.name({group: read}, place)
            self.losses.name({group: np.setdiff1d(slots, read)}, place, begins=self.header.slot_history != "complete")
        self._keep_changes(event, place)
        kept = self._kept_ops(forward, chosen)
        for name in [name for name in ints if name.startswith("recurrent_")]:
            ints[name] = ints[name][kept]
        if "recurrent_request" in ints:
            ints["recurrent_request"] = np.where(ints["recurrent_op"] >= STEP, at[ints["recurrent_request"]], -1)
        if "identity_start" in ints:  # by request
            mine = chosen[ints["identity_start"]]
            ints.update({name: ints[name][mine] for name in ints if name.startswith("identity_")})
            ints["identity_start"] = at[ints["identity_start"]]
        for table in [name for name in ("value", "output") if f"{name}_request" in ints]:
            mine = chosen[ints[f"{table}_request"]]
            ints.update({name: ints[name][mine] for name in ints if name.startswith(f"{table}_")})
            ints[f"{table}_request"] = at[ints[f"{table}_request"]]
        if "value_token" in ints:
            ints["value_token"] = (np.cumsum(tokens) - 1)[ints["value_token"]]
        self._tables.supply(event, part, cells)
        for name in [name for name, values in ints.items() if not len(values)]:
            del ints[name]
        for name in [name for name, values in data.items() if not len(values)]:
            del data[name]

    def _written(self, forward: Forward) -> dict[int, Int64Array]:
        """Return the slots that a forward writes, by pool group."""
        found = {}
        for group, known in enumerate(self.header.groups):
            if known.runner == forward.runner:
                slots = forward.out_cache_loc[known.table] if forward.out_cache_loc else NOTHING
                found[group] = self._inside(group, self._tables.translated(known.lut, slots))
        return found

    def _inside(self, group: int, slots: Int64Array) -> Int64Array:
        unique = np.unique(slots)
        return unique[(unique > 0) & (unique < self.header.groups[group].num_slots)]

    def _keep_changes(self, event: TraceEvent, place: int) -> None:
        """Keep of the changed bytes those of slots that something kept has named."""
        streams, ints = self.header.streams(int(event.scalars.get("runner", 0))), event.ints
        if "kv_change_slot" not in ints:
            return
        of, slots = ints["kv_change_stream"], ints["kv_change_slot"]
        groups = np.array([group for group, _ in streams], np.int64)[of]
        mine = np.zeros(len(slots), np.bool_)
        for group in np.unique(groups).tolist():
            here = np.flatnonzero(groups == group)
            mine[here] = self.losses.named(group, slots[here]) > 0
            self.losses.name({group: np.unique(slots[here][mine[here]])}, place)
            self.losses.drop({group: np.unique(slots[here][~mine[here]])})
        widths = np.array([stream.capture_bytes for _, stream in streams], np.int64)[of]
        event.bytes["kv_change_bytes"] = event.bytes["kv_change_bytes"][np.repeat(mine, widths)]
        ints.update({f"kv_change_{name}": ints[f"kv_change_{name}"][mine] for name in ("stream", "slot", "phase")})

    def _kept_ops(self, forward: Forward, chosen: BoolArray) -> BoolArray:
        """Return which ops on recurrent state are kept: those of chosen requests whose source is as the trace says."""
        ops = forward.recurrent if forward.recurrent is not None else np.zeros((0, 7), np.int64)
        kept = np.ones(len(ops), np.bool_)
        for number, op in enumerate(ops.tolist()):
            pool = self._states[op[POOL]]
            unknown = op[OP] in (COPY, STEP) and op[SOURCE] >= 0 and bool(pool[op[SOURCE]])
            kept[number] = not unknown and bool(chosen.any()) and (op[OP] < STEP or bool(chosen[op[REQUEST]]))
            pool[op[SLOT]] = not kept[number]
        return kept

    # --- what is put out

    def _sample(self, view: EventView, number: int) -> None:
        mask, lens = self._masks.get(int(view.scalar("forward"))), view.ints("sampled_lens")
        if mask is not None and len(mask) == len(lens) and self._keep(number, NOBODY, {}):
            event = self._put(view, number)
            event.ints["sampled_lens"] = lens[mask]
            event.ints["sampled_tokens"] = view.ints("sampled_tokens")[np.repeat(mask, lens)]
            _keep_logprobs(event.ints, np.repeat(mask, lens))

    def _put(self, view: EventView, number: int) -> TraceEvent:
        event = self._copies.copy(view)
        self._events.append(event)
        self._numbers.append(number)
        return event

    def _forget(self, event: TraceEvent, number: int) -> None:
        """Put an event that makes all unknown; what came before it is of no use to anybody but for names."""
        self._tables.forget()
        self.losses.forget()
        named = [(e, n) for e, n in zip(self._events, self._numbers, strict=True) if e.kind == "request"]
        self._events = [*(e for e, _ in named), event]
        self._numbers = [*(n for _, n in named), number]


def _keep_logprobs(ints: dict[str, Int64Array], tokens: BoolArray) -> None:
    logprobs = ints.pop("sampled_logprobs", NOTHING)
    if len(logprobs) == len(tokens):
        ints["sampled_logprobs"] = logprobs[tokens]


def _chosen(forward: Forward, chosen: BoolArray, tokens: BoolArray) -> Forward:
    """Return what is left of a forward with some of its requests and tokens."""
    lens, sampled = forward.sampled_lens, forward.sampled_tokens
    if len(lens):
        lens, sampled = lens[chosen], sampled[np.repeat(chosen, lens)]
    return replace(
        forward,
        req_pool_indices=forward.req_pool_indices[chosen],
        request_ids=forward.request_ids[chosen],
        prefix_lens=forward.prefix_lens[chosen],
        extend_lens=forward.extend_lens[chosen],
        truth_lens=None if forward.truth_lens is None else forward.truth_lens[chosen],
        sampled_lens=lens,
        sampled_tokens=sampled,
        input_ids=forward.input_ids[tokens],
        positions=forward.positions[tokens],
        out_cache_loc=tuple(slots[tokens] for slots in forward.out_cache_loc),
    )
