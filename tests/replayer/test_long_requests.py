"""Requests longer than what loops go over at a time (blocks of 64 positions, chunks of 4,096), as whole replays."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvcanary.recorder.state.tables import StateTables
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import PoolGroup, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import read_trace

from ..support.raw_traces import write_raw
from ..support.short_histories import both, forward, ints

pytestmark = pytest.mark.usefixtures("pass_from_the_start")

PROMPT, MORE = 8_300, 6
SLOTS = PROMPT + 2 * MORE + 20
HEADER = TraceHeader(
    groups=(PoolGroup(name="full", num_slots=SLOTS, halves=("K",)),),
    tables=(StateTable(rows=3, width=PROMPT + MORE),),
    slot_history="",
)


def table_run(row: int, start: int, slots: list[int]) -> dict[str, np.ndarray]:
    return ints(table_index=[0], table_row=[row], table_start=[start], table_count=[len(slots)], table_slots=slots)


def history(*, wrong_at: int | None) -> list[TraceEvent]:
    """A prompt in one chunk, and some decodes of it and of a short request; in the third a table entry is another's slot."""
    slots = list(range(1, PROMPT + 1))
    first = forward([1], [7], [0], [PROMPT], [position % 97 for position in range(PROMPT)], slots)
    first.ints.update(table_run(1, 0, slots))
    events = [first]
    for step in range(MORE):
        mine, other = PROMPT + 1 + 2 * step, PROMPT + 2 + 2 * step
        decode = forward([1, 2], [7, 8], [PROMPT + step, step], [1, 1], [step, step], [mine, other])
        changes = [table_run(1, PROMPT + step, [mine]), table_run(2, step, [other])]
        if step == 2 and wrong_at is not None:
            changes.append(table_run(1, wrong_at, [PROMPT + 2]))  # where the short request has its first token
        decode.ints.update({name: np.concatenate([change[name] for change in changes]) for name in changes[0]})
        events.append(decode)
    return events


def test_a_long_request_is_clean(tmp_path: Path) -> None:
    found = both(history(wrong_at=None), tmp_path, HEADER)
    assert (found.summary.violations, found.summary.findings) == (0, 0)
    assert found.summary.verified > MORE * PROMPT


@pytest.mark.parametrize("position", [4_095, 4_096, 8_191, 8_192, 8_250])
def test_a_wrong_entry_far_behind_is_found_at_its_position(position: int, tmp_path: Path) -> None:
    found = both(history(wrong_at=position), tmp_path, HEADER)
    rows = found.rows.to_pylist()
    assert {row["forward"] for row in rows} == {row["forward"] for row in rows if row["request_id"] == 7}
    # The entry itself, and the one behind it, whose predecessor it is; in this forward and all that follow.
    assert {row["expected_position"] for row in rows} == {position, position + 1}
    assert {row["slot"] for row in rows if row["expected_position"] == position} == {PROMPT + 2}
    assert found.summary.violations == len(rows)


@pytest.mark.parametrize("window", [100, 5_000])
def test_so_it_is_through_a_window(window: int, tmp_path: Path) -> None:
    """What is wrong is found as long as the window reaches it."""
    group = replace(HEADER.groups[0], kind="swa", window=window)
    position = 8_250
    found = both(history(wrong_at=position), tmp_path, replace(HEADER, groups=(group,)))
    assert {row["expected_position"] for row in found.rows.to_pylist()} == {position, position + 1}
    (tmp_path / "early").mkdir()
    early = both(history(wrong_at=8_150), tmp_path / "early", replace(HEADER, groups=(group,)))
    assert bool(early.summary.violations) == (window > 150 + MORE)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tables_take_runs_across_chunks(backend: str, tmp_path: Path) -> None:
    trace = write_raw(tmp_path / "t.arrow", HEADER, history(wrong_at=8_191))
    tables, expected = StateTables(HEADER, backend=backend), np.zeros((3, PROMPT + MORE), np.int64)
    for view in read_trace(trace):
        tables.apply_changes(view)
        at = 0
        for row, start, count in zip(*(view.ints(f"table_{name}") for name in ("row", "start", "count")), strict=True):
            expected[row, start : start + count] = view.ints("table_slots")[at : at + count]
            at += count
    assert np.array_equal(tables.req_to_token[0], expected)
    assert expected[1, 8_191] == PROMPT + 2
