"""The Recorder and its process: a fork while it is busy, and an engine that dies in a forward."""

import subprocess
import sys
from pathlib import Path

from kvcanary.recorder.trace.reader import TraceReader, read_trace

ENGINE = """
import os, sys, threading
import numpy as np
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.capture.recorder import Recorder

header = TraceHeader(groups=(PoolGroup(name="full", num_slots=16),), tables=(StateTable(rows=4, width=8),))
recorder = Recorder(sys.argv[1], header)
one = np.ones(1, np.int64)

def before():
    recorder.before_forward(ForwardInput(mode="extend", req_pool_indices=one, request_ids=one, prefix_lens=one * 0,
        extend_lens=one, input_ids=one, positions=one * 0, out_cache_loc=(one * 3,),
        reads=(np.zeros((4, 8), np.int32),)))
"""


def engine(body: str, trace: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENGINE + body, str(trace)], capture_output=True, text=True, check=False
    )


def test_the_forward_that_killed_the_engine_is_in_the_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.arrow"
    result = engine("before()\nraise RuntimeError('the model failed')\n", trace)
    assert result.returncode == 1
    (event,) = read_trace(trace)
    assert event.kind == "forward"
    assert event.ints("out_cache_loc").tolist() == [3]
    assert "ended during this forward" in event.scalar("note")
    with TraceReader(trace) as reader:
        assert reader.complete


def test_a_child_forked_while_the_recorder_is_busy_goes_on(tmp_path: Path) -> None:
    trace = tmp_path / "t.arrow"
    body = """
held, go_on = threading.Event(), threading.Event()
def hold():
    with recorder.lock:
        held.set()
        go_on.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    before()
    recorder.close()
    os._exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go_on.set()
thread.join()
before()
recorder.after_forward()
recorder.close()
sys.exit(code)
"""
    result = engine(body, trace)
    assert result.returncode == 7, result.stderr
    assert [event.kind for event in read_trace(trace)] == ["forward"]
