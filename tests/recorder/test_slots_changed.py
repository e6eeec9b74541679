"""Changes of slots that are recorded at once are the same events as when each is recorded by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.device.recorder import DeviceRecorder
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.capture.slot_numbers import SlotsChanged
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.writer import TraceWriter

HEADER = TraceHeader(
    groups=(PoolGroup(name="a", num_slots=64), PoolGroup(name="b", num_slots=64)),
    tables=(StateTable(rows=4, width=8),),
    slot_history="complete",
)
CHANGES = [
    SlotsChanged("alloc", (0, 1), [16, 48], 16, 7, 2),
    SlotsChanged("alloc", (0,), [16], 16, 7, 2, "cached"),
    SlotsChanged("free", (1,), [48], 16, 7, note="over"),
    SlotsChanged("evict", (0,), [], 16),
]


def by_one(recorder: Any) -> None:
    for kind, groups, starts, count, request, row, status, note in CHANGES:
        index = np.repeat(groups, len(starts))
        runs = np.tile(np.array(starts, np.int64), len(groups)), np.full(index.size, count)
        recorder.slots(kind, group=index, runs=runs, request_id=request, row=row, status=status, note=note)


def told(path: Path) -> list[Any]:
    with TraceReader(path) as reader:
        views = [view for batch in reader.stream() for view in batch]  # type: ignore[union-attr]
        times = [view.time_ns for view in views]
        assert times == sorted(times)
        names = ("slot_group", "slot_start", "slot_count", "req_pool_indices")
        return [
            (
                view.kind,
                *map(view.scalar, ("request_id", "status", "note")),
                [view.ints(name).tolist() for name in names],
            )
            for view in views
        ]


@pytest.mark.parametrize("say", [by_one, lambda recorder: recorder.slots_changed(CHANGES)])
@pytest.mark.parametrize("room", [1, 0])
def test_the_same_events(tmp_path: Path, say: Callable[[Any], None], room: int) -> None:
    """Without room, one event is refused, and each of the others still finds its place."""
    recorder = Recorder(tmp_path / "t.arrow", HEADER)
    writer = recorder.outbox.writer
    append = writer.append

    def refusing(*events: TraceEvent) -> bool:
        return (room or not any(event.kind == "free" for event in events)) and append(*events)

    writer.append = refusing  # type: ignore[method-assign]
    say(recorder)
    recorder.close()
    found = told(tmp_path / "t.arrow")
    assert [one[0] for one in found] == ["alloc", "alloc", "free" if room else "loss", "evict"]
    assert found[0] == ("alloc", 7, "", "", [[0, 0, 1, 1], [16, 48, 16, 48], [16] * 4, [2]])
    assert found[1] == ("alloc", 7, "cached", "", [[0], [16], [16], [2]])
    assert not room or found[2] == ("free", 7, "", "over", [[1], [48], [16], []])


def test_those_that_follow_one_another_stay_among_the_rest(tmp_path: Path) -> None:
    tables = [torch.zeros((4, 8), dtype=torch.int32)]
    recorder = DeviceRecorder(tmp_path / "t.arrow", HEADER, tables=tables, luts=(), kv_sources={})
    for change in CHANGES[:2]:
        recorder.slot_changed(change)
    recorder.request_status(request_id=7, status="finished", row=2)
    recorder.slot_changed(CHANGES[2])
    assert recorder.drain()
    recorder.slot_changed(CHANGES[3])
    recorder.close()
    assert [one[0] for one in told(tmp_path / "t.arrow")] == ["alloc", "alloc", "status", "free", "evict"]


def test_several_events_are_queued_all_or_none(tmp_path: Path) -> None:
    events = [TraceEvent(kind="mark", scalars={"note": str(number)}) for number in range(3)]
    room = sum(event.nbytes for event in events)
    with TraceWriter(tmp_path / "t.arrow", HEADER, max_queued_bytes=room, flush_interval_ns=10**12) as writer:
        assert not writer.append(*events, events[0])
        assert (writer.stats().appended_events, writer.stats().dropped_events) == (0, 0)
        assert writer.append(*events)
    with TraceReader(tmp_path / "t.arrow") as reader:
        assert [view.scalar("note") for batch in reader.stream() for view in batch] == ["0", "1", "2"]  # type: ignore[union-attr]
