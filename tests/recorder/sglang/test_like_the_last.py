"""Forwards told by machine code leave the trace that the long way leaves, whatever an engine does between two of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture import frame_launch
from kvcanary.recorder.capture.device.capture import DeviceCapture
from kvcanary.recorder.capture.device.recorder import DeviceRecorder
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang import session as sglang_session
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS

from ..gpu_path.interpreted import InterpretingDriver
from .fake_engine import SLOTS, ForwardBatch, ModelRunner, Request, Scheduler, TokenToKVPoolAllocator, hooked

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no exchange of tensors by C functions",
)
ADDRESSED = ("req_pool_indices", "input_ids", "positions", "out_cache_loc")


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("serve_stop", "stop_on_sigterm"):
        monkeypatch.setattr(sglang_attachment, name, lambda stop: None, raising=False)
    monkeypatch.setattr(sglang_attachment, "not_applied", list)
    monkeypatch.setattr(sglang_session, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(frame_launch, "PREFIX_PROGRAMS", 1)
    monkeypatch.setattr(frame_launch, "TILE", 64)


class Draft(ModelRunner):
    is_draft_worker = True

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.req_to_token_pool = rows


class Engine:
    """The fake engine with a recording by the driver that interprets; `repeated` are the forwards told by machine code."""

    def __init__(
        self, patch: pytest.MonkeyPatch, folder: Any, *, machine_code: bool, draft: bool = False, **options: Any
    ) -> None:
        self.folder, self.repeated = folder, 0
        self.driver = driver = InterpretingDriver(patch)
        made, again = DeviceCapture.__init__, DeviceCapture.again

        def make(capture: DeviceCapture, *args: Any, **kwargs: Any) -> None:
            made(capture, *args, **kwargs)
            driver.install(capture, machine_code=machine_code)

        def count(capture: DeviceCapture, *told: Any) -> int:
            number = again(capture, *told)
            self.repeated += number >= 0
            return number

        patch.setattr(DeviceCapture, "__init__", make)
        patch.setattr(DeviceCapture, "again", count)
        self.attachment = hooked(patch, RecordingSettings(folder=folder, history="off", **options))
        self.runner = ModelRunner()
        self.draft: Any = Draft(self.runner.req_to_token_pool) if draft else None
        self.scheduler = Scheduler(self.runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
        self.session: Any = self.attachment._session
        assert isinstance(self.session.recorder, DeviceRecorder)

    def step(self, reqs: list[Request]) -> None:
        self.scheduler.step(reqs)
        assert not self.driver.faults
        self.session.recorder.drain()

    def close(self) -> list[dict[str, Any]]:
        """End the trace and return all that it holds, but for times."""
        self.attachment._close()
        (path,) = self.folder.glob("*.arrow")
        return [
            {name: event.scalar(name) for name in SCALARS if name not in ("time_ns", "labels")}
            | {name: event.ints(name).tolist() for name in INT_LISTS}
            | {name: event.bytes(name).tobytes() for name in BYTE_LISTS}
            for event in read_trace(path)
        ]


def disguise(rng: np.random.Generator, fields: dict[str, Any]) -> None:
    """Give a batch's tensors other types, places, strides and padding, as an engine may from one step to the next."""
    chance = rng.random()
    if chance < 0.06:
        fields["positions"] = fields["positions"].int()
    elif chance < 0.12:
        fields["out_cache_loc"] = fields["out_cache_loc"].repeat_interleave(2)[::2]
    elif chance < 0.18:
        fields["input_ids"] = torch.cat((torch.zeros(3, dtype=torch.int64), fields["input_ids"]))[3:]
    elif chance < 0.24:
        fields["req_pool_indices"] = fields["req_pool_indices"].int()
    elif chance < 0.3 and fields["forward_mode"].name == "DECODE":  # padded, as for a CUDA graph
        for name in ADDRESSED:
            fields[name] = torch.cat((fields[name], torch.zeros(1, dtype=torch.int64)))
    elif chance < 0.36:
        fields["spec_info"] = SimpleNamespace(draft_token_num=1)
    else:
        fields.update({name: fields[name].clone() for name in ADDRESSED})


def swap_rows(scheduler: Any, one: Request, other: Request) -> None:
    """Move two requests to each other's rows, with what these hold."""
    table, rows = scheduler.rows.req_to_token, [one.req_pool_idx, other.req_pool_idx]
    table[rows] = table[rows[::-1]].clone()
    one.req_pool_idx, other.req_pool_idx = rows[::-1]


def serve(patch: pytest.MonkeyPatch, engine: Engine, seed: int, steps: int) -> None:
    """Run requests that come and go, by names that come again, in batches that are mostly like the last."""
    rng = np.random.default_rng(seed)
    init_new = ForwardBatch.init_new

    def disguised(batch: Any, runner: Any) -> Any:
        disguise(rng, batch.fields)
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
            engine.session._capture.reset()
        elif chance < 0.45:
            engine.session._capture.catch_up(still=True)
        elif chance < 0.48:
            engine.runner.fail_at = engine.runner.count + 1
            with pytest.raises(RuntimeError, match="the model failed"):
                engine.scheduler.step(running[:1])
        engine.step(running[: int(rng.integers(1, 5))] if chance > 0.9 else running)
    patch.undo()


@pytest.mark.parametrize("seed", range(2))
def test_the_trace_is_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    told = {}
    for machine_code in (True, False):
        with monkeypatch.context() as patch:
            engine = Engine(patch, tmp_path / str(machine_code), machine_code=machine_code, kv_watch_every=1 + seed % 3)
            with monkeypatch.context() as inner:
                serve(inner, engine, seed, 24)
            told[machine_code] = engine.close()
            assert (engine.repeated > 3) == machine_code
    assert told[True] == told[False]
    forwards = [event for event in told[True] if event["kind"] == "forward"]
    assert len(forwards) > 15
    assert any(event["kv_change_slot"] for event in forwards)


def decoding(engine: Engine, rid: str = "r") -> Request:
    """Run a request until a forward of it has been told by machine code."""
    request = Request(rid, [3, 4, 5], 40)
    while not engine.repeated:
        engine.step([request])
    return request


def last_batch(patch: pytest.MonkeyPatch, engine: Engine, request: Request) -> Any:
    """Run one more step of a request, and return what its model was given."""
    given: list[Any] = []
    init_new = ForwardBatch.init_new
    with patch.context() as inner:
        inner.setattr(ForwardBatch, "init_new", staticmethod(lambda *told: given.append(init_new(*told)) or given[0]))
        engine.step([request])
    return given[0]


def test_a_runner_that_is_not_told_is_never_taken_for_the_last(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        engine = Engine(patch, tmp_path, machine_code=True)
        request = decoding(engine)
        batch = last_batch(patch, engine, request)
        capture = engine.session._capture
        told, other = capture.next_forward, ModelRunner()  # it came after the recording had begun
        for _ in range(3):
            other._forward_raw(batch)
        assert capture.next_forward == told
        engine.step([request])
        assert capture.next_forward == told + 1
        assert engine.session.recorder.stats().off == ""
        engine.close()


LIKE_BUT = {
    "no token ids": {"input_ids": None},
    "another mode": {"forward_mode": SimpleNamespace(name="DECODE")},  # of the name, but nobody has looked it up
    "no names": {"rids": None},
    "other requests": {"rids": ["r", "s"]},
    "a draft to be verified": {"spec_info": SimpleNamespace()},
    "one more slot": {"out_cache_loc": torch.tensor([5, 6])},
    "one more request": {"req_pool_indices": torch.tensor([1, 2])},
    "another type": {"positions": torch.tensor([5], dtype=torch.int32)},
    "a slot of floats": {"out_cache_loc": torch.tensor([5.0])},
    "two dimensions": {"positions": torch.tensor([[5]])},
    "a list": {"positions": [5]},
}


def test_what_differs_is_not_like_the_last(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        engine = Engine(patch, tmp_path, machine_code=True)
        batch = last_batch(patch, engine, decoding(engine))
        session, launches = engine.session, engine.driver.launches
        ledger = bytes(session._capture.ledger)
        for name, other in LIKE_BUT.items():
            assert session.again(SimpleNamespace(**{**vars(batch), **other})) is None, name
        assert (bytes(session._capture.ledger), engine.driver.launches) == (ledger, launches)
        ended = session.again(batch)
        assert ended is not None
        ended(None, None)
        assert engine.driver.launches == launches + 2
        session.see(Request("r", [9, 9], 4))  # the name is another request's by now
        assert session.again(batch) is None
        engine.close()


def test_a_drafts_forward_in_between_is_not_the_last(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft runs the same batch in the same mode, and its own steps in a graph, past the hook of its runner."""
    with monkeypatch.context() as patch:
        patch.setattr(sglang_attachment, "register_drafts", lambda attachment: [])
        engine = Engine(patch, tmp_path, machine_code=True, draft=True)
        request = decoding(engine)
        batch = last_batch(patch, engine, request)
        session, repeated = engine.session, engine.repeated
        draft = engine.draft
        for _ in range(2):
            draft._forward_raw(batch)
        assert engine.repeated == repeated
        engine.step([request])
        assert engine.repeated == repeated
        engine.step([request])
        assert engine.repeated == repeated + 1
        session.before_model(session.layout.runners[id(draft)], batch, 1)
        session.after_model(None, None)
        assert session.again(batch) is None
        runners = [event["runner"] for event in engine.close() if event["kind"] == "forward"]
        assert runners[-5:] == [1, 1, 0, 0, 1]
