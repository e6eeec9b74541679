"""What earlier recordings leave in a folder is bounded, and nobody's live recording is touched."""

import os
import signal
import subprocess
import sys
import time

import pytest
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.writing import own_file
from kvcanary.recorder.writing import segments as past
from kvcanary.recorder.writing.own_file import hold
from kvcanary.recorder.writing.segments import drop_the_past

HEADER = TraceHeader(groups=(PoolGroup(name="full", num_slots=16),), tables=(StateTable(rows=2, width=8),))
LIVE = """
import sys, time
from pathlib import Path
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.capture.recorder import Recorder
header = TraceHeader(groups=(PoolGroup(name="full", num_slots=16),), tables=(StateTable(rows=2, width=8),))
recorder = Recorder(Path(sys.argv[1]), header, segment_bytes=1)
recorder.mark("here")
print("ready", flush=True)
time.sleep(600)
"""


def segments(folder):
    return sorted(path.name for path in folder.glob("*.arrow"))


def leave(folder, name, count, age_s, size=1000):
    """Segments of a recording that is over, or was killed."""
    for number in range(count):
        path = folder / f"{name}.{number:06d}.arrow"
        path.write_bytes(b"ARROW1\0\0 kvcanary.header".ljust(size, b"x"))
        when = time.time() - age_s + number
        os.utime(path, (when, when))


def test_the_oldest_go_until_all_fit(tmp_path):
    leave(tmp_path, "new", 3, 100)
    leave(tmp_path, "old", 3, 900)
    (tmp_path / "alone.arrow").write_bytes(b"x" * 9000)
    frozen = tmp_path / "old.frozen-20261121T101748Z"
    frozen.mkdir()
    leave(frozen, "old", 2, 900)
    assert [path.name for path in drop_the_past(tmp_path, 3999)] == [f"old.{n:06d}.arrow" for n in range(3)]
    assert segments(tmp_path) == ["alone.arrow", *(f"new.{n:06d}.arrow" for n in range(3))]
    assert len(segments(frozen)) == 2
    assert drop_the_past(tmp_path, 3000) == []


def test_what_a_killed_process_left_goes_with_its_segments(tmp_path):
    leave(tmp_path, "old", 2, 900)
    for number in range(2):
        tail = tmp_path / f"old.arrow.tail{number}"
        tail.write_bytes(b"KVCTAIL1".ljust(3000, b"x"))
        os.utime(tail, (time.time() - 899, time.time() - 899))
    leave(tmp_path, "new", 2, 100)
    drop_the_past(tmp_path, 2000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.000000.arrow", "new.000001.arrow"]


def test_a_recording_under_way_stays_and_counts(tmp_path):
    leave(tmp_path, "old", 2, 900)
    with subprocess.Popen([sys.executable, "-c", LIVE, str(tmp_path / "live.arrow")], stdout=subprocess.PIPE) as live:
        assert live.stdout.readline() == b"ready\n"
        mine = segments(tmp_path)[:-2]
        assert mine[0] == "live.000000.arrow"
        drop_the_past(tmp_path, 1)
        assert segments(tmp_path)[: len(mine)] == mine
        assert not [name for name in segments(tmp_path) if name.startswith("old")]
        live.send_signal(signal.SIGKILL)
    for name in mine:  # a lone first segment may be somebody's who has not locked it yet
        os.utime(tmp_path / name, (time.time() - 60, time.time() - 60))
    assert {path.name for path in drop_the_past(tmp_path, 1)} >= set(mine)  # it lost its lock with its life


def test_a_recording_that_just_begins_stays(tmp_path):
    leave(tmp_path, "begun", 1, 1)
    leave(tmp_path, "killed", 2, 1)
    assert [path.name for path in drop_the_past(tmp_path, 1)] == ["killed.000000.arrow", "killed.000001.arrow"]
    leave(tmp_path, "begun", 1, 60)
    assert [path.name for path in drop_the_past(tmp_path, 1)] == ["begun.000000.arrow"]


def test_a_recording_that_is_just_being_cut_stays(tmp_path):
    leave(tmp_path, "live", 3, 900)
    with (tmp_path / "live.000001.arrow").open("rb") as held:  # still locked, the newest not yet
        hold(held.fileno())
        assert drop_the_past(tmp_path, 1) == []
    assert len(drop_the_past(tmp_path, 1)) == 3


def test_a_recording_that_goes_on_while_it_is_looked_at_stays(tmp_path, monkeypatch):
    leave(tmp_path, "live", 3, 900)

    def goes_on(path, *, unknown):  # its writer has let go of what was listed, and writes the next one
        leave(tmp_path, "live", 4, 900)
        return False

    monkeypatch.setattr(past, "is_being_written", goes_on)
    assert drop_the_past(tmp_path, 1) == []
    assert len(segments(tmp_path)) == 4


def test_a_crash_loop_fills_a_folder_no_further(tmp_path):
    for start in range(5):
        leave(tmp_path, f"crashed{start}", 3, 900 - 100 * start)
        recorder = Recorder(tmp_path / f"run{start}.arrow", HEADER, segment_bytes=1 << 20, keep_folder_bytes=5000)
        assert sum(path.stat().st_size for path in tmp_path.glob("crashed*.arrow")) <= 5000
        recorder.close()
    assert len(segments(tmp_path)) < 15


def test_where_there_are_no_locks_nothing_is_deleted(tmp_path, monkeypatch):
    leave(tmp_path, "old", 2, 900)

    def unsupported(*_):
        raise OSError(95, "not supported")

    monkeypatch.setattr(own_file.fcntl, "flock", unsupported)
    assert drop_the_past(tmp_path, 1) == []


def test_it_needs_segments(tmp_path):
    with pytest.raises(ValueError, match="keep_folder_bytes needs segments"):
        Recorder(tmp_path / "a.arrow", HEADER, keep_folder_bytes=1)


def test_what_other_programs_have_in_the_folder_is_left_alone_and_does_not_count(tmp_path):
    (tmp_path / "train.000000.arrow").write_bytes(b"ARROW1\0\0".ljust(5000, b"x"))
    (tmp_path / "old.000001.arrow").mkdir()
    os.mkfifo(tmp_path / "old.000002.arrow")
    (tmp_path / "old.000003.arrow").symlink_to("nowhere")
    leave(tmp_path, "ours", 2, 900)
    assert drop_the_past(tmp_path, 2000) == []
    assert [path.name for path in drop_the_past(tmp_path, 0)] == ["ours.000000.arrow", "ours.000001.arrow"]
    assert segments(tmp_path) == [*(f"old.{n:06d}.arrow" for n in (1, 2, 3)), "train.000000.arrow"]
