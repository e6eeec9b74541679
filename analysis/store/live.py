"""The library over traces and reports where they lie: nothing is imported, every query reads the files."""

import dataclasses
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset
import pyarrow.fs

from ...recorder.errors import TraceError
from ...recorder.files import is_regular
from ...recorder.remote import RemotePath, located
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import TraceGap
from ...recorder.trace.schema import trace_schema
from ...replayer.report.findings import ADDED_COLUMNS, FINDING_SCHEMA
from ...replayer.report.violations import VIOLATION_SCHEMA
from ...replayer.run.streams import SegmentStream
from ..errors import AnalysisError
from ..incidents.finding import incidents_fit
from ..incidents.schema import INCIDENT_SCHEMA, MEMBER_SCHEMA
from .connection import private_folder, quoted
from .library import table_schema
from .sources import Source

HEADER_SCHEMAS: Final[dict[str, pa.Schema]] = {
    "_traces": table_schema(
        "trace varchar, path varchar, trace_id varchar, engine varchar, engine_version varchar, model varchar, "
        "role varchar, slot_history varchar, sweep_interval bigint, kv_watch_every bigint, tp_rank bigint, "
        "pp_rank bigint, dp_rank bigint, created_ns bigint, complete boolean, present boolean"
    ),
    "_pool_groups": table_schema(
        "trace varchar, pool_group bigint, name varchar, kind varchar, window_tokens bigint, runner bigint, "
        "runner_name varchar, token_offset bigint, table_index bigint, lut bigint, num_slots bigint, page_size bigint, "
        "halves varchar[], reads_before_write boolean, host_num_slots bigint"
    ),
    "_streams": table_schema(
        "trace varchar, runner bigint, stream bigint, pool_group bigint, half varchar, layer bigint, "
        "bytes_per_token bigint, capture_bytes bigint, origin varchar"
    ),
    "_tables": table_schema("trace varchar, table_index bigint"),
    "_request_names": table_schema("trace varchar, request_id bigint, name varchar"),
    "_gaps": table_schema("trace varchar, after_event bigint, missing_events bigint, kind varchar, reason varchar"),
    "_coverage": table_schema(
        "trace varchar, what varchar, name varchar, watched bigint, total bigint, share double, reason varchar, "
        "words varchar"
    ),
}
# A request without a recorded name is called by its id; nobody has no name.
_REQUEST_NAME: Final = """create or replace temp macro request_name(name, id) as
    case when id >= 0 then coalesce(nullif(name, ''), id::varchar) end"""
_KINDS: Final = {pa.utf8(): str, pa.int64(): int, pa.float64(): float}


def header_rows(
    name: str, trace: Path, header: TraceHeader, *, complete: bool, gaps: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return one trace's rows of each table in `HEADER_SCHEMAS`."""
    facts = {
        **{key: getattr(header, key) for key in ("trace_id", "role", "slot_history", "sweep_interval", "created_ns")},
        **{f"{kind}_rank": getattr(header.ranks, f"{kind}_rank") for kind in ("tp", "pp", "dp")},
        "trace": name,
        "path": str(trace).encode("utf-8", "backslashreplace").decode("utf-8"),
        "engine": header.engine.name,
        "engine_version": header.engine.version,
        "model": header.model.name,
        "kv_watch_every": header.capture.kv_watch_every,
        "complete": complete,
        "present": True,
    }
    groups = [
        {
            **dataclasses.asdict(group),
            "trace": name,
            "pool_group": number,
            "window_tokens": group.window,
            "table_index": group.table,
            "runner_name": header.runners[group.runner].name,
            "token_offset": header.runners[group.runner].token_offset,
        }
        for number, group in enumerate(header.groups)
    ]
    streams = [
        {"trace": name, "runner": runner, "stream": number, "pool_group": group, **dataclasses.asdict(stream)}
        for runner in range(len(header.runners))
        for number, (group, stream) in enumerate(header.streams(runner))
    ]
    return {
        "_traces": [facts],
        "_pool_groups": groups,
        "_streams": streams,
        "_tables": [{"trace": name, "table_index": number} for number in range(len(header.tables))],
        "_gaps": [{"trace": name, **gap} for gap in gaps],
    }


def summary_rows(name: str, summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what a report's summary knows of a trace that is not at hand."""
    engine, known = summary.get("engine", {}), {key: summary.get(key) for key in ("trace_id", "complete")}
    known |= {"engine": engine.get("name"), "engine_version": engine.get("version")}
    known |= {"model": summary.get("model", {}).get("name"), "present": False}
    return {"_traces": [{"trace": name, "path": summary["trace"], **known}]}


def coverage_rows(name: str, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a report's summary says of how much was watched; nothing of an older report, or of what is no row."""
    schema = HEADER_SCHEMAS["_coverage"]
    rows = summary.get("coverage")
    return [
        {field.name: _value(row.get(field.name), field.type) for field in schema} | {"trace": name}
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]


def _value(value: Any, kind: pa.DataType) -> Any:
    """Return a value of a report that anybody may have written, None if it is not of its column's type."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return None
    return value if isinstance(value, _KINDS[kind]) else None


FileStates = dict[Path, tuple[int, ...]]

_REPORT_FILES = {"violations": VIOLATION_SCHEMA, "findings": FINDING_SCHEMA}
# What reports did not have from the beginning, and sql/base/violations.sql has without them.
_ADDED = ADDED_COLUMNS | {"first_forward", "last_forward", "num_forwards"}
_INCIDENT_FILES = {"incidents": INCIDENT_SCHEMA, "incident_members": MEMBER_SCHEMA}


def make_raw_relations(
    connection: Any, sources: Sequence[Source], resources: ExitStack
) -> tuple[list[str], FileStates]:
    """Give a connection `raw_events`, `raw_violations`, `raw_findings` and the header's tables, of all sources.

    Return the files that DuckDB itself goes on reading, and the states of the traces when they were checked; raise
    `AnalysisError` if a trace or a report cannot be read.
    """
    plain = {s.report: plain_path(s.report, resources) for s in sources if s.report is not None}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in HEADER_SCHEMAS}
    events = []
    states: FileStates = {}
    for number, source in enumerate(sources):
        if source.trace is None:
            found = summary_rows(source.name, source.summary or {})
        else:
            scan = scan_trace(source.files, resources)
            connection.register(f"raw_events_{number}", scan.events)
            states |= scan.states
            events.append((source.name, f"raw_events_{number}"))
            found = header_rows(source.name, source.trace, scan.header, complete=scan.complete, gaps=scan.gaps)
            found["_request_names"] = [
                {"trace": source.name, "request_id": request, "name": name} for request, name in scan.names.items()
            ]
        found["_coverage"] = coverage_rows(source.name, source.summary or {})
        for name, new in found.items():
            rows[name] += new
    for name, schema in {"raw_events": trace_schema(), **_REPORT_FILES, **_INCIDENT_FILES}.items():
        connection.register(f"_no_{name}", schema.empty_table())
    _union(connection, "raw_events", events)
    for name, schema in HEADER_SCHEMAS.items():
        connection.register(name, pa.Table.from_pylist(rows[name], schema=schema))
    reports = [(s.name, s.report, plain[s.report]) for s in sources if s.report is not None]
    for name in _REPORT_FILES:
        parts = [(source, _parquet(folder, name)) for source, _, folder in reports]
        for (_, report, _), (_, relation) in zip(reports, parts, strict=True):
            _check_columns(connection, report / f"{name}.parquet", relation, name)
        _union(connection, f"_all_{name}", parts, f"_no_{name}, (select 0::bigint as file_row_number)")
        connection.execute(
            f'create temp view raw_{name} as select * exclude ("group", file_row_number), "group" as pool_group, '
            f"file_row_number as number from _all_{name}"
        )
    fitting = [(source, folder) for source, report, folder in reports if incidents_fit(report)]
    for name in _INCIDENT_FILES:
        paths = [(source, quoted(str(folder / f"{name}.parquet"))) for source, folder in fitting]
        _union(connection, f"raw_{name}", [(source, f"read_parquet({path})") for source, path in paths], f"_no_{name}")
    connection.execute(_REQUEST_NAME)
    # DuckDB takes a trace for a few rows, and would hold it in memory to join it with the names of its requests.
    connection.execute("set disabled_optimizers = 'build_side_probe_side'")
    names = (*_REPORT_FILES, *_INCIDENT_FILES)
    return [str(folder / f"{name}.parquet") for folder in plain.values() for name in names], states


def _union(connection: Any, name: str, parts: Sequence[tuple[str, str]], none: str = "") -> None:
    """Make a view over the relation of each source, whose name is in `trace`; `none` has the columns and no row."""
    selected = [f"select {quoted(source)} as trace, * from {relation}" for source, relation in parts]
    selected.append(f"select ''::varchar as trace, * from {none or f'_no_{name}'}")
    connection.execute(f"create temp view {name} as " + "\nunion all by name\n".join(selected))


def _parquet(report: Path, name: str) -> str:
    path = report / f"{name}.parquet"
    if not is_regular(path):
        raise AnalysisError(f"{path}: missing, or no regular file; the report is incomplete, so replay the trace again")
    return f"read_parquet({quoted(str(path))}, file_row_number = true)"


def _check_columns(connection: Any, path: Path, relation: str, name: str) -> None:
    """Refuse a report's file that lacks a column, or has text where numbers belong: numbers stand in later queries."""
    expected, found = (
        dict(connection.execute(f"select column_name, column_type from (describe from {of})").fetchall())
        for of in (f"_no_{name}", relation)
    )
    again = "replay the trace again"
    missing = sorted(expected.keys() - found.keys() - _ADDED)
    if missing:
        raise AnalysisError(f"{path}: expected the columns of a report, {', '.join(missing)} missing; {again}")
    wrong = [column for column, kind in expected.items() if "INT" in kind and "INT" not in found.get(column, "INT")]
    if wrong:
        raise AnalysisError(f"{path}: expected numbers in {', '.join(wrong)}, came {found[wrong[0]]}; {again}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScan:
    """A trace's events for DuckDB, the files that they lie in as they were, its header, and what is missing of it."""

    header: TraceHeader
    events: Any
    states: FileStates
    complete: bool
    gaps: list[dict[str, Any]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # of requests, as recorded


def scan_trace(files: Sequence[Path], resources: ExitStack) -> TraceScan:
    """Check every batch of a trace, one file or the segments of a recording in order, and return it for scanning.

    A whole trace is scanned where it lies. Of a torn or damaged one, and of one that another user may change once it is
    checked, the whole batches are copied to a temporary file, which goes with `resources`. Raises `AnalysisError`.
    """
    try:
        states = file_states(files)
        stream = SegmentStream(files)
        schema: pa.Schema | None = None
        gaps = []
        names: dict[int, str] = {}
        for item in stream.stream():
            if isinstance(item, TraceGap):
                gaps.append({key: getattr(item, key) for key in ("after_event", "missing_events", "kind", "reason")})
            else:
                schema = schema or item.record_batch.schema
                requests = item.record_batch.select(["kind", "request_id", "name"])
                requests = requests.filter(pa.compute.equal(requests["kind"], "request"))
                names |= zip(requests["request_id"].to_pylist(), requests["name"].to_pylist(), strict=True)
        paths = list(files)
        if gaps or not stream.complete or any(map(_others_may_change, files)):
            folder = Path(resources.enter_context(private_folder()))
            paths = [_copy_whole_batches(files, schema or trace_schema(), folder)]
            states = file_states(paths)
        elif file_states(files) != states:
            raise AnalysisError(f"{files[0]}: was changed while it was checked; run it again")
        # Not mapped: a file that is cut short during a query would end the process.
        filesystem = pa.fs.LocalFileSystem(use_mmap=False)
        plain = [str(plain_path(path, resources)) for path in paths]
        if remote := [located(path, tries=6) for path in paths if isinstance(path, RemotePath)]:
            filesystem, plain = remote[0][0], [key for _, key in remote]
        events = pa.dataset.dataset(plain, format="ipc", filesystem=filesystem)
        return TraceScan(
            header=stream.header, events=events, states=states, complete=stream.complete, gaps=gaps, names=names
        )
    except TraceError as error:
        raise AnalysisError(str(error)) from None


def file_states(paths: Iterable[Path]) -> FileStates:
    """Return what identifies each file as it is now: another file in its place, or a changed one, gives something else."""
    states: FileStates = {}
    for path in paths:
        with suppress(OSError):
            found = path.stat()
            states[path] = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return states


def _others_may_change(path: Path) -> bool:
    """Whether another user may write to a file, or put another in its place, after it was checked."""
    if isinstance(path, RemotePath):  # where whoever may write is nothing that we could see
        return False
    path = path.resolve()
    for place in (path, path.parent):
        try:
            found = place.stat()
        except OSError:
            return True
        writable = found.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if found.st_gid != os.getegid() else 0))
        if found.st_uid not in (os.geteuid(), 0) or (writable and not found.st_mode & stat.S_ISVTX):
            return True
    return False


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
