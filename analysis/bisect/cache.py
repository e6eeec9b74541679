"""Verdicts that were given before, by the content of the traces, kvcanary's version, and what makes a trace bad."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ... import __version__
from .criteria import Criterion, content_hash, judge_traces
from .outcome import Judgement


def default_cache() -> Path:
    """Return where verdicts are kept unless the user says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "kvcanary" / "bisect"


class VerdictCache:
    """One small JSON file a verdict; a file that cannot be read or written is as good as none."""

    def __init__(self, folder: Path | None) -> None:
        self.hits = 0
        self._folder = folder

    def judge(self, traces: Sequence[Path], criterion: Criterion) -> Judgement:
        """Judge traces, or return what was found when they were judged before."""
        if self._folder is None:
            return judge_traces(traces, criterion)
        path = self._folder / f"{self._key(traces, criterion)}.json"
        with contextlib.suppress(OSError, ValueError):
            known = Judgement.from_json(json.loads(path.read_text(encoding="utf-8")))
            self.hits += 1
            return known
        found = judge_traces(traces, criterion)
        self._keep(path, found)
        return found

    def _key(self, traces: Sequence[Path], criterion: Criterion) -> str:
        told = [__version__, criterion.key(), *(content_hash(trace) for trace in traces)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def _keep(self, path: Path, found: Judgement) -> None:
        # Made beside and renamed: two bisections may share a cache. Readable by this user only.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(found.to_json(), file)
            Path(name).replace(path)
