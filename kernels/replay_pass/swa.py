"""Sliding-window slots of a batch: how far their pool has diverged from the full one, and which have two full slots."""

from ..dispatch import In32x2, In64, Out8x2, Out64, Out64x2, primitive
from .entries import (
    FIRST,
    HI,
    LO,
    NO_SLOTS,
    OTHER_SLOTS,
    EntryStates,
    SlotTable,
    drop_range,
    link,
    make_range_due,
    mark_verified,
    next_due,
)
from .ledger import Found, note_found


def swa_divergence_loops(rows: In64, starts: In64, ends: In64, req_to_token: In32x2, lut: In64, counts: Out64) -> None:
    """Count cached positions without a sliding-window slot, and those with one of another index, `counts` `[2]`.

    `rows`, `starts`, `ends` `[bs]`: positions starts .. ends - 1 of each row (row 0 is padding); slots that the table
    `[rows, width]` or `lut` `[full slots]` does not have are passed over.
    """
    for r in range(rows.shape[0]):
        row = rows[r]
        if row <= 0 or row >= req_to_token.shape[0]:
            continue
        for position in range(max(starts[r], 0), min(ends[r], req_to_token.shape[1])):
            slot = req_to_token[row, position]
            if slot < 0 or slot >= lut.shape[0]:
                continue
            swa = lut[slot]
            if swa == 0:
                counts[0] += 1
            elif swa != slot:
                counts[1] += 1


@primitive()
def uncount(kinds: Out8x2, states: EntryStates, row: int, start: int, end: int) -> None:
    """Take the cells `start .. end - 1` out of their row's figures."""
    for position in range(start, end):
        kind = int(kinds[row, position])
        if kind != 0:
            states.rows[row, NO_SLOTS + kind - 1] -= 1
            kinds[row, position] = 0


@primitive()
def watched_divergence_loops(
    rows: In64, starts: In64, ends: In64, table: SlotTable, states: EntryStates, kinds: Out8x2, figures: Out64
) -> None:
    """Add up what `swa_divergence_loops` counts, of cells that are new or whose full slot's entry changed.

    `states` are linked by full slot (`len(table.lut)` of them), and every change of the two tables makes them due; `kinds`
    `[rows, width]`, kept from call to call: 1 for a cell without a sliding-window slot, 2 for one of another index.
    """
    width, lut = table.req_to_token.shape[1], table.lut
    for r in range(rows.shape[0]):
        row = int(rows[r])
        if row <= 0 or row >= states.rows.shape[0]:
            continue
        end = max(0, min(int(ends[r]), width))
        start = min(max(int(starts[r]), 0), end)
        lo, hi = int(states.rows[row, LO]), int(states.rows[row, HI])
        if start >= hi or end <= lo:
            drop_range(states, row, lo, hi)
            uncount(kinds, states, row, lo, hi)
            lo, hi = start, start
        drop_range(states, row, lo, start)
        uncount(kinds, states, row, lo, min(start, hi))
        drop_range(states, row, end, hi)
        uncount(kinds, states, row, end, hi)
        states.rows[row, LO] = start
        states.rows[row, HI] = end
        make_range_due(states, row, start, lo)
        make_range_due(states, row, hi, end)
        position = next_due(states, row, max(start, int(states.rows[row, FIRST])), end)
        while position < end:
            mark_verified(states, row, position)
            uncount(kinds, states, row, position, position + 1)
            slot = int(table.req_to_token[row, position])
            if 0 <= slot < lut.shape[0]:
                link(states, row * width + position, slot)
                if lut[slot] == 0:
                    kinds[row, position] = 1
                    states.rows[row, NO_SLOTS] += 1
                elif lut[slot] != slot:
                    kinds[row, position] = 2
                    states.rows[row, OTHER_SLOTS] += 1
            position = next_due(states, row, position + 1, end)
        figures[0] += states.rows[row, NO_SLOTS]
        figures[1] += states.rows[row, OTHER_SLOTS]


@primitive(inlined=True)
def has_partner(partners: Out64x2, serial: int, slot: int, full: int) -> int:
    """Say whether an SWA slot has been reached from another full slot with this serial, and note this one if not; 0 or 1."""
    if slot <= 0 or slot >= partners.shape[0]:
        return 0
    if partners[slot, 0] == serial and partners[slot, 1] != full:
        return 1
    partners[slot, 0] = serial
    partners[slot, 1] = full
    return 0


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
    found: Found,
) -> None:
    """Note the entries and tokens of a forward whose SWA slot another full slot of the same forward leads to, too.

    `slots`, `positions` `[n]`: SWA slots that are read, slot 0 being passed over; `offsets` `[>= bs + 1]`, request by request;
    `rows` `[bs]`; `table` `[rows, width]`: full slots by row and position; `written`, `written_full` `[tokens]`: SWA and full
    slots of the tokens, of which the first `end` are requests'; `serial`: a number > 0 that no earlier call had; `partners`
    `[swa slots, 2]`, kept from call to call: serial and full slot last seen. `found` takes entry i, or n + i for token i.
    """
    found.total[0] = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        for i in range(offsets[r], min(offsets[r + 1], slots.shape[0])):
            if row < 0 or row >= table.shape[0] or positions[i] < 0 or positions[i] >= table.shape[1]:
                continue
            if has_partner(partners, serial, slots[i], int(table[row, positions[i]])) == 1:
                note_found(found, i, 0)
    for i in range(min(end, written.shape[0])):
        if has_partner(partners, serial, written[i], written_full[i]) == 1:
            note_found(found, slots.shape[0] + i, 0)
