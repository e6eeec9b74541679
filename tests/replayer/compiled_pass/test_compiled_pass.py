"""The pass gives what the executor and the checks give, wherever it begins and ends, and takes what is ordinary."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from kvcanary.kernels.ops.plan.reference import MAX_PLAN_ENTRIES
from kvcanary.kernels.replay_pass.entries import EVENT, HI, NUM_DUE
from kvcanary.kernels.replay_pass.events import replay_events_loops
from kvcanary.kernels.replay_pass.ledger import STAMP, STAMP_REQUEST
from kvcanary.recorder.state import apply
from kvcanary.recorder.state.history import ROW_END
from kvcanary.recorder.state.writes import readable_prefixes
from kvcanary.recorder.trace.batch import TraceBatch
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.executors.incremental import compiled_pass
from kvcanary.replayer.executors.incremental.compiled_pass import CompiledPass
from kvcanary.replayer.executors.incremental.executor import IncrementalExecutor
from kvcanary.replayer.run import event_replay, planning
from kvcanary.replayer.run.replay import ReplayRun, ReplaySettings, replay
from kvcanary.replayer.run.streams import SegmentStream

from ...support.places import DATA
from ...support.short_histories import HEADER, both, forward, ints, slot_event
from ..incremental.unruly_engine import write

pytestmark = [pytest.mark.usefixtures("pass_from_the_start"), pytest.mark.one_in(2)]  # make fuzz goes through all

# Each with the least share of its events that must go through the pass.
CLEAN = {
    "clean_llama": 1.0,
    "clean_fork_dedup_evict": 0.9,
    "simulated/clean_eagle": 0.95,
    "simulated/clean_overlap": 0.7,
    "simulated/clean_swa": 0.98,
    "clean_hybrid": 0.95,
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
    "simulated/swa_stale_mapping",
    "kv_flip_sliding",
)


def answer(trace: Path, folder: Path) -> dict:
    """Return everything that an interval replay gives, but for how it was made."""
    folder.mkdir()
    summary = replay(trace, settings=ReplaySettings(executor="interval"), report=folder).to_json()
    for name in ("settings", "seconds", "report"):
        del summary[name]
    return summary | {file.name: pq.read_table(file).to_pylist() for file in folder.glob("*.parquet")}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The events that the pass took, a number a call."""
    counts: list[int] = []
    run = CompiledPass.run

    def counted(self: CompiledPass, batch: TraceBatch, at: int) -> int:
        stop = run(self, batch, at)
        counts.append(stop - at)
        return stop

    monkeypatch.setattr(CompiledPass, "run", counted)
    return counts


@pytest.fixture
def without_pass(tmp_path: Path) -> Callable[[Path], dict]:
    """Replay without the pass."""

    def without(trace: Path) -> dict:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(event_replay, "make_pass", lambda *_, **__: None)
            return answer(trace, tmp_path / "without")

    return without


@pytest.mark.parametrize("name", [*CLEAN, *FAULTY])
def test_the_answer_is_that_without_the_pass(
    name: str, tmp_path: Path, taken: list[int], without_pass: Callable[[Path], dict]
) -> None:
    trace = DATA / f"{name}.arrow"
    expected = without_pass(trace)
    assert not taken
    assert answer(trace, tmp_path / "with") == expected
    assert sum(taken) >= CLEAN.get(name, 0.05) * sum(expected["events"].values())


def state(trace: Path) -> dict[str, np.ndarray]:
    """Return all that an interval replay holds at its end, but for the numbers of forwards that were judged."""
    with ReplayRun(trace, settings=ReplaySettings(executor="interval"), report=None) as run:
        while run.step():
            pass
        executor = run.events.executor
        history = executor.history
        assert history is not None
        held = {"status": history.rows.status}
        held |= {f"rows of runner {number}": last for number, last in enumerate(history.rows.last)}
        held |= {f"table {number}": table for number, table in enumerate(executor.tables.req_to_token)}
        held |= {f"lut {number}": lut for number, lut in enumerate(executor.tables.luts)}
        if executor.tables.truth is not None:
            held["truth"] = executor.tables.truth
        for pool in executor.pools:
            index, tier = pool.index, pool.pool
            held[f"ledger {index}"] = np.delete(history.ledger.rows[index], [STAMP, STAMP_REQUEST], axis=1)
            held[f"transfers {index}"] = history.ledger.transfers[index]
            held[f"writers {index}"] = tier.writers
            for half in pool.group.halves:
                held |= {f"head {half} {index}": tier.head[half], f"tail {half} {index}": tier.tail[half]}
            held |= {f"stream {number} {index}": data for number, data in enumerate(tier.kv)}
        return {name: array.copy() for name, array in held.items()}


@pytest.mark.parametrize("name", [*CLEAN, *FAULTY])
def test_the_state_is_that_without_the_pass(name: str, taken: list[int]) -> None:
    trace = DATA / f"{name}.arrow"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_replay, "make_pass", lambda *_, **__: None)
        expected = state(trace)
    assert not taken
    found = state(trace)
    assert sum(taken) and found.keys() == expected.keys()
    for what, array in expected.items():
        np.testing.assert_array_equal(found[what], array, err_msg=what)


@pytest.mark.parametrize("name", ["clean_llama", "clean_hybrid", "simulated/clean_eagle"])
def test_what_a_forward_wrote_is_watched_as_verified(name: str) -> None:
    """Each row watches its entries to the end of what its last forward wrote."""
    with ReplayRun(DATA / f"{name}.arrow", settings=ReplaySettings(executor="interval"), report=None) as run:
        while run.step():
            pass
        executor = run.events.executor
        assert isinstance(executor, IncrementalExecutor) and executor.history is not None
        watched = 0
        for group, states in zip(executor.header.groups, executor.watch.states, strict=True):
            last = executor.history.rows.last[group.runner]
            rows = np.flatnonzero(states.rows[: len(last), EVENT])
            np.testing.assert_array_equal(states.rows[rows, HI], last[rows, ROW_END])
            assert [np.count_nonzero(states.due[row]) for row in rows] == states.rows[rows, NUM_DUE].tolist()
            watched += len(rows)
        assert watched


def test_columns_are_worked_out_by_who_reads_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = DATA / "simulated" / "clean_overlap.arrow"
    threads: set[int] = set()
    columns = compiled_pass.batch_columns

    def noted(batch: TraceBatch, header: TraceHeader) -> compiled_pass.BatchColumns:
        threads.add(threading.get_ident())
        return columns(batch, header)

    monkeypatch.setattr(compiled_pass, "batch_columns", noted)
    monkeypatch.setattr(compiled_pass, "LARGE_BYTES", 0)
    ahead = answer(trace, tmp_path / "ahead")
    here = threading.get_ident()
    assert threads and here not in threads
    threads.clear()
    monkeypatch.setattr(CompiledPass, "prepare", lambda *_: None)
    assert answer(trace, tmp_path / "late") == ahead
    assert threads == {here}


def test_what_nobody_takes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that the pass is never given, as where a keyframe is loaded, do not heap up; nor are they mistaken."""
    monkeypatch.setattr(compiled_pass, "LARGE_BYTES", 0)
    with ReplayRun(DATA / "clean_llama.arrow", settings=ReplaySettings(executor="interval"), report=None) as run:
        taker = run.events.compiled_pass
        assert isinstance(taker, CompiledPass)
        batch = next(item for item in SegmentStream([DATA / "clean_llama.arrow"]).stream())
        assert isinstance(batch, TraceBatch)
        for _ in range(9):
            taker.prepare(batch)
        assert len(taker._ahead) == compiled_pass._MOST_AHEAD
        later = TraceBatch(batch.record_batch, first_event=batch.first_event + 1)
        assert taker._prepared(later) is None and not taker._ahead


@pytest.mark.parametrize("name", ["clean_llama", "table_swap", "simulated/overlap_future_map_overrun"])
@pytest.mark.parametrize("most", [1, 7])
def test_batches_may_begin_and_end_anywhere(
    name: str,
    most: int,
    tmp_path: Path,
    taken: list[int],
    without_pass: Callable[[Path], dict],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = DATA / f"{name}.arrow"
    expected = without_pass(trace)
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
    name: str, tmp_path: Path, without_pass: Callable[[Path], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = DATA / f"{name}.arrow"
    expected = without_pass(trace)
    ran = []
    call = CompiledPass._call

    def plain(self: CompiledPass, _loops, columns, at: int) -> int:
        ran.append(at)
        return call(self, replay_events_loops, columns, at)

    monkeypatch.setattr(CompiledPass, "_call", plain)
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
    monkeypatch.setattr(compiled_pass, "WARM_UP_EVENTS", 50)
    summary = replay(DATA / "clean_llama.arrow", settings=ReplaySettings(executor="interval"), report=None)
    assert taken[:50] == [0] * 50
    assert sum(taken) == sum(summary.events.values()) - 50


@pytest.mark.parametrize("shape", ["full", "draft", "sliding", "hybrid", "all"])
@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.one_in(4)
def test_an_engine_that_does_what_it_likes(
    seed: int, shape: str, tmp_path: Path, taken: list[int], without_pass: Callable[[Path], dict]
) -> None:
    trace = tmp_path / "t.arrow"
    write(trace, seed, shape)
    expected = without_pass(trace)
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


@pytest.mark.parametrize(("before", "violations"), [(6, False), (0, True), (9, True)])
def test_a_chain_goes_on_from_the_position_before(before: int, violations: bool, tmp_path: Path) -> None:
    """Row 1 goes on at position 7 from slot 6, or from slot 0, which nobody verifies, or from a record of elsewhere."""
    first = forward([1, 2], [7, 8], [0, 0], [7, 3], [*range(30, 40)], [*range(1, 6), 7, 6, 10, 9, 11])
    again = forward([1], [7], [7], [1], [50], [12])
    again.ints.update(ints(table_index=[0], table_row=[1], table_start=[6], table_count=[1], table_slots=[before]))
    header = replace(HEADER, slot_history="")
    found = both([first, again], tmp_path, header)
    assert bool(found.summary.violations) == violations


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("owner", "reader", "kinds"), [(0, 0, set()), (7, 8, {"read_of_foreign_slot"})])
def test_who_holds_a_slot(joined: bool, owner: int, reader: int, kinds: set[str], tmp_path: Path) -> None:
    """A request whose number is 0 holds its slots as others do; one that joins its own slots holds them as before."""
    mine = slot_event("alloc", range(1, 4), owner)
    again = TraceEvent(kind="alloc", scalars={**mine.scalars, "status": "shared"}, ints=mine.ints)
    first = forward([1], [owner], [0], [3], [30, 31, 32], [1, 2, 3])
    last = forward([2], [reader], [1], [1], [33], [9])
    last.ints.update(ints(table_index=[0], table_row=[2], table_start=[0], table_count=[1], table_slots=[1]))
    events = [mine, *[again] * joined, first, slot_event("alloc", range(9, 10), reader), last]
    assert set(both(events, tmp_path).summary.findings_by_kind) == kinds


def test_a_change_of_no_entries_is_ordinary(taken: list[int], tmp_path: Path) -> None:
    groups = (*HEADER.groups, PoolGroup(name="swa", kind="swa", window=4, lut=0, num_slots=64, halves=("K",)))
    header = replace(HEADER, groups=groups, lut_lens=(64,), slot_history="")
    event = forward([1], [7], [0], [1], [30], [1])
    event.ints.update(ints(lut_index=[0, 0], lut_start=[1, 2], lut_count=[1, 0], lut_slots=[1]))
    both([event], tmp_path, header)
    assert taken == [1]


def reads(entries: int, width: int = 1 << 20) -> tuple[TraceHeader, TraceEvent]:
    """A forward whose requests, all of them padding, read so many entries."""
    bs = entries // width
    header = replace(HEADER, tables=(StateTable(rows=2, width=width),), slot_history="")
    return header, forward([0] * bs, [-1] * bs, [width] * bs, [0] * bs, [], [])


def test_a_forward_that_reads_absurdly_much_is_left_to_the_executor(tmp_path: Path) -> None:
    """Which refuses it, whether requests or padding read so much."""
    header, huge = reads(MAX_PLAN_ENTRIES + (1 << 20))
    assert both([forward([1], [7], [0], [1], [30], [1]), huge], tmp_path, header).summary.num_gaps == 1


def test_a_forward_may_read_just_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass takes it; stepped, it would need 8 GB, so here only what would refuse it is asked."""
    header, huge = reads(MAX_PLAN_ENTRIES)
    pool = SimpleNamespace(group=header.groups[0])
    tables = SimpleNamespace(req_to_token=[np.empty((2, header.tables[0].width), np.int32)])
    lens, entries = readable_prefixes(pool, SimpleNamespace(prefix_lens=huge.ints["prefix_lens"]), tables)
    assert (lens.sum(), entries) == (MAX_PLAN_ENTRIES, MAX_PLAN_ENTRIES)
    for elsewhere in (apply, planning):
        monkeypatch.setattr(elsewhere, "readable_prefixes", None)
    with TraceWriter(tmp_path / "t.arrow", header) as writer:
        assert writer.append(forward([1], [7], [0], [1], [30], [1]))
        assert writer.append(huge)
    summary = replay(tmp_path / "t.arrow", settings=ReplaySettings(executor="interval"), report=None)
    assert (summary.verdict.value, summary.num_gaps) == ("clean", 0)


def test_requests_are_kept_for_the_oracle_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[CompiledPass] = []
    note = CompiledPass._take_note

    def noted(self: CompiledPass, *arguments) -> None:
        lanes.append(self)
        note(self, *arguments)

    monkeypatch.setattr(CompiledPass, "_take_note", noted)
    summary = replay(DATA / "clean_llama.arrow", settings=ReplaySettings(executor="interval"), report=None)
    assert lanes
    assert summary.header.oracle is None
    assert summary.events["request"] > 0
    assert not lanes[-1]._facts.any()
