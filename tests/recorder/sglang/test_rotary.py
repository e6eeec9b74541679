"""Models that SGLang feeds positions of several dimensions: recorded as one for each token."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.sglang.attention.rotary import FedPositions, fed_positions
from kvcanary.recorder.trace.reader import TraceReader, read_trace

from . import test_inside as inside
from .fake_engine import DECODE, EXTEND, ForwardBatch, ModelRunner
from .test_layers import Layers, layers

__all__ = ["layers"]

PROMPT = 4  # tokens of each of the fake engine's prompts
AHEAD = -2  # how far positions are ahead behind an image


def an_image(first: int, last: int, length: int, *, ahead: int = AHEAD) -> Any:
    """What SGLang keeps of a prompt of `length` tokens, those from `first` to `last` of an image."""
    own = torch.arange(length).repeat(3, 1)
    own[:, first : last + 1] = torch.tensor([[7], [8], [9]])
    own[:, last + 1 :] += ahead
    item = SimpleNamespace(offsets=[(first, last)])
    return SimpleNamespace(mm_items=[item], mrope_positions=own, mrope_position_delta=torch.tensor([[ahead]]))


def runner_of(**settings: Any) -> Any:
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=None,  # it is hooked before there are any pools
        server_args=SimpleNamespace(**settings),
        model_config=SimpleNamespace(model_is_mrope=True),
        model=SimpleNamespace(is_mrope_enabled=True),
    )


def batch_of(fed: list[list[int]] | torch.Tensor, media: list[Any], *, mode: Any = DECODE, **more: Any) -> Any:
    fields = {"forward_mode": mode, "req_pool_indices": torch.arange(len(media)), "mm_inputs": media}
    return SimpleNamespace(**fields, mrope_positions=torch.as_tensor(fed), **more)


def told(batch: Any, places: list[int], *, in_graph: bool = False, **settings: Any) -> list[int]:
    fed = FedPositions(runner_of(**settings))
    fed.expect(batch)
    found: list[int] = fed.of(batch, torch.tensor(places), in_graph=in_graph).tolist()
    return found


@pytest.mark.parametrize("in_graph", [False, True])
def test_of_text_one_is_told_that_is_not_the_place(in_graph: bool) -> None:
    fed = [[5, 7, 4, 1], [5, 7, 9, 1], [5, 6, 4, 1]]
    assert told(batch_of(fed, [None] * 4), [5, 7, 4, 2], in_graph=in_graph) == [5, 6, 9, 1]
    drafts = batch_of(fed, [None] * 2)  # two for each request
    assert told(drafts, [5, 7, 4, 2], in_graph=in_graph) == [5, 6, 9, 1]


@pytest.mark.parametrize("in_graph", [False, True])
def test_behind_an_image_positions_are_held_against_what_the_prompt_says(in_graph: bool) -> None:
    image = an_image(2, 5, 10)
    places = torch.tensor([10, 11, 12])
    right = torch.stack([places + AHEAD] * 3)
    off = right.clone()
    off[1, 1] += 1
    media = [image, image, None]
    plain = torch.tensor([0, 0, -AHEAD])
    assert told(batch_of(right + plain, media), places.tolist(), in_graph=in_graph) == [10, 11, 12]
    assert told(batch_of(off + plain, media), places.tolist(), in_graph=in_graph) == [10, 12, 12]
    # An engine that wants the places of all text has no numbers of requests.
    plain = places.repeat(3, 1)
    assert told(batch_of(plain, media), [10, 11, 12], in_graph=in_graph, rl_on_policy_target="x") == [10, 11, 12]


def test_of_a_prompt_with_an_image_the_text_behind_it_is_read(caplog: pytest.LogCaptureFixture) -> None:
    image = an_image(2, 5, 10)
    fed = torch.cat((image.mrope_positions, torch.arange(4).repeat(3, 1)), dim=1)
    lens = {"extend_seq_lens": torch.tensor([10, 4]), "extend_seq_lens_cpu": [10, 4]}
    places = [*range(10), *range(4)]
    assert told(batch_of(fed, [image, None], mode=EXTEND, **lens), places) == places
    fed[2, 8] -= 3  # of text; of an image nobody knows
    fed[0, 4] += 3
    fed[0, 12] += 1
    wrong = places.copy()
    wrong[8], wrong[12] = 5, 3
    assert told(batch_of(fed, [image, None], mode=EXTEND, **lens), places) == wrong
    # A chunk that begins behind the image, one with padding behind it, and one of whose tokens nobody knows whose they are.
    lens = {"extend_seq_lens": torch.tensor([2]), "extend_seq_lens_cpu": [2]}
    chunk = batch_of(fed[:, 8:10], [image], mode=EXTEND, **lens)
    assert told(chunk, [8, 9]) == [5, 9]
    padded = batch_of(torch.nn.functional.pad(fed[:, 8:10], (0, 2)), [image], mode=EXTEND, **lens)
    assert told(padded, [8, 9, 0, 0]) == [5, 9, 0, 0]
    chunk.extend_seq_lens_cpu = [3]
    assert told(chunk, [8, 9]) == [8, 9]
    assert caplog.text.count("nobody knows which of its 2 tokens is whose") == 1


@pytest.mark.parametrize("what", ["no offsets", "no positions", "ends in it", "places text otherwise", "more to come"])
def test_what_nobody_can_tell_is_the_place(what: str) -> None:
    image = an_image(2, 5, 10)
    if what == "no offsets":
        image.mm_items.append(SimpleNamespace(offsets=None))
    if what == "no positions":
        image.mrope_positions = None
    if what == "ends in it":
        image = an_image(2, 9, 10)
    if what == "places text otherwise":
        image.mrope_positions[1, 6:] += 1
    if what == "more to come":  # a model that makes images
        image.mrope_positions = torch.cat((image.mrope_positions, torch.full((3, 4), 20)), dim=1)
    assert told(batch_of([[3], [4], [5]], [image]), [10]) == [10]


def test_what_a_session_adds_is_looked_at() -> None:
    fed = FedPositions(runner_of())
    image = an_image(2, 5, 10)
    fed.expect(batch_of([[10 + AHEAD]] * 3, [image]))
    grown = an_image(2, 12, 16, ahead=-7)
    vars(image).update(vars(grown))
    lens = {"extend_seq_lens": torch.tensor([2]), "extend_seq_lens_cpu": [2]}
    batch = batch_of(grown.mrope_positions[:, 14:], [image], mode=EXTEND, **lens)
    fed.expect(batch)
    assert fed.of(batch, torch.tensor([14, 15])).tolist() == [14, 15]
    # Behind it none is ahead any more.
    batch = batch_of([[3]] * 3, [None])
    fed.expect(batch)
    assert fed.of(batch, torch.tensor([3]), in_graph=True).tolist() == [3]


def test_a_batch_without_them_and_one_of_many_requests() -> None:
    fed = FedPositions(runner_of())
    batch = batch_of([[5]] * 3, [None])
    batch.mrope_positions = None
    assert fed.of(batch, torch.tensor([4])).tolist() == [4]
    batch.mrope_positions = torch.empty((3, 0), dtype=torch.int64)
    assert fed.of(batch, torch.empty(0, dtype=torch.int64)).tolist() == []
    many = batch_of(torch.ones((3, 9000), dtype=torch.int64), [an_image(0, 1, 4)] * 9000)
    fed.expect(many)
    assert (fed.of(many, torch.zeros(9000, dtype=torch.int64)) == 0).all()
    many.mrope_positions[:, 8999] = 7
    assert fed.of(many, torch.full((9000,), 5))[8999] == 7 - AHEAD


def test_a_runner_has_one_reader_if_its_model_takes_several() -> None:
    class Runner(SimpleNamespace):
        __hash__ = object.__hash__

    runner = Runner(**vars(runner_of()))
    assert fed_positions(runner) is fed_positions(runner) is not None
    runner.model.is_mrope_enabled = False
    assert fed_positions(runner) is None
    runner.model = SimpleNamespace(_uses_mrope_positions=lambda: True)
    assert fed_positions(runner) is not None
    assert fed_positions(Runner(model_config=SimpleNamespace(), model=None)) is None


def feed_several(monkeypatch: pytest.MonkeyPatch, change: Any = None) -> None:
    """Have the fake engine feed positions of three dimensions; prompts of odd rows have an image as their second token."""
    monkeypatch.setattr(ModelRunner, "device", "cpu", raising=False)
    init_new, init = ForwardBatch.init_new.__func__, ModelRunner.__init__  # type: ignore[attr-defined]

    def begin(runner: Any) -> None:
        init(runner)
        runner.model_config.model_is_mrope = True

    def new(cls: Any, batch: Any, model_runner: Any) -> Any:
        made = init_new(cls, batch, model_runner)
        made.extend_seq_lens_cpu = made.extend_seq_lens.tolist() if made.forward_mode is EXTEND else None
        rows = made.req_pool_indices
        made.mm_inputs = [an_image(1, 1, PROMPT) if row % 2 else None for row in rows.tolist()]
        behind = torch.where(rows % 2 == 1, AHEAD, 0).repeat_interleave(made.extend_seq_lens)
        behind[made.positions < 2] = 0
        made.mrope_positions = (made.positions + behind).repeat(3, 1)
        if change is not None:
            change(made)
        return made

    monkeypatch.setattr(ModelRunner, "__init__", begin)
    monkeypatch.setattr(ForwardBatch, "init_new", classmethod(new))


def off_by_one(batch: Any) -> None:
    """One dimension is one off from the third decode on, of requests with an image."""
    if batch.forward_mode is DECODE and int(batch.positions[0]) == PROMPT + 2:
        batch.mrope_positions[1] += (batch.req_pool_indices % 2).long()


@pytest.mark.parametrize("change", [None, off_by_one])
def test_on_the_host_what_a_model_is_fed_is_judged(
    layers: Layers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Any
) -> None:
    feed_several(monkeypatch, change)

    begin = ModelRunner.__init__

    def takes_several(runner: Any) -> None:
        begin(runner)
        runner.model.is_mrope_enabled = True

    monkeypatch.setattr(ModelRunner, "__init__", takes_several)
    trace = layers.serve(monkeypatch, tmp_path)
    with TraceReader(trace) as reader:
        assert "mrope_positions" not in {entry.name for entry in reader.header.not_watched}
    judged(trace, change)


@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("change", [None, off_by_one])
def test_on_a_gpu_it_is_read_in_the_models_graph_too(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int, change: Any
) -> None:
    inside.small_kernels(monkeypatch)
    feed_several(monkeypatch, change)
    monkeypatch.setattr(inside.Model, "is_mrope_enabled", True, raising=False)
    monkeypatch.setattr(inside, "STATIC", (*inside.STATIC, "mrope_positions"))
    read = FedPositions.of

    def of(self: Any, batch: Any, positions: Any, *, in_graph: bool = False) -> Any:
        found = read(self, batch, positions, in_graph=in_graph)
        if inside.Graphs.capturing is not None:
            inside.Graphs.capturing.append(lambda: found.copy_(read(self, batch, positions, in_graph=True)))
        return found

    monkeypatch.setattr(FedPositions, "of", of)
    trace, _ = inside.serve(monkeypatch, tmp_path, width=width)
    judged(trace, change)


def judged(trace: Path, change: Any) -> None:
    assert inside.verdict(trace) == ("clean" if change is None else "corrupt")
    wrong = [
        event.scalar("forward")
        for event in read_trace(trace)
        if event.kind == "forward"
        and event.scalar("mode") == "decode"
        and event.ints("positions").tolist() != event.ints("prefix_lens").tolist()
    ]
    assert len(wrong) == (change is not None)
