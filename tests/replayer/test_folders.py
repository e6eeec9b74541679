"""A folder of traces: recordings joined, ranks compared, one verdict over all."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.recorder.cli.inspect import inspect_command
from kvcanary.recorder.cli.recover import recover_command
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import Ranks
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial

from ..support.raw_traces import as_rank, cut


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("clean") / "t.arrow"
    (trace,) = run_trial(Trial(fault=None, config="swa", seed=1), target).traces
    return trace


def replay(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(replay_command, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout


def as_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    code, output = replay("--json", *arguments)
    return code, json.loads(output)


def test_ranks_of_one_engine_that_agree(clean: Path, tmp_path: Path) -> None:
    for rank in range(3):
        trace = as_rank(clean, tmp_path / f"tp{rank}.arrow", Ranks(tp_rank=rank, tp_size=3))
        cut(trace, tmp_path / f"cut{rank}.arrow", seed=rank, least=300, most=400)
        trace.unlink()
    code, found = as_json(tmp_path)
    assert (code, found["verdict"], found["exit_code"]) == (0, "clean", 0)
    assert [len(one["segments"]) > 1 for one in found["recordings"]] == [True] * 3
    (engine,) = found["ranks"]
    forwards = found["recordings"][0]["forwards"]
    assert [(one["forwards_compared"], one["forwards_differing"]) for one in engine["compared"]] == [(forwards, 0)] * 2
    assert sorted(path.name for path in tmp_path.glob("*.report")) == [f"cut{rank}.report" for rank in range(3)]
    code, output = replay("--no-report", tmp_path)
    assert code == 0
    assert "CLEAN   over 3 recordings" in output
    assert "tp 2/3" in output


def change_token(number: int, event: TraceEvent) -> None:
    if number in (40, 41):
        event.ints["input_ids"] = event.ints["input_ids"] + 1


def test_the_first_forward_in_which_ranks_disagree_is_named(clean: Path, tmp_path: Path) -> None:
    ids: dict[int, np.ndarray] = {}

    def swap_ids(number: int, event: TraceEvent) -> None:
        ids[number] = event.ints.get("request_ids", np.empty(0, np.int64))
        if number >= 50 and len(ids[number]):
            event.ints["request_ids"] = ids[number] + 1

    as_rank(clean, tmp_path / "tp0.arrow", Ranks(tp_rank=0, tp_size=2))
    as_rank(clean, tmp_path / "tp1.arrow", Ranks(tp_rank=1, tp_size=2), swap_ids)
    # The rank that is compared with goes first, whatever the order of the names.
    code, found = as_json(
        "--checks", "none", tmp_path / "tp1.arrow", tmp_path / "tp0.arrow", "--report", tmp_path / "out"
    )
    assert code == 1
    first, second = found
    assert first["ranks"]["tp_rank"] == 0
    assert first["verdict"] == "clean"
    assert second["findings_by_kind"] == {"ranks_disagree": 1}
    number = next(n for n in sorted(ids) if n >= 50 and len(ids[n]))
    (finding,) = pq.read_table(tmp_path / "out" / "tp1.report" / "findings.parquet").to_pylist()
    assert finding["forward"] == number
    assert finding["request_id"] == ids[number][0] + 1
    assert "tp rank 0" in finding["detail"]
    assert f"request_ids[0] is {ids[number][0] + 1} here, {ids[number][0]} there" in finding["detail"]


@pytest.mark.parametrize("place", [Ranks(dp_rank=1, dp_size=2, tp_size=2), Ranks(pp_rank=1, pp_size=2, tp_size=2)])
def test_other_positions_in_the_layout_may_differ(place: Ranks, clean: Path, tmp_path: Path) -> None:
    first = dataclasses.replace(place, dp_rank=0, pp_rank=0)
    as_rank(clean, tmp_path / "a.arrow", first)
    as_rank(clean, tmp_path / "b.arrow", place, change_token)
    _, found = as_json("--checks", "none", "--no-report", tmp_path)
    assert found["ranks"] == []
    assert all("ranks_disagree" not in one["findings_by_kind"] for one in found["recordings"])


def test_a_server_that_was_started_again_is_compared_with_itself(clean: Path, tmp_path: Path) -> None:
    for run, change in enumerate((lambda *_: None, change_token)):
        for rank in range(2):
            path = tmp_path / f"run{run}-tp{rank}.arrow"
            as_rank(clean, path, Ranks(tp_rank=rank, tp_size=2), change, created_ns=1 + 100 * run + rank)
    _, found = as_json("--no-report", "--checks", "none", tmp_path)
    assert len(found["ranks"]) == 2
    assert all(one["forwards_differing"] == 0 for engine in found["ranks"] for one in engine["compared"])


def test_two_servers_of_one_kind_in_one_folder_are_not_compared(clean: Path, tmp_path: Path) -> None:
    def other_requests(_: int, event: TraceEvent) -> None:
        if "request_ids" in event.ints:
            event.ints["request_ids"] = event.ints["request_ids"] ^ 1

    as_rank(clean, tmp_path / "a-tp0.arrow", Ranks(tp_rank=0, tp_size=2))
    as_rank(clean, tmp_path / "b-tp1.arrow", Ranks(tp_rank=1, tp_size=2), other_requests)
    _, found = as_json("--no-report", "--checks", "none", tmp_path)
    ((compared,),) = [engine["compared"] for engine in found["ranks"]]
    assert (compared["unrelated"], compared["forwards_compared"]) == (True, 0)
    assert all("ranks_disagree" not in one["findings_by_kind"] for one in found["recordings"])


def test_a_folder_with_everything_in_it(clean: Path, tmp_path: Path) -> None:
    shutil.copy(clean, tmp_path / "whole.arrow")
    run_trial(Trial(fault=FAULTS["kv_used"], config="mha", seed=0), tmp_path / "bad.arrow")
    (tmp_path / "foreign.arrow").write_bytes(b"PAR1 and so on")
    (tmp_path / "notes.txt").write_text("not a trace")
    (tmp_path / "t.report").mkdir()
    segments = cut(clean, tmp_path / "cut.arrow", seed=1, least=100, most=200)
    segments[1].unlink()
    segments[-1].write_bytes(segments[-1].read_bytes()[:-300])
    code, found = as_json("--no-report", tmp_path)
    assert (code, found["verdict"]) == (1, "corrupt")
    by_name = {Path(one["trace"]).name: one for one in found["recordings"]}
    assert {name: one["exit_code"] for name, one in by_name.items()} == {
        "whole.arrow": 0,
        "bad.arrow": 1,
        "foreign.arrow": 2,
        "cut.arrow": 125,
    }
    assert any("segment 1 before it is missing" in gap for gap in by_name["cut.arrow"]["gaps"])
    code, output = replay("--no-report", tmp_path)
    assert code == 1
    assert "CORRUPT   over 4 recordings" in output
    assert "Parquet" in output

    result = CliRunner().invoke(inspect_command, [str(tmp_path)])
    assert result.exit_code == 2
    assert "missing" in result.output
    assert "torn" in result.output
    inspected = json.loads(CliRunner().invoke(inspect_command, ["--json", str(tmp_path)]).output)
    (of_cut,) = [one for one in inspected["recordings"] if Path(one["name"]).name == "cut.arrow"]
    assert of_cut["missing_segments"] == [1]
    assert len(inspected["unreadable"]) == 1

    result = CliRunner().invoke(recover_command, [str(tmp_path)])
    assert result.exit_code == 2
    assert "foreign.arrow" in result.output
    assert (tmp_path / f"{segments[-1].stem}.recovered.arrow").exists()
    again = {Path(one["trace"]).name: one for one in as_json("--no-report", tmp_path)[1]["recordings"]}
    assert again["cut.arrow"]["forwards"] == by_name["cut.arrow"]["forwards"]
    assert again["cut.arrow"]["complete"]


def test_a_recording_whose_end_is_not_there(clean: Path, tmp_path: Path) -> None:
    segments = cut(clean, tmp_path / "t.arrow", seed=1, least=300, most=400)
    assert replay("--quiet", "--no-report", tmp_path)[0] == 0
    segments[-1].unlink()
    code, output = replay("--quiet", "--no-report", tmp_path)
    assert code == 125
    assert "goes on behind segment" in output
    # A segment that somebody names is all that they ask for.
    assert replay("--quiet", "--no-report", segments[0])[0] == 0
    assert replay("--quiet", "--no-report", *segments[:-1])[0] == 0


def test_a_last_segment_torn_within_its_header_belongs_to_its_recording(clean: Path, tmp_path: Path) -> None:
    segments = cut(clean, tmp_path / "t.arrow", seed=1, least=300, most=400)
    segments[-1].write_bytes(segments[-1].read_bytes()[:100])
    code, found = as_json("--no-report", tmp_path)
    assert (code, len(found["recordings"])) == (125, 1)
    assert "torn within its header" in found["recordings"][0]["gaps"][0]


def test_copies_of_a_segment_count_once(clean: Path, tmp_path: Path) -> None:
    segments = cut(clean, tmp_path / "t.arrow", seed=1, least=300, most=400)
    shutil.copy(segments[0], tmp_path / "copy.arrow")
    result = CliRunner().invoke(replay_command, ["--no-report", "--json", str(tmp_path)])
    assert result.exit_code == 0
    assert "is the same segment" in result.stderr


def test_a_folder_without_traces(tmp_path: Path) -> None:
    for command in (replay_command, inspect_command, recover_command):
        result = CliRunner().invoke(command, [str(tmp_path)])
        assert result.exit_code == 2
        assert "holds no .arrow file" in result.output


def test_an_output_of_one_file_for_a_folder_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(recover_command, [str(tmp_path), "-o", str(tmp_path / "x.arrow")])
    assert result.exit_code == 2
    assert "-o names one file" in result.output
