"""A trace's events as its writer was given them, of any version of the format."""

from pathlib import Path

from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import TraceHeader
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.trace.schema import ADDED, BYTE_LISTS, INT_LISTS, SCALARS


def read_raw(path: Path) -> tuple[TraceHeader, list[TraceEvent]]:
    """Return a trace's header and its events; keyframes are left out where the format does not have them."""
    with TraceReader(path) as reader:
        header, there = reader.header, set(reader.schema.names)
    assert there >= set(INT_LISTS) - set(ADDED)
    ints, lists = ([name for name in names if name in there] for names in (INT_LISTS, BYTE_LISTS))
    events = [
        TraceEvent(
            kind=view.kind,
            time_ns=view.time_ns,
            scalars={name: view.scalar(name) for name in SCALARS if name not in ("event", "kind", "time_ns")},
            ints={name: view.ints(name).copy() for name in ints if len(view.ints(name))},
            bytes={name: view.bytes(name).copy() for name in lists if len(view.bytes(name))},
        )
        for view in read_trace(path)
    ]
    return header, events
