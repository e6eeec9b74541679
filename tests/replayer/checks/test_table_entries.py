"""Where a token is written, against what the trace tells of its row: in the forward itself, whatever replays it."""

import json
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.capture.forward_input import ForwardInput
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.executors.incremental.compiled_pass import CompiledPass

from ...support.both_ways import check

pytestmark = pytest.mark.usefixtures("pass_from_the_start")

HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=64),), tables=(StateTable(rows=4, width=32),), slot_history="complete"
)


def event(kind: str, scalars: dict | None = None, **ints) -> TraceEvent:
    return TraceEvent(
        kind=kind, scalars=scalars or {}, ints={name: np.array(values, np.int64) for name, values in ints.items()}
    )


def cells(row: int, start: int, slots: list[int]) -> dict:
    return {
        "table_index": [0],
        "table_row": [row],
        "table_start": [start],
        "table_count": [len(slots)],
        "table_slots": slots,
    }


def forward(number: int, request: int, prefix: int, slots: list[int], told: dict | None = None) -> TraceEvent:
    count = len(slots)
    return event(
        "forward",
        {"forward": number, "mode": "decode" if count == 1 else "extend"},
        req_pool_indices=[1],
        request_ids=[request],
        prefix_lens=[prefix],
        extend_lens=[count],
        input_ids=[100 + prefix + i for i in range(count)],
        positions=list(range(prefix, prefix + count)),
        out_cache_loc=slots,
        **(told or {}),
    )


def alloc(request: int, start: int, count: int, told: dict | None = None) -> TraceEvent:
    runs = {"slot_group": [0], "slot_start": [start], "slot_count": [count]}
    return event("alloc", {"request_id": request}, req_pool_indices=[1], **runs, **(told or {}))


def status(request: int, what: str) -> TraceEvent:
    return event("status", {"request_id": request, "status": what}, req_pool_indices=[1])


def free(request: int, start: int, count: int) -> TraceEvent:
    return event("free", {"request_id": request}, slot_group=[0], slot_start=[start], slot_count=[count])


BEGINS = [status(7, "admitted"), alloc(7, 4, 8)]
PREFILL = [4, 5, 6, 7, 8, 9]
# The events behind the beginning, and what is found: position, slot, and the events that prove it.
TOLD = {
    "with the prefill": ([forward(0, 7, 0, PREFILL, cells(1, 0, [*PREFILL, 10, 11])), forward(1, 7, 6, [11])], [2, 3]),
    "in the forward itself": ([forward(0, 7, 0, PREFILL), forward(1, 7, 6, [11], cells(1, 6, [10]))], [3]),
    "by an allocation": (
        [forward(0, 7, 0, PREFILL), alloc(7, 12, 1, cells(1, 6, [10])), forward(1, 7, 6, [11])],
        [3, 4],
    ),
}
_AHEAD = forward(0, 7, 0, PREFILL, cells(1, 0, [*PREFILL, 10, 11]))
# Cells of which nobody says any more that they are the request's.
HEALTHY = {
    "where the row says": [_AHEAD, forward(1, 7, 6, [10]), forward(2, 7, 7, [11])],
    "told equal": [forward(0, 7, 0, PREFILL, cells(1, 0, PREFILL)), forward(1, 7, 6, [10], cells(1, 6, [10]))],
    "left by a forward": [forward(0, 7, 0, PREFILL), forward(1, 7, 6, [10]), forward(2, 7, 6, [11])],
    "another request": [
        _AHEAD,
        free(7, 4, 8),
        status(7, "finished"),
        alloc(8, 20, 8),
        forward(1, 8, 0, [*range(20, 28)]),
    ],
    "another request, untold": [_AHEAD, forward(1, 8, 0, [*range(20, 28)])],
    "given back": [_AHEAD, free(7, 10, 2), alloc(7, 12, 1), forward(1, 7, 6, [12])],
    "retracted": [_AHEAD, status(7, "retracted"), status(7, "admitted"), forward(1, 7, 0, [*range(20, 28)])],
    "written nowhere": [_AHEAD, forward(1, 7, 6, [-1])],
}


def found(events: list[TraceEvent], folder: Path) -> list[tuple]:
    with TraceWriter(folder / "t.arrow", HEADER) as writer:
        for item in BEGINS + events:
            assert writer.append(item)
    (replayed,) = check([folder / "t.arrow"], folder, incidents=False)
    table = replayed.table("findings")
    rows = [] if table is None else table.to_pylist()
    assert not replayed.summary.gaps
    return [(r["position"], r["slot"], json.loads(r["evidence"])) for r in rows if r["kind"] == "table_entry_differs"]


@pytest.mark.parametrize("how", TOLD)
def test_a_token_that_goes_elsewhere_than_its_row_says_is_found_in_its_forward(how: str, tmp_path: Path) -> None:
    events, evidence = TOLD[how]
    assert found(events, tmp_path) == [(6, 11, evidence)]


@pytest.mark.parametrize("how", HEALTHY)
def test_a_cell_that_nobody_told_for_this_request_says_nothing(how: str, tmp_path: Path) -> None:
    assert found(HEALTHY[how], tmp_path) == []


def test_the_compiled_pass_goes_on_once_the_cells_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    run = CompiledPass.run

    def counted(self: CompiledPass, batch, at: int) -> int:
        stop = run(self, batch, at)
        taken.extend(range(at, stop))
        return stop

    monkeypatch.setattr(CompiledPass, "run", counted)
    events = [_AHEAD, forward(1, 7, 6, [10]), forward(2, 7, 7, [11]), alloc(7, 12, 4), forward(3, 7, 8, [12])]
    assert found(events, tmp_path) == []
    assert taken == [0, 1, 5, 6]


@pytest.mark.parametrize("filled", [True, False])
def test_a_recorder_reads_the_cells_that_the_engine_has_filled(tmp_path: Path, filled: bool) -> None:
    table = np.zeros((4, 32), np.int32)
    table[1, :5] = [4, 5, 6, 7, 8]
    with Recorder(tmp_path / "t.arrow", HEADER) as recorder:
        for item in BEGINS:
            runs = (item.ints.get("slot_start"), item.ints.get("slot_count"))
            if item.kind == "alloc":
                recorder.slots("alloc", group=0, runs=runs, request_id=7, row=1)
        for prefix, slots in ((0, [4, 5, 6, -1]), (4, [9])):
            recorder.before_forward(
                ForwardInput(
                    mode="extend",
                    req_pool_indices=[1, 0],
                    request_ids=[7, -1],
                    prefix_lens=[prefix, 0],
                    extend_lens=[len(slots), 1],
                    input_ids=[*range(len(slots)), 0],
                    positions=[*range(prefix, prefix + len(slots)), 0],
                    out_cache_loc=(np.array([*slots, 0]),),
                    reads=(table,),
                    table_filled=filled,
                )
            )
            recorder.after_forward()
    (replayed,) = check([tmp_path / "t.arrow"], tmp_path, incidents=False)
    rows = replayed.table("findings").to_pylist()
    found = [(r["position"], r["slot"]) for r in rows if r["kind"] == "table_entry_differs"]
    assert found == ([(4, 9)] if filled else [])
