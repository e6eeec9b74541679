"""Views and macros on a trace whose every row is checked by hand; the trace is in hand_made.py."""

import dataclasses

import pyarrow.parquet as pq
import pytest
from kvcanary.analysis import open_traces
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.report.findings import Finding, finding_table
from kvcanary.replayer.report.violations import VIOLATION_SCHEMA

from ..support.hand_made import HEADER, event, runs, write

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all


@pytest.fixture
def session(tmp_path):
    """The trace, with a report beside it: two violations in forward 2 and a finding in forward 1."""
    trace = write(tmp_path / "hand's.arrow")
    report = tmp_path / "hand's.report"
    report.mkdir()
    blank = {
        f.name: "" if str(f.type) in ("string", "dictionary<values=string, indices=int8, ordered=0>") else 0
        for f in VIOLATION_SCHEMA
    }
    violation = blank | {
        "slot": 5,
        "position": 1,
        "expected_position": 1,
        "stored_token": 101,
        "expected_token": 101,
        "reasons": "VERIFY_KV_HASH",
        "event": 11,
        "forward": 2,
        "mode": "decode",
        "request_id": 9,
        "request": "9",
        "req_pool_idx": 2,
        "writer_event": 3,
        "writer_forward": 0,
        "writer_request_id": 7,
        "writer_request": "o'neill",
    }  # fmt: skip
    import pyarrow as pa

    pq.write_table(
        pa.Table.from_pylist([violation, violation | {"slot": 6, "position": 2}], schema=VIOLATION_SCHEMA),
        report / "violations.parquet",
    )
    finding = Finding(kind="input_not_sampled", event=4, forward=1, time_ns=1000, runner=0, group=-1, request_id=7, request="o'neill",
                      req_pool_idx=1, position=5, slot=9, detail="d")  # fmt: skip
    pq.write_table(
        finding_table([finding, dataclasses.replace(finding, kind="launch_missing", slot=-1)]),
        report / "findings.parquet",
    )
    (report / "summary.json").write_text('{"trace": "gone.arrow", "trace_id": "hand-made"}')
    with open_traces(trace) as opened:
        yield opened


def rows(session, query):
    return [tuple(row.values()) for row in session.sql(query).to_pylist()]


def test_tokens_leave_padding_out(session):
    assert rows(
        session,
        "select forward, request_id, req_pool_idx, table_position, position, token, slot from tokens order by all",
    ) == [
        (0, 7, 1, 0, 0, 100, 4),
        (0, 7, 1, 1, 1, 101, 5),
        (0, 7, 1, 2, 2, 102, 6),
        (0, 7, 1, 3, 3, 103, 7),
        (1, 7, 1, 4, 4, 104, 8),
        (1, 7, 1, 5, 6, 105, 9),
        (2, 9, 2, 4, 4, 200, 24),
    ]
    assert rows(
        session, "select forward, num_requests, num_tokens, num_padding, num_sampled from forwards order by forward"
    ) == [
        (0, 1, 4, 0, 0),
        (1, 1, 4, 2, 1),
        (2, 1, 1, 0, 0),
    ]
    samples = "select forward, request_id, number, token, logprob, logprob_kind from samples"
    assert rows(session, samples) == [(1, 7, 0, 106, -1.5, "raw")]


def test_slot_writes_number_each_group_its_own_way(session):
    assert rows(session, "select pool_group, slot, forward, position from slot_writes order by all") == [
        (0, 4, 0, 0), (0, 5, 0, 1), (0, 6, 0, 2), (0, 7, 0, 3), (0, 8, 1, 4), (0, 9, 1, 6), (0, 24, 2, 4),
        (1, 8, 0, 0), (1, 9, 0, 1), (1, 10, 0, 2), (1, 11, 0, 3), (1, 12, 1, 4),
    ]  # fmt: skip
    assert rows(session, "select full_slot, slot from swa_tokens where forward = 1") == [(8, 12)]


def test_requests_and_chunks(session):
    assert rows(session, "select request_id, name, prompt_len, first_forward, last_forward, num_tokens, prefix_hit, length, status "
                         "from requests order by 1") == [
        (7, "o'neill", 6, 0, 1, 6, 0, 6, "finished"),
        (9, "9", -1, 2, 2, 1, 4, 5, "aborted"),
    ]  # fmt: skip
    assert rows(
        session, "select request_id, number, forward, first_position, end_position from chunks order by event"
    ) == [
        (7, 1, 0, 0, 4),
        (7, 2, 1, 4, 6),
    ]


def test_lifetimes_and_owners(session):
    columns = "slot, holder, request_id, began, ended, from_event, to_event, from_forward, to_forward, given_by"
    assert rows(session, f"select {columns} from slot_lifetimes where slot in (4, 9) order by slot, from_event") == [
        (4, "request", 7, "alloc", "cached", 2, 5, 0, 1, None),
        (4, "cache", -1, "cached", "evict", 5, 13, 2, 2, 7),
        (4, "request", 9, "shared", "aborted", 6, 12, 2, 2, None),
        (9, "request", 7, "alloc", "free", 2, 8, 0, 1, None),
    ]
    assert rows(session, "select holder, request from slot_owner(4, 0)") == [("request", "o'neill")]
    assert rows(session, "select holder, request from slot_owner(4, 2)") == [("cache", None), ("request", "9")]
    assert rows(session, "select holder from slot_owner(9, 2)") == []
    assert rows(session, "select holder from slot_owner(4, 0, in_group := 1)") == []


def test_slot_history(session):
    assert rows(session, "select event, forward, what, request, position, token, detail from slot_history(5)") == [
        (2, -1, "alloc", "o'neill", None, None, ""),
        (3, 0, "written", "o'neill", 1, 101, ""),
        (5, 1, "alloc", "o'neill", None, None, "cached"),
        (6, 1, "alloc", "9", None, None, "shared"),
        (10, 1, "copied from", None, None, None, "to slot 21 fork"),
        (11, 2, "changed without a write", None, None, None, "K, layer 0, after"),
        (11, 2, "violation", "9", 1, 101, "VERIFY_KV_HASH"),
        (13, 2, "evict", None, None, None, ""),
    ]
    assert rows(session, "select event, what, detail from slot_history(21)") == [(10, "copied to", "from slot 5 fork")]
    assert rows(session, "select event, what from slot_history(9, in_group := 1)") == [(3, "written")]


def test_request_timeline_by_id_and_by_name(session):
    told = rows(session, "select event, forward, what, detail from request_timeline('o''neill')")
    assert told == rows(session, "select event, forward, what, detail from request_timeline(7)")
    assert told == [
        (0, None, "arrived", "prompt of 6"),
        (1, None, "admitted", "row 1"),
        (2, None, "alloc", "8 slots from 4"),
        (3, 0, "extend", "row 1, positions 0 to 3"),
        (4, 1, "mixed", "row 1, positions 4 to 5, found 2 (input_not_sampled, launch_missing)"),
        (5, None, "alloc cached", "4 slots from 4"),
        (8, None, "free", "4 slots from 8, finished"),
        (9, None, "finished", "row 1"),
    ]


def test_neighbours(session):
    assert rows(
        session, "select slot, distance, request, position, found, first_bad_forward from neighbours(7, reach := 2)"
    ) == [
        (5, -2, "o'neill", 1, 1, 2),
        (6, -1, "o'neill", 2, 1, 2),
        (7, 0, "o'neill", 3, 0, None),
        (8, 1, "o'neill", 4, 0, None),
        (9, 2, "o'neill", 6, 1, 1),
    ]


def test_damage_its_beginning_and_its_spread(session):
    assert rows(session, "select source, what, event, mode, pool_group, slot from damage order by event, slot") == [
        ("finding", "launch_missing", 4, "mixed", -1, -1),
        ("finding", "input_not_sampled", 4, "mixed", 0, 9),
        ("violation", "VERIFY_KV_HASH", 11, "decode", 0, 5),
        ("violation", "VERIFY_KV_HASH", 11, "decode", 0, 6),
    ]
    assert rows(session, "select what, event, slot from first_damage") == [("input_not_sampled", 4, 9)]
    assert rows(session, "select forward, mode, found from first_bad_forward()") == [(1, "mixed", 2)]
    assert rows(session, "select request, first_forward, last_forward, slots, found from blast_radius()") == [
        ("o'neill", 1, 1, 2, 2),
        ("9", 2, 2, 2, 2),
    ]
    assert rows(session, "select request, found from blast_radius(from_forward := 2)") == [("9", 2)]


def test_what_is_lost_is_a_table(session):
    assert rows(session, "select event, lost_events, slots_listed, note from losses") == [(7, 4, False, "queue full")]
    assert rows(session, "select present, complete, losses, lost_events, unknown_losses, gaps from lost") == [
        (True, True, 1, 4, 0, 0)
    ]
    assert rows(
        session, "select table_index, req_pool_idx, position, slot, request_id from table_changes order by position"
    ) == [(0, 2, position, 4 + position, 9) for position in range(4)]


def test_every_relation_says_what_it_is_and_reads(session):
    for name, description in session.relations().items():
        assert description.endswith("."), name
    assert len(session.relations()) > 30
    assert {"tokens", "slot_lifetimes", "table_position", "slot_history"} <= set(session.words())


def test_absurd_numbers_break_no_relation(tmp_path):
    """What a damaged engine records is answered from, or left out; it never breaks the rest."""
    far = (1 << 63) - 1
    forward = {"req_pool_indices": [1, 1], "request_ids": [7, 8], "input_ids": [5, 6], "positions": [far, -far],
               "out_cache_loc": [far, -far]}  # fmt: skip
    strange = [
        event("alloc", {"request_id": 7}, slot_group=[0, 0, 9], slot_start=[far, 3, 1], slot_count=[far, far, 1]),
        event("free", {"request_id": 7}, slot_group=[0], slot_start=[-far], slot_count=[far]),
        event("forward", {"forward": 0, "mode": "extend"}, prefix_lens=[far, 0], extend_lens=[1, far], **forward),
        event("forward", {"forward": 1, "mode": "extend"}, prefix_lens=[-far, 0], extend_lens=[-far, 1], **forward),
        event("alloc", table_index=[0], table_row=[1], table_start=[far], table_count=[far], table_slots=[4, 5]),
        event("alloc", lut_slots=[4], **runs("lut", 0, far, 1)),
        event("transfer", {"mode": "send", "status": "end"}, prefix_lens=[far], **runs("slot", 0, far, far)),
        event("kv_copy", copy_group=[0], copy_src_tier=[0], copy_src=[far], copy_dst_tier=[0], copy_dst=[far], copy_count=[far]),
        event("loss", {"lost_events": far}),
        event("loss", {"lost_events": far}, slot_group=[0, 0], slot_start=[1, 1], slot_count=[far, far]),
    ]  # fmt: skip
    path = tmp_path / "strange.arrow"
    with TraceWriter(path, HEADER) as writer:
        for item in strange:
            writer.append(item)
    with open_traces(path) as session:
        for relation, description in session.relations().items():
            if "(" not in description.split(":")[0]:  # a macro's description begins with its call
                session.sql(f"from {relation}")
        for call in ("slot_history(3)", "slot_owner(3, 0)", "request_timeline(7)", "neighbours(3)"):
            session.sql(f"from {call}")
        assert session.sql("select count(*) as n from slot_lifetimes")["n"].to_pylist() == [61]  # slots 3 to 63


def test_block_table_and_its_differences(session):
    columns = "position, slot, how, forward, writer_forward, writer_request, token"
    assert rows(session, f"select {columns} from block_table(9, 2)") == [
        (0, 4, "changed", 2, 0, "o'neill", 100),
        (1, 5, "changed", 2, 0, "o'neill", 101),
        (2, 6, "changed", 2, 0, "o'neill", 102),
        (3, 7, "changed", 2, 0, "o'neill", 103),
        (4, 24, "written", 2, 2, "9", 200),
    ]
    assert rows(session, "select position, slot from block_table('o''neill', 0)") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert rows(session, "from block_table('nobody', 2)") == []
    columns = "position, from_slot, to_slot, what, how, request, trace"
    assert rows(session, f"select {columns} from table_diff('o''neill', 0, 1)") == [
        (4, None, 8, "added", "written", "o'neill", "hand's"),
        (5, None, 9, "added", "written", "o'neill", "hand's"),
    ]
    assert rows(session, "from table_diff(9, 2, 2)") == []


def test_who_reads_a_slot_and_who_gave_it_back(session):
    columns = "forward, request, position, since_forward, how"
    assert rows(session, f"select {columns} from readers(5, 0, 9)") == [
        (1, "o'neill", 1, 0, "written"),
        (2, "9", 1, 2, "changed"),
    ]
    assert rows(session, f"select {columns} from readers(9, 0, 2, in_group := 1)") == [
        (1, "o'neill", 1, 0, "written"),
        (2, "9", 1, 2, "changed"),
    ]
    assert rows(session, "from readers(9, 0, 2)") == []  # written in forward 1, and read by nobody since
    columns = "event, after_forward, what, request, writer_forward, writer_request, note"
    assert rows(session, f"select {columns} from freed_by(9)") == [(8, 1, "free", "o'neill", 1, "o'neill", "finished")]
    assert rows(session, f"select {columns} from freed_by(4)") == [(13, 2, "evict", None, 0, "o'neill", "")]
    assert rows(session, "from freed_by(9, in_group := 1)") == []
