"""`kvcanary check-adapter`: a whole adapter conforms; what an adapter leaves out, or says wrong, is named."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kvcanary.cli import main
from kvcanary.replayer.lab import adapter_check
from kvcanary.replayer.lab.adapter_check import AdapterReport, EngineError, check_adapter
from kvcanary.replayer.lab.adapter_faults import INPUT_FAULTS

from ...support.engines import nano
from ...support.engines.documented_engine import printed_code
from ...support.engines.nano import BLOCK
from ...support.engines.nano_subject import Engine
from ...support.places import DOCS

ALL = {fault.name for fault in INPUT_FAULTS}


def checked(engine: Any, folder: Path, seeds: int = 1) -> AdapterReport:
    return check_adapter(engine, folder, seeds=seeds)


def told(report: AdapterReport) -> dict[str, str]:
    return {entry.what: entry.recorded for entry in report.recorded}


def test_a_whole_adapter_conforms(tmp_path: Path) -> None:
    report = checked(Engine, tmp_path, seeds=2)
    assert (report.verdict, report.exit_code) == ("conforms", 0)
    assert {trial.fault for trial in report.faults} == ALL | {"freed_too_early"}
    assert not report.not_judged
    assert all(trial.seen == trial.planted for trial in report.faults)
    assert report.engine == "nano-vllm"
    known = told(report)
    assert {known[what] for what in ("requests", "sampled_tokens", "truth", "slot_history", "attention")} == {"yes"}
    assert (known["layers"], known["cache_walks"], known["observed_history"]) == ("yes", "no", "no")


class Partial(Engine):
    """An adapter that reads positions nowhere and says nothing of what attention gets."""

    def __init__(self, trace: Path) -> None:
        super().__init__(trace)
        before_step = self.recorder.before_step

        def partial(**given: Any) -> None:
            spans = zip(given["prefix_lens"], given["extend_lens"], strict=True)
            given["positions"] = [p for start, count in spans for p in range(start, start + count)]
            before_step(**{**given, "seq_lens": None, "query_lens": None})

        self.recorder.before_step = partial  # type: ignore[method-assign]


@pytest.mark.long
def test_what_an_adapter_does_not_read_is_missed(tmp_path: Path) -> None:
    report = checked(Partial, tmp_path)
    assert set(report.missed) == {"position_off_by_one", "seq_len_one_short"}
    assert (report.verdict, report.exit_code) == ("does not conform", 1)
    missed = {trial.fault: trial for trial in report.faults}["seq_len_one_short"]
    assert "attention: a wrong length or table that attention alone gets is not seen" in report.why_missed(missed)
    assert told(report)["attention"] == "no"


class FreesTwice(Engine):
    def fault_freed_twice(self) -> bool:
        """What is found here, between two forwards, bears the number of the one before."""
        block = next(iter(self.llm.scheduler.block_manager.free_block_ids))
        self.recorder.slots("free", group=0, slots=[block * BLOCK])
        return True


def test_what_is_found_between_two_forwards_counts_as_found(tmp_path: Path) -> None:
    report = checked(FreesTwice, tmp_path)
    trial = {trial.fault: trial for trial in report.faults}["freed_twice"]
    assert (trial.found, trial.seen, trial.found_by) == (True, trial.planted, {"slot_freed_twice": 1})
    assert report.verdict == "conforms"


class NoFrees(Engine):
    def __init__(self, trace: Path) -> None:
        super().__init__(trace)
        slots = self.recorder.slots
        self.recorder.slots = lambda kind, **given: slots(kind, **given) if kind == "alloc" else None  # type: ignore[method-assign]


def test_a_call_that_is_missing_shows_as_false_findings(tmp_path: Path) -> None:
    report = checked(NoFrees, tmp_path)
    assert "slot_double_allocated" in report.false_findings
    assert (report.verdict, report.exit_code) == ("does not conform", 1)


class NoInputs(Engine):
    def __init__(self, trace: Path) -> None:
        super().__init__(trace)
        self.llm.model_runner.on_inputs = lambda inputs: None

    def fault_freed_too_early(self) -> bool:
        return False


def test_an_engine_that_shows_no_inputs_is_inconclusive(tmp_path: Path) -> None:
    report = checked(NoInputs, tmp_path)
    assert (report.verdict, report.exit_code) == ("inconclusive", 125)
    assert report.not_judged == dict.fromkeys(ALL, "no on_inputs()") | {"freed_too_early": "no occasion"}


class Raises(Engine):
    def step(self) -> bool:
        raise RuntimeError("out of blocks")


class Elsewhere(Engine):
    def __init__(self, trace: Path) -> None:
        super().__init__(trace.with_name("elsewhere.arrow"))


class NeverEnds(Engine):
    def step(self) -> bool:
        super().step()
        return True


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Raises, r"RuntimeError: out of blocks \(test_adapter_check.py:\d+\)"),
        (Elsewhere, "wrote no trace to the path that it was given"),
        (NeverEnds, "had not ended after 100 steps"),
        (lambda: None, "the factory failed: TypeError"),
        (
            lambda _: __import__("no_such_engine"),
            "No module named 'no_such_engine'.*; run this in the engine's environment, or name",
        ),
    ],
)
def test_an_engine_that_fails_without_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, message: str
) -> None:
    monkeypatch.setattr(adapter_check, "MOST_STEPS", 100)
    with pytest.raises(EngineError, match=message):
        checked(engine, tmp_path)


def test_the_command(tmp_path: Path) -> None:
    name = f"{Engine.__module__}:Engine"
    done = CliRunner().invoke(main, ["check-adapter", name, "--seeds", "1", "--json", "--keep", str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["verdict"], found["missed"], found["false_findings"]) == ("conforms", [], {})
    assert (tmp_path / "kept" / "healthy-0.arrow").exists()
    assert (tmp_path / "kept" / "wrong_slot.arrow").exists()
    done = CliRunner().invoke(main, ["check-adapter", f"{__name__}:Partial", "--seeds", "1"])
    assert done.exit_code == 1, done.output
    assert "does not conform: position_off_by_one, seq_len_one_short not found" in done.stdout
    assert "nano-vllm" in done.stdout


def test_the_guides_engine_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = DOCS / "guide"
    (tmp_path / "paged.py").write_text(printed_code("PagedEngine", guide / "recording-your-engine.md"))
    (tmp_path / "paged_check.py").write_text(printed_code("Engine", guide / "checking-an-adapter.md"))
    monkeypatch.setattr("sys.path", [*sys.path])
    done = CliRunner().invoke(main, ["check-adapter", f"{tmp_path}/paged_check.py:Engine", "--seeds", "2", "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["verdict"], found["false_findings"]) == (0, "conforms", {})
    assert set(found["not_judged"]) == {"seq_len_one_short"}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "is not MODULE:ENGINE"),
        ("no_such_module:Engine", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("no_such_module:Engine", "; run this in the engine's environment, or name its folder in PYTHONPATH"),
        ("no_such_file.py:Engine", "no_such_file.py: no such file; MODULE is a file's path, or the name of a module"),
        (f"{nano.__name__}:Nothing", "has no class or function Nothing"),
        (f"{__name__}:Raises", "RuntimeError: out of blocks"),
    ],
)
def test_the_command_refuses(target: str, message: str) -> None:
    done = CliRunner().invoke(main, ["check-adapter", target])
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output
