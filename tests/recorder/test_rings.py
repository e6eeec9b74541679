"""Sliding windows in rings: what a healthy ring does is clean, and a wrong read is found."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.forward_input import ForwardInput, TableRead
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader
from kvcanary.replayer.run.replay import ReplaySettings, replay
from kvcanary.replayer.run.verdict import Verdict

WINDOW, RING, WIDTH = 4, 5, 64
SETTINGS = [{}, {"executor": "stepwise"}, {"executor": "stepwise", "backend": "reference"}]


class Ring:
    """One request in a ring of 5 slots, of which a forward reads the last 4 before it writes; slots 1 to 5."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pool = np.zeros((RING + 1, 16), np.uint8)
        stream = KvStream(half="K", bytes_per_token=16, capture_bytes=16)
        group = PoolGroup(
            name="ring",
            kind="swa",
            window=WINDOW,
            num_slots=RING + 1,
            streams=(stream,),
            halves=("K",),
            reads_before_write=True,
        )
        source = KvSource(tensor=self.pool, page_size=1, bytes_per_token=16, read_bytes=16)
        header = TraceHeader(groups=(group,), tables=(StateTable(rows=2, width=WIDTH),))
        self.recorder = Recorder(path, header, kv_sources={(0, 0): source})
        self.prefix = 0
        self.first_stored = 0  # what lies before it is in no slot

    def forward(self, extend: int, *, shift: int = 0) -> None:
        """A chunk of so many tokens, of which the last 5 are stored; the read begins `shift` positions too late."""
        prefix, end = self.prefix, self.prefix + extend
        positions = np.arange(prefix, end)
        slots = np.where(positions < end - RING, -1, 1 + positions % RING)
        first = max(0, prefix - WINDOW - 1 + shift)
        read = [1 + p % RING if p >= self.first_stored else -1 for p in range(first, prefix)]
        self.recorder.before_forward(
            ForwardInput(
                mode="extend" if extend > 1 else "decode",
                req_pool_indices=[1],
                request_ids=[7],
                prefix_lens=[prefix],
                extend_lens=[extend],
                input_ids=positions + 50,
                positions=positions,
                out_cache_loc=(slots,),
                reads=(TableRead(starts=[first], counts=[len(read)], slots=read),),
            )
        )
        for position, slot in zip(positions.tolist(), slots.tolist(), strict=True):
            if slot > 0:
                self.pool[slot] = position + 1
        self.recorder.after_forward()
        self.prefix, self.first_stored = end, max(self.first_stored, end - RING)

    def judged(self, **settings: Any) -> Any:
        self.recorder.close()
        return replay(self.path, settings=ReplaySettings(**settings), report=None)


@pytest.mark.parametrize("settings", SETTINGS, ids=["interval", "stepwise", "reference"])
@pytest.mark.parametrize("chunks", [(3, 9, 1, 1, 1), (9, 9, 1, 2), (6, 1, 1, 14, 5, 6, 1), (2, 6, 1)])
def test_a_chunk_longer_than_the_ring_is_healthy(
    chunks: tuple[int, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    ring = Ring(tmp_path / "trace.arrow")
    for extend in chunks:
        ring.forward(extend)
    summary = ring.judged(**settings)
    assert (summary.violations, summary.findings, summary.losses) == (0, 0, [])
    assert summary.verified > 0


@pytest.mark.parametrize("settings", SETTINGS, ids=["interval", "stepwise", "reference"])
@pytest.mark.parametrize(("shift", "first"), [(2, 7), (3, 8), (-1, 4)])
def test_a_ring_that_is_read_short_or_long_is_found(
    shift: int, first: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    ring = Ring(tmp_path / "trace.arrow")
    ring.forward(3)
    for step in range(12):
        ring.forward(1, shift=shift if step == 7 else 0)
    ring.recorder.close()
    (tmp_path / "report").mkdir()
    summary = replay(ring.path, settings=ReplaySettings(**settings), report=tmp_path / "report")
    (found,) = pq.read_table(tmp_path / "report" / "findings.parquet").to_pylist()
    assert (found["kind"], found["forward"], found["request_id"]) == ("wrong_window", 8, 7)
    assert found["detail"] == f"reads positions {first} to 9 of a prefix of 10, the window of 4 begins at 6"
    assert summary.verdict is Verdict.CORRUPT
