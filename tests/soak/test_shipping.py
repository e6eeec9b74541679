"""Shipping over a bad line, killed again and again: every event is in the store in the end, once, and nothing is left here."""

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.writing.writer import TraceWriter

from ..support.hand_made import HEADER
from ..support.object_store import names, object_store

SEGMENTS = 150
KILLS = 12
FAULTS = ("", "", "", "reset", "503", "truncated", "slow", "flipped")


def test_nothing_is_lost_or_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)
    folder = tmp_path / "traces"
    folder.mkdir()

    def record() -> None:
        with TraceWriter(folder / "t.arrow", HEADER, segment_bytes=1, flush_interval_ns=1 << 60) as writer:
            for number in range(SEGMENTS):
                note = f"{number} {'x' * chance.randrange(200_000)}"
                assert writer.append(TraceEvent(kind="mark", time_ns=number, scalars={"note": note}))
                assert writer.flush()
                time.sleep(0.1)

    with object_store(monkeypatch) as proxy:
        engine = threading.Thread(target=record)
        engine.start()
        command = [sys.executable, "-m", "kvcanary", "ship", "--every", "0.2", str(folder), "s3://bkt/soak"]
        proxy.only = "^(PUT|GET) "
        for _ in range(KILLS):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(chance.randrange(10, 30)):
                proxy.faults.append(chance.choice(FAULTS))
                time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            process.wait()
        engine.join()
        proxy.heal()
        done = subprocess.run([*command, "--once"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert list(folder.iterdir()) == []
        there = [name for name in names("soak", proxy) if not name.startswith(".")]
        marks = [
            int(event.scalar("note").split(" ")[0])
            for name in there
            for event in read_trace(f"s3://bkt/soak/{name}")
            if event.kind == "mark"
        ]
        assert marks == list(range(SEGMENTS))
