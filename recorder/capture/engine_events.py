"""What an engine does beside its forwards: requests, slots that change hands, copies, sweeps, transfers, notes."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

import numpy as np

from ...kernels.arrays import Int64Array
from ..errors import json_text
from ..trace import schema
from ..trace.event import EventRows
from ..trace.schema import (
    SEND,
    TIER_POOL,
    AllocStatus,
    RequestStatus,
    SlotChange,
    TransferDirection,
    TransferStatus,
)
from .host_arrays import CopyEnds, one_of, ordered_runs, own_int64, runs_to_slots, whole_number
from .privacy import IdentityValue, identity_columns
from .recording import Recording, guarded
from .slot_numbers import GivenOut, SlotsChanged, allocation_rows, change_rows

MAX_NAME: Final = 1024  # characters of a request's name: whoever sends a request may choose it


class EventRecording(Recording):
    """A recording of events between forwards; `Recorder` adds the forwards."""

    def shown_name(self, name: str) -> str:
        """Return a request's name as the trace has it: hashed, if names are."""
        return name if self._privacy is None else self._privacy.hash_name(name)

    def identity_columns(self, identity: Sequence[IdentityValue]) -> dict[str, Int64Array]:
        """Return identities as an event has them; texts stay private, if names do."""
        return identity_columns(identity, str if self._privacy is None else self._privacy.hash_name)

    @guarded
    def request(
        self,
        *,
        request_id: int,
        name: str = "",
        prompt_len: int = -1,
        room: int = -1,
        labels: Mapping[str, Any] | None = None,
        identity: Sequence[IdentityValue] = (),
    ) -> None:
        """Say that a request became known: its 64-bit id, the engine's name for it, its prompt's length in tokens.

        `identity` is what its KV depends on beside its tokens; to be said again if that changes, as by new weights.
        """
        name = self.shown_name(str(name))
        number = whole_number(request_id, "request_id")
        if self._strict:
            self._said_requests.add(number)
        self._record(
            "request",
            self.identity_columns(identity) if identity else {},
            request_id=number,
            name=name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…",
            prompt_len=whole_number(prompt_len, "prompt_len"),
            room=whole_number(room, "room"),
            labels=_json(labels),
        )

    @guarded
    def request_status(self, *, request_id: int, status: RequestStatus, row: int = -1, note: str = "") -> None:
        """Say that a request got its row ("admitted") or gave it back ("retracted", "finished", "aborted").

        To be called after the frees that belong to it: what a request still owns then has leaked.
        """
        one_of("status", status, schema.REQUEST_STATUSES)
        number = whole_number(request_id, "request_id")
        self._record("status", _row_column(row), request_id=number, status=status, note=note)
        if status != "admitted":
            self._lent_rows.give_back(number)

    @guarded
    def slots(
        self,
        kind: SlotChange,
        *,
        group: Any,
        slots: Any = None,
        runs: tuple[Any, Any] | None = None,
        request_id: int = -1,
        row: int = -1,
        status: AllocStatus = "",
        note: str = "",
    ) -> None:
        """Say that slots were given to a request ("alloc"), given back ("free") or dropped by a cache ("evict").

        Args:
            kind: "alloc", "free" or "evict".
            group: index into the header's groups; of `runs`, one for all or `[n]`.
            slots: `[n]` slots in any order; or
            runs: `(starts, counts)`, `[n]` each.
            request_id: their request; -1 for none.
            row: the request's row, -1 for none.
            status: of an alloc: "" fresh from the pool, "shared" if the request joined slots that somebody holds,
                "cached" if it handed its slots to the prefix cache.
            note: why.
        """
        one_of("kind", kind, get_args(SlotChange))
        one_of(f"status of {kind}", status, schema.ALLOC_STATUSES if kind == "alloc" else ("",))
        starts, counts = (
            map(own_int64, runs, ("runs", "runs")) if runs else ordered_runs(np.sort(own_int64(slots, "slots")))
        )
        groups = np.full(starts.size, own_int64(group, "group"), np.int64)
        if self._strict and ((groups < 0) | (groups >= len(self.header.groups))).any():
            raise ValueError(f"group is {groups.tolist()}, the header has {len(self.header.groups)}")
        ints = _slot_columns(groups, self._numbers.runs(groups, starts), counts, row)
        self._record(kind, ints, request_id=whole_number(request_id, "request_id"), status=status, note=note)

    @guarded
    def allocations(
        self, groups: Sequence[int], slots: Int64Array, requests: Int64Array, *, request_ids: Any, rows: Any
    ) -> None:
        """Say what `slots` says of allocations, of all requests of a forward at once.

        `slots` are `[n]`, those of a request together and ascending, in each of `groups` the same; `requests` `[n]` places in
        the batch, ascending; `request_ids`, `rows` `[bs]`. A negative id is nobody's, or several requests': "shared".
        """
        if not slots.size:
            return
        given = GivenOut(groups, slots, requests, np.asarray(request_ids, np.int64), np.asarray(rows, np.int64))
        self._put_all([allocation_rows(given, self._numbers, self._now())])

    @guarded
    def slots_changed(self, changes: Sequence[SlotsChanged], times_ns: Sequence[int] | None = None) -> None:
        """Say what `slots` says of many changes, in order, at once; `times_ns` are when, if not now."""
        self._put_all(change_rows(changes, times_ns or [self._now()] * len(changes), self._numbers))

    def slot_changed(self, change: SlotsChanged) -> None:
        """Say what `slots` says of one change."""
        self.slots_changed((change,))

    def _put_all(self, events: Sequence[EventRows]) -> None:
        self.outbox.put_all(events)
        self._stop_with_writer()

    @guarded
    def sampled(
        self,
        *,
        forward: int,
        sampled_tokens: Any,
        sampled_lens: Any,
        sampled_logprobs: Any = (),
        logprobs_kind: str | Int64Array = "",
    ) -> None:
        """Say what an earlier forward sampled, where its `after_forward` could not know it yet (overlap scheduling).

        `forward` is its number, which `next_forward` gave before it, `sampled_tokens` `[sum(sampled_lens)]` request by
        request, `sampled_lens` `[bs]` of that forward, padding's among them; log-probabilities as in `after_forward`.
        """
        lens = own_int64(sampled_lens, "sampled_lens")
        rows = self._said_rows.get(int(forward), lens.size)
        if lens.size != rows:
            raise ValueError(
                f"sampled_lens has length {lens.size}, expected {rows}: all of forward {forward}, padding too"
            )
        tokens = self._hash_tokens(own_int64(sampled_tokens, "sampled_tokens"))
        if tokens.size != int(np.maximum(lens, 0).sum()):
            raise ValueError(f"sampled_lens ask for {int(np.maximum(lens, 0).sum())} tokens, {tokens.size} came")
        ints = {"sampled_lens": lens, "sampled_tokens": tokens}
        logprobs = self._logprobs(sampled_logprobs, logprobs_kind, tokens.size)
        if logprobs.size:
            ints["sampled_logprobs"] = logprobs
        self._record("sample", ints, forward=int(forward))

    @guarded
    def kv_copy(
        self,
        *,
        group: int,
        src: Any,
        dst: Any,
        count: Any,
        src_tier: int = TIER_POOL,
        dst_tier: int = TIER_POOL,
        request_id: int = -1,
        note: str = "",
        ends: CopyEnds | None = None,
    ) -> None:
        """Say that whole slots were copied outside a forward; run i copies `count[i]` slots from `src[i]` to `dst[i]`.

        A run of no slots copies nothing, and says by `ends` what lies there.

        Args:
            group: index into the header's groups.
            src: `[n]` first slot of each run; everything is read before anything is written.
            dst: `[n]`.
            count: `[n]`.
            src_tier: `TIER_POOL` or `TIER_HOST`.
            dst_tier: the same.
            request_id: the slots' request, -1 for none.
            note: why: fork, offload, load-back, compaction.
            ends: what lies at both ends of each run, if that was looked at.
        """
        src, dst, count = own_int64(src, "src"), own_int64(dst, "dst"), own_int64(count, "count")
        if not src.size == dst.size == count.size:
            raise ValueError(f"src, dst, count have lengths {src.size}, {dst.size}, {count.size}, expected equal ones")
        same = np.ones(src.size, np.int64)
        src = self._numbers.runs(same * group, src) if src_tier == TIER_POOL else src
        dst = self._numbers.runs(same * group, dst) if dst_tier == TIER_POOL else dst
        ints = {
            "copy_group": same * group,
            "copy_src_tier": same * src_tier,
            "copy_src": src,
            "copy_dst_tier": same * dst_tier,
            "copy_dst": dst,
            "copy_count": count,
        }
        if ends is not None:
            hashed = [own_int64(values) for values in ends]
            if self._privacy is not None:
                hashed[:3] = map(self._privacy.hash_ends, hashed[:3])
            names = ("copy_src_hash", "copy_dst_hash", "copy_before_hash", "copy_landed")
            ints |= dict(zip(names, hashed, strict=True))
        kv = self.kv[group]
        read, written = runs_to_slots(src, count), runs_to_slots(dst, count)
        if self._record("kv_copy", ints, request_id=int(request_id), note=note):
            kv.store_copy(src_tier=src_tier, src=read, dst_tier=dst_tier, dst=written)
        else:
            kv.lose(written, tier=dst_tier)

    @guarded
    def sweep(self, *, groups: Any, slots: Any, positions: Any, prev_slots: Any, locked: Any, runner: int = 0) -> None:
        """Say what the prefix cache holds; the bytes of those slots are compared with those that were written.

        Args:
            groups: `[n]` index into the header's groups, or one for all; groups of `runner` only.
            slots: `[n]` in the group's own numbering; 0 where a sliding-window half is gone.
            positions: `[n]`.
            prev_slots: `[n]` slot of the position before, -1 at position 0.
            locked: `[n]` whether a running request stands on it.
            runner: index into the header's runners.
        """
        own, of_group = own_int64(slots, "slots"), own_int64(groups, "groups")
        given = {"slot": own, "position": positions, "prev": prev_slots, "locked": locked}
        ints = {"sweep_group": np.full(own.size, of_group[0]) if of_group.size == 1 else of_group}
        ints |= {f"sweep_{name}": own_int64(values, name) for name, values in given.items()}
        for column, name in zip(ints, ("groups", "slots", "positions", "prev_slots", "locked"), strict=True):
            if ints[column].size != own.size:
                raise ValueError(f"{name} has length {ints[column].size}, expected {own.size}, one for each slot")
        of_group = ints["sweep_group"]
        for column in ("sweep_slot", "sweep_prev"):
            ints[column] = self._numbers.of_groups(of_group, ints[column])
        filled = {name: values for name, values in ints.items() if values.size}
        event = self._event("sweep", filled, forward=self._forwards - 1, runner=int(runner))
        slots = ints["sweep_slot"]
        self._put_watched(event, runner, [(int(g), slots[of_group == g]) for g in np.unique(of_group)])

    @guarded
    def transfer(
        self,
        status: TransferStatus,
        *,
        direction: TransferDirection,
        room: int,
        group: int,
        slots: Any,
        start_position: int = 0,
        request_id: int = -1,
        row: int = -1,
        peer: str = "",
        num_bytes: int = 0,
        note: str = "",
        read: bool = True,
    ) -> None:
        """Say that slots are being sent to another engine or received from one; the two sides meet by `room`.

        A sender's bytes are compared with those that were written; a receiver's are recorded when they have arrived. Not so if
        `read` is false: then nothing is known of what has arrived.

        Args:
            status: "start", "end" or "failed".
            direction: "send" or "receive".
            room: what both sides call the transfer.
            group: index into the header's groups.
            slots: `[n]` in order of position, in the group's own numbering.
            start_position: position of the first slot.
            request_id: their request.
            row: the request's row, -1 for none.
            peer: the other side's name.
            num_bytes: bytes moved so far.
            note: why it failed; of a send `schema.PULLED`, if the other side takes what it lacks.
        """
        own, kv = self._numbers.of_group(group, own_int64(slots, "slots")), self.kv[group]
        one_of("status", status, schema.TRANSFER_STATUSES)
        one_of("direction", direction, schema.TRANSFER_DIRECTIONS)
        starts, counts = ordered_runs(own)
        ints = _slot_columns(np.full(starts.size, group, np.int64), starts, counts, row)
        event = self._event(
            "transfer",
            ints | {"prefix_lens": np.array([start_position], np.int64)},
            status=status,
            mode=direction,
            forward=self._forwards - 1,
            runner=kv.group.runner,
            room=int(room),
            request_id=int(request_id),
            peer=peer,
            num_bytes=int(num_bytes),
            note=note,
        )
        if direction == SEND and read:
            self._put_watched(event, kv.group.runner, [(group, own)])
            return
        lands = direction != SEND and status == "end"
        received = [kv.gather(stream, own) for stream in range(len(kv.sources))] if lands and read else []
        if received:
            event.bytes["kv_bytes"] = np.concatenate([rows.reshape(-1) for rows in received])
        if not self._put(event):
            kv.lose(own)
        elif lands and read:
            kv.store_written(own, received)
        elif lands:
            kv.forget_slots(own)

    @guarded
    def mark(self, note: str, labels: Mapping[str, Any] | None = None) -> None:
        """Leave a note in the trace, with labels as JSON; an injected fault's ground truth, for one."""
        self._record("mark", note=note, labels=_json(labels))

    @guarded
    def freeze(self, note: str = "") -> None:
        """Keep all that a flight recorder still has, and leave a mark that says why; the recording goes on.

        Done by the writer's thread: what happens after this call may be in it too. See docs/guide/segments.md.
        """
        self.outbox.hand_over()  # what is held comes before it
        self.outbox.writer.freeze(note)

    @guarded
    def lost(self, note: str) -> None:
        """Say that something is missing here, nobody knows what; nothing before it is compared with what follows."""
        self.start_over(note)

    @guarded
    def begins_late(self) -> None:
        """Say, before anything else, that the engine had run before: what it holds is unknown, and nothing is lost."""
        self.start_over(schema.RAN_BEFORE, status=schema.LATE)


def _row_column(row: int) -> dict[str, Int64Array]:
    return {"req_pool_indices": np.array([row], np.int64)} if row >= 0 else {}


def _slot_columns(groups: Int64Array, starts: Int64Array, counts: Int64Array, row: int) -> dict[str, Int64Array]:
    return {"slot_group": groups, "slot_start": starts, "slot_count": counts, **_row_column(row)}


def _json(labels: Mapping[str, Any] | None) -> str:
    if not labels:
        return ""
    return json_text({str(key): value for key, value in labels.items()}, sort_keys=True, default=str)
