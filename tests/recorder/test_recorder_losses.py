"""Events that do not fit: dropped whole, said before what follows, and never taken for corruption."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.recorder.capture.host_arrays import runs_to_slots
from kvcanary.recorder.capture.kv_shadow import GroupKvShadow, group_shadows
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import SLOTS_LISTED, TIER_HOST, TIER_POOL
from kvcanary.recorder.writing.writer import TraceWriter

from ..support.engines.documented_engine import contents, judged, run_requests, toy_engine


class Refusing:
    """A writer that refuses the calls whose numbers are in `refused`, as one with a full queue does."""

    def __init__(self, writer: TraceWriter, refused: set[int]) -> None:
        self._writer, self._refused, self._calls = writer, refused, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def append(self, event: Any) -> bool:
        self._calls += 1
        return self._calls not in self._refused and self._writer.append(event)


def _run(path: Path, refused: set[int], **options: Any) -> Any:
    engine = toy_engine(path, overwrite=True, **options)
    writer = engine.recorder.outbox.writer
    engine.recorder.outbox.writer = Refusing(writer, refused)
    run_requests(engine)
    engine.recorder.outbox.writer = writer  # a real writer that is full to the end says so itself
    engine.recorder.close()
    return engine.recorder


def test_a_dropped_prefill_is_said_with_the_slots_it_wrote(tmp_path: Path) -> None:
    recorder = _run(tmp_path / "trace.arrow", {4})  # three requests, then the first forward
    assert recorder.stats().dropped_events == 1
    events = contents(tmp_path / "trace.arrow")
    assert [event["kind"] for event in events[:4]] == ["request", "request", "request", "loss"]
    loss, forward = events[3], next(event for event in events if event["kind"] == "forward")
    assert (loss["lost_events"], loss["status"]) == (1, SLOTS_LISTED)
    lost = runs_to_slots(np.array(loss["slot_start"]), np.array(loss["slot_count"])).tolist()
    assert forward["forward"] == 1
    assert lost == list(range(1, len(lost) + 1))
    # What the dropped forward would have told the tables comes with the next: all slots that it reads, and the prompts.
    assert set(forward["table_slots"]) <= set(lost)
    assert sum(forward["table_count"]) == sum(forward["prefix_lens"])
    assert sum(forward["truth_count"]) == sum(forward["truth_lens"])
    summary = judged(tmp_path / "trace.arrow")
    assert (summary.violations, summary.findings, summary.num_losses) == (0, 0, 1)
    assert summary.unknown_entries > 0


def test_a_dropped_request_is_named_again(tmp_path: Path) -> None:
    recorder = _run(tmp_path / "trace.arrow", {2, 3})  # the second request, then the loss before the third
    assert recorder.stats().dropped_events == 2
    events = contents(tmp_path / "trace.arrow")
    names = [event["name"] for event in events if event["kind"] == "request"]
    assert names == [f"request-{n}" for n in range(len(names))]
    assert [event["lost_events"] for event in events if event["kind"] == "loss"] == [2]


def test_a_dropped_loss_event_is_added_up(tmp_path: Path) -> None:
    recorder = _run(tmp_path / "trace.arrow", {4, 5, 6})  # the forward, then twice the loss that was due
    assert recorder.stats().dropped_events == 3
    losses = [event for event in contents(tmp_path / "trace.arrow") if event["kind"] == "loss"]
    assert [event["lost_events"] for event in losses] == [3]
    assert judged(tmp_path / "trace.arrow").violations == 0


def test_losses_at_the_end_are_said_at_the_close(tmp_path: Path) -> None:
    path = tmp_path / "trace.arrow"
    engine = toy_engine(path)
    real = engine.recorder.outbox.writer
    engine.recorder.outbox.writer = Refusing(real, set(range(30, 10_000)))
    run_requests(engine)
    engine.recorder.outbox.writer = real
    engine.recorder.close()
    dropped = engine.recorder.stats().dropped_events
    assert dropped > 5
    last = contents(path)[-1]
    assert (last["kind"], last["lost_events"]) == ("loss", dropped)
    assert judged(path).complete


def test_the_writers_own_bound_drops_and_says(tmp_path: Path) -> None:
    path = tmp_path / "trace.arrow"
    engine = toy_engine(path, max_queued_bytes=2200, flush_interval_ns=1)
    writer = engine.recorder.outbox.writer
    run_requests(engine, lambda _: writer.flush())
    engine.recorder.close()
    dropped = engine.recorder.stats().dropped_events
    assert dropped > 0
    losses = [event for event in contents(path) if event["kind"] == "loss"]
    assert sum(event["lost_events"] for event in losses) == dropped
    summary = judged(path)
    assert summary.complete
    assert (summary.violations, summary.findings, summary.lost_events) == (0, 0, dropped)


@given(st.sets(st.integers(1, 90), max_size=30))
def test_whatever_is_dropped_is_never_taken_for_corruption(
    tmp_path_factory: pytest.TempPathFactory, refused: set[int]
) -> None:
    path = tmp_path_factory.mktemp("losses") / "trace.arrow"
    recorder = _run(path, refused)
    summary = judged(path)
    assert (summary.violations, summary.findings, summary.gaps) == (0, 0, [])
    assert summary.lost_events == recorder.stats().dropped_events
    path.unlink()


@given(st.sets(st.integers(1, 60), max_size=20), st.integers(8, 25))
def test_a_flipped_byte_is_found_in_spite_of_losses(
    tmp_path_factory: pytest.TempPathFactory, refused: set[int], at_step: int
) -> None:
    path = tmp_path_factory.mktemp("losses") / "trace.arrow"
    engine = toy_engine(path)
    engine.recorder.outbox.writer = Refusing(engine.recorder.outbox.writer, refused)
    hit: list[int] = []

    def flip(step: int) -> None:
        if step == at_step:
            # A slot that the last accepted forward wrote and whose request goes on: nothing about it is unknown.
            kv = engine.recorder.kv[0]
            for row, request in engine.requests.items():
                slot = int(engine.req_to_token[row, 0])
                if request[2] and kv.known_bytes(np.array([slot]))[0].size:
                    engine.pool["K"].view(np.uint8)[slot, 0] ^= 0xFF
                    hit.append(slot)
                    return

    run_requests(engine, flip)
    engine.recorder.close()
    changes = [event for event in contents(path) if event["kv_change_slot"]]
    watched_again = [e for e in contents(path) if e["kind"] == "forward" and e["forward"] >= at_step]
    if hit and changes:
        assert changes[0]["kv_change_slot"] == hit
        assert judged(path).first_violation["slot"] == hit[0]
    else:  # every later forward that read the slot was dropped, or none did
        assert not hit or not watched_again or refused
    path.unlink()


def test_a_loss_nobody_can_describe_starts_both_sides_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.arrow"
    engine = toy_engine(path)

    def lose(step: int) -> None:
        if step == 6:
            engine.recorder.lost("the integrator missed something")

    run_requests(engine, lose)
    engine.recorder.close()
    events = contents(path)
    at = next(i for i, event in enumerate(events) if event["kind"] == "loss")
    after = next(event for event in events[at:] if event["kind"] == "forward")
    assert events[at]["lost_events"] == -1
    assert sum(after["table_count"]) == sum(after["prefix_lens"])
    summary = judged(path)
    assert (summary.violations, summary.findings) == (0, 0)


def test_what_was_lost_in_the_host_tier_stays_lost_when_it_comes_back() -> None:
    group = PoolGroup(name="full", num_slots=16, host_num_slots=8, streams=())
    header = TraceHeader(groups=(group,), tables=(StateTable(rows=2, width=4),))
    (kv,) = group_shadows(header, {})
    kv.lose(np.array([2, 3]), tier=TIER_HOST)
    assert not kv.any_lost
    kv.store_copy(src_tier=TIER_HOST, src=np.array([1, 2, 3]), dst_tier=TIER_POOL, dst=np.array([9, 10, 12]))
    assert kv.any_lost
    starts, counts = kv.lost_runs()
    assert (starts.tolist(), counts.tolist()) == ([10, 12], [1, 1])
    kv.clear_lost()
    kv.store_copy(src_tier=TIER_POOL, src=np.array([4, 5]), dst_tier=TIER_HOST, dst=np.array([2, 3]))
    kv.store_copy(src_tier=TIER_HOST, src=np.array([2, 3]), dst_tier=TIER_POOL, dst=np.array([6, 7]))
    assert not kv.any_lost


def test_a_dropped_copy_loses_its_target(tmp_path: Path) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    engine.add(1, "one", [3, 4, 5], 9)
    engine.step()
    engine.recorder.outbox.writer = Refusing(engine.recorder.outbox.writer, {1})
    engine.recorder.kv_copy(group=0, src=[1], dst=[50], count=[3], note="compaction")
    engine.recorder.mark("next")
    engine.recorder.close()
    loss = next(event for event in read_trace(tmp_path / "trace.arrow") if event.kind == "loss")
    assert (loss.ints("slot_start").tolist(), loss.ints("slot_count").tolist()) == ([50], [3])


@pytest.mark.parametrize("unfit", [{"room": 2**63}, {"request_id": 2**70}, {"prompt_len": -(2**64)}])
def test_a_request_that_no_trace_can_hold_keeps_nothing_else_back(tmp_path: Path, unfit: dict[str, Any]) -> None:
    engine = toy_engine(tmp_path / "trace.arrow")
    engine.recorder.request(**{"request_id": 77, "name": "unfit", **unfit})
    run_requests(engine)
    engine.recorder.close()
    assert engine.recorder.stats().dropped_events == 1
    kinds = [event["kind"] for event in contents(tmp_path / "trace.arrow")]
    assert kinds[0] == "loss"
    assert kinds.count("loss") == 1
    assert judged(tmp_path / "trace.arrow").forwards == engine.recorder.stats().forwards


def test_which_slots_are_lost_is_not_looked_for_while_there_is_no_room_to_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    lost_runs = GroupKvShadow.lost_runs
    monkeypatch.setattr(GroupKvShadow, "lost_runs", lambda self: looks.append(self) or lost_runs(self))
    engine = toy_engine(tmp_path / "trace.arrow", flush_interval_ns=3_600_000_000_000)
    engine.add(1, "one", [3, 4], 30)
    engine.step()
    writer = engine.recorder.outbox.writer
    full = dataclasses.replace(writer.settings, max_queued_bytes=writer.stats().queued_bytes)
    monkeypatch.setattr(writer, "settings", full)
    for _ in range(20):
        engine.step()
    assert engine.recorder.stats().dropped_events >= 20
    assert len(looks) == 1
    engine.recorder.close()
    assert len(looks) == 2
    assert judged(tmp_path / "trace.arrow").num_losses == 1


def test_lost_slots_that_would_never_fit_the_queue_are_said_with_others(tmp_path: Path) -> None:
    slots = 60_000
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=slots),), tables=(StateTable(rows=4, width=slots // 2),)
    )
    recorder = Recorder(tmp_path / "trace.arrow", header, max_queued_bytes=200_000)
    (kv,) = recorder.kv
    kv.lose(np.arange(1, slots, 2))  # 30,000 runs, 720 kB
    recorder.mark("after")
    recorder.mark("and more")
    recorder.close()
    told = contents(tmp_path / "trace.arrow")
    assert [event["kind"] for event in told] == ["loss", "mark", "mark"]
    named = runs_to_slots(np.array(told[0]["slot_start"]), np.array(told[0]["slot_count"]))
    assert set(range(1, slots, 2)) <= set(named.tolist())
    assert len(told[0]["slot_start"]) * 24 < 200_000
    assert not kv.any_lost
