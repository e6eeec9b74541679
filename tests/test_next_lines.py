"""What commands tell a shell and a script: lines that can be pasted whatever the name, JSON, and where reports go."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kvcanary.analysis import finishing
from kvcanary.cli import main
from kvcanary.recorder.trace.batch import TraceGap
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .support.places import DATA
from .support.raw_traces import cut

ODD = "it's; rm -rf $HOME"


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], obj={})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert result.exit_code == code, result.output
    return result


def pasted(output: str) -> list[str]:
    """Return the words of the command behind the last `next`, as a shell takes them."""
    (line,) = [line for line in output.splitlines() if line.startswith("next")][-1:]
    return shlex.split(line.removeprefix("next"))


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = tmp_path / ODD
    folder.mkdir()
    return folder


def test_recovered_traces_can_be_pasted(odd: Path) -> None:
    torn = odd / "torn.arrow"
    torn.write_bytes((DATA / "clean_llama.arrow").read_bytes()[:40_000])
    recovered = odd / "torn.recovered.arrow"
    assert pasted(run("recover", torn).output) == ["kvcanary-replay", str(recovered)]
    assert pasted(run("recover", odd, "--force").output) == ["kvcanary-replay", str(odd)]
    assert pasted(run("inspect", odd, code=125).output) == ["kvcanary-replay", str(odd)]  # whole, with a loss
    recovered.unlink()
    assert pasted(run("inspect", odd, code=125).output) == ["kvcanary", "recover", str(odd)]


def test_advice_within_messages_can_be_pasted(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Path(shutil.copy(DATA / "kv_flip.arrow", odd))
    report = odd / "kv_flip.report"
    report.mkdir()
    summary = replay(trace, settings=ReplaySettings(), report=report)
    monkeypatch.setattr(finishing, "MAX_TOKENS_AT_ONCE", 1)
    assert f"kvcanary page {shlex.quote(str(report))} makes it" in finishing.add_page(summary, wanted=True)
    shutil.rmtree(report)
    assert f"run kvcanary-replay {shlex.quote(str(trace))}" in run("sql", trace, "--save", code=2).stderr
    torn = odd / f"{ODD}.arrow"
    torn.write_bytes(trace.read_bytes()[:40_000])
    with TraceReader(torn) as reader:
        (gap,) = [item for item in reader.stream() if isinstance(item, TraceGap)]
    assert gap.advice == f"run kvcanary recover {shlex.quote(torn.name)}"


def test_simulated_and_compared_traces_can_be_pasted(odd: Path) -> None:
    trace = odd / "t.arrow"
    assert pasted(run("simulate", "-o", trace, "--requests", 2).output) == ["kvcanary-replay", str(trace)]
    other = shutil.copy(DATA / "token_swap.arrow", odd)
    assert pasted(run("diff", DATA / "clean_llama.arrow", other, code=1).output)[-2:] == ["kvcanary-replay", other]


def test_incidents_can_be_pasted(odd: Path) -> None:
    shutil.copy(DATA / "kv_flip.arrow", odd)
    run("replay", "--quiet", odd / "kv_flip.arrow", code=1)
    report = odd / "kv_flip.report"
    assert pasted(run("incidents", report).output) == ["kvcanary", "incidents", str(report), "--explain", "1"]


def test_recover_tells_a_script_what_was_kept_and_lost(tmp_path: Path) -> None:
    torn = tmp_path / "torn.arrow"
    torn.write_bytes((DATA / "clean_llama.arrow").read_bytes()[:40_000])
    told = json.loads(run("recover", "--json", torn).stdout)
    assert told["recovered"] == str(tmp_path / "torn.recovered.arrow")
    assert told["lost_events"] is None
    assert told["kept_events"] > 0
    assert "torn" in told["causes"][0]
    (tmp_path / "foreign.arrow").write_bytes(b"PAR1")
    shutil.copy(DATA / "clean_llama.arrow", tmp_path / "whole.arrow")
    folder = json.loads(run("recover", "--json", "--force", tmp_path, code=2).stdout)
    assert (folder["files"], folder["whole"]) == (2, 1)  # what was recovered before counts as done
    assert [*folder["unreadable"]] == [str(tmp_path / "foreign.arrow")]
    (tmp_path / "torn.recovered.arrow").unlink()
    again = json.loads(run("recover", "--json", tmp_path, code=2).stdout)
    assert again["recovered"] == [told]


def test_a_part_of_a_recording_has_a_report_of_its_own(tmp_path: Path) -> None:
    segments = cut(DATA / "clean_llama.arrow", tmp_path / "t.arrow", seed=1, least=20, most=30)
    assert len(segments) > 3
    run("replay", "--quiet", tmp_path)
    whole = (tmp_path / "t.report" / "summary.json").read_text()
    run("replay", "--quiet", segments[1], segments[2])
    part = json.loads((tmp_path / "t.000001-000002.report" / "summary.json").read_text())
    assert part["segments"] == [1, 2]
    assert (tmp_path / "t.report" / "summary.json").read_text() == whole
    run("replay", "--quiet", *segments)
    assert json.loads((tmp_path / "t.report" / "summary.json").read_text())["segments"] == [*range(len(segments))]
    query = "select count(*) as n from forwards"
    rows = json.loads(run("sql", tmp_path / "t.000001-000002.report", "--format", "json", query).stdout)
    assert [row["n"] for row in rows] == [part["forwards"]]


def test_sql_takes_a_folder_of_traces(tmp_path: Path) -> None:
    for name in ("kv_flip", "clean_llama"):
        shutil.copy(DATA / f"{name}.arrow", tmp_path)
    run("replay", "--quiet", tmp_path / "kv_flip.arrow", code=1)
    query = "select trace, sum(num_forwards)::bigint as n from violations group by trace"
    assert json.loads(run("sql", tmp_path, "--format", "json", query).stdout) == [{"trace": "kv_flip", "n": 13}]
    query = "select distinct trace from forwards order by trace"
    traces = json.loads(run("sql", tmp_path, "--format", "json", query).stdout)
    assert [row["trace"] for row in traces] == ["clean_llama", "kv_flip"]
    (tmp_path / "empty").mkdir()
    assert "nor a folder of traces" in run("sql", tmp_path / "empty", "select 1 + 1", code=2).stderr


def test_triage_without_trace_and_store_says_what_it_needs(tmp_path: Path) -> None:
    trace = Path(shutil.copy(DATA / "kv_flip.arrow", tmp_path))
    run("replay", "--quiet", trace, code=1)
    trace.unlink()
    said = run("triage", tmp_path / "kv_flip.report", code=2).stderr
    assert "no such file" in said
    assert "report.duckdb" in said
    assert "--trace" in said
