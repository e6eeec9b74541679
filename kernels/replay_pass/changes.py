"""The table and truth changes that an event carries, applied so that they can be taken back.

Whether an event is ordinary shows only once its changes stand in the tables. What was there before goes into a scratch
array, value by value, from which an event that turns out not to be ordinary is undone. What a forward changes by itself
comes last, and stays.
"""

from ..dispatch import In32x2, In64, In64x2, Out8x2, Out32, Out32x2, Out64, Out64x2, primitive
from .cells import HI, LO, invalidate_cell, push
from .layout import (
    GROUP_OFFSET,
    GROUP_TABLE,
    HAS_TRUTH,
    NUM_GROUPS,
    NUM_TABLES,
    GroupHeads,
    GroupLinks,
    GroupPending,
    GroupRows,
    Tables,
)
from .state import INT32_MAX, INT32_MIN


@primitive()
def are_32_bits(values: In64) -> int:
    """Say whether all values are 32-bit numbers; 0 or 1."""
    low = 0
    high = 0
    for i in range(values.shape[0]):  # without a way out, so that several values are looked at at once
        low = min(low, values[i])
        high = max(high, values[i])
    return 1 if low >= INT32_MIN and high <= INT32_MAX else 0


@primitive()
def run_fits(table: In32x2, row: int, start: int, count: int, values: In64, at: int) -> int:
    """Say whether a run of changes lies inside its table and its values, all of them 32-bit numbers; 0 or 1."""
    if row < 0 or row >= table.shape[0] or start < 0 or start > table.shape[1]:
        return 0
    if count < 0 or count > values.shape[0] - at or count > table.shape[1] - start:
        return 0
    return are_32_bits(values[at : at + count])


@primitive()
def touch_run(
    heads: Out32,
    links: Out32x2,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
    table: In32x2,
    row: int,
    start: int,
    values: In64,
    at: int,
    count: int,
) -> None:
    """Make pending, in one group, what depends on the cells of a row that a run of slots is about to change."""
    for i in range(count):
        if int(table[row, start + i]) != values[at + i]:
            invalidate_cell(heads, links, pending, counts, book, row, start + i)


@primitive()
def fill_run(table: Out32x2, row: int, start: int, values: In64, at: int, count: int) -> None:
    """Write a run into a table."""
    for i in range(count):
        table[row, start + i] = values[at + i]


@primitive()
def keep_run(table: In32x2, row: int, start: int, old: Out64, at: int, count: int) -> None:
    """Note what a run of changes will overwrite."""
    for i in range(count):
        old[at + i] = int(table[row, start + i])


@primitive()
def touch_truth_run(
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
    offset: int,
    truth: In32x2,
    row: int,
    start: int,
    values: In64,
    at: int,
    count: int,
) -> None:
    """Make pending, in one group, what was compared with the truth tokens that a run is about to change."""
    if row >= book.shape[0]:
        return
    first = max(start, book[row, LO] + offset)
    last = min(start + count, book[row, HI] + offset)
    for place in range(first, last):
        if int(truth[row, place]) != values[at + place - start]:
            push(pending, counts, book, row, place - offset)


@primitive()
def fill_tables(
    rows: In64,
    prefixes: In64,
    lens: In64,
    sampled_lens: In64,
    sampled: In64,
    written: In64,
    tokens: int,
    settings: In64,
    groups: In64x2,
    tables: Tables,
    truth: Out32x2,
    heads: GroupHeads,
    links: GroupLinks,
    pending: GroupPending,
    counts: GroupLinks,
    books: GroupRows,
) -> None:
    """Put a forward's own slots and sampled tokens into the tables, as the recorder did."""
    for number in range(settings[NUM_TABLES]):
        table = tables[number]
        at = number * tokens
        for r in range(rows.shape[0]):
            if lens[r] == 0:
                continue
            for g in range(settings[NUM_GROUPS]):
                if groups[g, GROUP_TABLE] == number:
                    touch_run(
                        heads[g],
                        links[g],
                        pending[g],
                        counts[g],
                        books[g],
                        table,
                        rows[r],
                        prefixes[r],
                        written,
                        at,
                        lens[r],
                    )
            fill_run(table, rows[r], prefixes[r], written, at, lens[r])
            at += lens[r]
    if settings[HAS_TRUTH] == 0 or sampled_lens.shape[0] == 0:
        return
    at = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        if row == 0:
            continue
        start = prefixes[r] + lens[r]
        count = min(sampled_lens[r], truth.shape[1] - start)
        if count > 0 and row < truth.shape[0]:
            for g in range(settings[NUM_GROUPS]):
                touch_truth_run(
                    pending[g],
                    counts[g],
                    books[g],
                    groups[g, GROUP_OFFSET],
                    truth,
                    row,
                    start,
                    sampled,
                    at,
                    count,
                )
            fill_run(truth, row, start, sampled, at, count)
        at += sampled_lens[r]
