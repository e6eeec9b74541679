"""The one trace in a folder, as an adapter under test leaves it."""

from pathlib import Path
from typing import Any

from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import ReplaySettings, replay


def events(folder: Path) -> tuple[Any, list[Any]]:
    """Return the header and the events."""
    (path,) = folder.glob("*.arrow")
    with TraceReader(path) as reader:
        return reader.header, list(read_trace(path))


def verdict(folder: Path) -> Summary:
    """Replay it."""
    (path,) = folder.glob("*.arrow")
    return replay(path, settings=ReplaySettings(), report=None)


def replayed(folder: Path) -> tuple[Summary, Any, list[Any]]:
    """Replay it; return the summary, the header and the events."""
    return verdict(folder), *events(folder)
