"""A prefill and a decode engine of SGLang's shape: both traces together say where a byte went wrong."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.kernels.capture import model_forward
from kvcanary.recorder.engines.sglang.attachment import SglangAttachment
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import replay, replay_joined
from kvcanary.replayer.run.settings import ReplaySettings

from .fake_engine import SLOTS, ModelRunner, Request, Scheduler, TokenToKVPoolAllocator, hooked

PROMPT = [5, 6, 7, 8, 9]


pytestmark = pytest.mark.usefixtures("process_goes_on")


def request(new_tokens: int) -> Request:
    req = Request("r", list(PROMPT), new_tokens)
    req.bootstrap_room = 42
    return req


def start(patch: pytest.MonkeyPatch, folder: Path, role: str) -> tuple[SglangAttachment, Scheduler]:
    attachment = hooked(patch, RecordingSettings(folder=folder / role))
    runner = ModelRunner()
    runner.server_args.disaggregation_mode = role
    return attachment, Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))


def end(attachment: SglangAttachment) -> Path:
    assert attachment.recording is not None
    attachment.recording.recorder.close()
    return attachment.recording.recorder.path


def prefill(patch: pytest.MonkeyPatch, folder: Path, *, state: int = 4) -> tuple[Path, dict[str, torch.Tensor], int]:
    """Compute a prompt and send it; return the trace, the bytes sent, and the token sampled."""
    attachment, scheduler = start(patch, folder, "prefill")
    req = request(new_tokens=9)
    req.disagg_kv_sender = SimpleNamespace(poll=lambda: state)  # type: ignore[attr-defined]
    scheduler.step([req])
    scheduler.send_kv_chunk(req, end_idx=2)
    scheduler.send_kv_chunk(req, last_chunk=True)
    slots = scheduler.rows.req_to_token[req.req_pool_idx, : len(PROMPT)].long()
    pool = scheduler.runner.token_to_kv_pool
    sent = {"k": pool.k_buffer[0][slots].clone(), "v": pool.v_buffer[0][slots].clone()}
    for _ in range(2):  # the engine asks again and again
        assert req.disagg_kv_sender.poll() == state  # type: ignore[attr-defined]
    scheduler.token_to_kv_pool_allocator.free(slots)
    scheduler.rows.free(req)
    return end(attachment), sent, req.output_ids[0]


def received(scheduler: Scheduler, token: int) -> Request:
    """Return a request whose prompt has slots, but not yet their bytes."""
    req = request(new_tokens=6)
    req.output_ids.append(token)
    scheduler.rows.alloc([req])
    slots = scheduler.token_to_kv_pool_allocator.alloc(len(PROMPT))
    scheduler.rows.req_to_token[req.req_pool_idx, : len(PROMPT)] = slots.int()
    return req


def decode(patch: pytest.MonkeyPatch, folder: Path, sent: dict[str, torch.Tensor], token: int) -> Path:
    attachment, scheduler = start(patch, folder, "decode")
    other = Request("other", [50, 51], new_tokens=4)
    scheduler.step([other])  # so that the slots differ from the prefill side's
    req = received(scheduler, token)
    slots = scheduler.rows.req_to_token[req.req_pool_idx, : len(PROMPT)].long()
    pool = scheduler.runner.token_to_kv_pool
    pool.k_buffer[0][slots], pool.v_buffer[0][slots] = sent["k"], sent["v"]
    scheduler.disagg_decode_transfer_queue._commit_transfer_to_req(SimpleNamespace(req=req, kv_receiver=None))
    while not req.finished():
        scheduler.step([r for r in (other, req) if not r.finished()])
    return end(attachment)


def verdicts(paths: list[Path]) -> list[str]:
    return [s.verdict.value for s in replay_joined(paths, settings=ReplaySettings(), reports=[None] * len(paths))]


def test_a_healthy_pair_is_clean_and_the_decode_side_alone_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        first, sent, token = prefill(patch, tmp_path)
    with monkeypatch.context() as patch:
        second = decode(patch, tmp_path, sent, token)
    assert verdicts([first, second]) == ["clean", "clean"]
    assert verdicts([second]) == ["inconclusive"]
    told = [(e.scalar("status"), e.scalar("mode")) for e in read_trace(first) if e.kind == "transfer"]
    assert told == [("start", "send"), ("end", "send")]
    told = [(e.scalar("status"), e.scalar("mode")) for e in read_trace(second) if e.kind == "transfer"]
    assert told == [("start", "receive"), ("end", "receive")]


def test_a_byte_that_changes_on_the_way_is_found_on_the_decode_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        first, sent, token = prefill(patch, tmp_path)
    sent["k"][3, 0, 0] += 1
    with monkeypatch.context() as patch:
        second = decode(patch, tmp_path, sent, token)
    assert verdicts([first, second]) == ["clean", "corrupt"]


def test_a_transfer_that_failed_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        first, _, _ = prefill(patch, tmp_path, state=0)
    told = [(e.scalar("status"), e.scalar("note")) for e in read_trace(first) if e.kind == "transfer"]
    assert told == [("start", ""), ("failed", "the sender says so")]


@pytest.mark.parametrize("gpu", [False, True])
def test_slots_freed_while_they_are_being_received_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, gpu: bool
) -> None:
    if gpu:
        request.getfixturevalue("on_a_gpu")
        monkeypatch.setattr(model_forward, "PROGRAMS", 4)
        monkeypatch.setattr(model_forward, "TILE", 32)
    attachment, scheduler = start(monkeypatch, tmp_path, "decode")
    other = Request("other", [50, 51], new_tokens=4)
    scheduler.step([other])
    req = received(scheduler, 7)
    allocator, table = scheduler.token_to_kv_pool_allocator, scheduler.rows.req_to_token
    scheduler.disagg_decode_transfer_queue.extend([SimpleNamespace(req=req, kv_receiver=None)])
    scheduler.step([other])
    allocator.free(table[req.req_pool_idx, : len(PROMPT)].long())  # aborted; nobody has stopped the transfer
    scheduler.rows.free(req)
    scheduler.step([other])
    found = replay(end(attachment), settings=ReplaySettings(), report=None)
    assert "freed_during_transfer" in found.findings_by_kind


def test_a_decode_engine_whose_transfers_cannot_be_seen_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    init = Scheduler.__init__

    def without_queue(self: Scheduler, *args: Any) -> None:
        init(self, *args)
        self.disagg_decode_transfer_queue = None  # type: ignore[assignment]

    monkeypatch.setattr(Scheduler, "__init__", without_queue)
    caplog.set_level(logging.ERROR, "kvcanary")
    attachment, _ = start(monkeypatch, tmp_path, "decode")
    assert attachment.recording is None
    assert "what a decode engine receives cannot be recorded" in caplog.text
