"""The state tables against dictionaries, past every size at which a row's memory or a loop's block ends."""

from types import SimpleNamespace

import numpy as np
import pytest
from kvcanary.recorder.state.apply import EventApplier, RecordedState
from kvcanary.recorder.state.forward import UnusableEventError
from kvcanary.recorder.state.pools import GroupPool
from kvcanary.recorder.state.tables import StateListener, StateTables, TableUse, look_up
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.schema import SLOTS_LISTED

ROWS, WIDTH, LUT = 6, 16_384, 9_000
HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=64),),
    tables=(StateTable(rows=ROWS, width=WIDTH), StateTable(name="other", rows=ROWS, width=WIDTH)),
    lut_lens=(LUT,),
    truth_table=StateTable(name="truth", rows=ROWS, width=WIDTH),
)
EDGES = [0, 1, 4095, 4096, 4097, 8191, 8192, 8193, WIDTH - 3]


class Columns(dict):
    def ints(self, name: str) -> np.ndarray:
        return np.array(self.get(name, ()), np.int64)


class View(Columns):
    """An event as its readers see it."""

    def __init__(self, kind: str, status: str, columns: dict) -> None:
        super().__init__(columns)
        self.kind, self.status, self.index, self.event = kind, status, 0, 0

    def scalar(self, name: str) -> object:
        return self.status if name == "status" else 0


class Heard(StateListener):
    """Keeps what each entry held when its change was announced."""

    def __init__(self) -> None:
        self.before: list[tuple] = []

    def table_runs(self, tables, index, runs) -> None:
        for number, row, start, count in zip(runs.indices, runs.rows, runs.starts, runs.lens, strict=True):
            if number == index:
                found = tables.req_to_token[index][row, start : start + count].tolist()
                self.before.append(("table", index, int(row), int(start), found))

    def truth_runs(self, tables, runs) -> None:
        for row, start, count in zip(runs.rows, runs.starts, runs.lens, strict=True):
            self.before.append(("truth", int(row), int(start), tables.truth[row, start : start + count].tolist()))

    def lut_entries(self, tables, *, index, places, values) -> None:
        del values
        self.before.append(("lut", index, places.tolist(), tables.luts[index][places].tolist()))


def runs(start: int, index: int) -> Columns:
    """Return runs of two and three entries in two rows of table `index`, with one of the other table between."""
    return Columns(
        table_index=[index, 1 - index, index],
        table_row=[2, 3, 5],
        table_start=[start, start, start],
        table_count=[2, 1, 3],
        table_slots=[11, 12, 99, 21, 22, 23],
        truth_row=[4],
        truth_start=[start],
        truth_count=[3],
        truth_tokens=[7, 8, 9],
    )


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("start", EDGES)
def test_runs_end_up_where_they_belong_and_nowhere_else(start: int, index: int) -> None:
    heard, use = Heard(), TableUse(HEADER)
    for listener in (heard, use):
        tables = StateTables(HEADER, backend="cpu", listener=listener)
        tables.apply_changes(runs(start, index))
        expected = np.zeros((2, ROWS, WIDTH), np.int32)
        expected[index, 2, start : start + 2] = [11, 12]
        expected[index, 5, start : start + 3] = [21, 22, 23]
        expected[1 - index, 3, start] = 99
        for table, should in zip(tables.req_to_token, expected, strict=True):
            np.testing.assert_array_equal(table, should)
        assert np.flatnonzero(tables.truth).tolist() == [4 * WIDTH + start + i for i in range(3)]
    assert ("table", index, 5, start, [0, 0, 0]) in heard.before
    assert heard.before[-1] == ("truth", 4, start, [0, 0, 0])
    assert use.ends[index].tolist() == [0, 0, start + 2, 0, 0, start + 3]
    assert use.ends[1 - index].tolist() == [0, 0, 0, start + 1, 0, 0]
    assert use.truth_ends.tolist() == [0, 0, 0, 0, start + 3, 0]


@pytest.mark.parametrize("start", EDGES)
def test_a_forwards_own_slots_and_samples_follow_its_prefixes(start: int) -> None:
    tables = StateTables(HEADER, backend="cpu")
    ints = np.array
    forward = SimpleNamespace(
        req_pool_indices=ints([3, 0, 1]), prefix_lens=ints([start, 0, 8]), extend_lens=ints([2, 1, 1]),
        out_cache_loc=(ints([5, 6, 7, 0]), ints([15, 16, 17, 0])), sampled_lens=ints([1, 0, 1]), sampled_tokens=ints([71, 72]),
    )  # fmt: skip
    tables.apply_forward(forward)
    for table, (one, two, three) in zip(tables.req_to_token, ((5, 6, 7), (15, 16, 17)), strict=True):
        assert table[3, start : start + 2].tolist() == [one, two]
        assert table[1, 8] == three  # a padding row takes no values, and its tokens come last
        assert np.count_nonzero(table) == 3
    assert tables.truth[3, start + 2] == 71
    assert tables.truth[1, 9] == 72


def test_a_listener_is_told_of_a_lut_entry_before_it_changes() -> None:
    heard = Heard()
    tables = StateTables(HEADER, backend="cpu", listener=heard)
    for slots in ([1, 2], [3, 4]):
        tables.apply_changes(Columns(lut_index=[0], lut_start=[8191], lut_count=[2], lut_slots=slots))
    assert heard.before == [("lut", 0, [8191, 8192], [0, 0]), ("lut", 0, [8191, 8192], [1, 2])]
    assert tables.luts[0][8191:8193].tolist() == [3, 4]


@pytest.mark.parametrize(
    "columns",
    [
        {"table_index": [0], "table_row": [1], "table_start": [WIDTH - 1], "table_count": [2], "table_slots": [1, 2]},
        {"table_index": [2], "table_row": [1], "table_start": [0], "table_count": [1], "table_slots": [1]},
        {"table_index": [0], "table_row": [1, 2], "table_start": [0], "table_count": [1], "table_slots": [1]},
        {"table_index": [0], "table_row": [1], "table_start": [0], "table_count": [1], "table_slots": [1 << 31]},
        {"truth_row": [1], "truth_start": [0], "truth_count": [2], "truth_tokens": [1]},
        {"lut_index": [0], "lut_start": [LUT - 1], "lut_count": [2], "lut_slots": [1, 2]},
    ],
)
def test_changes_that_do_not_fit_are_refused(columns: dict) -> None:
    with pytest.raises(UnusableEventError):
        StateTables(HEADER, backend="cpu").apply_changes(Columns(columns))


def test_what_lies_outside_a_table_is_not_looked_up() -> None:
    table = np.arange(10, 22, dtype=np.int32).reshape(3, 4)
    rows, positions = (both.ravel() for both in np.meshgrid([-1, 0, 1, 2, 3], [-1, 0, 3, 4], indexing="ij"))
    found, inside = look_up(table, rows, positions)
    there = {(row, position) for row in (1, 2) for position in (0, 3)}
    asked = list(zip(rows.tolist(), positions.tolist(), strict=True))
    assert inside.tolist() == [at in there for at in asked]
    assert found.tolist() == [int(table[at]) if at in there else 0 for at in asked]


class Told(StateListener):
    """Keeps which slots may have changed."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def slots_changed(self, group, slots) -> None:
        self.told.append((group, slots.tolist()))

    def group_changed(self, group) -> None:
        self.told.append((group, "all"))


class Applier(EventApplier):
    """Applies events that are no forward."""

    def _plan(self, pool, forward, changes): ...

    def _judge(self, forward, view, steps): ...

    def _write(self, endpoint, half, step, forward): ...


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ([(0, 3, 2)], [(0, [3, 4])]),
        ([(0, 1, 63)], [(0, list(range(1, 64)))]),
        ([(0, 63, 9)], [(0, [63])]),
        ([(0, 0, 1)], [(0, "all")]),  # slot 0 has no reader that watches it
        ([(0, 2, 1), (0, 0, 1)], [(0, "all")]),
        ([(0, 1, 63), (0, 5, 1)], [(0, [*range(1, 64)]), (0, [5])]),
        ([(0, 1, 63), (0, 5, 2)], [(0, "all")]),  # listed more often than there are slots
    ],
)
def test_lost_slots_are_announced(runs: list[tuple[int, int, int]], told: list[tuple]) -> None:
    heard = Told()
    columns = dict(zip(("slot_group", "slot_start", "slot_count"), map(list, zip(*runs, strict=True)), strict=True))
    view = View("loss", SLOTS_LISTED, columns)
    Applier(RecordedState(HEADER).state, backend="cpu", listener=heard).apply_event(view)
    assert heard.told == told


def test_padding_in_slot_0_begins_no_chain() -> None:
    starts = np.full(4, 9, np.int64)
    pool = SimpleNamespace(any_unknown=True, num_slots=4, pool=SimpleNamespace(chain_starts=starts))
    plan = SimpleNamespace(offsets=np.array([0, 2, 3]), seed_slots=np.array([-1, 2]))
    GroupPool.chain(pool, np.array([0, 2, 3]), plan, np.array([5, 7]))
    assert starts.tolist() == [9, 9, 5, 5]
