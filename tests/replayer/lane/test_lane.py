"""The lane gives what the executor and the checks give, wherever it begins and ends, and takes what is ordinary."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.kernels.constants import RECORD_POSITION
from kvcanary.kernels.ops.plan.reference import MAX_PLAN_ENTRIES
from kvcanary.kernels.replay_pass.forward import requests_ordinary
from kvcanary.kernels.replay_pass.loops import lane_loops
from kvcanary.kernels.replay_pass.writes import seeds_ordinary
from kvcanary.recorder.trace.batch import TraceBatch
from kvcanary.replayer.executors import executors
from kvcanary.replayer.executors.incremental import lane
from kvcanary.replayer.executors.incremental.lane import Lane
from kvcanary.replayer.run.replay import ReplayRun, ReplaySettings, replay
from kvcanary.replayer.run.segment_stream import SegmentStream

from ..interval.test_unruly_engines import write

DATA = Path(__file__).parents[3] / "data"
# Each with the least share of its events that must go through the lane.
CLEAN = {
    "clean_llama": 1.0,
    "clean_fork_dedup_evict": 0.9,
    "simulated/clean_eagle": 0.95,
    "simulated/clean_overlap": 0.7,
}
FAULTY = (
    "free_too_early",
    "kv_flip",
    "position_plus_one",
    "table_swap",
    "token_swap",
    "simulated/eagle_chunk_tail_predicted_token",
    "simulated/mla_free_too_early",
    "simulated/overlap_future_map_overrun",
)


def answer(trace: Path, folder: Path) -> dict:
    """Return everything that an interval replay gives, but for how it was made."""
    folder.mkdir()
    summary = replay(trace, settings=ReplaySettings(executor="interval"), report=folder).to_json()
    for name in ("settings", "seconds", "report"):
        del summary[name]
    return summary | {file.name: pq.read_table(file).to_pylist() for file in folder.glob("*.parquet")}


@pytest.fixture(autouse=True)
def _from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the lane take these traces, which are too small for it."""
    monkeypatch.setattr(lane, "WARM_UP_EVENTS", 0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events that the lane took, a number a call."""
    counts: list[int] = []
    run = Lane.run

    def counted(self: Lane, batch: TraceBatch, at: int) -> int:
        stop = run(self, batch, at)
        counts.append(stop - at)
        return stop

    monkeypatch.setattr(Lane, "run", counted)
    return counts


@pytest.fixture
def without_lane(tmp_path: Path) -> Callable[[Path], dict]:
    """Replay without the lane."""

    def without(trace: Path) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executors, "open_lane", lambda *_, **__: None)
            return answer(trace, tmp_path / "without")

    return without


@pytest.mark.parametrize("name", [*CLEAN, *FAULTY])
def test_the_answer_is_that_without_the_lane(
    name: str, tmp_path: Path, taken: list[int], without_lane: Callable[[Path], dict]
) -> None:
    trace = DATA / f"{name}.arrow"
    expected = without_lane(trace)
    assert not taken
    assert answer(trace, tmp_path / "with") == expected
    assert sum(taken) >= CLEAN.get(name, 0.05) * sum(expected["events"].values())


def test_columns_are_worked_out_by_who_reads_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = DATA / "simulated" / "clean_overlap.arrow"
    threads: set[int] = set()
    columns = lane.lane_columns

    def noted(batch: TraceBatch) -> lane.LaneColumns:
        threads.add(threading.get_ident())
        return columns(batch)

    monkeypatch.setattr(lane, "lane_columns", noted)
    monkeypatch.setattr(lane, "LARGE_BYTES", 0)
    ahead = answer(trace, tmp_path / "ahead")
    here = threading.get_ident()
    assert threads and here not in threads
    threads.clear()
    monkeypatch.setattr(Lane, "prepare", lambda *_: None)
    assert answer(trace, tmp_path / "late") == ahead
    assert threads == {here}


def test_what_nobody_takes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that the lane is never given, as where a keyframe is loaded, do not heap up; nor are they mistaken."""
    monkeypatch.setattr(lane, "LARGE_BYTES", 0)
    with ReplayRun(DATA / "clean_llama.arrow", settings=ReplaySettings(executor="interval"), report=None) as run:
        taker = run._events._lane
        assert isinstance(taker, Lane)
        batch = next(item for item in SegmentStream([DATA / "clean_llama.arrow"]).stream())
        assert isinstance(batch, TraceBatch)
        for _ in range(9):
            taker.prepare(batch)
        assert len(taker._ahead) == lane._MOST_AHEAD
        later = TraceBatch(batch.record_batch, first_event=batch.first_event + 1)
        assert taker._prepared(later) is None and not taker._ahead


@pytest.mark.parametrize("name", ["clean_llama", "table_swap", "simulated/overlap_future_map_overrun"])
@pytest.mark.parametrize("most", [1, 7])
def test_batches_may_begin_and_end_anywhere(
    name: str,
    most: int,
    tmp_path: Path,
    taken: list[int],
    without_lane: Callable[[Path], dict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = DATA / f"{name}.arrow"
    expected = without_lane(trace)
    sizes, whole = np.random.default_rng(most), SegmentStream.stream

    def cut(self: SegmentStream) -> Iterator:
        for item in whole(self):
            at = 0
            while isinstance(item, TraceBatch) and at < item.num_events:
                part = item.record_batch.slice(at, int(sizes.integers(1, most + 1)))
                yield TraceBatch(part, first_event=item.first_event + at, end_byte=item.end_byte)
                at += part.num_rows

    monkeypatch.setattr(SegmentStream, "stream", cut)
    assert answer(trace, tmp_path / "with") == expected
    assert max(taken) <= most
    assert sum(taken)


@pytest.mark.parametrize("name", ["clean_llama", "kv_flip", "token_swap"])
def test_the_loops_as_they_stand_agree(
    name: str, tmp_path: Path, without_lane: Callable[[Path], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = DATA / f"{name}.arrow"
    expected = without_lane(trace)
    ran = []
    call = Lane._call

    def plain(self: Lane, _loops, columns, at: int) -> int:
        ran.append(at)
        return call(self, lane_loops, columns, at)

    monkeypatch.setattr(Lane, "_call", plain)
    assert answer(trace, tmp_path / "plain") == expected
    assert ran


@pytest.mark.parametrize(
    "settings",
    [
        {"checks": ()},
        {"executor": "stepwise"},
        {"backend": "reference"},
        {"max_violations": 0},
    ],
)
def test_where_it_has_nothing_to_offer_there_is_none(settings: dict, taken: list[int]) -> None:
    chosen = {"executor": "interval"} | settings
    summary = replay(DATA / "token_swap.arrow", settings=ReplaySettings(**chosen), report=None)
    assert sum(summary.events.values())
    assert not taken


def test_a_small_trace_does_without(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "WARM_UP_EVENTS", 50)
    summary = replay(DATA / "clean_llama.arrow", settings=ReplaySettings(executor="interval"), report=None)
    assert taken[:50] == [0] * 50
    assert sum(taken) == sum(summary.events.values()) - 50


@pytest.mark.parametrize("shape", ["full", "draft"])
@pytest.mark.parametrize("seed", range(100, 106))
def test_an_engine_that_does_what_it_likes(
    seed: int, shape: str, tmp_path: Path, taken: list[int], without_lane: Callable[[Path], dict]
) -> None:
    trace = tmp_path / "t.arrow"
    write(trace, seed, shape)
    expected = without_lane(trace)
    assert answer(trace, tmp_path / "with") == expected
    assert any(taken)


def test_it_stops_at_the_first_bad_event_as_ever(taken: list[int]) -> None:
    settings = ReplaySettings(executor="interval", fail_fast=True)
    summary = replay(DATA / "table_swap.arrow", settings=settings, report=None)
    stepwise = replay(
        DATA / "table_swap.arrow", settings=ReplaySettings(executor="stepwise", fail_fast=True), report=None
    )
    assert summary.stopped
    assert summary.stopped == stepwise.stopped
    assert summary.events == stepwise.events
    assert sum(taken) < sum(summary.events.values())


def test_a_chain_goes_on_from_the_position_before() -> None:
    records = np.zeros((4, 4), np.int64)
    records[2, RECORD_POSITION], records[3, RECORD_POSITION] = 6, 9
    # Row 1 goes on from slot 2 at position 7, row 2 from slot 0, which nobody verifies, row 3 from a record of elsewhere.
    table = np.zeros((4, 16), np.int32)
    table[1, 6], table[3, 6] = 2, 3

    def ordinary(row: int, prefix: int, tokens: int = 1) -> int:
        return seeds_ordinary(records, table, np.array([row]), np.array([prefix]), np.array([tokens]))

    assert ordinary(1, 7) == 1
    assert ordinary(1, 0) == 1
    assert ordinary(2, 7) == 0
    assert ordinary(3, 7) == 0
    assert ordinary(3, 7, tokens=0) == 1


def test_a_forward_that_reads_absurdly_much_is_left_to_the_executor() -> None:
    """Which refuses it, whether requests or padding read so much."""
    width, nothing, wide = 1 << 20, np.zeros(0, np.int64), np.zeros((2, 8), np.int64)

    def ordinary(requests: int) -> int:
        rows = np.zeros(requests, np.int64)
        lists = (rows, rows - 1, np.full(requests, width), rows, nothing, nothing, nothing, nothing)
        return requests_ordinary(
            *lists,
            0,
            0,
            0,
            width,
            1,
            nothing,
            wide.astype(np.int32),
            wide,
            wide,
            wide,
            wide,
            nothing,
            rows,
            rows.copy(),
        )

    assert ordinary(MAX_PLAN_ENTRIES // width) == 1
    assert ordinary(MAX_PLAN_ENTRIES // width + 1) == 0


def test_requests_are_kept_for_the_oracle_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[Lane] = []
    note = Lane._take_note

    def noted(self: Lane, *arguments) -> None:
        lanes.append(self)
        note(self, *arguments)

    monkeypatch.setattr(Lane, "_take_note", noted)
    summary = replay(DATA / "clean_llama.arrow", settings=ReplaySettings(executor="interval"), report=None)
    assert lanes
    assert summary.header.oracle is None
    assert summary.events["request"] > 0
    assert not lanes[-1]._facts.any()
