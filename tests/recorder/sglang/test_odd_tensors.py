"""Whatever types, places and strides an engine's tensors have, and whatever it does between two forwards, one trace."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.recorder.capture.device.recorder import DeviceRecorder
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.process.environment import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS

from .fake_engine import SLOTS, ForwardBatch, ModelRunner, Request, Scheduler, TokenToKVPoolAllocator, hooked

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

ADDRESSED = ("req_pool_indices", "input_ids", "positions", "out_cache_loc")


@pytest.fixture(autouse=True)
def _small_kernels_on_a_gpu(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_forward, "PROGRAMS", 3)
    monkeypatch.setattr(model_forward, "TILE", 64)


class Draft(ModelRunner):
    is_draft_worker = True

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.req_to_token_pool = rows


class Engine:
    """The fake engine, recorded as if on a GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Any, *, draft: bool = False, **options: Any) -> None:
        self.folder = folder
        self.attachment = hooked(patch, RecordingSettings(folder=folder, history="off", **options))
        self.runner = ModelRunner()
        self.draft: Any = Draft(self.runner.req_to_token_pool) if draft else None
        self.scheduler = Scheduler(self.runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
        self.session: Any = self.attachment.recording
        self.capture: Any = self.session.recorder.capture
        assert isinstance(self.session.recorder, DeviceRecorder)

    def step(self, reqs: list[Request]) -> None:
        self.scheduler.step(reqs)
        self.session.recorder.drain()

    def close(self) -> list[dict[str, Any]]:
        """End the trace and return all that it holds, but for times."""
        self.attachment.close()
        (path,) = self.folder.glob("*.arrow")
        return [
            {name: event.scalar(name) for name in SCALARS if name not in ("time_ns", "labels")}
            | {name: event.ints(name).tolist() for name in INT_LISTS}
            | {name: event.bytes(name).tobytes() for name in BYTE_LISTS}
            for event in read_trace(path)
        ]


def disguise(rng: np.random.Generator, fields: dict[str, Any]) -> None:
    """Give a batch's tensors other types, places and strides, as an engine may from one step to the next."""
    chance = rng.random()
    if chance < 0.06:
        fields["positions"] = fields["positions"].int()
    elif chance < 0.12:
        fields["out_cache_loc"] = fields["out_cache_loc"].repeat_interleave(2)[::2]
    elif chance < 0.18:
        fields["input_ids"] = torch.cat((torch.zeros(3, dtype=torch.int64), fields["input_ids"]))[3:]
    elif chance < 0.24:
        fields["req_pool_indices"] = fields["req_pool_indices"].int()
    elif chance < 0.36:
        fields["spec_info"] = SimpleNamespace(draft_token_num=1)
    else:
        fields.update({name: fields[name].clone() for name in ADDRESSED})


def swap_rows(scheduler: Any, one: Request, other: Request) -> None:
    """Move two requests to each other's rows, with what these hold."""
    table, rows = scheduler.rows.req_to_token, [one.req_pool_idx, other.req_pool_idx]
    table[rows] = table[rows[::-1]].clone()
    one.req_pool_idx, other.req_pool_idx = rows[::-1]


def serve(patch: pytest.MonkeyPatch, engine: Engine, seed: int, steps: int, *, odd: bool) -> None:
    """Run requests that come and go, by names that come again, in batches that are mostly like the last."""
    rng, disguises = np.random.default_rng(seed), np.random.default_rng(seed)
    init_new = ForwardBatch.init_new

    def disguised(batch: Any, runner: Any) -> Any:
        if odd:
            disguise(disguises, batch.fields)
        return init_new(batch, runner)

    patch.setattr(ForwardBatch, "init_new", staticmethod(disguised))
    running: list[Request] = []
    count = 0
    for _ in range(steps):
        running = [request for request in running if not request.finished()]
        chance = rng.random()
        if not running or (chance < 0.12 and len(running) < 3):
            name = f"r{next(i for i in range(9) if f'r{i}' not in [r.rid for r in running])}"
            request = Request(name, rng.integers(1, 97, int(rng.integers(2, 6))).tolist(), int(rng.integers(2, 24)))
            count += 1
            engine.step([request])
            running.append(request)
            continue
        if chance < 0.22:
            rng.shuffle(running)  # type: ignore[arg-type]  # numpy takes any list
        elif chance < 0.29 and len(running) > 1:
            swap_rows(engine.scheduler, *running[:2])
        elif chance < 0.36:  # what nobody wrote
            slot = engine.scheduler.rows.req_to_token[running[0].req_pool_idx, 1]
            engine.runner.token_to_kv_pool.k_buffer[0][slot] += 1
        elif chance < 0.24:
            engine.capture.reset()
        elif chance < 0.45:
            engine.capture.catch_up(still=True)
        elif chance < 0.48:
            engine.runner.fail_at = engine.runner.count + 1
            with pytest.raises(RuntimeError, match="the model failed"):
                engine.scheduler.step(running[:1])
        engine.step(running[: int(rng.integers(1, 5))] if chance > 0.9 else running)
    patch.undo()


@pytest.mark.parametrize("seed", range(2))
def test_the_trace_is_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    found = {}
    for odd in (True, False):
        with monkeypatch.context() as patch:
            engine = Engine(patch, tmp_path / str(odd), kv_watch_every=1 + seed % 3)
            with monkeypatch.context() as inner:
                serve(inner, engine, seed, 24, odd=odd)
            found[odd] = engine.close()
    assert found[True] == found[False]
    forwards = [event for event in found[True] if event["kind"] == "forward"]
    assert len(forwards) > 15
    assert any(event["kv_change_slot"] for event in forwards)


def last_batch(patch: pytest.MonkeyPatch, engine: Engine, request: Request) -> Any:
    """Run one more step of a request, and return what its model was given."""
    given: list[Any] = []
    init_new = ForwardBatch.init_new
    with patch.context() as inner:
        inner.setattr(ForwardBatch, "init_new", staticmethod(lambda *told: given.append(init_new(*told)) or given[0]))
        engine.step([request])
    return given[0]


def test_a_runner_that_is_not_recorded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = Engine(monkeypatch, tmp_path), Request("r", [3, 4, 5], 40)
    engine.step([request])
    batch = last_batch(monkeypatch, engine, request)
    before, other = engine.capture.next_forward, ModelRunner()  # it came after the recording had begun
    for _ in range(3):
        other._forward_raw(batch)
    assert engine.capture.next_forward == before
    engine.step([request])
    assert engine.capture.next_forward == before + 1
    assert engine.session.recorder.stats().off == ""
    engine.close()


def test_a_drafts_forward_in_between(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft runs the same batch in the same mode, and its own steps in a graph, past the hook of its runner."""
    monkeypatch.setattr(sglang_attachment, "register_drafts", lambda attachment: [])
    engine, request = Engine(monkeypatch, tmp_path, draft=True), Request("r", [3, 4, 5], 40)
    engine.step([request])
    batch = last_batch(monkeypatch, engine, request)
    for _ in range(2):
        engine.draft._forward_raw(batch)
    engine.step([request])
    engine.step([request])
    engine.session.before_model(engine.session.layout.runners[id(engine.draft)], batch, 1)
    engine.session.after_model(None, None)
    runners = [event["runner"] for event in engine.close() if event["kind"] == "forward"]
    assert runners[-5:] == [1, 1, 0, 0, 1]
