"""Batches decoded ahead in threads: the same batches and gaps, byte for byte, and bounded."""

import threading
from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.trace import decode
from kvcanary.recorder.trace.reader import TraceBatch, TraceReader


def told(path: Path) -> list[Any]:
    with TraceReader(path) as reader:
        return [
            (item.first_event, item.end_byte, item.stored_bytes(), item.record_batch.to_pylist())
            if isinstance(item, TraceBatch)
            else (item.kind, item.after_event, item.missing_events, item.reason)
            for item in reader.stream()
        ]


def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decode ahead however small the file is; the starts of the batches that were."""
    starts: list[int] = []
    decode_one = decode.BatchDecoder.decode

    def noted(self: Any, frame: Any) -> TraceBatch:
        if threading.current_thread().name.startswith("decode ahead"):
            starts.append(frame.start)
        return decode_one(self, frame)

    monkeypatch.setattr(decode, "LARGE_BYTES", 0)
    monkeypatch.setattr(decode.BatchDecoder, "decode", noted)
    monkeypatch.setattr(decode.os, "sched_getaffinity", lambda _: {0, 1})
    return starts


def test_a_whole_trace(traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(batches=(3, 1, 4, 1, 5), compression="lz4")
    alone = told(path)
    starts = ahead(monkeypatch)
    assert told(path) == alone
    assert sorted(starts) == [one[1] for one in alone[:-1]]  # all but the first, each once


def test_what_lies_in_the_file_as_it_is_needs_no_thread(traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(batches=(3, 1, 4), compression="none")
    starts = ahead(monkeypatch)
    assert len(told(path)) == 3 and not starts


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.one_in(2)
def test_damage_anywhere(traces: Any, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """A byte of every 97th place is another one: the same batches and the same words."""
    path = traces.write(batches=(2,) * 5, compression="lz4")
    whole = path.read_bytes()
    first = told(path)[0][1]
    bad = path.with_name("bad.arrow")
    for at in range(first - 400 + 31 * every, len(whole), 97 * 13):
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        alone = told(bad)
        with monkeypatch.context() as patch:
            ahead(patch)
            assert told(bad) == alone, at
        bad.write_bytes(whole[:at])
        alone = told(bad)
        with monkeypatch.context() as patch:
            ahead(patch)
            assert told(bad) == alone, at


def test_a_file_that_changes_meanwhile(traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that end the messages where a batch was: that one is left out, and nothing else."""
    path = traces.write(batches=(2,) * 4, compression="lz4")
    whole = told(path)
    ahead(monkeypatch)
    read = decode.os.preadv

    def other(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = read(descriptor, buffers, offset)
        if offset == whole[1][1]:  # where the third begins
            buffers[0][4:8] = bytes(4)
        return count

    monkeypatch.setattr(decode.os, "preadv", other)
    found = told(path)
    assert [item for item in found if item in whole] == [whole[0], whole[1], whole[3]]
    assert [item[0] for item in found if item not in whole] == ["damaged"]


def test_no_more_than_a_few_are_in_flight(traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(batches=(2,) * 9, compression="lz4")
    starts = ahead(monkeypatch)
    with TraceReader(path) as reader:
        stream = reader.stream()
        for number in range(1, 5):
            assert next(stream) is not None
            assert len(starts) <= number + decode.AHEAD
        stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode ahead")]


def test_a_large_batch_is_not_decoded_ahead(traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(batches=(2,) * 4, compression="lz4")
    starts = ahead(monkeypatch)
    monkeypatch.setattr(decode, "_AHEAD_BYTES", 100)
    assert len(told(path)) == 4 and not starts


def test_a_reader_that_is_closed_first(traces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(batches=(2,) * 9, compression="lz4")
    ahead(monkeypatch)
    with TraceReader(path) as reader:
        stream = reader.stream()
        next(stream)
    assert len(list(stream)) == 8
