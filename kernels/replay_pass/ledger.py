"""Passes over the slots of a forward that ask who holds each, whose it was, and when its content was written.

The ledger is one row of eight int64 a slot, so that a look-up costs one cache line. Event numbers in it are the
event's number + 1; 0 stands for "none in this trace". Loops note only what is wrong: entry index and what is wrong
with it as bits, for Python to spell out.
"""

from typing import Final

import numpy as np

from ..arrays import Int64Array
from ..constants import RECORD_POSITION, RECORD_TOKEN
from ..dispatch import In64, In64x2, Out64, Out64x2, primitive, select

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

# What may be wrong with a write.
WRITE_FREE: Final = 1
WRITE_CACHED: Final = 2
WRITE_FOREIGN: Final = 4
WRITTEN_TWICE: Final = 8
PADDED_LIVE: Final = 16
PADDED_WRITTEN: Final = 32  # padding writes what a request of the same forward writes
WRITES_AGAIN: Final = 64  # another token of the same request went there before, in the same forward


@primitive()
def judge_writes_loops(
    slots: In64,
    offsets: In64,
    request_ids: In64,
    serial: int,
    from_start: int,
    ledger: Out64x2,
    found: Out64,
    bits: Out64,
    count: Out64,
) -> None:
    """Note what is wrong with each write, and stamp its slot; see `judge_writes`."""
    bs = request_ids.shape[0]
    total = 0
    for r in range(bs):
        request = request_ids[r]
        for i in range(offsets[r], min(offsets[r + 1], slots.shape[0])):
            slot = slots[i]
            if slot <= 0 or slot >= ledger.shape[0]:
                continue
            state = ledger[slot, STATE]
            flags = 0
            if state == FREE and (from_start != 0 or ledger[slot, LEFT] != 0):
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
                found[total] = i
                bits[total] = flags
                total += 1
    for i in range(offsets[bs], slots.shape[0]):
        slot = slots[i]
        if slot <= 0 or slot >= ledger.shape[0]:
            continue
        state = ledger[slot, STATE]
        flags = 0
        if state in (HELD, SHARED, CACHED):
            flags = PADDED_LIVE
        if ledger[slot, STAMP] == serial and ledger[slot, STAMP_REQUEST] != PADDING_WRITER:
            flags += PADDED_WRITTEN
        if flags != 0:
            found[total] = i
            bits[total] = flags
            total += 1
        ledger[slot, STAMP] = serial
        ledger[slot, STAMP_REQUEST] = PADDING_WRITER
    count[0] = total


def judge_writes(
    *,
    slots: Int64Array,
    offsets: Int64Array,
    request_ids: Int64Array,
    serial: int,
    from_start: bool,
    ledger: Int64Array,
    backend: str = "cpu",
) -> tuple[Int64Array, Int64Array]:
    """Find the tokens whose slot is not the writing request's, and stamp every slot with who writes it.

    Args:
        slots: `[tokens] int64`; slot 0 and slots outside the pool are passed over.
        offsets: `[bs + 1] int64`: request r writes `offsets[r] .. offsets[r + 1]`; what comes behind is padding.
        request_ids: `[bs] int64`; a negative one is nobody's and not judged by owner.
        serial: the forward's own number among those judged, > 0.
        from_start: whether a slot that no event has named is free.
        ledger: `[num_slots, 8] int64`, see above; stamps are changed in place.
        backend: see `dispatch.select`.

    Returns:
        `(found, bits)`, `[n] int64` each: the tokens, ascending, and what is wrong with each.
    """
    found, bits = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    count = np.zeros(1, np.int64)
    loops = select(judge_writes_loops, backend)
    loops(slots, offsets, request_ids, serial, int(from_start), ledger, found, bits, count)
    return found[: count[0]], bits[: count[0]]


@primitive()
def judge_reads_loops(
    slots: In64,
    positions: In64,
    tokens: In64,
    offsets: In64,
    request_ids: In64,
    fresh_from: In64,
    seen: In64,
    serial: int,
    complete: int,
    from_start: int,
    ledger: In64x2,
    writers: In64x2,
    records: In64x2,
    found: Out64,
    bits: Out64,
    count: Out64,
) -> None:
    """Note what is wrong with each read; see `judge_reads`."""
    total = 0
    for r in range(request_ids.shape[0]):
        request = request_ids[r]
        for i in range(offsets[r], min(offsets[r + 1], slots.shape[0])):
            slot = slots[i]
            if slot <= 0 or slot >= ledger.shape[0]:
                continue
            state = ledger[slot, STATE]
            content = ledger[slot, CONTENT]
            free = state == FREE and (from_start != 0 or ledger[slot, LEFT] != 0)
            flags = 0
            if complete != 0:
                if free:
                    flags = READ_FREE
                elif content < ledger[slot, ALLOC]:
                    flags = NEVER_WRITTEN
                if state == HELD and request >= 0 and ledger[slot, OWNER] != request:
                    flags += READ_FOREIGN
                if (
                    not free
                    and positions[i] < fresh_from[r]
                    and 0 < seen[r] < ledger[slot, ALLOC]
                    and ledger[slot, JOINER] != request
                ):
                    flags += READ_RECYCLED
            elif state == HELD and ledger[slot, OWNER] != request and 0 < content < ledger[slot, ALLOC]:
                flags = NEVER_WRITTEN
            if ledger[slot, STAMP] == serial:
                if ledger[slot, STAMP_REQUEST] == PADDING_WRITER:
                    flags += PADDED
                elif ledger[slot, STAMP_REQUEST] != request:
                    flags += BEING_WRITTEN
            hit = positions[i] >= fresh_from[r] and writers[slot, 0] > 0 and writers[slot, 2] != request
            if hit and (
                records[slot, RECORD_POSITION] != positions[i]
                or (tokens[i] != -1 and records[slot, RECORD_TOKEN] != tokens[i])
            ):
                flags += DIFFERS
            if flags != 0:
                found[total] = i
                bits[total] = flags
                total += 1
    count[0] = total


def judge_reads(
    *,
    slots: Int64Array,
    positions: Int64Array,
    tokens: Int64Array,
    offsets: Int64Array,
    request_ids: Int64Array,
    fresh_from: Int64Array,
    seen: Int64Array,
    serial: int,
    complete: bool,
    from_start: bool,
    ledger: Int64Array,
    writers: Int64Array,
    records: Int64Array,
    backend: str = "cpu",
) -> tuple[Int64Array, Int64Array]:
    """Find the prefix entries that a request has no business to read, or that do not hold what it expects.

    Args:
        slots, positions, tokens: `[n] int64`: a verify plan's valid entries; token -1 is unknown.
        offsets: `[>= bs + 1] int64`: request r reads entries `offsets[r] .. offsets[r + 1]`.
        request_ids: `[bs] int64`.
        fresh_from: `[bs] int64`: the first position that the request has neither read nor written before.
        seen: `[bs] int64`: event + 1 of the request's forward before this one, 0 where there was none.
        serial: as given to `judge_writes`, which must have run before.
        complete: whether the trace tells of every slot; else only what no missing event excuses is found.
        from_start: as given to `judge_writes`.
        ledger: `[num_slots, 8] int64`.
        writers: `[num_slots, 3] int64`: event + 1, forward, request id of the last write.
        records: `[num_slots, 4] int64`, the canary records of one half.
        backend: see `dispatch.select`.

    Returns:
        `(found, bits)`, `[m] int64` each: the entries, ascending, and what is wrong with each.
    """
    found, bits = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    count = np.zeros(1, np.int64)
    loops = select(judge_reads_loops, backend)
    loops(
        slots,
        positions,
        tokens,
        offsets,
        request_ids,
        fresh_from,
        seen,
        serial,
        int(complete),
        int(from_start),
        ledger,
        writers,
        records,
        found,
        bits,
        count,
    )
    return found[: count[0]], bits[: count[0]]


@primitive()
def note_writes_loops(slots: In64, end: int, event: int, ledger: Out64x2) -> None:
    """Note the event of each write; see `note_writes`."""
    for i in range(min(end, slots.shape[0])):
        slot = slots[i]
        if 0 < slot < ledger.shape[0]:
            ledger[slot, CONTENT] = event


def note_writes(*, slots: Int64Array, end: int, event: int, ledger: Int64Array, backend: str = "cpu") -> None:
    """Note that event `event` (+ 1) wrote the first `end` of `slots` `[tokens] int64`; ledger changed in place."""
    select(note_writes_loops, backend)(slots, end, event, ledger)


def prepare_notes(backend: str) -> None:
    """Compile `note_writes` now, so that nobody waits for it later."""
    select(note_writes_loops, backend)
