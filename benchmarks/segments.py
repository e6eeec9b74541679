"""What segments cost the writer's thread: the recorded beside the encoding of each event, and a keyframe.

Run from a checkout: `python benchmarks/segments.py`. Nothing here runs on an engine's thread. Decodes of 64 requests
over a pool of K and V, 16 bytes a slot and half, as the recorder hands them over; each forward also tells one
allocation. Times of forwards are CPU time of the thread. Before a ratio is printed, the keyframe is put back and must give the same state.
"""

import argparse
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from kvcanary.kernels.constants import KvHashMode
from kvcanary.recorder.state.apply import RecordedState
from kvcanary.recorder.state.keyframe import keyframe_events
from kvcanary.recorder.state.keyframe_load import KeyframeLoader
from kvcanary.recorder.state.pools import pool_bytes
from kvcanary.recorder.trace.batch import TraceBatch
from kvcanary.recorder.trace.event import TraceEvent, batch_metadata, encode_events, header_schema
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.writing.trace_file import TraceFile

BATCH = 64
CAPTURE = 16
ROUND = 32  # events in a batch of the trace


def header_of(slots: int) -> TraceHeader:
    """Return a header of a pool with `slots` slots and rows for the batch."""
    streams = tuple(KvStream(half=half, bytes_per_token=1024, capture_bytes=CAPTURE) for half in ("K", "V"))
    width = slots // BATCH + 64
    return TraceHeader(
        groups=(PoolGroup(name="full", num_slots=slots, streams=streams),),
        tables=(StateTable(rows=BATCH + 1, width=width),),
        truth_table=StateTable(name="truth", rows=BATCH + 1, width=width),
        slot_history="complete",
    )


def forward(number: int, prefix: np.ndarray, extend: int, slots: np.ndarray, random: np.random.Generator) -> TraceEvent:
    """Return a forward of the whole batch, `extend` tokens each, into `slots` `[BATCH * extend]`."""
    rows = np.arange(1, BATCH + 1)
    tokens = random.integers(0, 100_000, BATCH * extend)
    ints = {
        "req_pool_indices": rows,
        "request_ids": rows + 1000,
        "prefix_lens": prefix,
        "extend_lens": np.full(BATCH, extend),
        "truth_lens": prefix + extend,
        "sampled_lens": np.ones(BATCH, np.int64),
        "input_ids": tokens,
        "positions": (prefix[:, None] + np.arange(extend)).reshape(-1),
        "out_cache_loc": slots,
        "sampled_tokens": random.integers(0, 100_000, BATCH),
    }
    data = {"kv_bytes": random.integers(0, 256, 2 * len(slots) * CAPTURE).astype(np.uint8)}
    return TraceEvent(
        kind="forward", time_ns=number, scalars={"forward": number, "mode": "decode"}, ints=ints, bytes=data
    )


def alloc(number: int, slots: np.ndarray) -> TraceEvent:
    """Return the allocation of a forward's slots."""
    ints = {"slot_group": np.zeros(1, np.int64), "slot_start": slots[:1].copy(), "slot_count": np.array([len(slots)])}
    return TraceEvent(kind="alloc", time_ns=number, scalars={"request_id": 1001}, ints=ints)


def measure(slots: int, decodes: int, folder: Path) -> None:
    """Fill a pool, decode, and write a keyframe of it; print what each took."""
    random = np.random.default_rng(0)
    header = header_of(slots)
    schema = header_schema(header)
    recorded = RecordedState(header)
    context = (slots - 1) // BATCH - decodes - ROUND - 1
    at, events = 1, 0
    spent: dict[str, list[float]] = {"encode": [], "recorded": []}
    prefix = np.zeros(BATCH, np.int64)
    made: list[TraceEvent] = []

    def pass_on(*, counted: bool) -> None:
        nonlocal events
        begin = time.thread_time()
        batch = encode_events(made, events, schema)
        batch_metadata(batch, events)
        between = time.thread_time()
        for view in TraceBatch(batch, first_event=events):
            recorded.apply(view)
        end = time.thread_time()
        if counted:
            spent["encode"].append((between - begin) / (len(made) / 2))
            spent["recorded"].append((end - between) / (len(made) / 2))
        events += len(made)
        made.clear()

    number = 0
    while prefix[0] < context:
        extend = int(min(512, context - prefix[0]))
        made.append(forward(number, prefix.copy(), extend, np.arange(at, at + BATCH * extend), random))
        at, prefix, number = at + BATCH * extend, prefix + extend, number + 1
        pass_on(counted=False)
    for step in range(decodes + ROUND):  # the first round is not counted
        out = np.arange(at, at + BATCH)
        made += [alloc(number, out), forward(number, prefix.copy(), 1, out, random)]
        at, prefix, number = at + BATCH, prefix + 1, number + 1
        if len(made) == 2 * ROUND or step == decodes + ROUND - 1:
            pass_on(counted=step >= ROUND)
    begin = time.perf_counter()
    file = TraceFile(folder / f"{slots}.arrow", schema)
    first = events
    kept = []
    for event in keyframe_events(recorded, time_ns=number):
        batch = encode_events([event], events, schema)
        file.write(batch, batch_metadata(batch, events))
        events += 1
        kept.append(batch)
    file.close()
    took = time.perf_counter() - begin
    check(recorded, kept, first)
    per = {name: 1e6 * min(rounds) for name, rounds in spent.items()}  # of the round that was disturbed least
    print(
        f"{slots:>9,} slots   decode of {BATCH}: encode and CRC {per['encode']:.0f} us, apply {per['recorded']:.0f} us, "
        f"{per['recorded'] / per['encode']:.2f} times as much   keyframe {file.size_bytes / 1e6:.1f} MB in {took:.2f} s"
        f"   the state's memory at most {pool_bytes(header) / 1e6:.0f} MB"
    )


def check(recorded: RecordedState, kept: list, first: int) -> None:
    """Put the keyframe back; raise `SystemExit` where it does not give the recorded's state."""
    fresh = RecordedState(recorded.state.header)
    loader = KeyframeLoader(fresh.state, kv_hash_mode=KvHashMode.PARTIAL)
    for number, batch in enumerate(kept):
        for view in TraceBatch(batch, first_event=first + number):
            loader.apply(view)
    pairs = zip(recorded.state.pools[0].pool.arrays(), fresh.state.pools[0].pool.arrays(), strict=True)
    tables = zip(recorded.state.tables.req_to_token, fresh.state.tables.req_to_token, strict=True)
    if not all(np.array_equal(a, b) for a, b in [*pairs, *tables]):
        raise SystemExit("the keyframe does not give back the recorded's state: no figure is printed")


def main() -> None:
    """Measure pools of several sizes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[65_536, 262_144, 1_048_576])
    parser.add_argument("--decodes", type=int, default=400)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        for slots in arguments.slots:
            measure(slots, arguments.decodes, Path(folder))
    print(f"most memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
