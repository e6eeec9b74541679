"""A trace written anew in segments: the same events, through the same writer."""

from pathlib import Path

import numpy as np
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.reader import EventView, TraceReader, read_trace
from kvcanary.recorder.trace.schema import ADDED, BYTE_LISTS, INT_LISTS, SCALARS
from kvcanary.recorder.writing.writer import TraceWriter


def told(view: EventView) -> TraceEvent:
    """Return an event of a trace as a recorder would hand it to a writer."""
    scalars = {
        name: view.scalar(name)
        for name, (_, default) in SCALARS.items()
        if name not in ("event", "kind", "time_ns") and view.scalar(name) != default
    }
    there = set(view.batch.record_batch.schema.names) if ADDED else set()
    ints = {name: view.ints(name).copy() for name in INT_LISTS if name in there and len(view.ints(name))}
    data = {name: view.bytes(name).copy() for name in BYTE_LISTS if name in there and len(view.bytes(name))}
    return TraceEvent(kind=view.kind, time_ns=view.time_ns, scalars=scalars, ints=ints, bytes=data)


def cut(source: Path, target: Path, *, seed: int, least: int = 5, most: int = 60) -> list[Path]:
    """Write `source` in segments of some `least` to `most` events each; return the files in order."""
    random = np.random.default_rng(seed)
    with TraceReader(source) as reader:
        header = reader.header
    with TraceWriter(
        target, header, flush_bytes=1 << 30, flush_interval_ns=1 << 60, segment_bytes=1, compression="none"
    ) as writer:
        left = int(random.integers(least, most))
        for view in read_trace(source):
            assert writer.append(told(view))
            left -= 1
            if not left:
                assert writer.flush()
                left = int(random.integers(least, most))
    assert writer.failed is None
    return sorted(target.parent.glob(f"{target.stem}.??????.arrow"))
