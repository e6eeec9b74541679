"""Which weights a request is computed with: an adapter that is loaded anew may be another one, and so may the model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.capture.privacy import IdentityValue, chosen_identity
from kvcanary.recorder.engines.vllm.identity import Identities, embedded_in, hit_unit, weights_hash
from kvcanary.recorder.engines.vllm.step import VllmRequests


def adapter(value: float, names: tuple[str, ...] = ("q", "v")) -> Any:
    """An adapter as it was loaded; some layers have several tensors, or none."""
    one = {name: SimpleNamespace(lora_a=torch.full((4, 8), value), lora_b=[torch.ones(8), None]) for name in names}
    return SimpleNamespace(loras=one)


class Loader:
    def __init__(self) -> None:
        self.file = adapter(1.0)

    def _load_adapter(self, _: Any) -> Any:
        if self.file is None:
            raise FileNotFoundError("gone")
        return self.file


class Model:
    def load_weights(self, weights: Any, names: Any = None) -> Any:
        """New weights of these names, if the model names them."""
        if weights is None:
            raise ValueError("no such parameter")
        return names


@pytest.fixture
def engine() -> Any:
    model, loader = Model(), Loader()
    runner = SimpleNamespace(get_model=lambda: model, lora_manager=loader, _set_active_loras=lambda *_: None)
    said: list[tuple[str, dict[str, str]]] = []
    requests = VllmRequests(8)
    identities = Identities(
        runner, requests, lambda known: said.append((known.name, {one.kind: one.value for one in known.identity}))
    )
    faults: list[Any] = []
    identities.attach(lambda hook, error: faults.append((hook, error)))

    def begin(name: str, number: int) -> None:
        lora = SimpleNamespace(lora_int_id=number, lora_path="/tenant") if number else None
        identities.begin(requests.see(name)[0], SimpleNamespace(lora_request=lora))

    return SimpleNamespace(runner=runner, said=said, identities=identities, begin=begin, faults=faults)


def test_an_adapter_that_is_loaded_anew_with_other_weights_is_another(engine: Any) -> None:
    lora = SimpleNamespace(lora_int_id=1)
    engine.begin("a", 1)
    engine.begin("plain", 0)
    engine.runner.lora_manager._load_adapter(lora)
    engine.runner.lora_manager._load_adapter(lora)  # it was put out and comes back
    first = f"/tenant with {weights_hash(adapter(1.0))}"
    assert engine.said == [
        ("a", {"adapter": "/tenant", "weights": "0"}),
        ("plain", {"adapter": "", "weights": "0"}),
        ("a", {"adapter": first, "weights": "0"}),
    ]
    engine.begin("b", 1)
    engine.runner.lora_manager.file = adapter(2.0)
    engine.runner.lora_manager._load_adapter(lora)
    second = f"/tenant with {weights_hash(adapter(2.0))}"
    assert [(name, one["adapter"]) for name, one in engine.said[3:]] == [("b", first), ("a", second), ("b", second)]
    assert not engine.faults


def test_an_adapter_that_cannot_be_loaded_changes_nothing(engine: Any) -> None:
    engine.begin("a", 1)
    engine.runner.lora_manager.file = None
    with pytest.raises(FileNotFoundError):
        engine.runner.lora_manager._load_adapter(SimpleNamespace(lora_int_id=1))
    assert len(engine.said) == 1


def test_weights_that_come_in_parts_are_one_change_for_a_step(engine: Any) -> None:
    engine.begin("a", 0)
    model = engine.runner.get_model()
    model.load_weights([])
    model.load_weights([])
    assert len(engine.said) == 1
    engine.identities.begin_step()
    engine.identities.begin_step()
    engine.begin("b", 0)
    assert engine.said[1:] == [(name, {"adapter": "", "weights": "2"}) for name in "ab"]


def test_where_the_model_has_loaded_nothing_the_weights_are_the_same(engine: Any) -> None:
    engine.begin("a", 0)
    engine.runner.get_model().load_weights([], set())
    engine.identities.begin_step()
    assert len(engine.said) == 1
    engine.runner.get_model().load_weights([], {"a norm"})
    engine.identities.begin_step()
    assert engine.said[1:] == [("a", {"adapter": "", "weights": "1"})]


def test_behind_weights_that_could_not_be_loaded_nobody_knows_what_they_are(engine: Any) -> None:
    engine.begin("a", 0)
    with pytest.raises(ValueError, match="no such parameter"):
        engine.runner.get_model().load_weights(None)
    engine.identities.begin_step()
    engine.runner.get_model().load_weights([])
    engine.identities.begin_step()
    weights = ({"weights": "0"}, {}, {"weights": "2"})
    assert engine.said == [("a", {"adapter": "", **said}) for said in weights]


def test_an_engine_without_adapters_or_weights_of_its_own(engine: Any) -> None:
    identities = Identities(SimpleNamespace(), VllmRequests(8), lambda _: None)
    identities.attach(lambda *_: None)
    identities.begin_step()


def test_hashes_of_weights() -> None:
    assert weights_hash(adapter(1.0)) == weights_hash(adapter(1.0))
    assert len({weights_hash(one) for one in (adapter(1.0), adapter(1.5), adapter(1.0, ("q",)), object())}) == 4
    half = SimpleNamespace(loras={"q": SimpleNamespace(lora_a=torch.ones(3, dtype=torch.bfloat16), lora_b=None)})
    assert weights_hash(half) != weights_hash(object())


def test_tokens_that_layers_compute_with_anothers_adapter_are_said(engine: Any) -> None:
    for name, number in (("a", 1), ("plain", 0), ("b", 2)):
        engine.begin(name, number)
    running = [engine.identities._requests.get(name) for name in ("a", "plain", "b")]
    loras = [SimpleNamespace(lora_int_id=number, lora_path=f"/{number}") for number in (1, 2)]
    look, others = engine.identities.look, []
    for given in ((1, 1, 0, 2), (2, 1, 0, 2), (1, 1, 1, 0), (1, 1, 1, 0), (1, 1, 0, 2), (1,), ()):
        engine.runner._set_active_loras((), given, loras, None)
        changed = look(running, [2, 1, 1])
        others.append((changed, [tuple(one) for one in engine.identities.others]))
    plain, without = ("adapter", "/1", 1, 1), ("adapter", "", 2, 1)
    assert others == [
        (False, []),
        (True, [("adapter", "/2", 0, 1)]),
        (True, [plain, without]),
        (False, [plain, without]),
        (True, []),
        (False, []),
        (False, []),
    ]
    assert not look(running, [2, 1, 1])  # each step says it anew
    engine.identities.begin(running[0], None)  # of which nobody has said what it is to be computed with
    engine.runner._set_active_loras((), (2, 2, 0, 2), loras, None)
    assert not look(running, [2, 1, 1])
    given = chosen_identity([IdentityValue(*plain), IdentityValue(*without)], [0, 2])
    assert [tuple(one) for one in given] == [("adapter", "", 1, 1)]
    assert not engine.faults


def test_what_a_prompt_of_embeddings_holds_is_declared_as_far_as_a_hit_may_go() -> None:
    rows = torch.arange(40 * 32, dtype=torch.bfloat16).reshape(40, 32)
    other = rows.clone()
    other[20, 3] += 64
    found, theirs = (embedded_in(SimpleNamespace(prompt_embeds=embeds), 16) for embeds in (rows, other))
    assert [(one.start, one.length) for one in found] == [(0, 0), (0, 16), (16, 16), (32, 8)]
    assert [mine.value == its.value for mine, its in zip(found, theirs, strict=True)] == [True, True, False, True]
    assert embedded_in(SimpleNamespace(prompt_embeds=None), 16) == embedded_in(SimpleNamespace(), 16) == []


@pytest.mark.parametrize(
    ("sizes", "unit", "found"), [((128,), None, 16), ((128, 24), None, 8), ((64,), 4, 4), ((), None, 16)]
)
def test_hits_end_at_a_multiple_of_blocks_or_of_what_is_matched(
    sizes: tuple[int, ...], unit: int | None, found: int
) -> None:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
    config = SimpleNamespace(kv_cache_groups=groups)
    assert (
        hit_unit(SimpleNamespace(kv_cache_config=config, cache_config=SimpleNamespace(prefix_match_unit=unit))) == found
    )
    assert hit_unit(SimpleNamespace()) == 16
