"""The stretches of a recording as one: the summary and the report that a replay of all segments in turn would give.

Every part but the last found nothing and lost nothing, so what the last one says holds for all; counts are summed, and
the running totals of the divergence figures go on from part to part.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..report.report import write_summary
from ..report.summary import MAX_LISTED, Summary
from ..report.violations import TableSink
from ..run.divergence import DIVERGENCE_SCHEMA
from .group_replay import GroupResult, GroupTask, Part, drop_parts, finished, not_written
from .jobs import Job

_SUMS: Final = (
    *("forwards", "forwards_watched", "tokens", "verified", "written", "unknown_entries", "entries_read", "num_marks"),
    "figures",
    *("transfers_sent", "transfers_received", "transfers_unmatched"),
)
_COUNTS: Final = ("events", "forwards_by_mode", "slot_counters", "kernel_counters")
_RUNNING: Final = ("verify_full", "verify_swa")
_DIVERGENCE: Final = "swa_divergence.parquet"


def joined_results(
    results: Iterable[tuple[list[Job], GroupResult]], task: GroupTask
) -> Iterator[tuple[list[Job], GroupResult]]:
    """Yield each group with what came of it, the stretches of a recording as the one that they are of."""
    together: list[tuple[Job, GroupResult]] = []
    for group, result in results:
        stretch = group[0].stretch
        if together and (stretch is None or stretch.number == 0):
            yield from _recording(together, task)
            together = []
        if stretch is None:
            yield group, result
        else:
            together.append((group[0], result))
    yield from _recording(together, task)


def _recording(
    stretches: Sequence[tuple[Job, GroupResult]], task: GroupTask
) -> Iterator[tuple[list[Job], GroupResult]]:
    """Yield a recording with what came of its stretches; nothing where the user ended it before its first had begun."""
    parts: list[Part] = []
    for number, (job, result) in enumerate(stretches):
        if result.error:
            drop_parts(job.report)
            yield [replace(job, stretch=None)], replace(result, part=None)
            return
        if result.part is None or job.stretch is None or job.stretch.number != number:
            break
        parts.append(result.part)
        if result.part.to_end:
            break
    if not parts:
        return
    job, first = stretches[0]
    notes = list(first.notes)
    report = Path(parts[0].summary.report).parent if parts[0].summary.report else None
    try:
        summary = joined(job.recording.name, parts, report)
    except OSError as error:
        text = not_written([job], [report], error)
        yield [replace(job, stretch=None)], GroupResult(error=text, notes=notes)
        return
    beyond = [result.part.summary for _, result in stretches[len(parts) :] if result.part is not None]
    if summary.stopped and any(one.violations or one.findings for one in beyond):
        notes.append("more was found behind that than this report holds; replay it to its end")
    yield [replace(job, stretch=None)], GroupResult(summaries=[summary], notes=notes + finished([summary], task))


def joined(name: str, parts: Sequence[Part], report: Path | None) -> Summary:
    """Return the summary of a recording's parts, all but the last clean and whole, and leave their report in `report`."""
    summaries = [part.summary for part in parts]
    first, summary = summaries[0], copy.copy(summaries[-1])
    summary.trace = name
    for field in _SUMS:
        setattr(summary, field, sum(getattr(one, field) for one in summaries))
    for field in _COUNTS:
        total: Counter[str] = Counter()
        for one in summaries:
            total.update(getattr(one, field))
        setattr(summary, field, dict(total))
    summary.segments = [number for one in summaries for number in one.segments]
    summary.unknown_before = first.unknown_before
    summary.requests = len(frozenset[int]().union(*(part.request_ids for part in parts)))
    summary.first_time_ns = next((one.first_time_ns for one in summaries if one.first_time_ns), 0)
    summary.last_forward = next((one.last_forward for one in reversed(summaries) if one.forwards), -1)
    summary.last_time_ns = max(one.last_time_ns for one in summaries)
    summary.marks = [mark for one in summaries for mark in one.marks][:MAX_LISTED]
    summary.swa_divergence = _divergence([one.swa_divergence for one in summaries])
    if "forwards_on_cpu" in summary.settings:
        summary.settings = dict(summary.settings)
        summary.settings["forwards_on_cpu"] = sum(one.settings["forwards_on_cpu"] for one in summaries)
    if summary.stopped.startswith("interrupted") or not parts[-1].to_end:
        summary.stopped = f"interrupted after {summary.forwards:,} forwards"
    summary.seconds = max(part.ended for part in parts) - min(part.began for part in parts)
    if report is not None:
        _join_reports(summaries, report)
        summary.report = str(report)
        write_summary(summary, report)
    return summary


def _divergence(figures: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the totals of `SwaDivergence.to_json` over all parts."""
    there = [one for one in figures if one is not None]
    if not there:
        return None
    total = copy.deepcopy(there[0])
    for one in there[1:]:
        for key in ("forwards", *_RUNNING):
            total[key] += one[key]
        for name, group in one["groups"].items():
            for key, figure in group.items():
                mine = total["groups"][name][key]
                mine["total"] += figure["total"]
                mine["largest"] = max(mine["largest"], figure["largest"])
                mine["last"] = figure["last"] if one["forwards"] else mine["last"]
    return total


def _join_reports(summaries: Sequence[Summary], report: Path) -> None:
    """Leave the last part's files in the report, the divergence figures of all parts, and no folder of a part."""
    folders = [Path(summary.report) for summary in summaries if summary.report]
    if (folders[-1] / _DIVERGENCE).exists():
        _join_divergence(summaries, [folder / _DIVERGENCE for folder in folders], report / _DIVERGENCE)
        (folders[-1] / _DIVERGENCE).unlink()
    for path in folders[-1].iterdir():
        path.replace(report / path.name)
    drop_parts(report)


def _join_divergence(summaries: Sequence[Summary], files: Sequence[Path], target: Path) -> None:
    before = dict.fromkeys(_RUNNING, 0)
    with closing(TableSink(target, DIVERGENCE_SCHEMA)) as sink:
        for summary, path in zip(summaries, files, strict=True):
            with path.open("rb") as source, pq.ParquetFile(source) as read:
                for number in range(read.num_row_groups):
                    table = read.read_row_group(number)
                    for key, count in before.items():
                        at = table.schema.get_field_index(key)
                        table = table.set_column(at, key, pc.add(table[key], count))
                    sink.append(table.cast(DIVERGENCE_SCHEMA))
            figures = summary.swa_divergence or {}
            before = {key: count + figures.get(key, 0) for key, count in before.items()}
