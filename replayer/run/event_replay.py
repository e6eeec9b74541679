"""What each kind of event does to the replay of one trace: what cannot be judged is counted and named."""

import gc
import json
from typing import Final

import numpy as np

from ...kernels.constants import KvHashMode, LaunchTag
from ...recorder.state.forward import UnusableEventError, read_forward
from ...recorder.state.keyframe_load import KeyframeLoader
from ...recorder.trace.batch import CUT, LIVE
from ...recorder.trace.reader import EventView, TraceBatch, TraceGap
from ...recorder.trace.schema import (
    EVENT_KINDS,
    FROZEN,
    KEYFRAME_BEGIN,
    KEYFRAME_END,
    LATE,
    SEGMENT_CONTINUES,
    SLOTS_LISTED,
)
from ..checks.check import HistoryCheck
from ..checks.inputs import OracleToken
from ..executors.executors import make_executor, make_pass
from ..model.model_bytes import ModelBytes
from ..report.report import Results
from ..report.summary import MAX_LISTED, add
from .coverage import count_samples
from .health import Health
from .planning import read_sweep
from .schedule import Schedule
from .settings import ReplaySettings, StopReplayError
from .transfers import Exchange, Transfers

# Events that `EventApplier` applies, and of which there is nothing to keep here.
_APPLIED_KINDS: Final = frozenset({"alloc", "evict", "free", "kv_copy", "sample", "status", "transfer"})


class EventReplay:
    """Takes a trace's events, and fills its summary and its report.

    `executor` holds the state; `compiled_pass` takes ordinary events past it, None if there is none; `continues` says that the
    last event was a segment's end behind which another follows.
    """

    def __init__(
        self,
        results: Results,
        settings: ReplaySettings,
        kv_hash_mode: KvHashMode,
        *,
        exchange: Exchange | None,
        schedule: Schedule | None = None,
        all_there: bool = False,
    ) -> None:
        summary = results.summary
        header = summary.header
        self.bytes_read = 0
        self._summary = summary
        self._settings = settings
        self._counted: list[int] = []  # rows of the batch under way: forwards that were judged
        self._results = results
        self.executor = make_executor(results, settings, kv_hash_mode)
        summary.settings["executor_ran"] = self.executor.name
        self.executor.transfers = Transfers(results, self.executor.pools, exchange, backend=settings.backend)
        self._health = Health(header, self.executor.state.activity)
        self._keyframes = KeyframeLoader(self.executor.state, kv_hash_mode=kv_hash_mode)
        # A keyframe is taken where the state before it is not known; else the replay's own is the same.
        self._wants_keyframe = self._late = False
        self._at_first = True
        self.continues = self._frozen = False
        self._trailing = 0  # gaps and losses by which a recording ends that was cut
        self._schedule = schedule
        self._all_there = all_there
        self.compiled_pass = make_pass(self.executor, settings, self._health, compared=schedule is not None)
        if header.segment is not None and header.segment.number:
            self._wants_keyframe = summary.unknown_before = True  # until its keyframe says otherwise

    def prepare(self, batch: TraceBatch) -> None:
        """Work out what `take` needs of a batch alone; for the thread that reads ahead of it."""
        if self.compiled_pass is not None:
            self.compiled_pass.prepare(batch)

    def take(self, item: TraceBatch | TraceGap) -> None:
        """Replay one batch of events, or note a gap."""
        if isinstance(item, TraceGap):
            self._trailing += bool(item.ends) or item.kind == "torn"
            self._summary.being_recorded |= item.ends == LIVE
            self._gap(item.cause)
            if item.missing_events != 0:  # a damaged end mark, or a batch given twice, takes no event away
                self._forget()
                self._wants_keyframe, self._at_first = True, False
            return
        at = 0
        collects = gc.isenabled()
        gc.disable()  # a collection looks at all that a batch holds, which is no garbage before its end
        try:
            while at < item.num_events:
                at = self._through_requests(item, self._through_pass(item, at))
                if at < item.num_events:
                    at += 1
                    self.replay_event(item.event(at - 1))
        finally:  # all that a batch had, or had until somebody stopped
            self._summary.count(item, at, np.array(self._counted, np.int64))
            self._counted.clear()
            if collects:
                gc.enable()
        if (checks := self.executor.checks) is not None:
            checks.batch(item)
            if item.kinds[-1:] == ["segment"]:
                self._file_ends()
        self.bytes_read = item.end_byte

    def _file_ends(self) -> None:
        """Report what a file has shown as a whole; of segments each is judged by itself, whoever replays it."""
        if self.executor.checks is not None:
            self._results.findings(self.executor.checks.ends())

    def _through_pass(self, batch: TraceBatch, at: int) -> int:
        """Take a batch's events from row `at` on as far as they are ordinary; return the row of the first that is not."""
        if self.compiled_pass is None or self._keyframes.loading or (self._at_first and self._wants_keyframe):
            return at
        reached = self.compiled_pass.run(batch, at)
        if reached > at:
            kinds = batch.kinds[at:reached]
            self._counted += [at + index for index, kind in enumerate(kinds) if kind == "forward"]
            self.continues = self._at_first = False
            self._trailing = 0
            self._results.divergence(self.executor.divergence)
        return reached

    def _through_requests(self, batch: TraceBatch, at: int) -> int:
        """Take the requests that a keyframe names, of which there may be thousands; return the row of what comes next."""
        if not self._keyframes.loading or at == batch.num_events:
            return at
        return self._keyframes.apply_requests(batch, at)

    def leaves_nothing(self) -> bool:
        """Whether the last event says that a segment follows, and nothing was left unjudged or unlaunched before it."""
        executor = self.executor
        missing = self._health.missing(executor.launcher.kernel_counters)
        # Judged at the end, and there only by who has seen a forward.
        silent = self._health.silent_runners()
        pending = executor.checks is not None and executor.checks.pending()
        return self.continues and not self._summary.unknown_entries and not missing and not silent and not pending

    def count(self) -> None:
        """Bring the summary's counts by kind and of requests up to date, in the middle of a replay."""
        self._results.pass_on()
        self._summary.requests = len(self._results.request_ids)

    def count_samples(self) -> None:
        """Count which pieces of all layers the slots written so far have shown, if streams sample them."""
        count_samples(self._summary.samples, self.executor.pools, backend=self._settings.backend)

    def finish(self) -> None:
        """Judge the trace's end, if it has one, and fold the counters into the summary."""
        self.count_samples()
        summary, executor = self._summary, self.executor
        executor.collect()
        self._file_ends()
        summary.goes_on = self.continues
        summary.whole_before_end = self._trailing == summary.num_gaps + summary.num_losses
        if self.continues and self._all_there and not self._frozen:
            where = f"segment {summary.segments[-1]}" if summary.segments else "its end"
            summary.cut_short = f"the recording goes on behind {where}, in a file that is not here"
        if summary.complete and not summary.stopped and not self.continues:
            executor.finish()
            history = executor.history
            # What was lost before the first segment given was lost all the same.
            lost = self._late or summary.num_gaps or summary.num_losses or (history is not None and history.had_gap)
            if not lost:
                self._results.findings(self._health.finish(executor.launcher.kernel_counters))
        self._results.flush(executor.divergence)
        summary.requests = len(self._results.request_ids)
        summary.oracle = next((c.counts for c in self._checks() if isinstance(c, OracleToken)), {})
        summary.model_bytes = next((dict(+c.counts) for c in self._checks() if isinstance(c, ModelBytes)), {})
        summary.slot_counters, summary.kernel_counters = (
            {tag.name: int(counters[tag]) for tag in LaunchTag}
            for counters in (executor.launcher.slot_counters, executor.launcher.kernel_counters)
        )
        if executor.num_on_host is not None:
            summary.settings["forwards_on_cpu"] = executor.num_on_host
        summary.swa_divergence = executor.divergence.to_json()

    def _checks(self) -> list[HistoryCheck]:
        checks = self.executor.checks
        return [] if checks is None else checks.checks

    def replay_event(self, view: EventView) -> None:
        """Replay one event that no pass takes."""
        summary, kind = self._summary, view.kind
        self.continues = False
        self._trailing = self._trailing + 1 if kind == "loss" and view.scalar("status") == CUT else 0
        before = summary.violations + summary.findings
        if kind != "keyframe":
            self._no_keyframe_under_way(view)
        self.executor.begin(view)
        try:
            if kind == "forward":
                self._forward(view)
            else:
                with self.executor.on_host(view):
                    self._between_forwards(view)
        except UnusableEventError as error:
            self._gap(
                f"event {view.scalar('event')} ({kind}) contradicts itself: {error}; left out, and all that came "
                "before it is taken for unknown"
            )
            self._wants_keyframe |= kind == "keyframe"  # the next one may be better
            self._forget()
        self._stop_if_asked(before, view)

    def _no_keyframe_under_way(self, view: EventView) -> None:
        """Believe nothing of a keyframe that has no end; where one is wanted first of all, say that there is none."""
        missing = self._at_first and self._wants_keyframe
        self._at_first = False
        if missing or self._keyframes.loading:
            what = "a keyframe without its end" if self._keyframes.loading else "no keyframe"
            self._gap(f"{what} stands before event {view.number}; all that came before it is taken for unknown")
            self._forget()
            self._wants_keyframe = True

    def _between_forwards(self, view: EventView) -> None:
        kind = view.kind
        if kind == "sweep":
            self._results.begin(read_sweep(view, self._summary.header))
        self.executor.apply_event(view)
        match kind:
            case "request":
                self._results.request_ids.add(int(view.scalar("request_id")))
            case "loss":
                self._loss(view)
            case "mark":
                self._mark(view)
            case "sweep":
                self._results.done()
                self._health.sweep(int(view.scalar("runner")))
            case "keyframe":
                self._keyframe(view)
            case "segment":
                self.continues = view.scalar("status") == SEGMENT_CONTINUES
                self._frozen = view.scalar("note") == FROZEN
            case _ if kind not in _APPLIED_KINDS:
                add(self._summary.unjudged, kind if kind in EVENT_KINDS else f"unknown kind {kind!r}")

    def _forward(self, view: EventView) -> None:
        forward = read_forward(view, self._summary.header)
        self._results.begin(forward)
        self.executor.apply_forward(forward, view)
        self._results.done()
        self._counted.append(view.index)
        self._results.request_ids.update(forward.request_ids[forward.req_pool_indices != 0].tolist())
        self._results.findings(self._health.forward(forward))
        if self._schedule is not None:
            self._results.findings(self._schedule.forward(forward, self._results.request_table))
        self._results.divergence(self.executor.divergence)

    def _stop_if_asked(self, before: int, view: EventView) -> None:
        summary = self._summary
        if self._settings.fail_fast and summary.violations + summary.findings > before:
            what = f"event, {view.number:,} ({view.kind})"
            if view.kind == "forward":
                what = f"forward, {int(view.scalar('forward')):,}"
            raise StopReplayError(f"stopped at the first bad {what} (--fail-fast)")
        if self._settings.max_violations is not None and summary.violations >= self._settings.max_violations:
            raise StopReplayError(f"stopped after {summary.violations:,} violations (--max-violations)")

    def _loss(self, view: EventView) -> None:
        summary, lost = self._summary, int(view.scalar("lost_events"))
        self._late |= view.scalar("status") == LATE
        if view.scalar("status") != LATE:
            summary.num_losses += 1
            summary.lost_events += max(lost, 0)
            self._note(summary.losses, str(view.scalar("note")) or f"{lost} events lost")
        if view.scalar("status") != SLOTS_LISTED:
            self._keyframes.stop()
            self._wants_keyframe = True

    def _keyframe(self, view: EventView) -> None:
        if self.compiled_pass is not None:
            self.compiled_pass.had_keyframe = True
        status = view.scalar("status")
        if not status:
            add(self._summary.unjudged, "keyframe")
            return
        begins = status == KEYFRAME_BEGIN and self._wants_keyframe
        if begins:
            self._keyframes.untouched &= self._at_first
            if not self._at_first:
                self.executor.forget()
            self._wants_keyframe = self._at_first = False
        if begins or self._keyframes.loading:
            self._keyframes.apply(view)
            self.executor.loads_state()
            if status == KEYFRAME_END:  # it is whole
                unknown = any(pool.any_unknown for pool in self.executor.pools)
                self._summary.unknown_before = unknown and not self._late
        if status == KEYFRAME_END:
            self._health.resume()

    def _mark(self, view: EventView) -> None:
        summary = self._summary
        summary.num_marks += 1
        mark = {"event": int(view.scalar("event")), "note": str(view.scalar("note"))}
        try:
            labels = json.loads(str(view.scalar("labels")) or "{}")
        except (ValueError, RecursionError):
            labels = None
        if not isinstance(labels, dict):
            labels = {"text": str(view.scalar("labels"))}
        summary.num_injected += self._results.injected.mark(labels)
        if len(summary.marks) < MAX_LISTED:
            summary.marks.append({**mark, "labels": labels})

    def _forget(self) -> None:
        self._keyframes.stop()
        self._file_ends()
        self.executor.forget()

    def _gap(self, text: str) -> None:
        self._summary.num_gaps += 1
        self._note(self._summary.gaps, text)
        self._results.part()

    def _note(self, notes: list[str], text: str) -> None:
        if len(notes) < MAX_LISTED:
            notes.append(text)
