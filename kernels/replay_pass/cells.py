"""Cells: which prefix entries of a pool group must be looked at again, because something that they depend on changed.

A cell is a (row, position) of a block table. An *entry* is a cell that a forward reads: it asks for the record of the
cell's slot, its bytes, and the record of the slot of the cell before it. A row watches the entries `[LO, HI)`; each is
either pending (to be looked at when the row is read next) or clean: it was looked at, nothing was found, and nothing
that it depends on has changed since. The cells of a clean entry, its own and the one before it, are linked under the
slot that they lead to, so that a change of a slot finds its readers.

What may never be broken: a clean entry's two cells are linked; a linked cell leads to the slot that it is linked under;
pending flags stand inside `[LO, HI)` only. To push an entry, or to invalidate a slot, too often is always harmless.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from ..dispatch import In32x2, In64, Out8x2, Out32, Out32x2, Out64x2, primitive
from ..sparse import sparse_zeros

# Columns of a row's book.
LO: Final = 0  # the first position under watch
HI: Final = 1  # the position behind the last one
REQUEST: Final = 2  # who read the row last
EVENT: Final = 3  # in which event
TRUTH: Final = 4  # clean entries whose truth position is below it were compared with the truth tokens
PENDING: Final = 5  # how many entries are pending
FIRST: Final = 6  # no entry before it is pending
STAMP: Final = 7  # serial of the last forward that reads the row; negative where it reads it twice
NO_SLOTS: Final = 8  # of divergence: cells under watch without a sliding-window slot
OTHER_SLOTS: Final = 9  # of divergence: cells under watch whose sliding-window slot has another index
BOOK_COLUMNS: Final = 10

# Columns of a cell's links. Cells are named by their number + 1, so that 0 is none and untouched pages stay zero.
AFTER: Final = 0
BEFORE: Final = 1  # - (bucket + 1) for the first cell of a list, 0 where the cell is not linked

BLOCK_BITS: Final = 6
CHUNK_BITS: Final = 12
MAX_CELLS: Final = (1 << 31) - 2
_MAX_TRUTH: Final = 1 << 61  # hostile lengths, less an offset, must not wrap around


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """What is known of the cells of one block table, for one pool group; all zero pages until touched.

    `heads` `[slots + 1] int32`: the first cell linked under each slot; the last is for all that are no slots.
    `links` `[rows * width, 2] int32`: the next and the previous cell of the list, see above.
    `pending` `[rows, width] uint8`: 1 where an entry is pending. `counts` `[rows, blocks + chunks] int32`: how many are,
    by blocks of 64 positions and behind those by chunks of 4,096. `book` `[rows, 10] int64`, see above.

    A table of 2^31 cells or more, or a pool of as many slots, is not watched: it has no rows here, and every entry of it
    is always looked at.
    """

    heads: npt.NDArray[np.int32]
    links: npt.NDArray[np.int32]
    pending: npt.NDArray[np.uint8]
    counts: npt.NDArray[np.int32]
    book: npt.NDArray[np.int64]

    @classmethod
    def allocate(cls, *, rows: int, width: int, slots: int) -> Self:
        """Return cells that watch nothing, of a table `[rows, width]` whose entries lead to `slots` slots."""
        if rows * width > MAX_CELLS or slots > MAX_CELLS or rows <= 0 or width <= 0:
            rows, width = 0, 0
        blocks, chunks = (width + 63) >> BLOCK_BITS, (width + 4095) >> CHUNK_BITS
        return cls(
            heads=np.zeros(slots + 1, np.int32),
            links=sparse_zeros((rows * width, 2), np.int32),
            pending=sparse_zeros((rows, width), np.uint8),
            counts=np.zeros((rows, blocks + chunks), np.int32),
            book=np.zeros((rows, BOOK_COLUMNS), np.int64),
        )


@primitive(inlined=True)
def push(pending: Out8x2, counts: Out32x2, book: Out64x2, row: int, position: int) -> None:
    """Make an entry pending if its row watches it; the row must be one of the table's."""
    if position < book[row, LO] or position >= book[row, HI] or pending[row, position] != 0:
        return
    blocks = (pending.shape[1] + 63) >> BLOCK_BITS
    pending[row, position] = 1
    counts[row, position >> BLOCK_BITS] += 1
    counts[row, blocks + (position >> CHUNK_BITS)] += 1
    if book[row, PENDING] == 0 or position < book[row, FIRST]:
        book[row, FIRST] = position
    book[row, PENDING] += 1


@primitive()
def push_range(pending: Out8x2, counts: Out32x2, book: Out64x2, row: int, start: int, end: int) -> None:
    """Make the entries `start .. end - 1` pending, those that the row watches."""
    for position in range(max(start, book[row, LO]), min(end, book[row, HI])):
        push(pending, counts, book, row, position)


@primitive(inlined=True)
def settle(pending: Out8x2, counts: Out32x2, book: Out64x2, row: int, position: int) -> None:
    """Take a pending entry off the list of what is pending."""
    blocks = (pending.shape[1] + 63) >> BLOCK_BITS
    pending[row, position] = 0
    counts[row, position >> BLOCK_BITS] -= 1
    counts[row, blocks + (position >> CHUNK_BITS)] -= 1
    book[row, PENDING] -= 1


@primitive(inlined=True)
def next_pending(pending: Out8x2, counts: Out32x2, row: int, position: int, end: int) -> int:
    """Return the first pending position from `position` on, `end` where there is none before it."""
    blocks = (pending.shape[1] + 63) >> BLOCK_BITS
    while position < end:
        if counts[row, blocks + (position >> CHUNK_BITS)] == 0:
            position = ((position >> CHUNK_BITS) + 1) << CHUNK_BITS
        elif counts[row, position >> BLOCK_BITS] == 0:
            position = ((position >> BLOCK_BITS) + 1) << BLOCK_BITS
        elif pending[row, position] != 0:
            return position
        else:
            position += 1
    return end


@primitive()
def drop_range(pending: Out8x2, counts: Out32x2, book: Out64x2, row: int, start: int, end: int) -> None:
    """Forget what is pending in `start .. end - 1`, which the row no longer watches."""
    if book[row, PENDING] == 0:
        return
    position = next_pending(pending, counts, row, max(start, book[row, FIRST]), end)
    while position < end and book[row, PENDING] > 0:
        settle(pending, counts, book, row, position)
        position = next_pending(pending, counts, row, position + 1, end)


@primitive()
def watch(
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
    row: int,
    request: int,
    event: int,
    start: int,
    end: int,
    truth_len: int,
    token_offset: int,
) -> None:
    """Watch the entries `start .. end - 1` of a row from now on; those that were not watched before are pending.

    Another request, or an event that is no later than the one before, has seen nothing of the row yet. `truth_len` is
    how many truth tokens the forward has, 0 for none: entries that get a truth token which they had not are pending.
    The row must be one of the table's, `end` at most its width.
    """
    lo, hi = book[row, LO], book[row, HI]
    truth_len = max(0, min(truth_len, _MAX_TRUTH))
    known = book[row, REQUEST] == request and book[row, EVENT] < event and lo < end and start < hi
    if known and start < end:
        drop_range(pending, counts, book, row, lo, start)
        drop_range(pending, counts, book, row, end, hi)
        book[row, LO] = start
        book[row, HI] = end
        push_range(pending, counts, book, row, start, lo)
        push_range(pending, counts, book, row, hi, end)
        before = book[row, TRUTH]
        if truth_len > before:
            push_range(pending, counts, book, row, before - token_offset, truth_len - token_offset)
            book[row, TRUTH] = truth_len
    else:
        drop_range(pending, counts, book, row, lo, hi)
        book[row, LO] = start
        book[row, HI] = max(start, end)
        push_range(pending, counts, book, row, start, end)
        book[row, TRUTH] = truth_len
    book[row, REQUEST] = request
    book[row, EVENT] = event


@primitive()
def unwatch(pending: Out8x2, counts: Out32x2, book: Out64x2, row: int) -> None:
    """Watch nothing of a row."""
    drop_range(pending, counts, book, row, book[row, LO], book[row, HI])
    book[row, LO] = 0
    book[row, HI] = 0


@primitive(inlined=True)
def link(heads: Out32, links: Out32x2, cell: int, bucket: int) -> None:
    """Put a cell at the head of a list, unless it is linked already: then it is linked there."""
    if links[cell, BEFORE] != 0:
        return
    after = int(heads[bucket])
    links[cell, AFTER] = after
    links[cell, BEFORE] = -bucket - 1
    if after != 0:
        links[after - 1, BEFORE] = cell + 1
    heads[bucket] = cell + 1


@primitive(inlined=True)
def unlink(heads: Out32, links: Out32x2, cell: int) -> None:
    """Take a cell out of its list, if it is in one."""
    before, after = int(links[cell, BEFORE]), int(links[cell, AFTER])
    if before == 0:
        return
    if before < 0:
        heads[-before - 1] = after
    else:
        links[before - 1, AFTER] = after
    if after != 0:
        links[after - 1, BEFORE] = before
    links[cell, AFTER] = 0
    links[cell, BEFORE] = 0


@primitive(inlined=True)
def invalidate_slot(heads: Out32, links: Out32x2, pending: Out8x2, counts: Out32x2, book: Out64x2, bucket: int) -> None:
    """Make every entry pending that reads a slot, or whose predecessor's slot it is; the list is empty then."""
    width = pending.shape[1]
    node = int(heads[bucket])
    heads[bucket] = 0
    while node != 0:
        cell = node - 1
        node = int(links[cell, AFTER])
        links[cell, AFTER] = 0
        links[cell, BEFORE] = 0
        row = cell // width
        position = cell - row * width
        push(pending, counts, book, row, position)
        push(pending, counts, book, row, position + 1)


@primitive(inlined=True)
def invalidate_cell(
    heads: Out32, links: Out32x2, pending: Out8x2, counts: Out32x2, book: Out64x2, row: int, position: int
) -> None:
    """Make the entries pending that depend on what a cell of the table leads to; the cell must be there."""
    unlink(heads, links, row * pending.shape[1] + position)
    push(pending, counts, book, row, position)
    push(pending, counts, book, row, position + 1)


@primitive(inlined=True)
def bucket_of(heads: Out32, slot: int) -> int:
    """Return the list that a slot's cells are linked in."""
    return slot if 0 <= slot < len(heads) - 1 else len(heads) - 1


@primitive(inlined=True)
def slot_of(req_to_token: In32x2, lut: In64, has_lut: int, row: int, position: int) -> int:
    """Return the slot that a cell of the table leads to, -1 for one that the full-to-SWA table does not have."""
    slot = int(req_to_token[row, position])
    if has_lut == 0 or slot < 0:
        return slot
    return int(lut[slot]) if slot < len(lut) else -1


@primitive(inlined=True)
def led_from(heads: Out32, req_to_token: In32x2, slot: int) -> int:
    """Return the full slot that the cells linked under a slot hold; they all hold the same. There must be a cell."""
    cell = int(heads[slot]) - 1
    row = cell // req_to_token.shape[1]
    return int(req_to_token[row, cell - row * req_to_token.shape[1]])


@primitive(inlined=True)
def link_cell(
    req_to_token: In32x2, lut: In64, has_lut: int, heads: Out32, links: Out32x2, row: int, position: int
) -> int:
    """Link a cell under the slot that it leads to, and return 1; 0 where another full slot leads there, too.

    Without a full-to-SWA table a cell that leads to no slot, or to padding, depends on nothing but the table: it needs
    no link.
    """
    slot = slot_of(req_to_token, lut, has_lut, row, position)
    bucket = bucket_of(heads, slot)
    cell = row * req_to_token.shape[1] + position
    if has_lut == 0:
        if slot > 0 and bucket == slot:
            link(heads, links, cell, bucket)
        return 1
    listed = slot > 0 and bucket == slot and heads[slot] != 0
    if listed and links[cell, BEFORE] == 0 and led_from(heads, req_to_token, slot) != int(req_to_token[row, position]):
        return 0
    link(heads, links, cell, bucket)
    return 1


@primitive(inlined=True)
def link_entry(
    req_to_token: In32x2, lut: In64, has_lut: int, heads: Out32, links: Out32x2, row: int, position: int
) -> int:
    """Link both cells of an entry that is clean, and return 1; 0 where it cannot be, and must stay pending."""
    if position > 0 and link_cell(req_to_token, lut, has_lut, heads, links, row, position - 1) == 0:
        return 0
    return link_cell(req_to_token, lut, has_lut, heads, links, row, position)
