"""Recurrent state where the engine runs on a GPU: slots and bytes as the model gets them, in a graph too (in the interpreter)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.state.recurrent import CLEAR, COPY, STEP
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from . import test_inside
from .fake_engine import DECODE, SLOTS, Request, RowPool, Scheduler, TokenToKVPoolAllocator, hooked
from .test_inside import Graphs, Model, Runner, TritonAttnBackend, monkeypatch_raw

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

_small_kernels_on_a_gpu = test_inside._small_kernels_on_a_gpu
STATES = 12
PER_ROW = 1  # a row's slot of states is its number and this


class MambaPool:
    """Two layers of states: a convolution's window and a matrix."""

    def __init__(self) -> None:
        self.mamba_layer_ids = [0, 3]
        self.mamba_cache = SimpleNamespace(conv=[torch.zeros(2, STATES, 3, 2)], temporal=torch.zeros(2, STATES, 5))

    def _parts(self) -> list[Any]:
        return [*self.mamba_cache.conv, self.mamba_cache.temporal]

    def copy_from(self, src_indices: Any, dst_indices: Any) -> None:
        for part in self._parts():
            part[:, dst_indices] = part[:, src_indices]

    def clear_slots(self, indices: Any) -> None:
        for part in self._parts():
            part[:, indices] = 0


class HybridReqToTokenPool(RowPool):
    """Has the states beside its rows."""

    mamba_pool: Any


class Backend(TritonAttnBackend):
    """Says beside it which slots the recurrent layers get, a graph's in a tensor of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slots = torch.full((width,), -1, dtype=torch.int32)
        self.linear_attn_backend = SimpleNamespace(forward_metadata=SimpleNamespace(mamba_cache_indices=self.slots))

    def prepare(self, table: Any, batch: Any, lens: Any, *, graph: bool) -> None:
        rows = batch.req_pool_indices
        slots = torch.where(rows > 0, rows + PER_ROW, -1).int()
        if graph:
            self.slots.copy_(slots)
            slots = self.slots
        self.linear_attn_backend.forward_metadata = SimpleNamespace(mamba_cache_indices=slots)
        super().prepare(table, batch, lens, graph=graph)


class RecurrentModel(Model):
    def __init__(self, runner: Any) -> None:
        super().__init__(runner.token_to_kv_pool)
        self.runner = runner

    def forward(self, input_ids: Any, positions: Any, batch: Any) -> None:
        states = self.runner.req_to_token_pool.mamba_pool._parts()
        slots = self.runner.attn_backend.linear_attn_backend.forward_metadata.mamba_cache_indices

        def compute() -> None:
            for slot in slots.tolist():
                for part in states if slot >= 0 else ():
                    part[:, slot] = part[:, slot] * 0.5 + 1 + slot

        if Graphs.capturing is not None:
            Graphs.capturing.append(compute)
        compute()
        super().forward(input_ids, positions, batch)


class RecurrentRunner(Runner):
    def load_model(self, attachment: Any) -> None:
        def load(_: Any) -> None:
            self.model = RecurrentModel(self)

        self.req_to_token_pool: Any = HybridReqToTokenPool()
        self.req_to_token_pool.mamba_pool = MambaPool()
        self.attn_backend = Backend(self.width)
        self.hook(attachment, "load", load)(self)

    def _forward_raw(self, batch: Any) -> torch.Tensor:
        if batch.forward_mode is not DECODE:
            self.req_to_token_pool.mamba_pool.clear_slots(batch.req_pool_indices + PER_ROW)
        return super()._forward_raw(batch)


def serve(monkeypatch: pytest.MonkeyPatch, folder: Any, *, width: int, before: Any = lambda step, pool: None) -> Any:
    """Run three requests, with `before` called before each step; return the replay and the ops of each forward."""
    attachment = hooked(monkeypatch, RecordingSettings(folder=folder, history="off"))
    monkeypatch_raw(monkeypatch, attachment)
    runner = RecurrentRunner(attachment, width=width)
    scheduler = Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
    recording: Any = attachment.recording
    assert recording.states is not None
    requests = [Request(f"r{i}", [i + 3, i + 5, 40, 41 + i], new_tokens=3 + 2 * i) for i in range(3)]
    steps = 0
    for request in requests:
        before(steps, runner.req_to_token_pool.mamba_pool)
        scheduler.step([request])
        steps += 1
    while running := [request for request in requests if not request.finished()]:
        before(steps, runner.req_to_token_pool.mamba_pool)
        scheduler.step(running)
        steps += 1
    attachment.close()
    (path,) = folder.glob("*.arrow")
    forwards = [event for event in read_trace(path) if event.kind == "forward"]
    ops = [list(zip(*(event.ints(f"recurrent_{name}").tolist() for name in NAMES), strict=True)) for event in forwards]
    report = replay(path, settings=ReplaySettings(), report=None)
    return report, ops


NAMES = ("op", "source", "slot")


@pytest.mark.parametrize("width", [0, 3, 4])
def test_what_the_layers_read_and_write_is_taken_down(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    report, ops = serve(monkeypatch, tmp_path, width=width)
    assert report.verdict.value == "clean"
    assert not report.findings_by_kind.get("state_differs")
    assert (
        not any("MambaPool" in one for one in report.not_watched_names)
        if hasattr(report, "not_watched_names")
        else True
    )
    for slot, begun in zip((2, 3, 4), ops, strict=False):
        assert begun == [(CLEAR, -1, slot), (STEP, -1, slot)]
    assert ops[3] == [(STEP, slot, slot) for slot in (2, 3, 4)]
    assert len(ops) == 9


@pytest.mark.parametrize("width", [0, 4])
def test_a_state_that_is_changed_between_two_forwards_is_found(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    def damage(step: int, pool: Any) -> None:
        if step == 5:
            pool.mamba_cache.temporal[0, 4, 3] += 1

    report, _ = serve(monkeypatch, tmp_path, width=width, before=damage)
    assert report.verdict.value == "corrupt"
    assert report.findings_by_kind["state_differs"] == 1


@pytest.mark.parametrize("width", [0, 4])
def test_a_checkpoint_of_another_is_found_and_ones_own_is_not(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    def restore(kept: int) -> Any:
        def copies(step: int, pool: Any) -> None:
            if step == 4:
                pool.copy_from(torch.tensor([kept]), torch.tensor([9]))
                pool.copy_from(torch.tensor([9]), torch.tensor([3]))

        return copies

    report, ops = serve(monkeypatch, tmp_path / "own", width=width, before=restore(3))
    assert ops[4][:2] == [(COPY, 3, 9), (COPY, 9, 3)]
    assert report.verdict.value == "clean"
    report, _ = serve(monkeypatch, tmp_path / "other", width=width, before=restore(4))
    assert report.findings_by_kind["state_differs"] >= 1


def test_after_a_copy_that_failed_nothing_is_judged(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: int, pool: Any) -> None:
        if step == 4:
            with pytest.raises(IndexError):
                pool.copy_from(torch.tensor([4]), torch.tensor([STATES]))
            pool.mamba_cache.temporal[0, 3] += 1

    report, ops = serve(monkeypatch, tmp_path, width=4, before=fails)
    assert not report.findings_by_kind.get("state_differs")
    assert any(op == STEP for op, *_ in ops[3])
    assert not any(op == STEP for op, *_ in ops[4])
