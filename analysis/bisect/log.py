"""The log of a bisection: a line a trial, in JSON, from which an interrupted one goes on."""

import json
import os
from pathlib import Path
from typing import Any

from ..errors import AnalysisError
from .outcome import Judgement


class BisectLog:
    """Appends trials to a file as they are done, and tells those of an earlier run of the same bisection.

    Args:
        path: the file; None to keep nothing.
        about: what the bisection is: plain JSON values. A file about another one is not gone on with.

    Raises:
        AnalysisError: the file cannot be read or written, or is about another bisection.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path = path
        self._trials: dict[str, list[Judgement]] = {}
        if path is None:
            return
        lines = _lines(path, about)
        if lines and lines[0].get("bisect") != about:
            raise AnalysisError(
                f"{path}: the log of another bisection (other versions, command or criterion, or another kvcanary); name another with --log, or "
                "begin anew with --fresh"
            )
        _end_line(path)  # not before it is known for a log: it may be anybody's file
        if not lines:
            self._append({"bisect": about})
            return
        for line in lines[1:]:
            self._trials.setdefault(str(line.get("version")), []).append(Judgement.from_json(line.get("judgement")))

    def trials(self, version: str) -> list[Judgement]:
        """Return what was found with a version before."""
        return list(self._trials.get(version, []))

    def note(self, version: str, judgement: Judgement, seconds: float) -> None:
        """Write a trial down."""
        if self._path is not None:
            self._append({"version": version, "judgement": judgement.to_json(), "seconds": round(seconds, 3)})

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is None:
            return
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
    if not path.is_file():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _lines(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the whole lines of a log; of a log that was killed in its very first line, none."""
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
        if json.dumps({"bisect": about}).startswith(torn):
            return []
        whole = [torn]
    for number, line in enumerate(whole, 1):
        parsed = _parsed(line, trial=number > 1)
        if parsed is None:
            raise AnalysisError(
                f"{path}: line {number} is no line of a bisection's log; name another with --log, or begin anew with --fresh"
            )
        found.append(parsed)
    return found


def _parsed(line: str, *, trial: bool) -> dict[str, Any] | None:
    try:
        parsed = json.loads(line)
        if trial:
            Judgement.from_json(parsed.get("judgement"))
    except (ValueError, AttributeError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
