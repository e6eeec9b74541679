"""Small traces for the tests of this folder."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.vllm import attachment as vllm_attachment
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.framing import Frame, read_footer, read_frame
from kvcanary.recorder.trace.header import EngineInfo, KvStream, ModelInfo, PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import EventView, TraceBatch, TraceGap, TraceReader
from kvcanary.recorder.trace.schema import BYTE_LISTS, INT_LISTS, SCALARS
from kvcanary.recorder.trace.trace_bytes import TraceBytes
from kvcanary.recorder.writing.writer import TraceWriter


@dataclasses.dataclass(frozen=True)
class TraceMaker:
    """Makes traces of known content and reads them back as plain values."""

    folder: Path

    def header(self, **changes) -> TraceHeader:
        fields = {
            "engine": EngineInfo(name="toy", version="1.2", commit="abc"),
            "model": ModelInfo(name="tiny", dtype="float32"),
            "groups": (
                PoolGroup(
                    name="full", num_slots=64, streams=(KvStream(half="K", bytes_per_token=32, capture_bytes=16),)
                ),
            ),
            "tables": (StateTable(rows=8, width=32),),
            "trace_id": "0123",
            "created_ns": 1_700_000_000_000_000_000,
            "recorder_version": "0.1.0",
        }
        return TraceHeader(**{**fields, **changes})

    def event(self, number: int, tokens: int = 3) -> TraceEvent:
        """A forward whose every value depends on `number`."""
        base = np.arange(tokens, dtype=np.int64)
        return TraceEvent(
            kind="forward",
            time_ns=1_700_000_000_000_000_000 + 1000 * number,
            scalars={"forward": number, "mode": "decode" if number % 2 else "extend", "note": f"n{number} é"},
            ints={
                "req_pool_indices": np.array([1], np.int64),
                "input_ids": base + 1000 * number,
                "positions": base + number,
                "out_cache_loc": base + 5,
                "sampled_tokens": np.array([7 * number], np.int64),
            },
            bytes={"kv_bytes": np.arange(16 * tokens, dtype=np.uint8) + np.uint8(number)},
        )

    def write(
        self,
        name: str = "trace.arrow",
        batches=(2, 3, 1),
        *,
        header: TraceHeader | None = None,
        tokens: int = 3,
        **options,
    ) -> Path:
        """Write a closed trace whose batches hold that many events."""
        path = self.folder / name
        with TraceWriter(path, header or self.header(), overwrite=True, **options) as writer:
            number = 0
            for count in batches:
                for _ in range(count):
                    assert writer.append(self.event(number, tokens))
                    number += 1
                assert writer.flush()
        assert writer.failed is None
        return path

    def read(self, path) -> tuple[list[TraceBatch], list[TraceGap], bool]:
        with TraceReader(path) as reader:
            items = list(reader.stream())
            complete = reader.complete
        batches = [item for item in items if isinstance(item, TraceBatch)]
        gaps = [item for item in items if isinstance(item, TraceGap)]
        assert len(batches) + len(gaps) == len(items)
        return batches, gaps, complete

    def blocks(self, path) -> np.ndarray:
        """Return where the footer says that batches lie, [n, 3] int64: offset, bytes of metadata, of body."""
        source = TraceBytes(os.open(path, os.O_RDONLY))
        footer = read_footer(source, source.size())
        source.close()
        assert footer is not None
        return footer.blocks

    def first_frame(self, path) -> Frame:
        """Return the message of the first batch."""
        source = TraceBytes(os.open(path, os.O_RDONLY))
        frame = read_frame(source, int(self.blocks(path)[0, 0]), source.size())
        source.close()
        assert frame is not None
        return frame

    def plain(self, view: EventView) -> dict:
        """An event as plain values, every column of it."""
        found = {name: view.scalar(name) for name in SCALARS}
        found |= {name: view.ints(name).tolist() for name in INT_LISTS}
        return found | {name: view.bytes(name).tolist() for name in BYTE_LISTS}

    def expected(self, event: TraceEvent, number: int) -> dict:
        """The same of an event that was written."""
        found = {name: default for name, (_, default) in SCALARS.items()}
        found |= {name: [] for name in (*INT_LISTS, *BYTE_LISTS)}
        found |= {"event": number, "kind": event.kind, "time_ns": event.time_ns, **event.scalars}
        return found | {k: v.tolist() for k, v in {**event.ints, **event.bytes}.items()}


@pytest.fixture
def traces(tmp_path) -> TraceMaker:
    return TraceMaker(tmp_path)


@pytest.fixture
def every_byte(request) -> bool:
    """Whether this is a fuzz run, which takes every byte where a normal one takes some."""
    return request.config.getoption("--conformance-cases") > 500


@pytest.fixture
def engine_left_as_it_was() -> Iterator[None]:
    """For tests of the transformers adapter: afterwards the engine's methods are its own again."""
    from .hooked_engine import left_as_it_was

    with left_as_it_was():
        yield


@pytest.fixture
def process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's process outlives the engine that it plays: nothing waits for its end, and no hook of before is missed."""
    for attachment in (sglang_attachment.SglangAttachment, vllm_attachment.VllmAttachment):
        monkeypatch.setattr(attachment, "end_with_process", lambda _: None)
    monkeypatch.setattr(sglang_attachment, "not_applied", list)
