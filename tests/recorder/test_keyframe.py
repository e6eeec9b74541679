"""Keyframes: what they hold, how they are cut into parts, and what becomes of one that nobody should believe."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from kvcanary.kernels.constants import KvHashMode
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.state import keyframe
from kvcanary.recorder.state.apply import RecordedState
from kvcanary.recorder.state.forward import MAX_PREFIX, UnusableEventError
from kvcanary.recorder.state.keyframe_load import KeyframeLoader
from kvcanary.recorder.trace.batch import TraceBatch
from kvcanary.recorder.trace.event import TraceEvent, batch_metadata, encode_events, header_schema
from kvcanary.recorder.trace.header import PoolGroup, Segment, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from kvcanary.recorder.writing.trace_file import TraceFile
from kvcanary.replayer.lab.configurations import CONFIGURATIONS
from kvcanary.replayer.report.summary import Verdict
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ..support.raw_traces import told

HOSTILE = (-1, -(1 << 63), 1 << 40, (1 << 63) - 1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedState:
    """The state of an overlapping engine of two pools in the middle of its work."""
    trace = tmp_path_factory.mktemp("keyframe") / "t.arrow"
    configuration = CONFIGURATIONS["overlap_swa"]
    with SimulatedEngine(configuration.engine_config(1), configuration.requests(1), trace) as engine:
        for _ in range(60):
            assert engine.step()
    with TraceReader(trace) as reader:
        found = RecordedState(reader.header)
    for view in read_trace(trace):
        found.apply(view)
    return found


def events_of(recorded: RecordedState) -> list[TraceEvent]:
    return list(keyframe.keyframe_events(recorded, time_ns=5))


def load(recorded: RecordedState, events: list[TraceEvent]) -> RecordedState:
    fresh = RecordedState(recorded.state.header)
    loader = KeyframeLoader(fresh.state, kv_hash_mode=KvHashMode.PARTIAL)
    for view in TraceBatch(encode_events(events, 0, header_schema(recorded.state.header)), first_event=0):
        loader.apply(view)
    return fresh


def test_parts_are_of_bounded_size(recorded: RecordedState, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = events_of(recorded)
    monkeypatch.setattr(keyframe, "PART_BYTES", 700)
    small = events_of(recorded)
    assert len(small) > len(whole)
    assert max(len(event.bytes["state_bytes"]) for event in small if event.bytes) <= 700
    for mine, theirs in zip(load(recorded, whole).state.pools, load(recorded, small).state.pools, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine.pool.arrays(), theirs.pool.arrays(), strict=True))


def test_it_holds_what_is_in_use_and_no_more(recorded: RecordedState) -> None:
    sizes: dict[str, int] = {}
    for event in events_of(recorded):
        if event.bytes:
            name = str(event.scalars["note"])
            sizes[name] = sizes.get(name, 0) + len(event.bytes["state_bytes"])
    pool = recorded.state.pools[0]
    written = int((pool.pool.writers[:, 0] > 0).sum())
    assert 0 < written < pool.num_slots
    assert sizes["pool.0.writers"] == 24 * written
    assert sizes["pool.0.records"] <= 32 * (written + 1)
    assert "pool.0.head.K" not in sizes  # like the others
    assert "pool.0.unknown" not in sizes


def test_the_names_of_requests_that_are_gone_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyframe, "REQUESTS_KEPT", 3)
    trace = tmp_path / "t.arrow"
    configuration = CONFIGURATIONS["tight"]
    with SimulatedEngine(configuration.engine_config(2), configuration.requests(2), trace) as engine:
        while engine.step():
            pass
    with TraceReader(trace) as reader:
        recorded = RecordedState(reader.header)
    for view in read_trace(trace):
        recorded.apply(view)
    told = set(recorded.state.request_table.facts)
    keyframe.forget_old_requests(recorded)
    kept = set(recorded.state.request_table.facts)
    assert len(kept) < len(told)
    writers = {int(request) for pool in recorded.state.pools for request in np.unique(pool.pool.writers[:, 2])}
    assert writers & told <= kept
    assert len(recorded.history.ended) <= 3 + len(recorded.history.ledger.held_by)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("column", ["state_start", "state_count"])
def test_rows_that_there_are_not(column: str, value: int, recorded: RecordedState) -> None:
    refused = 0
    for number, event in enumerate(events_of(recorded)):
        if event.scalars["status"] != "part":
            continue
        told = events_of(recorded)
        told[number].ints[column] = told[number].ints[column].copy()
        told[number].ints[column][-1] = value
        if event.scalars["note"] in ("ended", "dropped"):  # of which only the bytes count
            continue
        with pytest.raises(UnusableEventError):
            load(recorded, told)
        refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    "labels",
    [
        "",
        "[]",
        "{}",
        '{"truth_fill": 7}',
        '{"truth_fill": Infinity}',
        '{"truth_fill":0,"ran":[],"decoded":1,"since_sweep":0,"any_unknown":[],"last_forward":1,"had_gap":0,"from_start":1}',
    ],
)
def test_a_beginning_that_does_not_fit(labels: str, recorded: RecordedState) -> None:
    told = events_of(recorded)
    told[0].scalars["labels"] = labels
    with pytest.raises(UnusableEventError, match="labels"):
        load(recorded, told)


def test_a_forward_that_waits_and_contradicts_itself(recorded: RecordedState) -> None:
    told = events_of(recorded)
    waiting = [event for event in told if event.scalars["status"] == "forward"]
    assert waiting, "an overlapping engine always has one on its way"
    waiting[0].ints["extend_lens"] = waiting[0].ints["extend_lens"] + (1 << 40)
    with pytest.raises(UnusableEventError, match="waits for its samples"):
        load(recorded, told)


@pytest.mark.parametrize("column", ["out_cache_loc", "prefix_lens"])
def test_a_forward_that_waits_without_its_slots_or_at_no_position(column: str, recorded: RecordedState) -> None:
    told = events_of(recorded)
    waiting = next(event for event in told if event.scalars["status"] == "forward")
    if column == "prefix_lens":
        waiting.ints[column] = waiting.ints[column] + MAX_PREFIX + 1
    else:
        del waiting.ints[column]
    with pytest.raises(UnusableEventError, match="waits for its samples"):
        load(recorded, told)


def test_slots_that_left_their_rows_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    header = TraceHeader(groups=(PoolGroup(name="full", num_slots=64),), tables=(StateTable(rows=4, width=8),))
    recorded = RecordedState(dataclasses.replace(header, slot_history="complete"))
    given = np.array([(7, 0, 3, 5, 9), (7, 0, 4, 5, 9), (7, 0, 5, 6, 9), (7, 0, 6, 6, 11), (8, 0, 9, 6, 11)], np.int64)
    recorded.history.dropped.put_back(given)
    assert [[len(one.slots) for one in found] for found in recorded.history.dropped.by_request.values()] == [
        [3, 1],
        [1],
    ]
    monkeypatch.setattr(keyframe, "PART_BYTES", 80)  # two rows a part
    again = load(recorded, events_of(recorded)).history.dropped
    assert np.array_equal(again.rows(), given)
    assert [[len(one.slots) for one in found] for found in again.by_request.values()] == [[3, 1], [1]]


def test_arrays_of_a_later_version_are_passed_over(recorded: RecordedState) -> None:
    told = events_of(recorded)
    told.insert(3, TraceEvent(kind="keyframe", scalars={"status": "part", "note": "pool.0.colours"}))
    load(recorded, told)


def write_segment(path: Path, header: TraceHeader, told: list[TraceEvent]) -> None:
    header = dataclasses.replace(header, segment=Segment(number=4, first_event=1000))
    file = TraceFile(path, header_schema(header))
    batch = encode_events(told, 1000, header_schema(header))
    file.write(batch, batch_metadata(batch, 1000))
    file.close()


def test_a_replay_of_a_keyframe_that_contradicts_itself_is_inconclusive(
    recorded: RecordedState, tmp_path: Path
) -> None:
    header = recorded.state.header
    good, bad = events_of(recorded), events_of(recorded)
    part = next(event for event in bad if event.scalars.get("note") == "pool.0.records")
    part.ints["state_start"] = part.ints["state_start"] + (1 << 40)
    write_segment(tmp_path / "good.arrow", header, good)
    write_segment(tmp_path / "bad.arrow", header, bad)
    found = replay(tmp_path / "bad.arrow", settings=ReplaySettings(), report=None)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "contradicts itself" in found.gaps[0]
    assert not replay(tmp_path / "good.arrow", settings=ReplaySettings(), report=None).gaps


@pytest.mark.parametrize("left", [0, -1])
def test_a_segment_without_a_whole_keyframe_is_inconclusive_and_finds_nothing(
    left: int, recorded: RecordedState, tmp_path: Path
) -> None:
    """The events behind it are whole; what they stand on is not known."""
    trace = tmp_path / "t.arrow"
    configuration = CONFIGURATIONS["overlap_swa"]
    with SimulatedEngine(configuration.engine_config(1), configuration.requests(1), trace) as engine:
        while engine.step():
            pass
    whole = list(read_trace(trace))
    with TraceReader(trace) as reader:
        header = reader.header
    before = RecordedState(header)
    for view in whole[:150]:
        before.apply(view)
    later = [told(view) for view in whole[150:]]
    keyframe_ = events_of(before)
    write_segment(tmp_path / "good.arrow", header, [*keyframe_, *later])
    write_segment(tmp_path / "bad.arrow", header, [*keyframe_[:left], *later])
    good, bad = (replay(tmp_path / f"{name}.arrow", settings=ReplaySettings(), report=None) for name in ("good", "bad"))
    assert (good.verdict, good.gaps, good.unknown_before) == (Verdict.CLEAN, [], False)
    assert (bad.violations, bad.findings, bad.num_gaps) == (0, 0, 1)
    assert bad.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("had_gap", [False, True])
def test_what_was_lost_before_a_segment_is_no_runner_that_never_ran(had_gap: bool, tmp_path: Path) -> None:
    trace = tmp_path / "t.arrow"
    configuration = CONFIGURATIONS["eagle"]
    with SimulatedEngine(configuration.engine_config(1), configuration.requests(1), trace) as engine:
        for _ in range(20):
            assert engine.step()
    with TraceReader(trace) as reader:
        recorded = RecordedState(reader.header)
    events = list(read_trace(trace))
    last = max(n for n, view in enumerate(events) if view.kind == "forward" and not view.scalar("runner"))
    for view in events[:last]:
        recorded.apply(view)
    recorded.state.activity.ran[1] = 0
    recorded.state.activity.decoded = True
    recorded.history.had_gap = had_gap
    write_segment(tmp_path / "s.arrow", recorded.state.header, [*events_of(recorded), told(events[last])])
    found = replay(tmp_path / "s.arrow", settings=ReplaySettings(), report=None)
    assert found.findings_by_kind.get("launch_missing", 0) == (not had_gap)


def test_labels_are_plain_json(recorded: RecordedState) -> None:
    assert set(json.loads(str(events_of(recorded)[0].scalars["labels"]))) == {
        "truth_fill",
        "ran",
        "decoded",
        "since_sweep",
        "any_unknown",
        "last_forward",
        "had_gap",
        "from_start",
    }
