"""Slots that a KV connector fills, and prompts that are fed as embeddings: what is not known is neither clean nor corrupt."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.engines.vllm.step import Step, VllmRequest, VllmRequests, forwards_of, prompt_of
from kvcanary.recorder.process.settings import RecordingSettings

from ...support.one_trace import replayed
from .fake_engine import BLOCK, DIM, HEADS, FullAttentionSpec, GPUModelRunner, SlidingWindowSpec, hooked, serve
from .groups import group

pytestmark = pytest.mark.usefixtures("process_goes_on")


def load(runner: GPUModelRunner, scheduler: Any, output: Any) -> None:
    """Put into the pool what the connector has, as the model would have stored it."""
    both = runner.kv.view(-1, HEADS, 2 * BLOCK, DIM)
    for request, first in scheduler.loads:
        for manager in scheduler.managers:
            blocks = manager.req_to_blocks[request.request_id]
            for position in range(first, min(scheduler.stored, (len(request.tokens) - 1) // BLOCK * BLOCK)):
                token = torch.tensor(request.tokens[position])
                block, offset = blocks[position // BLOCK].block_id, position % BLOCK
                both[block, :, offset] = torch.sin(token.float())
                both[block, :, BLOCK + offset] = torch.cos(token + torch.tensor(position) / 7)
    scheduler.loads.clear()


@pytest.mark.parametrize("scheduler", [True, False], ids=["one process", "scheduler elsewhere"])
@pytest.mark.parametrize(
    "shape",
    [{}, {"caching": False}, {"num_blocks": 14}, {"specs": [SlidingWindowSpec(), FullAttentionSpec()]}],
    ids=["plain", "no cache", "few blocks", "hybrid"],
)
def test_a_healthy_engine_that_loads_is_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], scheduler: bool
) -> None:
    expected = serve(**shape, stored=8, each_step=load)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path), scheduler=scheduler)
    assert serve(**shape, stored=8, each_step=load) == expected
    summary, header, events = replayed(tmp_path)
    assert summary.verdict.value == "clean"
    received = [event for event in events if event.kind == "transfer"]
    assert {str(event.scalar("status")) for event in received} == {"end"}
    assert {event.scalar("room") for event in received} == {-1}
    assert summary.verified > 0
    assert ("slots", "KV connector HostConnector") in {(entry.what, entry.name) for entry in header.not_watched}


def test_a_sample_that_a_failed_load_takes_back_binds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it the engine verifies what was drafted for the token's place, which it may well accept."""
    drafted: list[int] = []

    def each_step(runner: GPUModelRunner, scheduler: Any, output: Any) -> None:
        cached, state = output.scheduled_cached_reqs, runner.requests.get("r3")
        request = next((one for one in scheduler.running if one.request_id == "r3"), None)
        if drafted or request is None or len(request.tokens) != request.num_prompt_tokens + 3:
            return
        counts = [
            len(runner.requests[name].tokens) - len(runner.requests[name].prompt_token_ids) for name in cached.req_ids
        ]
        counts[cached.req_ids.index("r3")] -= 1
        cached.num_output_tokens = counts
        drafted.append((request.tokens.pop() + 1) % 500)
        state.tokens[-1] = drafted[0]

    sample = GPUModelRunner.sample_tokens

    def sample_tokens(runner: GPUModelRunner, grammar: Any) -> Any:
        result = sample(runner, grammar)
        if len(drafted) == 1:
            result.sampled_token_ids[result.req_ids.index("r3")].insert(0, drafted[0])
            drafted.append(-1)
        return result

    monkeypatch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(each_step=each_step)
    summary, _, _ = replayed(tmp_path)
    assert len(drafted) == 2
    assert (summary.verdict.value, summary.findings_by_kind) == ("clean", {})


def test_damage_beside_what_was_loaded_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def each_step(runner: GPUModelRunner, scheduler: Any, output: Any) -> None:
        load(runner, scheduler, output)
        decoding = [name for name, count in output.num_scheduled_tokens.items() if count == 1]
        if not done and len(decoding) > 1 and len(runner.requests[decoding[0]].blocks[0]) > 2:
            blocks = runner.requests[decoding[0]].blocks[0]
            runner.kv[blocks[2]].view(HEADS, 2 * BLOCK, DIM)[:, BLOCK] += 1  # V of position 8, which was computed here
            done.append(blocks[2])

    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(stored=8, each_step=each_step)
    assert done
    summary, _, _ = replayed(tmp_path)
    assert summary.verdict.value == "corrupt"


def test_a_producer_loads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path), scheduler=False)
    kept = GPUModelRunner.initialize_kv_cache

    def produce(runner: GPUModelRunner, *args: Any, **kwargs: Any) -> None:
        kept(runner, *args, **kwargs)
        runner.vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="Nixl", kv_role="kv_producer")

    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", produce)
    serve()
    summary, header, events = replayed(tmp_path)
    assert summary.verdict.value == "clean"
    assert not [event for event in events if event.kind == "transfer"]
    assert [entry.what for entry in header.not_watched if "connector" in entry.name] == ["other"]


def test_the_positions_of_a_prompt_that_are_embeddings() -> None:
    tokens, unknown = prompt_of(SimpleNamespace(prompt_token_ids=[5, 6, 7], prompt_embeds=None))
    assert (tokens.tolist(), unknown.tolist()) == ([5, 6, 7], [])
    whole = SimpleNamespace(prompt_token_ids=None, prompt_embeds=np.zeros((4, 8)))
    assert [part.tolist() for part in prompt_of(whole)] == [[-1] * 4, [0, 1, 2, 3]]
    mixed = SimpleNamespace(
        prompt_token_ids=[5, 0, 0, 8], prompt_embeds=np.zeros((4, 8)), prompt_is_token_ids=[True, False, False, True]
    )
    tokens, unknown = prompt_of(mixed)
    assert unknown.tolist() == [1, 2]
    known = VllmRequest("a")
    known.unknown = unknown
    known.begin(tokens)
    known.tokens.append([9])
    assert known.tokens.all().tolist() == [5, -1, -1, 8, 9]
    known.begin([5, 0, 0, 8, 9])  # as the scheduler keeps them
    assert known.tokens.all().tolist() == [5, -1, -1, 8, 9]


def test_an_embedding_is_fed_as_an_unknown_token() -> None:
    book = VllmRequests(5)
    requests = [book.see(name)[0] for name in ("a", "b")]
    for known in requests:
        book.run(known, 1)
        known.begin(range(20))
    requests[1].unknown = np.array([3, 4, 9])
    step = Step(
        names=tuple(known.name for known in requests),
        prefix=np.array([0, 3]),
        extend=np.array([2, 3]),
        input_ids=np.array([11, 12, 13, 14, 15]),
        positions=np.array([0, 1, 3, 4, 5]),
        tables=((np.arange(32).reshape(2, 16), BLOCK),),
        written=(np.arange(5),),
        drafted=frozenset(),
    )
    ((told, _, _),) = forwards_of(step, [group(BLOCK)], requests, book)
    assert told.input_ids.tolist() == [11, 12, -1, -1, 15]
