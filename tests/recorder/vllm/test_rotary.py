"""Models that are fed positions of several dimensions: recorded as one for each token, without a wait on a device."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.engines.vllm import recording
from kvcanary.recorder.engines.vllm.attention.rotary import FedPositions
from kvcanary.recorder.engines.vllm.identity import Identities, identity_of
from kvcanary.recorder.engines.vllm.step import NEVER, VllmRequest
from kvcanary.recorder.process.settings import RecordingSettings

from ...support.one_trace import events, verdict
from .fake_engine import GPUModelRunner, GPUModelRunnerV2, hooked, serve
from .gpu_stand_in import pass_for_gpu

pytestmark = pytest.mark.usefixtures("process_goes_on")

# Requests with an image: how far the positions behind their prompts are ahead of their places.
AHEAD = {"r1": -3, "r3": 7}
BOTH = pytest.mark.parametrize("v2", [False, True])


class Model:
    """How a model places text."""

    def get_mrope_input_positions(self, tokens: list[int], media: list[Any]) -> tuple[torch.Tensor, int]:
        return torch.arange(len(tokens)).expand(3, -1), 0


def feed_several(monkeypatch: pytest.MonkeyPatch, change: Any = None, model: Any = Model) -> None:
    """Have the small engine's runners feed their model positions of three dimensions; `change` gets those of each step."""
    prepare, initialize, forward = (
        GPUModelRunner.prepare,
        GPUModelRunnerV2.initialize_kv_cache,
        GPUModelRunner._model_forward,
    )
    begin = Identities.begin

    def several(self: Any, output: Any) -> Any:
        fed = prepare(self, output)
        if fed is None:
            return None
        ids, places = fed
        parts, at = [], 0
        for row, name in enumerate(self.batch.req_ids):
            own = places[at : at + output.num_scheduled_tokens[name]]
            at += own.shape[0]
            ahead = AHEAD.get(name, 0)
            known = self.requests[name]
            known.mrope_position_delta = self.ahead.np[row] = ahead
            in_prompt = (own < len(known.prompt_token_ids)) & (name in AHEAD)
            parts.append(torch.where(in_prompt, own // 2, own + ahead))
        self.positions[: places.shape[0]] = places
        counts = list(output.num_scheduled_tokens.values())
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32))
        self.req_states = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(self.batch.req_ids)})
        self.fed = torch.cat(parts).expand(3, -1).contiguous()
        if change is not None:
            change(self, self.fed)
        return ids, places if isinstance(self, GPUModelRunnerV2) else self.fed

    def initialize_v2(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        self.model_state.rope_state = SimpleNamespace(prefill_delta=self.ahead)
        self.model_state.prepare_inputs = lambda _: {"positions": self.fed}

    def begins(self: Any, known: Any, request: Any) -> None:
        place = SimpleNamespace(offset=0, length=2)
        request.mm_features = [SimpleNamespace(mm_hash="cat", identifier="", mm_position=place)] * (known.name in AHEAD)
        begin(self, known, request)

    monkeypatch.setattr(GPUModelRunner, "uses_mrope", True)
    monkeypatch.setattr(GPUModelRunner, "query_start_loc", SimpleNamespace(gpu=None), raising=False)
    monkeypatch.setattr(GPUModelRunner, "positions", torch.zeros(64, dtype=torch.int64), raising=False)
    monkeypatch.setattr(GPUModelRunner, "ahead", SimpleNamespace(np=np.zeros(64, np.int64)), raising=False)
    monkeypatch.setattr(GPUModelRunner, "get_model", lambda _: model(), raising=False)
    monkeypatch.setattr(GPUModelRunner, "prepare", several)
    monkeypatch.setattr(GPUModelRunner, "_model_forward", lambda self, ids, positions: forward(self, ids, self.fed[0]))
    monkeypatch.setattr(GPUModelRunnerV2, "initialize_kv_cache", initialize_v2)
    monkeypatch.setattr(Identities, "begin", begins)


@BOTH
def test_what_the_model_is_fed_is_recorded_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, v2: bool
) -> None:
    pass_for_gpu(monkeypatch)
    feed_several(monkeypatch)
    expected = serve(v2=v2, num_blocks=14)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path), v2=v2)
    assert serve(v2=v2, num_blocks=14) == expected
    assert not attachment.off
    header, told = events(tmp_path)
    assert not any("waits" in note for note in header.notes)
    assert header.runners[0].derived == ()
    assert verdict(tmp_path).verdict.value == "clean"
    assert sum(event.kind == "forward" for event in told) > 20


@BOTH
@pytest.mark.parametrize("device", [True, False])
def test_one_dimension_of_a_token_s_position_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, v2: bool, device: bool
) -> None:
    steps: list[int] = []

    def change(runner: Any, fed: Any) -> None:
        steps.append(fed.shape[1])
        if len(steps) == 9:
            fed[2, -1] -= 2

    pass_for_gpu(monkeypatch)
    monkeypatch.setattr(recording, "on_gpu", lambda _: device)
    feed_several(monkeypatch, change)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path), v2=v2)
    serve(v2=v2)
    assert not attachment.off
    header, told = events(tmp_path)
    if v2 and not device:  # its positions are made behind what is recorded there
        assert header.runners[0].derived == ("positions",)
        assert verdict(tmp_path).verdict.value == "clean"
        return
    forward = [event for event in told if event.kind == "forward"][8]
    place = forward.ints("prefix_lens")[-1] + forward.ints("extend_lens")[-1] - 1
    assert forward.ints("positions")[-1] == place - 2
    assert verdict(tmp_path).verdict.value == "corrupt"


def test_a_model_that_places_text_otherwise_is_not_judged_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        def get_mrope_input_positions(self, tokens: list[int], media: list[Any]) -> tuple[torch.Tensor, int]:
            return torch.zeros(3, len(tokens)), 0

    pass_for_gpu(monkeypatch)
    feed_several(monkeypatch, model=Other)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    assert not attachment.off
    header, _ = events(tmp_path)
    assert header.runners[0].derived == ("positions",)
    assert not any("waits" in note for note in header.notes)
    assert verdict(tmp_path).verdict.value == "clean"


def runner_of(**model: Any) -> Any:
    """Return a V1 runner of a version that has no positions beside those of several dimensions."""
    config = SimpleNamespace(model_config=SimpleNamespace(**model))
    return SimpleNamespace(vllm_config=config, input_batch=None, positions=SimpleNamespace(gpu=None), get_model=Model)


def test_an_older_engine_without_places_is_waited_for() -> None:
    positions = FedPositions(runner_of(uses_mrope=True, uses_xdrope_dim=0))
    assert (positions.several, positions.places, positions.derived) == (True, False, ("positions",))
    assert FedPositions(runner_of(uses_mrope=False, uses_xdrope_dim=0)).derived == ()
    assert FedPositions(runner_of(uses_xdrope_dim=4)).derived == ("positions",)


def test_a_request_is_text_behind_its_media() -> None:
    known = VllmRequest("r")
    known.prompt_len = 30
    assert known.text_from == NEVER
    picture = SimpleNamespace(mm_hash="cat", identifier="", mm_position=SimpleNamespace(offset=3, length=5))
    for media, expected in (([], 0), ([picture], 30)):
        known.declared = identity_of(SimpleNamespace(mm_features=media))
        assert known.text_from == expected
