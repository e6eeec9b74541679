"""Which prefix entries of a pool group must be verified again, because something that they depend on changed.

A *cell* is a (row, position) of a block table. An *entry* is a cell that a forward reads: it asks for the record of the
cell's slot, its bytes, and the record of the slot of the cell before it. A row watches the entries `[LO, HI)`; each is
either due (to be verified when the row is read next) or verified: nothing was found about it, and nothing that it
depends on has changed since. The cells of a verified entry, its own and the one before it, are linked under the slot
that they lead to, so that a change of a slot finds its readers.

What may never be broken: a verified entry's two cells are linked; a linked cell leads to the slot that it is linked under;
due flags stand inside `[LO, HI)` only. To make an entry due, or to invalidate a slot, too often is always harmless.
"""

from typing import Final, NamedTuple

import numpy as np

from ..dispatch import In32x2, In64, Out8x2, Out32, Out32x2, Out64x2, primitive
from ..sparse import sparse_zeros

# Columns of `EntryStates.rows`.
LO: Final = 0  # the first position under watch
HI: Final = 1  # the position behind the last one
REQUEST: Final = 2  # who read the row last
EVENT: Final = 3  # in which event
TRUTH: Final = 4  # verified entries whose truth position is below it were compared with the truth tokens
NUM_DUE: Final = 5  # how many entries are due
FIRST: Final = 6  # no entry before it is due
STAMP: Final = 7  # serial of the last forward that reads the row; negative where it reads it twice
NO_SLOTS: Final = 8  # of divergence: cells under watch without a sliding-window slot
OTHER_SLOTS: Final = 9  # of divergence: cells under watch whose sliding-window slot has another index
ROW_COLUMNS: Final = 10

# Columns of a cell's links. Cells are named by their number + 1, so that 0 is none and untouched pages stay zero.
AFTER: Final = 0
BEFORE: Final = 1  # - (bucket + 1) for the first cell of a list, 0 where the cell is not linked

BLOCK_BITS: Final = 6
CHUNK_BITS: Final = 12
MAX_CELLS: Final = (1 << 31) - 2
_MAX_TRUTH: Final = 1 << 61  # hostile lengths, less an offset, must not wrap around


class EntryStates(NamedTuple):
    """What is known of the entries of one block table, for one pool group; all zero pages until touched.

    `counts` has due entries by blocks of 64 positions, and behind those by chunks of 4,096.
    """

    heads: Out32  # [slots + 1]: the first cell linked under each slot; the last is for all that are no slots
    links: Out32x2  # [rows * width, 2]: the next and the previous cell of the list, see above
    due: Out8x2  # [rows, width]: 1 where an entry is due
    counts: Out32x2  # [rows, blocks + chunks]
    rows: Out64x2  # [rows, 10], see above


class SlotTable(NamedTuple):
    """A block table, and the full-to-SWA table behind it."""

    req_to_token: In32x2  # [rows, width]
    lut: In64  # [full slots]; [0] if the table's slots are the pool's own


def allocate_states(*, rows: int, width: int, slots: int) -> EntryStates:
    """Return states that watch nothing, of a table `[rows, width]` whose entries lead to `slots` slots.

    A table of 2^31 cells or more, or a pool of as many slots, is not watched: it has no rows here, and every entry of it
    is always due.
    """
    if rows * width > MAX_CELLS or slots > MAX_CELLS or rows <= 0 or width <= 0:
        rows, width = 0, 0
    blocks, chunks = (width + 63) >> BLOCK_BITS, (width + 4095) >> CHUNK_BITS
    return EntryStates(
        heads=np.zeros(slots + 1, np.int32),
        links=sparse_zeros((rows * width, 2), np.int32),
        due=sparse_zeros((rows, width), np.uint8),
        counts=np.zeros((rows, blocks + chunks), np.int32),
        rows=np.zeros((rows, ROW_COLUMNS), np.int64),
    )


@primitive(inlined=True)
def make_due(states: EntryStates, row: int, position: int) -> None:
    """Make an entry due if its row watches it; the row must be one of the table's."""
    if position < states.rows[row, LO] or position >= states.rows[row, HI] or states.due[row, position] != 0:
        return
    blocks = (states.due.shape[1] + 63) >> BLOCK_BITS
    states.due[row, position] = 1
    states.counts[row, position >> BLOCK_BITS] += 1
    states.counts[row, blocks + (position >> CHUNK_BITS)] += 1
    if states.rows[row, NUM_DUE] == 0 or position < states.rows[row, FIRST]:
        states.rows[row, FIRST] = position
    states.rows[row, NUM_DUE] += 1


@primitive()
def make_range_due(states: EntryStates, row: int, start: int, end: int) -> None:
    """Make the entries `start .. end - 1` due, those that the row watches."""
    for position in range(max(start, states.rows[row, LO]), min(end, states.rows[row, HI])):
        make_due(states, row, position)


@primitive(inlined=True)
def mark_verified(states: EntryStates, row: int, position: int) -> None:
    """Take an entry for verified that was due."""
    blocks = (states.due.shape[1] + 63) >> BLOCK_BITS
    states.due[row, position] = 0
    states.counts[row, position >> BLOCK_BITS] -= 1
    states.counts[row, blocks + (position >> CHUNK_BITS)] -= 1
    states.rows[row, NUM_DUE] -= 1


@primitive(inlined=True)
def next_due(states: EntryStates, row: int, position: int, end: int) -> int:
    """Return the first due position from `position` on, `end` if there is none before it."""
    blocks = (states.due.shape[1] + 63) >> BLOCK_BITS
    while position < end:
        if states.counts[row, blocks + (position >> CHUNK_BITS)] == 0:
            position = ((position >> CHUNK_BITS) + 1) << CHUNK_BITS
        elif states.counts[row, position >> BLOCK_BITS] == 0:
            position = ((position >> BLOCK_BITS) + 1) << BLOCK_BITS
        elif states.due[row, position] != 0:
            return position
        else:
            position += 1
    return end


@primitive()
def drop_range(states: EntryStates, row: int, start: int, end: int) -> None:
    """Forget what is due in `start .. end - 1`, which the row no longer watches."""
    if states.rows[row, NUM_DUE] == 0:
        return
    position = next_due(states, row, max(start, states.rows[row, FIRST]), end)
    while position < end and states.rows[row, NUM_DUE] > 0:
        mark_verified(states, row, position)
        position = next_due(states, row, position + 1, end)


@primitive()
def watch(
    states: EntryStates, row: int, request: int, event: int, start: int, end: int, truth_len: int, token_offset: int
) -> None:
    """Watch the entries `start .. end - 1` of a row from now on; those that were not watched before are due.

    Another request, or an event that is no later than the one before, has seen nothing of the row yet. `truth_len` is
    how many truth tokens the forward has, 0 for none: entries that get a truth token which they had not are due.
    The row must be one of the table's, `end` at most its width.
    """
    lo, hi = states.rows[row, LO], states.rows[row, HI]
    truth_len = max(0, min(truth_len, _MAX_TRUTH))
    known = states.rows[row, REQUEST] == request and states.rows[row, EVENT] < event and lo < end and start < hi
    if known and start < end:
        drop_range(states, row, lo, start)
        drop_range(states, row, end, hi)
        states.rows[row, LO] = start
        states.rows[row, HI] = end
        make_range_due(states, row, start, lo)
        make_range_due(states, row, hi, end)
        before = states.rows[row, TRUTH]
        if truth_len > before:
            make_range_due(states, row, before - token_offset, truth_len - token_offset)
            states.rows[row, TRUTH] = truth_len
    else:
        drop_range(states, row, lo, hi)
        states.rows[row, LO] = start
        states.rows[row, HI] = max(start, end)
        make_range_due(states, row, start, end)
        states.rows[row, TRUTH] = truth_len
    states.rows[row, REQUEST] = request
    states.rows[row, EVENT] = event


@primitive()
def unwatch(states: EntryStates, row: int) -> None:
    """Watch nothing of a row."""
    drop_range(states, row, states.rows[row, LO], states.rows[row, HI])
    states.rows[row, LO] = 0
    states.rows[row, HI] = 0


@primitive(inlined=True)
def link(states: EntryStates, cell: int, bucket: int) -> None:
    """Put a cell at the head of a list, unless it is linked already: then it is linked there."""
    if states.links[cell, BEFORE] != 0:
        return
    after = int(states.heads[bucket])
    states.links[cell, AFTER] = after
    states.links[cell, BEFORE] = -bucket - 1
    if after != 0:
        states.links[after - 1, BEFORE] = cell + 1
    states.heads[bucket] = cell + 1


@primitive(inlined=True)
def unlink(states: EntryStates, cell: int) -> None:
    """Take a cell out of its list, if it is in one."""
    before, after = int(states.links[cell, BEFORE]), int(states.links[cell, AFTER])
    if before == 0:
        return
    if before < 0:
        states.heads[-before - 1] = after
    else:
        states.links[before - 1, AFTER] = after
    if after != 0:
        states.links[after - 1, BEFORE] = before
    states.links[cell, AFTER] = 0
    states.links[cell, BEFORE] = 0


@primitive(inlined=True)
def invalidate_slot(states: EntryStates, bucket: int) -> None:
    """Make every entry due that reads a slot, or whose predecessor's slot it is; the list is empty then."""
    width = states.due.shape[1]
    node = int(states.heads[bucket])
    states.heads[bucket] = 0
    while node != 0:
        cell = node - 1
        node = int(states.links[cell, AFTER])
        states.links[cell, AFTER] = 0
        states.links[cell, BEFORE] = 0
        row = cell // width
        position = cell - row * width
        make_due(states, row, position)
        make_due(states, row, position + 1)


@primitive(inlined=True)
def invalidate_cell(states: EntryStates, row: int, position: int) -> None:
    """Make the entries due that depend on what a cell of the table leads to; the cell must be there."""
    unlink(states, row * states.due.shape[1] + position)
    make_due(states, row, position)
    make_due(states, row, position + 1)


@primitive(inlined=True)
def bucket_of(states: EntryStates, slot: int) -> int:
    """Return the list that a slot's cells are linked in."""
    return slot if 0 <= slot < len(states.heads) - 1 else len(states.heads) - 1


@primitive(inlined=True)
def slot_of(table: SlotTable, row: int, position: int) -> int:
    """Return the slot that a cell of the table leads to, -1 for one that the full-to-SWA table does not have."""
    slot = int(table.req_to_token[row, position])
    if len(table.lut) == 0 or slot < 0:
        return slot
    return int(table.lut[slot]) if slot < len(table.lut) else -1


@primitive(inlined=True)
def full_slot_of(states: EntryStates, table: SlotTable, slot: int) -> int:
    """Return the full slot that the cells linked under a slot hold; they all hold the same. There must be a cell."""
    cell = int(states.heads[slot]) - 1
    width = table.req_to_token.shape[1]
    row = cell // width
    return int(table.req_to_token[row, cell - row * width])


@primitive(inlined=True)
def link_cell(states: EntryStates, table: SlotTable, row: int, position: int) -> int:
    """Link a cell under the slot that it leads to, and return 1; 0 if another full slot leads there, too.

    Without a full-to-SWA table a cell that leads to no slot, or to padding, depends on nothing but the table: it needs
    no link.
    """
    slot = slot_of(table, row, position)
    bucket = bucket_of(states, slot)
    cell = row * table.req_to_token.shape[1] + position
    if len(table.lut) == 0:
        if slot > 0 and bucket == slot:
            link(states, cell, bucket)
        return 1
    listed = slot > 0 and bucket == slot and states.heads[slot] != 0 and states.links[cell, BEFORE] == 0
    if listed and full_slot_of(states, table, slot) != int(table.req_to_token[row, position]):
        return 0
    link(states, cell, bucket)
    return 1


@primitive(inlined=True)
def link_entry(states: EntryStates, table: SlotTable, row: int, position: int) -> int:
    """Link both cells of an entry that is clean, and return 1; 0 if it cannot be, and must stay due."""
    if position > 0 and link_cell(states, table, row, position - 1) == 0:
        return 0
    return link_cell(states, table, row, position)


# --- what makes entries due: slots that are written, given out or freed, table entries and truth tokens that change
#
# Each is called before the change is made, so that what stands in the tables is what cells are linked by; only what really
# changes is taken for changed. Numbers from a file are checked against the entries before they are used.


class Runs(NamedTuple):
    """Runs of values for a table; a run is `lens[i]` values from `starts[i]` on in row `rows[i]` of table `indices[i]`."""

    indices: In64  # [runs]
    rows: In64  # [runs]
    starts: In64  # [runs]
    lens: In64  # [runs]
    values: In64  # [sum(lens)], run after run


@primitive()
def invalidate_slots_loops(slots: In64, states: EntryStates) -> None:
    """Make due what reads any of `slots` `[n]`; slot 0 and what is no slot are nobody's."""
    for i in range(slots.shape[0]):
        slot = int(slots[i])
        if 0 < slot < len(states.heads) - 1 and states.heads[slot] != 0:
            invalidate_slot(states, slot)


@primitive(inlined=True)
def invalidate_lut_entry(states: EntryStates, table: SlotTable, place: int, before: int) -> None:
    """Make due what reads a full slot whose entry in the full-to-SWA table changes; it leads to slot `before` until now."""
    bucket = bucket_of(states, before)
    if states.heads[bucket] == 0:
        return
    if not 0 < bucket < len(states.heads) - 1 or full_slot_of(states, table, bucket) == place:
        invalidate_slot(states, bucket)


def invalidate_lut_loops(places: In64, before: In64, table: SlotTable, states: EntryStates) -> None:
    """Make due what reads full slots `places` `[n]` whose entry in the full-to-SWA table changes.

    `before` `[n]`: the buckets that they lead to until now.
    """
    if states.rows.shape[0] == 0:
        return
    for i in range(places.shape[0]):
        invalidate_lut_entry(states, table, int(places[i]), int(before[i]))


@primitive()
def invalidate_table_loops(index: int, runs: Runs, table: In32x2, states: EntryStates) -> None:
    """Make due what depends on cells of table `index` that runs will change; `table` is as it is before."""
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


@primitive()
def invalidate_truth_loops(runs: Runs, truth: In32x2, token_offset: int, states: EntryStates) -> None:
    """Make due the entries whose truth token runs will change; their `indices` are not looked at."""
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
