"""`kvcanary expand`: the rows of a stepwise replay, from a report that has them merged."""

import io
import json
import os
import shutil
import stat
import threading

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.analysis.cli.expand import expand_command
from kvcanary.analysis.finishing import add_page, finish
from kvcanary.replayer.cli.replay import make_replay_command
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.places import DATA


def run(*args):
    return CliRunner().invoke(expand_command, [str(arg) for arg in args])


@pytest.fixture
def reports(tmp_path):
    """The trace's folder with a stepwise and a merged report."""
    trace = shutil.copy(DATA / "free_too_early.arrow", tmp_path / "t.arrow")
    made = []
    for name, merge in (("s.report", False), ("t.report", True)):
        folder = tmp_path / name
        folder.mkdir()
        replay(trace, settings=ReplaySettings(merge_rows=merge), report=folder)
        made.append(folder)
    return made


def rows(path):
    table = pq.read_table(path)
    return [c.cast(pa.utf8()) if pa.types.is_dictionary(c.type) else c for c in table.columns]


def test_it_writes_the_rows_of_a_stepwise_replay(reports, tmp_path):
    stepwise, merged = reports
    result = run(merged)
    assert result.exit_code == 0, result.output
    made = merged / "violation_forwards.parquet"
    assert rows(made) == rows(stepwise / "violations.parquet")
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert not list(merged.glob("*.partial"))
    few, many = (pq.read_metadata(path).num_rows for path in (merged / "violations.parquet", made))
    assert few < many
    assert f"{many:,} rows of {few:,} merged ones" in result.output.replace("\n", "")
    told = json.loads(run(merged, "-o", tmp_path / "r.parquet", "--json").output)
    assert told == {"report": str(merged), "output": str(tmp_path / "r.parquet"), "rows": many, "merged_rows": few}
    assert rows(tmp_path / "r.parquet") == rows(made)


def test_the_report_is_kvcanarys_as_before_and_the_next_replay_drops_the_rows(tmp_path):
    trace = shutil.copy(DATA / "free_too_early.arrow", tmp_path / "t.arrow")
    report = tmp_path / "t.report"
    for _ in range(2):
        result = CliRunner().invoke(
            make_replay_command(finish=finish, add_page=add_page), [str(trace), "--report", str(report), "--no-page"]
        )
        assert result.exit_code == 1, result.output
        assert not (report / "violation_forwards.parquet").exists(), "rows of an earlier replay"
        assert run(report).exit_code == 0
        assert (report / "violation_forwards.parquet").exists()


def test_what_it_reads_is_not_overwritten(reports, tmp_path):
    _, merged = reports
    for path in (merged / "violations.parquet", tmp_path / "t.arrow"):
        before = path.read_bytes()
        result = run(merged, "-o", path)
        assert (result.exit_code, "name another with -o" in result.stderr) == (2, True)
        assert path.read_bytes() == before


def test_of_a_stepwise_report_the_rows_are_copied(reports, tmp_path):
    stepwise, _ = reports
    assert run(stepwise, "-o", tmp_path / "r.parquet").exit_code == 0
    assert rows(tmp_path / "r.parquet") == rows(stepwise / "violations.parquet")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda report: (report / "violations.parquet").unlink(), "missing"),
        (lambda report: (report / "violations.parquet").write_bytes(b"PAR1"), "no Parquet file of a report"),
        (lambda report: pq.write_table(pa.table({"slot": [1]}), report / "violations.parquet"), "missing; replay"),
        (lambda report: (report / "summary.json").unlink(), "no summary.json"),
        (lambda report: (report.parent / "t.arrow").unlink(), "--trace"),
        (lambda report: (report / "violation_forwards.parquet").mkdir(), "cannot be written"),
        (lambda report: _one_more_forward(report / "violations.parquet"), "another trace"),
    ],
)
def test_what_cannot_be_done_is_told(reports, spoil, words):
    _, report = reports
    spoil(report)
    result = run(report)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
    assert not (report / "violation_forwards.parquet").is_file()


def test_a_device_is_written_and_never_replaced(reports, tmp_path):
    _, report = reports
    device, result = tmp_path / "device", []
    os.mkfifo(device)
    reader = threading.Thread(target=lambda: result.append(device.read_bytes()))
    reader.start()
    assert run(report, "-o", device).exit_code == 0
    reader.join()
    assert stat.S_ISFIFO(device.stat().st_mode)
    assert pq.read_table(io.BytesIO(result[0])).num_rows > 0
    link = tmp_path / "link"
    link.symlink_to("/dev/full")
    done = run(report, "-o", link)
    assert (done.exit_code, "No space left on device" in done.output, link.is_symlink()) == (2, True, True)
    assert not [*report.parent.rglob("*.part"), *tmp_path.glob("*.part")]


def _one_more_forward(path):
    table = pq.read_table(path)
    counts = pa.compute.add(table["num_forwards"], 1)
    pq.write_table(table.set_column(table.schema.get_field_index("num_forwards"), "num_forwards", counts), path)
