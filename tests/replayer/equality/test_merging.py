"""Merging and expansion on their own: what is one row, what is not, and that nothing is held without bound."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcanary.analysis.store import expansion
from kvcanary.analysis.store.expansion import ExpansionError, expand
from kvcanary.recorder.state.forward import Forward
from kvcanary.recorder.state.requests import RequestFacts, RequestTable
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.report.merged import merging
from kvcanary.replayer.report.merged.merging import MergingSink
from kvcanary.replayer.report.violations import LaunchViolations, violation_table
from kvcanary.replayer.run.planning import Sweep

from ...support.both_ways import assert_tables, plain

HEADER = TraceHeader(
    groups=(
        PoolGroup(name="full", num_slots=64, halves=("K", "V")),
        PoolGroup(name="ring", num_slots=64, halves=("K",), reads_before_write=True),
    ),
    tables=(StateTable(rows=6, width=32),),
)
TAGS = {("HEAD", "K"): 0, ("HEAD", "V"): 1, ("TAIL", "K"): 2, ("TAIL", "V"): 3, ("SWEEP", "K"): 4}
CHAIN, WRITE_TOKEN = 1, 8


class Scene:
    """A trace of forwards, and what was found in each, written as stepwise rows and through a `MergingSink`."""

    def __init__(self, folder: Path, *, max_open: int = merging.MAX_OPEN, table_every: int = 5) -> None:
        self.trace = folder / "t.arrow"
        self.folder = folder
        self.sink = MergingSink(folder / "violations.parquet", HEADER, max_open=max_open)
        self.book = RequestTable()
        self.events: list[TraceEvent] = []
        self.tables: list[pa.Table] = []
        self.most_open = 0
        self._launches: list[LaunchViolations] = []
        self._table_every = table_every

    def forward(self, batch: list[tuple[int, int]], found: dict, *, passed: bool = False) -> None:
        """Run a forward of `(row, request)`; `found` has by (group, endpoint, half) a list of (place, slot, position)."""
        event = len(self.events)
        rows, ids = (np.array([entry[i] for entry in batch], np.int64) for i in (0, 1))
        ints = {"req_pool_indices": rows, "request_ids": ids, "prefix_lens": rows * 0, "extend_lens": rows * 0}
        scalars = {"forward": 2 * event, "mode": "mixed"}
        self.events.append(TraceEvent(kind="forward", time_ns=event * 10, scalars=scalars, ints=ints))
        if passed:
            self.sink.pass_by(0, rows)
            return
        nothing = np.zeros(0, np.int64)
        now = Forward(
            event=event, forward=2 * event, time_ns=event * 10, runner=0, mode="mixed", kv_watched=False,
            req_pool_indices=rows, request_ids=ids, prefix_lens=rows, extend_lens=rows, truth_lens=None,
            sampled_lens=nothing, sampled_tokens=nothing, input_ids=nothing, positions=nothing, out_cache_loc=(),
            kv_bytes=(),
        )  # fmt: skip
        self.sink.begin(now)
        for (group, endpoint, half), signs in found.items():
            places = np.array([place for place, *_ in signs], np.int64)
            self._take(event, group, endpoint, half, signs, ids[places], rows[places], places)
        self.sink.done()
        self._pass_on(self._table_every)

    def sweep(self, slots: list[int], bad: list[int]) -> None:
        """Run a sweep over slots; `bad` are the places in the list that are wrong."""
        event = len(self.events)
        values = np.array(slots, np.int64)
        ints = {f"sweep_{name}": values for name in ("slot", "position")}
        ints |= {f"sweep_{name}": values * 0 for name in ("group", "prev", "locked")}
        self.events.append(
            TraceEvent(kind="sweep", time_ns=event * 10, scalars={"forward": 2 * event, "mode": ""}, ints=ints)
        )
        self.sink.begin(Sweep(event=event, forward=2 * event, time_ns=event * 10, runner=0, plans={}))
        if bad:
            nobody = np.full(len(bad), -1)
            signs = [(slots.index(slots[i]), slots[i], slots[i]) for i in bad]
            self._take(event, 0, "SWEEP", "K", signs, nobody, nobody, np.array([s[0] for s in signs]))
        self.sink.done()
        self._pass_on(self._table_every)

    def close(self) -> tuple[pa.Table, pa.Table]:
        """Return all rows, and the merged ones."""
        self._pass_on(0)
        self.sink.close()
        with TraceWriter(self.trace, HEADER, flush_bytes=1 << 30, flush_interval_ns=1 << 60, overwrite=True) as writer:
            for number, event in enumerate(self.events, 1):
                assert writer.append(event)
                if number % max(7, len(self.events) // 20) == 0:
                    writer.flush()
        return pa.concat_tables(self.tables), pq.read_table(self.folder / "violations.parquet")

    def _take(self, event, group, endpoint, half, signs, ids, rows, places) -> None:
        n = len(signs)
        fields = np.zeros((n, 8), np.int64)
        fields[:, 0] = TAGS[endpoint, half]
        fields[:, 1] = [sign[1] for sign in signs]
        fields[:, 7] = [sign[3] if len(sign) > 3 else CHAIN for sign in signs]
        writers = np.full((n, 3), -1, np.int64)
        writes = fields[:, 7] == WRITE_TOKEN
        writers[writes] = event
        launch = LaunchViolations(
            event=event, forward=2 * event, time_ns=event * 10, mode="sweep" if endpoint == "SWEEP" else "mixed",
            runner=0, group=group, endpoint=endpoint, half=half, rows=fields, request_ids=ids, req_pool_indices=rows,
            expected_positions=np.array([sign[2] for sign in signs], np.int64), writers=writers, places=places,
        )  # fmt: skip
        self._launches.append(self.sink.with_turns(launch))

    def _pass_on(self, at_least: int) -> None:
        if self._launches and sum(len(launch.rows) for launch in self._launches) >= at_least:
            table = violation_table(self._launches, self.book)
            self.sink.append(table, self._launches)
            self.tables.append(table)
            self._launches = []
        self.most_open = max(self.most_open, self.sink.num_open)


def spans(table: pa.Table) -> list[tuple[int, int, int, int]]:
    columns = ("slot", "first_forward", "last_forward", "num_forwards")
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


def same(scene: Scene) -> pa.Table:
    expected, merged = scene.close()
    assert_tables(plain(expected), plain(expand(merged, scene.trace)), "violations")
    return merged


HEAD = 0, "HEAD", "K"


def test_what_lasts_is_one_row(tmp_path):
    scene = Scene(tmp_path, table_every=2000)
    for number in range(4_000):
        others = [(2, 8)] if number % 3 else []
        scene.forward([(1, 7), *others], {HEAD: [(0, 5, 3)]})
    expected, merged = scene.close()
    assert spans(merged) == [(5, 0, 7_998, 4_000)]
    assert scene.most_open == 1
    assert_tables(plain(expected), plain(expand(merged, scene.trace)), "violations")


def test_a_row_ends_where_its_request_ran_without_it(tmp_path):
    scene = Scene(tmp_path, table_every=1)
    bad, good = {HEAD: [(0, 5, 3)]}, {}
    scene.forward([(1, 7)], bad)
    scene.forward([(2, 8)], good)  # another request's forward does not end it
    scene.forward([(1, 7)], bad)
    scene.forward([(1, 7)], good)
    scene.forward([(1, 7)], bad)
    scene.forward([(1, 7)], good, passed=True)
    scene.forward([(1, 7)], bad)
    scene.forward([(1, 8)], good, passed=True)  # another request on the row
    scene.forward([(1, 7)], bad)
    scene.forward([(2, 8)], good, passed=True)
    scene.forward([(1, 7)], bad)
    scene.sink.part()
    scene.forward([(1, 7)], bad)
    assert spans(same(scene)) == [(5, 0, 4, 2), (5, 8, 8, 1), (5, 12, 12, 1), (5, 16, 20, 2), (5, 22, 22, 1)]


def test_rows_that_differ_in_anything_stay_apart(tmp_path):
    scene = Scene(tmp_path)
    for slot in (5, 5, 6):
        scene.forward([(1, 7), (2, 8)], {HEAD: [(0, slot, 3), (1, slot, 3)], (0, "TAIL", "V"): [(0, slot, 3)]})
    assert [row[1:] for row in spans(same(scene))] == [(0, 2, 2)] * 3 + [(4, 4, 1)] * 3


def test_rows_written_wrong_are_never_one(tmp_path):
    scene = Scene(tmp_path)
    for _ in range(4):
        scene.forward([(1, 7)], {HEAD: [(0, 5, 3, WRITE_TOKEN), (0, 5, 3, WRITE_TOKEN)]})
    assert len(spans(same(scene))) == 8


def test_equal_rows_of_one_launch_each_last(tmp_path):
    scene = Scene(tmp_path)
    for count in (2, 2, 3, 1):
        scene.forward([(1, 7)], {HEAD: [(0, 5, 3)] * count})
    assert sorted(spans(same(scene))) == [(5, 0, 4, 3), (5, 0, 6, 4), (5, 4, 4, 1)]


def test_order_that_would_not_come_back_is_kept(tmp_path):
    """Positions go backwards, as of no engine: the rows stay as they were, and last again where they go forwards."""
    scene = Scene(tmp_path)
    for order in ([3, 4], [4, 3], [3, 4], [3, 4]):
        scene.forward([(1, 7)], {HEAD: [(0, p, p) for p in order]})
    assert sorted(row[3] for row in spans(same(scene))) == [1, 1, 3, 3]


def test_the_padding_row_and_rows_given_twice(tmp_path):
    scene = Scene(tmp_path)
    for _ in range(3):
        scene.forward([(0, -1), (1, 7), (1, 7), (900, 9), (2, 8), (2, 9)], {HEAD: [(i, 5, 3) for i in range(6)]})
        scene.forward([(1, 7), (2, 8)], {HEAD: [(0, 5, 3), (1, 5, 3)]})
    assert sum(row[3] for row in spans(same(scene))) == 24


def test_sweeps_last_too(tmp_path):
    scene = Scene(tmp_path)
    scene.sweep([4, 5, 6, 5], [1, 2])
    scene.sweep([5, 4, 6], [0, 2])
    scene.forward([(1, 7)], {HEAD: [(0, 5, 3)]})
    scene.sweep([9, 6, 5], [0, 1, 2])  # 6 comes before 5 now
    scene.sweep([6, 5], [])
    scene.sweep([6, 5], [0, 1])
    merged = same(scene)
    assert sum(row[3] for row in spans(merged)) == 10
    assert (6, 0, 6, 3) in spans(merged)


def test_open_rows_are_bounded(tmp_path):
    scene = Scene(tmp_path, max_open=10)
    for _ in range(6):
        scene.forward([(1, 7)], {HEAD: [(0, p, p) for p in range(1, 31)]})
    merged = same(scene)
    assert scene.most_open == 10
    assert sum(row[3] for row in spans(merged)) == 180


def test_requests_that_left_are_not_held(tmp_path):
    scene = Scene(tmp_path, table_every=1)
    for request in range(200):
        scene.forward([(1, request)], {HEAD: [(0, p, p) for p in range(1, 4)]})
    assert scene.most_open == 3
    assert len(spans(same(scene))) == 600


def test_names_learnt_later_are_not_given_to_earlier_rows(tmp_path):
    scene = Scene(tmp_path, table_every=1)
    for number in range(4):
        if number == 2:
            known = dataclasses.asdict(RequestFacts(name="late", prompt_len=1, room=-1))
            scene.book.facts[7] = RequestFacts(**known)
        scene.forward([(1, 7)], {HEAD: [(0, 5, 3)]})
    merged = same(scene)
    assert merged["request"].to_pylist() == ["7", "late"]


def test_another_trace_is_refused(tmp_path):
    scene = Scene(tmp_path)
    for _ in range(6):
        scene.forward([(1, 7)], {HEAD: [(0, 5, 3)]})
    _, merged = scene.close()
    del scene.events[3]
    with TraceWriter(scene.trace, HEADER, overwrite=True) as writer:
        for event in scene.events:
            assert writer.append(event)
    with pytest.raises(ExpansionError, match="another trace"):
        expand(merged, scene.trace)
    with pytest.raises(ExpansionError, match="another trace"):
        expand(merged.set_column(merged.schema.get_field_index("event"), "event", pa.array([99])), scene.trace)


@st.composite
def scenes(draw):
    """Forwards and sweeps in which few things are wrong again and again, in launches of both groups."""
    steps = []
    for _ in range(draw(st.integers(1, 14))):
        batch = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(6, 8)), min_size=1, max_size=3))
        sign = st.tuples(st.integers(0, len(batch) - 1), st.integers(1, 2), st.integers(0, 2))
        found = {}
        for launch in ((0, "HEAD", "K"), (1, "HEAD", "K"), (1, "TAIL", "K"), (0, "TAIL", "K"), (0, "TAIL", "V")):
            signs = draw(st.lists(sign, max_size=3))
            if draw(st.booleans()):
                signs = sorted(signs, key=lambda s: (s[0], s[2]))
            if signs:
                found[launch] = signs
        steps.append((batch, found, draw(st.sampled_from(["forward", "forward", "forward", "sweep", "part", "pass"]))))
    return steps


@settings(max_examples=settings().max_examples // 2)
@given(steps=scenes(), max_open=st.sampled_from([2, 1000]), table_every=st.sampled_from([1, 4, 50]))
def test_any_history_comes_back(tmp_path_factory, steps, max_open, table_every):
    scene = Scene(tmp_path_factory.mktemp("scene"), max_open=max_open, table_every=table_every)
    for batch, found, kind in steps:
        if kind == "sweep":
            slots = [row for row, _ in batch]
            scene.sweep(slots, list(range(len(slots)))[: len(found)])
        elif kind == "pass":
            scene.forward(batch, {}, passed=True)
        else:
            if kind == "part":
                scene.sink.part()
            scene.forward(batch, found)
    if scene.tables or scene._launches:
        same(scene)
    else:
        scene.sink.close()


def test_large_events_come_in_small_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(expansion, "MAX_ROWS", 40)
    scene = Scene(tmp_path)
    for _ in range(9):
        scene.forward([(1, 7), (2, 8)], {HEAD: [(i, p, p) for i in range(2) for p in range(1, 8)]})
    expected, merged = scene.close()
    tables = list(expansion.expand_tables([merged], scene.trace))
    assert max(table.num_rows for table in tables) <= 40
    assert_tables(plain(expected), plain(pa.concat_tables(tables)), "violations")
