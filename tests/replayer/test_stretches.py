"""A recording's segments replayed side by side give what one after another gives: verdict, summary, rows."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.trace.recordings import Recording, group_recordings
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.run.settings import Progress, ReplaySettings
from kvcanary.replayer.workers import jobs as sharing
from kvcanary.replayer.workers.group_replay import GroupTask, joined_results, replay_group
from kvcanary.replayer.workers.jobs import Job, plan_jobs, split_plan
from kvcanary.replayer.workers.pool import replay_in_workers

from ..support.raw_traces import cut, told
from ..support.segment_runs import compared, plan_of, replayed, untimed

# One of each kind: nothing wrong, at the beginning, late, damage that lasts, tables, transfers of the host, drafts.
CASES = [
    ("swa", None),
    ("host", None),
    ("eagle_swa", None),
    ("overlap", None),
    ("mha", "kv_used"),
    ("swa", "req_to_token"),
    ("tight", "page_given_twice"),
    ("eagle_swa", "draft_position_plus_one"),
    ("overlap", "future_map_overrun"),
    ("mha_page1", "req_to_token"),
]


def record(config: str, fault: str | None, folder: Path, *, seed: int = 0, most: int = 150) -> list[Path]:
    trial = Trial(fault=FAULTS[fault] if fault else None, config=config, seed=seed)
    (trace,) = run_trial(trial, folder / "whole.arrow").traces
    segments = cut(trace, folder / "t.arrow", seed=seed, least=40, most=most)
    trace.unlink()
    return segments


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("config", "fault"), CASES)
def test_side_by_side_gives_what_one_after_another_gives(config: str, fault: str | None, tmp_path: Path) -> None:
    segments = record(config, fault, tmp_path, seed=1)
    workers = random.Random(f"{config} {fault}").randint(2, 5)
    summary = compared(segments, tmp_path, workers=workers)
    assert summary.verdict.value == ("corrupt" if fault else "clean")
    assert summary.segments == list(range(len(segments)))


@pytest.mark.parametrize("fault", [None, "req_to_token"])
def test_stepwise_rows_too(fault: str | None, tmp_path: Path) -> None:
    segments = record("swa", fault, tmp_path, seed=2)
    compared(segments, tmp_path, workers=3, executor="stepwise")


def test_a_damaged_segment_in_the_middle(tmp_path: Path) -> None:
    segments = record("mha", None, tmp_path)
    middle = segments[len(segments) // 2]
    data = bytearray(middle.read_bytes())
    data[-len(data) // 3] ^= 0x40
    middle.write_bytes(data)
    summary = compared(segments, tmp_path, workers=4)
    assert summary.num_gaps
    assert summary.verdict.value == "inconclusive"


def test_the_last_segments_are_missing(tmp_path: Path) -> None:
    segments = record("swa", None, tmp_path)
    summary = compared(segments[:-2], tmp_path, workers=2)
    assert summary.cut_short


def test_the_first_segments_are_missing(tmp_path: Path) -> None:
    segments = record("swa", None, tmp_path)
    assert compared(segments[2:], tmp_path, workers=3).verdict.value == "clean"


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.one_in(2)
def test_a_segment_that_a_flight_recorder_deletes_under_way(number: int, tmp_path: Path) -> None:
    segments = record("mha", "kv_used", tmp_path)
    plans = [plan_of(segments, tmp_path / name) for name in ("one", "split")]
    plans[1] = split_plan(plans[1], ReplaySettings(), workers=50)
    assert len(plans[1].groups) == len(segments)
    segments[number].unlink()
    whole, split = (replayed(plan, ReplaySettings()) for plan in plans)
    assert (whole.error, split.error) == ("", "")
    told = [untimed(result.summaries[0].to_json()) for result in (whole, split)]
    for summary in told:
        del summary["unknown_before"]  # which only matters where nothing was found
    assert told[0] == told[1]
    assert told[0]["num_gaps"]


def test_a_torn_last_segment(tmp_path: Path) -> None:
    segments = record("mha", "kv_used", tmp_path)
    data = segments[-1].read_bytes()
    segments[-1].write_bytes(data[: len(data) * 2 // 3])
    compared(segments, tmp_path, workers=3)


def test_a_runner_that_never_ran_is_told_though_the_end_is_idle(tmp_path: Path) -> None:
    (trace,) = run_trial(Trial(fault=None, config="mha", seed=0), tmp_path / "whole.arrow").traces
    with TraceReader(trace) as reader:
        header = reader.header
    header = replace(header, runners=(*header.runners, replace(header.runners[0], name="draft")))
    idle = TraceEvent(kind="mark", time_ns=1 << 60, scalars={"note": "idle"}, ints={}, bytes={})
    with TraceWriter(tmp_path / "t.arrow", header, flush_bytes=1 << 30, segment_bytes=1) as writer:
        for view in read_trace(trace):
            assert writer.append(told(view))
        assert writer.flush()
        for _ in range(2):
            assert writer.append(idle)
            assert writer.flush()
    segments = sorted(tmp_path.glob("t.??????.arrow"))
    assert compared(segments, tmp_path, workers=50).findings_by_kind == {"launch_missing": 1}


def test_what_is_not_split(tmp_path: Path) -> None:
    segments = record("mha", None, tmp_path)
    plan = plan_of(segments, None)
    settings = ReplaySettings()
    assert len(split_plan(plan, settings, workers=1).groups) == 1
    assert len(split_plan(plan, ReplaySettings(fail_fast=True), workers=3).groups) == 1
    assert len(split_plan(plan, ReplaySettings(max_violations=1), workers=3).groups) == 1
    assert len(split_plan(plan_of(segments[:1], None), settings, workers=3).groups) == 1
    holes = plan_of([segments[0], *segments[2:]], None)
    assert len(split_plan(holes, settings, workers=3).groups) == 1
    groups = split_plan(plan, settings, workers=3).groups
    assert [path for group in groups for path in group[0].stretch.paths] == segments
    assert [group[0].stretch.behind for group in groups[-2:]] == [groups[-1][0].stretch.paths, ()]
    many = split_plan(plan, settings, workers=1000).groups
    assert [len(group[0].stretch.paths) for group in many] == [1] * len(segments)


def test_split_by_default_only_where_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(record("mha", None, tmp_path), None)
    monkeypatch.setattr(sharing, "usable_cores", lambda: 8)
    assert sharing.shared_out(plan, ReplaySettings(), jobs=None) == (plan, 1)  # a small one
    monkeypatch.setattr(sharing, "WORTH_A_WORKER_BYTES", 1000)
    split, workers = sharing.shared_out(plan, ReplaySettings(), jobs=None)
    assert workers == len(split.groups) > 1
    assert sharing.shared_out(plan, ReplaySettings(device="cuda"), jobs=None) == (plan, 1)
    monkeypatch.setattr(sharing, "usable_cores", lambda: 2)
    assert sharing.shared_out(plan, ReplaySettings(), jobs=None) == (plan, 1)
    assert sharing.shared_out(plan, ReplaySettings(), jobs=2)[1] == 2


def replay(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(replay_command, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("fault", [None, "kv_used"])
def test_the_command(fault: str | None, tmp_path: Path) -> None:
    """In worker processes, those behind the first that finds something told to stop."""
    segments = record("mha", fault, tmp_path)
    told = [replay("--json", "--jobs", jobs, "--report", tmp_path / f"{jobs}.report", *segments) for jobs in (1, 3)]
    assert [code for code, _, _ in told] == [1 if fault else 0] * 2
    one, other = (untimed(json.loads(out)[0]) for _, out, _ in told)
    assert one == other
    assert not list((tmp_path / "3.report").glob(".stretch*"))
    rows = [pq.read_table(tmp_path / f"{jobs}.report" / "violations.parquet") for jobs in (1, 3)]
    assert rows[0].equals(rows[1])
    code, out, _ = replay("--quiet", "--no-report", "--jobs", 3, *segments)
    assert (code, out.count("\n")) == (1 if fault else 0, 1)


def test_a_recording_beside_others(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = record("mha", None, tmp_path / "a", seed=3)
    second = record("swa", "req_to_token", tmp_path / "b", seed=3)
    recordings, _ = group_recordings([*first, *second])
    plan = plan_jobs([Job(recording=recording) for recording in recordings])
    split = split_plan(plan, ReplaySettings(), workers=6)
    assert 2 < len(split.groups) <= 7
    task = GroupTask(settings=ReplaySettings(), explicit=False, all_there=True)
    found = list(joined_results(((group, replay_group(group, task)) for group in split.groups), task))
    names: list[Recording] = [group[0].recording for group, _ in found]
    assert names == recordings
    assert [result.summaries[0].verdict.value for _, result in found] == ["clean", "corrupt"]


def test_nothing_is_left_of_stretches_that_were_killed(tmp_path: Path) -> None:
    segments = record("mha", None, tmp_path)
    report = tmp_path / "t.report"
    (report / ".stretch-0007").mkdir(parents=True)
    assert replay("--quiet", "--jobs", 1, "--report", report, *segments)[0] == 0
    assert not list(report.glob(".stretch*"))


def test_nothing_is_left_of_stretches_that_were_broken_off(tmp_path: Path) -> None:
    report = tmp_path / "t.report"
    report.mkdir()
    plan = split_plan(plan_of(record("mha", None, tmp_path), report), ReplaySettings(), workers=2)
    task = GroupTask(settings=ReplaySettings(), explicit=True, all_there=True)
    seen = []

    def interrupt(_: Progress) -> None:
        seen.extend(report.glob(".stretch*"))
        if seen:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(replay_in_workers(plan, task, interrupt, jobs=2))
    assert seen
    assert not list(report.iterdir())


def test_what_keeps_a_report_from_being_written_is_said_once(tmp_path: Path) -> None:
    segments = record("mha", None, tmp_path)
    (tmp_path / "taken").write_text("a file")
    code, _, err = replay("--quiet", "--jobs", 1, "--report", tmp_path / "taken" / "report", *segments)
    assert code == 2
    assert err.count("t.arrow: ") == 1
