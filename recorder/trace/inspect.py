"""What a trace holds, in one streaming pass with bounded memory."""

import contextlib
import dataclasses
import os
import shlex
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from .batch import LIVE, EventView, TraceBatch
from .files import tail_paths
from .header import TraceHeader
from .reader import TraceReader
from .schema import LATE

MAX_LISTED: Final = 50  # losses, gaps and marks that are listed; all are counted
_LONGEST_NOTE: Final = 2000
_JSON: Final = (
    *("path", "size_bytes", "state", "complete", "header", "num_events", "num_batches", "events_by_kind"),
    *("forwards_by_mode", "requests", "input_tokens", "sampled_tokens", "first_ns", "last_ns", "columns"),
    *("lost_events", "unknown_losses", "num_losses", "losses", "num_gaps", "gaps", "num_marks", "marks"),
    *("next_command", "last_forward", "written_ns"),
)


@dataclass(slots=True, kw_only=True)
class TraceInspection:
    """The findings of `inspect_trace`; `to_json` is stable and documented in docs/reference/trace-format.md."""

    path: str
    size_bytes: int
    complete: bool
    header: TraceHeader
    num_events: int = 0
    num_batches: int = 0
    events_by_kind: Counter[str] = field(default_factory=Counter)
    forwards_by_mode: Counter[str] = field(default_factory=Counter)
    input_tokens: int = 0
    sampled_tokens: int = 0
    first_ns: int | None = None
    last_ns: int | None = None
    stored_bytes: Counter[str] = field(default_factory=Counter)
    uncompressed_bytes: Counter[str] = field(default_factory=Counter)
    lost_events: int = 0
    unknown_losses: int = 0
    being_recorded: bool = False
    last_forward: int | None = None  # the number of the last one
    written_ns: int = 0  # when the file, or its tail, was written last
    # Counted all, listed the first `MAX_LISTED`.
    num_losses: int = 0
    losses: list[dict[str, Any]] = field(default_factory=list)
    num_gaps: int = 0
    gaps: list[dict[str, Any]] = field(default_factory=list)
    num_marks: int = 0
    marks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return "complete", "lossy" (whole, but the recorder dropped events), "recording", "torn" or "damaged"."""
        if any(gap["kind"] != "torn" for gap in self.gaps):
            return "damaged"
        if self.being_recorded:
            return "recording"
        if not self.complete or self.gaps:
            return "torn"
        return "lossy" if self.num_losses else "complete"

    @property
    def can_be_recovered(self) -> bool:
        """Whether something is missing that a replay cannot do without: not of a recording that was only cut, or goes on."""
        return not self.being_recorded and any(gap["missing_events"] != 0 for gap in self.gaps)

    @property
    def next_command(self) -> str:
        """Return the command to run next."""
        return shlex.join(
            [*(["kvcanary", "recover"] if self.can_be_recovered else ["kvcanary-replay"]), str(self.path)]
        )

    @property
    def forwards(self) -> int:
        """How many forwards there are."""
        return self.events_by_kind["forward"]

    @property
    def requests(self) -> int:
        """How many requests became known."""
        return self.events_by_kind["request"]

    @property
    def live_line(self) -> str:
        """Say how far a recording under way is; "" for one that has ended."""
        if not self.being_recorded:
            return ""
        how_far = "no forward" if self.last_forward is None else f"forward {self.last_forward:,}"
        seconds = max(0, time.time_ns() - self.written_ns) / 1e9
        return f"a recording under way, {how_far} so far, {self.num_events:,} events, last written {seconds:,.0f} s ago"

    @property
    def columns(self) -> dict[str, dict[str, int]]:
        """The bytes that each column takes in the file, and without compression."""
        return {
            name: {"stored_bytes": stored, "uncompressed_bytes": self.uncompressed_bytes[name]}
            for name, stored in self.stored_bytes.items()
        }

    @property
    def loss_lines(self) -> list[str]:
        """A line for people for each loss that is listed."""
        told = [(loss, loss["lost_events"]) for loss in self.losses]
        counted = [(loss, "an unknown number of" if count < 0 else f"{count:,}") for loss, count in told]
        return [f"event {loss['event']}: {count} events lost: {loss['note']}" for loss, count in counted]

    def to_json(self) -> dict[str, Any]:
        """Return the findings as plain JSON values."""
        found = {name: getattr(self, name) for name in _JSON}
        counts = {name: dict(sorted(found[name].items())) for name in ("events_by_kind", "forwards_by_mode")}
        return found | counts | {"header": dataclasses.asdict(self.header)}


def inspect_trace(path: str | os.PathLike[str]) -> TraceInspection:
    """Read a trace once and say what it holds; raise `UnreadableTraceError`."""
    with TraceReader(path) as reader:
        facts: dict[str, Any] = {"size_bytes": reader.size_bytes, "complete": reader.complete, "header": reader.header}
        found = TraceInspection(path=str(reader.path), **facts)
        for file in (reader.path, *tail_paths(reader.path)):
            with contextlib.suppress(OSError):
                found.written_ns = max(found.written_ns, file.stat().st_mtime_ns)
        for item in reader.stream():
            if isinstance(item, TraceBatch):
                _add_batch(found, item)
            elif item.ends == LIVE:  # nothing is missing: it is yet to come
                found.being_recorded = True
            else:
                found.num_gaps += 1
                _count_lost(found, item.missing_events)
                # A torn end comes last and decides the state, so it is always listed.
                if len(found.gaps) < MAX_LISTED or item.kind == "torn":
                    names = ("after_event", "missing_events", "kind", "reason")
                    found.gaps.append({name: getattr(item, name) for name in names})
    return found


def _count_lost(found: TraceInspection, lost: int | None) -> None:
    if lost is None or lost < 0:
        found.unknown_losses += 1
    else:
        found.lost_events += lost


def _add_batch(found: TraceInspection, batch: TraceBatch) -> None:
    kinds, modes, tokens = batch.kinds, batch.strings("mode"), np.diff(batch.offsets("input_ids"))
    times = batch.scalar_ints("time_ns")
    first, last = int(times.min()), int(times.max())
    found.first_ns = first if found.first_ns is None else min(found.first_ns, first)
    found.last_ns = last if found.last_ns is None else max(found.last_ns, last)
    found.num_events += batch.num_events
    found.num_batches += 1
    found.events_by_kind.update(kinds)
    found.sampled_tokens += len(batch.values("sampled_tokens"))
    stored = batch.stored_bytes()
    found.stored_bytes.update(stored)
    found.uncompressed_bytes.update({name: batch.record_batch.column(name).nbytes for name in stored})
    forwards = [row for row, kind in enumerate(kinds) if kind == "forward"]
    found.forwards_by_mode.update(modes[row] for row in forwards)
    found.input_tokens += int(tokens[forwards].sum())
    if forwards:
        found.last_forward = int(batch.scalar_ints("forward")[forwards[-1]])
    for row, kind in enumerate(kinds):
        if kind == "loss" and batch.event(row).scalar("status") != LATE:
            found.num_losses += 1
            _count_lost(found, batch.event(row).scalar("lost_events"))
            _list(found.losses, batch.event(row), "time_ns", "lost_events", "note")
        elif kind == "mark":
            found.num_marks += 1
            _list(found.marks, batch.event(row), "forward", "time_ns", "note", "labels")


def _list(listed: list[dict[str, Any]], view: EventView, *names: str) -> None:
    if len(listed) < MAX_LISTED:
        values = {name: view.scalar(name) for name in names}
        cut = {name: value[:_LONGEST_NOTE] if isinstance(value, str) else value for name, value in values.items()}
        listed.append({"event": view.number, **cut})
