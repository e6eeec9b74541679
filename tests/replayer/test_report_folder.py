"""Who may read a report: it holds tokens and names of requests."""

import stat
from pathlib import Path

from click.testing import CliRunner
from kvcanary.replayer.commands.replay import replay_command

TRACE = Path(__file__).parents[2] / "data" / "kv_flip.arrow"


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
