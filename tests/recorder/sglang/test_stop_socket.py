"""Ending a trace in a process that is about to be killed."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kvcanary.recorder.engines.common.stopping import serve_stop, stop_processes
from kvcanary.recorder.engines.sglang.attachment import SglangAttachment
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import TraceReader

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sockets without a file are Linux's")

CHILD = """
import sys, time
from pathlib import Path
from kvcanary.recorder.engines.common.stopping import serve_stop
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.capture.recorder import Recorder

header = TraceHeader(groups=(PoolGroup(name="full", num_slots=8),), tables=(StateTable(rows=2, width=8),))
recorder = Recorder(Path(sys.argv[1]), header)
recorder.mark("before the end")
serve_stop(recorder.close)
print("recording", flush=True)
time.sleep(600)
"""


# For a moment, it has no file descriptor left.
OUT_OF_FILES = """
import socket

accept, fails = socket.socket.accept, [1, 1]

def failing(listener):
    if fails:
        raise OSError(fails.pop(), "Too many open files")
    return accept(listener)

socket.socket.accept = failing
"""


@pytest.mark.parametrize("before", ["", OUT_OF_FILES], ids=["as it is", "out of files"])
def test_a_process_ends_its_trace_before_it_is_killed(tmp_path: Path, before: str) -> None:
    path = tmp_path / "trace.arrow"
    child = subprocess.Popen([sys.executable, "-c", before + CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "recording\n"
        assert stop_processes([child.pid]) == [child.pid]
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    with TraceReader(path) as reader:
        assert reader.complete
        assert [event.scalar("note") for batch in reader.stream() for event in batch] == ["before the end"]


def test_processes_that_record_nothing_are_passed_over() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert stop_processes([child.pid]) == []
    finally:
        child.kill()
        child.wait()


def test_a_process_that_does_not_answer_is_not_waited_for_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import time; from kvcanary.recorder.engines.common.stopping import serve_stop; "
        "serve_stop(lambda: time.sleep(600)); print('recording', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "recording\n"
        assert stop_processes([child.pid], patience_s=0.2) == []
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert f"process {child.pid} did not end its trace in time" in caplog.text


@pytest.mark.parametrize("how", ["os._exit(1)", "sys.exit(1)"])
def test_a_process_that_dies_while_it_ends_its_trace_is_told_of(how: str, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import os, sys, time; from kvcanary.recorder.engines.common.stopping import serve_stop; "
        f"serve_stop(lambda: {how}); print('recording', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "recording\n"
        assert stop_processes([child.pid]) == []
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert f"process {child.pid} did not end its trace whole" in caplog.text


def test_of_two_who_ask_at_once_none_says_that_it_took_too_long(caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import time; from kvcanary.recorder.engines.common.stopping import serve_stop; "
        "serve_stop(lambda: time.sleep(1)); print('recording', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    answers: list[list[int]] = []
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "recording\n"
        askers = [threading.Thread(target=lambda: answers.append(stop_processes([child.pid]))) for _ in range(2)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert sorted(answers) == [[], [child.pid]]
    assert "did not end its trace" not in caplog.text


def test_a_second_recording_of_a_process_says_that_it_cannot_be_stopped(caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[int] = []
    serve_stop(lambda: stopped.append(1))
    serve_stop(lambda: stopped.append(2))
    assert "no socket for the engine's end" in caplog.text
    import os

    assert stop_processes([os.getpid()]) == [os.getpid()]
    assert stopped == [1]


@pytest.mark.parametrize("how", [{}, {"include_parent": False}, {"skip": True}], ids=str)
def test_who_is_not_killed_goes_on_recording(tmp_path: Path, how: dict[str, bool]) -> None:
    """A server that ends one of its processes, or one of several servers that a process has, ends no other's trace."""
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / f"{n}.arrow")], stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "recording\n"
        attachment = SglangAttachment(RecordingSettings(folder=tmp_path))
        first = children[0].pid
        attachment.on_stop(first, *([True, first] if "skip" in how else []), **({} if "skip" in how else how))
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    ended = []
    for n in range(2):
        with TraceReader(tmp_path / f"{n}.arrow") as reader:
            ended.append(reader.complete)
    assert ended == [not how, False]
