"""Faults put into a real engine on purpose: marked, found in their forward, and nothing without being asked for."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary import replay
from kvcanary.cli import main
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.process.environment import read_environment
from kvcanary.recorder.process.injection import FAULTS, SEEN_BY, Injection
from kvcanary.replayer.report.findings import Finding
from kvcanary.replayer.report.injected import InjectedFaults

from ..support.engines.tiny_models import generate, model

engine_test = pytest.mark.usefixtures("engine_left_as_it_was")


@engine_test
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "kv_unused_cache"])
def test_what_is_injected_is_found_in_its_forward(tmp_path: Path, fault: str) -> None:
    oracle = "hash" if fault == "next_token_swap" else ""
    with attach(tmp_path / "t.arrow", oracle=oracle, inject=Injection(fault=fault, at=8, request="req_3", seed=2)):
        generate(model("llama"))
    summary = replay(tmp_path / "t.arrow")
    (found,) = summary.injected
    (mark,) = summary.marks
    assert mark["labels"]["fault"] == found["fault"] == fault
    assert found["found_forward"] == found["forward"] == (9 if fault == "kv_post_forward" else 8)
    assert set(found["found_by"].split("+")) <= set(SEEN_BY[fault])
    assert found["request"] == "req_3"
    assert set(summary.findings_by_kind) <= {"oracle_token"}


@engine_test
def test_a_request_that_never_runs_is_never_hit(tmp_path: Path) -> None:
    with attach(tmp_path / "t.arrow", inject=Injection(fault="kv_used", at=2, request="somebody else")):
        generate(model("llama"))
    summary = replay(tmp_path / "t.arrow")
    assert (summary.injected, summary.marks, summary.violations, summary.findings) == ([], [], 0, 0)


def test_what_the_recording_cannot_see_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a sweep of the prefix cache"):
        attach(tmp_path / "t.arrow", inject=Injection(fault="kv_unused_cache"))


def test_the_variable_is_the_commands_alone() -> None:
    injection = Injection(fault="kv_used", at=3, request="r", seed=9)
    settings = read_environment({"KVCANARY_TRACE": "/t", "KVCANARY_INJECT": injection.to_json()})
    assert settings is not None
    assert settings.inject == injection
    for text in ("1", "{}", "[]", json.dumps({"fault": "all", "at": 1, "request": "", "seed": 0})):
        with pytest.raises(ValueError, match="not by kvcanary inject"):
            read_environment({"KVCANARY_TRACE": "/t", "KVCANARY_INJECT": text})


def test_an_engine_that_may_serve_somebody_is_refused(tmp_path: Path) -> None:
    words = ["inject", "--fault", "kv_used", "-o", str(tmp_path / "traces"), "--", "true"]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 2
    assert "give --damage-outputs" in ran.output
    assert not (tmp_path / "traces").exists()


def test_the_help_names_every_fault() -> None:
    text = CliRunner().invoke(main, ["inject", "--help"]).output
    assert all(fault in text for fault in FAULTS)
    assert "DAMAGES OUTPUTS" in text


def test_marks_past_those_that_are_listed_are_counted() -> None:
    faults = InjectedFaults()
    mark = {"fault": "kv_used", "forward": 1, "request_ids": [7], "seen_by": ["KV_HASH"]}
    assert sum(faults.mark(labels) for labels in [mark] * 103 + [{"note": "no fault"}]) == 103
    assert len(faults.listed) == 100


def test_what_is_told_of_late_is_found_in_its_forward_all_the_same() -> None:
    faults = InjectedFaults()
    faults.mark({"fault": "next_token_swap", "forward": 15, "request_ids": [7], "seen_by": ["oracle_token"]})
    for forward in (14, 17, 16, 15, 16):
        finding = Finding(kind="oracle_token", event=1, forward=forward, time_ns=0, request_id=7, detail="")
        faults.findings([finding])
    assert faults.listed == [
        {
            "fault": "next_token_swap",
            "forward": 15,
            "request": "",
            "slot": -1,
            "found_forward": 15,
            "found_by": "oracle_token",
        }
    ]
