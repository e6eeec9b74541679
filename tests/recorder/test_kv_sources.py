"""KV sources that are not what the header says are refused before the engine runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.kernels.ops.hash.kv_source import KvSource
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.header import KvStream, PoolGroup, StateTable, TraceHeader

SLOTS, SIZE = 20, 64


def record(path: Path, sources: list[KvSource], *, capture: int = 32) -> None:
    streams = tuple(KvStream(half=half, bytes_per_token=SIZE, capture_bytes=capture) for half in "KV")
    group = PoolGroup(name="full", num_slots=SLOTS, streams=streams[: len(sources)])
    header = TraceHeader(groups=(group,), tables=(StateTable(rows=2, width=8),))
    Recorder(path, header, kv_sources={(0, n): source for n, source in enumerate(sources)}).close()


def source(tensor: Any, *, page_size: int = 1, read_bytes: int = 32) -> KvSource:
    return KvSource(tensor=tensor, page_size=page_size, bytes_per_token=SIZE, read_bytes=read_bytes)


def pool(rows: int = SLOTS, width: int = SIZE) -> Any:
    return np.zeros((rows, width), np.uint8)


REFUSED = {
    "fewer slots": ([lambda: source(pool(SLOTS - 1))], "holds 19 slots"),
    "more slots, as of a pool with the heads first": ([lambda: source(pool(4 * SLOTS))], "holds 80 slots"),
    "a page too few": ([lambda: source(pool(4, 4 * SIZE), page_size=4)], "holds 16 slots"),
    "a page too many": ([lambda: source(pool(6, 4 * SIZE), page_size=4)], "holds 24 slots"),
    "fewer bytes than are captured": ([lambda: source(pool(), read_bytes=16)], "reads 16 bytes of a slot"),
    "rows that overlap": (
        [lambda: source(np.lib.stride_tricks.as_strided(pool(), (SLOTS, SIZE), (16, 1)))],
        "its slots overlap",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_source_that_does_not_hold_the_groups_slots(case: str, tmp_path: Path) -> None:
    makers, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        record(tmp_path / "trace.arrow", [make() for make in makers])
    assert not (tmp_path / "trace.arrow").exists()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_two_sources_over_the_same_bytes(kind: str, tmp_path: Path) -> None:
    both = pool(SLOTS + 1, 2 * SIZE)
    tensor: Any = torch.from_numpy(both) if kind == "torch" else both
    for number, (k, v) in enumerate(
        [
            (tensor[:SLOTS, :SIZE], tensor[:SLOTS, :SIZE]),
            (tensor[:SLOTS, :SIZE], tensor[1:, :SIZE]),
            (tensor[:SLOTS, 16 : 16 + SIZE], tensor[:SLOTS, :SIZE]),
            (tensor[1:, :SIZE], tensor[:SLOTS, 48 : 48 + SIZE]),
        ]
    ):
        with pytest.raises(ValueError, match="the same bytes"):
            record(tmp_path / f"{number}.arrow", [source(k), source(v)])
    record(tmp_path / "interleaved.arrow", [source(tensor[:SLOTS, :SIZE]), source(tensor[:SLOTS, SIZE:])])
    pages = pool(SLOTS // 2, 2 * SIZE + 32)  # the K and V of a token take turns in a page, 32 bytes each
    record(tmp_path / "turns.arrow", [source(pages[:, at : at + 2 * SIZE], page_size=2) for at in (0, 32)])
    with pytest.raises(ValueError, match="the same bytes"):
        record(tmp_path / "no_turns.arrow", [source(pages[:, at : at + 2 * SIZE], page_size=2) for at in (0, 16)])
    halves = pool(2 * SLOTS)
    record(tmp_path / "behind.arrow", [source(halves[SLOTS:]), source(halves[:SLOTS])])


def test_a_last_page_may_be_partly_used(tmp_path: Path) -> None:
    record(tmp_path / "trace.arrow", [source(pool(7, 3 * SIZE), page_size=3)])
