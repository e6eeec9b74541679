"""The adapter where the engine's tensors lie on a GPU: here they do not, and the kernels run in Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.kernels.capture.model_forward import ModelForward
from kvcanary.recorder.capture.device.recorder import DeviceRecorder
from kvcanary.recorder.engines.sglang import opening as sglang_opening
from kvcanary.recorder.engines.sglang import recording as sglang_recording
from kvcanary.recorder.engines.sglang.forward import DeviceForwards
from kvcanary.recorder.engines.sglang.requests import KnownBatch
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from . import fake_engine
from .fake_engine import ModelRunner, hooked, serve


@pytest.fixture(autouse=True)
def _small_kernels_on_a_gpu(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_forward, "PROGRAMS", 4)
    monkeypatch.setattr(model_forward, "TILE", 32)


def record(monkeypatch: pytest.MonkeyPatch, folder: Any, **settings: Any) -> tuple[Any, list[list[int]]]:
    attachment = hooked(monkeypatch, RecordingSettings(folder=folder, **settings))
    output, _ = serve()
    return attachment, output


def test_it_replays_clean_and_generates_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = serve()
    attachment, output = record(monkeypatch, tmp_path)
    assert output == expected
    session = attachment.recording
    assert isinstance(session.recorder, DeviceRecorder)
    attachment.close()
    (path,) = tmp_path.glob("*.arrow")
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert (summary.verdict.value, summary.forwards, summary.tokens) == ("clean", 12, 4 * 4 + 2 + 4 + 6 + 8)
    told = list(read_trace(path))
    times = [int(event.scalar("time_ns")) for event in told]
    assert times == sorted(times)
    (cost,) = [event.scalar("labels") for event in told if event.kind == "mark"]
    assert '"forwards": 12' in cost
    assert '"device_bytes"' in cost


def test_it_tells_what_the_other_path_tells(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path / "device"))
    serve()
    attachment.close()
    for module in (sglang_opening, sglang_recording):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: False)
    attachment, _ = record(monkeypatch, tmp_path / "host")
    attachment.close()
    device, host = (list(read_trace(next((tmp_path / side).glob("*.arrow")))) for side in ("device", "host"))
    assert [event.kind for event in device] == [event.kind for event in host]
    assert {"alloc", "free"} <= {event.kind for event in device}
    for found, told in zip(device, host, strict=True):
        if found.kind == "mark":
            continue
        for name in ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "truth_lens", "input_ids"):
            assert found.ints(name).tolist() == told.ints(name).tolist()
        for name in ("positions", "out_cache_loc", "sampled_tokens", "sampled_lens", "slot_start", "slot_count"):
            assert found.ints(name).tolist() == told.ints(name).tolist()
        assert found.scalar("name") == told.scalar("name")
        assert found.bytes("kv_bytes").tobytes() == told.bytes("kv_bytes").tobytes()


def test_of_a_tree_of_drafts_it_tells_what_the_other_path_tells(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine.drafts_in_trees(monkeypatch)
    told = []
    for on_device in (True, False):
        for module in (sglang_opening, sglang_recording):
            monkeypatch.setattr(module, "on_gpu", lambda tensor, said=on_device: said)
        attachment, _ = record(monkeypatch, tmp_path / str(on_device))
        assert isinstance(attachment.recording.recorder, DeviceRecorder) is on_device
        attachment.close()
        (path,) = (tmp_path / str(on_device)).glob("*.arrow")
        summary = replay(path, settings=ReplaySettings(), report=None)
        assert (summary.verdict.value, summary.losses) == ("clean", [])
        filled = [event for event in read_trace(path) if event.scalar("note") == "a tree of drafts"]
        told.append(
            [(event.kind, event.ints("slot_start").tolist(), event.ints("slot_count").tolist()) for event in filled]
        )
    assert told[0] == told[1]
    assert {kind for kind, _, _ in told[0]} >= {"transfer", "alloc"}


def test_a_fault_switches_it_off_and_the_engine_goes_on(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = serve()
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path, history="off"))
    calls: list[Any] = []
    launch = ModelForward.end

    def fails(self: ModelForward) -> None:
        calls.append(attachment.recording)  # of which the attachment lets go when this fails
        if calls[-1] is not None and sum(call is not None for call in calls) == 6:
            raise RuntimeError("no more device memory")
        launch(self)

    monkeypatch.setattr(ModelForward, "end", fails)
    output, _ = serve()
    assert output == expected
    assert sum(call is not None for call in calls) == 6
    calls[-1].recorder.close()
    assert [record.message for record in caplog.records if "switched itself off" in record.message]
    (path,) = tmp_path.glob("*.arrow")
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict.value == "inconclusive"
    assert 0 < summary.forwards < 12


def test_no_kernel_gets_the_address_of_a_tensor_that_is_elsewhere() -> None:
    launched: list[Any] = []
    runner: Any = SimpleNamespace(index=0, fed=None)
    frames = SimpleNamespace(get_device=lambda: 0, device="cuda:0")
    forwards = DeviceForwards(SimpleNamespace(before=lambda *told: launched.append(told) or 7, frames=frames))
    here = torch.zeros(2, dtype=torch.int64)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(name="DECODE"),
        **dict.fromkeys(("req_pool_indices", "input_ids", "positions", "out_cache_loc"), here),
    )
    with pytest.raises(ValueError, match="a tensor of the batch is on cpu, the tables on cuda:0"):
        forwards.record(runner, batch, KnownBatch, b"")
    assert not launched
    frames.get_device = lambda: -1
    assert (
        DeviceForwards(SimpleNamespace(before=forwards.before, frames=frames)).record(runner, batch, KnownBatch, b"")
        == 7
    )


def test_a_frame_that_cannot_be_read_leaves_the_engine_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcanary.recorder.capture.device.frame_reader import FrameReader

    expected, _ = serve()
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path, history="off"))

    def out_of_pinned_memory(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(FrameReader, "read", out_of_pinned_memory)
    output, _ = serve()
    assert output == expected
    attachment.close()
    (path,) = tmp_path.glob("*.arrow")
    assert replay(path, settings=ReplaySettings(), report=None).verdict.value == "inconclusive"


def test_a_list_that_the_scheduler_replaces_is_looked_up_again(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment, _ = record(monkeypatch, tmp_path, history="off")
    batches = attachment.recording.batches
    req = batches.last.requests[0].req
    attachment.recording.see(req)  # it was over
    args = ([req.rid], 1)
    last = batches.of(*args)
    batches.refresh()
    assert batches.of(*args) is last
    known = last.truth[0]
    for name in ("output_ids", "origin_input_ids"):
        setattr(req, name, list(getattr(req, name)))
        batches.refresh()
        found = batches.of(*args)
        assert found is not last
        again = found.truth[0]
        assert again is not known
        assert again.tokens(2, 7).tolist() == known.tokens(2, 7).tolist() == [*known.prompt, *known.output][2:7]
        known, last = again, found
    attachment.close()
    assert np.array_equal(last.known_lens, [4] * last.rows)
    assert ModelRunner.is_draft_worker is False
