"""Prefill and decode traces replayed together: records and bytes go along, and the side that went wrong is named."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import KvStream
from kvcanary.recorder.trace.schema import PULLED
from kvcanary.replayer.cli.replay import replay_command
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplaySettings, replay, replay_joined
from kvcanary.replayer.run.transfers import Exchange

from ..support.raw_traces import write_in_batches
from . import pd_engine
from .pd_engine import SLOTS, Side, carry

PROMPT = [11, 12, 13, 14, 15]
SENT, RECEIVED = [9, 8, 20, 21, 4], [30, 31, 32, 40, 39]  # not in order: the order of the slots is that of positions


def pair(folder: Path, *, spoil: str = "", decode_first: bool = False):
    """Prefill, send, decode; `spoil` names where a byte goes wrong."""
    folder.mkdir(exist_ok=True)
    prefill = Side(folder / "prefill.arrow", role="prefill", room=5)
    decode = Side(folder / "decode.arrow", role="decode", room=5, request=107)
    prefill.forward(PROMPT, SENT, truth=PROMPT, sampled=[16])
    if spoil == "source":
        prefill.kv[0][20, 3] ^= 0xFF
    prefill.transfer("start", "send", SENT)
    decode.transfer("start", "receive", RECEIVED)
    carry(prefill, SENT, decode, RECEIVED)
    if spoil == "during":
        prefill.kv[1][8, 0] ^= 0xFF
    if spoil == "wire":
        decode.kv[1][40, 9] ^= 0xFF
    decode.table[1, :5] = RECEIVED
    short = RECEIVED[:4] if spoil == "short" else RECEIVED
    if spoil == "failed":
        decode.transfer("failed", "receive", RECEIVED)
        prefill.transfer("failed", "send", SENT)
    else:
        decode.transfer("end", "receive", short, read=spoil != "unread")
        prefill.transfer("end", "send", SENT)
    if spoil == "after":
        decode.kv[0][31, 0] ^= 0xFF
    if spoil == "table":
        decode.table[1, 2] = RECEIVED[1]
    if spoil != "failed":
        decode.forward([16], [50], start=5, mode="decode", truth=[*PROMPT, 16], sampled=[17])
        decode.forward([17], [51], start=6, mode="decode", truth=[*PROMPT, 16, 17], sampled=[18])
    paths = [prefill.close(), decode.close()]
    return paths[::-1] if decode_first else paths


def pull(folder: Path, *, first: int = 0, count: int = 5, spoil: str = ""):
    """The decode side reads what it lacks out of what the prefill side holds ready, some time later."""
    prefill = Side(folder / "prefill.arrow", role="prefill", room=5)
    decode = Side(folder / "decode.arrow", role="decode", room=5, request=107)
    prefill.forward(PROMPT, SENT, truth=PROMPT, sampled=[16])
    prefill.transfer("start", "send", SENT, note=PULLED)
    if first:  # its own prefix cache has the first ones
        decode.forward(PROMPT[:first], RECEIVED[:first], truth=PROMPT)
    mine, theirs = slice(first, first + count), RECEIVED[first : first + count]
    decode.transfer("start", "receive", theirs, start_position=first)
    carry(prefill, SENT[mine], decode, theirs)
    if spoil == "wire":
        decode.kv[1][theirs[-1], 9] ^= 0xFF
    decode.table[1, first : first + count] = theirs
    decode.transfer("end", "receive", theirs, start_position=first)
    prefill.transfer("end", "send", SENT, note=PULLED)
    known = [*PROMPT, 16][: first + count + 1]
    decode.forward(known[-1:], [50], start=first + count, mode="decode", truth=known)
    return [prefill.close(), decode.close()]


@pytest.mark.parametrize(("first", "count"), [(0, 5), (2, 3), (0, 4), (1, 2)])
def test_what_the_other_side_takes_of_what_is_held_ready_is_known(first, count, tmp_path):
    summaries, rows = judge(pull(tmp_path, first=first, count=count), tmp_path)
    assert rows == {"prefill": [], "decode": []}
    decode = summaries["decode"]
    assert (decode.transfers_received, decode.transfers_unmatched, decode.unknown_entries) == (1, 0, 0)
    assert decode.violations == 0
    assert decode.verified == (first + count) * 4


def test_of_bytes_that_are_taken_on_submission_nobody_says_how_they_landed(tmp_path, monkeypatch):
    def stream(*, half, **more):
        return KvStream(half=half, origin="submitted" if half == "V" else "stored", **more)

    monkeypatch.setattr(pd_engine, "KvStream", stream)
    summaries, rows = judge(pull(tmp_path, spoil="wire"), tmp_path)
    assert rows["decode"] == []
    assert summaries["decode"].violations == 0
    assert summaries["decode"].unknown_entries == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_model_submits_and_what_a_cache_holds_are_not_compared(role, tmp_path, monkeypatch):
    """A cache may hold it in another order: unknown then, whichever side saw which."""

    own = Side

    def side(path, **more):
        origin = "submitted" if more["role"] == role else "stored"
        with monkeypatch.context() as patch:
            patch.setattr(pd_engine, "KvStream", lambda **given: KvStream(origin=origin, **given))
            return own(path, **more)

    monkeypatch.setitem(pull.__globals__, "Side", side)
    decode = judge(pull(tmp_path, spoil="wire"), tmp_path)[0]["decode"]
    assert (decode.violations, decode.findings, decode.transfers_unmatched) == (0, 0, 1)
    assert decode.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("first", [0, 2])
def test_what_lands_otherwise_than_it_was_held_ready_is_found(first, tmp_path):
    _, rows = judge(pull(tmp_path, first=first, count=5 - first, spoil="wire"), tmp_path)
    (finding,) = rows["decode"]
    assert (finding["kind"], finding["slot"], finding["position"]) == ("transfer_differs", 39, 4)


def test_more_than_was_held_ready_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SENT", [*SENT[:4]])
    monkeypatch.setattr(f"{__name__}.PROMPT", PROMPT[:4])
    prefill = Side(tmp_path / "prefill.arrow", role="prefill", room=5)
    decode = Side(tmp_path / "decode.arrow", role="decode", room=5, request=107)
    prefill.forward(PROMPT, SENT, truth=PROMPT)
    prefill.transfer("start", "send", SENT, note=PULLED)
    decode.transfer("end", "receive", RECEIVED)
    (finding,) = judge([prefill.close(), decode.close()], tmp_path)[1]["decode"]
    assert "received 5 slots where prefill.arrow sent 4" in finding["detail"]


def judge(paths, folder):
    reports = [folder / path.stem for path in paths]
    for report in reports:
        report.mkdir()
    found = replay_joined(paths, settings=ReplaySettings(), reports=reports)
    rows = {p.stem: pq.read_table(r / "findings.parquet").to_pylist() for p, r in zip(paths, reports, strict=True)}
    return {summary.header.role: summary for summary in found}, rows


@pytest.mark.parametrize("decode_first", [False, True])
def test_a_clean_pair_is_clean_and_its_slots_are_verified(decode_first, tmp_path):
    summaries, rows = judge(pair(tmp_path, decode_first=decode_first), tmp_path)
    assert [s.verdict for s in summaries.values()] == [Verdict.CLEAN] * 2
    assert rows == {"prefill": [], "decode": []}
    decode = summaries["decode"]
    assert (decode.transfers_received, decode.transfers_unmatched, decode.unknown_entries) == (1, 0, 0)
    assert summaries["prefill"].transfers_sent == 1
    # Five slots in the first decode and six in the second, in HEAD and TAIL, K and V.
    assert decode.verified == (5 + 6) * 4


def test_the_decode_side_alone_is_inconclusive_and_says_what_to_do(tmp_path):
    _, decode = pair(tmp_path)
    summary = replay(decode, settings=ReplaySettings(), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert summary.unknown_entries == 2 * 5
    assert "kvcanary-replay prefill.arrow decode.arrow" in summary.doubts[0]


def test_bytes_damaged_before_they_were_sent(tmp_path):
    """The canary's own view: the decode side sees it, the prefill side's launches stay clean; we know where it began."""
    summaries, rows = judge(pair(tmp_path, spoil="source"), tmp_path)
    assert summaries["prefill"].violations == 0
    (finding,) = rows["prefill"]
    assert (finding["kind"], finding["slot"], finding["position"]) == ("transfer_source_damaged", 20, 2)
    assert set(summaries["decode"].violations_by_launch) == {"TAIL_K_FULL"}
    first = summaries["decode"].first_violation
    assert (first["slot"], first["reasons"], first["request_id"]) == (32, ["VERIFY_KV_HASH"], 107)
    (told,) = rows["decode"]  # what landed is what was sent, and the report says whose fault that is
    assert (told["kind"], told["slot"], told["position"]) == ("transfer_source_damaged", 32, 2)
    assert "prefill.arrow sent them" in told["detail"]
    assert "the prefill side went wrong" in told["detail"]


def test_bytes_damaged_on_the_wire(tmp_path):
    summaries, rows = judge(pair(tmp_path, spoil="wire"), tmp_path)
    assert summaries["prefill"].verdict is Verdict.CLEAN
    (finding,) = rows["decode"]
    assert (finding["kind"], finding["slot"], finding["position"]) == ("transfer_differs", 40, 3)
    assert "the transfer or the decode side went wrong" in finding["detail"]
    assert "slot 21" in finding["detail"]
    assert set(summaries["decode"].violations_by_launch) == {"TAIL_V_FULL"}


def test_bytes_that_change_while_they_are_sent(tmp_path):
    summaries, rows = judge(pair(tmp_path, spoil="during"), tmp_path)
    (finding,) = rows["prefill"]
    assert (finding["kind"], finding["slot"]) == ("transfer_source_changed", 8)
    assert summaries["decode"].verdict is Verdict.CLEAN  # the bytes had left


def test_bytes_damaged_after_they_landed_are_the_decode_sides_fault(tmp_path):
    summaries, rows = judge(pair(tmp_path, spoil="after"), tmp_path)
    assert summaries["prefill"].verdict is Verdict.CLEAN
    assert rows["decode"] == []
    assert summaries["decode"].violations_by_reason == {"VERIFY_KV_HASH": 2}  # in both decodes, K only
    assert summaries["decode"].first_violation["slot"] == 31


def test_a_wrong_table_entry_on_the_decode_side(tmp_path):
    summaries, _ = judge(pair(tmp_path, spoil="table"), tmp_path)
    first = summaries["decode"].first_violation
    assert (first["endpoint"], first["slot"], first["position"], first["expected_position"]) == ("HEAD", 31, 1, 2)
    assert {"VERIFY_CHAIN_HASH", "VERIFY_POSITION", "VERIFY_TOKEN"} <= set(first["reasons"])


def test_fewer_slots_than_were_sent(tmp_path):
    _, rows = judge(pair(tmp_path, spoil="short"), tmp_path)
    kinds = [row["kind"] for row in rows["decode"]]
    assert "transfer_differs" in kinds
    assert "received 4 slots where" in rows["decode"][kinds.index("transfer_differs")]["detail"]


def test_of_what_nobody_has_read_nothing_is_known(tmp_path):
    summaries, rows = judge(pair(tmp_path, spoil="unread"), tmp_path)
    assert summaries["prefill"].verdict is Verdict.CLEAN and rows == {"prefill": [], "decode": []}
    decode = summaries["decode"]
    assert decode.verdict is Verdict.INCONCLUSIVE and not decode.violations
    assert (decode.transfers_received, decode.transfers_unmatched, decode.unknown_entries) == (1, 1, 2 * 5)


def test_a_failed_transfer_is_no_transfer(tmp_path):
    summaries, rows = judge(pair(tmp_path, spoil="failed"), tmp_path)
    assert rows == {"prefill": [], "decode": []}
    assert summaries["decode"].transfers_received == summaries["prefill"].transfers_sent == 0


def test_parcels_are_kept_only_while_somebody_may_receive_them(tmp_path, monkeypatch):
    """A prefill trace alone, or one that goes on when its decode traces have ended, holds nothing back."""
    seen = []
    send = Exchange.send

    def watched(exchange, key, parcel):
        send(exchange, key, parcel)
        seen.append(len(exchange))

    monkeypatch.setattr(Exchange, "send", watched)
    prefill, decode = pair(tmp_path)
    replay_joined([prefill], settings=ReplaySettings(), reports=[None])
    assert seen == [0]
    replay_joined([prefill, decode], settings=ReplaySettings(), reports=[None, None])
    assert seen == [0, 1]
    idle = Side(tmp_path / "idle.arrow", role="decode").close()
    replay_joined([prefill, idle], settings=ReplaySettings(), reports=[None, None])
    assert seen == [0, 1, 0]


def test_fail_fast_stops_at_a_transfer(tmp_path):
    prefill, _ = pair(tmp_path, spoil="source")
    summary = replay(prefill, settings=ReplaySettings(fail_fast=True), report=None)
    assert summary.findings == 1
    assert summary.stopped == "stopped at the first bad event, 2 (transfer) (--fail-fast)"


def test_the_command_joins_them(tmp_path):
    prefill, decode = pair(tmp_path, spoil="wire")
    result = CliRunner().invoke(replay_command, ["--no-report", str(decode), str(prefill)])
    assert result.exit_code == 1, result.output
    assert "transfer_differs" in result.output
    assert "1 received, 0 of them from a trace that was not given" in result.output
    alone = CliRunner().invoke(replay_command, ["--no-report", "--quiet", str(decode)])
    assert alone.exit_code == 125


GOOD = {"slot_group": [0, 0], "slot_start": [1, 9], "slot_count": [2, 1], "prefix_lens": [0]}


@pytest.mark.parametrize(
    ("scalars", "ints", "what"),
    [
        ({"status": "maybe"}, {}, "status 'maybe'"),
        ({"mode": "sideways"}, {}, "direction 'sideways'"),
        ({}, {"slot_start": [1]}, "differ in length"),
        ({}, {"slot_group": [0, 1]}, "a run of group 1, the header names 1"),
        ({}, {"slot_group": [7, 7]}, "a run of group 7, the header names 1"),
        ({}, {"slot_group": [0, -1]}, "a run of group -1, the header names 1"),
        ({}, {"slot_start": [1, SLOTS]}, "a run of 1 slots from 64 leaves group 0, which has 64"),
        ({}, {"slot_start": [-1, 2]}, "a run of 2 slots from -1 leaves group 0"),
        ({}, {"slot_count": [2, -1]}, "a run of -1 slots from 9 leaves group 0"),
        ({}, {"slot_count": [2, 1 << 62]}, "slots from 9 leaves group 0"),
        ({}, {"slot_start": [0] * 40, "slot_count": [SLOTS] * 40, "slot_group": [0] * 40}, "more slots than group 0"),
        ({}, {"kv_bytes": [7]}, "kv_bytes has 1 bytes, expected 96"),
        (
            {"mode": "send"},
            {"kv_change_stream": [9], "kv_change_slot": [1], "kv_change_phase": [1]},
            "kv_change_stream",
        ),
    ],
)
def test_hostile_transfers_are_left_out_and_said(scalars, ints, what, tmp_path):
    side = Side(tmp_path / "s.arrow", role="decode")
    side.close()
    event = TraceEvent(
        kind="transfer",
        scalars={"status": "end", "mode": "receive", "room": 5, **scalars},
        ints={name: np.array(values, np.int64) for name, values in {**GOOD, **ints}.items() if name != "kv_bytes"},
        bytes={"kv_bytes": np.array(ints["kv_bytes"], np.uint8)} if "kv_bytes" in ints else {},
    )
    path = tmp_path / "t.arrow"
    write_in_batches(path, side.header, [event], flush_every=10)
    summary = replay(path, settings=ReplaySettings(checks=()), report=None)
    assert summary.verdict is Verdict.INCONCLUSIVE
    assert what in summary.gaps[0]
    assert (summary.violations, summary.findings) == (0, 0)
