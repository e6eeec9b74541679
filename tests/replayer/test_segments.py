"""A recording in segments gives the same rows and the same verdict, replayed as one or segment by segment."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from kvcanary.kernels.constants import KvHashMode
from kvcanary.kernels.replay_pass.ledger import STAMP, STAMP_REQUEST
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.state.apply import RecordedState
from kvcanary.recorder.state.history import ReplayState
from kvcanary.recorder.state.keyframe import keyframe_events
from kvcanary.recorder.state.keyframe_load import KeyframeLoader
from kvcanary.recorder.trace.batch import TraceBatch
from kvcanary.recorder.trace.event import encode_events, header_schema
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.writing.recovery import recover
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.lab.faults import FAULTS
from kvcanary.replayer.lab.trial import Trial, run_trial
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplayRun, ReplaySettings, replay_joined

from ..support.engines.toy_engine import Shape, ToyEngine
from ..support.raw_traces import cut
from ..support.segment_runs import check, run

pytestmark = pytest.mark.one_in(2)  # make fuzz goes through all

CASES = [
    ("mha", "kv_used"),
    ("mha_page1", "req_to_token"),
    ("swa", None),
    ("eagle_swa", "draft_position_plus_one"),
    ("host", None),
    ("overlap", "future_map_overrun"),
    ("tight", "page_given_twice"),
]


def record(config: str, fault: str | None, folder: Path, seed: int = 0) -> tuple[Path, ...]:
    pair = CONFIGURATIONS[config].pair is not None
    target = folder / ("pair" if pair else "t.arrow")
    if pair:
        target.mkdir()
    return run_trial(Trial(fault=FAULTS[fault] if fault else None, config=config, seed=seed), target).traces


@pytest.mark.parametrize(("config", "fault"), CASES)
@pytest.mark.one_in(4)
def test_alone_and_together(config: str, fault: str | None, tmp_path: Path) -> None:
    (trace,) = record(config, fault, tmp_path)
    segments = cut(trace, tmp_path / "s.arrow", seed=1, least=100, most=250)
    assert len(segments) > 2
    together, _ = check(trace, segments, tmp_path / "out")
    assert together.summary.segments == list(range(len(segments)))
    assert (together.summary.verdict is Verdict.CLEAN) == (fault is None)


def test_a_pair_in_segments(tmp_path: Path) -> None:
    traces = record("pd", "transfer_wrong_stride", tmp_path, seed=2)
    segments = [cut(trace, tmp_path / f"{trace.stem}.arrow", seed=3, least=100, most=250) for trace in traces]
    whole, joined = (
        replay_joined(given, settings=ReplaySettings(), reports=[None, None]) for given in (traces, segments)
    )
    for one, other in zip(whole, joined, strict=True):
        assert one.findings_by_kind == other.findings_by_kind
        assert one.violations_by_launch == other.violations_by_launch
        assert (one.verdict, one.transfers_unmatched, one.verified) == (
            other.verdict,
            other.transfers_unmatched,
            other.verified,
        )
    assert joined[1].verdict is Verdict.CORRUPT


@pytest.mark.parametrize("listed", [True, False])
def test_after_losses_a_keyframe_says_what_is_unknown(listed: bool, tmp_path: Path) -> None:
    configuration = CONFIGURATIONS["host"]
    random = np.random.default_rng(5)
    trace = tmp_path / "t.arrow"
    with SimulatedEngine(configuration.engine_config(3), configuration.requests(3), trace) as engine:
        writer = engine.recorder.outbox.writer
        append = writer.append
        refused = []

        def flaky(event) -> bool:
            if listed and event.kind == "forward" and random.random() < 0.03:
                refused.append(event)
                return False
            return append(event)

        writer.append = flaky  # type: ignore[method-assign]
        steps = 0
        while engine.step():
            steps += 1
            if not listed and steps in (30, 80):
                refused.append(None)
                engine.recorder.lost("somebody lost count")
    assert refused
    segments = cut(trace, tmp_path / "s.arrow", seed=2, least=100, most=250)
    together, alone = check(trace, segments, tmp_path / "out")
    assert together.summary.verdict is Verdict.INCONCLUSIVE
    assert (together.summary.violations, together.summary.findings) == (0, 0)
    assert sum(one.summary.unknown_entries for one in alone) == together.summary.unknown_entries
    assert together.summary.unknown_entries


@pytest.mark.parametrize("kv_hash", ["auto", "none", "partial", "all"])
def test_which_bytes_are_hashed_is_for_the_replay_to_choose(kv_hash: str, tmp_path: Path) -> None:
    engine = ToyEngine(Shape(window=5, sources=2, capture=32), seed=4, fault="kv", forwards=40)
    trace = tmp_path / "t.arrow"
    with TraceWriter(trace, engine.header) as writer:
        assert all(writer.append(event) for event in engine.events)
    segments = cut(trace, tmp_path / "s.arrow", seed=1, least=5, most=12)
    together, _ = check(trace, segments, tmp_path / "out", kv_hash=kv_hash)
    assert bool(together.violations) == (kv_hash != "none")


def test_without_history_checks(tmp_path: Path) -> None:
    (trace,) = record("mha", "kv_used", tmp_path)
    segments = cut(trace, tmp_path / "s.arrow", seed=1, least=80, most=200)
    check(trace, segments, tmp_path / "out", checks=())


@pytest.mark.parametrize("config", ["host", "eagle_swa", "overlap", "twins"])
def test_the_machine_holds_what_a_replay_holds_and_a_keyframe_gives_it_back(config: str, tmp_path: Path) -> None:
    (trace,) = record(config, None, tmp_path)
    with TraceReader(trace) as reader:
        header = reader.header
        half = [item for item in reader.stream() if isinstance(item, TraceBatch)]
    stop = sum(batch.num_events for batch in half) // 2
    recorded, with_loss = RecordedState(header), RecordedState(header)
    with ReplayRun(trace, settings=ReplaySettings(), report=None) as replay:
        events = replay.events
        replayed = events.executor.state
        for view in read_trace(trace):
            if view.number == stop:
                break
            recorded.apply(view)
            with_loss.apply(view)
            if view.number == stop // 2:
                with_loss.forget()
            events.replay_event(view)
        _same(recorded.state, replayed)
        for of in (recorded, with_loss):
            _same(of.state, _restored(of))


def _restored(recorded: RecordedState) -> ReplayState:
    fresh = RecordedState(recorded.state.header)
    told = list(keyframe_events(recorded, time_ns=1))
    batch = encode_events(told, 0, header_schema(recorded.state.header))
    loader = KeyframeLoader(fresh.state, kv_hash_mode=KvHashMode.PARTIAL)
    for view in TraceBatch(batch, first_event=0):
        loader.apply(view)
    assert not loader.loading
    for mine, theirs in zip(recorded.state.pools, fresh.state.pools, strict=True):
        for half, hashes in mine.pool.whole_hashes.items():
            assert np.array_equal(hashes, theirs.pool.whole_hashes[half])
    return fresh.state


def _same(one: ReplayState, other: ReplayState) -> None:
    for name in ("req_to_token", "luts"):
        for mine, theirs in zip(getattr(one.tables, name), getattr(other.tables, name), strict=True):
            assert np.array_equal(mine, theirs), name
    assert np.array_equal(one.tables.truth, other.tables.truth)
    for mine, theirs in zip(one.pools, other.pools, strict=True):
        assert mine.any_unknown == theirs.any_unknown
        for tier, its in ((mine.pool, theirs.pool), (mine.host, theirs.host)):
            for half in mine.group.halves:
                assert np.array_equal(tier.head[half], its.head[half])
                assert np.array_equal(tier.tail[half], its.tail[half])
            assert all(np.array_equal(a, b) for a, b in zip(tier.kv, its.kv, strict=True))
            assert np.array_equal(tier.writers, its.writers)
            assert np.array_equal(tier.unknown, its.unknown)
            assert np.array_equal(tier.chain_starts, its.chain_starts)
    assert dataclasses.astuple(one.request_table) == dataclasses.astuple(other.request_table)
    assert vars(one.activity) == vars(other.activity)
    mine, theirs = one.history, other.history
    for rows, its in zip(mine.ledger.rows, theirs.ledger.rows, strict=True):
        kept = np.delete(np.arange(rows.shape[1]), [STAMP, STAMP_REQUEST])
        assert np.array_equal(rows[:, kept], its[:, kept])
    assert all(np.array_equal(a, b) for a, b in zip(mine.ledger.transfers, theirs.ledger.transfers, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(mine.rows.last, theirs.rows.last, strict=True))
    assert np.array_equal(mine.rows.status, theirs.rows.status)
    assert np.array_equal(mine.samples.last, theirs.samples.last)
    waiting = [[fed.forward.forward for fed in book.samples.waiting()] for book in (mine, theirs)]
    assert waiting[0] == waiting[1]
    assert np.array_equal(mine.dropped.rows(), theirs.dropped.rows())
    for name in ("last_forward", "had_gap", "ended", "complete"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert (mine.ledger.held_by, mine.ledger.from_start) == (theirs.ledger.held_by, theirs.ledger.from_start)


def test_a_missing_segment_is_a_gap_and_the_next_keyframe_ends_it(tmp_path: Path) -> None:
    (trace,) = record("swa", None, tmp_path)
    segments = cut(trace, tmp_path / "s.arrow", seed=1, least=100, most=250)
    left = [path for number, path in enumerate(segments) if number != 2]
    result = run(left, tmp_path / "out")
    assert result.summary.verdict is Verdict.INCONCLUSIVE
    assert result.summary.unknown_entries == 0
    assert result.summary.gaps == ["s.000003.arrow: segment 2 before it is missing"]
    # What begins in the middle is whole, as far as it goes: a flight recorder's past has an end.
    assert run(segments[2:], tmp_path / "later").summary.verdict is Verdict.CLEAN


def test_a_damaged_segment_is_a_gap_up_to_the_next_keyframe(tmp_path: Path) -> None:
    (trace,) = record("mha", "kv_used", tmp_path)
    segments = cut(trace, tmp_path / "s.arrow", seed=1, least=100, most=250)
    whole = run(segments, tmp_path / "whole")
    with TraceReader(segments[1]) as reader:
        ends = [item.end_byte for item in reader.stream()]
    data = bytearray(segments[1].read_bytes())
    data[ends[-2] - 40] ^= 0x20
    segments[1].write_bytes(data)
    result = run(segments, tmp_path / "out")
    assert result.summary.num_gaps == 1
    with TraceReader(segments[2]) as reader:
        first = reader.header.first_event
    assert [row for row in result.violations if row["event"] >= first] == [
        row for row in whole.violations if row["event"] >= first
    ]
    target = tmp_path / "r.arrow"
    recover(segments[1], target)
    again = run([segments[0], target, *segments[2:]], tmp_path / "again")
    assert again.violations == result.violations


def test_a_keyframe_that_is_cut_leaves_everything_unknown(tmp_path: Path) -> None:
    (trace,) = record("mha", None, tmp_path)
    segment = cut(trace, tmp_path / "s.arrow", seed=1, least=100, most=200)[1]
    with TraceReader(segment) as reader:
        (first, *_) = [item for item in reader.stream() if isinstance(item, TraceBatch)]
    data = bytearray(segment.read_bytes())
    data[first.end_byte - 40] ^= 0x20
    segment.write_bytes(data)
    result = run([segment], tmp_path / "out")
    assert (result.summary.violations, result.summary.findings) == (0, 0)
    assert result.summary.verdict is Verdict.INCONCLUSIVE
    assert result.summary.unknown_entries or not result.summary.verified
