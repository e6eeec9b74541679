"""Whether two full slots that one forward uses lead to the same sliding-window slot."""

import numpy as np

from ..arrays import Int32Array, Int64Array
from ..dispatch import In32x2, In64, Out64, Out64x2, primitive, select


@primitive()
def shared_halves_loops(
    slots: In64,
    positions: In64,
    offsets: In64,
    rows: In64,
    table: In32x2,
    written: In64,
    written_full: In64,
    end: int,
    serial: int,
    partners: Out64x2,
    found: Out64,
    count: Out64,
) -> None:
    """Note each entry and token whose SWA slot is another's; see `shared_halves`."""
    total = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        for i in range(offsets[r], min(offsets[r + 1], slots.shape[0])):
            slot = slots[i]
            if slot <= 0 or slot >= partners.shape[0]:
                continue
            if row < 0 or row >= table.shape[0] or positions[i] < 0 or positions[i] >= table.shape[1]:
                continue
            full = table[row, positions[i]]
            if partners[slot, 0] == serial and partners[slot, 1] != full:
                found[total] = i
                total += 1
            else:
                partners[slot, 0] = serial
                partners[slot, 1] = full
    for i in range(min(end, written.shape[0])):
        slot = written[i]
        if slot <= 0 or slot >= partners.shape[0]:
            continue
        if partners[slot, 0] == serial and partners[slot, 1] != written_full[i]:
            found[total] = slots.shape[0] + i
            total += 1
        else:
            partners[slot, 0] = serial
            partners[slot, 1] = written_full[i]
    count[0] = total


def shared_halves(
    *,
    slots: Int64Array,
    positions: Int64Array,
    offsets: Int64Array,
    rows: Int64Array,
    table: Int32Array,
    written: Int64Array,
    written_full: Int64Array,
    end: int,
    serial: int,
    partners: Int64Array,
    backend: str = "cpu",
) -> Int64Array:
    """Find the entries and tokens of a forward whose SWA slot another full slot of the same forward leads to, too.

    Args:
        slots, positions: `[n] int64`: SWA slots that are read, and their positions; slot 0 is passed over.
        offsets: `[>= bs + 1] int64`, request by request.
        rows: `[bs] int64`.
        table: `[rows, width] int32`: full slots by row and position.
        written, written_full: `[tokens] int64`: SWA and full slots of the tokens; the first `end` are requests'.
        serial: a number > 0 that no earlier call had.
        partners: `[swa slots, 2] int64`, kept between calls: serial and full slot last seen.
        backend: see `dispatch.select`.

    Returns:
        `[m] int64`: entry i, or `n + i` for token i.
    """
    found = np.empty(len(slots) + len(written), np.int64)
    count = np.zeros(1, np.int64)
    loops = select(shared_halves_loops, backend)
    loops(slots, positions, offsets, rows, table, written, written_full, end, serial, partners, found, count)
    return found[: count[0]]
