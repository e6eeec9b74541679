"""One recording, replayed while it is written."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NotRequired, TypedDict, cast

from ...recorder.errors import TraceError
from ...recorder.trace.files import is_being_written, recording_path, segments_of, split_segment_name
from ...recorder.trace.reader import TraceReader
from ..run.replay import ReplayRun
from ..run.settings import ReplaySettings

# How long nothing may follow a segment that says that another follows: its process died between the two.
_NEXT_SEGMENT_SECONDS: Final = 10.0
_SETTLED_SECONDS: Final = 2.0


class Facts(TypedDict):
    """What is known of a recording so far; `segment`: up to that one, for a watch that goes on from there."""

    recording: str
    trace_id: str
    verdict: Literal["clean so far", "clean", "corrupt", "inconclusive"]
    over: bool
    forwards: int
    tokens: int
    requests: int
    violations: int
    violations_by_reason: dict[str, int]
    findings: int
    findings_by_kind: dict[str, int]
    requests_hit: int
    events_lost: int
    losses: int
    gaps: int
    doubts: list[str]
    seconds_behind: float
    segment: NotRequired[int]


_SUMS: Final = (
    "forwards",
    "tokens",
    "requests",
    "violations",
    "findings",
    "requests_hit",
    "events_lost",
    "losses",
    "gaps",
)
_SUMS_BY_KIND: Final = ("violations_by_reason", "findings_by_kind")


class WatchedRecording:
    """A replay that keeps up with a recording, segment by segment; use `close` in the end.

    `before` is what an earlier watch had found when it came to `before["segment"]`; `resume` is the same for the next watch.
    `over` says that all was replayed and nothing more will come. Raises `TraceError` as `ReplayRun` does.
    """

    def __init__(self, paths: Sequence[Path], settings: ReplaySettings, before: Facts | None = None) -> None:
        reached = before.get("segment", 0) if before else 0
        paths = [path for path in paths if _number(path) >= reached] or paths
        self._last = paths[0]
        self._before, self._deleted = before, max(0, _number(paths[0]) - reached) if before else 0
        self.run = ReplayRun(paths[:1], settings=settings, report=None, following=True)
        self.name = recording_path(paths[0]).name
        self.over = False
        self._ended_at: float | None = None
        self.resume = self.facts()

    @property
    def paths(self) -> list[Path]:
        """The files that are there now, segments in their order."""
        if split_segment_name(self._last) is None:
            return [self._last]
        return segments_of(recording_path(self._last))

    @property
    def trace_id(self) -> str:
        """The recording's unique name."""
        return self.run.summary.header.trace_id

    @property
    def damaged(self) -> bool:
        """Whether a violation or a finding was met so far."""
        before = self._before is not None and self._before["verdict"] == "corrupt"
        return before or bool(self.run.summary.violations or self.run.summary.findings)

    @property
    def seconds_behind(self) -> float:
        """How long ago the last event was that was replayed, 0 if nothing is left to be replayed."""
        if self.over or self.run.waiting or self.run.ended:
            return 0.0
        summary = self.run.summary
        return max(0.0, time.time() - max(summary.last_time_ns, summary.header.created_ns) / 1e9)

    def step(self) -> bool:
        """Replay the next batch of events; False if nothing more is there yet."""
        if self.run.ended and not self._go_on():
            return False
        self.run.step()
        return not (self.run.waiting or self.run.ended)

    def finish(self) -> None:
        """Judge the end of a recording that is over."""
        self.run.finish()

    def close(self) -> None:
        """Let go of pools and files."""
        self.run.__exit__()

    def facts(self) -> Facts:
        """Return what is known so far."""
        self.run.events.count()
        summary = self.run.summary
        facts: Facts = {
            "recording": self.name,
            "trace_id": self.trace_id,
            "verdict": "corrupt" if self.damaged else "clean so far",
            "over": self.over,
            "forwards": summary.forwards,
            "tokens": summary.tokens,
            "requests": summary.requests,
            "violations": summary.violations,
            "violations_by_reason": dict(summary.violations_by_reason),
            "findings": summary.findings,
            "findings_by_kind": dict(summary.findings_by_kind),
            "requests_hit": len(summary.requests_hit),
            "events_lost": summary.lost_events,
            "losses": summary.num_losses,
            "gaps": summary.num_gaps,
            "doubts": summary.doubts if self.over else [],
            "seconds_behind": round(self.seconds_behind, 3),
            "segment": _number(self._last),
        }
        if self._before is not None:
            facts = self._with_before(facts, self._before)
        if self.over and not self.damaged:
            facts["verdict"] = "inconclusive" if facts["doubts"] else "clean"
        return facts

    def _with_before(self, facts: Facts, before: Facts) -> Facts:
        """Add what an earlier watch had found, and say what neither of the two has seen."""
        sums = {name: facts[name] + before[name] for name in _SUMS}
        by_kind = {name: dict(Counter(facts[name]) + Counter(before[name])) for name in _SUMS_BY_KIND}
        doubts = list(facts["doubts"])
        if self.over and self._deleted:
            doubts.append(f"{self._deleted} segment(s) were deleted while nobody watched")
        if self.over and (before["gaps"] or before["losses"]):
            doubts.append(f"{before['gaps']} gap(s) and {before['losses']} loss(es) in what an earlier watch judged")
        return cast("Facts", {**facts, **sums, **by_kind, "doubts": doubts})

    def _go_on(self) -> bool:
        """Take the segments that follow, if they are there with their headers; without any the recording is over."""
        if split_segment_name(self._last) is None or self.run.summary.stopped:
            self.over = True
            return False
        following = next((path for path in self.paths if _number(path) > _number(self._last)), None)
        if following is not None and (is_readable(following) or is_settled(following)):
            self._ended_at, self._last = None, following
            self.resume = self.facts()
            self.run.go_on([following])
            return True
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        self.over = not self.run.events.continues or now - self._ended_at > _NEXT_SEGMENT_SECONDS
        return False


def _number(path: Path) -> int:
    """Return a segment's number, 0 of a recording that is one file."""
    return (split_segment_name(path) or ("", 0))[1]


def is_readable(path: Path) -> bool:
    """Whether a file is a trace with a whole header by now."""
    with contextlib.suppress(TraceError), TraceReader(path):
        return True
    return False


def is_settled(path: Path) -> bool:
    """Whether nobody is writing a file, nor was a moment ago: one that begins is not locked yet."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return True
    return age > _SETTLED_SECONDS and not is_being_written(path, unknown=True)
