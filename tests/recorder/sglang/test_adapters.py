"""Which LoRA adapter the layers compute a request with, on the host and on a device."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from .fake_engine import SLOTS, ForwardBatch, ModelRunner, Request, Scheduler, TokenToKVPoolAllocator, hooked

PLACES = [None, "first", "second", object()]  # of the pool of adapters, the last one empty
pytestmark = pytest.mark.usefixtures("process_goes_on")


class Backend:
    """Gives the layers a segment a request, or what `cut` makes of a batch's rows: places and lengths."""

    cut: Any = None
    batch_info: Any = None

    def prepare_lora_batch(
        self, forward_batch: Any, weight_indices: list[int], lora_ranks: list[int], scalings: list[float]
    ) -> None:
        """Hand a batch's places to the layers."""
        if self.cut is not None:
            lens = (
                forward_batch.extend_seq_lens_cpu
                if "extend" in str(forward_batch.forward_mode).lower()
                else [1] * len(weight_indices)
            )
            places, lens = (torch.tensor(values) for values in self.cut(weight_indices, lens))
            self.batch_info = SimpleNamespace(
                seg_lens_cpu=lens, weight_indices_cpu=places, num_segments=len(lens), permutation=None
            )


class Adapters:
    """A manager of adapters whose batches get the places that `turn` makes of the right ones."""

    def __init__(self, turn: Any, ranks: list[int]) -> None:
        self.memory_pool = SimpleNamespace(buffer_id_to_uid=list(PLACES))
        self.lora_backend, self.turn, self.names = Backend(), turn, {}
        self.ranks = ranks
        self.by_name = False

    def begin(self, batch: Any) -> None:
        places = [PLACES.index(self.names[rid]) for rid in batch.rids]
        given = {"forward_batch": batch, "weight_indices": self.turn(places), "lora_ranks": self.ranks, "scalings": []}
        self.by_name = not self.by_name  # as some versions call it
        if self.by_name:
            self.lora_backend.prepare_lora_batch(**given)
        else:
            self.lora_backend.prepare_lora_batch(*given.values())


def recorded(
    folder: Path, patch: pytest.MonkeyPatch, turn: Any, ranks: tuple[int, ...] = (0, 8, 8, 8), cut: Any = None
) -> Path:
    """Serve three requests, of two adapters and of none, whose batches get places as `turn` has it; return the trace."""
    patch.setattr(sglang_attachment, "not_applied", list)
    attached = hooked(patch, RecordingSettings(folder=folder))
    runner = ModelRunner()
    adapters = runner.lora_manager = Adapters(turn, list(ranks))
    adapters.lora_backend.cut = cut
    init = ForwardBatch.init_new.__func__

    def init_new(cls: Any, batch: Any, model_runner: Any) -> Any:
        made = init(cls, batch, model_runner)
        made.extend_seq_lens_cpu = made.extend_seq_lens.tolist()
        adapters.begin(made)
        return made

    patch.setattr(ForwardBatch, "init_new", classmethod(init_new))
    scheduler = Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
    requests = [Request(name or "none", [5, 6, 7 + n], new_tokens=3) for n, name in enumerate(PLACES[:3])]
    for request, name in zip(requests, PLACES[:3], strict=True):
        request.lora_id = name
        adapters.names[request.rid] = name
    while any(not request.finished() for request in requests):
        scheduler.step([request for request in requests if not request.finished()])
    recorder = attached.recording.recorder
    recorder.close()
    return recorder.path


def said(trace: Path) -> list[list[tuple[int, int]]]:
    """Return of each forward which of its requests are computed otherwise, and how many of their tokens."""
    forwards = [event for event in read_trace(trace) if event.kind == "forward"]
    return [
        list(zip(e.ints("identity_start").tolist(), e.ints("identity_count").tolist(), strict=True)) for e in forwards
    ]


@pytest.fixture(params=[False, True], ids=["host", "device"])
def on_either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        request.getfixturevalue("on_a_gpu")
        monkeypatch.setattr(model_forward, "PROGRAMS", 4)
        monkeypatch.setattr(model_forward, "TILE", 32)


@pytest.mark.usefixtures("on_either")
def test_a_request_that_gets_its_own_adapter_is_said_nothing_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recorded(tmp_path, monkeypatch, list)
    assert not any(said(trace))
    assert replay(trace, settings=ReplaySettings(), report=None).verdict.value == "clean"


@pytest.mark.usefixtures("on_either")
@pytest.mark.parametrize(
    ("turn", "whose"),
    [
        (lambda places: [*places[1:], *places[:1]], [0, 1, 2]),
        (lambda places: [0 for _ in places], [1, 2]),
        (lambda places: [places[0], *[3 for _ in places[1:]]], [1, 2]),
    ],
)
def test_a_request_that_another_s_adapter_computes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: Any, whose: list[int]
) -> None:
    trace = recorded(tmp_path, monkeypatch, turn)
    extend, *decodes = said(trace)
    assert extend == [(place, 3) for place in whose]
    assert decodes and all(one == [(place, 1) for place in whose] for one in decodes)
    summary = replay(trace, settings=ReplaySettings(), report=None)
    assert summary.verdict.value == "corrupt"
    assert summary.findings_by_kind["computed_otherwise"] == len(whose)


def test_a_batch_whose_places_nobody_was_told_is_said_nothing_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = recorded(tmp_path, monkeypatch, lambda places: places[:1])
    assert not any(said(trace))


def test_a_place_of_no_rank_adds_nothing_whatever_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded(tmp_path, monkeypatch, lambda places: [1, *places[1:]], ranks=(0, 0, 8, 8))
    assert all([place for place, _ in one] == [1] for one in said(trace))


@pytest.mark.usefixtures("on_either")
@pytest.mark.parametrize(
    ("cut", "whose"),
    [
        (lambda places, lens: (places, lens), []),
        (
            lambda places, lens: ([0, 1, 2], [lens[0] + 1, lens[1], lens[2]]),
            [(1, 1), (2, 1)],
        ),  # all but the first begin late
        (lambda places, lens: ([0, 1], [sum(lens[:2]), lens[2]]), [(1, 0), (2, 0)]),
        (lambda places, lens: ([0], [lens[0]]), []),  # of the other rows nothing is known
    ],
)
def test_a_segment_of_the_batch_that_reaches_into_another_request_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: Any, whose: list[tuple[int, int]]
) -> None:
    trace = recorded(tmp_path, monkeypatch, list, cut=cut)
    extend, *_ = said(trace)
    assert extend == [(place, count or 3) for place, count in whose]
    found = replay(trace, settings=ReplaySettings(), report=None).findings_by_kind
    assert found.get("computed_otherwise", 0) == len(whose)
