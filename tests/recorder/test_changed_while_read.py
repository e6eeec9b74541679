"""A trace that somebody cuts, overwrites or replaces again and again while it is read again and again.

Whatever comes of it is a whole batch or a gap that is told, and never a signal: the reader is a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = {3: 15, 20_000: 6}  # by tokens a forward

READ = """
import os, sys, threading
from kvcanary.recorder.trace import decode
from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.trace.reader import TraceGap, TraceReader
path, how, rounds, ahead = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
if ahead == "ahead":
    decode.LARGE_BYTES = 0
whole = open(path, "rb").read()
with open(path + ".copy", "wb") as file:
    file.write(whole)
with TraceReader(path + ".copy") as reader:
    good = {batch.first_event: batch.record_batch for batch in reader.stream()}
over = threading.Event()

def change():
    number = 0
    with open(path, "r+b", buffering=0) as file:
        while not over.is_set():
            number += 1
            at = number * 7919 * 8 % len(whole)
            if how == "cut":
                os.ftruncate(file.fileno(), at)
            else:
                os.pwrite(file.fileno(), bytes([number % 251]) * min(len(whole) - at, len(whole) // 3), at)
            os.pwrite(file.fileno(), whole, 0)

thread = threading.Thread(target=change)
thread.start()
told = given = 0
try:
    for _ in range(rounds):
        try:
            with TraceReader(path) as reader:
                complete, next_event = reader.complete, 0
                for item in reader.stream():
                    if isinstance(item, TraceGap):
                        told += 1
                        complete = False
                        next_event = None
                        continue
                    given += 1
                    assert item.record_batch.equals(good[item.first_event]), item.first_event
                    assert next_event in (None, item.first_event)
                    next_event = item.first_event + item.num_events
                assert not complete or next_event == sum(map(len, good.values()))
        except UnreadableTraceError:
            told += 1
finally:
    over.set()
    thread.join()
print("given", given, "told", told)
"""


@pytest.mark.parametrize("how", ["cut", "overwritten"])
@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("tokens", ROUNDS)
@pytest.mark.one_in(3)
def test_a_whole_batch_or_a_gap_and_never_a_signal(traces, how: str, compression: str, tokens: int) -> None:
    path: Path = traces.write(batches=(2,) * 8, compression=compression, tokens=tokens)
    for ahead in ["", "ahead"] if compression == "lz4" else [""]:
        done = subprocess.run(
            [sys.executable, "-c", READ, os.fspath(path), how, str(ROUNDS[tokens]), ahead],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
        assert done.stdout.startswith("given ")
