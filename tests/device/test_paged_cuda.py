"""`PagedRecorder` over pools on a GPU: `pytest tests/device`, on a machine that has one; not part of `make test`."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..recorder.test_paged import serve
from ..support.engines.nano import CONTEXT, DIM, HEADS, Llm, attach


def on_gpu(llm: Llm) -> Llm:
    """Have an engine's pool on the device; what it is fed stays on the host."""
    runner = llm.model_runner
    run_model, here = runner.run_model, runner.kv_cache
    runner.kv_cache = here.cuda()

    def copied(*args: Any) -> list[int]:
        there, runner.kv_cache = runner.kv_cache, here
        here.copy_(there)
        tokens = run_model(*args)
        there.copy_(here)
        runner.kv_cache = there
        return tokens

    runner.run_model = copied  # type: ignore[method-assign]
    return llm


def recorded(path: Path, llm: Llm, spoil: str = "", **options: Any) -> tuple[list[list[int]], Any, float]:
    """Run an engine; return what it answered, the verdict, and the seconds that it took."""
    run_model = llm.model_runner.run_model

    def spoilt(*args: Any) -> list[int]:
        tokens = run_model(*args)
        if spoil == "bad_values" and recorder.next_forward == 9:
            llm.model_runner.kv_cache[1, 1].view(-1, HEADS * DIM)[int(CONTEXT.slot_mapping[-1])] = 0
        return tokens

    def before_step(_: int) -> None:
        if spoil == "layer_changed" and recorder.next_forward == 9:
            llm.model_runner.kv_cache[1, 1].add_(1.0)

    llm.model_runner.run_model = spoilt  # type: ignore[method-assign]
    recorder = attach(llm, path, strict=True, **options)
    begin = time.perf_counter()
    answers = serve(llm, 1, before_step)
    took = time.perf_counter() - begin
    recorder.close()
    return answers, replay(path, settings=ReplaySettings(), report=None), took


def test_the_trace_is_that_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _: 7)
    answers, summary, _ = recorded(tmp_path / "there.arrow", on_gpu(Llm()))
    assert summary.verdict.value == "clean", (summary.violations_by_reason, summary.findings_by_kind, summary.doubts)
    assert recorded(tmp_path / "here.arrow", Llm())[0] == answers
    there, here = (list(read_trace(tmp_path / f"{name}.arrow")) for name in ("there", "here"))
    assert [event.kind for event in there] == [event.kind for event in here]
    for one, other in zip(there, here, strict=True):
        for name in ("kv_bytes", "kv_change_bytes", "out_cache_loc"):
            lists = one.bytes if name.endswith("bytes") else one.ints
            others = other.bytes if name.endswith("bytes") else other.ints
            assert (name in lists) == (name in others)
            assert name not in lists or (lists[name] == others[name]).all()


@pytest.mark.parametrize("spoil", ["bad_values", "layer_changed"])
def test_a_late_layer_is_looked_at(tmp_path: Path, spoil: str) -> None:
    found = recorded(tmp_path / "trace.arrow", on_gpu(Llm()), spoil)[1]
    assert {*found.findings_by_kind} == {spoil}
    blind = recorded(tmp_path / "blind.arrow", on_gpu(Llm()), spoil, all_layers=False)[1]
    assert not blind.findings_by_kind


def test_what_it_costs(tmp_path: Path) -> None:
    """Printed, not judged: `-s` shows it."""
    for turn in range(3):
        for all_layers in (True, False):
            took = recorded(tmp_path / f"{turn}{all_layers}.arrow", on_gpu(Llm()), all_layers=all_layers)[2]
            print(f"all layers {all_layers}: {took:.3f} s")


if not torch.cuda.is_available():
    pytestmark = pytest.mark.skip("no GPU")
