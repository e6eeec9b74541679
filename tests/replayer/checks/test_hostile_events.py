"""Events that contradict themselves change nothing, allocate nothing, and are said to be left out."""

import dataclasses
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.state.events import CopyEvent, SlotEvent, read_known_event
from kvcanary.recorder.state.forward import UnusableEventError
from kvcanary.recorder.state.requests import RequestTable
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.checks import CHECK_NAMES, make_checks
from kvcanary.replayer.checks.history import History

BIG = 1 << 62
HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=64), PoolGroup(name="small", num_slots=8, host_num_slots=100)),
    tables=(StateTable(rows=8, width=32),),
    slot_history="complete",
)


def event_view(path: Path, kind: str, scalars: dict | None = None, *, header: TraceHeader = HEADER, **ints):
    columns = {name: np.array(values, np.int64) for name, values in ints.items()}
    with TraceWriter(path, header) as writer:
        assert writer.append(TraceEvent(kind=kind, scalars=scalars or {}, ints=columns))
    with TraceReader(path) as reader:
        (batch,) = reader.stream()
        return batch.event(0)


def runs(groups, starts, counts) -> dict:
    return {"slot_group": groups, "slot_start": starts, "slot_count": counts}


def copies(**changed) -> dict:
    columns = {"group": [1], "src_tier": [0], "src": [1], "dst_tier": [0], "dst": [2], "count": [3]} | changed
    return {f"copy_{name}": values for name, values in columns.items()}


HOSTILE = [
    ("alloc", {}, runs([0, 0], [1], [1])),
    ("alloc", {}, runs([2], [1], [1])),
    ("alloc", {}, runs([-1], [1], [1])),
    ("alloc", {}, runs([0, BIG], [1, 1], [1, 1])),
    ("free", {}, runs([0], [-1], [1])),
    ("free", {}, runs([0], [1], [-1])),
    ("evict", {}, runs([0], [BIG], [BIG])),
    ("evict", {}, runs([0, 0], [BIG, 1], [BIG, 1])),
    ("evict", {}, runs([0, 0], [-BIG, 1], [-BIG, 1])),
    ("alloc", {}, runs([0] * 50, [0] * 50, [60] * 50)),
    ("alloc", {}, runs([1] * 9, [0] * 9, [0] * 9)),
    ("alloc", {"status": "borrowed"}, runs([0], [1], [1])),
    ("alloc", {}, runs([0], [1], [1]) | {"req_pool_indices": [1, 2]}),
    ("kv_copy", {}, copies(group=[2])),
    ("kv_copy", {}, copies(dst=[6])),
    ("kv_copy", {}, copies(dst=[-1])),
    ("kv_copy", {}, copies(src=[6])),
    ("kv_copy", {}, copies(src=[-1])),
    ("kv_copy", {}, copies(src_tier=[1], src=[98])),
    ("kv_copy", {}, copies(dst_tier=[1], dst=[98])),
    ("kv_copy", {}, copies(count=[BIG])),
    ("kv_copy", {}, copies(dst_tier=[2])),
    ("kv_copy", {}, copies(src=[1, 2])),
    ("transfer", {"status": "begun", "mode": "send"}, runs([0], [1], [1])),
    ("transfer", {"status": "start", "mode": "sideways"}, runs([0], [1], [1])),
    ("transfer", {"status": "start", "mode": "send"}, runs([0], [1], [BIG])),
    ("status", {"status": "lost"}, {}),
    ("status", {"status": "admitted"}, {"req_pool_indices": [1, 2, 3]}),
    ("sample", {}, {"sampled_lens": [1, 1], "sampled_tokens": [1]}),
    ("sample", {}, {"sampled_lens": [-1, 2], "sampled_tokens": [1]}),
    ("sample", {}, {"sampled_lens": [BIG, BIG, BIG, BIG, 1], "sampled_tokens": [1]}),
]


@pytest.mark.parametrize("kind, scalars, ints", HOSTILE)
def test_it_is_refused_before_anything_changes(kind: str, scalars: dict, ints: dict, tmp_path: Path) -> None:
    history = History(HEADER, RequestTable(), backend="cpu")
    before = [rows.copy() for rows in history.ledger.rows]
    view = event_view(tmp_path / "t.arrow", kind, scalars, **ints)
    with pytest.raises(UnusableEventError):
        history.open(view)
    assert all(np.array_equal(rows, was) for rows, was in zip(history.ledger.rows, before, strict=True))
    checks = make_checks(CHECK_NAMES, header=HEADER, request_table=RequestTable())
    with pytest.raises(UnusableEventError):
        checks.event(view)
    checks.forget()


@pytest.mark.parametrize("row", [0, 8, BIG, -BIG])
def test_rows_outside_the_tables_are_nobodys(row: int, tmp_path: Path) -> None:
    checks = make_checks(CHECK_NAMES, header=HEADER, request_table=RequestTable())
    for number, status in enumerate(("admitted", "finished")):
        view = event_view(
            tmp_path / f"{number}.arrow", "status", {"status": status, "request_id": BIG}, req_pool_indices=[row]
        )
        assert checks.event(view) == []


@pytest.mark.parametrize(("tier", "last"), [(0, 5), (1, 97)])
def test_a_copy_may_be_of_a_tiers_last_slots(tier: int, last: int, tmp_path: Path) -> None:
    for name in ("src", "dst"):
        view = event_view(tmp_path / f"{name}.arrow", "kv_copy", **copies(**{f"{name}_tier": [tier], name: [last]}))
        known = read_known_event(view, HEADER.groups)
        assert isinstance(known, CopyEvent)
        (copy,) = known.copies
        assert getattr(copy, name).tolist() == [last, last + 1, last + 2]


def test_whole_pools_and_copies_to_the_host_are_welcome(tmp_path: Path) -> None:
    known = read_known_event(event_view(tmp_path / "a.arrow", "alloc", **runs([0, 1], [0, 0], [64, 8])), HEADER.groups)
    assert isinstance(known, SlotEvent)
    assert [(part.group, len(part.slots), len(part.repeated)) for part in known.parts] == [(0, 63, 0), (1, 7, 0)]
    known = read_known_event(
        event_view(tmp_path / "b.arrow", "free", **runs([0] * 3, [5, 9, 3], [2, 1, 3])), HEADER.groups
    )
    assert isinstance(known, SlotEvent)
    assert known.parts[0].slots.tolist() == [5, 6, 9, 3, 4, 5]
    assert known.parts[0].repeated.tolist() == [5]
    assert known.row == -1
    view = event_view(tmp_path / "c.arrow", "kv_copy", **copies(group=[1], dst_tier=[1], dst=[90]))
    known = read_known_event(view, HEADER.groups)
    assert isinstance(known, CopyEvent)
    assert known.parts == ()
    assert [(one.group, one.dst_tier, one.dst.tolist()) for one in known.copies] == [(1, 1, [90, 91, 92])]
    assert read_known_event(event_view(tmp_path / "d.arrow", "mark", {"note": "x"}), HEADER.groups) is None
    assert read_known_event(event_view(tmp_path / "e.arrow", "free"), HEADER.groups).parts == ()


def test_a_million_requests_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    """What is kept for each request is given up with it: only ids of those that are gone stay."""
    history = History(dataclasses.replace(HEADER), RequestTable(), backend="cpu")
    for number in range(40):
        for kind, scalars in (("alloc", {"request_id": number}), ("free", {"request_id": number})):
            view = event_view(tmp_path / f"{number}{kind}.arrow", kind, scalars, **runs([0], [1 + number], [2]))
            history.open(view)
            history.apply_event(view)
    assert history.ledger.held_by == {}


@pytest.mark.parametrize("kind", ["alloc", "free"])
def test_an_event_that_names_every_slot_takes_less_than_a_copy_of_the_ledger(kind: str, tmp_path: Path) -> None:
    slots = 1 << 18
    header = dataclasses.replace(HEADER, groups=(PoolGroup(name="full", num_slots=slots),))
    checks = make_checks(CHECK_NAMES, header=header, request_table=RequestTable())
    names_all = runs([0], [1], [slots - 1])
    assert checks.event(event_view(tmp_path / "a.arrow", "alloc", {"request_id": 1}, header=header, **names_all)) == []
    view = event_view(tmp_path / "b.arrow", kind, {"request_id": 2}, header=header, **names_all)
    tracemalloc.start()
    try:
        (finding,) = checks.event(view)  # every slot is another's
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert finding.count == slots - 1
    assert peak < checks.history.ledger.rows[0].nbytes
