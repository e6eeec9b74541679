"""One recording replayed by different executors, and everything that must come out the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.analysis.store.expansion import expand_tables, read_violations
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.report.violations import VIOLATION_SCHEMA
from kvcanary.replayer.run.replay import ReplaySettings, replay_joined

# What tells how it was replayed, not what was found.
_TOLD_APART = ("settings", "seconds", "report", "incidents", "num_incidents")
STEPWISE: dict[str, Any] = {"executor": "stepwise"}
# Stepwise's own rows through merging and expansion, and the interval executor.
WAYS: dict[str, dict[str, Any]] = {
    "merged": {"executor": "stepwise", "merge_rows": True},
    "interval": {"executor": "interval"},
}


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A recording's files, and what one way of replaying them gave."""

    traces: Sequence[Path]
    report: Path
    summary: Summary

    @property
    def rows(self) -> pa.Table:
        """The rows of violations.parquet as they stand."""
        return plain(pq.read_table(self.report / "violations.parquet"))

    def expanded(self) -> pa.Table:
        """The rows by forward."""
        if not self.rows.num_rows:
            return plain(VIOLATION_SCHEMA.empty_table())
        tables = list(expand_tables(read_violations(self.report / "violations.parquet"), self.traces))
        return plain(pa.concat_tables([VIOLATION_SCHEMA.empty_table(), *tables]))

    def table(self, name: str) -> pa.Table | None:
        """Another file of the report, None where there is none."""
        path = self.report / f"{name}.parquet"
        return plain(pq.read_table(path)) if path.exists() else None

    @cached_property
    def incidents(self) -> list[dict[str, Any]]:
        """The report's incidents, found anew."""
        return find_incidents(self.report, self.traces).rows

    def found(self) -> dict[str, Any]:
        """The summary, without what tells how it was made."""
        told = self.summary.to_json()
        return {name: value for name, value in told.items() if name not in _TOLD_APART}


def plain(table: pa.Table) -> pa.Table:
    """A table whose texts are texts, so that equal ones are equal."""
    columns = [c.cast(pa.utf8()) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    return pa.table(columns, names=table.column_names).combine_chunks()


def replayed(traces: Sequence[Path | Sequence[Path]], folder: Path, **settings: Any) -> list[Replayed]:
    """Replay recordings together."""
    recordings = [[trace] if isinstance(trace, Path) else list(trace) for trace in traces]
    reports = [folder / str(number) for number in range(len(recordings))]
    for report in reports:
        report.mkdir(parents=True)
    summaries = replay_joined(recordings, settings=ReplaySettings(**settings), reports=reports)
    return [
        Replayed(traces=files, report=report, summary=summary)
        for files, report, summary in zip(recordings, reports, summaries, strict=True)
    ]


def check(
    traces: Sequence[Path | Sequence[Path]],
    folder: Path,
    *,
    ways: Sequence[str] = ("interval",),
    incidents: bool = True,
    **settings: Any,
) -> list[Replayed]:
    """Replay recordings together in some ways, and require the same of each; return what stepwise gave."""
    expected = replayed(traces, folder / "stepwise", **settings, **STEPWISE)
    for way in ways:
        if way == "merged" and not any(one.summary.violations for one in expected):
            continue  # nothing to merge
        more = WAYS[way]
        came = replayed(traces, folder / way, **settings, **more)
        for one, other in zip(expected, came, strict=True):
            try:
                same(one, other, incidents=incidents)
            except AssertionError as error:
                error.add_note(f"{way} against stepwise, on {', '.join(map(str, one.traces))}, {settings}")
                raise
    return expected


def same(expected: Replayed, came: Replayed, *, incidents: bool = True) -> None:
    """Require the same rows in the same order, the same findings, figures, summary and incidents."""
    assert_tables(expected.rows, came.expanded(), "violations")
    for name in ("findings", "swa_divergence"):
        one, other = expected.table(name), came.table(name)
        assert (one is None) == (other is None), name
        if one is not None and other is not None:
            assert_tables(one, other, name)
    told, told_too = expected.found(), came.found()
    for name, value in told.items():
        assert told_too[name] == value, f"summary: {name}"
    if incidents and (expected.summary.violations or expected.summary.findings):
        for one, other in zip(expected.incidents, came.incidents, strict=True):
            assert other == one


def assert_tables(expected: pa.Table, came: pa.Table, name: str) -> None:
    """Require two equal tables; name the first row that differs, and in what."""
    if came.equals(expected):
        return
    assert came.column_names == expected.column_names
    for number, (one, other) in enumerate(zip(expected.to_pylist(), came.to_pylist(), strict=False)):
        if one != other:
            differ = {key: (one[key], other[key]) for key in one if one[key] != other[key]}
            raise AssertionError(f"{name}: row {number}: expected, came {differ}; expected {one}")
    raise AssertionError(f"{name}: expected {expected.num_rows} rows, came {came.num_rows}")
