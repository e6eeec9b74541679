"""`PagedRecorder` over pools on a GPU: `pytest tests/device`, on a machine that has one; not part of `make test`."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcanary.recorder.capture.paged import PagedRecorder
from kvcanary.recorder.trace.header import EngineInfo
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS
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
    answers, summary, _ = recorded(tmp_path / "there.arrow", on_gpu(Llm()), all_layers=True)
    assert summary.verdict.value == "clean", (summary.violations_by_reason, summary.findings_by_kind, summary.doubts)
    assert recorded(tmp_path / "here.arrow", Llm())[0] == answers
    there, here = (list(read_trace(tmp_path / f"{name}.arrow")) for name in ("there", "here"))
    assert [event.kind for event in there] == [event.kind for event in here]
    for one, other in zip(there, here, strict=True):
        assert {name for name in INT_LISTS if one.ints(name).tobytes() != other.ints(name).tobytes()} == set()
        assert {name for name in BYTE_LISTS if one.bytes(name).tobytes() != other.bytes(name).tobytes()} == set()


@pytest.mark.parametrize("spoil", ["bad_values", "layer_changed"])
def test_a_late_layer_is_looked_at(tmp_path: Path, spoil: str) -> None:
    found = recorded(tmp_path / "trace.arrow", on_gpu(Llm()), spoil, all_layers=True)[1]
    assert {*found.findings_by_kind} == {spoil}
    blind = recorded(tmp_path / "blind.arrow", on_gpu(Llm()), spoil)[1]
    assert not blind.findings_by_kind


def test_what_it_costs(tmp_path: Path) -> None:
    """Printed, not judged: `-s` shows it. The shape of Llama 3 8B, 32 requests that decode behind 1,000 tokens each."""
    layers, heads, dim, block, requests, length = 32, 8, 128, 16, 32, 1024
    pool = torch.randn(2, layers, requests * length // block, block, heads, dim, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(requests * length // block, device="cuda").view(requests, -1)
    took: dict[str, list[float]] = {}
    for name in ("first layer", "all layers", "first layer", "all layers"):
        recorder = PagedRecorder(
            tmp_path / "trace.arrow",
            engine=EngineInfo(name="paged"),
            keys=dict(enumerate(pool[0])),
            values=dict(enumerate(pool[1])),
            watched=[0],
            all_layers=name == "all layers",
            axes="block slot head dim",
            block_size=block,
            max_requests=requests,
            max_len=length,
            overwrite=True,
            strict=True,
        )
        for step in range(30):
            prefix = [969 + step] * requests if step else [0] * requests
            extend = [1] * requests if step else [970] * requests
            positions = torch.cat([torch.arange(p, p + n, device="cuda") for p, n in zip(prefix, extend, strict=True)])
            row = torch.arange(requests, device="cuda").repeat_interleave(torch.tensor(extend, device="cuda"))
            slots = table[row, positions // block] * block + positions % block
            torch.cuda.synchronize()
            begin = time.perf_counter()
            recorder.before_step(
                requests=list(range(requests)),
                prefix_lens=prefix,
                extend_lens=extend,
                input_ids=positions,
                positions=positions,
                slots=slots,
                block_tables=table,
            )
            recorder.after_forward()
            if step > 5:
                took.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))
        recorder.close()
    print({name: f"{statistics.median(times):.2f} ms a step" for name, times in took.items()})


if not torch.cuda.is_available():
    pytestmark = pytest.mark.skip("no GPU")
