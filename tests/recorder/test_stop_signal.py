"""SIGTERM to a process that records: its trace is whole, and it dies of the signal all the same."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kvcanary.recorder.engines.common.stopping import stop_on_sigterm
from kvcanary.recorder.trace.reader import TraceReader, read_trace

PROCESS = """
import signal, sys, threading, time
from kvcanary.recorder.engines.common.stopping import stop_on_sigterm
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.capture.recorder import Recorder

header = TraceHeader(groups=(PoolGroup(name="full", num_slots=16),), tables=(StateTable(rows=4, width=8),))
recorder = Recorder(sys.argv[1], header)
assert stop_on_sigterm(recorder.close)
"""


def run(body: str, trace: Path, *signals: signal.Signals) -> int:
    """Run the process, send it the signals when it says that it is ready, and return its exit code."""
    process = subprocess.Popen([sys.executable, "-c", PROCESS + body, str(trace)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for number in signals:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
    process.stdout.read()
    process.stdout.close()
    return process.wait()


def test_the_trace_is_whole_even_where_the_engine_s_thread_holds_the_recorder(tmp_path: Path) -> None:
    body = """
recorder.mark("before")
with recorder.lock:
    with recorder.outbox.writer.changed:
        print("ready", flush=True)
        time.sleep(0.5)  # the handler runs in here
while True:
    recorder.mark("on and on")
    time.sleep(0.01)
"""
    assert run(body, tmp_path / "t.arrow", signal.SIGTERM) == -signal.SIGTERM
    with TraceReader(tmp_path / "t.arrow") as reader:
        assert reader.complete
    assert [event.scalar("note") for event in read_trace(tmp_path / "t.arrow")][:1] == ["before"]


STEPS = """
from kvcanary.recorder.engines.common.attachment import EngineAttachment

class Attachment(EngineAttachment):
    engine = "test"
    def recorders(self):
        return [recorder]

signal.signal(signal.SIGTERM, signal.SIG_DFL)
attachment = Attachment()
attachment.end_with_process()
for step in range(1000):
    attachment.next_step()
    if step == 2:
        print("ready", flush=True)  # a client has got the step's token
    time.sleep(0.3)
    recorder.mark(f"step {step}")
"""


def test_the_step_that_the_engine_is_in_is_recorded_and_no_other_is_begun(tmp_path: Path) -> None:
    assert run(STEPS, tmp_path / "t.arrow", signal.SIGTERM) == -signal.SIGTERM
    with TraceReader(tmp_path / "t.arrow") as reader:
        assert reader.complete
    told = [event.scalar("note") for event in read_trace(tmp_path / "t.arrow")]
    assert told == ["step 0", "step 1", "step 2"]


def test_a_second_signal_ends_a_process_whose_disk_is_stuck(tmp_path: Path) -> None:
    body = """
recorder.outbox.writer.file.close = lambda: (print("ready", flush=True), time.sleep(60))
print("ready", flush=True)
time.sleep(60)
"""
    assert run(body, tmp_path / "t.arrow", signal.SIGTERM, signal.SIGTERM) == -signal.SIGTERM


def test_an_engine_s_own_handler_is_left_alone() -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        assert not stop_on_sigterm(pytest.fail)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_nothing_is_set_from_another_thread() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(stop_on_sigterm(pytest.fail)))
    thread.start()
    thread.join()
    assert found == [False]
