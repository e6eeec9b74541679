"""The recorder: what an engine's integrator calls around each forward, and what never harms the engine.

No method raises after construction and none waits for the disk. A fault inside switches the recorder off, says so once
in the log (logger "kvcanary") and in the trace; the engine goes on. Where the writer's queue is full, whole events are
dropped, counted, and a loss event says how many and which slots they wrote.
"""

import atexit
import dataclasses
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec

import numpy as np

from ..kernels import changes, gather
from ..kernels.kv_source import KvSource
from .event import TraceEvent
from .forward_event import forward_event
from .forward_input import CopiedForward, ForwardInput, copy_forward
from .header import CaptureInfo, TraceHeader
from .host_arrays import Int64Array, own_int64
from .kv_shadow import group_shadows
from .kv_watch import of_runner, take_forward, watch
from .outbox import Outbox, RecorderStats
from .schema import PHASE_AFTER, PHASE_BEFORE, TIER_POOL
from .slot_runs import runs_to_slots, slots_to_runs
from .state_shadow import StateShadow
from .writer import TraceWriter

logger = logging.getLogger("kvcanary")

_P = ParamSpec("_P")
_NOTHING = np.empty(0, np.int64)


def prepare_kernels(backend: str = "cpu") -> None:
    """Compile the recorder's kernels, or load them from the disk cache; done once, before the engine runs."""
    gather.prepare(backend)
    changes.prepare(backend)


def _guarded(
    method: Callable[Concatenate["Recorder", _P], None],
) -> Callable[Concatenate["Recorder", _P], None]:
    """Make a method harmless: nothing is raised, and after the first fault nothing is done."""

    @functools.wraps(method)
    def call(self: "Recorder", /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self._off or os.getpid() != self._pid:  # a forked child may not even take the lock
            return
        begin = time.perf_counter_ns()
        try:
            with self._lock:
                if not self._off:  # another thread may have closed the recorder meanwhile
                    method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            self.switch_off(f"{method.__name__}: {type(error).__name__}: {error}", error)
        self._engine_thread_ns += time.perf_counter_ns() - begin

    return call


class Recorder:
    """Records one engine's forwards into one trace; a context manager.

    Args:
        path: the trace to write; a file that exists is not overwritten unless `overwrite=True`.
        header: what the engine is; `capture`, `trace_id`, `created_ns` and `recorder_version` are filled in here.
        kv_sources: for each `(group index, stream index)` of the header, where the stream's bytes lie.
        kv_watch_every: compare the prefix bytes that are read with those that were written, every N forwards;
            0 never.
        backend: what the recorder's kernels run on, "cpu" or "reference".
        writer_options: passed to `TraceWriter`: `flush_bytes`, `flush_interval_ns`, `max_queued_bytes`,
            `compression`, `overwrite`.

    Raises:
        ValueError: sources that do not fit the header, or options that make no sense.
        TraceError: the file cannot be created.
    """

    def __init__(
        self,
        path: str | Path,
        header: TraceHeader,
        *,
        kv_sources: Mapping[tuple[int, int], KvSource] | None = None,
        kv_watch_every: int = 1,
        backend: str = "cpu",
        **writer_options: Any,
    ) -> None:
        if kv_watch_every < 0:
            raise ValueError(f"kv_watch_every is {kv_watch_every}, expected 0 (never) or a number of forwards")
        prepare_kernels(backend)
        self.path = Path(path)
        self._kv = group_shadows(header, kv_sources or {}, backend=backend)
        self._state = StateShadow(header, backend=backend)
        self._kv_watch_every = kv_watch_every
        # Wall-clock time that cannot run backwards: one reading of the clock, then the monotonic one.
        self._clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        self.header = dataclasses.replace(
            header,
            created_ns=header.created_ns or self._now(),
            capture=CaptureInfo(kv_watch_every=kv_watch_every, truth_tokens=header.truth_table is not None),
        )
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._off = ""
        self._closed = False
        self._pending: CopiedForward | None = None
        self._forwards = 0
        self._engine_thread_ns = 0
        writer = TraceWriter(self.path, self.header, **writer_options)
        self.header = writer.header
        self._outbox = Outbox(writer, self._kv)
        # Registered after the writer's own, so run before it: a forward that killed the engine is still told.
        atexit.register(self.close)

    @_guarded
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
        self._say(
            "request",
            request_id=int(request_id),
            name=name,
            prompt_len=int(prompt_len),
            room=int(room),
            labels=_json(labels),
        )

    @_guarded
    def before_forward(self, told: ForwardInput) -> None:
        """Take down what a forward is about to read and write; `after_forward` completes it."""
        if self._pending is not None:
            self._pending.note = "the engine told of no end of this forward"
            self._finish_forward(_NOTHING, _NOTHING)
        forward = copy_forward(told, self.header, number=self._forwards, time_ns=self._now())
        self._forwards += 1
        forward.changes = self._state.changes(forward)
        every = self._kv_watch_every
        forward.kv_watched = every > 0 and forward.number % every == 0 and any(kv.sources for kv in self._kv)
        self._pending = forward
        if forward.kv_watched:
            watch(forward, self._kv, PHASE_BEFORE)

    @_guarded
    def after_forward(self, *, sampled_tokens: Any = (), sampled_lens: Any = (), note: str = "") -> None:
        """Complete the event of the forward that `before_forward` began.

        Args:
            sampled_tokens: `[sum(sampled_lens)]`, request by request.
            sampled_lens: `[bs]` how many tokens each request got, or nothing where sampling is told otherwise.
            note: kept in the event; for a forward that failed, how.
        """
        if self._pending is None:
            raise ValueError("after_forward without before_forward")
        lens, tokens = own_int64(sampled_lens), own_int64(sampled_tokens)
        if lens.size not in (0, self._pending.rows.size) or tokens.size != int(np.maximum(lens, 0).sum()):
            raise ValueError(
                f"sampled_lens has length {lens.size} and asks for {int(np.maximum(lens, 0).sum())} tokens, expected "
                f"length {self._pending.rows.size} or 0 and {tokens.size} tokens"
            )
        self._pending.note = note
        self._finish_forward(tokens, lens)

    @_guarded
    def slots(
        self,
        kind: str,
        *,
        group: int,
        slots: Any = None,
        runs: tuple[Any, Any] | None = None,
        request_id: int = -1,
        row: int = -1,
        note: str = "",
    ) -> None:
        """Say that slots were given to a request ("alloc"), given back ("free") or dropped by a cache ("evict").

        Args:
            kind: "alloc", "free" or "evict".
            group: index into the header's groups.
            slots: `[n]` slots in any order; or
            runs: `(starts, counts)`, `[n]` each.
            request_id: whose they are or were; -1 for nobody's.
            row: the request's row, -1 for none.
            note: why.
        """
        if kind not in ("alloc", "free", "evict"):
            raise ValueError(f"kind is {kind!r}, expected alloc, free or evict")
        starts, counts = (own_int64(part) for part in runs) if runs is not None else slots_to_runs(own_int64(slots))
        ints = {"slot_group": np.full(starts.size, group, np.int64), "slot_start": starts, "slot_count": counts}
        if row >= 0:
            ints["req_pool_indices"] = np.array([row], np.int64)
        self._say(kind, ints=ints, request_id=int(request_id), note=note)

    @_guarded
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

    @_guarded
    def mark(self, note: str, labels: Mapping[str, Any] | None = None) -> None:
        """Leave a note in the trace, with labels as JSON; an injected fault's ground truth, for one."""
        self._say("mark", note=note, labels=_json(labels))

    @_guarded
    def lost(self, note: str) -> None:
        """Say that something is missing here, nobody knows what; nothing before it is held against what follows."""
        if self._outbox.put_unknown_loss(note, self._now()):
            self._state.forget()
            for kv in self._kv:
                kv.forget()

    def close(self, timeout: float = 30.0) -> None:
        """Write out what is queued and the file's end, waiting at most `timeout` seconds; a second call does nothing."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._pending is not None:
                self.after_forward(note="recording ended during this forward")
            self._off = self._off or "closed"
        try:
            self._outbox.close(self._now(), timeout)
        except Exception:
            logger.exception("kvcanary: the trace %s could not be closed", self.path)
        self._kv.clear()  # the engine's pools must not live on through our views of them

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stats(self) -> RecorderStats:
        """Return what the recorder has done so far."""
        return RecorderStats(
            forwards=self._forwards,
            events=self._outbox.taken,
            dropped_events=self._outbox.dropped,
            engine_thread_ns=self._engine_thread_ns,
            off=self._off,
        )

    def _now(self) -> int:
        return self._clock_offset_ns + time.perf_counter_ns()

    def _finish_forward(self, sampled_tokens: Int64Array, sampled_lens: Int64Array) -> None:
        forward, self._pending = self._pending, None
        if forward is None:
            return
        mine = of_runner(self._kv, forward.runner)
        gathered = {n: [kv.gather(s, forward.written[n]) for s in range(len(kv.sources))] for n, kv in mine}
        if forward.kv_watched:
            watch(forward, self._kv, PHASE_AFTER)
        event = forward_event(forward, sampled_tokens, sampled_lens, gathered)
        if not self._put(event):
            for number, kv in mine:
                kv.lose(forward.written[number])
            return
        self._state.commit(forward, sampled_tokens, sampled_lens)
        take_forward(forward, self._kv, gathered)

    def _say(self, kind: str, *, ints: dict[str, Int64Array] | None = None, **scalars: int | str) -> bool:
        return self._put(TraceEvent(kind=kind, time_ns=self._now(), scalars=scalars, ints=ints or {}))

    def _put(self, event: TraceEvent) -> bool:
        if self._outbox.put(event):
            return True
        if self._outbox.failed:  # the writer has logged it
            self._off = f"the writer stopped: {self._outbox.failed}"
        return False

    def switch_off(self, reason: str, error: BaseException | None = None) -> None:
        """Stop recording for good and say so in the log and the trace: for an integrator whose own hook failed."""
        try:
            with self._lock:
                if self._off:
                    return
                self._off = reason
                self._pending = None
            logger.error("kvcanary: the recorder of %s switched itself off: %s", self.path, reason, exc_info=error)
            self._outbox.put_unknown_loss(f"the recorder switched itself off: {reason}", self._now())
        except Exception:  # nothing may reach the engine
            logger.exception("kvcanary: switching off failed")


def _json(labels: Mapping[str, Any] | None) -> str:
    return json.dumps(dict(labels), sort_keys=True, default=str) if labels else ""


__all__ = ["Recorder", "RecorderStats", "prepare_kernels"]
