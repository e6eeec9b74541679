"""What each kind of event does to the replay of one trace.

This is the one place that knows the kinds. Whatever cannot be judged is counted and named; nothing is passed over in
silence.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..kernels.constants import KvHashMode, LaunchTag
from ..recorder.reader import EventView, TraceBatch, TraceGap
from ..recorder.schema import EVENT_KINDS, SLOTS_LISTED
from ..recorder.slot_runs import runs_to_slots
from .checks import make_checks
from .divergence import ROWS_AT_ONCE
from .exchange import Exchange
from .findings import Finding, finding_table
from .forward import UnusableEventError, read_forward
from .health import Health
from .report import ReportSinks
from .requests import RequestBook, RequestFacts
from .settings import ReplaySettings, StopReplayError
from .stepwise import StepwiseExecutor
from .summary import MAX_LISTED, Summary, Tally
from .sweep import read_sweep
from .transfers import Transfers
from .violations import LaunchViolations, violation_table

# Events that carry history for the checks and change no state here.
_HISTORY_KINDS = frozenset({"alloc", "free", "evict", "status", "sample"})

# Violations go on in tables of about this many rows: a table for each launch would cost more than the launch.
PENDING_ROWS = 16_384


class EventReplay:
    """The running replay of one trace: takes its events, fills its summary and its report."""

    def __init__(
        self,
        summary: Summary,
        settings: ReplaySettings,
        sinks: ReportSinks,
        *,
        kv_hash_mode: KvHashMode,
        exchange: Exchange | None,
    ) -> None:
        header = summary.header
        self.bytes_read = 0
        self._summary = summary
        self._settings = settings
        self._sinks = sinks
        self._book = RequestBook()
        self._request_ids: set[int] = set()
        self._launches: list[LaunchViolations] = []
        self._pending_rows = 0
        self._tally = Tally(summary)
        self._executor = StepwiseExecutor(
            header,
            kv_hash_mode=kv_hash_mode,
            backend=settings.backend,
            book=self._book,
            on_violations=self._take_violations,
            on_findings=self._take_findings,
            checks=make_checks(settings.checks, header=header, book=self._book, backend=settings.backend),
        )
        self._transfers = Transfers(
            header,
            self._executor.pools,
            trace=Path(summary.trace).name,
            book=self._book,
            exchange=exchange,
            backend=settings.backend,
        )
        self._health = Health(header)
        self._on: dict[str, Callable[[EventView], None]] = {
            "request": self._request,
            "kv_copy": self._kv_copy,
            "loss": self._loss,
            "mark": self._mark,
            "sweep": self._sweep,
            "transfer": self._transfer,
        }

    def take(self, item: TraceBatch | TraceGap) -> None:
        """Replay one batch of events, or note a gap."""
        if isinstance(item, TraceGap):
            self._summary.num_gaps += 1
            self._note(self._summary.gaps, item.reason)
            if item.missing_events != 0:  # a damaged end mark, or a batch given twice, takes no event away
                self._forget()
            return
        for view in item:
            self._event(view)
        self.bytes_read = item.end_byte

    def finish(self) -> None:
        """Judge the trace's end, if it has one, and fold the counters into the summary."""
        summary, executor = self._summary, self._executor
        if summary.complete and not summary.stopped:
            executor.finish()
            if not summary.num_gaps and not summary.num_losses:
                self._take_findings(self._health.finish(executor.launcher.kernel_counters))
        self._pass_on_violations()
        self._pass_on_divergence(at_least=1)
        summary.requests = len(self._request_ids)
        summary.slot_counters = _by_tag(executor.launcher.slot_counters)
        summary.kernel_counters = _by_tag(executor.launcher.kernel_counters)
        summary.verified = executor.verified
        summary.written = executor.written
        summary.unknown_entries = executor.unknown_entries
        summary.swa_divergence = executor.divergence.to_json()
        summary.transfers_sent = self._transfers.sent
        summary.transfers_received = self._transfers.received
        summary.transfers_unmatched = self._transfers.unmatched

    def _event(self, view: EventView) -> None:
        summary, kind = self._summary, view.kind
        summary.events[kind] = summary.events.get(kind, 0) + 1
        time_ns = int(view.scalar("time_ns"))
        summary.first_time_ns = summary.first_time_ns or time_ns
        summary.last_time_ns = max(summary.last_time_ns, time_ns)
        before = summary.violations + summary.findings
        try:
            if kind == "forward":
                self._forward(view)
            else:
                self._between_forwards(view)
        except UnusableEventError as error:
            summary.num_gaps += 1
            self._note(
                summary.gaps,
                f"event {view.scalar('event')} ({kind}) contradicts itself: {error}; left out, and all that came "
                "before it is taken for unknown",
            )
            self._forget()
        self._stop_if_asked(before, view)

    def _between_forwards(self, view: EventView) -> None:
        summary, kind = self._summary, view.kind
        self._executor.check_event(view)
        self._executor.tables.apply_changes(view)  # any event may carry what it was the first to see
        if kind in self._on:
            self._on[kind](view)
        elif kind not in _HISTORY_KINDS:
            name = kind if kind in EVENT_KINDS else f"unknown kind {kind!r}"
            summary.unjudged[name] = summary.unjudged.get(name, 0) + 1

    def _forward(self, view: EventView) -> None:
        summary = self._summary
        forward = read_forward(view, summary.header)
        self._executor.forward(forward, view)
        summary.forwards += 1
        summary.forwards_by_mode[forward.mode] = summary.forwards_by_mode.get(forward.mode, 0) + 1
        summary.forwards_watched += forward.kv_watched
        summary.tokens += forward.num_tokens
        self._request_ids.update(forward.request_ids[forward.req_pool_indices != 0].tolist())
        self._take_findings(self._health.forward(forward))
        self._pass_on_divergence()

    def _sweep(self, view: EventView) -> None:
        sweep = read_sweep(view, self._summary.header)
        self._executor.sweep(sweep, view)
        self._health.sweep(sweep)

    def _transfer(self, view: EventView) -> None:
        self._take_findings(self._transfers.event(view))

    def _stop_if_asked(self, before: int, view: EventView) -> None:
        summary = self._summary
        if self._settings.fail_fast and summary.violations + summary.findings > before:
            what = f"event, {view.number:,} ({view.kind})"
            if view.kind == "forward":
                what = f"forward, {int(view.scalar('forward')):,}"
            raise StopReplayError(f"stopped at the first bad {what} (--fail-fast)")
        if self._settings.max_violations is not None and summary.violations >= self._settings.max_violations:
            raise StopReplayError(f"stopped after {summary.violations:,} violations (--max-violations)")

    def _request(self, view: EventView) -> None:
        request_id = int(view.scalar("request_id"))
        self._request_ids.add(request_id)
        self._book.facts[request_id] = RequestFacts(
            name=str(view.scalar("name")), prompt_len=int(view.scalar("prompt_len")), room=int(view.scalar("room"))
        )

    def _kv_copy(self, view: EventView) -> None:
        columns = [view.ints(f"copy_{c}") for c in ("group", "src_tier", "src", "dst_tier", "dst", "count")]
        if len({len(column) for column in columns}) != 1:
            raise UnusableEventError("the copy columns differ in length")
        runs: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
        for group, src_tier, src, dst_tier, dst, count in zip(*(c.tolist() for c in columns), strict=True):
            if not 0 <= group < len(self._executor.pools) or src_tier not in (0, 1) or dst_tier not in (0, 1):
                raise UnusableEventError(f"a copy in group {group} from tier {src_tier} to tier {dst_tier}")
            limit = self._executor.pools[group].largest_tier
            if not 0 <= count <= limit:
                raise UnusableEventError(f"a copy of {count} slots, the larger tier has {limit}")
            runs.setdefault((group, src_tier, dst_tier), []).append((src, dst, count))
        for (group, src_tier, dst_tier), given in runs.items():
            # Everything is read before anything is written: a run may begin where another one ends.
            starts, targets, counts = np.array(given, dtype=np.int64).T
            pool = self._executor.pools[group]
            if int(counts.sum()) > pool.largest_tier:
                raise UnusableEventError(
                    f"a copy of {int(counts.sum())} slots, the larger tier has {pool.largest_tier}"
                )
            if pool.copy_slots(src_tier, runs_to_slots(starts, counts), dst_tier, runs_to_slots(targets, counts)):
                raise UnusableEventError(f"a copy of {int(counts.sum())} slots leaves its tier")

    def _loss(self, view: EventView) -> None:
        summary = self._summary
        lost = int(view.scalar("lost_events"))
        summary.num_losses += 1
        summary.lost_events += max(lost, 0)
        self._note(summary.losses, str(view.scalar("note")) or f"{lost} events lost")
        groups, starts, counts = (view.ints(f"slot_{c}") for c in ("group", "start", "count"))
        if view.scalar("status") != SLOTS_LISTED:
            self._forget()
            self._executor.tables.apply_changes(view)
            return
        if not len(groups) == len(starts) == len(counts):
            raise UnusableEventError("the slot columns differ in length")
        for group, start, count in zip(groups.tolist(), starts.tolist(), counts.tolist(), strict=True):
            if not 0 <= group < len(self._executor.pools) or start < 0 or count < 0:
                raise UnusableEventError(f"a run of {count} slots from {start} in group {group}")
            self._executor.pools[group].forget(slice(start, start + count))

    def _mark(self, view: EventView) -> None:
        summary = self._summary
        summary.num_marks += 1
        if len(summary.marks) >= MAX_LISTED:
            return
        mark = {"event": int(view.scalar("event")), "note": str(view.scalar("note"))}
        try:
            labels = json.loads(str(view.scalar("labels")) or "{}")
        except (ValueError, RecursionError):
            labels = None
        if not isinstance(labels, dict):
            labels = {"text": str(view.scalar("labels"))}
        summary.marks.append({**mark, "labels": labels})

    def _forget(self) -> None:
        self._executor.forget()
        self._health.forget()

    def _note(self, notes: list[str], text: str) -> None:
        if len(notes) < MAX_LISTED:
            notes.append(text)

    def _take_violations(self, launch: LaunchViolations) -> None:
        self._launches.append(launch)
        self._summary.violations += len(launch.rows)
        self._pending_rows += len(launch.rows)
        if self._pending_rows >= PENDING_ROWS:
            self._pass_on_violations()

    def _pass_on_violations(self) -> None:
        """Turn the pending launches into one table: for the report, and for the tally."""
        if self._launches:
            table = violation_table(self._launches, self._book)
            self._launches = []
            self._pending_rows = 0
            self._sinks.violations.append(table)
            self._tally.violations(table)

    def _pass_on_divergence(self, *, at_least: int = ROWS_AT_ONCE) -> None:
        table = self._executor.divergence.take_table(at_least=at_least)
        if table is not None:
            self._sinks.divergence.append(table)

    def _take_findings(self, findings: list[Finding]) -> None:
        if findings:
            self._sinks.findings.append(finding_table(findings))
            self._tally.findings(findings)


def _by_tag(counters: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> dict[str, int]:
    return {tag.name: int(counters[tag]) for tag in LaunchTag}
