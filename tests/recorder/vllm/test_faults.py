"""A broken engine of vLLM's shape is found out; a broken recorder leaves the engine alone."""

import json
import logging
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.vllm import attachment as vllm_attachment
from kvcanary.recorder.engines.vllm.blocks import BlockHistory
from kvcanary.recorder.engines.vllm.hooks import PROCESSES, hook_module
from kvcanary.recorder.engines.vllm.recording import VllmRecording
from kvcanary.recorder.engines.vllm.results import StepResults
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from ...support.one_trace import events, verdict
from .fake_engine import (
    BLOCK,
    GPUModelRunner,
    hooked,
    serve,
)

pytestmark = pytest.mark.usefixtures("process_goes_on")


# Faults of the engine


def corrupt(kind: str, done: list[dict[str, Any]]) -> Any:
    """Return a hook for `serve` that breaks something once, in the step in which three requests decode."""

    def each_step(runner: GPUModelRunner, scheduler: Any, output: Any) -> None:
        if done or len(output.num_scheduled_tokens) < 3 or set(output.num_scheduled_tokens.values()) != {1}:
            return
        victim, other = list(output.num_scheduled_tokens)[:2]
        if kind == "table":
            tables = runner.requests[victim].blocks[0], runner.requests[other].blocks[0]
            done.append({"request": victim, "slot": tables[1][-1] * BLOCK, "right": tables[0][0]})
            tables[0][0] = tables[1][-1]
        elif kind == "token":
            runner.requests[victim].tokens[-1] += 1
            done.append({"request": victim})
        elif kind == "bytes":
            slot = runner.requests[victim].blocks[0][0] * BLOCK + 1
            both = runner.kv.view(-1, 2, 2 * BLOCK, 8)
            both[slot // BLOCK, 0, BLOCK + slot % BLOCK].view(torch.uint8)[3] ^= 0xFF
            done.append({"request": victim, "slot": slot})

    return each_step


@pytest.mark.parametrize("use_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["table", "token", "bytes"])
def test_a_broken_engine_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, use_async: bool
) -> None:
    done: list[dict[str, Any]] = []
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(each_step=corrupt(kind, done), use_async=use_async)
    assert done
    (path,) = tmp_path.glob("*.arrow")
    report = tmp_path / "report"
    report.mkdir()
    summary = replay(path, settings=ReplaySettings(), report=report)
    assert summary.verdict.value == "corrupt"
    import pyarrow.parquet as pq

    rows = (
        pq.read_table(report / "violations.parquet").to_pylist()
        + pq.read_table(report / "findings.parquet").to_pylist()
    )
    mine = [row for row in rows if row["request"] == done[0]["request"]]
    assert mine
    if "slot" in done[0]:
        assert any(row["slot"] == done[0]["slot"] for row in mine)
    json.dumps(done)


# Faults of the recorder


@pytest.mark.parametrize(
    ("owner", "name", "ends_it", "use_async"),
    [
        (VllmRecording, "begin_step", True, False),
        (VllmRecording, "before_model", True, True),
        (VllmRecording, "after_model", True, False),
        (VllmRecording, "took_result", False, False),
        (StepResults, "sampled", False, True),
        (VllmRecording, "left", False, False),
        (BlockHistory, "record", False, True),
        (BlockHistory, "freed", False, False),
        (BlockHistory, "after_forward", False, False),
    ],
)
def test_a_fault_in_a_hook_leaves_the_engine_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
    ends_it: bool,
    use_async: bool,
) -> None:
    expected = serve(use_async=use_async)
    before = set(threading.enumerate())  # another test may have left a recorder behind
    calls: list[int] = []
    original = getattr(owner, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, fail)
    caplog.set_level(logging.ERROR, "kvcanary")
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    assert serve(use_async=use_async) == expected
    logged = [entry.getMessage() for entry in caplog.records if entry.name == "kvcanary"]
    assert logged
    assert all("injected" in message for message in logged)
    assert len(logged) == len(set(logged)), "each failing hook is logged once"
    for thread in set(threading.enumerate()) - before:
        if thread.name == "kvcanary-writer":
            thread.join(60)  # a recording that is off has ended its trace by itself
    summary = verdict(tmp_path)
    assert summary.complete
    assert summary.verdict.value == "inconclusive", "what is missing is never called clean"
    _, told = events(tmp_path)
    assert (sum(event.kind == "forward" for event in told) < 10) == ends_it


def test_a_folder_that_cannot_be_made_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = serve()
    blocked = tmp_path / "a file"
    blocked.write_text("")
    caplog.set_level(logging.ERROR, "kvcanary")
    hooked(monkeypatch, RecordingSettings(folder=blocked / "traces"))
    assert serve() == expected
    assert len([entry for entry in caplog.records if "not recording" in entry.getMessage()]) == 1


def test_two_engines_of_a_process_have_a_trace_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    serve()
    paths = sorted(tmp_path.glob("*.arrow"))
    assert len(paths) == 2
    assert [replay(path, settings=ReplaySettings(), report=None).verdict.value for path in paths] == ["clean"] * 2


def test_who_is_about_to_be_killed_ends_its_trace_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    monkeypatch.setattr(vllm_attachment, "stop_tree", lambda pid: happened.append(f"stopped {pid}"))
    module = ModuleType(PROCESSES)
    module.kill_process_tree = happened.append  # type: ignore[attr-defined]
    hook_module(module, vllm_attachment.VllmAttachment(RecordingSettings(folder=tmp_path)))
    module.kill_process_tree(77)
    assert happened == ["stopped 77", 77]
