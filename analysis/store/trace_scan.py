"""A trace as something that DuckDB scans: the file itself, column by column, never the whole of it in memory."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

from ...recorder.errors import TraceError
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import TraceGap
from ...recorder.trace.schema import trace_schema
from ...replayer.run.segment_stream import SegmentStream
from ..errors import AnalysisError


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScan:
    """A trace's events for DuckDB, its header, and what is missing of it."""

    header: TraceHeader
    events: Any
    complete: bool
    gaps: list[dict[str, Any]] = field(default_factory=list)


def scan_trace(files: Sequence[Path], resources: ExitStack) -> TraceScan:
    """Check every batch of a trace, one file or the segments of a recording in order, and return it for scanning.

    A whole trace is scanned where it lies. Of a torn or damaged one the whole batches are copied to a temporary file,
    which goes with `resources`.

    Raises:
        AnalysisError: the trace cannot be read, or no copy of it can be written.
    """
    try:
        stream = SegmentStream(files)
        schema: pa.Schema | None = None
        gaps = []
        for item in stream.stream():
            if isinstance(item, TraceGap):
                gaps.append({key: getattr(item, key) for key in ("after_event", "missing_events", "kind", "reason")})
            else:
                schema = schema or item.record_batch.schema
        paths = list(files)
        if gaps or not stream.complete:
            folder = Path(resources.enter_context(private_folder()))
            paths = [_copy_whole_batches(files, schema or trace_schema(), folder)]
        return TraceScan(header=stream.header, events=_dataset(paths, resources), complete=stream.complete, gaps=gaps)
    except TraceError as error:
        raise AnalysisError(str(error)) from None


def _copy_whole_batches(files: Sequence[Path], schema: pa.Schema, folder: Path) -> Path:
    path = folder / "whole.arrow"
    try:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with path.open("wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
            for item in SegmentStream(files).stream():
                if not isinstance(item, TraceGap):
                    writer.write_batch(item.record_batch)
    except OSError as error:
        raise AnalysisError(
            f"{files[0]}: what is whole of it cannot be copied to {folder} ({error.strerror or error}); set TMPDIR "
            "to a folder with room, or run kvcanary recover"
        ) from None
    return path


def _dataset(paths: Sequence[Path], resources: ExitStack) -> Any:
    plain = [str(plain_path(path, resources)) for path in paths]
    # Not mapped: a file that is cut short during a query would end the process.
    return pa.dataset.dataset(plain, format="ipc", filesystem=pa.fs.LocalFileSystem(use_mmap=False))


def plain_path(path: Path, resources: ExitStack) -> Path:
    """Return a path that DuckDB and pyarrow take for the file's name, by a link where it could be a pattern or a query."""
    if is_plain(path):
        return path.absolute()
    link = Path(resources.enter_context(private_folder())) / "link"
    link.symlink_to(path.absolute())
    return link


def is_plain(path: Path) -> bool:
    """Whether a path is UTF-8 without characters that patterns and URLs use."""
    text = str(path.absolute())
    return text.isprintable() and not any(char in text for char in "*?[]#%")


def private_folder(inside: Path | None = None) -> TemporaryDirectory[str]:
    """Return a new temporary folder that only this user can read: tokens are private."""
    return TemporaryDirectory(prefix=".kvcanary-" if inside else "kvcanary-", dir=inside)
