"""What a process had recorded and not flushed lies beside its trace, and a reader takes nothing from there on trust."""

import errno
import os
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcanary.recorder.trace.batch import TraceBatch, TraceGap
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.files import is_being_written, tail_paths
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.trace.tail_reader import HEADER_BYTES, TailReader
from kvcanary.recorder.writing.own_file import OwnFile
from kvcanary.recorder.writing.recovery import recover
from kvcanary.recorder.writing.tail import append_records, open_tail
from kvcanary.recorder.writing.writer import TraceWriter

HEADER = TraceHeader(groups=(PoolGroup(name="full", num_slots=64),), tables=(StateTable(rows=2, width=2),))
NEVER_NS = 10**15


def event(number: int) -> TraceEvent:
    return TraceEvent(
        kind="mark",
        time_ns=number,
        scalars={"note": f"nóte {number}", "request_id": number},
        ints={"input_ids": np.arange(number, dtype=np.int64), "positions": np.arange(20, dtype=np.int64)[::2]},
        bytes={"kv_bytes": np.arange(number % 250, dtype=np.uint8)},
    )


def record(path: Path, count: int, *, flushed: int = 0, **options) -> None:
    """Record events in a process that is killed by itself."""
    child = os.fork()
    if child == 0:
        try:
            writer = TraceWriter(path, HEADER, flush_interval_ns=NEVER_NS, **options)
            for number in range(count):
                assert writer.append(event(number))
                if number + 1 == flushed:
                    assert writer.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def read(path: Path) -> tuple[list[str], list[TraceGap]]:
    notes, gaps = [], []
    with TraceReader(path) as reader:
        for item in reader.stream():
            if isinstance(item, TraceBatch):
                notes += [view.scalar("note") for view in item if view.kind == "mark"]
            else:
                gaps.append(item)
    return notes, gaps


def notes(count: int) -> list[str]:
    return [f"nóte {number}" for number in range(count)]


@pytest.mark.parametrize("flushed", [0, 1, 7, 20])
@pytest.mark.parametrize("options", [{}, {"segment_bytes": 1}])
def test_a_killed_process_loses_nothing_that_it_recorded(tmp_path: Path, flushed: int, options: dict[str, int]) -> None:
    record(tmp_path / "t.arrow", 20, flushed=flushed, **options)
    last = max(tmp_path.glob("*.arrow"))
    told, gaps = read(last)
    assert told == notes(20)
    assert [(gap.missing_events, gap.ends) for gap in gaps] == [(0, "cut")]
    result = recover(last, tmp_path / "whole.recovered.arrow")
    assert (result.kept_events, result.lost_events) == (20, 0)
    with TraceReader(result.target) as reader:
        assert reader.complete
        events = [view for item in reader.stream() for view in item]
    assert [view.scalar("note") for view in events[:-1]] == notes(20)
    assert (events[-1].kind, events[-1].scalar("status"), events[-1].scalar("lost_events")) == ("loss", "cut", 0)
    assert all(path.exists() for path in tail_paths(last))


def test_the_files_are_private_and_gone_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    with TraceWriter(path, HEADER) as writer:
        assert writer.append(event(1))
        assert [stat.S_IMODE(one.stat().st_mode) for one in tail_paths(path)] == [0o600, 0o600]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_emptied_once_the_other_is_full_and_all_is_in_the_trace(tmp_path: Path) -> None:
    large = TraceEvent(kind="mark", bytes={"kv_bytes": np.ones(1 << 20, np.uint8)})
    with TraceWriter(tmp_path / "t.arrow", HEADER, flush_interval_ns=NEVER_NS) as writer:
        for _ in range(10):
            assert writer.append(large)
            assert writer.flush()
            sizes = [path.stat().st_size for path in tail_paths(writer.path)]
            assert sum(sizes) < 4 << 20


def test_a_large_event_is_kept(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        writer = TraceWriter(tmp_path / "t.arrow", HEADER, flush_interval_ns=NEVER_NS, flush_bytes=1 << 30)
        writer.append(TraceEvent(kind="mark", bytes={"kv_bytes": np.arange(10 << 20, dtype=np.uint8)[::2]}))
        os._exit(0)
    os.waitpid(child, 0)
    with TraceReader(tmp_path / "t.arrow") as reader:
        batch, gap = reader.stream()
        assert np.array_equal(batch.event(0).bytes("kv_bytes"), np.arange(10 << 20, dtype=np.uint8)[::2])
        assert gap.ends == "cut"


def test_a_recording_under_way_is_told_from_one_that_is_over(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    with TraceWriter(path, HEADER, flush_interval_ns=NEVER_NS) as writer:
        assert writer.append(event(0))
        assert writer.flush()
        assert writer.append(event(1))
        assert is_being_written(path)
        told, gaps = read(path)
        assert told == notes(1)
        assert [(gap.missing_events, gap.ends) for gap in gaps] == [(None, "live")]
        child = os.fork()
        if child == 0:
            os._exit(0 if writer.file.file.descriptor < 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not is_being_written(path)
    assert read(path) == (notes(2), [])


def test_tails_that_are_links_or_of_another_recording_are_left_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(tmp_path / f"{name}.arrow", 5, flushed=2)
    for mine, other in zip(tail_paths(tmp_path / "a.arrow"), tail_paths(tmp_path / "b.arrow"), strict=True):
        mine.rename(mine.with_suffix(".kept"))
        mine.write_bytes(other.read_bytes())
    assert read(tmp_path / "a.arrow")[0] == notes(2)
    for mine in tail_paths(tmp_path / "a.arrow"):
        mine.unlink()
        mine.symlink_to(mine.with_suffix(".kept"))
    told, gaps = read(tmp_path / "a.arrow")
    assert told == notes(2)
    assert [gap.missing_events for gap in gaps] == [None]


def test_what_lies_in_the_way_is_no_door(tmp_path: Path) -> None:
    path, victim = tmp_path / "t.arrow", tmp_path / "victim"
    victim.write_text("precious")
    for one in tail_paths(path):
        one.symlink_to(victim)
    with TraceWriter(path, HEADER) as writer:
        assert writer.append(event(1))
    assert victim.read_text() == "precious"


def test_a_full_disk_ends_the_tail_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    child = os.fork()
    if child == 0:
        writer = TraceWriter(tmp_path / "t.arrow", HEADER, flush_interval_ns=NEVER_NS)
        writer.append(event(0))
        monkeypatch.setattr(OwnFile, "write_at_once", full)
        for number in range(1, 4):
            assert writer.append(event(number))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    told, gaps = read(tmp_path / "t.arrow")
    assert told == notes(1)
    assert [(gap.missing_events, gap.ends) for gap in gaps] == [(None, "cut")]


def test_a_disk_that_makes_the_engine_wait_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.arrow"
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now.__setitem__(0, now[0] + 60_000_000) or now[0])
    tail = open_tail(path, "id")
    assert tail is not None
    for number in range(6):
        tail.put(number, 1000, event(number))
    reader = TailReader(path, "id")
    assert [number for number, _ in reader.events(0)] == [0, 1, 2]
    assert not reader.whole
    now[0] += 10**11
    tail.put(6, 1000, event(6))
    batches = list(reader.batches(0, 100, __import__("kvcanary.recorder.trace.schema", fromlist=["x"]).trace_schema()))
    assert [(type(item).__name__, getattr(item, "missing_events", None)) for item in batches] == [
        ("TraceBatch", None),
        ("TraceGap", 3),
        ("TraceBatch", None),
    ]
    assert batches[-1].first_event == 106
    tail.remove()


@settings(
    max_examples=2 * settings().max_examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_bent_tails_give_whole_events_or_none(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t.arrow"
    original = tmp_path / "original"
    if not original.exists():
        tail = open_tail(path, "id")
        for number in range(12):
            tail.put(number, 1000, event(number))
        original.write_bytes(tail_paths(path)[0].read_bytes())
    bent = bytearray(original.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(HEADER_BYTES, len(bent) - 1))
        how = data.draw(st.sampled_from(["flip", "cut", "fill", "grow"]))
        if how == "flip":
            bent[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            del bent[at : at + data.draw(st.integers(1, 2000))]
        elif how == "fill":
            bent[at : at + 8] = data.draw(st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7]))
        else:
            bent[at:at] = data.draw(st.binary(max_size=64))
        if len(bent) <= HEADER_BYTES:
            break
    tail_paths(path)[0].write_bytes(bent)
    last = -1
    for number, found in TailReader(path, "id").events(0):
        assert last < number < 12
        assert (found.time_ns, found.scalars) == (number, event(number).scalars)
        assert np.array_equal(found.ints.get("input_ids", []), np.arange(number))
        last = number


@settings(
    max_examples=2 * settings().max_examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(body=st.one_of(st.binary(max_size=300), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12)))
def test_bodies_with_a_right_crc_may_say_anything(tmp_path: Path, body: bytes | list[int]) -> None:
    names = b'["mark",["request_id"],["note"],["input_ids"],["kv_bytes"]]'
    if isinstance(body, list):
        body = len(names).to_bytes(4, "little") + names + np.array(body, np.int64).tobytes()
    tail = open_tail(tmp_path / "t.arrow", "id")
    append_records(OwnFile(os.open(tail_paths(tmp_path / "t.arrow")[0], os.O_RDWR)), HEADER_BYTES, 0, [body])
    for _, found in TailReader(tmp_path / "t.arrow", "id").events(0):
        assert found.problem() is None
    tail.remove()
