"""A flipped bit anywhere: never a crash, never a changed event, never silence.

Some bytes by default, from another start on each run; a fuzz run takes every byte.
"""

import os
import random
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvcanary.recorder.errors import UnreadableTraceError
from kvcanary.recorder.trace.reader import TraceReader

BATCHES = (2, 1)


def judge(traces, good, path):
    """Read a damaged file; every event given must be as written, and every batch not given must be told of."""
    try:
        batches, gaps, complete = traces.read(path)
    except UnreadableTraceError as error:
        assert str(path) in str(error)
        return "unreadable", 0
    for batch in batches:
        assert batch.record_batch.equals(good[batch.first_event].record_batch)
    starts = [batch.first_event for batch in batches]
    assert starts == sorted(set(starts))
    if not gaps:
        assert complete and starts == list(good)
        return "identical", 0
    missing = sum(batch.num_events for first, batch in good.items() if first not in starts)
    assert bool(missing) == any(gap.missing_events != 0 for gap in gaps)
    known = [gap.missing_events for gap in gaps]
    assert None in known or sum(known) == missing
    return "gap", missing


@pytest.mark.parametrize(("compression", "stride"), [("none", 73), ("lz4", 97), ("zstd", 127)])
@pytest.mark.one_in(2)
def test_flipped_bits(traces, every_byte, compression, stride):
    stride = 1 if every_byte else stride
    path = traces.write(batches=BATCHES, compression=compression)
    good = {batch.first_event: batch for batch in traces.read(path)[0]}
    assert list(good) == [0, 2]
    data = path.read_bytes()
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    target = traces.folder / "flipped.arrow"
    target.write_bytes(data)
    seen = {"unreadable": 0, "identical": 0, "gap": 0}
    with target.open("r+b", buffering=0) as file:
        for at in range(rng.randrange(stride), len(data), stride):
            bit = 1 << rng.randrange(8)
            os.pwrite(file.fileno(), bytes([data[at] ^ bit]), at)
            try:
                verdict, missing = judge(traces, good, target)
                # One damaged batch never takes another with it.
                assert missing in (0, *BATCHES)
            except Exception as error:
                raise AssertionError(f"byte {at} ^ {bit} of {len(data)}, seed {seed}") from error
            seen[verdict] += 1
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert seen["gap"] > len(data) // stride // 4, seen


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=12))
def test_several_flips(traces, flips):
    path = traces.folder / "trace.arrow"
    if not path.exists():
        traces.write(batches=(2, 3, 1))
    good = {batch.first_event: batch for batch in traces.read(path)[0]}
    data = bytearray(path.read_bytes())
    for place, mask in flips:
        data[int(place * len(data))] ^= mask
    target = traces.folder / "flipped.arrow"
    target.write_bytes(data)
    if data == path.read_bytes():
        return
    try:
        batches, gaps, _ = traces.read(target)
    except UnreadableTraceError:
        return
    for batch in batches:
        assert batch.record_batch.equals(good[batch.first_event].record_batch)
    if len(batches) < len(good):
        assert any(gap.missing_events != 0 for gap in gaps)


def test_garbage_between_batches_is_stepped_over(traces):
    path = traces.write(batches=(2, 1))
    batches, _, _ = traces.read(path)
    data = path.read_bytes()
    cut = batches[0].end_byte
    path.write_bytes(data[:cut] + b"\xff" * 64 + random.Random(3).randbytes(4096) + data[cut:])
    found, gaps, complete = traces.read(path)
    assert [batch.first_event for batch in found] == [0, 2]
    assert not complete
    assert gaps[0].kind == "damaged" and gaps[0].missing_events == 0


def test_a_damaged_header_is_read_from_the_footer(traces):
    path = traces.write(batches=(2, 1))
    data = bytearray(path.read_bytes())
    at = data.index(b'"engine"')
    data[at + 12] ^= 1
    path.write_bytes(data)
    with TraceReader(path) as reader:
        assert reader.header.engine.name == "toy"
        assert not reader.complete
    batches, gaps, _ = traces.read(path)
    assert sum(batch.num_events for batch in batches) == 3
    assert "header fails its CRC" in gaps[0].reason and gaps[0].missing_events == 0


def test_a_schema_message_that_swallows_batches(traces):
    path = traces.write(batches=(2, 1))
    data = bytearray(path.read_bytes())
    data[12:16] = (int.from_bytes(data[12:16], "little") + 8192).to_bytes(4, "little")  # its metadata length
    path.write_bytes(data)
    batches, gaps, complete = traces.read(path)
    assert [batch.num_events for batch in batches] == [2, 1]
    assert not complete and "length of its schema message" in gaps[0].reason


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("change", [-8, 1, 4, 8, 64, 1 << 40])
def test_a_wrong_body_length_takes_no_other_batch_with_it(traces, which, change):
    path = traces.write(batches=(2, 3, 1), compression="none")
    data = bytearray(path.read_bytes())
    start, metadata_bytes, body_bytes = traces.blocks(path)[which].tolist()
    at = data.index(struct.pack("<q", body_bytes), start, start + metadata_bytes)
    data[at : at + 8] = struct.pack("<q", body_bytes + change)
    path.write_bytes(data)
    batches, gaps, _ = traces.read(path)
    given = [batch.num_events for batch in batches]
    others = [count for number, count in enumerate((2, 3, 1)) if number != which]
    assert gaps and given in ([2, 3, 1], others)
    if given == [2, 3, 1]:
        assert all(gap.missing_events == 0 for gap in gaps)
