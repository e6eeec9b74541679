"""An oracle in the sampler's place, on the real engine: clean with every token judged, wrong in the forward that went wrong."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcanary import ReplaySettings, replay
from kvcanary.kernels.ops.oracle.own import HashOracle
from kvcanary.recorder.engines.common.oracle import OracleSampler
from kvcanary.recorder.engines.transformers import attach
from kvcanary.recorder.trace.reader import read_trace

from ..support.engines.tiny_models import PROMPTS, generate, model
from .hooked_engine import assert_clean

pytestmark = pytest.mark.usefixtures("engine_left_as_it_was")

SCARCE = {"num_blocks": 20, "max_batch_tokens": 13, "safety_margin": 0.0, "max_new_tokens": 30}


class Counting:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def next_token(self, seed: int, position: int) -> int:
        return (7 * seed + position) % self.vocab_size


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "own_oracles", SimpleNamespace(Counting=Counting))
    return "own_oracles:Counting"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", SCARCE),
        ("llama", {"num_return_sequences": 3, "do_sample": True}),
        ("gemma3_hybrid", {"do_sample": True}),
    ],
    ids=["chunks and offloads", "forks", "sampled, sliding"],
)
def test_clean_is_clean_with_every_token_judged(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    with attach(tmp_path / "t.arrow", oracle="hash"):
        outputs = generate(model(name), **options)
    summary = assert_clean(tmp_path / "t.arrow")
    tokens = sum(map(len, outputs)) - (
        2 * len(PROMPTS) if "num_return_sequences" in options else 0
    )  # two inherit their first
    assert summary.oracle["sampled"] == summary.oracle["sampled_judged"] >= tokens > 100
    assert summary.oracle["fed_judged"] >= tokens - len(outputs)
    if "num_return_sequences" not in options:
        oracle, prompts = HashOracle(512), enumerate(PROMPTS)
        expected = [[oracle.next_token(r, len(p) + i) for i in range(len(outputs[r]))] for r, p in prompts]
        assert outputs == expected


def test_tokens_that_two_requests_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, calls = OracleSampler.sample, []

    def swapping(self: OracleSampler, names: Any, seeds: Any, positions: Any) -> Any:
        tokens = sample(self, names, seeds, positions)
        calls.append(len(tokens))
        if len(calls) == 8:
            tokens[[0, 2]] = tokens[[2, 0]]
        return tokens

    monkeypatch.setattr(OracleSampler, "sample", swapping)
    with attach(tmp_path / "t.arrow", oracle="hash"):
        generate(model("llama"))
    summary = replay(tmp_path / "t.arrow")
    sampled = [
        event.scalar("forward") for event in read_trace(tmp_path / "t.arrow") if event.ints("sampled_tokens").size
    ]
    assert summary.findings_by_kind == {"oracle_token": 2}
    assert summary.first_finding is not None
    assert summary.first_finding["forward"] == sampled[7]
    assert set(summary.violations_by_reason) == {"WRITE_TOKEN"}  # and then they are fed
    assert summary.first_violation_forward == sampled[7] + 1
    assert len(summary.requests_hit) == 2


def test_an_oracle_of_ones_own(tmp_path: Path, own: str) -> None:
    with attach(tmp_path / "t.arrow", oracle=own):
        outputs = generate(model("llama"), max_new_tokens=12)
    assert outputs[1] == [(7 + 3 + i) % 512 for i in range(12)]
    unnamed, named = (replay(tmp_path / "t.arrow", settings=ReplaySettings(oracle=name)) for name in ("", own))
    assert unnamed.oracle == {"sampled": 60, "sampled_judged": 0, "fed_judged": 0}
    assert named.oracle == {"sampled": 60, "sampled_judged": 60, "fed_judged": 55}
    assert (unnamed.findings, named.findings) == (0, 0)


def test_a_token_that_is_lost_shows_in_what_is_sampled_next(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine forgets a token of a request: nothing that it does afterwards contradicts itself."""
    from transformers.generation.continuous_batching.requests import RequestState

    check, calls = RequestState.update_and_check_completion, []

    def forgetful(state: Any, token: int, *args: Any) -> Any:
        calls.append(state.request_id)
        if calls.count("req_1") == 5 and calls[-1] == "req_1":
            token = 3  # the scheduler's list has another one
        return check(state, token, *args)

    monkeypatch.setattr(RequestState, "update_and_check_completion", forgetful)
    with attach(tmp_path / "t.arrow", oracle=own):
        generate(model("llama"), max_new_tokens=12)
    summary = replay(tmp_path / "t.arrow", settings=ReplaySettings(oracle=own, checks=("oracle_token",)))
    assert summary.findings_by_kind == {"oracle_token": 1}
    assert summary.first_finding is not None
    assert "was fed token 3" in summary.first_finding["detail"]
