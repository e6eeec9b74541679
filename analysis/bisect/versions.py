"""Saved traces in the order of the engine versions that recorded them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ...recorder.errors import TraceError
from ...recorder.trace.reader import TraceReader
from ...recorder.trace.recordings import traces_in
from ..errors import AnalysisError


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedVersion:
    """A version and what was recorded with it: each run is one trace, or those of one folder."""

    name: str
    runs: tuple[tuple[Path, ...], ...]


def read_versions(paths: Sequence[Path], order: Sequence[str] = ()) -> list[SavedVersion]:
    """Return the versions of traces, and of folders of traces, oldest first; a folder is one run: its ranks, or a pair's sides.

    `order` names versions, or trace files, oldest first; without it versions are ordered as PEP 440 says. Raises `AnalysisError`
    if a path holds no readable trace, a trace names no version, engines are mixed, or there is no order, or one version only.
    """
    runs: dict[str, list[tuple[Path, ...]]] = {}
    engines: set[str] = set()
    try:
        for path in paths:
            run = tuple(traces_in(path)) if path.is_dir() else (path,)
            runs.setdefault(_name(path, run, order, engines), []).append(run)
    except TraceError as error:
        raise AnalysisError(str(error)) from None
    if len(engines) > 1 and not order:
        raise AnalysisError(
            f"traces of several engines, {', '.join(sorted(engines))}, whose versions follow no common order; name those "
            "of one, or say the order with --order FILE"
        )
    names = _ordered(runs, order)
    if len(names) < 2:
        raise AnalysisError(f"a bisection needs traces of at least two versions, came {', '.join(names) or 'none'}")
    return [SavedVersion(name=name, runs=tuple(runs[name])) for name in names]


def read_order(path: Path) -> list[str]:
    """Return a file's versions or traces, oldest first, without blank lines and # comments; raise `AnalysisError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise AnalysisError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise AnalysisError(f"{path}: not UTF-8 text; expected one version a line, oldest first") from None
    found = [name for line in lines if (name := line.split("#")[0].strip())]
    if not found:
        raise AnalysisError(f"{path}: names no version; expected one a line, oldest first")
    return one_each(found, str(path))


def one_each(names: list[str], where: str) -> list[str]:
    """Return names, oldest first; raise `AnalysisError` if one stands twice: which of the two places would it be?"""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise AnalysisError(f"{where}: names {name} twice")
        seen.add(name)
    return names


def _name(path: Path, run: tuple[Path, ...], order: Sequence[str], engines: set[str]) -> str:
    """Return the version that a run is of, and add its engine's name; where the order names files, the file's."""
    for listed in (str(path), path.name, path.stem):
        if listed in order:
            return listed
    versions = []
    for trace in run:
        with TraceReader(trace) as reader:
            engine = reader.header.engine
        engines.add(engine.name)
        versions.append(engine.commit if engine.commit in order else engine.version)
    if len(set(versions)) > 1:
        raise AnalysisError(
            f"{path}: traces of several versions, {', '.join(sorted(set(versions)))}; name them one by one"
        )
    if not versions[0]:
        raise AnalysisError(f"{path}: its header names no engine version; put the files in order with --order FILE")
    return versions[0]


def _ordered(runs: dict[str, list[tuple[Path, ...]]], order: Sequence[str]) -> list[str]:
    if order:
        unknown = sorted(set(runs) - set(order))
        if unknown:
            raise AnalysisError(f"--order does not say where {', '.join(unknown)} belongs")
        return [name for name in order if name in runs]
    try:
        return sorted(runs, key=Version)
    except InvalidVersion as error:
        raise AnalysisError(f"{error}: versions cannot be ordered; say how with --order FILE") from None
