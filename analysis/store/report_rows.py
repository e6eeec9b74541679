"""A report's row in the table of all reports, and how it comes there. It loads no DuckDB: the workers of a fleet do without."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa

from ...recorder.files import replace_file
from ...recorder.remote import RemotePath, as_path, put
from .sources import read_summary
from .table_files import parquet_file

UNKNOWN: Final = "unknown"
MARK: Final = "kvcanary-reports.json"  # at the top of a table
_MARK_TEXT: Final = b'{"kvcanary_reports": 1}\n'

_TEXT, _COUNT, _TIME = pa.utf8(), pa.int64(), pa.timestamp("us", "UTC")
_INCIDENT: Final = {
    **dict.fromkeys(("kind", "title", "confidence", "branch", "sentence"), _TEXT),
    **dict.fromkeys(("incident", "first_forward", "last_forward", "num_requests", "violations", "findings"), _COUNT),
    "score": pa.float64(),
    "seen": _TIME,
}
_WATCHED: Final = {"what": _TEXT, "name": _TEXT, "watched": _COUNT, "total": _COUNT}
_COUNTED: Final = (
    *("forwards", "requests", "tokens", "num_requests_hit", "violations", "findings", "num_incidents"),
    *("num_gaps", "num_losses", "lost_events"),
)
_RANKS: Final = ("tp_rank", "pp_rank", "dp_rank")
PARTITIONS: Final = ("day", "engine", "version", "model")
# Columns are only added: files of older versions lack them, and give null.
SCHEMA: Final = pa.schema(
    {
        **dict.fromkeys(("report_id", "trace_id", "trace", "node", "verdict", "report"), _TEXT),
        **dict.fromkeys((*_RANKS, *_COUNTED), _COUNT),
        "complete": pa.bool_(),
        "began": _TIME,
        "ended": _TIME,
        "doubts": pa.list_(_TEXT),
        "incidents": pa.list_(pa.struct(_INCIDENT)),
        "coverage": pa.list_(pa.struct(_WATCHED)),
        **dict.fromkeys(("fleet", "server", "sampled_for"), _TEXT),
        **dict.fromkeys(("sampled_servers", "sampled_windows"), pa.float64()),
    }
)


def is_table(path: Path) -> bool:
    """Whether a folder or URL is a table of reports; raise `OSError` if a store cannot be asked."""
    return (path / MARK).exists()


def add_report(report: Path, table: Path, *, node: str = "", place: str | None = "") -> str:
    """Add a report to a table, in place of what it had of the same recording; return the file's name below the table.

    `node` is by default the server's name if the recording says it, else that of the folder that the trace lay in; `place` is where
    the report is, None if it is kept nowhere. Raises `AnalysisError` and `OSError`.
    """
    summary = read_summary(report)
    server = (summary.get("sampling") or {}).get("server")
    row = _row(summary, node or server or as_path(summary["trace"]).absolute().parent.name)
    row["report"] = str(report.absolute()) if place == "" else place
    began, engine = row["began"], summary.get("engine") or {}
    day = began.strftime("%Y-%m-%d") if began is not None else UNKNOWN
    places = (day, engine.get("name"), engine.get("version"), (summary.get("model") or {}).get("name"))
    folders = [
        f"{name}={quote(str(value or UNKNOWN), safe='')}" for name, value in zip(PARTITIONS, places, strict=True)
    ]
    name = "/".join([*folders, f"{row['report_id']}.parquet"])
    # one row alone gets larger by being packed, and takes twice as long
    rows = pa.Table.from_pylist([row], schema=SCHEMA)
    write_file(table / name, parquet_file(rows, packed=bool(row["incidents"])))
    if not is_table(table):
        mark_table(table)
    return name


def mark_table(table: Path) -> None:
    """Make an empty table, or mark one that is there as such; raise `OSError`."""
    write_file(table / MARK, _MARK_TEXT)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file or object: it is there whole, in place of an older one, or not at all. Raises `OSError`."""
    if isinstance(path, RemotePath):
        put(path, content)
    else:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, content)


def _row(summary: dict[str, Any], node: str) -> dict[str, Any]:
    trace_id = str(summary.get("trace_id") or UNKNOWN)
    segments = [number for number in summary.get("segments") or () if isinstance(number, int)]
    part = f"-{segments[0]}" if segments else ""  # a recording that has grown takes the place of its shorter self
    incidents = [one for one in summary.get("incidents") or () if isinstance(one, dict)]
    sampling = summary.get("sampling") or {}
    return {
        **{name: summary.get(name) for name in (*_COUNTED, "trace", "verdict", "complete", "doubts")},
        **{name: (summary.get("ranks") or {}).get(name) for name in _RANKS},
        "report_id": (quote(trace_id, safe="") if trace_id != UNKNOWN else _name_of(summary)) + part,
        "trace_id": trace_id,
        "node": node,
        "began": _time(summary.get("first_time_ns")),
        "ended": _time(summary.get("last_time_ns")),
        "incidents": [
            {name: one.get(name) for name in _INCIDENT} | {"seen": _time(one.get("time_ns"))} for one in incidents
        ],
        "coverage": [{name: one.get(name) for name in _WATCHED} for one in summary.get("coverage") or ()],
        **{name: sampling.get(name) for name in ("fleet", "server")},
        "sampled_for": sampling.get("reason"),
        "sampled_servers": sampling.get("servers"),
        "sampled_windows": sampling.get("windows"),
    }


def _name_of(summary: dict[str, Any]) -> str:
    """Return an id of a report whose trace has none, of an old format: from where the trace lies, when it began, and its rank."""
    known = [str(summary.get("trace")), summary.get("first_time_ns"), summary.get("ranks")]
    return f"{UNKNOWN}-{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]}"


def _time(time_ns: Any) -> datetime | None:
    return datetime.fromtimestamp(time_ns / 1e9, UTC) if isinstance(time_ns, int) and time_ns > 0 else None
