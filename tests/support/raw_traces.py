"""Traces as lists of events: read, bent in ways that engines and recorders are, cut into segments, and written again."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from kvcanary.recorder.trace.event import TraceEvent, loss_event
from kvcanary.recorder.trace.header import Ranks, TraceHeader
from kvcanary.recorder.trace.reader import EventView, TraceReader, read_trace
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS
from kvcanary.recorder.writing.writer import TraceWriter

_TOKEN_COLUMNS = ("input_ids", "positions", "out_cache_loc", "sampled_tokens")
_CHANGES = (
    *("table_index", "table_row", "table_start", "table_count", "table_slots"),
    *("lut_index", "lut_start", "lut_count", "lut_slots"),
    *("truth_row", "truth_start", "truth_count", "truth_tokens"),
    *("kv_change_stream", "kv_change_slot", "kv_change_phase"),
)


def told(view: EventView) -> TraceEvent:
    """Return an event of a trace, of any version of the format, as a recorder would hand it to a writer."""
    there = set(view.batch.record_batch.schema.names)
    return TraceEvent(
        kind=view.kind,
        time_ns=view.time_ns,
        scalars={name: view.scalar(name) for name in SCALARS if name not in ("event", "kind", "time_ns")},
        ints={name: view.ints(name).copy() for name in INT_LISTS if name in there and len(view.ints(name))},
        bytes={name: view.bytes(name).copy() for name in BYTE_LISTS if name in there and len(view.bytes(name))},
    )


def read_raw(path: Path) -> tuple[TraceHeader, list[TraceEvent]]:
    """A trace's header and its events, each as the writer was given it."""
    with TraceReader(path) as reader:
        return reader.header, [told(view) for view in read_trace(path)]


def write_raw(path: Path, header: TraceHeader, events: Sequence[TraceEvent], *, flush_every: int = 7) -> Path:
    """Write events as a trace, in small batches."""
    with TraceWriter(path, header, flush_bytes=1 << 30, flush_interval_ns=1 << 60) as writer:
        for number, event in enumerate(events, 1):
            assert writer.append(event)
            if number % flush_every == 0:
                writer.flush()
    return path


def write_in_batches(path: Path, header: TraceHeader, events: Sequence[TraceEvent], flush_every: int) -> list[int]:
    """Write a trace in batches of `flush_every` events; return where each batch ends."""
    write_raw(path, header, events, flush_every=flush_every)
    with TraceReader(path) as reader:
        return [item.end_byte for item in reader.stream()]


def as_rank(
    source: Path,
    target: Path,
    ranks: Ranks,
    change: Callable[[int, TraceEvent], None] = lambda _number, _event: None,
    *,
    created_ns: int = 1,
) -> Path:
    """Write a trace as another rank would have recorded it; `change` is called with each forward."""
    header, events = read_raw(source)
    with TraceWriter(target, replace(header, ranks=ranks, trace_id="", created_ns=created_ns)) as writer:
        for event in events:
            if event.kind == "forward":
                change(int(event.scalars["forward"]), event)
            assert writer.append(event)
    return target


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


def bend(events: list[TraceEvent], header: TraceHeader, rng: np.random.Generator) -> list[TraceEvent]:
    """Return a history with a dozen things wrong: events gone, twice, in another order, or with other values."""
    events = copy.deepcopy(events)
    for _ in range(12):
        at = int(rng.integers(1, len(events)))
        event = events[at]
        what = int(rng.integers(0, 9))
        if what == 0 and event.kind not in ("keyframe", "segment"):
            del events[at]
        elif what == 1:
            events.insert(at, copy.deepcopy(event))
        elif what == 2:
            events[at - 1], events[at] = events[at], events[at - 1]
        elif what == 3:
            events.insert(at, loss_event(lost_events=int(rng.integers(1, 4)), note="bent"))
        else:
            _bend_values(events, at, what, header, rng)
    return events


def _bend_values(events: list[TraceEvent], at: int, what: int, header: TraceHeader, rng: np.random.Generator) -> None:
    """Change values of the first forward from `at` on that has what can be changed."""
    column = {
        4: ("out_cache_loc", "table_slots", "lut_slots"),
        5: ("input_ids", "truth_tokens", "sampled_tokens"),
        6: ("prefix_lens", "positions", "truth_lens"),
        7: ("request_ids", "req_pool_indices"),
        8: ("kv_bytes", "kv_change_bytes", "kv_change_slot"),
    }[what]
    chosen = column[int(rng.integers(0, len(column)))]
    for event in events[at:]:
        values = event.bytes.get(chosen) if chosen.endswith("bytes") else event.ints.get(chosen)
        if values is None or not len(values):
            continue
        place = int(rng.integers(0, len(values)))
        if chosen.endswith("bytes"):
            values[place] ^= 1 + int(rng.integers(0, 255))
        elif chosen in ("out_cache_loc", "table_slots", "lut_slots", "kv_change_slot"):
            # another's slot, mostly; now and then one that no pool has
            values[place] = int(rng.integers(1, 60)) if rng.random() < 0.8 else int(rng.choice([0, -1, 1 << 20]))
        elif chosen in ("prefix_lens", "truth_lens", "positions"):
            values[place] = max(0, int(values[place]) + int(rng.integers(-9, 4)))
        elif chosen == "req_pool_indices":
            values[place] = int(rng.integers(0, 6))
        elif chosen == "request_ids":
            values[place] = int(values[int(rng.integers(0, len(values)))]) + int(rng.integers(0, 2))
        else:
            values[place] = int(rng.integers(0, 50))
        return


def lasting(event: TraceEvent, rng: np.random.Generator) -> TraceEvent:
    """Return a forward whose rows keep their requests for a while, and that mostly only reads."""
    forward = int(event.scalars["forward"])
    event.ints["request_ids"] = event.ints["req_pool_indices"] + 100 * (forward // 12)
    if rng.random() < 0.7:
        bs = len(event.ints["req_pool_indices"])
        for name in (*_TOKEN_COLUMNS, *_CHANGES):
            event.ints[name] = np.zeros(0, np.int64)
        event.ints["extend_lens"] = np.zeros(bs, np.int64)
        event.ints["sampled_lens"] = np.zeros(bs, np.int64)
        event.bytes = {"kv_bytes": np.zeros(0, np.uint8), "kv_change_bytes": np.zeros(0, np.uint8)}
    return event
