"""Shapes of engine for random histories: full and sliding pools, rings, drafts, one table or two."""

from dataclasses import replace

from kvcanary.recorder.trace.header import KvStream, Oracle, PoolGroup, Runner, StateTable, TraceHeader
from kvcanary.recorder.trace.schema import SlotHistoryTold

ROWS, WIDTH, SLOTS, HOST = 6, 30, 70, 12


def _streams(half: str, count: int, capture: int = 16) -> tuple[KvStream, ...]:
    return tuple(KvStream(half=half, layer=n, bytes_per_token=capture, capture_bytes=capture) for n in range(count))


FULL = PoolGroup(name="full", num_slots=SLOTS, host_num_slots=HOST, streams=_streams("K", 1, 32) + _streams("V", 1))
SWA = PoolGroup(name="swa", kind="swa", window=4, lut=0, num_slots=SLOTS - 20, halves=("V",), streams=_streams("V", 1))
OTHER = PoolGroup(name="other", kind="swa", window=9, lut=1, num_slots=SLOTS, halves=("K",))
RING = PoolGroup(
    name="ring", kind="swa", window=5, table=1, num_slots=SLOTS, halves=("K",), reads_before_write=True,
    streams=_streams("K", 2),
)  # fmt: skip
DRAFT = PoolGroup(name="draft", runner=1, num_slots=SLOTS, halves=("K",), streams=_streams("K", 1))
SHAPES = {
    "full": ((FULL,), 1, 0),
    "draft": ((FULL, DRAFT), 1, 0),
    "sliding": ((replace(SWA, window=7),), 1, 1),
    "hybrid": ((FULL, SWA), 1, 1),
    "all": ((FULL, SWA, OTHER, RING, DRAFT), 2, 2),
}


def header(shape: str, *, told: SlotHistoryTold, truth: bool = True, oracle: bool = False) -> TraceHeader:
    """Return the header of a shape of engine."""
    groups, tables, luts = SHAPES[shape]
    return TraceHeader(
        groups=groups,
        tables=tuple(StateTable(name=f"table {n}", rows=ROWS, width=WIDTH) for n in range(tables)),
        lut_lens=(SLOTS - 4, SLOTS)[:luts],
        truth_table=StateTable(name="truth", rows=ROWS, width=WIDTH - 2) if truth else None,
        runners=(Runner(), Runner(name="draft", token_offset=1)) if DRAFT in groups else (Runner(),),
        slot_history=told,
        oracle=Oracle(vocab_size=5) if oracle else None,
        sweep_interval=8,
    )
