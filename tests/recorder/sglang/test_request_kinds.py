"""Requests whose tokens are placeholders, that come again, or whose rows are more than one: what is told of each."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.engines.common.requests import request_id_of
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang.forward import DeviceForwards
from kvcanary.recorder.engines.sglang.requests import BatchLookup, SglangRequests
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from .fake_engine import (
    SLOTS,
    Batch,
    ForwardBatch,
    MHATokenToKVPool,
    ModelRunner,
    Request,
    Scheduler,
    TokenToKVPoolAllocator,
    hooked,
)

ROW = 4  # of a beam


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sglang_attachment.SglangAttachment, "end_with_process", lambda _: None)
    monkeypatch.setattr(sglang_attachment, "not_applied", list)
    return hooked(monkeypatch, RecordingSettings(folder=tmp_path))


def judged(attached: Any) -> tuple[Any, list[Any]]:
    """End the recording; return what its replay says, and its events."""
    recorder = attached.recording.recorder
    recorder.close()
    return replay(recorder.path, settings=ReplaySettings(), report=None), list(read_trace(recorder.path))


def engine() -> Scheduler:
    return Scheduler(ModelRunner(), TokenToKVPoolAllocator(SLOTS - 1, 1))


def answer(scheduler: Scheduler, *requests: Any) -> None:
    for request in requests:
        scheduler.step([request])
    while running := [request for request in requests if not request.finished()]:
        scheduler.step(running)


def test_an_id_that_comes_again_is_another_request(attached: Any) -> None:
    scheduler = engine()
    for tokens in ([5, 6, 7, 8], [9, 9, 9, 9, 9, 9, 9, 9], [5, 6, 7, 1, 2, 3]):
        answer(scheduler, Request("again", tokens, new_tokens=3))
    summary, _ = judged(attached)
    assert (summary.verdict.value, summary.findings) == ("clean", 0)


def test_who_gives_a_row_back_does_not_take_the_place_of_who_has_its_name(attached: Any) -> None:
    scheduler = engine()
    old, new = Request("r", [5, 6], new_tokens=1), Request("r", [7, 8], new_tokens=1)
    answer(scheduler, old)
    session = attached.recording
    session.got_row(new)
    session.gave_row_back(old, 1)
    assert session.requests.get("r").req is new


@pytest.mark.parametrize(
    ("to_finish", "retracting", "status"),
    [(None, True, "retracted"), (None, False, "aborted"), (SimpleNamespace(), True, "finished")],
)
def test_a_row_that_is_released_is_retracted_where_nothing_ends_its_request(
    attached: Any, to_finish: Any, retracting: bool, status: str
) -> None:
    scheduler = engine()
    request: Any = Request("r", [5, 6], new_tokens=9)
    request.to_finish = to_finish
    scheduler.step([request])
    leave = attached.on_retract(req=request, offload_kv=False) if retracting else None
    scheduler.rows.free(request)
    if leave:
        leave(None, None)
    _, events = judged(attached)
    assert [view.scalar("status") for view in events if view.kind == "status"] == ["admitted", status]


def test_embeddings_have_no_tokens(attached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ids are made up, and the same slots hold others' tokens afterwards."""
    scheduler, made_up = engine(), ForwardBatch.init_new

    def with_embeddings(batch: Any, model_runner: Any) -> Any:
        made = made_up(batch, model_runner)
        if batch.fields["forward_mode"].name == "EXTEND" and hasattr(batch.reqs[0], "input_embeds"):
            made.input_embeds = torch.zeros(len(made.input_ids), 8)
        return made

    monkeypatch.setattr(ForwardBatch, "init_new", with_embeddings)
    first, second, plain = (Request(name, [1] * 6, new_tokens=4) for name in ("first", "second", "plain"))
    first.input_embeds = second.input_embeds = [[0.0] * 8] * 6  # type: ignore[attr-defined]
    plain.origin_input_ids = [7, 8, 9]
    answer(scheduler, first, second, plain)
    summary, events = judged(attached)
    assert (summary.verdict.value, summary.findings) == ("clean", 0)
    forwards = [view for view in events if view.kind == "forward"]
    assert [view.ints("input_ids").tolist() for view in forwards[:3]] == [[-1] * 6, [-1] * 6, [7, 8, 9]]
    assert forwards[0].ints("truth_tokens").tolist() == [-1] * 6
    assert -1 not in forwards[3].ints("input_ids")


def test_embeddings_have_no_tokens_on_a_device() -> None:
    told: list[Any] = []
    capture: Any = SimpleNamespace(
        before=lambda forward: told.append(forward) or 0, frames=SimpleNamespace(device="cpu", get_device=lambda: -1)
    )
    one = {
        "forward_mode": SimpleNamespace(name="DECODE"),
        "req_pool_indices": torch.tensor([1]),
        "positions": torch.tensor([4, 5]),
        "out_cache_loc": torch.tensor([8, 9]),
    }
    for ids, embeddings in ((torch.tensor([1, 1]), torch.zeros(2, 8)), (None, torch.zeros(2, 8)), (None, None)):
        batch = SimpleNamespace(**one, input_ids=ids, input_embeds=embeddings)
        runner: Any = SimpleNamespace(index=0, fed=None)
        DeviceForwards(capture).record(runner, batch, None, b"")  # type: ignore[arg-type]
        assert told[-1].input_ids.tolist() == [-1, -1]


def test_a_beams_tokens_are_unknown_and_its_rows_are_its_leaders(attached: Any) -> None:
    scheduler = engine()
    leader, other = Request("wide", [5, 6, 7], new_tokens=4), Request("other", [8, 9], new_tokens=4)
    leader.beam_group = group = SimpleNamespace(member_rows_cpu=torch.tensor([ROW]))  # type: ignore[attr-defined]
    scheduler.step([leader])
    scheduler.step([other])
    session = attached.recording
    tail = SimpleNamespace(entries=[SimpleNamespace(group=group, leader_idx=0)])
    batch = SimpleNamespace(reqs=[leader, other], beam_tail=tail)
    before = session.batches.of(["wide", "other"], 2).output_lens(7)
    for _ in range(2):
        attached.on_run(scheduler, batch)
    rids = ["wide", "other", *session.members]
    known = session.batches.of(rids, 3)
    ids = [request_id_of(name, signed=False) for name in ("wide", "other", "wide")]
    assert known.ids.tolist() == ids
    assert [source.tokens(0, 4).tolist() for source in known.truth or ()] == [
        [5, 6, 7, -1],
        [8, 9, other.output_ids[0]],
        [5, 6, 7, -1],
    ]
    assert len(before) == 16
    tokens, lens = known.sampled(np.zeros(3, np.int64).tobytes(), known.output_lens(8))
    assert (tokens.tolist(), lens.tolist()) == ([-1, other.output_ids[0], -1], [1, 1, 1])
    attached.on_run(scheduler, SimpleNamespace(reqs=[leader, other], beam_tail=None))
    assert session.members == []
    _, events = judged(attached)
    given = [view for view in events if view.kind == "status" and view.scalar("note") == "beam"]
    assert [(view.scalar("request_id"), view.ints("req_pool_indices").tolist()) for view in given] == [(ids[0], [ROW])]


def test_placeholders_are_unknown_to_the_truth() -> None:
    book = SglangRequests(exact_ids=False)
    made = {"origin_input_ids": [1, 1], "output_ids": [6]}
    for rid, more, truth in (
        ("embedded", {"input_embeds": [[0.0]] * 2}, [-1, -1, 6]),
        ("wide", {"beam_group": object()}, [1, 1, -1]),
        ("plain", {"input_embeds": None, "beam_group": None}, [1, 1, 6]),
    ):
        book.see(SimpleNamespace(rid=rid, **made, **more))
        found = book.truth([rid], 1)
        assert found is not None
        assert found.flat.tolist() == truth
        (source,) = BatchLookup(book).of([rid], 1).truth or ()
        assert source.tokens(1, 3).tolist() == truth[1:]


def test_the_rest_is_recorded_beside_a_pool_of_an_unknown_class(attached: Any) -> None:
    class PageMajorMHATokenToKVPool(MHATokenToKVPool):
        """Of which the adapter knows nothing."""

    runner = ModelRunner()
    runner.token_to_kv_pool = PageMajorMHATokenToKVPool(**vars(runner.token_to_kv_pool))
    requests = [Request(f"r{i}", [i + 3, i + 5, 40], new_tokens=3) for i in range(2)]
    answer(Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1)), *requests)
    summary, events = judged(attached)
    pools = [entry.name for entry in summary.header.not_watched if entry.what == "pool"]
    assert pools == ["PageMajorMHATokenToKVPool"]
    assert (summary.violations, summary.findings, summary.verified) == (0, 0, 0)
    assert summary.verdict.value == "inconclusive"  # nothing else of this engine holds a slot
    assert {view.kind for view in events} >= {"forward", "sample", "status", "request"}


def test_what_a_step_of_diffusion_settles_is_no_sample_behind_it(attached: Any) -> None:
    """A block's last forward is fed what it settles, and the next block begins with masks."""
    runner, request = ModelRunner(), Request("diffused", [5], new_tokens=7)
    runner.server_args.dllm_algorithm = "LowConfidence"
    scheduler = Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
    scheduler.rows.alloc([request])
    given = scheduler.token_to_kv_pool_allocator.alloc(4)
    for start, block in ((0, [5, 0]), (2, [90, 90])):  # 0 is what the runner makes of 0
        slots, row = given[start : start + 2], torch.tensor([request.req_pool_idx])
        scheduler.rows.req_to_token[row, torch.arange(2) + start] = slots.int()
        fields = {
            "forward_mode": SimpleNamespace(name="DLLM_EXTEND"),
            "req_pool_indices": row,
            "seq_lens": torch.tensor([start + 2]),
            "extend_prefix_lens": torch.tensor([start]),
            "extend_seq_lens": torch.tensor([2]),
            "input_ids": torch.tensor(block),
            "positions": torch.arange(2) + start,
            "out_cache_loc": slots,
            "ends": torch.tensor([2]),
            "spec_info": None,
        }
        batch = Batch([request], fields)
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    summary, told = judged(attached)
    assert len(request.output_ids) == 2
    assert [event for event in told if event.kind == "sample"] == []
    assert (summary.verdict.value, summary.findings) == ("clean", 0)
    assert [entry.name for entry in summary.header.not_watched if "settle" in entry.reason] == ["sampled tokens"]
