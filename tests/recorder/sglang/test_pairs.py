"""Prefill and decode sides of SGLang's shape: health checks, windows, failures, pages that go too early, cost when idle."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.engines.sglang.attachment import SglangAttachment
from kvcanary.recorder.engines.sglang.connectors.transfers import SglangTransfers
from kvcanary.recorder.engines.sglang.requests import SglangRequest
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.replayer.run.replay import replay_joined
from kvcanary.replayer.run.settings import ReplaySettings

from .fake_engine import SLOTS, ModelRunner, Request, Scheduler, TokenToKVPoolAllocator, hooked

PROMPT = [5, 6, 7, 8, 9]
Told = tuple[str, str, int]


pytestmark = pytest.mark.usefixtures("process_goes_on")


class FakeKVSender:
    """SGLang's own, by its name: what it is given goes nowhere."""

    def poll(self) -> int:
        return 4


class FakeKVReceiver:
    """As `FakeKVSender`."""

    def failure_exception(self) -> None:
        raise RuntimeError("failed")


class Side:
    """One side, started and hooked."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, role: str) -> None:
        self.attachment: SglangAttachment = hooked(patch, RecordingSettings(folder=folder / role))
        runner = ModelRunner()
        runner.server_args.disaggregation_mode = role
        self.scheduler = Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
        assert self.attachment.recording is not None
        self.recorder = self.attachment.recording.recorder

    def request(self, room: int, connection: Any, new_tokens: int = 6) -> Request:
        req = Request("r", list(PROMPT), new_tokens)
        req.bootstrap_room = room
        req.disagg_kv_sender = connection  # type: ignore[attr-defined]
        return req

    def slots(self, req: Request) -> torch.Tensor:
        return self.scheduler.rows.req_to_token[req.req_pool_idx, : len(PROMPT)].long()

    def free(self, req: Request) -> None:
        self.scheduler.token_to_kv_pool_allocator.free(self.slots(req))
        self.scheduler.rows.free(req)

    def expect(self, room: int, receiver: Any) -> Any:
        """Give a request its row and slots, and put it where SGLang waits for what is sent to it."""
        req = self.request(room, None)
        self.scheduler.rows.alloc([req])
        slots = self.scheduler.token_to_kv_pool_allocator.alloc(len(PROMPT))
        self.scheduler.rows.req_to_token[req.req_pool_idx, : len(PROMPT)] = slots.int()
        waiting = SimpleNamespace(req=req, kv_receiver=receiver)
        self.scheduler.disagg_decode_transfer_queue.extend([waiting])
        return waiting

    def end(self) -> Path:
        self.recorder.close()
        return self.recorder.path


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Callable[[str], Side]]:
    """What starts a side, in the place of the one before."""
    patch = pytest.MonkeyPatch()

    def start(role: str) -> Side:
        patch.undo()
        return Side(patch, tmp_path, role)

    yield start
    patch.undo()


def told(path: Path) -> list[Told]:
    return [
        (event.scalar("mode"), event.scalar("status"), event.scalar("room"))
        for event in read_trace(path)
        if event.kind == "transfer"
    ]


def verdicts(*paths: Path) -> list[str]:
    return [s.verdict.value for s in replay_joined(list(paths), settings=ReplaySettings(), reports=[None] * len(paths))]


def test_a_health_check_is_sent_to_nobody_and_its_slots_are_not_judged(sides: Callable[[str], Side]) -> None:
    prefill = sides("prefill")
    req = prefill.request(0, FakeKVSender())
    prefill.scheduler.step([req])
    prefill.scheduler.send_kv_chunk(req, last_chunk=True)
    assert req.disagg_kv_sender.poll() == 4  # type: ignore[attr-defined]
    prefill.free(req)
    first = prefill.end()
    decode = sides("decode")
    waiting = decode.expect(0, FakeKVReceiver())  # the same room, as SGLang's own health checks have
    decode.scheduler.disagg_decode_transfer_queue._commit_transfer_to_req(waiting)
    waiting.req.output_ids.append(3)
    while not waiting.req.finished():
        decode.scheduler.step([waiting.req])
    second = decode.end()
    assert told(first) == []
    assert told(second) == [("receive", "start", -1), ("receive", "end", -1)]
    assert verdicts(first, second) == ["clean", "clean"]
    assert verdicts(second) == ["clean"], "nobody is missing"


def test_a_prompt_is_expected_from_the_moment_at_which_its_sender_knows_where_to_write(
    sides: Callable[[str], Side],
) -> None:
    decode = sides("decode")
    waiting = decode.expect(42, SimpleNamespace(failure_exception=lambda: None))
    decode.scheduler.token_to_kv_pool_allocator.free(decode.slots(waiting.req)[2:3])
    decode.scheduler.disagg_decode_transfer_queue._commit_transfer_to_req(waiting)
    path = decode.end()
    assert told(path) == [("receive", "start", 42), ("receive", "end", 42)]
    [summary] = replay_joined([path], settings=ReplaySettings(), reports=[None])
    assert summary.findings_by_kind == {"freed_during_transfer": 1}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_failed_transfer_held_may_go(sides: Callable[[str], Side], role: str) -> None:
    side = sides(role)

    def failure_exception() -> None:
        raise RuntimeError("failed")

    if role == "prefill":
        req = side.request(42, SimpleNamespace(poll=lambda: 3, failure_exception=failure_exception))
        side.scheduler.step([req])
        side.scheduler.send_kv_chunk(req, last_chunk=True)
        assert req.disagg_kv_sender.poll() == 3  # type: ignore[attr-defined]  # another rank says that it failed
        connection = req.disagg_kv_sender  # type: ignore[attr-defined]
    else:
        waiting = side.expect(42, SimpleNamespace(failure_exception=failure_exception))
        req, connection = waiting.req, waiting.kv_receiver
    with pytest.raises(RuntimeError, match="failed"):
        connection.failure_exception()
    side.free(req)
    path = side.end()
    mode = "send" if role == "prefill" else "receive"
    assert told(path) == [(mode, "start", 42), (mode, "failed", 42)]
    [summary] = replay_joined([path], settings=ReplaySettings(), reports=[None])
    assert summary.findings_by_kind == {}


def test_what_lands_in_the_hosts_memory_is_said_to_be_lost(sides: Callable[[str], Side]) -> None:
    decode = sides("decode")
    waiting = decode.expect(42, SimpleNamespace(failure_exception=lambda: None))
    waiting.host_staged = True
    decode.scheduler.disagg_decode_transfer_queue._commit_transfer_to_req(waiting)
    path = decode.end()
    assert [event.scalar("note") for event in read_trace(path) if event.kind == "loss"] == [
        "a prompt was received in the host's memory, which is not recorded"
    ]


def test_an_idle_side_keeps_nothing_of_what_its_rounds_cost(sides: Callable[[str], Side]) -> None:
    decode = sides("decode")
    kept = len(decode.attachment.cost.log)
    for _ in range(50):
        decode.scheduler.disagg_decode_transfer_queue.extend([])
    assert len(decode.attachment.cost.log) == kept
    prefill = sides("prefill")
    req = prefill.request(42, SimpleNamespace(poll=lambda: 3))
    prefill.scheduler.step([req])
    prefill.scheduler.send_kv_chunk(req, last_chunk=True)
    kept = len(prefill.attachment.cost.log)
    for _ in range(50):
        req.disagg_kv_sender.poll()  # type: ignore[attr-defined]
    assert len(prefill.attachment.cost.log) == kept


def test_what_lies_before_a_window_is_received_from_nobody() -> None:
    """It has a slot and no record, and the window's first token is chained to it."""
    told: list[tuple[str, int, int, list[int]]] = []

    def transfer(status: str, *, room: int, slots: Any, start_position: int, **_: Any) -> None:
        told.append((status, room, start_position, slots.tolist()))

    layout: Any = SimpleNamespace(
        runners={1: SimpleNamespace(table=0, groups={"full": 0, "swa": 1})},
        groups=[
            SimpleNamespace(window=0, page_size=1, lut=-1),
            SimpleNamespace(window=2, page_size=1, lut=0),
        ],
        tables=[torch.tensor([[0, 0, 0, 0, 0], [11, 12, 13, 14, 15]], dtype=torch.int32)],
        luts=[torch.arange(20) - 10],
    )
    req: Any = Request("r", list(PROMPT), 1)
    req.req_pool_idx, req.bootstrap_room = 1, 42
    recorder: Any = SimpleNamespace(transfer=transfer)
    known = SglangRequest(req, 7)
    transfers = SglangTransfers(layout, recorder, [], lambda _: known)
    transfers.expected(req, known, None)
    transfers.received(req, known, None)
    once = [(42, 0, [11, 12, 13, 14, 15]), (42, 3, [4, 5]), (-1, 2, [3])]
    assert told == [(status, *one) for status in ("start", "end") for one in once]
    told.clear()
    layout.luts[0][13] = 0  # no slot there: nothing to say of it
    transfers.received(req, known, None)
    assert [one[1:] for one in told] == once[:2] * 2
