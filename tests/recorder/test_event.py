"""Events and their encoding into batches."""

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from kvcanary.recorder.trace.event import NO_LISTS, EventRows, TraceEvent, encode_events, loss_event, num_rows
from kvcanary.recorder.trace.schema import BYTE_LISTS, EVENT_KINDS, INT_LISTS, SCALARS, trace_schema
from kvcanary.recorder.writing.tail import _bodies


def test_nbytes_counts_what_a_queue_holds():
    empty = TraceEvent(kind="mark").nbytes
    assert empty > 0
    event = TraceEvent(
        kind="mark",
        scalars={"note": "x" * 100, "forward": 1},
        ints={"input_ids": np.zeros(1000, np.int64)},
        bytes={"kv_bytes": np.zeros(500, np.uint8)},
    )
    assert event.nbytes == empty + 400 + 8000 + 500


def test_what_events_without_lists_share_cannot_be_filled():
    with pytest.raises(TypeError):
        NO_LISTS["input_ids"] = np.zeros(1, np.int64)
    event = TraceEvent(kind="request", ints=NO_LISTS, bytes=NO_LISTS)
    assert event.problem() is None
    assert encode_events([event], 0, trace_schema()).num_rows == 1


def test_every_kind_and_column_is_accepted():
    for kind in EVENT_KINDS:
        event = TraceEvent(
            kind=kind,
            scalars={name: default for name, (_, default) in SCALARS.items() if name not in ("event", "kind")},
            ints={name: np.zeros(2, np.int64) for name in INT_LISTS},
            bytes={name: np.zeros(2, np.uint8) for name in BYTE_LISTS},
        )
        assert event.problem() is None
        assert encode_events([event], 0, trace_schema()).column("kind").to_pylist() == [kind]


@pytest.mark.parametrize("value", [True, 1.0, None, 1 << 63, np.int64(1)])
def test_a_scalar_of_another_type_is_a_problem(value):
    assert "forward is" in TraceEvent(kind="mark", scalars={"forward": value}).problem()


def test_loss_event():
    event = loss_event(lost_events=-1, note="why", time_ns=3)
    assert event.problem() is None
    assert (event.kind, event.time_ns, event.scalars) == ("loss", 3, {"lost_events": -1, "note": "why"})


def test_no_events():
    batch = encode_events([], 5, trace_schema())
    assert batch.num_rows == 0
    batch.validate(full=True)


def test_strided_arrays_and_uneven_lengths():
    source = np.arange(40, dtype=np.int64)
    events = [TraceEvent(kind="forward", ints={"input_ids": source[::-n]} if n else {}) for n in range(5)]
    batch = encode_events(events, 100, trace_schema())
    batch.validate(full=True)
    assert batch.column("event").to_pylist() == [100, 101, 102, 103, 104]
    assert batch.column("input_ids").to_pylist() == [source[::-n].tolist() if n else [] for n in range(5)]
    assert batch.column("kv_bytes").to_pylist() == [[]] * 5
    assert batch.schema.equals(trace_schema())


def test_an_offset_beyond_32_bits_is_refused(monkeypatch):
    event = TraceEvent(kind="forward", ints={"input_ids": np.zeros(3, np.int64)})
    monkeypatch.setattr(np, "iinfo", lambda kind: type("Info", (), {"max": 5}))
    with pytest.raises(ValueError, match="column input_ids would hold 6 values"):
        encode_events([event, event], 0, trace_schema())


def test_nothing_is_null():
    batch = encode_events([TraceEvent(kind="mark")], 0, trace_schema())
    assert all(column.null_count == 0 and column.buffers()[0] is None for column in batch.columns)
    assert isinstance(batch, pa.RecordBatch)


def several(lens: list[int], statuses: str | list[str]) -> EventRows:
    values = np.arange(sum(lens), dtype=np.int64)
    return EventRows(
        kind="alloc",
        times_ns=np.arange(5, 5 + len(lens)),
        scalars={"request_id": np.arange(len(lens)) - 1, "status": statuses, "note": "why: é"},
        ints={"slot_start": (values, np.array(lens)), "slot_count": (values + 7, np.array(lens))},
    )


ROWS = {
    "alike": ([1, 1, 1], "shared"),
    "two values each": ([2, 2], ""),
    "a row": ([3], "cached"),
    "uneven": ([1, 2, 1], "shared"),
    "without a value": ([1, 0], ""),
    "nothing in any": ([0, 0], ""),
    "each its own text": ([1, 1], ["", "shared"]),
}


@pytest.mark.parametrize("of", ROWS)
def test_several_events_at_once_are_the_same_in_a_batch_and_in_the_tail(of):
    rows, schema = several(*ROWS[of]), trace_schema()
    lone = TraceEvent(kind="mark", time_ns=3, ints={"slot_count": np.array([9], np.int64)})
    one_by_one = rows.events()
    assert len(one_by_one) == rows.rows == num_rows([rows])
    assert [event.problem() for event in (rows, *one_by_one)] == [None] * (1 + rows.rows)
    assert rows.time_ns == one_by_one[-1].time_ns
    found = encode_events([lone, rows, lone], 11, schema)
    assert found.equals(encode_events([lone, *one_by_one, lone], 11, schema))
    assert _bodies(rows) == [body for event in one_by_one for body in _bodies(event)]


def test_a_column_that_no_trace_has_is_a_problem_of_several_events_too():
    rows = several([1, 1], "")
    assert rows.problem() is None
    for change in (
        {"kind": "alloca"},
        {"scalars": {"statuses": ""}},
        {"ints": {"slot_begin": (np.arange(2), np.ones(2, np.int64))}},
        {"ints": {"slot_start": (np.arange(2, dtype=np.int32), np.ones(2, np.int64))}},
    ):
        assert msgspec.structs.replace(rows, **change).problem() is not None


@pytest.mark.parametrize(
    ("lens", "statuses", "values"),
    [
        ([1, 1], ["shared"], 2),
        ([1, 1, 1], "", 2),
        ([2, -1], "", 1),
    ],
)
def test_several_events_that_are_not_divided_by_rows_are_refused_and_do_not_end_the_trace(lens, statuses, values):
    rows = several([1, 1], "")
    lists = {"slot_start": (np.arange(values), np.array(lens))}
    rows.ints, rows.scalars = lists, rows.scalars | {"status": statuses}
    assert "alloc events: " in rows.problem()
