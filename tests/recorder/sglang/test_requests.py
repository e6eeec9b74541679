"""Requests: ids, rows and truth tokens, of all versions."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.engines.common.requests import request_id_of
from kvcanary.recorder.engines.sglang import requests as sglang_requests
from kvcanary.recorder.engines.sglang.requests import BatchLookup, KnownBatch, SglangRequest, SglangRequests, row_of


def test_ids_are_sglangs_own() -> None:
    # blake2b with a digest of 8 bytes, little-endian and signed, as its token oracle has it
    assert request_id_of("a", signed=True) == request_id_of("a", signed=False) == 3405396810240292928
    assert request_id_of("f", signed=True) == -2626098076463622610
    assert request_id_of("f", signed=False) == -2626098076463622610 + 2**63


def test_rows_of_all_versions() -> None:
    assert row_of(SimpleNamespace(req_pool_idx=3)) == 3
    assert row_of(SimpleNamespace(req_pool_idx=None)) == -1
    assert row_of(SimpleNamespace(req_pool_idx=3, kv=None)) == 3
    assert row_of(SimpleNamespace(req_pool_idx=3, kv=SimpleNamespace(committed=7))) == 3
    assert row_of(SimpleNamespace(kv=SimpleNamespace(req_pool_idx=4))) == 4
    assert row_of(SimpleNamespace(kv=SimpleNamespace(req_pool_idx=None))) == -1


def test_truth_follows_the_output_and_a_new_prompt() -> None:
    req = SimpleNamespace(rid="r", origin_input_ids=[5, 6, 7], output_ids=[])
    known = SglangRequest(req, 1)
    assert known.truth().tolist() == [5, 6, 7]
    for token in range(20):
        req.output_ids.append(token)
        assert known.truth().tolist() == [5, 6, 7, *range(token + 1)]
    del req.output_ids[4:]
    assert known.truth().tolist() == [5, 6, 7, 0, 1, 2, 3]
    req.origin_input_ids = [9, 9]
    assert known.truth().tolist() == [9, 9, 0, 1, 2, 3]


def test_a_book_knows_a_name_that_is_used_again_as_another_request() -> None:
    book = SglangRequests(exact_ids=False)
    first, second = (SimpleNamespace(rid="r", origin_input_ids=[i], output_ids=[]) for i in (1, 2))
    assert book.see(first)[1]
    assert not book.see(first)[1]
    assert book.see(second)[1]
    book.drop(first)  # the name is the second's by now
    truth = book.truth(["r"], 2)
    assert truth is not None
    assert (truth.flat.tolist(), truth.lens.tolist()) == ([2], [1, 0])
    assert book.ids(["r"], 2).tolist() == [request_id_of("r", signed=False), -1]
    assert book.truth(["r", "stranger"], 2) is None


def test_lengths_are_looked_up_once_a_moment() -> None:
    book = SglangRequests(exact_ids=False)
    reqs = [SimpleNamespace(rid=f"r{i}", origin_input_ids=[i] * 3, output_ids=[]) for i in range(2)]
    for req in reqs:
        book.see(req)
    batches = BatchLookup(book)
    known = batches.of(["r0", "r1"], 3)
    assert batches.of(["r0", "r1"], 3) is known
    before = known.output_lens(1)
    reqs[1].output_ids += [7, 8]
    assert known.output_lens(1) is before
    after = known.output_lens(2)
    assert [np.frombuffer(lens, np.int64).tolist() for lens in (before, after)] == [[0, 0], [0, 2]]
    tokens, lens = known.sampled(before, after)
    assert (tokens.tolist(), lens.tolist()) == ([7, 8], [0, 2])
    assert not known.with_logprobs
    reqs[1].return_logprob, reqs[1].sampling_params = True, SimpleNamespace(temperature=1.0, top_k=1)
    reqs[1].logprob = SimpleNamespace(output_token_logprobs_val=[-0.5, -2.0], output_token_logprobs_idx=[7, 9])
    again = KnownBatch(["r0", "r1"], 3, book)
    said = again.logprobs(before, tokens, lens)  # of the second one another token's
    assert (said["sampled_logprobs"].tolist()[0], said["logprobs_kind"].tolist()) == (-0.5, [1, 1])
    assert np.isnan(said["sampled_logprobs"][1])
    reqs[1].sampling_params.temperature = 0.7
    assert SglangRequest(reqs[1], 1).logprobs_kind == 2
    assert known.ids.tolist() == [request_id_of(r, signed=False) for r in ("r0", "r1")] + [-1]
    stranger = batches.of(["r0", "r9"], 2)
    assert (stranger.outputs, stranger.truth, stranger.output_lens(3)) == (None, None, b"")
    assert batches.of(None, 2).ids.tolist() == [-1, -1]


def test_requests_that_wait_without_a_row_and_never_end_are_forgotten_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_requests, "MAX_KNOWN", 10)
    book = SglangRequests(exact_ids=False)

    def request(name: str, row: int | None) -> Any:
        return SimpleNamespace(rid=name, req_pool_idx=row, origin_input_ids=[1], output_ids=[])

    running = [request(f"running{n}", n + 1) for n in range(7)]
    for req in running:
        book.see(req)
    aborted = [request(f"aborted{n}", None) for n in range(100)]
    for req in aborted:
        assert book.see(req)[1]
    assert all(not book.see(req)[1] for req in running)
    known = sum(book.get(req.rid) is not None for req in aborted)
    assert known <= 14
