"""One table of all reports of a fleet: a Parquet file for each report, in folders by day, engine, version and model.

A file has one row, with the report's incidents in it, and a name that follows from what was replayed: it is there whole or not
at all, and what is collected twice is there once. Nobody writes to a file of another, so any number may collect at a time.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs

from ...recorder.errors import first_line
from ...recorder.remote import RemotePath, located
from ...replayer.report.report import SUMMARY_NAME
from ..errors import AnalysisError
from .connection import connect
from .report_rows import PARTITIONS, SCHEMA
from .session import MEMORY_LIMIT, SqlSession, lock
from .table_files import sound_files

_PARTITIONING: Final = ds.partitioning(pa.schema(dict.fromkeys(PARTITIONS, pa.utf8())), flavor="hive")

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


def reports_below(path: Path) -> list[Path]:
    """Return a report, or the reports that a folder holds; raise `AnalysisError` if there is none."""
    if (path / SUMMARY_NAME).exists():
        return [path]
    found = sorted(one.parent for one in path.glob(f"*/{SUMMARY_NAME}"))
    if not found:
        raise AnalysisError(f"{path}: no report in it; name folders that kvcanary-replay wrote")
    return found


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
    paths, problems = sound_files(filesystem, top, listed, SCHEMA)
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
