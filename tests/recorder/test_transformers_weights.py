"""Weights that are changed while an engine runs: what counts as other weights, and what is not seen."""

import gc
import weakref

import torch
from kvcanary.recorder.engines.transformers.weights import LISTED_EVERY, Weights


def test_what_is_done_in_place_is_another_version_of_the_weights() -> None:
    model, weights = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), Weights()
    assert [weights.look(model) for _ in range(3)] == [False] * 3
    with torch.no_grad():
        model[1].weight += 1
    assert [weights.look(model), weights.look(model), weights.changes] == [True, False, 1]
    model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).state_dict())
    assert [weights.look(model), weights.look(model), weights.changes] == [True, False, 2]
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # without a gradient: nothing changes
    assert not weights.look(model)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert weights.look(model)


def test_parameters_in_the_place_of_others_are_seen_when_they_are_listed_again() -> None:
    model, weights = torch.nn.Linear(2, 2), Weights()
    weights.look(model)
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    assert [weights.look(model) for _ in range(LISTED_EVERY)].count(True) == 1
    assert not any(weights.look(model) for _ in range(2 * LISTED_EVERY))


def test_what_torch_does_not_count_is_no_change_and_no_error() -> None:
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
    weights = Weights()
    with torch.inference_mode():
        model.weight += 1
    other = torch.nn.Linear(2, 2)
    other.weight.data.copy_(torch.ones(2, 2))
    assert not any(weights.look(one) for one in (model, model, model))


def test_a_model_is_not_held() -> None:
    model, weights = torch.nn.Linear(2, 2), Weights()
    weights.look(model)
    gone = weakref.ref(model.weight)
    del model
    gc.collect()
    assert gone() is None
