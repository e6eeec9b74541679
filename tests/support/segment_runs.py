"""Recordings in segments, replayed as they were, segment by segment, all segments as one, and in stretches side by side."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from kvcanary.recorder.trace.recordings import group_recordings
from kvcanary.replayer.report.summary import Summary
from kvcanary.replayer.run.replay import ReplayRun, ReplaySettings
from kvcanary.replayer.workers.group_replay import GroupResult, GroupTask, joined_results, replay_group
from kvcanary.replayer.workers.jobs import Job, ReplayPlan, plan_jobs, split_plan

# What keyframes, which are events too, move: event numbers, and words that hold some.
NUMBERED = ("event", "writer_event", "evidence", "detail")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one replay gave."""

    summary: Summary
    violations: list[dict[str, Any]]
    findings: list[dict[str, Any]]


def run(paths: Sequence[Path], folder: Path, **settings: Any) -> Result:
    """Replay a recording's files as one."""
    folder.mkdir(parents=True)
    with ReplayRun(paths, settings=ReplaySettings(merge_rows=False, **settings), report=folder) as replay:
        while replay.step():
            pass
        summary = replay.finish()
    violations, findings = (
        pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("violations", "findings")
    )
    return Result(summary=summary, violations=violations, findings=findings)


def check(trace: Path, segments: Sequence[Path], folder: Path, **settings: Any) -> tuple[Result, list[Result]]:
    """Compare the replay of a trace, of its segments together, and of each alone; return the last two."""
    whole = run([trace], folder / "whole", **settings)
    together = run(segments, folder / "together", **settings)
    alone = [run([path], folder / str(number), **settings) for number, path in enumerate(segments)]
    assert _plain(together.violations) == _plain(whole.violations)
    assert _plain(together.findings) == _plain(whole.findings)
    assert together.summary.verdict is whole.summary.verdict
    assert together.summary.forwards == whole.summary.forwards
    assert [row for one in alone for row in one.violations] == together.violations
    assert _verdict(alone) == together.summary.verdict.value, [one.summary.doubts for one in alone]
    assert sum(one.summary.forwards for one in alone) == together.summary.forwards
    assert sum(one.summary.verified for one in alone) == together.summary.verified
    _check_findings(together.findings, [finding for one in alone for finding in one.findings])
    return together, alone


def plan_of(paths: list[Path], report: Path | None) -> ReplayPlan:
    (recording,), _ = group_recordings(paths)
    return plan_jobs([Job(recording=recording, report=report)])


def replayed(plan: ReplayPlan, settings: ReplaySettings) -> GroupResult:
    task = GroupTask(settings=settings, explicit=True, all_there=True)
    results = ((group, replay_group(group, task)) for group in plan.groups)
    ((_, result),) = joined_results(results, task)
    return result


def compared(paths: list[Path], folder: Path, *, workers: int, **settings: Any) -> Summary:
    """Replay segments as one and in stretches, compare all that both leave, and return the summary."""
    chosen = ReplaySettings(**settings)
    whole = replayed(plan_of(paths, folder / "one"), chosen)
    plan = split_plan(plan_of(paths, folder / "split"), chosen, workers=workers)
    assert 1 < len(plan.groups) <= workers
    split = replayed(plan, chosen)
    assert (split.error, split.notes) == (whole.error, whole.notes)
    one, other = (untimed(result.summaries[0].to_json()) for result in (whole, split))
    assert one == other
    files = [sorted(path.name for path in (folder / name).iterdir()) for name in ("one", "split")]
    assert files[0] == files[1]
    for name in files[0]:
        if name.endswith(".parquet"):
            assert pq.read_table(folder / "one" / name).equals(pq.read_table(folder / "split" / name)), name
    written = json.loads((folder / "split" / "summary.json").read_text())
    assert untimed(written) == json.loads(json.dumps(other))
    return split.summaries[0]


def untimed(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name not in ("seconds", "report")}


def _check_findings(together: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """A segment alone finds all that the whole finds, and tells again of damage that lasts, but of nothing else."""
    found = {_identity(finding): finding for finding in alone}
    for finding in together:
        assert _identity(finding) in found, finding
        assert found[_identity(finding)]["count"] >= finding["count"], finding
    told = {_identity(finding) for finding in together}
    lasting = {(finding["kind"], finding["request_id"]) for finding in together}
    for finding in alone:
        assert _identity(finding) in told or (finding["kind"], finding["request_id"]) in lasting, finding


def _verdict(alone: Sequence[Result]) -> str:
    """Return the verdict over all; a segment in which there was nothing to check has none of its own."""
    verdicts = {
        one.summary.verdict.value for one in alone if one.summary.verified or one.summary.written or one.findings
    }
    return next(verdict for verdict in ("corrupt", "inconclusive", "clean") if verdict in verdicts)


def _identity(finding: dict[str, Any]) -> tuple[Any, ...]:
    return finding["kind"], finding["event"], finding["group"], finding["request_id"]


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in NUMBERED} for row in rows]
