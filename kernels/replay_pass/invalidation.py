"""What makes prefix entries due: slots that are written, given out or freed, table entries and truth tokens that change.

Each is called before the change is made, so that what stands in the tables is what cells are linked by; only what really
changes is taken for changed. Numbers from a file are checked against the entries before they are used.
"""

from typing import NamedTuple

from ..arrays import Int32Array, Int64Array
from ..dispatch import In32x2, In64, primitive, select
from .entries import EntryStates, SlotTable, bucket_of, full_slot_of, invalidate_cell, invalidate_slot, make_due


class Runs(NamedTuple):
    """Runs of values for a table; a run is `lens[i]` values from `starts[i]` on in row `rows[i]` of table `indices[i]`."""

    indices: In64  # [runs]
    rows: In64  # [runs]
    starts: In64  # [runs]
    lens: In64  # [runs]
    values: In64  # [sum(lens)], run after run


@primitive()
def invalidate_slots_loops(slots: In64, states: EntryStates) -> None:
    """Make due what reads any of the slots."""
    for i in range(slots.shape[0]):
        slot = int(slots[i])
        if 0 < slot < len(states.heads) - 1 and states.heads[slot] != 0:
            invalidate_slot(states, slot)


def invalidate_slots(states: EntryStates, slots: Int64Array, *, backend: str = "cpu") -> None:
    """Make due what reads any of `slots` `[n] int64`; slot 0 and what is no slot are nobody's."""
    select(invalidate_slots_loops, backend)(slots, states)


@primitive(inlined=True)
def invalidate_lut_entry(states: EntryStates, table: SlotTable, place: int, before: int) -> None:
    """Make due what reads a full slot whose entry in the full-to-SWA table changes; it leads to slot `before` until now."""
    bucket = bucket_of(states, before)
    if states.heads[bucket] == 0:
        return
    if not 0 < bucket < len(states.heads) - 1 or full_slot_of(states, table, bucket) == place:
        invalidate_slot(states, bucket)


def invalidate_lut_loops(places: In64, before: In64, table: SlotTable, states: EntryStates) -> None:
    """Make due what reads any of the full slots."""
    for i in range(places.shape[0]):
        invalidate_lut_entry(states, table, int(places[i]), int(before[i]))


def invalidate_lut(
    states: EntryStates, *, places: Int64Array, before: Int64Array, table: SlotTable, backend: str = "cpu"
) -> None:
    """Make due what reads full slots whose entry in the full-to-SWA table changes.

    `places`, `before` `[n] int64`: the full slots, and the buckets that they lead to until now.
    """
    if states.rows.shape[0]:
        select(invalidate_lut_loops, backend)(places, before, table, states)


@primitive()
def invalidate_table_loops(index: int, runs: Runs, table: In32x2, states: EntryStates) -> None:
    """Make due what depends on cells that the runs of one table will change."""
    at = 0
    for run in range(runs.rows.shape[0]):
        count = min(max(runs.lens[run], 0), runs.values.shape[0] - at)
        row, start = int(runs.rows[run]), int(runs.starts[run])
        inside = -count < start < states.due.shape[1]  # no sum is taken of what may be near an int64's end
        if runs.indices[run] == index and inside and 0 <= row < states.rows.shape[0]:
            for i in range(max(0, -start), min(count, states.due.shape[1] - start)):
                if int(table[row, start + i]) != runs.values[at + i]:
                    invalidate_cell(states, row, start + i)
        at += count


def invalidate_table(states: EntryStates, *, index: int, runs: Runs, table: Int32Array, backend: str = "cpu") -> None:
    """Make due what depends on the entries of block table `index` that runs will change; `table` is as it is before."""
    if states.rows.shape[0] and len(runs.rows):
        select(invalidate_table_loops, backend)(index, runs, table, states)


@primitive()
def invalidate_truth_loops(runs: Runs, truth: In32x2, token_offset: int, states: EntryStates) -> None:
    """Make due the entries whose truth token runs will change."""
    at = 0
    for run in range(runs.rows.shape[0]):
        count = min(max(runs.lens[run], 0), runs.values.shape[0] - at)
        row, start = int(runs.rows[run]), int(runs.starts[run])
        inside = -count < start < truth.shape[1]
        if inside and 0 <= row < min(states.rows.shape[0], truth.shape[0]):
            for i in range(max(0, -start), min(count, truth.shape[1] - start)):
                if int(truth[row, start + i]) != runs.values[at + i]:
                    make_due(states, row, start + i - token_offset)
        at += count


def invalidate_truth(
    states: EntryStates, *, runs: Runs, truth: Int32Array, token_offset: int, backend: str = "cpu"
) -> None:
    """Make due the entries whose truth token runs will change; their `indices` are not looked at."""
    if states.rows.shape[0] and len(runs.rows):
        select(invalidate_truth_loops, backend)(runs, truth, token_offset, states)
