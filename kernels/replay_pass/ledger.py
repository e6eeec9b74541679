"""Passes over the slots of a forward that ask who holds each, whose it was, and when its content was written.

The ledger is one row of eight int64 a slot, so that a look-up costs one cache line. Event numbers in it are the
event's number + 1; 0 stands for "none in this trace". Loops note only what is wrong: entry index and what is wrong
with it as bits, for Python to spell out.
"""

from typing import Final, NamedTuple, Self

import numpy as np

from ..arrays import Int64Array
from ..constants import RECORD_POSITION, RECORD_TOKEN
from ..dispatch import In64, In64x2, Out64, Out64x2, primitive

# Columns of a ledger row.
STATE: Final = 0
OWNER: Final = 1  # the request that got the slot last; -1 for the prefix cache or nobody
ALLOC: Final = 2  # event + 1 of the last allocation from the pool
LEFT: Final = 3  # event + 1 at which the slot last left its holder: free, evict, hand-over to the cache
CONTENT: Final = 4  # event + 1 of the last write, copy or transfer that landed
STAMP: Final = 5  # serial of the last forward that writes it
STAMP_REQUEST: Final = 6  # the request that writes it in that forward
JOINER: Final = 7  # the request that joined the slot last since it was given out; -1 for none
LEDGER_COLUMNS: Final = 8

# States. Zero is free, so that slots nobody touches cost no memory; but a slot that no event has named is known to be
# free only where the trace tells of every slot from the engine's start.
FREE: Final = 0
UNKNOWN: Final = 1
HELD: Final = 2
SHARED: Final = 3
CACHED: Final = 4

PADDING_WRITER: Final = -2

# What may be wrong with a read.
READ_FREE: Final = 1
READ_FOREIGN: Final = 2
NEVER_WRITTEN: Final = 4
BEING_WRITTEN: Final = 8
PADDED: Final = 16
DIFFERS: Final = 32
READ_RECYCLED: Final = 64  # given out anew since the request read or wrote it last
AS_BEFORE: Final = 128  # nothing is: nobody has written it since it was given out, and it holds what the reader expects; to be seen again

# What may be wrong with a write.
WRITE_FREE: Final = 1
WRITE_CACHED: Final = 2
WRITE_FOREIGN: Final = 4
WRITTEN_TWICE: Final = 8
PADDED_LIVE: Final = 16
PADDED_WRITTEN: Final = 32  # padding writes what a request of the same forward writes
WRITES_AGAIN: Final = 64  # another token of the same request went there before, in the same forward


class Found(NamedTuple):
    """Where loops note what is wrong: indices of entries or tokens, ascending, and what is wrong with each as bits."""

    places: Out64  # [room]
    bits: Out64  # [room]
    total: Out64  # [1]

    @classmethod
    def allocate(cls, room: int) -> Self:
        """Return room for so many."""
        return cls(np.empty(room, np.int64), np.empty(room, np.int64), np.zeros(1, np.int64))

    def found(self) -> tuple[Int64Array, Int64Array]:
        """Return what was noted, `[n] int64` each."""
        count = int(self.total[0])
        return self.places[:count], self.bits[:count]


class Reads(NamedTuple):
    """A verify plan's entries, and who reads them."""

    slots: In64  # [n]
    positions: In64  # [n]
    tokens: In64  # [n], -1 for an unknown one
    offsets: In64  # [>= bs + 1]: request r reads entries offsets[r] .. offsets[r + 1]
    request_ids: In64  # [bs]
    fresh_from: In64  # [bs]: the first position that the request has neither read nor written before
    seen: In64  # [bs]: event + 1 of the request's forward before this one, 0 for none


@primitive()
def note_found(found: Found, place: int, flags: int) -> None:
    """Note one thing that is wrong."""
    at = found.total[0]
    found.places[at] = place
    found.bits[at] = flags
    found.total[0] = at + 1


@primitive(inlined=True)
def is_free(ledger: In64x2, slot: int, from_start: int) -> int:
    """Say whether a slot is known to be free, as `SlotLedger.free` does; 0 or 1."""
    return 1 if ledger[slot, STATE] == FREE and (from_start != 0 or ledger[slot, LEFT] > 0) else 0


@primitive()
def judge_writes_loops(
    slots: In64, offsets: In64, request_ids: In64, serial: int, from_start: int, ledger: Out64x2, found: Found
) -> None:
    """Note the tokens whose slot is not the writing request's, and stamp every slot with who writes it.

    `slots` `[tokens]`, of which slot 0 and slots outside the pool are passed over; `offsets` `[bs + 1]`: request r writes
    `offsets[r] .. offsets[r + 1]`, what comes behind is padding; `request_ids` `[bs]`: a negative one is nobody's and not
    judged by owner; `serial` > 0: the forward's own number; `from_start`: whether a slot that no event has named is free.
    """
    bs = request_ids.shape[0]
    found.total[0] = 0
    for r in range(bs):
        request = request_ids[r]
        for i in range(offsets[r], min(offsets[r + 1], slots.shape[0])):
            slot = slots[i]
            if slot <= 0 or slot >= ledger.shape[0]:
                continue
            state = ledger[slot, STATE]
            flags = 0
            if is_free(ledger, slot, from_start) == 1:
                flags = WRITE_FREE
            elif request >= 0:
                if state == CACHED:
                    flags = WRITE_CACHED
                elif state in (HELD, SHARED) and ledger[slot, OWNER] != request:
                    flags = WRITE_FOREIGN
            if ledger[slot, STAMP] == serial:
                flags += WRITES_AGAIN if ledger[slot, STAMP_REQUEST] == request else WRITTEN_TWICE
            ledger[slot, STAMP] = serial
            ledger[slot, STAMP_REQUEST] = request
            if flags != 0:
                note_found(found, i, flags)
    for i in range(offsets[bs], slots.shape[0]):
        slot = slots[i]
        if slot <= 0 or slot >= ledger.shape[0]:
            continue
        flags = PADDED_LIVE if ledger[slot, STATE] in (HELD, SHARED, CACHED) else 0
        if ledger[slot, STAMP] == serial and ledger[slot, STAMP_REQUEST] != PADDING_WRITER:
            flags += PADDED_WRITTEN
        if flags != 0:
            note_found(found, i, flags)
        ledger[slot, STAMP] = serial
        ledger[slot, STAMP_REQUEST] = PADDING_WRITER


@primitive()
def judge_reads_loops(
    reads: Reads,
    serial: int,
    complete: int,
    from_start: int,
    ledger: In64x2,
    writers: In64x2,
    records: In64x2,
    found: Found,
) -> None:
    """Note the prefix entries that a request has no business to read, or that do not hold what it expects.

    `serial` and `from_start` as given to `judge_writes_loops`, which must have run before; `complete`: whether the trace has
    every event of every slot, else only what no missing event excuses is found; `writers` `[num_slots, 3]`: event + 1,
    forward, request id of the last write; `records` `[num_slots, 4]`, the canary records of one half.
    """
    slots, positions, tokens = reads.slots, reads.positions, reads.tokens
    found.total[0] = 0
    for r in range(reads.request_ids.shape[0]):
        request, fresh, seen = reads.request_ids[r], reads.fresh_from[r], reads.seen[r]
        for i in range(reads.offsets[r], min(reads.offsets[r + 1], slots.shape[0])):
            slot = slots[i]
            if slot <= 0 or slot >= ledger.shape[0]:
                continue
            state, content, owner = ledger[slot, STATE], ledger[slot, CONTENT], ledger[slot, OWNER]
            flags = 0
            if complete != 0:
                free = is_free(ledger, slot, from_start) == 1
                if free:
                    flags = READ_FREE
                elif content < ledger[slot, ALLOC]:
                    # Given out, given back unwritten and lent again, it may hold what it did: the canary sees by the chain if not.
                    same = writers[slot, 0] > 0 and records[slot, RECORD_POSITION] == positions[i]
                    same = same and tokens[i] != -1 and records[slot, RECORD_TOKEN] == tokens[i]
                    flags = AS_BEFORE if same else NEVER_WRITTEN
                if state == HELD and request >= 0 and owner != request:
                    flags += READ_FOREIGN
                mine = not free and positions[i] < fresh
                if mine and 0 < seen < ledger[slot, ALLOC] and ledger[slot, JOINER] != request:
                    flags += READ_RECYCLED
            elif state == HELD and owner != request and 0 < content < ledger[slot, ALLOC]:
                flags = NEVER_WRITTEN
            elif (
                state == FREE
                and positions[i] < fresh
                and 0 < seen < ledger[slot, LEFT]
                and content < ledger[slot, LEFT]
            ):
                flags = READ_FREE  # given back between two forwards of a request that goes on reading it
            if ledger[slot, STAMP] == serial:
                if ledger[slot, STAMP_REQUEST] == PADDING_WRITER:
                    flags += PADDED
                elif ledger[slot, STAMP_REQUEST] != request:
                    flags += BEING_WRITTEN
            hit = positions[i] >= fresh and writers[slot, 0] > 0 and writers[slot, 2] != request
            if hit and (
                records[slot, RECORD_POSITION] != positions[i]
                or (tokens[i] != -1 and records[slot, RECORD_TOKEN] != tokens[i])
            ):
                flags += DIFFERS
            if flags != 0:
                note_found(found, i, flags)


@primitive()
def note_writes_loops(slots: In64, end: int, event: int, ledger: Out64x2) -> None:
    """Note that event `event` (+ 1) wrote the first `end` of `slots` `[tokens]`."""
    for i in range(min(end, slots.shape[0])):
        slot = slots[i]
        if 0 < slot < ledger.shape[0]:
            ledger[slot, CONTENT] = event
