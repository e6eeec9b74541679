"""A prefill and a decode engine of vLLM's: what one holds ready and the other pulls is recorded under one number."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.engines.vllm.connectors.external import ExternalLoads
from kvcanary.recorder.engines.vllm.connectors.pairs import role_of, room_of
from kvcanary.recorder.engines.vllm.step import VllmRequests
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import PULLED

from .groups import group

SIZE = 4
PARAMS = {
    "remote_engine_id": "p",
    "remote_request_id": "0-a",
    "remote_block_ids": ([3, 5, 4],),
    "remote_num_tokens": 10,
}


class Manager:
    def __init__(self) -> None:
        self.req_to_blocks: dict[str, list[Any]] = {}

    def allocate_external_computed_blocks(self, name: str, local: int, loaded: int) -> None:
        self.req_to_blocks[name] = [SimpleNamespace(block_id=n) for n in (1, 7, 2)]


class Scheduler:
    def __init__(self, role: str) -> None:
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_role=role, kv_connector="NixlConnector")
        )
        self.connector = object()
        coordinator = SimpleNamespace(single_type_managers=[Manager()])
        self.kv_cache_manager = SimpleNamespace(coordinator=coordinator)
        self.requests: dict[str, Any] = {}
        self.params: Any = PARAMS

    def _connector_finished(self, request: Any) -> Any:
        return self.params is not None, self.params

    def _update_from_kv_xfer_finished(self, output: Any) -> None:
        pass


def played(path: Any, role: str, play: Any, *, window: int = 0) -> list[Any]:
    """Return what the trace has of an engine of this role."""
    scheduler, own = Scheduler(role), group(SIZE, window)
    pool = PoolGroup(name="g", num_slots=64 * SIZE)
    recorder = Recorder(path, TraceHeader(groups=(pool,), tables=(StateTable(rows=4, width=32),)))
    layout: Any = SimpleNamespace(groups=[own], kv=None)
    connector = "" if role == "kv_producer" else "NixlConnector"
    loads = ExternalLoads(connector, layout, VllmRequests(8), recorder, scheduler, [])
    faults: list[Any] = []
    loads.attach(lambda *fault: faults.append(fault))
    play(scheduler, loads)
    recorder.close()
    assert (faults, recorder.stats().off) == ([], "closed")
    return [event for event in read_trace(path) if event.kind == "transfer"]


def slots_of(event: Any) -> list[int]:
    runs = zip(event.ints("slot_start").tolist(), event.ints("slot_count").tolist(), strict=True)
    return [slot for start, count in runs for slot in range(start, start + count)]


def produce(scheduler: Any, _: Any) -> None:
    scheduler._connector_finished(SimpleNamespace(request_id="0-a"))
    scheduler._update_from_kv_xfer_finished(SimpleNamespace(finished_sending={"0-a", "other"}))
    scheduler._update_from_kv_xfer_finished(SimpleNamespace(finished_sending={"0-a"}))


def consume(
    scheduler: Any, loads: Any, *, local: int = 0, failed: Any = None, lost: Any = (), params: Any = PARAMS
) -> None:
    scheduler.requests["d"] = SimpleNamespace(kv_transfer_params=params)
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    manager.allocate_external_computed_blocks("d", local, 10 - local)
    loads.begin_step({})
    said = {"finished_recving": {"d"}, "failed_recving": set(lost), "invalid_block_ids": failed}
    output = SimpleNamespace(finished_sending=None, **said)
    scheduler._update_from_kv_xfer_finished(output)


def test_both_sides_have_the_same_number(tmp_path: Any) -> None:
    sent = played(tmp_path / "p.arrow", "kv_producer", produce)
    received = played(tmp_path / "d.arrow", "kv_consumer", consume)
    assert (
        [event.scalar("status") for event in sent] == [event.scalar("status") for event in received] == ["start", "end"]
    )
    (room,) = {event.scalar("room") for event in sent + received}
    assert room == room_of(PARAMS) >= 0
    assert {event.scalar("note") for event in sent} == {PULLED}
    assert slots_of(sent[0]) == slots_of(sent[1]) == [12, 13, 14, 15, 20, 21, 22, 23, 16, 17]
    assert slots_of(received[1]) == [4, 5, 6, 7, 28, 29, 30, 31, 8, 9]


def test_what_the_prefix_cache_has_is_not_received(tmp_path: Any) -> None:
    received = played(tmp_path / "d.arrow", "kv_consumer", lambda *parts: consume(*parts, local=4))
    assert [event.ints("prefix_lens").tolist() for event in received] == [[4], [4]]
    assert slots_of(received[1]) == [28, 29, 30, 31, 8, 9]


@pytest.mark.parametrize(
    "more",
    [{"failed": {7}}, {"lost": {"d"}}, {"params": None}, {"params": {**PARAMS, "remote_request_id": None}}],
    ids=str,
)
def test_what_is_not_what_the_other_side_holds_has_no_number(tmp_path: Any, more: dict[str, Any]) -> None:
    received = played(tmp_path / "d.arrow", "kv_consumer", lambda *parts: consume(*parts, **more))
    (end,) = [event for event in received if event.scalar("status") == "end"]
    assert end.scalar("room") == -1


@pytest.mark.parametrize("chosen", ["NixlPullConnector", "OffloadingConnector", "NixlPushConnector"])
def test_of_several_connectors_the_one_that_pulls_has_the_number(tmp_path: Path, chosen: str) -> None:
    def play(scheduler: Any, loads: Any) -> None:
        members = [type(chosen, (), {})()]
        scheduler.connector = SimpleNamespace(_requests_to_connector={"d": 0}, _connectors=members)
        consume(scheduler, loads)

    received = played(tmp_path / "d.arrow", "kv_consumer", play)
    assert {event.scalar("room") for event in received} == {room_of(PARAMS) if "Pull" in chosen else -1}


def test_an_engine_that_is_both_sides_or_reads_a_window_says_no_number(tmp_path: Any) -> None:
    assert played(tmp_path / "b.arrow", "kv_both", produce) == []
    both = played(tmp_path / "c.arrow", "kv_both", consume)
    window = played(tmp_path / "w.arrow", "kv_consumer", consume, window=6)
    assert {event.scalar("room") for event in both} == {-1}
    assert window[-1].scalar("room") == -1
    assert played(tmp_path / "p.arrow", "kv_producer", produce, window=6) == []


@pytest.mark.parametrize("params", [None, {**PARAMS, "remote_block_ids": ()}, {"remote_block_ids": ([3],)}])
def test_a_request_that_nothing_is_held_ready_of_is_not_sent(tmp_path: Any, params: Any) -> None:
    def play(scheduler: Any, loads: Any) -> None:
        scheduler.params = params
        produce(scheduler, loads)

    assert played(tmp_path / "p.arrow", "kv_producer", play) == []


def test_roles() -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role="kv_producer"))
    assert role_of(config, object()) == "prefill"
    assert role_of(config, None) == ""  # what is sent, only the scheduler knows
    assert role_of(SimpleNamespace(), object()) == ""
    assert np.iinfo(np.int64).max >= room_of(PARAMS)
