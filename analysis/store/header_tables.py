"""A trace's header as tables: traces, pool groups, streams, block tables; its gaps; what a replay watched of it."""

import dataclasses
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from ...recorder.trace.header import TraceHeader
from .library import table_schema

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
    "_gaps": table_schema("trace varchar, after_event bigint, missing_events bigint, kind varchar, reason varchar"),
    "_coverage": table_schema(
        "trace varchar, what varchar, name varchar, watched bigint, total bigint, share double, reason varchar, "
        "words varchar"
    ),
}
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
