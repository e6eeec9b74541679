"""From a trace to a summary: every event in engine order, through the executor, into the report.

This is the one place that knows what each kind of event does to the replay. Whatever cannot be judged is counted and
named; nothing is passed over in silence.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..kernels.constants import KvHashMode, LaunchTag
from ..recorder.errors import TraceError
from ..recorder.header import TraceHeader
from ..recorder.reader import EventView, TraceBatch, TraceGap, TraceReader
from ..recorder.schema import EVENT_KINDS, SLOTS_LISTED
from .checks import CHECK_NAMES, make_checks
from .findings import FINDING_SCHEMA, Finding, finding_table
from .forward import UnusableEventError, read_forward
from .pools import pool_bytes
from .requests import RequestBook
from .stepwise import StepwiseExecutor
from .summary import MAX_LISTED, Summary, Tally
from .violations import VIOLATION_SCHEMA, LaunchViolations, TableSink, violation_table

# Events that carry history for later checks and change no state here.
_HISTORY_KINDS = frozenset({"alloc", "free", "evict"})

# Violations go on in tables of about this many rows: a table for each launch would cost more than the launch.
PENDING_ROWS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How to replay.

    `kv_hash` is "auto" (partial where bytes were captured), "none", "partial" or "all"; `checks` names the history
    checks to run.
    """

    kv_hash: str = "auto"
    checks: tuple[str, ...] = CHECK_NAMES
    backend: str = "cpu"
    max_violations: int | None = None
    fail_fast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a replay has come."""

    bytes_read: int
    bytes_total: int
    forwards: int
    tokens: int
    violations: int


class _StopReplayError(Exception):
    """Ends a replay early on the user's own terms; `str()` says why."""


def replay(
    trace: Path,
    *,
    settings: ReplaySettings,
    report: Path | None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Summary:
    """Replay one trace.

    Args:
        trace: the trace file.
        settings: how to replay.
        report: the report directory, which must exist; None to write nothing.
        on_progress: called after every batch of events.

    Returns:
        The summary, also where the trace is torn, lossy, or the replay was interrupted by Ctrl-C.

    Raises:
        TraceError: the trace cannot be read at all, or not with these settings.
    """
    started = time.perf_counter()
    with TraceReader(trace) as reader:
        summary = Summary(trace=str(trace), header=reader.header, settings=_settings_json(settings))
        violations = TableSink(report / "violations.parquet" if report else None, VIOLATION_SCHEMA)
        findings = TableSink(report / "findings.parquet" if report else None, FINDING_SCHEMA)
        with violations, findings:
            run = _Replay(summary, settings, violations, findings)
            try:
                for item in reader.stream():
                    run.take(item)
                    on_progress(run.progress(reader))
                summary.complete = reader.complete
            except _StopReplayError as stop:
                summary.stopped = str(stop)
            except KeyboardInterrupt:
                summary.stopped = f"interrupted after {summary.forwards:,} forwards"
            run.finish()
    summary.seconds = time.perf_counter() - started
    if report:
        summary.report = str(report)
        (report / "summary.json").write_text(summary.to_json_text(), encoding="utf-8")
    return summary


class _Replay:
    """The running replay of one trace."""

    def __init__(self, summary: Summary, settings: ReplaySettings, violations: TableSink, findings: TableSink) -> None:
        self._summary = summary
        self._settings = settings
        self._violations = violations
        self._findings = findings
        self._book = RequestBook()
        self._request_ids: set[int] = set()
        self._bytes_read = 0
        self._launches: list[LaunchViolations] = []
        self._pending_rows = 0
        mode = _kv_hash_mode(settings.kv_hash, summary.header)
        summary.settings["kv_hash"] = mode.name.lower()
        try:
            self._tally = Tally(summary)
            self._executor = StepwiseExecutor(
                summary.header,
                kv_hash_mode=mode,
                backend=settings.backend,
                book=self._book,
                on_violations=self._take_violations,
                on_findings=self._take_findings,
                checks=make_checks(
                    settings.checks,
                    header=summary.header,
                    book=self._book,
                ),
            )
        except MemoryError:
            raise TraceError(
                f"{summary.trace}: its pools and tables need {pool_bytes(summary.header) / 2**30:.1f} GiB, which this "
                "machine does not have; replay on a larger one"
            ) from None

    def take(self, item: TraceBatch | TraceGap) -> None:
        """Replay one batch of events, or note a gap."""
        if isinstance(item, TraceGap):
            self._summary.num_gaps += 1
            self._note(self._summary.gaps, item.reason)
            if item.missing_events != 0:  # a damaged end mark, or a batch given twice, takes no event away
                self._executor.forget()
            return
        for view in item:
            self._event(view)
        self._bytes_read = item.end_byte

    def progress(self, reader: TraceReader) -> Progress:
        """Return how far the replay has come."""
        return Progress(
            bytes_read=self._bytes_read,
            bytes_total=reader.size_bytes,
            forwards=self._summary.forwards,
            tokens=self._summary.tokens,
            violations=self._summary.violations,
        )

    def finish(self) -> None:
        """Fold the executor's counters into the summary."""
        self._pass_on_violations()
        summary, executor = self._summary, self._executor
        summary.requests = len(self._request_ids)
        summary.slot_counters = _by_tag(executor.slot_counters)
        summary.kernel_counters = _by_tag(executor.kernel_counters)
        summary.verified = executor.verified
        summary.written = executor.written
        summary.unknown_entries = executor.unknown_entries

    def _event(self, view: EventView) -> None:
        summary, kind = self._summary, view.kind
        summary.events[kind] = summary.events.get(kind, 0) + 1
        time_ns = int(view.scalar("time_ns"))
        summary.first_time_ns = summary.first_time_ns or time_ns
        summary.last_time_ns = max(summary.last_time_ns, time_ns)
        try:
            if kind == "forward":
                self._forward(view)
                return
            self._executor.check_event(view)
            self._executor.tables.apply_changes(view)  # any event may carry what it was the first to see
            if kind == "request":
                self._request(view)
            elif kind == "kv_copy":
                self._kv_copy(view)
            elif kind == "loss":
                self._loss(view)
            elif kind == "mark":
                self._mark(view)
            elif kind not in _HISTORY_KINDS:
                name = kind if kind in EVENT_KINDS else f"unknown kind {kind!r}"
                summary.unjudged[name] = summary.unjudged.get(name, 0) + 1
        except UnusableEventError as error:
            summary.num_gaps += 1
            self._note(summary.gaps, f"event {view.scalar('event')} ({kind}) contradicts itself: {error}; left out")
            self._executor.forget()

    def _forward(self, view: EventView) -> None:
        summary = self._summary
        forward = read_forward(view, summary.header)
        before = summary.violations + summary.findings
        self._executor.forward(forward, view)
        summary.forwards += 1
        summary.forwards_by_mode[forward.mode] = summary.forwards_by_mode.get(forward.mode, 0) + 1
        summary.forwards_watched += forward.kv_watched
        summary.tokens += forward.num_tokens
        self._request_ids.update(forward.request_ids[forward.req_pool_indices != 0].tolist())
        found = summary.violations + summary.findings
        if self._settings.fail_fast and found > before:
            raise _StopReplayError(f"stopped at the first bad forward, {forward.forward:,} (--fail-fast)")
        if self._settings.max_violations is not None and summary.violations >= self._settings.max_violations:
            raise _StopReplayError(f"stopped after {summary.violations:,} violations (--max-violations)")

    def _request(self, view: EventView) -> None:
        request_id = int(view.scalar("request_id"))
        self._request_ids.add(request_id)
        self._book.names[request_id] = str(view.scalar("name"))
        self._book.prompt_lens[request_id] = int(view.scalar("prompt_len"))

    def _kv_copy(self, view: EventView) -> None:
        columns = [view.ints(f"copy_{c}") for c in ("group", "src_tier", "src", "dst_tier", "dst", "count")]
        if len({len(column) for column in columns}) != 1:
            raise UnusableEventError("the copy columns differ in length")
        for group, src_tier, src, dst_tier, dst, count in zip(*(c.tolist() for c in columns), strict=True):
            if not 0 <= group < len(self._executor.pools) or src_tier not in (0, 1) or dst_tier not in (0, 1):
                raise UnusableEventError(f"a copy in group {group} from tier {src_tier} to tier {dst_tier}")
            pool = self._executor.pools[group]
            limit = max(pool.group.num_slots, pool.group.host_num_slots)
            if not 0 <= count <= limit:
                raise UnusableEventError(f"a copy of {count} slots, the larger tier has {limit}")
            span = np.arange(count, dtype=np.int64)
            if pool.copy_slots(src_tier, src + span, dst_tier, dst + span):
                raise UnusableEventError(f"a copy of slots {src}+{count} to {dst}+{count} leaves its tier")

    def _loss(self, view: EventView) -> None:
        summary = self._summary
        lost = int(view.scalar("lost_events"))
        summary.num_losses += 1
        summary.lost_events += max(lost, 0)
        self._note(summary.losses, str(view.scalar("note")) or f"{lost} events lost")
        groups, starts, counts = (view.ints(f"slot_{c}") for c in ("group", "start", "count"))
        if view.scalar("status") != SLOTS_LISTED:
            self._executor.forget()
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
            self._violations.append(table)
            self._tally.violations(table)

    def _take_findings(self, findings: list[Finding]) -> None:
        self._findings.append(finding_table(findings))
        self._tally.findings(findings)


def _by_tag(counters: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> dict[str, int]:
    return {tag.name: int(counters[tag]) for tag in LaunchTag if counters[tag]}


def _settings_json(settings: ReplaySettings) -> dict[str, object]:
    return {
        "kv_hash": settings.kv_hash,
        "checks": list(settings.checks),
        "backend": settings.backend,
        "max_violations": settings.max_violations,
        "fail_fast": settings.fail_fast,
        "executor": "stepwise",
    }


def _kv_hash_mode(name: str, header: TraceHeader) -> KvHashMode:
    """Resolve `--kv-hash` against what the trace holds; raise `TraceError` where it holds too little."""
    streams = [stream for group in header.groups for stream in group.streams]
    if name == "auto":
        return KvHashMode.PARTIAL if streams else KvHashMode.NONE
    mode = KvHashMode[name.upper()]
    if mode is KvHashMode.NONE:
        return mode
    if not streams:
        raise TraceError("the trace holds no KV bytes; replay with --kv-hash none, or record with capture_bytes=16")
    short = [stream for stream in streams if stream.capture_bytes < stream.bytes_per_token]
    if mode is KvHashMode.ALL and short:
        raise TraceError(
            f"--kv-hash all needs every byte of a slot; the trace holds {short[0].capture_bytes} of "
            f"{short[0].bytes_per_token}; use --kv-hash partial, or record with capture_bytes=None"
        )
    return mode
