"""A trace's header as tables: traces, pool groups, streams, block tables; its gaps; what a replay watched of it."""

import dataclasses
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ...recorder.trace.header import TraceHeader

_INT, _TEXT, _BOOL = pa.int64(), pa.utf8(), pa.bool_()

HEADER_SCHEMAS: Final[dict[str, pa.Schema]] = {
    "_traces": pa.schema(
        {
            "trace": _TEXT,
            "path": _TEXT,
            "trace_id": _TEXT,
            "engine": _TEXT,
            "engine_version": _TEXT,
            "model": _TEXT,
            "role": _TEXT,
            "slot_history": _TEXT,
            "sweep_interval": _INT,
            "kv_watch_every": _INT,
            "tp_rank": _INT,
            "pp_rank": _INT,
            "dp_rank": _INT,
            "created_ns": _INT,
            "complete": _BOOL,
            "present": _BOOL,
        }
    ),
    "_pool_groups": pa.schema(
        {
            "trace": _TEXT,
            "pool_group": _INT,
            "name": _TEXT,
            "kind": _TEXT,
            "window_tokens": _INT,
            "runner": _INT,
            "runner_name": _TEXT,
            "token_offset": _INT,
            "table_index": _INT,
            "lut": _INT,
            "num_slots": _INT,
            "page_size": _INT,
            "halves": pa.list_(_TEXT),
            "reads_before_write": _BOOL,
            "host_num_slots": _INT,
        }
    ),
    "_streams": pa.schema(
        {
            "trace": _TEXT,
            "runner": _INT,
            "stream": _INT,
            "pool_group": _INT,
            "half": _TEXT,
            "layer": _INT,
            "bytes_per_token": _INT,
            "capture_bytes": _INT,
            "origin": _TEXT,
        }
    ),
    "_tables": pa.schema({"trace": _TEXT, "table_index": _INT}),
    "_gaps": pa.schema({"trace": _TEXT, "after_event": _INT, "missing_events": _INT, "kind": _TEXT, "reason": _TEXT}),
    "_coverage": pa.schema(
        {
            "trace": _TEXT,
            "what": _TEXT,
            "name": _TEXT,
            "watched": _INT,
            "total": _INT,
            "share": pa.float64(),
            "reason": _TEXT,
            "words": _TEXT,
        }
    ),
}
_KINDS: Final = {_TEXT: str, _INT: int, pa.float64(): float}


def header_rows(
    name: str, trace: Path, header: TraceHeader, *, complete: bool, gaps: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return one trace's rows of each table in `HEADER_SCHEMAS`."""
    facts = {
        "trace": name,
        "path": str(trace).encode("utf-8", "backslashreplace").decode("utf-8"),
        "trace_id": header.trace_id,
        "engine": header.engine.name,
        "engine_version": header.engine.version,
        "model": header.model.name,
        "role": header.role,
        "slot_history": header.slot_history,
        "sweep_interval": header.sweep_interval,
        "kv_watch_every": header.capture.kv_watch_every,
        "tp_rank": header.ranks.tp_rank,
        "pp_rank": header.ranks.pp_rank,
        "dp_rank": header.ranks.dp_rank,
        "created_ns": header.created_ns,
        "complete": complete,
        "present": True,
    }
    groups = []
    for number, group in enumerate(header.groups):
        runner = header.runners[group.runner]
        groups.append(
            {
                **dataclasses.asdict(group),
                "trace": name,
                "pool_group": number,
                "window_tokens": group.window,
                "table_index": group.table,
                "runner_name": runner.name,
                "token_offset": runner.token_offset,
            }
        )
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
    engine, model = summary.get("engine", {}), summary.get("model", {})
    facts = {
        "trace": name,
        "path": summary["trace"],
        "trace_id": summary.get("trace_id"),
        "engine": engine.get("name"),
        "engine_version": engine.get("version"),
        "model": model.get("name"),
        "complete": summary.get("complete"),
        "present": False,
    }
    return {"_traces": [facts]}


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
