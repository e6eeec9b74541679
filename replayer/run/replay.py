"""From traces to summaries: each trace's events in engine order, through the executor, into its report."""

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from ...recorder.errors import TraceError
from ...recorder.process.endings import endings_deferred
from ...recorder.remote import as_path
from ...recorder.state.pools import pool_bytes
from ...recorder.trace.batch import TraceBatch, TraceGap
from ...recorder.trace.recordings import recording_name
from ..report.report import Results, write_summary
from ..report.summary import Summary
from .event_replay import EventReplay
from .schedule import Schedule
from .settings import Progress, ReplaySettings, StopReplayError, check_padding, resolve_kv_hash
from .streams import ReadAhead, SegmentStream
from .transfers import Exchange

PREFILL, DECODE = "prefill", "decode"

_DEFAULTS: Final = ReplaySettings()
_Stream = Generator[TraceBatch | TraceGap, None, None]


class ReplayRun:
    """The replay of one recording, which may be taken a batch of events at a time; a context manager.

    `summary` is filled on the way by `events`; `ended` says that nothing is left to replay. Arguments and errors are those of
    `replay_joined`; `exchange` is where its transfers meet those of other traces, None for a trace on its own. With `following`
    a file is read on for as long as it is being written; `waiting` says that the last step found nothing new there.
    """

    def __init__(
        self,
        trace: Path | Sequence[Path],
        *,
        settings: ReplaySettings,
        report: Path | None,
        exchange: Exchange | None = None,
        schedule: Schedule | None = None,
        all_there: bool = False,
        following: bool = False,
    ) -> None:
        self.waiting = False
        self.on_batch: Callable[[TraceBatch], None] = lambda _: None  # is told each batch once it was replayed
        self._started = time.perf_counter()
        self._report = report
        self._busy = self.ended = False
        paths = [trace] if isinstance(trace, Path) else list(trace)
        name = recording_name(paths)
        with ExitStack() as stack:
            self._reader = SegmentStream(paths)
            header = self._reader.header
            mode = resolve_kv_hash(settings.kv_hash, header)
            check_padding(header)
            self.summary = Summary(trace=name, header=header, settings=settings.to_json())
            self.summary.settings["kv_hash"] = mode.name.lower()
            joined: dict[str, Any] = {"exchange": exchange, "schedule": schedule, "all_there": all_there}
            try:
                self._results = stack.enter_context(closing(Results(self.summary, settings, report)))
                self.events = EventReplay(self._results, settings, mode, **joined)
            except MemoryError:
                raise TraceError(
                    f"{name}: its pools and tables need {pool_bytes(header) / 2**30:.1f} GiB, which this "
                    "machine does not have; replay on a larger one"
                ) from None
            self._following, self._early = following, settings.fail_fast or settings.max_violations is not None
            self._stream = self._opened()
            stack.callback(lambda: self._stream.close())
            self._resources = stack.pop_all()

    def _opened(self) -> Generator[TraceBatch | TraceGap | None, None, None] | ReadAhead[TraceBatch | TraceGap]:
        """Return what is left to read. How far an early end has read is reported, so nothing is read ahead of one."""
        if self._following:
            return self._reader.follow()
        stream = self._reader.stream()
        return stream if self._early else ReadAhead(self._prepared(stream))

    def _prepared(self, stream: _Stream) -> _Stream:
        with closing(stream):
            for item in stream:
                if isinstance(item, TraceBatch):
                    self.events.prepare(item)
                yield item
                del item  # what is replayed must not be held here

    def step(self) -> bool:
        """Replay the next batch of events; False when nothing is left, or while a step is under way already."""
        if self._busy or self.ended:
            return False
        self._busy = True
        try:
            for item in self._stream:
                self.waiting = item is None
                if item is not None:
                    self.events.take(item)
                    if isinstance(item, TraceBatch):
                        self.on_batch(item)
                else:
                    self.events.count_samples()
                return True
            self.summary.complete = self._reader.complete
        except StopReplayError as stop:
            self.summary.stopped = str(stop)
        finally:
            self._busy = False
        self.ended = True
        return False

    def go_on(self, paths: Sequence[Path]) -> None:
        """Replay the segments that follow too, after those given have ended."""
        if self.summary.stopped:
            return
        self._stream.close()
        self._reader.extend(paths)
        self._stream = self._opened()
        self.ended = False

    @property
    def is_ordinary(self) -> bool:
        """Whether all was clean and whole so far, so that whoever replays what follows need not know of this."""
        summary = self.summary
        odd = (summary.violations, summary.findings, summary.num_gaps, summary.num_losses, summary.unjudged)
        return not any(odd) and not summary.stopped

    @property
    def leaves_nothing(self) -> bool:
        """Whether the segments replayed were ordinary to their very end, and say that others follow."""
        summary, events = self.summary, self.events
        return self.is_ordinary and summary.complete and not summary.unknown_before and events.leaves_nothing()

    @property
    def request_ids(self) -> frozenset[int]:
        """The requests that forwards and events named."""
        return frozenset(self._results.request_ids)

    def interrupt(self) -> None:
        """End the replay here, at the user's wish."""
        if not self.ended:
            self.summary.stopped = f"interrupted after {self.summary.forwards:,} forwards"
            self.ended = True

    def progress(self) -> Progress:
        """Return how far the replay has come."""
        return Progress(
            bytes_read=min(self._reader.bytes_done + self.events.bytes_read, self._reader.size_bytes),
            bytes_total=self._reader.size_bytes,
            forwards=self.summary.forwards,
            tokens=self.summary.tokens,
            violations=self.summary.violations,
        )

    def finish(self) -> Summary:
        """Judge the end, write the report's files, and return the summary; Ctrl-C meanwhile is raised once that is done."""
        try:
            with endings_deferred():
                if self.summary.header.segment is not None:
                    self.summary.segments = list(self._reader.numbers)
                self.events.finish()
                self._results.close()
                self.summary.seconds = time.perf_counter() - self._started
                if self._report:
                    self.summary.report = str(self._report)
                    write_summary(self.summary, self._report)
        except KeyboardInterrupt:
            if not self.summary.stopped.startswith("interrupted"):
                raise
        return self.summary

    def __enter__(self) -> "ReplayRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()


def replay(
    trace: str | os.PathLike[str],
    *,
    settings: ReplaySettings = _DEFAULTS,
    report: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Summary:
    """Replay one trace, by default as `kvcanary-replay` does, and return the summary, also if it is torn or Ctrl-C came.

    `report` is the report directory, which must exist, None to write nothing; `on_progress` is called after every batch.
    Raises `TraceError` if the trace cannot be read at all, or not with these settings.
    """
    with ReplayRun(as_path(trace), settings=settings, report=report) as run:
        _run_all([run], on_progress)
        return run.finish()


def replay_joined(
    traces: Sequence[Path | Sequence[Path]],
    *,
    settings: ReplaySettings,
    reports: Sequence[Path | None],
    on_progress: Callable[[Progress], None] = lambda _: None,
    schedules: Sequence[Schedule | None] = (),
    all_there: bool = False,
) -> list[Summary]:
    """Replay traces of prefill and decode engines together, and return a summary each; transfers meet by room.

    `traces` are files, or the segments of one recording each in order, `reports` a directory each, which must exist, or None.
    `schedules` compare each one's forwards with another rank's; `all_there`: no segment may follow those given. Raises
    `TraceError` if a trace cannot be read at all, or not with these settings.
    """
    exchange = Exchange()
    with ExitStack() as stack:
        runs = []
        for trace, report, schedule in zip(traces, reports, schedules or [None] * len(traces), strict=True):
            joined: dict[str, Any] = {"exchange": exchange, "schedule": schedule, "all_there": all_there}
            runs.append(stack.enter_context(ReplayRun(trace, settings=settings, report=report, **joined)))
        exchange.senders = [run.step for run in runs]
        receivers = [run for run in runs if run.summary.header.role != PREFILL]
        exchange.wanted = lambda: len(runs) > 1 and not all(run.ended for run in receivers)
        # The receiving side leads: it lets the others continue as far as it needs them.
        _run_all(sorted(runs, key=lambda run: run.summary.header.role != DECODE), on_progress)
        return [run.finish() for run in runs]


def _run_all(runs: Sequence[ReplayRun], on_progress: Callable[[Progress], None]) -> None:
    try:
        for run in runs:
            while run.step():
                on_progress(run.progress())
    except KeyboardInterrupt:
        for run in runs:
            run.interrupt()


__all__ = ["DECODE", "PREFILL", "Progress", "ReplayRun", "ReplaySettings", "replay", "replay_joined"]
