"""An engine of vLLM's shape whose steps the device's kernels capture, here in Triton's interpreter: nobody waits for it."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvcanary.analysis.incidents.finding import find_incidents
from kvcanary.recorder.capture.device.recorder import DeviceRecorder
from kvcanary.recorder.engines.vllm import recording
from kvcanary.recorder.engines.vllm.attention.rotary import FedPositions
from kvcanary.recorder.engines.vllm.device import why_it_waits
from kvcanary.recorder.engines.vllm.identity import Identities
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.schema import ATTENTION_LENS, ATTENTION_SLOTS
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ...support.one_trace import events, verdict
from . import fake_engine
from .fake_engine import BLOCK, DIM, FullAttentionSpec, SlidingWindowSpec, hooked, serve
from .gpu_stand_in import COLUMNS, pass_for_gpu, table_cells

pytestmark = pytest.mark.usefixtures("process_goes_on")

SHAPES = {
    "full": {},
    "few blocks": {"num_blocks": 14},
    "async": {"use_async": True, "budget": 40},
    "async, few blocks": {"use_async": True, "num_blocks": 14},
    "hybrid": {"specs": [FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec()], "num_blocks": 60},
}


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_for_gpu(monkeypatch)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("shape", "v2"),
    [("full", False), ("few blocks", True), ("async", True), ("async, few blocks", False), ("hybrid", True)],
)
def test_it_is_recorded_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, v2: bool) -> None:
    expected = serve(**SHAPES[shape], v2=v2)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path, sweep_every=3), v2=v2)
    assert serve(**SHAPES[shape], v2=v2) == expected
    assert not attachment.off
    summary = verdict(tmp_path)
    assert (summary.verdict.value, summary.complete, summary.requests) == ("clean", True, 6)
    header, told = events(tmp_path)
    assert not any("waits" in note for note in header.notes)
    assert header.slot_history == "complete"
    kinds = Counter(event.kind for event in told)
    assert kinds["alloc"]
    assert kinds["free"]
    assert kinds["sweep"]
    forwards = [event for event in told if event.kind == "forward"]
    assert all(event.scalar("attention_watched") == ATTENTION_LENS | ATTENTION_SLOTS for event in forwards)
    assert all(event.scalar("kv_watched") for event in forwards)


def test_both_recorders_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, cells = {}, {}
    for device in (True, False):
        monkeypatch.setattr(recording, "on_gpu", lambda _, device=device: device)
        folder = tmp_path / str(device)
        with pytest.MonkeyPatch.context() as patch:
            attachment = hooked(patch, RecordingSettings(folder=folder))
            serve(specs=[FullAttentionSpec(), SlidingWindowSpec()], num_blocks=26, budget=40)
            assert not attachment.off
        # Of a step that is recorded as several forwards, the device puts all table entries into the first.
        cells[device] = Counter(cell for event in events(folder)[1] for cell in table_cells(event))
        found[device] = [
            {name: event.ints(name).tolist() for name in COLUMNS} | {"content": event.bytes("kv_bytes").tobytes()}
            for event in events(folder)[1]
            if event.kind == "forward"
        ]
    assert len(found[True]) == len(found[False])
    for mine, other in zip(found[True], found[False], strict=True):
        assert mine == other
    assert cells[True] == cells[False]
    assert len(cells[True]) > 20


def test_both_recorders_say_which_requests_anothers_adapter_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, steps, begin = fake_engine.GPUModelRunner.prepare, [0], Identities.begin

    def begins(self: Any, known: Any, request: Any) -> None:
        request.lora_request = None
        begin(self, known, request)

    def prepares(self: Any, output: Any) -> Any:
        steps[0] += 1
        adapters = [
            5 * (name in ("r1", "r4") and steps[0] % 3 == 0)
            for name, count in output.num_scheduled_tokens.items()
            for _ in range(count)
        ]
        self._set_active_loras((), tuple(adapters), ())
        return prepare(self, output)

    monkeypatch.setattr(Identities, "begin", begins)
    monkeypatch.setattr(fake_engine.GPUModelRunner, "prepare", prepares)
    monkeypatch.setattr(fake_engine.GPUModelRunner, "_set_active_loras", lambda *_: None, raising=False)
    monkeypatch.setattr(fake_engine.GPUModelRunner, "lora_manager", SimpleNamespace(), raising=False)
    found = []
    for device in (True, False):
        steps[0] = 0
        monkeypatch.setattr(recording, "on_gpu", lambda _, device=device: device)
        folder = tmp_path / str(device)
        with pytest.MonkeyPatch.context() as patch:
            attachment = hooked(patch, RecordingSettings(folder=folder))
            serve(specs=[FullAttentionSpec()], num_blocks=26, budget=40)
            assert not attachment.off
        columns = ("identity_kind", "identity_start", "identity_count", "identity_hash", "request_ids")
        told = [event for event in events(folder)[1] if event.kind == "forward"]
        found.append([[event.ints(name).tolist() for name in columns] for event in told])
        assert verdict(folder).findings_by_kind.keys() == {"computed_otherwise"}
    assert found[0] == found[1]
    assert any(start for _, starts, *_ in found[0] for start in starts)


def test_of_attention_that_has_tables_of_its_own_the_slots_are_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine.GPUModelRunner, "own_tables", True)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    told = [event for event in events(tmp_path)[1] if event.kind == "forward"]
    assert {event.scalar("attention_watched") for event in told} == {ATTENTION_LENS}


@pytest.mark.parametrize("v2", [False, True])
def test_a_token_that_goes_elsewhere_than_its_row_says_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, v2: bool
) -> None:
    runner = fake_engine.GPUModelRunnerV2 if v2 else fake_engine.GPUModelRunner
    prepare, wrong = runner.prepare, []

    def shifted(self: Any, output: Any) -> Any:
        fed = prepare(self, output)
        if fed is not None and len(self.batch.req_ids) == len(fed[0]) > 1 and not wrong:  # decodes alone
            slots = self.batch.block_table[0].slot_mapping.gpu
            slots[1] -= 1
            wrong.append((self.ends[1][2] - 1, int(slots[1])))
        return fed

    monkeypatch.setattr(runner, "prepare", shifted)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path), v2=v2)
    serve(v2=v2)
    trace = next(tmp_path.glob("*.arrow"))
    (tmp_path / "r").mkdir()
    summary = replay(trace, settings=ReplaySettings(), report=tmp_path / "r")
    rows = find_incidents(tmp_path / "r", [trace]).rows
    assert summary.findings_by_kind["table_entry_differs"] == 1
    first = summary.first_finding
    assert (first["position"], first["slot"]) == wrong[0]
    assert [row["kind"] for row in rows] == ["slot_mapping"]


def test_a_byte_that_nobody_wrote_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    damaged = []

    def damage(runner: Any, scheduler: Any, output: Any) -> None:
        if not damaged and runner.input_batch.req_ids:
            block = int(runner.input_batch.block_table[0].block_table.gpu[0, 0])
            runner.kv.view(-1, fake_engine.HEADS, 2 * BLOCK, DIM)[block, 0, 1, 0] += 1
            damaged.append(block * BLOCK + 1)

    serve(each_step=damage)
    assert verdict(tmp_path).verdict.value == "corrupt"


def test_an_engine_that_cannot_be_captured_is_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "why_it_waits", lambda *_: "of a reason")
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    assert "every forward waits for the device: of a reason" in events(tmp_path)[0].notes
    assert verdict(tmp_path).verdict.value == "clean"


@pytest.mark.parametrize("kind", ["draft", "several dimensions", "embeddings", "micro-batches", "v2"])
def test_what_cannot_be_captured_is_said(kind: str) -> None:
    runner = fake_engine.GPUModelRunner([FullAttentionSpec()], 4)
    layout = SimpleNamespace(draft=None, draft_offset=None, positions=FedPositions(runner))
    assert why_it_waits(runner, layout) == ""
    if kind == "draft":
        layout.draft = object()
    elif kind == "several dimensions":
        runner.vllm_config.model_config.uses_mrope = True
        layout.positions = FedPositions(runner)
    elif kind == "embeddings":
        runner.vllm_config.model_config.enable_prompt_embeds = True
    elif kind == "micro-batches":
        runner.vllm_config.parallel_config.use_ubatching = True
    elif kind == "v2":
        del runner.input_batch
    assert why_it_waits(runner, layout)


def test_a_device_recorder_is_what_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    seen = set()
    serve(each_step=lambda *_: seen.update(type(one) for one in attachment.recorders()))
    assert seen == {DeviceRecorder}
    assert np.all([one.off == "" or one.off == "closed" for one in (r.recorder for r in attachment.recorders())])
