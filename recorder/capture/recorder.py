"""The recorder: what an engine's integrator calls around each forward, and what never harms the engine.

No method raises after construction and none waits for the disk. A fault inside switches the recorder off, says so once
in the log (logger "kvcanary") and in the trace; the engine goes on. Where the writer's queue is full, whole events are
dropped, counted, and a loss event says how many and which slots they wrote.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..text import json_text
from ..trace.schema import PHASE_AFTER, PHASE_BEFORE, SEND, TIER_POOL
from ..writing.outbox import RecorderStats
from .attention import take_attention
from .captured import CapturedRecording
from .engine_events import (
    sample_event,
    slots_event,
    status_event,
    sweep_entries,
    sweep_event,
    transfer_event,
)
from .forward_event import forward_event
from .forward_input import AttentionInput, ForwardInput, copy_forward
from .host_arrays import Int64Array, own_int64, runs_to_slots
from .kv_watch import of_runner, take_forward, watch
from .recording import guarded, prepare_kernels
from .submitted import Submitted, take_submitted

MAX_NAME: Final = 1024  # characters of a request's name: whoever sends a request may choose it

_NOTHING = np.empty(0, np.int64)


class Recorder(CapturedRecording):
    """Records one engine's forwards into one trace; a context manager.

    Args:
        path: the trace to write; a file that exists is not overwritten unless `overwrite=True`.
        header: what the engine is; `capture`, `trace_id`, `created_ns` and `recorder_version` are filled in here.
        kv_sources: for each `(group index, stream index)` of the header, where the stream's bytes lie.
        kv_watch_every: compare the prefix bytes that are read with those that were written, every N forwards;
            0 never.
        backend: what the recorder's kernels run on, "cpu" or "reference".
        privacy: hashes tokens and names before anything else sees them; None: they are recorded as they are.
        writer_options: passed to `TraceWriter`: `flush_bytes`, `flush_interval_ns`, `max_queued_bytes`,
            `compression`, `overwrite`, and for segments and a flight recorder those of docs/guide/segments.md.

    Raises:
        ValueError: sources that do not fit the header, or options that make no sense.
        TraceError: the file cannot be created.
    """

    @guarded
    def request(
        self,
        *,
        request_id: int,
        name: str = "",
        prompt_len: int = -1,
        room: int = -1,
        labels: Mapping[str, Any] | None = None,
    ) -> None:
        """Say that a request became known: its 64-bit id, the engine's name for it, its prompt's length in tokens."""
        name = str(name) if self._privacy is None else self._privacy.hash_name(str(name))
        self._say(
            "request",
            request_id=int(request_id),
            name=name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…",
            prompt_len=int(prompt_len),
            room=int(room),
            labels=_json(labels),
        )

    @guarded
    def before_forward(self, told: ForwardInput) -> None:
        """Take down what a forward is about to read and write; `after_forward` completes it."""
        if self._pending is not None:
            self._pending.note = "the engine did not call after_forward()"
            self._finish_forward(_NOTHING, _NOTHING)
        forward = copy_forward(
            told,
            self.header,
            number=self._forwards,
            time_ns=self._now(),
            hash_tokens=self._hash_tokens,
            numbers=self._numbers,
        )
        self._forwards += 1
        forward.changes = self._state.changes(forward)
        every = self._kv_watch_every
        forward.kv_watched = every > 0 and forward.number % every == 0 and any(kv.sources for kv in self._kv)
        if told.attention is not None:
            take_attention(forward, self._numbered(told.attention), self.header)
        self._pending = forward
        if forward.kv_watched:
            watch(forward, self._kv, PHASE_BEFORE)

    @guarded
    def attention(self, told: AttentionInput) -> None:
        """Take down what attention gets in the forward that `before_forward` began, once its metadata is there.

        A second call in a forward adds to the first: what either saw differ is recorded, and the last lengths are.
        """
        if self._pending is None:
            raise ValueError("attention without before_forward")
        take_attention(self._pending, self._numbered(told), self.header)

    def _numbered(self, told: AttentionInput) -> AttentionInput:
        slots = tuple(self._numbers.read(number, read) for number, read in enumerate(told.slots[: len(self._kv)]))
        return dataclasses.replace(told, slots=(*slots, *told.slots[len(slots) :]))

    @guarded
    def after_forward(
        self, *, sampled_tokens: Any = (), sampled_lens: Any = (), note: str = "", submitted: Submitted | None = None
    ) -> None:
        """Complete the event of the forward that `before_forward` began.

        Args:
            sampled_tokens: `[sum(sampled_lens)]`, request by request.
            sampled_lens: `[bs]` how many tokens each request got, or nothing where sampling is told otherwise.
            note: kept in the event; for a forward that failed, how.
            submitted: for each `(group, stream)` whose K or V was seen on its way to the cache, `[T, ...]` what the model
                handed in, a token's bytes in the order in which the pool stores them; compared with what is stored.
        """
        if self._pending is None:
            raise ValueError("after_forward without before_forward")
        lens, tokens = own_int64(sampled_lens), self._hash_tokens(own_int64(sampled_tokens))
        if lens.size not in (0, self._pending.rows.size) or tokens.size != int(np.maximum(lens, 0).sum()):
            raise ValueError(
                f"sampled_lens has length {lens.size} and asks for {int(np.maximum(lens, 0).sum())} tokens, expected "
                f"length {self._pending.rows.size} or 0 and {tokens.size} tokens"
            )
        self._pending.note = note
        self._finish_forward(tokens, lens, submitted)

    @guarded
    def slots(
        self,
        kind: str,
        *,
        group: Any,
        slots: Any = None,
        runs: tuple[Any, Any] | None = None,
        request_id: int = -1,
        row: int = -1,
        status: str = "",
        note: str = "",
    ) -> None:
        """Say that slots were given to a request ("alloc"), given back ("free") or dropped by a cache ("evict").

        Args:
            kind: "alloc", "free" or "evict".
            group: index into the header's groups; of `runs`, one for all or `[n]`.
            slots: `[n]` slots in any order; or
            runs: `(starts, counts)`, `[n]` each.
            request_id: whose they are or were; -1 for nobody's.
            row: the request's row, -1 for none.
            status: of an alloc: "" fresh from the pool, "shared" where the request joined slots that somebody holds,
                "cached" where it handed its slots to the prefix cache.
            note: why.
        """
        event = slots_event(
            kind,
            time_ns=self._now(),
            group=group,
            slots=slots,
            runs=runs,
            request_id=request_id,
            row=row,
            status=status,
            note=note,
        )
        event.ints["slot_start"] = self._numbers.runs(event.ints["slot_group"], event.ints["slot_start"])
        self._put(event)

    @guarded
    def request_status(self, *, request_id: int, status: str, row: int = -1, note: str = "") -> None:
        """Say that a request got its row ("admitted") or gave it back ("retracted", "finished", "aborted").

        Told after the frees that belong to it: what a request still owns then has leaked.
        """
        self._put(status_event(time_ns=self._now(), request_id=request_id, status=status, row=row, note=note))

    @guarded
    def sampled(self, *, forward: int, sampled_tokens: Any, sampled_lens: Any) -> None:
        """Say what an earlier forward sampled, where its `after_forward` could not know it yet (overlap scheduling).

        Args:
            forward: the forward's number, which `next_forward` gave before it.
            sampled_tokens: `[sum(sampled_lens)]`, request by request.
            sampled_lens: `[bs]` of that forward.
        """
        self._put(
            sample_event(
                time_ns=self._now(),
                forward=forward,
                sampled_tokens=self._hash_tokens(own_int64(sampled_tokens)),
                sampled_lens=sampled_lens,
            )
        )

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
        entries = sweep_entries(groups, slots, positions, prev_slots, locked)
        entries = dataclasses.replace(
            entries,
            slots=self._numbers.of_groups(entries.groups, entries.slots),
            prev_slots=self._numbers.of_groups(entries.groups, entries.prev_slots),
        )
        event = sweep_event(entries, time_ns=self._now(), forward=self._forwards - 1, runner=runner)
        self._put_watched(
            event, runner, [(int(g), entries.slots[entries.groups == g]) for g in np.unique(entries.groups)]
        )

    @guarded
    def transfer(
        self,
        status: str,
        *,
        direction: str,
        room: int,
        group: int,
        slots: Any,
        start_position: int = 0,
        request_id: int = -1,
        row: int = -1,
        peer: str = "",
        num_bytes: int = 0,
        note: str = "",
    ) -> None:
        """Say that slots are being sent to another engine or received from one; the two sides meet by `room`.

        A sender's bytes are compared with those that were written; a receiver's are taken down when they have landed.

        Args:
            status: "start", "end" or "failed".
            direction: "send" or "receive".
            room: what both sides call the transfer.
            group: index into the header's groups.
            slots: `[n]` in order of position, in the group's own numbering.
            start_position: position of the first slot.
            request_id: whose they are.
            row: the request's row, -1 for none.
            peer: the other side's name.
            num_bytes: bytes moved so far.
            note: why it failed.
        """
        own, kv = self._numbers.of_group(group, own_int64(slots)), self._kv[group]
        event = transfer_event(
            status,
            time_ns=self._now(),
            forward=self._forwards - 1,
            runner=kv.group.runner,
            direction=direction,
            room=room,
            group=group,
            slots=own,
            start_position=start_position,
            request_id=request_id,
            row=row,
            peer=peer,
            num_bytes=num_bytes,
            note=note,
        )
        if direction == SEND:
            self._put_watched(event, kv.group.runner, [(group, own)])
            return
        landed = [kv.gather(stream, own) for stream in range(len(kv.sources))] if status == "end" else []
        if landed:
            event.bytes["kv_bytes"] = np.concatenate([rows.reshape(-1) for rows in landed])
        if not self._put(event):
            kv.lose(own)
        elif status == "end":
            kv.take_written(own, landed)

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
    ) -> None:
        """Say that whole slots were copied outside a forward; run i copies `count[i]` slots from `src[i]` to `dst[i]`.

        Args:
            group: index into the header's groups.
            src: `[n]` first slot of each run; everything is read before anything is written.
            dst: `[n]`.
            count: `[n]`.
            src_tier: `TIER_POOL` or `TIER_HOST`.
            dst_tier: the same.
            request_id: whose slots they are, -1 for nobody's.
            note: why: fork, offload, load-back, compaction.
        """
        src, dst, count = own_int64(src), own_int64(dst), own_int64(count)
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
        kv = self._kv[group]
        read, written = runs_to_slots(src, count), runs_to_slots(dst, count)
        if self._say("kv_copy", ints=ints, request_id=int(request_id), note=note):
            kv.take_copy(src_tier=src_tier, src=read, dst_tier=dst_tier, dst=written)
        else:
            kv.lose(written, tier=dst_tier)

    @guarded
    def mark(self, note: str, labels: Mapping[str, Any] | None = None) -> None:
        """Leave a note in the trace, with labels as JSON; an injected fault's ground truth, for one."""
        self._say("mark", note=note, labels=_json(labels))

    @guarded
    def freeze(self, note: str = "") -> None:
        """Keep all that a flight recorder still has, and leave a mark that says why; the recording goes on.

        Done by the writer's thread: what is told after this call may be in it too. See docs/guide/segments.md.
        """
        self._outbox.freeze(note)

    @guarded
    def lost(self, note: str) -> None:
        """Say that something is missing here, nobody knows what; nothing before it is held against what follows."""
        self.start_over(note)

    def _end_pending(self, note: str) -> None:
        if self._pending is not None:
            self.after_forward(note=note)

    def _finish_forward(
        self, sampled_tokens: Int64Array, sampled_lens: Int64Array, submitted: Submitted | None = None
    ) -> None:
        forward, self._pending = self._pending, None
        if forward is None:
            return
        mine = of_runner(self._kv, forward.runner)
        gathered = {n: [kv.gather(s, forward.written[n]) for s in range(len(kv.sources))] for n, kv in mine}
        if submitted:
            take_submitted(forward, submitted, self._kv, gathered)
        if forward.kv_watched:
            watch(forward, self._kv, PHASE_AFTER)
        event = forward_event(forward, sampled_tokens, sampled_lens, gathered)
        if not self._put(event):
            for number, kv in mine:
                kv.lose(forward.written[number])
            return
        self._state.commit(forward, sampled_tokens, sampled_lens)
        take_forward(forward, self._kv, gathered)


def _json(labels: Mapping[str, Any] | None) -> str:
    if not labels:
        return ""
    return json_text({str(key): value for key, value in labels.items()}, sort_keys=True, default=str)


__all__ = ["Recorder", "RecorderStats", "prepare_kernels"]
