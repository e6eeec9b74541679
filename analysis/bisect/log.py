"""The log of a bisection: a line a trial, in JSON, from which an interrupted one goes on."""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from ...recorder.files import replace_file
from ...replayer.lab.matrix import build_id
from ..errors import AnalysisError
from . import LOG
from .criteria import Criterion, content_hash, judge_traces
from .search import BisectVerdict, Mark

_OTHERWISE: Final = "name another with --log, or begin anew with --fresh"


class BisectLog:
    """Appends trials to the file `path`, and knows those of an earlier run of the same bisection.

    `about` says in plain JSON values what the bisection is, `head` what git had checked out when it began, "" for nothing to go
    back to. Raise `AnalysisError` if the file cannot be read or written, or is about another one.
    """

    def __init__(self, path: Path, about: dict[str, Any], head: str = "") -> None:
        self._path = path
        self._trials: dict[str, list[BisectVerdict]] = {}
        first = {"bisect": about, "head": head}
        lines = read_log(path, first)
        if lines and lines[0].get("bisect") != about:
            raise AnalysisError(
                f"{path}: the log of another bisection (other versions, command or criterion, or another kvcanary); "
                f"{_OTHERWISE}"
            )
        _end_line(path)  # not before it is known for a log: it may be anybody's file
        self.head = str(lines[0].get("head", "")) if lines else head
        if not lines:
            if path == LOG and not LOG.parent.exists():
                with contextlib.suppress(OSError):  # said below
                    LOG.parent.mkdir()
                    (LOG.parent / ".gitignore").write_text("*\n")
            self._append(first)
            return
        for line in lines[1:]:
            self._trials.setdefault(str(line.get("version")), []).append(BisectVerdict.from_json(line.get("judgement")))

    def trials(self, version: str) -> list[BisectVerdict]:
        """Return what was found with a version before."""
        return list(self._trials.get(version, []))

    def note(self, version: str, verdict: BisectVerdict, seconds: float) -> None:
        """Write a trial down."""
        self._append({"version": version, "judgement": verdict.to_json(), "seconds": round(seconds, 3)})

    def _append(self, line: dict[str, Any]) -> None:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise AnalysisError(
                f"{self._path}: the log cannot be written ({error.strerror or error}); name another with --log"
            ) from None


def _end_line(path: Path) -> None:
    """Cut off the half line of a killed run, so that the next one stands by itself."""
    data = path.read_bytes() if path.is_file() else b"\n"
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def read_log(path: Path, begun: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the whole lines of a log; none if there is no log, or if it was killed in its very first line, `begun`."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise AnalysisError(f"{path}: the log cannot be read ({error}); name another with --log") from None
    found: list[dict[str, Any]] = []
    whole, torn = text.splitlines(), ""
    if whole and not text.endswith("\n"):
        torn = whole.pop()  # the line that was being written when the last run was killed
    if torn and not whole:
        if begun is None or json.dumps(begun).startswith(torn):
            return []
        whole = [torn]
    for number, line in enumerate(whole, 1):
        try:
            found.append(json.loads(line))
            judgement = found[-1].get("judgement")
            if number > 1:
                BisectVerdict.from_json(judgement)
        except (ValueError, AttributeError, RecursionError):
            raise AnalysisError(f"{path}: line {number} is no line of a bisection's log; {_OTHERWISE}") from None
    return found


@cache
def judge_id() -> str:
    """Return what a verdict depends on beside trace and criterion: kvcanary's version, and a digest of all that judges."""
    digest = hashlib.sha256(build_id().encode())
    root = Path(__file__).parents[1]
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".sql")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{build_id()}+{digest.hexdigest()[:12]}"


class VerdictCache:
    """One small JSON file a verdict; a file that cannot be read or written is as good as none."""

    def __init__(self, folder: Path | None) -> None:
        self.hits = 0
        self._folder = folder

    def judge(self, traces: Sequence[Path], criterion: Criterion) -> BisectVerdict:
        """Judge traces, or return what was found when they were judged before."""
        if self._folder is None:
            return judge_traces(traces, criterion)
        path = self._folder / f"{self._key(traces, criterion)}.json"
        with contextlib.suppress(OSError, ValueError):
            known = BisectVerdict.from_json(json.loads(path.read_text(encoding="utf-8")))
            self.hits += 1
            return _of_these(known, traces)
        found = judge_traces(traces, criterion)
        if found.mark is not Mark.SKIP:  # the reason may have been this machine's: no room, no memory
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                replace_file(path, json.dumps(found.to_json()).encode())
        return found

    def _key(self, traces: Sequence[Path], criterion: Criterion) -> str:
        parts = [judge_id(), criterion.key(), *(content_hash(trace) for trace in traces)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _of_these(known: BisectVerdict, traces: Sequence[Path]) -> BisectVerdict:
    """Return a kept verdict with the trace that it names where that lies now."""
    named = Path(str(known.seen.get("trace", "")))
    if "trace" not in known.seen or named in traces:
        return known
    # segments go by a name that is no file's
    elsewhere = traces[0] if len(traces) == 1 else traces[0].parent / named.name
    here = next((trace for trace in traces if trace.name == named.name), elsewhere)
    return replace(known, seen={**known.seen, "trace": str(here)})
