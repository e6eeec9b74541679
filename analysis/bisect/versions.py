"""Saved traces in the order of the engine versions that recorded them."""

import hashlib
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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


_ORDER: Final = ".kvcanary-versions"  # in the folder of --keep: its versions, oldest first
MAX_NAME: Final = 60  # characters of a version in a folder's name: 255 bytes are the most, a character takes up to four


def read_versions(paths: Sequence[Path], order: Sequence[str] = ()) -> tuple[list[SavedVersion], str]:
    """Return the versions of traces, and of folders of traces, oldest first, and how they were ordered if nothing says it.

    A folder is one run, its ranks or a pair's sides, or what `kvcanary bisect run --keep` kept; without a trace it is passed
    over. `order` names versions, or trace files, oldest first; without it versions are ordered as that bisection had them, or as
    PEP 440 says, else as they are given. Raises `AnalysisError` if a trace cannot be read, engines are mixed, or there is one
    version only.
    """
    kept = [path for path in paths if (path / _ORDER).is_file()]
    paths = [below for path in paths for below in (sorted(path.iterdir()) if path in kept else [path])]
    if not order:
        orders = [
            folder / _ORDER for folder in [*kept, *(path.parent for path in paths)] if (folder / _ORDER).is_file()
        ]
        order = read_order(orders[0]) if orders else ()
    runs: dict[str, list[tuple[Path, ...]]] = {}
    found: list[tuple[Path, str, tuple[Path, ...]]] = []
    engines: set[str] = set()
    try:
        for path in paths:
            folders = sorted({trace.parent for trace in path.rglob("*.arrow")}) if path.is_dir() else []
            if path.is_dir() and not folders:
                continue  # of a version that did not start
            run = tuple(trace for folder in folders for trace in traces_in(folder)) or (path,)
            if not path.name.startswith("."):
                found.append((path, _name(path, run, order, engines), run))
    except TraceError as error:
        raise AnalysisError(str(error)) from None
    if len(engines) > 1 and not order:
        raise AnalysisError(
            f"traces of several engines, {', '.join(sorted(engines))}, whose versions follow no common order; name those "
            "of one, or say the order with --order FILE"
        )
    said = ""
    if not order and (why := _unordered([name for _, name, _ in found])):
        said = f"{why}: each is taken for a version, oldest first as they are given; --order FILE says another order"
        found = [(path, str(path), run) for path, _, run in found]
        if [str(path) for path, *_ in found] == sorted(str(path) for path, *_ in found):  # as a shell's * gives them
            found.sort(key=lambda one: _natural(one[1]))
    for _, name, run in found:
        runs.setdefault(name, []).append(run)
    names = list(runs) if said else _ordered(runs, order)
    if len(names) < 2:
        raise AnalysisError(
            f"a bisection needs traces of at least two versions, came {', '.join(names) or 'none'}; a folder is one run, and "
            "a version for each of its traces if they are named: FOLDER/*.arrow"
        )
    return [SavedVersion(name=name, runs=tuple(runs[name])) for name in names], said


def _unordered(names: list[str]) -> str:
    """Say why traces cannot be put in order by the versions that their headers name; "" if they can."""
    if len(names) > len(set(names)) == 1:
        return f"their headers name one version, {names[0] or 'none'}"
    for name in names:
        try:
            Version(name)
        except InvalidVersion:
            return f"their headers name versions that have no order, such as {name or 'none'}"
    return ""


def _natural(name: str) -> list[str | int]:
    """Return what sorts build-2 before build-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def keep_order(folder: Path, versions: Sequence[str]) -> None:
    """Note in a folder of kept traces which versions they are of, oldest first; raise `AnalysisError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _ORDER).write_text("".join(f"{version}\n" for version in versions), encoding="utf-8")
    except OSError as error:
        raise AnalysisError(f"{folder}: cannot be made ({error.strerror or error}); name another with --keep") from None


def folder_name(version: str) -> str:
    """Return a name for a version's folder; where that cannot be the version's own, it differs from all others."""
    plain = "".join(char if char.isalnum() or char in "._+-" else "_" for char in version)[:MAX_NAME]
    if plain == version:
        return plain
    return f"{plain}-{hashlib.sha256(version.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


def git(*words: str) -> str:
    """Return what git prints; raise `AnalysisError` with its message."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, errors="replace")
    except OSError as error:
        raise AnalysisError(f"git cannot be run ({error.strerror or error})") from None
    if done.returncode:
        raise AnalysisError(done.stderr.strip() or f"git {words[0]} ended with {done.returncode}")
    return done.stdout


def checked_out() -> str:
    """Return the branch that git has checked out here, or the commit."""
    try:
        return git("symbolic-ref", "--short", "-q", "HEAD").strip()
    except AnalysisError:
        return git("rev-parse", "HEAD").strip()


def subjects(versions: Iterable[str]) -> dict[str, str]:
    """Return the first lines of what git's commits here say, of those versions that are commits."""
    commits = [version for version in versions if re.fullmatch("[0-9a-f]{7,64}", version)]
    try:
        told = (
            git("log", "--no-walk=unsorted", "--ignore-missing", "--format=%H %s", "--end-of-options", *commits)
            if commits
            else ""
        )
    except AnalysisError:  # no repository, or not theirs
        return {}
    by_commit = dict(line.partition(" ")[::2] for line in told.splitlines())
    return {name: subject for name in commits for commit, subject in by_commit.items() if commit.startswith(name)}


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
    for listed in order:  # as kept by a bisection
        if path.name.rpartition("-")[0] == folder_name(listed):
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
    return versions[0]


def _ordered(runs: dict[str, list[tuple[Path, ...]]], order: Sequence[str]) -> list[str]:
    if not order:
        return sorted(runs, key=Version)
    unknown = sorted(set(runs) - set(order))
    if unknown:
        raise AnalysisError(f"--order does not say where {', '.join(unknown)} belongs")
    return [name for name in order if name in runs]
