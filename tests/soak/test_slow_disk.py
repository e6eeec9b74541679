"""A disk that takes 1 MB/s under an engine that tells ten times as much: the engine goes on, and every loss is told."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kvcanary.recorder.engines.simulated.config import EngineConfig
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.workloads import RandomWorkload
from kvcanary.recorder.trace.inspect import inspect_trace
from kvcanary.recorder.trace.recordings import group_recordings, traces_in
from kvcanary.recorder.writing.trace_file import TraceFile
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplayRun, ReplaySettings

BYTES_A_SECOND = 1_000_000
SECONDS = 20
QUEUE = 4 << 20
# An append holds the queue's lock for microseconds; the rest is what a busy machine takes to run the thread again.
LONGEST_APPEND_S = 0.25


def drain(fifo: Path, target: Path) -> None:
    """Read a pipe as slowly as the disk would take it."""
    with fifo.open("rb", buffering=0) as source, target.open("wb") as copy:
        while data := source.read(50_000):
            copy.write(data)
            time.sleep(len(data) / BYTES_A_SECOND)


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every trace file as slow, where a recording has many and none can be a pipe."""
    write = TraceFile.write

    def slowly(self: TraceFile, batch: pa.RecordBatch, metadata: dict[bytes, bytes]) -> None:
        time.sleep(batch.nbytes / BYTES_A_SECOND)
        write(self, batch, metadata)

    monkeypatch.setattr(TraceFile, "write", slowly)


def run_engine(path: Path, **options: Any) -> tuple[float, int, int, int]:
    """Run an engine for a while; return the longest append, the most bytes queued, events lost, forwards."""
    config = EngineConfig(seed=1, page_size=16, num_pages=4000, rows=33, width=4096, max_running=32, chunk_tokens=2048)
    workload = RandomWorkload(
        seed=1, requests=100_000, prompt_tokens=1500, output_tokens=20, max_tokens=4000, arrival_rate=1e6, sharing=0.2
    )
    longest, queued = 0.0, 0
    with SimulatedEngine(
        config, workload, path, max_queued_bytes=QUEUE, flush_bytes=1 << 20, compression="none", **options
    ) as engine:
        writer = engine.recorder.outbox.writer
        append = writer.append

        def timed(event: Any) -> bool:
            nonlocal longest, queued
            begin = time.perf_counter()
            taken = append(event)
            longest = max(longest, time.perf_counter() - begin)
            queued = max(queued, writer.stats().queued_bytes)
            return taken

        writer.append = timed  # type: ignore[method-assign]
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            assert engine.step()
        assert engine.recorder.stats().off == ""
    stats = engine.recorder.stats()
    return longest, queued, stats.dropped_events, stats.forwards


def check(traces: Path, measured: tuple[float, int, int, int]) -> None:
    longest, queued, lost, forwards = measured
    found = [inspect_trace(path) for path in traces_in(traces)]
    ((recording,), _) = group_recordings(traces_in(traces))
    with ReplayRun(recording.paths, settings=ReplaySettings(), report=None, all_there=True) as run:
        while run.step():
            pass
        summary = run.finish()
    told = sum(one.lost_events for one in found)
    size = sum(one.size_bytes for one in found)
    print(
        f"{forwards:,} forwards in {SECONDS} s, {size / 1e6:.1f} MB in {len(found)} files, {lost:,} events lost of which "
        f"{told:,} are told; longest append {1e3 * longest:.2f} ms, at most {queued / (1 << 20):.2f} MiB queued"
    )
    assert longest < LONGEST_APPEND_S
    assert queued <= QUEUE
    assert lost > 0
    assert told == lost
    assert all(one.state in ("complete", "lossy") for one in found)
    assert any(one.state == "lossy" for one in found)
    assert summary.lost_events == lost
    assert (summary.violations, summary.findings) == (0, 0)
    assert summary.verdict is Verdict.INCONCLUSIVE


def test_one_file(tmp_path: Path) -> None:
    fifo, traces = tmp_path / "fifo", tmp_path / "traces"
    traces.mkdir()
    os.mkfifo(fifo)
    reader = threading.Thread(target=drain, args=(fifo, traces / "t.arrow"))
    reader.start()
    measured = run_engine(fifo, overwrite=True)
    reader.join()
    check(traces, measured)


def test_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_disk(monkeypatch)
    traces = tmp_path / "traces"
    traces.mkdir()
    check(traces, run_engine(traces / "t.arrow", segment_bytes=4 << 20))
