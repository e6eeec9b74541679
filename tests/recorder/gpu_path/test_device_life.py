"""What befalls a device recorder: losses in the middle of a forward, dead threads, foreign threads, copies, transfers."""

import threading

import numpy as np
import pytest
from kvcanary.kernels.capture.model_forward import ModelForward, TicketWriter
from kvcanary.recorder.capture.device import capture
from kvcanary.recorder.capture.device.forward import BatchRequests, DeviceForward
from kvcanary.recorder.capture.device.frame_decoder import LOST
from kvcanary.recorder.capture.device.frame_reader import FrameReader
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import TIER_HOST, TIER_POOL

from .two_recorders import Engine, follow


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path, np.random.default_rng(1))


def write(engine, first, count, *, during=lambda: None):
    """Row 1 goes on from position `first`, each position p in slot p + 1; what the model writes changes each time."""
    slots = list(range(first + 1, first + count + 1))
    engine.table[1, first : first + count] = engine.ints(slots).int()

    def model():
        for pool in engine.pools.values():
            pool[slots] += 1
        during()

    places = list(range(first, first + count))
    engine.forward("extend", [1], [first], [count], slots, places, places, during=model)


def told(engine):
    _, device = engine.close()
    return device, list(read_trace(engine.device.path))


def test_counters_of_a_frame_are_zero_after_forwards_that_found_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "MAX_IN_FLIGHT", 2)
    write_ticket, found = TicketWriter.write, []

    def spy(self, ticket, address, numbers, *more):
        found.append(int(engine.device.capture.counters[numbers[2]].sum()))  # its row
        write_ticket(self, ticket, address, numbers, *more)

    engine = Engine(tmp_path, np.random.default_rng(1))
    monkeypatch.setattr(TicketWriter, "write", spy)
    engine.table[1, :20] = engine.ints(range(100, 120)).int()
    gate = engine.hold_frames()
    for i in range(20, 23):  # the third finds no room; the first has table changes to count
        write(engine, i, 1)
    gate.set()
    engine.device.drain()
    for i in range(23, 26):
        write(engine, i, 1)
        engine.device.drain()
    device, _ = told(engine)
    assert found == [0] * 5
    assert follow(engine, device)[0] == [0, 1, 3, 4, 5]


def test_a_loss_in_the_middle_of_a_forward(engine):
    """It is not told, the next one tells everything anew, and time does not run backwards."""
    write(engine, 0, 4)

    def during():
        engine.device.lost("for once")
        engine.device.mark("a note")

    write(engine, 4, 1, during=during)
    write(engine, 5, 1)
    write(engine, 6, 1, during=lambda: engine.device.mark("another"))
    device, events = told(engine)
    times = [int(event.scalar("time_ns")) for event in events]
    assert times == sorted(times)
    assert follow(engine, [event for event in device if event["kind"] != "mark"]) == ([0, 2, 3], 1, 1)


def test_a_thread_that_dies_keeps_nobody_waiting(engine, monkeypatch):
    monkeypatch.setattr(FrameReader, "fetch", lambda *_: (_ for _ in ()).throw(MemoryError("no pinned memory")))
    write(engine, 0, 1)
    assert not engine.device.drain(timeout=600)
    engine.device.sweep(groups=[0], slots=[1], positions=[0], prev_slots=[-1], locked=[0])
    assert not engine.device.drain(timeout=600)
    engine.device.close()
    assert "no pinned memory" in engine.device.stats().off
    engine.host.close()


def test_a_recording_that_a_foreign_thread_ends_during_a_forward(engine, monkeypatch):
    """Only the engine's thread launches; what came before the forward is told."""
    write(engine, 0, 1)
    launched = []
    end = ModelForward.end
    monkeypatch.setattr(ModelForward, "end", lambda self: (launched.append(threading.get_ident()), end(self)))

    def stop():
        thread = threading.Thread(target=engine.device.close)
        thread.start()
        thread.join()

    write(engine, 1, 1, during=stop)
    engine.host.close()
    assert launched == []
    events = list(read_trace(engine.device.path))
    assert [event.kind for event in events] == ["forward", "mark"]
    assert events[1].scalar("note") == "the recording ended during forward 1"


def test_it_ends_its_trace_before_its_own_recorder_does(tmp_path, monkeypatch):
    registered = []
    monkeypatch.setattr("atexit.register", registered.append)
    engine = Engine(tmp_path, np.random.default_rng(1))
    assert registered[-1] == engine.device.close
    assert engine.device.recorder.close in registered
    engine.close()


def test_a_writer_that_stopped_ends_the_launches(engine, monkeypatch):
    write(engine, 0, 1)
    engine.device.drain()
    writer = engine.device.recorder.outbox.writer

    def no_room(_):
        raise OSError("the disk is full")

    monkeypatch.setattr(writer.file, "write", no_room)
    assert not writer.flush()
    write(engine, 1, 1)
    engine.device.drain()
    engine.device.drain()  # by now it has looked
    before = engine.device.next_forward
    write(engine, 2, 1)
    assert engine.device.next_forward == before
    engine.device.close()
    engine.host.close()
    assert "the disk is full" in engine.device.stats().off


def test_fewer_lengths_than_requests_switch_it_off(engine):
    ints = engine.ints([1])
    engine.device.before_forward(
        DeviceForward(
            mode="extend",
            runner=0,
            rows=engine.ints([1, 2]),
            prefix=ints,
            extend=ints,
            input_ids=ints,
            positions=ints,
            out_cache_loc=ints,
            num_tokens=1,
            requests=BatchRequests(ids=np.array([7, 8])),
        )
    )
    engine.device.after_forward()
    engine.device.close()
    engine.host.close()
    assert "1 lengths for 2 requests" in engine.device.stats().off


def test_nothing_false_is_told_after_a_refused_forward(engine):
    """A sweep right after it compares with what the trace has, and the trace knows nothing of what was refused."""
    refuse = engine.refuse_events()
    write(engine, 0, 3)
    engine.device.drain()
    refuse[0] = True
    write(engine, 0, 3)
    engine.device.drain()
    refuse[0] = False
    engine.device.sweep(groups=[0], slots=[1, 2, 3], positions=[0, 1, 2], prev_slots=[-1, 1, 2], locked=[0] * 3)
    device, events = told(engine)
    assert [event.kind for event in events] == ["forward", "loss", "sweep"]
    assert device[1]["lost_events"] == -1
    assert device[1]["note"] in (LOST, "the writer's queue was full")
    assert device[2]["kv_changes"] == []


def test_bytes_that_were_received_are_watched(engine):
    group = {"group": 0, "slots": [1, 2, 3]}
    for recorder in (engine.host, engine.device):
        for status in ("start", "end"):
            recorder.transfer(status, direction="receive", room=5, **group)
    engine.pools[0, 1][2, 3] ^= 1
    engine.table[1, :3] = engine.ints([1, 2, 3]).int()
    write(engine, 3, 1)
    host, device = engine.close()
    assert [change[:2] for change in device[-1]["kv_changes"]] == [(1, 2)]
    assert device[-1]["kv_changes"] == host[-1]["kv_changes"]


def test_of_what_nobody_has_read_nothing_is_known(engine):
    write(engine, 0, 3)
    group = {"group": 0, "slots": [1, 2, 500], "direction": "receive", "room": -1}
    for status in ("start", "end"):
        engine.host.transfer(status, read=False, **group)
        engine.device.transfer_unread(status, **group)
    engine.pools[0, 1][1, 3] ^= 1
    engine.pools[0, 1][3, 3] ^= 1
    write(engine, 3, 1)
    host, device = engine.close()
    assert [change[:2] for change in device[-1]["kv_changes"]] == [(1, 3)]
    assert host == device


def test_a_copy_is_no_change_that_nobody_wrote(engine):
    write(engine, 0, 3)
    copied = {"group": 0, "src": [2], "dst": [20], "count": [2]}
    for pool in engine.pools.values():
        pool[20:22] = pool[2:4]
    for recorder in (engine.host, engine.device):
        recorder.kv_copy(**copied)
    engine.table[1, :3] = engine.ints([1, 20, 21]).int()
    write(engine, 3, 1)
    engine.pools[0, 0][21, 0] ^= 1
    write(engine, 4, 1)
    host, device = engine.close()
    changes = [[change[:2] for change in event["kv_changes"]] for event in device if event["kind"] == "forward"]
    assert changes == [[], [], [(0, 21)]]
    assert host[-1]["kv_changes"] == device[-1]["kv_changes"]


def test_copies_that_lie_on_the_device_yet_are_told_in_their_place(engine):
    write(engine, 0, 3)
    away = {"group": 0, "src_tier": TIER_POOL, "dst_tier": TIER_HOST, "note": "offload"}
    back = {"group": 0, "src_tier": TIER_HOST, "dst_tier": TIER_POOL, "note": "load-back"}
    for pool in engine.pools.values():
        pool[20:22] = pool[2:4]
    engine.host.kv_copy(src=[2], dst=[0], count=[2], **away)
    engine.host.kv_copy(src=[0], dst=[20], count=[2], **back)
    runs = [(np.array([first]), np.array([other]), np.array([2])) for first, other in ((2, 0), (0, 20))]
    engine.device.kv_copy_later(lambda: runs[0], filled=None, **away)
    engine.device.kv_copy_later(lambda: runs[1], filled=engine.ints([20, 21]).int(), **back)
    engine.table[1, :3] = engine.ints([1, 20, 21]).int()
    write(engine, 3, 1)
    engine.pools[0, 0][21, 0] ^= 1  # of what came back nothing is known until it is written
    write(engine, 4, 1)
    host, device = engine.close()
    assert [event["kind"] for event in device] == ["forward", "kv_copy", "kv_copy", "forward", "forward"]
    assert [event["kv_changes"] for event in device if event["kind"] == "forward"] == [[], [], []]
    assert device == host


def test_copies_that_cannot_be_had_switch_it_off(engine):
    def gone():
        raise RuntimeError("the device is gone")

    write(engine, 0, 1)
    engine.device.kv_copy_later(gone, filled=None, group=0)
    assert engine.device.drain() is False
    write(engine, 1, 1)
    engine.host.close()
    engine.device.close()
    assert "the device is gone" in engine.device.stats().off
    events = list(read_trace(engine.device.path))
    assert [event.kind for event in events] == ["forward", "loss"]
    assert "the device is gone" in events[-1].scalar("note")


def test_a_recorder_that_cannot_begin_leaves_no_trace_that_looks_clean(tmp_path, monkeypatch):
    def no_room(_):
        raise MemoryError("no room on the device")

    monkeypatch.setattr(capture.DeviceCapture, "prepare", no_room)
    with pytest.raises(MemoryError):
        Engine(tmp_path, np.random.default_rng(1))
    assert [event.scalar("lost_events") for event in read_trace(tmp_path / "device.arrow")] == [-1]


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_launch_that_is_refused_switches_it_off(engine, monkeypatch, when):
    write(engine, 0, 1)

    def refused(_):
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(ModelForward, when, refused)
    write(engine, 1, 1)
    write(engine, 2, 1)
    assert engine.device.capture.off
    engine.host.close()
    engine.device.close()
    what = "before_forward" if when == "begin" else "after_forward"
    assert f"{what}: RuntimeError: Triton Error [CUDA]: an illegal memory access" in engine.device.stats().off


def test_each_forward_gets_the_next_place_row_and_stamp(tmp_path, monkeypatch):
    engine = Engine(tmp_path, np.random.default_rng(1), watch_every=2)
    written, frames, write_ticket = [], [], TicketWriter.write
    monkeypatch.setattr(TicketWriter, "write", lambda self, *told: (written.append(told[2]), write_ticket(self, *told)))
    engine.device.capture.deliver = frames.append
    for number in range(6):
        write(engine, number, 1)
    assert [frame.watched for frame in frames] == [True, False] * 3
    assert len({frame.at for frame in frames}) == 6
    assert written == [(n + 1, frame.at, n, n + 1, frame.watched) for n, frame in enumerate(frames)]
    engine.device.capture.off = True
    engine.host.close()
    engine.device.close()
