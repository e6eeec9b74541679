"""A request followed with the bytes left in the file, and with all of them read: the same slots, bytes, writers and tokens."""

import os
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.errors import TraceError
from kvcanary.recorder.trace import decode
from kvcanary.recorder.trace.batch import TraceBatch
from kvcanary.recorder.trace.event import batch_metadata
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.trace_file import TraceFile
from kvcanary.replayer.model import late_bytes
from kvcanary.replayer.model.request_walk import RequestWalk
from kvcanary.replayer.model.rerun import _rerun, rerun
from kvcanary.replayer.run import streams
from kvcanary.replayer.run.streams import Checks

from ..support.places import DATA
from ..support.raw_traces import cut

TRACES = sorted(DATA.glob("*.arrow")) + sorted((DATA / "corpus").glob("nano-*.arrow"))[:4]
MANY = [*sorted((DATA / "corpus").glob("*restored*.arrow")), *sorted((DATA / "corpus").glob("*load*.arrow"))]


@pytest.fixture(autouse=True)
def leave_all(monkeypatch):
    monkeypatch.setattr(decode, "_LEFT_BYTES", 1)
    monkeypatch.setattr(late_bytes, "_MANY_BYTES", 1)
    monkeypatch.setattr(decode, "_PART_BYTES", 100)  # so that some are read in several parts


def plain(path, folder):
    """Write a trace anew, not compressed; return its path and its requests."""
    target, requests = folder / "t.arrow", set()
    with TraceReader(path) as reader:
        file = TraceFile(target, reader.schema, compression="none", overwrite=True)
        for item in reader.stream():
            if isinstance(item, TraceBatch):
                file.write(item.record_batch, batch_metadata(item.record_batch, item.first_event))
                requests |= set(item.values("request_ids").tolist()) - {-1}
        file.close()
        return target, reader.header, sorted(requests)


def followed(header, path, request, checks):
    walk = RequestWalk(header, str(request))
    try:
        walk.walk([path], checks)
    except TraceError as error:
        return str(error)
    return walk


@pytest.mark.one_in(10)
@pytest.mark.parametrize("path", [*TRACES, *MANY], ids=lambda path: path.stem)
def test_the_same_is_seen(path, tmp_path):
    target, header, requests = plain(path, tmp_path)
    left = 0
    for request in requests[:6]:
        with Checks() as checks:
            late = followed(header, target, request, checks)
            assert checks.hold()
            left += sum(map(len, checks._found.values()))
        whole = followed(header, target, request, None)
        if isinstance(whole, str):
            assert late == whole
            continue
        assert late.tokens().tolist() == whole.tokens().tolist() and late.forwards == whole.forwards
        assert len(late.seen) == len(whole.seen)
        for mine, right in zip(late.seen, whole.seen, strict=True):
            for name, one, other in zip(mine._fields, mine, right, strict=True):
                same = zip(one, other, strict=True) if isinstance(one, list) else [(one, other)]
                assert all(np.array_equal(a, b) for a, b in same), name
    assert left or path in MANY or not requests  # of a transfer the bytes are read with it


def test_bytes_of_others_that_are_damaged_are_a_gap_as_if_all_was_read(checkpoint, tmp_path):
    target, header, _ = plain(DATA / "clean_llama.arrow", tmp_path)
    right = rerun([target], "late-repeat", checkpoint)
    assert right.fault == "agrees" and right.compared == 154
    with TraceReader(target) as reader:
        batches = [item for item in reader.stream() if isinstance(item, TraceBatch)]
    raw = bytearray(target.read_bytes())
    needle = bytes(batches[0].values("kv_bytes")[:64])
    at = bytes(raw).index(needle)
    raw[at] ^= 1
    damaged = tmp_path / "damaged.arrow"
    damaged.write_bytes(raw)
    with Checks() as checks:
        followed(header, damaged, "late-repeat", checks)
        assert not checks.hold()

    def carefully():
        walk = RequestWalk(header, "late-repeat")
        walk.walk([damaged])
        return _rerun(walk, [damaged], "late-repeat", checkpoint)

    found, expected = outcome(lambda: rerun([damaged], "late-repeat", checkpoint)), outcome(carefully)
    assert found == expected != right.to_json()


def test_a_number_that_was_damaged_is_a_gap_as_if_all_was_read(checkpoint, tmp_path):
    target, header, _ = plain(DATA / "clean_llama.arrow", tmp_path)
    with TraceReader(target) as reader:
        views = [view for item in reader.stream() if isinstance(item, TraceBatch) for view in item]
    request = followed(header, target, "late-repeat", None).request_id
    mine = [v for v in views if v.kind == "forward" and request in v.ints("request_ids").tolist()]
    batch = mine[-1].batch
    column = batch.values("req_pool_indices")
    at = int(batch.offsets("req_pool_indices")[mine[-1].index]) + mine[-1].ints("request_ids").tolist().index(request)
    raw = bytearray(target.read_bytes())
    assert raw.count(bytes(column)) == 1
    raw[raw.index(bytes(column)) + at * column.itemsize + 2] ^= 1  # a row that no table has
    damaged = tmp_path / "damaged.arrow"
    damaged.write_bytes(raw)

    def carefully():
        walk = RequestWalk(header, "late-repeat")
        walk.walk([damaged])
        return _rerun(walk, [damaged], "late-repeat", checkpoint)

    assert outcome(lambda: rerun([damaged], "late-repeat", checkpoint)) == outcome(carefully)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.one_in(10)
def test_of_many_segments_few_are_open_and_the_same_is_seen(checkpoint, tmp_path, monkeypatch, compression):
    monkeypatch.setattr(streams, "_MOST_OPEN", 3, raising=False)
    segments, opened = cut(DATA / "clean_llama.arrow", tmp_path / "t.arrow", seed=1, least=2, most=5), []
    for path in segments if compression != "none" else ():
        with TraceReader(path) as reader:
            file = TraceFile(path.with_suffix(".new"), reader.schema, compression=compression)
            for item in reader.stream():
                file.write(item.record_batch, batch_metadata(item.record_batch, item.first_event))
            file.close()
        path.with_suffix(".new").rename(path)
    right, apply = rerun([DATA / "clean_llama.arrow"], "late-repeat", checkpoint), RequestWalk.apply

    def counted(walk, view):
        files = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        opened.append(len({path for path in files if path.startswith(str(tmp_path))}))
        return apply(walk, view)

    monkeypatch.setattr(RequestWalk, "apply", counted)
    found = rerun(segments, "late-repeat", checkpoint)
    # One more than stay open is read while the events that wait are applied, before the oldest is closed.
    assert len(segments) > 12 and max(opened) == (4 if compression == "none" else 1)
    assert found.to_json() == right.to_json() and found.compared == 154


def outcome(run):
    try:
        return run().to_json()
    except TraceError as error:
        return str(error)
