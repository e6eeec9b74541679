"""What the user names on the command line, traces and report folders, as sources: a trace, and the report on it."""

import contextlib
import dataclasses
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...kernels.user_cache import user_cache
from ...recorder.errors import TraceError
from ...recorder.files import read_regular_file, read_small_file, replace_file, replacing
from ...recorder.remote import RemotePath, as_path
from ...recorder.trace.files import split_segment_name
from ...recorder.trace.reader import TraceReader
from ...recorder.trace.recordings import group_recordings, traces_in
from ...replayer.report.report import REPORT_FILES, STORE_NAME, SUMMARY_NAME
from ..errors import AnalysisError

MAX_SUMMARY_BYTES: Final = 64 << 20
_ORIGIN: Final = "origin"  # beside the copy of a report


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One trace and the report on it; either may be missing, not both.

    `name` is what the column `trace` holds. Of a recording in segments `trace` is the first and `segments` are all, in
    order; else there are none. `problem` says why the trace of a report cannot be opened.
    """

    name: str
    trace: Path | None
    report: Path | None
    summary: dict[str, Any] | None
    segments: tuple[Path, ...] = ()
    problem: str = ""

    @property
    def kept(self) -> tuple[Path, ...]:
        """The trace's files and those of the report, which nothing else may take the place of."""
        return self.files + (() if self.report is None else tuple(self.report / name for name in REPORT_FILES))

    @property
    def files(self) -> tuple[Path, ...]:
        """The trace's files, in order; none if it is not at hand."""
        return self.segments or (() if self.trace is None else (self.trace,))


def named_in(path: Path) -> list[Path]:
    """Return what a path stands for: itself, or of a folder each recording's report, else its files, and the reports whose
    traces lie elsewhere. Raise `AnalysisError` if a folder holds nothing of that kind.
    """
    if not path.is_dir() or any((path / name).exists() for name in REPORT_FILES):
        return [_at_hand(path)]
    found: list[Path] = []
    with contextlib.suppress(TraceError):  # a folder may hold reports alone
        for recording in group_recordings(traces_in(path))[0]:
            report = as_path(recording.name).with_suffix(".report")
            found += [report] if (report / SUMMARY_NAME).exists() else recording.paths
    found += sorted({summary.parent for summary in path.glob(f"*/{SUMMARY_NAME}")} - {*found})
    if not found:
        raise AnalysisError(
            f"{path}: neither a report (it has no summary.json) nor a folder of traces (it holds no .arrow file); "
            "name a trace, a report, or a folder of them"
        )
    return [_at_hand(one) for one in found]


def reports_named(path: Path) -> list[Path]:
    """Return the reports that a path stands for: itself, the one beside a trace, or all of a folder; raise `AnalysisError`."""
    named = named_in(path)
    if named == [path] and (path.is_dir() or not _is_there(path)):  # who reads it says what is wrong with it
        return named
    beside = [_at_hand(one if one.is_dir() else one.with_suffix(".report")) for one in named]
    reports = [one for one in dict.fromkeys(beside) if (one / SUMMARY_NAME).exists()]
    if not reports:
        raise AnalysisError(f"{path}: no report in or beside it; run kvcanary-replay {shlex.quote(str(path))}")
    return reports


def find_sources(paths: Sequence[Path], *, trace: Path | None = None) -> list[Source]:
    """Return a source for each path, a trace or a report; `trace` is where the only report's is now. Raise `AnalysisError`."""
    if trace is not None and (len(paths) != 1 or not paths[0].is_dir()):
        raise AnalysisError("--trace goes with one report folder; name traces as arguments instead")
    found: list[Source] = []
    for path in paths:
        source = _report_source(_at_hand(path), trace) if path.is_dir() else _trace_source(path)
        traces = [other.trace for other in found]
        known = next((i for i, one in enumerate(traces) if one and source.trace and one.samefile(source.trace)), None)
        if known is None:
            found.append(source)
        elif source.report is not None:  # the report that was named, not the one that happened to lie beside the trace
            found[known] = source
    return _distinct_names(found)


def read_summary(report: Path) -> dict[str, Any]:
    """Return a report's summary; raise `AnalysisError` if the folder is no report."""
    path = report / SUMMARY_NAME
    try:
        summary = json.loads(read_regular_file(path, MAX_SUMMARY_BYTES))
    except FileNotFoundError:
        what = "no report: it has no summary.json" if report.is_dir() else "no such folder"
        raise AnalysisError(f"{report}: {what}; name the folder that kvcanary-replay wrote") from None
    except NotADirectoryError:
        raise AnalysisError(f"{report}: a file, not a report; name the folder that kvcanary-replay wrote") from None
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise AnalysisError(f"{path}: not JSON ({error}); replay the trace again") from None
    if not isinstance(summary, dict) or not isinstance(summary.get("trace"), str):
        raise AnalysisError(f"{path}: not a summary of kvcanary-replay; replay the trace again")
    return summary


def _report_source(report: Path, moved_to: Path | None) -> Source:
    summary, home = read_summary(report), _home(report)
    recorded = as_path(summary["trace"])
    beside = home.with_name(f"{report.name.removesuffix('.report')}.arrow")
    candidates = [moved_to] if moved_to else [beside, recorded, home / recorded.name, home.parent / recorded.name]
    numbers = summary.get("segments")
    if isinstance(numbers, list) and numbers and split_segment_name(recorded) is None:
        return _segments_source(report, summary, numbers, candidates, moved_to)
    problem = ""
    for candidate in candidates:
        try:
            trace_id = _trace_id(candidate)
        except TraceError as error:
            if candidate in (moved_to, recorded) or _is_there(candidate):  # the others are guesses
                problem = problem or str(error)
            continue
        if trace_id == summary.get("trace_id"):
            return Source(name=candidate.stem, trace=candidate, report=report, summary=summary)
        problem = f"{candidate}: another trace than the one that {report} was made of"
    if moved_to:
        raise AnalysisError(problem)
    return Source(name=recorded.stem, trace=None, report=report, summary=summary, problem=problem)


def _segments_source(
    report: Path, summary: dict[str, Any], numbers: list[int], candidates: list[Path], moved_to: Path | None
) -> Source:
    """Return a report on segments with those of its recording, in the folder where all that it speaks of lie."""
    recorded = as_path(summary["trace"])
    problem = f"{moved_to or recorded}: no segment of this recording is there"
    for candidate in candidates:
        folder = candidate if candidate.is_dir() else candidate.parent
        found = {number: path for number, path in _segments_in(folder, recorded.stem) if number in numbers}
        if not found:
            continue
        missing = sorted({*numbers} - {*found})
        paths = tuple(found[number] for number in sorted(found))
        try:
            same = _trace_id(paths[0]) == summary.get("trace_id")
        except TraceError as error:
            problem = str(error)
            continue
        if not same:
            problem = f"{paths[0]}: of another recording than the one that {report} was made of"
        elif missing:
            problem = f"{folder / recorded.name}: segment {missing[0]} is missing, which {report} was made of"
        else:
            return Source(name=recorded.stem, trace=paths[0], segments=paths, report=report, summary=summary)
    if moved_to:
        raise AnalysisError(problem)
    return Source(name=recorded.stem, trace=None, report=report, summary=summary, problem=problem)


def _segments_in(folder: Path, name: str) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    found = [(split_segment_name(path), path) for path in folder.iterdir() if path.is_file()]
    return sorted((split[1], path) for split, path in found if split is not None and split[0] == name)


def _trace_source(trace: Path) -> Source:
    if not _is_there(trace):
        raise AnalysisError(f"{trace}: no such file or folder; name a trace or a report folder")
    try:
        trace_id = _trace_id(trace)
    except TraceError as error:
        raise AnalysisError(str(error)) from None
    report = trace.with_name(f"{trace.stem}.report")
    summary: dict[str, Any] = {}
    with contextlib.suppress(AnalysisError):
        summary = read_summary(report)
    fits = summary and summary.get("trace_id") == trace_id
    return Source(
        name=trace.stem, trace=trace, report=_at_hand(report) if fits else None, summary=summary if fits else None
    )


def _is_there(path: Path) -> bool:
    return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)


def _at_hand(path: Path) -> Path:
    """Return a path, for a report in an object store a copy of it in this user's cache, made anew if it changed there."""
    if not isinstance(path, RemotePath) or not (path / SUMMARY_NAME).exists():
        return path
    found = (path / SUMMARY_NAME).stat()
    stamp = f"{path}\n{found.st_size} {found.st_mtime_ns}"
    copy = user_cache() / "reports" / hashlib.sha256(str(path).encode()).hexdigest()[:16] / path.name
    with contextlib.suppress(OSError):
        if read_small_file(copy.parent / _ORIGIN).decode() == stamp:
            return copy
    copy.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = {one.name for one in path.iterdir()}
    for name in REPORT_FILES:
        (copy / name).unlink(missing_ok=True)
        if name in there and name != STORE_NAME:  # which is made here, where it is believed
            with (path / name).open("rb") as source, replacing(copy / name) as target:
                shutil.copyfileobj(source, target)
    replace_file(copy.parent / _ORIGIN, stamp.encode())
    return copy


def _home(report: Path) -> Path:
    """Return where a report really lies, if it is a copy that `_at_hand` made."""
    if report.parent.parent == user_cache() / "reports":
        return as_path(read_small_file(report.parent / _ORIGIN).decode().partition("\n")[0])
    return report


def _trace_id(trace: Path) -> str:
    with TraceReader(trace) as reader:
        return reader.header.trace_id


def _distinct_names(sources: list[Source]) -> list[Source]:
    """Names as short as they are distinct: the file's, else with its folder, else numbered."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        names = [f"{(s.trace or s.report or Path()).absolute().parent.name}/{s.name}" for s in sources]
    if len(set(names)) < len(names):
        names = [f"{name}#{number}" for number, name in enumerate(names, 1)]
    # As text that is UTF-8: bytes that are not become escapes.
    plain = [name.encode("utf-8", "backslashreplace").decode("utf-8") for name in names]
    return [dataclasses.replace(source, name=name) for name, source in zip(plain, sources, strict=True)]
