"""One table of all reports of a fleet: a Parquet file for each report, in folders by day, engine, version and model.

A file has one row, with the report's incidents in it, and a name that follows from what was replayed: it is there whole or not
at all, and what is collected twice is there once. Nobody writes to a file of another, so any number may collect at a time.
"""

from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from ...recorder.errors import first_line
from ...recorder.files import replace_file
from ...recorder.remote import RemotePath, as_path, located, put
from ...replayer.report.report import SUMMARY_NAME
from ..errors import AnalysisError
from .live import connect
from .session import MEMORY_LIMIT, SqlSession, lock
from .sources import read_summary
from .table_files import parquet_file, sound_files

MARK: Final = "kvcanary-reports.json"  # at the top of a table
_MARK_TEXT: Final = b'{"kvcanary_reports": 1}\n'
_UNKNOWN: Final = "unknown"

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
_PARTITIONS: Final = ("day", "engine", "version", "model")
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
_PARTITIONING: Final = ds.partitioning(pa.schema(dict.fromkeys(_PARTITIONS, _TEXT)), flavor="hive")

# What a sample shows is an estimate of the whole: with the 95 % interval of Wilson's, without recordings that began for an incident.
_SAMPLE: Final = "from reports where sampled_for is distinct from 'incident'"


def _estimate(hit: str, of: str) -> str:
    z = 1.959963984540054
    middle, spread = f"{hit} + {z * z / 2}", f"{z} * sqrt({hit} * ({of} - {hit}) / {of} + {z * z / 4})"
    bounds = (f"({middle} {sign} {spread}) / ({of} + {z * z})" for sign in "-+")
    low, high = (
        f"if({of} between greatest({hit}, 1) and 1e18, least(1, greatest(0, {bound})), null)" for bound in bounds
    )
    return f"{hit} / nullif({of}, 0) as share, {low} as low, {high} as high"


# name: (what it answers, the query)
QUESTIONS: Final = {
    "reports": ("a row for each report", "select * exclude (incidents, coverage) from _reports"),
    "incidents": (
        "a row for each incident, with its report's columns",
        (
            "select * exclude (incidents, coverage, violations, findings, num_incidents), unnest(incidents, recursive := true) "
            "from _reports"
        ),
    ),
    "coverage": (
        "what was watched of each recording",
        "select report_id, day, engine, version, model, node, unnest(coverage, recursive := true) from _reports",
    ),
    "kinds_by_version": (
        "kinds of incidents by engine and version, with when each was seen first",
        (
            "select kind, engine, version, min(seen) as first_seen, max(seen) as last_seen, count(distinct report_id) as reports, "
            "count(*) as incidents from incidents group by all order by first_seen, kind"
        ),
    ),
    "kinds_by_node": (
        "kinds of incidents by node and rank: a bad GPU stands out",
        (
            "select node, tp_rank, pp_rank, dp_rank, kind, count(distinct report_id) as reports, count(*) as incidents, "
            "any_value(of_reports) as of_reports, count(distinct report_id) / any_value(of_reports) as share from incidents join "
            "(select node, tp_rank, pp_rank, dp_rank, count(*) as of_reports from reports group by all) "
            "using (node, tp_rank, pp_rank, dp_rank) group by node, tp_rank, pp_rank, dp_rank, kind order by share desc, node, kind"
        ),
    ),
    "requests_hit": (
        "the share of requests that damage reached, with its interval if no two have to do with one another",
        (
            f"select *, {_estimate('hit', 'requests')} from (select day, engine, version, model, sum(requests)::bigint as requests, "
            f"sum(num_requests_hit)::bigint as hit {_SAMPLE} group by all) order by day, engine, version, model"
        ),
    ),
    "recordings_hit": (
        "the share of judged recordings that are corrupt, with its interval: of windows, if the fleet samples",
        (
            f"select *, {_estimate('hit', 'recordings')} from (select day, engine, version, model, count(*) filter (verdict <> "
            f"'inconclusive') as recordings, count(*) filter (verdict = 'corrupt') as hit {_SAMPLE} group by all) "
            "order by day, engine, version, model"
        ),
    ),
    "kinds_by_day": (
        "how many incidents of each kind a day had",
        "select day, kind, count(*) as incidents, count(distinct report_id) as reports from incidents group by all order by all",
    ),
    "nodes_by_version": (
        "the share of each node's recordings that are corrupt, by version, with its interval",
        (
            f"select *, {_estimate('corrupt', 'reports')} from (select node, engine, version, count(*) as reports, "
            "count(*) filter (verdict = 'corrupt') as corrupt from reports group by all) order by all"
        ),
    ),
    "recorded": (
        "what share of a fleet's time was to be recorded, as its recordings say, and what became of it",
        (
            "select day, fleet, avg(sampled_servers * sampled_windows) as share_to_record, count(distinct coalesce(server, node)) as "
            "servers, count(*) as recordings, sum(if(ended < began, null, epoch(ended - began))) as seconds, sum(tokens)::bigint as tokens, "
            "coalesce(sum(tokens) filter (verdict <> 'inconclusive'), 0) / nullif(sum(tokens), 0) as judged, "
            "coalesce(sum(tokens) filter (verdict = 'inconclusive'), 0) / nullif(sum(tokens), 0) as inconclusive, "
            "count(*) filter (sampled_for = 'incident') as for_incidents from reports group by all order by day, fleet"
        ),
    ),
    "judged": (
        "how much was judged, and what was inconclusive",
        (
            "select day, engine, version, model, count(*) as reports, sum(tokens)::bigint as tokens, "
            "count(*) filter (verdict = 'clean') as clean, count(*) filter (verdict = 'corrupt') as corrupt, "
            "count(*) filter (verdict = 'inconclusive') as inconclusive, "
            "coalesce(sum(tokens) filter (verdict = 'inconclusive'), 0) / nullif(sum(tokens), 0) as inconclusive_share_of_tokens, "
            "sum(lost_events)::bigint as lost_events from reports group by all order by day, engine, version, model"
        ),
    ),
    "new_kinds": (
        "kinds that an engine's version had not shown before yesterday",
        "from kinds_by_version where first_seen >= date_trunc('day', now() at time zone 'UTC') at time zone 'UTC' - interval 1 day",
    ),
}


def is_table(path: Path) -> bool:
    """Whether a folder or URL is a table of reports; raise `OSError` if a store cannot be asked."""
    return (path / MARK).exists()


def reports_below(path: Path) -> list[Path]:
    """Return a report, or the reports that a folder holds; raise `AnalysisError` if there is none."""
    if (path / SUMMARY_NAME).exists():
        return [path]
    found = sorted(one.parent for one in path.glob(f"*/{SUMMARY_NAME}"))
    if not found:
        raise AnalysisError(f"{path}: no report in it; name folders that kvcanary-replay wrote")
    return found


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
    day = began.strftime("%Y-%m-%d") if began is not None else _UNKNOWN
    places = (day, engine.get("name"), engine.get("version"), (summary.get("model") or {}).get("name"))
    folders = [
        f"{name}={quote(str(value or _UNKNOWN), safe='')}" for name, value in zip(_PARTITIONS, places, strict=True)
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
    trace_id = str(summary.get("trace_id") or _UNKNOWN)
    segments = [number for number in summary.get("segments") or () if isinstance(number, int)]
    part = f"-{segments[0]}" if segments else ""  # a recording that has grown takes the place of its shorter self
    incidents = [one for one in summary.get("incidents") or () if isinstance(one, dict)]
    sampling = summary.get("sampling") or {}
    return {
        **{name: summary.get(name) for name in (*_COUNTED, "trace", "verdict", "complete", "doubts")},
        **{name: (summary.get("ranks") or {}).get(name) for name in _RANKS},
        "report_id": quote(trace_id, safe="") + part,
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


def _time(time_ns: Any) -> datetime | None:
    return datetime.fromtimestamp(time_ns / 1e9, UTC) if isinstance(time_ns, int) and time_ns > 0 else None


class ReportsTable(SqlSession):
    """SQL over a table of reports; `problems` says which of its files cannot be read, and are left out."""

    problems: tuple[str, ...] = ()

    def relations(self) -> dict[str, str]:
        """Return what can be asked, with descriptions."""
        return {name: words for name, (words, _) in QUESTIONS.items()}


def open_table(table: Path, *, unlocked: bool = False) -> ReportsTable:
    """Open a table; the rest of it is there where a file is damaged. Raises `AnalysisError` and `OSError`."""
    filesystem, top = (
        located(table, tries=6)
        if isinstance(table, RemotePath)
        else (pyarrow.fs.LocalFileSystem(), str(table.absolute()))
    )
    try:
        listed = filesystem.get_file_info(pyarrow.fs.FileSelector(top, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise AnalysisError(f"{table}: cannot be listed ({first_line(error)})") from None
    paths, problems = sound_files(filesystem, listed, SCHEMA)
    rows = _dataset(filesystem, top, paths)
    with ExitStack() as resources:
        connection = connect(":memory:", resources, MEMORY_LIMIT)
        try:
            connection.register("_reports", rows)
            for name, (_, query) in QUESTIONS.items():
                connection.execute(f"create temp view {name} as {query}")
            if not unlocked:
                lock(connection, [])
        except duckdb.Error as error:
            raise AnalysisError(f"{table}: cannot be opened: {first_line(error)}") from None
        session = ReportsTable(connection, [], resources.pop_all(), stored=False, states={})
    session.problems = tuple(f"{path}: left out, {why}" for path, why in problems.items())
    return session


def _dataset(filesystem: Any, top: str, paths: list[str]) -> Any:
    options = ds.FileSystemFactoryOptions(partition_base_dir=top, partitioning=_PARTITIONING)
    factory = ds.FileSystemDatasetFactory(filesystem, paths, ds.ParquetFileFormat(), options)
    return factory.finish(pa.unify_schemas([SCHEMA, _PARTITIONING.schema]))
