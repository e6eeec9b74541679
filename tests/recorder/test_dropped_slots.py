"""Which slots a forward takes out of its request's row: those that the request holds, wrote there, and writes no longer."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvcanary.kernels.constants import RECORD_POSITION
from kvcanary.kernels.replay_pass.ledger import ALLOC, CONTENT, HELD, LEDGER_COLUMNS, OWNER, SHARED, STATE
from kvcanary.recorder.state.ledger import DroppedSlots

REQUEST, ROW, POSITION, SLOT, OTHER = 7, 2, 3, 5, 6


def noted(changes: dict[str, Any]) -> list[list[int]]:
    """Return what is remembered after a forward that writes slot 6 where slot 5 stood, with what is changed about it."""
    case = {
        "row": ROW, "position": POSITION, "before": SLOT, "written": OTHER, "lut": -1, "state": HELD, "owner": REQUEST,
        "alloc": 10, "content": 11, "recorded": POSITION, "also_written": 0,
    } | changes  # fmt: skip
    table, ledger = np.zeros((3, 4), np.int32), np.zeros((8, LEDGER_COLUMNS), np.int64)
    if 0 <= case["row"] < 3 and 0 <= case["position"] < 4:
        table[case["row"], case["position"]] = case["before"]
    for column, name in ((STATE, "state"), (OWNER, "owner"), (ALLOC, "alloc"), (CONTENT, "content")):
        ledger[SLOT, column] = case[name]
    records = np.zeros((8, 4), np.int64)
    records[SLOT, RECORD_POSITION] = case["recorded"]
    pool = SimpleNamespace(
        index=0,
        group=SimpleNamespace(table=0, lut=case["lut"], halves=("K",)),
        pool=SimpleNamespace(tail={"K": records.view(np.uint8)}),
    )
    forward = SimpleNamespace(req_pool_indices=np.array([case["row"]]), request_ids=np.array([REQUEST]), event=20)
    tokens = SimpleNamespace(request=np.zeros(1, np.int64), position=np.array([case["position"]]))
    dropped, tables = DroppedSlots(), SimpleNamespace(req_to_token=[table])
    written = np.array([case["written"], case["also_written"]])
    dropped.note(forward, tokens, pool, written, tables, SimpleNamespace(rows=[ledger]))  # type: ignore[arg-type]
    return dropped.rows().tolist()


@pytest.mark.parametrize("changes", [{}, {"position": 0, "recorded": 0}, {"before": SLOT, "row": 1}])
def test_a_slot_that_is_held_and_no_longer_written_is_remembered(changes: dict[str, Any]) -> None:
    assert noted(changes) == [[REQUEST, 0, SLOT, 10, 20]]


@pytest.mark.parametrize(
    "changes",
    [
        {"written": SLOT},  # it stays where it is
        {"also_written": SLOT},  # it only moves to another place
        {"before": 0},
        {"before": -1},
        {"before": 8},  # the pool has no such slot
        {"row": 0},  # padding
        {"row": 3},
        {"position": 4},  # past the table's end
        {"position": -1},
        {"lut": 0},  # the table has another pool's slots
        {"state": SHARED},
        {"owner": 8},
        {"content": 10},  # the request has not written it since it got it
        {"recorded": POSITION + 1},  # it was written for another position
    ],
)
def test_others_are_not(changes: dict[str, Any]) -> None:
    assert noted(changes) == []


def test_several_forwards_add_up() -> None:
    dropped, one = DroppedSlots(), np.array([[REQUEST, 0, SLOT, 10, 20], [REQUEST, 0, OTHER, 11, 20], [8, 1, 2, 3, 21]])
    dropped.put_back(one)
    assert dropped.rows().tolist() == one.tolist()
    assert [len(given) for given in dropped.by_request.values()] == [1, 1]
    dropped.put_back(np.array([[REQUEST, 0, 1, 12, 20]]))  # it goes on from the part before
    assert [part.slots.tolist() for part in dropped.by_request[REQUEST]] == [[SLOT, OTHER, 1]]
