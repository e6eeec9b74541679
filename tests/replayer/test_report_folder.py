"""Who may read a report: it holds tokens and names of requests."""

import errno
import fcntl
import os
import resource
import shutil
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.recordings import group_recordings
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.cli.report_places import reports_held
from kvcanary.replayer.report.report import write_summary
from kvcanary.replayer.run.replay import ReplaySettings, replay
from kvcanary.replayer.workers.jobs import Job

from ..support.places import DATA

TRACE = DATA / "kv_flip.arrow"


def test_a_new_report_is_its_owners_alone(tmp_path):
    report = tmp_path / "made.report"
    assert CliRunner().invoke(replay_command, ["--quiet", "--report", str(report), str(TRACE)]).exit_code == 1
    assert (report / "violations.parquet").exists()
    assert stat.S_IMODE(report.stat().st_mode) == 0o700


def test_a_folder_that_was_there_keeps_its_mode(tmp_path):
    report = tmp_path / "mine.report"
    report.mkdir(mode=0o755)
    assert CliRunner().invoke(replay_command, ["--quiet", "--report", str(report), str(TRACE)]).exit_code == 1
    assert stat.S_IMODE(report.stat().st_mode) == 0o755


def test_a_full_disk_leaves_the_summary_that_was_there(tmp_path):
    summary = replay(TRACE, settings=ReplaySettings(), report=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))  # as a disk that is full
    try:
        with pytest.raises(OSError, match="too large"):
            write_summary(summary, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_two_replays_never_write_one_report(tmp_path):
    report = tmp_path / "mine.report"
    arguments = ["--quiet", "--report", str(report), str(TRACE)]
    assert CliRunner().invoke(replay_command, arguments).exit_code == 1
    summary = (report / "summary.json").read_bytes()
    other = os.open(report, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    refused = CliRunner().invoke(replay_command, arguments)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "another replay is writing its report there" in refused.stderr
    assert (report / "summary.json").read_bytes() == summary
    os.close(other)
    assert CliRunner().invoke(replay_command, arguments).exit_code == 1


def test_a_report_that_goes_to_the_working_directory_is_held_there(tmp_path, monkeypatch):
    trace = tmp_path / "t.arrow"
    trace.write_bytes(TRACE.read_bytes())
    (tmp_path / "t.report").write_text("in the way")
    (tmp_path / "here" / "t.report").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    other = os.open("t.report", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    refused = CliRunner().invoke(replay_command, ["--quiet", str(trace)])
    assert (refused.exit_code, "another replay is writing its report there" in refused.stderr) == (2, True)
    assert not list((tmp_path / "here" / "t.report").iterdir())
    os.close(other)
    assert CliRunner().invoke(replay_command, ["--quiet", str(trace)]).exit_code == 1
    assert (tmp_path / "here" / "t.report" / "summary.json").exists()


def test_one_trace_under_two_names_is_not_another_replay(tmp_path, monkeypatch):
    (tmp_path / "t.arrow").write_bytes(TRACE.read_bytes())
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(replay_command, ["--quiet", "t.arrow", str(tmp_path / "t.arrow")])
    assert (result.exit_code, "two traces would write to" in result.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["t.arrow"]


def test_where_no_folder_can_be_looked_at_the_error_says_what_to_do(tmp_path):
    result = CliRunner().invoke(replay_command, ["--report", str(tmp_path / ("x" * 300)), str(TRACE)])
    assert (result.exit_code, "name another with --report DIR" in result.stderr) == (2, True)


def test_where_there_are_no_locks_a_folder_without_a_report_goes_too(tmp_path, monkeypatch):
    def no_locks(_descriptor, _operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    job = Job(recording=group_recordings([TRACE])[0][0], report=tmp_path / "new")
    with reports_held([job], ReplaySettings(), explicit=True):
        assert job.report.is_dir()
    assert not job.report.exists()


def test_a_folder_to_which_nothing_was_written_goes_again(tmp_path):
    trace = tmp_path / "torn.arrow"
    trace.write_bytes(TRACE.read_bytes()[:2000])
    kept = tmp_path / "kept"
    kept.mkdir()
    for report in (tmp_path / "new", kept):
        assert CliRunner().invoke(replay_command, ["--report", str(report), str(trace)]).exit_code == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["kept"]


def replayed_into(report: Path, *options: str):
    return CliRunner().invoke(replay_command, ["--quiet", "--report", str(report), *options, str(TRACE)])


def test_links_in_a_folder_that_came_with_a_trace_lead_nowhere(tmp_path):
    report, mine = tmp_path / "trace.report", tmp_path / "notes.txt"
    mine.write_text("mine")
    for name in ("summary.json.partial", "summary.json", "findings.parquet", "violations.parquet.partial"):
        shutil.rmtree(report, ignore_errors=True)
        report.mkdir()
        (report / name).symlink_to(mine)
        refused = replayed_into(report)
        assert refused.exit_code == 2
        assert f"holds '{name}', which kvcanary did not write" in refused.stderr
        assert "--report DIR" in refused.stderr
        assert mine.read_text() == "mine"


def test_a_pipe_among_a_reports_files_does_not_hang_it(tmp_path):
    os.mkfifo(tmp_path / "violations.parquet")
    assert replayed_into(tmp_path).exit_code == 2


def test_a_folder_that_is_a_link_or_somebody_elses_is_refused(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "link.report").symlink_to(there)
    assert "it is a link" in replayed_into(tmp_path / "link.report").stderr
    if os.geteuid() == 0:
        os.chown(there, 12345, 12345)
        assert "belongs to another user" in replayed_into(there).stderr


def test_a_folder_that_came_along_is_not_passed_by(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    shutil.copy(TRACE, tmp_path / "there" / "trace.arrow")
    (tmp_path / "there" / "trace.report").mkdir()
    (tmp_path / "there" / "trace.report" / "odd").write_text("")
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(replay_command, ["--quiet", str(tmp_path / "there" / "trace.arrow")])
    assert refused.exit_code == 2
    assert "holds 'odd', which kvcanary did not write" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_strangers_summary_is_not_overwritten(tmp_path):
    summary = tmp_path / "summary.json"
    summary.write_text('{"results": 7}')
    refused = replayed_into(tmp_path)
    assert refused.exit_code == 2
    assert "its summary.json is not kvcanary's" in refused.stderr
    assert summary.read_text() == '{"results": 7}'


def test_every_file_of_a_report_is_its_owners_alone(tmp_path):
    mask = os.umask(0)
    try:
        report = tmp_path / "made.report"
        assert replayed_into(report).exit_code == 1
        assert replayed_into(report).exit_code == 1, "and it may be written again"
    finally:
        os.umask(mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in report.iterdir()}
    assert modes
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.long
def test_a_stray_file_with_a_recordings_name_stops_nobody(tmp_path):
    workload = RandomWorkload(requests=40, prompt_tokens=40, output_tokens=20)
    sizes = {"segment_bytes": 16_384, "flush_bytes": 4_096}
    with SimulatedEngine(EngineConfig(), workload, tmp_path / "trace.arrow", **sizes) as engine:
        engine.run()
    assert len([*tmp_path.iterdir()]) > 1
    shutil.copy(TRACE, tmp_path / "trace.arrow")
    done = CliRunner().invoke(replay_command, ["--quiet", str(tmp_path)])
    assert done.exit_code == 1, done.stderr
    assert {path.name for path in tmp_path.glob("*.report")} == {"trace.report", "trace.arrow.report"}
