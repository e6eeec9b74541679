"""Applying what a trace recorded to the rebuilt state: runs of table entries, a forward's own slots, KV bytes.

Slots, rows and positions come from a file, so every index is checked against its array before it is used: what falls
outside is passed over and counted, never written elsewhere.
"""

from typing import Final

from ..constants import SLOT_OUT_OF_RANGE
from ..dispatch import In8x2, In32x2, In64, Out8x2, Out32, Out32x2, Out64, Out64x2, primitive
from .entries import Runs

INT32_MIN: Final = -(1 << 31)
INT32_MAX: Final = (1 << 31) - 1


@primitive()
def apply_runs_loops(index: int, runs: Runs, table: Out32x2, outside: Out64) -> None:
    """Write the runs of table `index`, all if that is -1, into it; `outside` `[1]` takes how many values lie outside it or are
    no int32.

    It takes -1 if lens and values do not fit one another.
    """
    at = 0
    outside[0] = 0
    for run in range(runs.rows.shape[0]):
        row, start, count = runs.rows[run], runs.starts[run], runs.lens[run]
        if count < 0 or count > runs.values.shape[0] - at:
            outside[0] = -1
            return
        if index < 0 or runs.indices[run] == index:
            if row < 0 or row >= table.shape[0] or start < 0 or start > table.shape[1]:
                outside[0] += count
            else:
                inside = min(count, table.shape[1] - start)
                for i in range(inside):
                    value = runs.values[at + i]
                    if INT32_MIN <= value <= INT32_MAX:
                        table[row, start + i] = value
                    else:
                        outside[0] += 1
                outside[0] += count - inside
        at += count
    if at != runs.values.shape[0]:
        outside[0] = -1


@primitive()
def apply_forward_loops(rows: In64, prefix_lens: In64, lens: In64, values: In64, table: Out32x2) -> None:
    """Write each request's run of `values` at `table[row, prefix ...]`, as both sides do after a forward.

    `rows`, `prefix_lens`, `lens` `[bs]`: row 0 (padding) takes no values, a negative length counts as 0; `values`
    `[>= sum(lens)]`: slots for a block table, sampled tokens for the truth table.
    """
    at = 0
    for r in range(rows.shape[0]):
        # Never past the values: hostile lengths must add up neither to an overflow nor to an endless loop.
        count = min(max(lens[r], 0), values.shape[0] - at)
        row = rows[r]
        if row == 0:
            continue  # a padding row takes no part, and its tokens come last
        for i in range(count):
            position = prefix_lens[r] + i
            if 0 < row < table.shape[0] and 0 <= position < table.shape[1]:
                table[row, position] = values[at + i]
        at += count


@primitive()
def translate_loops(slots: In64, lut: In64, out: Out64, outside: Out64) -> None:
    """Translate full-pool slots `[n]` to SWA slots; negative ones pass through.

    A slot beyond `lut` `[full slots]` becomes `SLOT_OUT_OF_RANGE`, and adds to `outside` `[1]`.
    """
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot < 0:
            out[i] = slot
        elif slot >= lut.shape[0]:
            out[i] = SLOT_OUT_OF_RANGE
            outside[0] += 1
        else:
            out[i] = lut[slot]


def store_bytes_loops(slots: In64, data: In8x2, pool: Out8x2) -> None:
    """Put the captured bytes of each slot into a rebuilt pool, in order, so that a repeated slot keeps the last.

    `slots` `[n]`: those outside the pool are passed over; `data` `[n, capture_bytes]`; `pool` `[num_slots, capture_bytes]`.
    """
    width = pool.shape[1]
    for i in range(slots.shape[0]):
        slot = slots[i]
        if 0 <= slot < pool.shape[0]:
            for k in range(width):
                pool[slot, k] = data[i, k]


@primitive()
def mark_writer_loops(
    slots: In64, offsets: In64, request_ids: In64, event: int, forward: int, writers: Out64x2
) -> None:
    """Note who wrote each slot: `writers[slot] = event, forward, request id`.

    `slots` `[tokens]`: those outside the pool are passed over; `offsets` `[bs + 1]`: prefix sums of the requests' written
    tokens; `request_ids` `[bs]`; `writers` `[num_slots, 3]`.
    """
    for r in range(request_ids.shape[0]):
        for i in range(offsets[r], min(offsets[r + 1], slots.shape[0])):
            slot = slots[i]
            if 0 <= slot < writers.shape[0]:
                writers[slot, 0] = event
                writers[slot, 1] = forward
                writers[slot, 2] = request_ids[r]


def read_cells_loops(
    rows: In64, starts: In64, counts: In64, table: In32x2, base: int, cells: Out64, values: Out32, filled: Out64
) -> None:
    """Append the cells of runs of a table, numbered from `base` on row by row, and their values.

    `rows`, `starts`, `counts` `[n]`: run i is `table[rows[i], starts[i] ...]`, `counts[i]` cells; what lies outside is left
    out. `cells`, `values` `[room]`; runs that find no room are cut. `filled` `[1]`: how many are there already, moved on.
    """
    at = filled[0]
    for run in range(rows.shape[0]):
        row = rows[run]
        if row < 0 or row >= table.shape[0]:
            continue
        start = min(max(starts[run], 0), table.shape[1])
        end = start + min(max(counts[run], 0), table.shape[1] - start, cells.shape[0] - at)
        for position in range(start, end):
            cells[at] = base + row * table.shape[1] + position
            values[at] = table[row, position]
            at += 1
    filled[0] = at


# What every replay and recording runs, whatever it finds.
STATE_LOOPS: Final = (apply_runs_loops, apply_forward_loops, translate_loops, store_bytes_loops, mark_writer_loops)
