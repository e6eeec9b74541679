"""Verdicts that were given before, by the content of the traces, kvcanary's own code, and what makes a trace bad."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from ...replayer.lab.results import build_id
from .criteria import Criterion, content_hash, judge_traces
from .outcome import Judgement, Outcome


def default_cache() -> Path:
    """Return where verdicts are kept unless the user says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "kvcanary" / "bisect"


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

    def judge(self, traces: Sequence[Path], criterion: Criterion) -> Judgement:
        """Judge traces, or return what was found when they were judged before."""
        if self._folder is None:
            return judge_traces(traces, criterion)
        path = self._folder / f"{self._key(traces, criterion)}.json"
        with contextlib.suppress(OSError, ValueError):
            known = Judgement.from_json(json.loads(path.read_text(encoding="utf-8")))
            self.hits += 1
            return _of_these(known, traces)
        found = judge_traces(traces, criterion)
        if found.outcome is not Outcome.SKIP:  # the reason may have been this machine's: no room, no memory
            self._keep(path, found)
        return found

    def _key(self, traces: Sequence[Path], criterion: Criterion) -> str:
        told = [judge_id(), criterion.key(), *(content_hash(trace) for trace in traces)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def _keep(self, path: Path, found: Judgement) -> None:
        # Made beside and renamed: two bisections may share a cache. Readable by this user only.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(found.to_json(), file)
            Path(name).replace(path)


def _of_these(known: Judgement, traces: Sequence[Path]) -> Judgement:
    """Return a kept verdict with the trace that it names where that lies now."""
    named = Path(str(known.seen.get("trace", "")))
    if "trace" not in known.seen or named in traces:
        return known
    # segments go by a name that is no file's
    elsewhere = traces[0] if len(traces) == 1 else traces[0].parent / named.name
    here = next((trace for trace in traces if trace.name == named.name), elsewhere)
    return replace(known, seen={**known.seen, "trace": str(here)})
