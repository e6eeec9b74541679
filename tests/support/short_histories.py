"""Histories of a few events by hand, replayed in both ways."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.writing.writer import TraceWriter

from .both_ways import Replayed, check

HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=64, halves=("K",)),),
    tables=(StateTable(rows=6, width=32),),
    slot_history="complete",
)


def ints(**columns: Sequence[int]) -> dict[str, np.ndarray]:
    return {name: np.array(values, np.int64) for name, values in columns.items()}


def forward(rows: list[int], ids: list[int], prefix: list[int], extend: list[int], tokens: list[int], slots: list[int]):
    """A decode; tokens behind those of the requests are padding."""
    positions = [p + i for row, p, n in zip(rows, prefix, extend, strict=True) if row for i in range(n)]
    positions += [0] * (len(tokens) - len(positions))
    columns = ints(
        req_pool_indices=rows, request_ids=ids, prefix_lens=prefix, extend_lens=extend,
        input_ids=tokens, positions=positions, out_cache_loc=slots,
    )  # fmt: skip
    return TraceEvent(kind="forward", scalars={"forward": slots[0] if slots else 0, "mode": "decode"}, ints=columns)


def slot_event(kind: str, slots: range, request: int) -> TraceEvent:
    columns = ints(slot_group=[0], slot_start=[slots.start], slot_count=[len(slots)])
    return TraceEvent(kind=kind, scalars={"request_id": request}, ints=columns)


def both(events: list[TraceEvent], folder: Path, header: TraceHeader = HEADER) -> Replayed:
    """Replay in both ways, require the same, and return what stepwise gave."""
    trace = folder / "t.arrow"
    with TraceWriter(trace, header) as writer:
        for event in events:
            assert writer.append(event), event.problem()
    return check([trace], folder / "reports")[0]
