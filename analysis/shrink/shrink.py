"""From a recording to the smallest trace that shows one of its incidents, renamed and proven."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...recorder.files import partial_path
from ...recorder.trace.header import Shrunk, TraceHeader
from ...recorder.writing.writer import completed_header
from ...replayer.run.settings import Progress
from ...replayer.run.streams import SegmentStream
from ..errors import AnalysisError
from .cutting import Cutter
from .parts import NOBODY, PADDING, Part, Slots, views_of
from .proof import Judge, Shown, renamed_rows, show, show_part, write_part
from .renaming import Names, renamed
from .search import Search

_LAST: Final = 1 << 62  # an event behind all others
# Seen by how far equal tokens' KV bytes differ, and a shrunk trace holds digests of these; unless the layers' adapters tell it.
_OF_VALUES: Final = "computed_with_other_weights"
_TOLD: Final = "computed_otherwise"


class NothingToShrinkError(AnalysisError):
    """The recording shows no incident, or not one that a part of it shows again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is in a trace."""

    events: int
    forwards: int
    requests: int
    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkResult:
    """What became of a recording: `incident` is the row that the written trace shows, `stopped` why it may not be the
    smallest, `slots_renamed` whether its slots have new numbers.
    """

    trace: str
    shrunk: str
    incident: dict[str, Any]
    before: Size
    after: Size
    replays: int
    seconds: float
    slots_renamed: bool
    stopped: str


def shrink(
    paths: Sequence[Path],
    output: Path,
    *,
    incident: int = 1,
    seconds: float = 300.0,
    on_replay: Callable[[Progress], None] = lambda _: None,
    on_trial: Callable[[str, Search], None] = lambda *_: None,
) -> ShrinkResult:
    """Write the smallest trace found that shows incident number `incident` of a recording, whose segments `paths` are.

    Looks for a smaller one for `seconds`, or up to Ctrl-C, and takes the smallest so far. Raises `NothingToShrinkError`,
    `TraceError`, and `AnalysisError` if there is no such incident, or the output cannot be written.
    """
    began = time.monotonic()
    whole = show(paths, on_replay)
    if not whole.incidents:
        raise NothingToShrinkError(f"{paths[0]}: shows no incident, so there is nothing to shrink")
    if incident > len(whole.incidents):
        has = f"has {len(whole.incidents)} incident(s), no number {incident}"
        raise AnalysisError(f"{paths[0]}: {has}; kvcanary-replay lists them")
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(whole, incident - 1, Path(folder))
        if judge.wanted["kind"] == _OF_VALUES and _TOLD not in judge.wanted["seen_by"]:
            raise NothingToShrinkError(
                f"{paths[0]}: only the values of KV bytes show the incident, and a shrunk trace has digests of them: attach the "
                "recording itself, which holds tokens, or the requests that bring it (kvcanary shrink WORKLOAD --run)"
            )
        part, shown = _beginning(paths, whole, judge)
        search = Search(judge=judge, best=part, shown=shown, until=time.monotonic() + seconds, told=on_trial)
        search.run()
        final, slots_renamed, row = _proven(search, whole, Path(folder))
        judge.replays += 1 if slots_renamed else 2
    partial = partial_path(output)
    try:
        write_part(final, partial)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    summary = whole.summary
    return ShrinkResult(
        trace=summary.trace,
        shrunk=str(output),
        incident=row,
        before=Size(
            events=sum(summary.events.values()),
            forwards=summary.forwards,
            requests=summary.requests,
            tokens=summary.tokens,
            bytes=sum(path.stat().st_size for path in paths),
        ),
        after=_size(final, output),
        replays=judge.replays,
        seconds=round(time.monotonic() - began, 1),
        slots_renamed=slots_renamed,
        stopped=search.stopped,
    )


def _size(part: Part, path: Path) -> Size:
    forwards = [event for event in part.events if event.kind == "forward"]
    none = np.zeros(0, np.int64)
    requests = np.unique(np.concatenate([none, *(event.ints.get("request_ids", none) for event in forwards)]))
    tokens = sum(len(event.ints.get("input_ids", none)) for event in forwards)
    size = path.stat().st_size
    return Size(
        events=len(part.events), forwards=len(forwards), requests=int((requests >= 0).sum()), tokens=tokens, bytes=size
    )


def _beginning(paths: Sequence[Path], whole: Shown, judge: Judge) -> tuple[Part, Shown]:
    """Return a part to begin with: the events up to the incident of those who wrote and read its slots, if they suffice."""
    row, header = judge.wanted, whole.summary.header
    slots = {g: _slots(row, g) for g in range(len(header.groups))}
    first = {int(row["first_event"])}
    close = {one for v in whole.violations if v[0] in first for one in (v[1], v[8])}
    close |= {one for f in whole.findings if f[0] in first for one in (f[1], f[7])}
    close -= {NOBODY}  # whose events stay by the slots that they name
    near = close | set(row["request_ids"])
    for requests, end, beside in (
        (close, row["first_event"], False),
        (close, row["first_event"], True),
        (near, row["first_event"], True),
        (None, row["first_event"], True),
        (near, _LAST, True),
        (None, _LAST, True),
    ):
        part = _cut(paths, header, requests, slots, int(end), beside)
        if part.events and (shown := judge.shows(part)) is not None:
            return part, shown
    why = ""
    if next(view.kind for view, _ in _views(paths)) == "keyframe":
        why = "; the recording begins with a keyframe: give the folder that holds the segments before it, too"
    raise NothingToShrinkError(f"{paths[0]}: its events alone do not show the incident again{why}")


def _slots(row: dict[str, Any], group: int) -> Int64Array:
    runs = [np.arange(run["start"], run["start"] + run["count"]) for run in row["slots"] if run["pool_group"] == group]
    return np.concatenate([np.zeros(0, np.int64), *runs])


def _cut(
    paths: Sequence[Path],
    header: TraceHeader,
    requests: set[int] | None,
    slots: dict[int, Int64Array],
    end: int,
    beside: bool,
) -> Part:
    """Return the events up to `end` of some requests, and of nobody if they name one of `slots`.

    With `beside`, also if they name another slot that something kept has named: of a long trace that is most of them.
    """

    def keep(_: int, member: int, named: Slots) -> bool:
        if requests is None or member in requests:
            return True
        if member not in (NOBODY, PADDING):
            return False
        if any(np.isin(part, slots[group]).any() for group, part in named.items()):
            return True
        return beside and cutter.losses.names(named)

    cutter = Cutter(header, keep, None if requests is None else frozenset(requests))
    return cutter.cut(takewhile(lambda item: item[1] <= end, _views(paths)))


def _views(paths: Sequence[Path]) -> Iterator[Any]:
    return views_of(SegmentStream(paths).stream())


def _proven(search: Search, whole: Shown, folder: Path) -> tuple[Part, bool, dict[str, Any]]:
    """Return the part under new names, whether its slots have new ones, and its incident: the same, by a replay."""
    header = whole.summary.header
    if search.best.header.oracle is not None:
        why = (
            f"{search.stopped} before a trace without the token oracle was tried"
            if search.stopped
            else (
                "only the token oracle shows the incident, and salted tokens have none: attach the recording itself, which holds tokens"
            )
        )
        raise NothingToShrinkError(f"{whole.summary.trace}: {why}")
    mark = Shrunk(
        events=sum(whole.summary.events.values()),
        forwards=whole.summary.forwards,
        requests=whole.summary.requests,
        incident=search.judge.wanted["kind"],
    )
    wanted = search.judge.wanted
    for slots in (True, False):
        part, names = renamed(search.best, slots=slots)
        marked = dataclasses.replace(part.header, shrunk=mark, created_ns=header.created_ns)
        part = Part(completed_header(marked), part.events, part.numbers)
        found = show_part(part, folder)
        same = renamed_rows(search.shown, names) == renamed_rows(found, Names(part.header))
        kinds = [
            [row[name] for row in shown.incidents for name in ("kind", "branch")] for shown in (search.shown, found)
        ]
        for row in found.incidents if same and kinds[0] == kinds[1] else ():
            if (row["kind"], row["first_forward"]) == (wanted["kind"], wanted["first_forward"]):
                return part, slots, row
    raise NothingToShrinkError(
        f"{whole.summary.trace}: the incident does not show under other names of tokens and requests; please report it"
    )
