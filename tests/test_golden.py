"""The traces in data/, recorded from a real engine, keep their verdicts exactly; the faults are those injected."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kvcanary.recorder.cli.recover import recover_command
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.run.replay import ReplaySettings, replay

from .support.places import ROOT

TRACES = sorted((ROOT / "data").glob("*.arrow"))
GOLDEN = ROOT / "tests" / "golden"

REQUIRED = {"clean_llama", "clean_hybrid", "clean_fork_dedup_evict", "kv_flip", "table_swap", "token_swap"}


def load_maker():
    import importlib.util

    spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = load_maker()
CASES = MAKER.cases()
REQUIRED_SIMULATED = {"clean_mla", "clean_swa", "clean_eagle", "clean_pd", "pd_kv_post_forward", "swa_stale_mapping"}


def golden(name: str) -> list[dict]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def test_all_required_traces_are_there_and_small() -> None:
    assert set(CASES) >= REQUIRED | REQUIRED_SIMULATED
    golden = (path for path in (ROOT / "data").rglob("*.arrow") if path.parent.name != "corpus")
    assert sum(path.stat().st_size for path in golden) < 5_000_000
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)
    readme = (ROOT / "data" / "README.md").read_text()
    for name in CASES:
        assert f"`{name}`" in readme, name


@pytest.mark.parametrize("name", CASES)
def test_verdict(name: str) -> None:
    assert json.loads(json.dumps(MAKER.verdicts(CASES[name]))) == golden(name)


@pytest.mark.parametrize("name", CASES)
def test_clean_and_faulty_are_what_their_names_say(name: str) -> None:
    codes = [verdict["exit_code"] for verdict in golden(name)]
    assert max(codes) == (0 if name.startswith("clean_") else 1)
    for verdict in golden(name):
        assert verdict["complete"]
        assert not verdict["doubts"]


@pytest.mark.parametrize("name", [n for n, (p, *_) in CASES.items() if "simulated" in p.parts and "clean_" not in n])
def test_nothing_is_found_before_the_simulated_fault(name: str) -> None:
    """The mark of the lab says before which forward the engine was broken, in the trace of the side that was."""
    marks = 0
    for verdict in golden(name):
        found = [row["event"] for row in (verdict["first_violation"], verdict["first_finding"]) if row]
        for mark in verdict["marks"]:
            assert mark["labels"]["fault"]
            assert all(event > mark["event"] for event in found)
            marks += 1
    assert marks


@functools.cache
def truth(trace: Path) -> dict[str, Any]:
    summary = replay(trace, settings=ReplaySettings(), report=None)
    marks = [mark["labels"] for mark in summary.marks if "fault" in mark["labels"]]
    assert len(marks) == 1
    return {"truth": marks[0], "first": summary.first_violation, "summary": summary}


def test_kv_flip_is_seen_where_it_was_injected() -> None:
    case = truth(ROOT / "data" / "kv_flip.arrow")
    injected, first = case["truth"], case["first"]
    assert first["forward"] == injected["forward"]
    assert first["slot"] == injected["slot"]
    assert first["request"] in injected["request"]
    assert first["reasons"] == ["VERIFY_KV_HASH"]
    assert first["launch"] == "TAIL_K_FULL"
    assert set(case["summary"].violations_by_reason) == {"VERIFY_KV_HASH"}


def test_table_swap_is_seen_where_it_was_injected() -> None:
    case = truth(ROOT / "data" / "table_swap.arrow")
    injected, first = case["truth"], case["first"]
    assert first["forward"] == injected["forward"]
    assert first["slot"] == injected["slot"]
    assert first["request"] == injected["request"]
    assert first["expected_position"] == injected["position"]


def test_token_swap_is_seen_by_its_first_reader_and_traced_to_its_writer() -> None:
    case = truth(ROOT / "data" / "token_swap.arrow")
    injected, first = case["truth"], case["first"]
    wrong = {
        (injected["request"], injected["slot"], injected["position"]),
        (injected["other"], injected["other_slot"], injected["other_position"]),
    }
    assert first["writer_forward"] == injected["forward"]
    assert (first["writer_request"], first["slot"], first["position"]) in wrong
    assert first["request"] == first["writer_request"]
    assert first["reasons"] == ["VERIFY_TOKEN"]
    assert set(case["summary"].requests_hit.values()) == {injected["request"], injected["other"]}


@pytest.mark.parametrize("name", [path.stem for path in TRACES if not path.stem.startswith("clean_")])
def test_the_screen_names_the_injected_forward_slot_and_request(name: str) -> None:
    trace = ROOT / "data" / f"{name}.arrow"
    injected = truth(trace)["truth"]
    result = CliRunner().invoke(replay_command, ["--no-report", str(trace)])
    assert result.exit_code == 1, result.output
    # What follows is the ground truth itself, which the verdict must not need.
    text = " ".join(result.stdout.split("notes in the trace")[0].split())
    # A block given away too early is first damaged by the forward that writes it again, the one after.
    later = 1 if name == "free_too_early" else 0
    assert f"forward {injected['forward'] + later:,} " in text
    assert any(f"in slot {injected[key]:,} of pool" in text for key in ("slot", "other_slot") if key in injected)
    assert any(f"request {injected[key]} " in text for key in ("request", "other") if key in injected)


def test_torn_at_many_bytes_then_recovered(tmp_path: Path) -> None:
    """`head -c N` of a faulty trace: a clear verdict at any N, and after recovery it replays."""
    whole = (ROOT / "data" / "kv_flip.arrow").read_bytes()
    runner = CliRunner()
    seen = set()
    for n in sorted({0, 1, 7, 8, 100, *range(0, len(whole), max(1, len(whole) // 20)), len(whole) - 1}):
        torn = tmp_path / "torn.arrow"
        torn.write_bytes(whole[:n])
        result = runner.invoke(replay_command, ["--no-report", str(torn)])
        assert result.exit_code in (1, 2, 125), (n, result.output)
        assert isinstance(result.exception, SystemExit)
        assert str(torn) in result.output
        seen.add(result.exit_code)
        if result.exit_code == 2:
            continue
        assert "torn" in result.output
        saved = tmp_path / "saved.arrow"
        saved.unlink(missing_ok=True)
        assert runner.invoke(recover_command, [str(torn), "-o", str(saved)]).exit_code == 0
        again = runner.invoke(replay_command, ["--no-report", str(saved)])
        assert again.exit_code == result.exit_code, (n, again.output)
    assert seen == {1, 2, 125}
