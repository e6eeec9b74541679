"""What SGLang and vLLM are made to sample, and their tables' entries that point elsewhere, on stand-ins of their parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.kernels.ops.oracle.own import HashOracle
from kvcanary.recorder.engines.common.injecting import Injector
from kvcanary.recorder.engines.common.requests import request_id_of
from kvcanary.recorder.engines.sglang.oracle import SglangOracle
from kvcanary.recorder.engines.sglang.requests import SglangRequests
from kvcanary.recorder.engines.vllm.attachment import redirect
from kvcanary.recorder.engines.vllm.layout import why_no_oracle
from kvcanary.recorder.engines.vllm.oracle import VllmOracle
from kvcanary.recorder.engines.vllm.step import VllmRequests
from kvcanary.recorder.process.injection import Injection
from kvcanary.recorder.trace.header import Sampler

SAMPLER, ORACLE = Sampler(vocab_size=97), HashOracle(97)


class Marks:
    next_forward = 5

    off = ""

    def __init__(self) -> None:
        self.labels: list[dict[str, Any]] = []

    def shown_name(self, name: str) -> str:
        return f"<{name}>"

    def mark(self, _: str, labels: dict[str, Any]) -> None:
        self.labels.append(labels)


@pytest.mark.parametrize("room", [None, 77])
def test_sglang_returns_the_oracles_tokens(room: int | None) -> None:
    requests, target = SglangRequests(exact_ids=True), object()
    for rid in ("a", "b"):
        requests.see(SimpleNamespace(rid=rid, origin_input_ids=[1, 2], output_ids=[], bootstrap_room=room))
    batch = SimpleNamespace(rids=["a", "b"], seq_lens_cpu=torch.tensor([2, 9]), seq_lens=None)
    marks = Marks()
    oracle = SglangOracle(SAMPLER, target, requests, marks)
    sampled = oracle.around_sample(lambda *_: torch.zeros(3, dtype=torch.int32), target, None, batch)
    seeds = [request_id_of(rid, signed=True) if room is None else room for rid in ("a", "b")]
    assert sampled.tolist() == [ORACLE.next_token(seeds[0], 2), ORACLE.next_token(seeds[1], 9), 0]
    assert oracle.around_sample(lambda *_: torch.ones(2), object(), None, batch).tolist() == [1, 1]  # a draft's
    unknown = SimpleNamespace(rids=["a", "warm-up"], seq_lens_cpu=torch.tensor([2, 9]))
    assert oracle.around_sample(lambda *_: torch.ones(2), target, None, unknown).tolist() == [1, 1]
    marks.off = "a hook failed"
    assert oracle.around_sample(lambda *_: torch.ones(2), target, None, batch).tolist() == [1, 1]


def test_vllm_leaves_each_request_one_token_and_swaps_none_that_is_thrown_away() -> None:
    names = ["a", "b", "chunk"]
    requests = VllmRequests(8)
    for name in names:
        requests.see(name)[0].prompt_len = 50 if name == "chunk" else 3
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=names))
    cached = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[7, 4])
    new = [SimpleNamespace(req_id="chunk", num_computed_tokens=0)]
    scheduled = {"a": 1, "b": 1, "chunk": 30}
    marks = Marks()
    oracle = VllmOracle(SAMPLER, runner, requests, marks)
    oracle.begin_step(
        SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=new, num_scheduled_tokens=scheduled)
    )
    expected = [ORACLE.next_token(request_id_of(name), end) for name, end in zip(names, (8, 5, 30), strict=True)]
    assert oracle.force(torch.randn(3, 97)).argmax(1).tolist() == expected
    oracle.injector = Injector(Injection(fault="next_token_swap", at=4), marks)
    assert oracle.force(torch.randn(3, 97)).argmax(1).tolist() == [expected[1], expected[0], expected[2]]
    (label,) = marks.labels
    assert (label["forward"], label["request_ids"]) in [(4, [request_id_of(a) for a in pair]) for pair in ("ab", "ba")]
    assert {label["request"], label["other"]} < {"<a>", "<b>", "<chunk>"}  # as the trace has names
    assert oracle.force(torch.randn(3, 97)).argmax(1).tolist() == expected  # once
    logits = torch.randn(3, 97)
    names[0] = "new"  # the hook that says how long it is has failed
    assert torch.equal(oracle.force(logits.clone()), logits)
    names[0], marks.off = "a", "a hook failed"
    assert torch.equal(oracle.force(logits.clone()), logits)


def test_vllms_oracle_says_where_it_cannot_sample() -> None:
    config = SimpleNamespace(speculative_config=None)
    assert not why_no_oracle(SimpleNamespace(vllm_config=config, input_batch=SimpleNamespace(logitsprocs=[])))
    assert "V1 model runner" in why_no_oracle(SimpleNamespace(vllm_config=config, input_batch=SimpleNamespace()))
    drafts = SimpleNamespace(speculative_config=object())
    assert "speculative" in why_no_oracle(SimpleNamespace(vllm_config=drafts))


@pytest.mark.parametrize("at", [5, 6])
def test_an_entry_points_elsewhere_for_one_forward(at: int) -> None:
    table, marks = torch.tensor([[3, 4, 0], [3, 6, 7]], dtype=torch.int32), Marks()
    batch = SimpleNamespace(
        req_ids=["a", "b"],
        block_table=[SimpleNamespace(block_table=SimpleNamespace(gpu=table))],
        num_computed_tokens_cpu=[9, 12],
    )
    group: Any = SimpleNamespace(window=0, gid=0, index=0, block_size=4)
    before, injector = table.clone(), Injector(Injection(fault="req_to_token", at=at, request="b"), marks)
    put_back = redirect(injector, SimpleNamespace(input_batch=batch), [group])
    if at > marks.next_forward:
        assert put_back is None
        assert torch.equal(table, before)
        return
    ((row, column),) = (table != before).nonzero().tolist()
    (label,) = marks.labels
    assert row == 1
    assert (label["position"], label["slot"]) == (4 * column, 4 * int(table[row, column]))
    assert label["instead_of"] == 4 * int(before[row, column])
    assert put_back is not None
    put_back()
    assert torch.equal(table, before)
    assert redirect(injector, SimpleNamespace(input_batch=batch), [group]) is None
