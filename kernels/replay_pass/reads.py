"""Whether the prefix entries that a forward must look at are clean: the canary's verify, and what the checks ask of a read.

The entries are gathered into one flat list of slots, over which each buffer and each stream is then gone once.
"""

from ..constants import RECORD_KV_HASH, RECORD_POSITION, RECORD_PREV_HASH, RECORD_TOKEN
from ..dispatch import In8x2, In32x2, In64, In64x2, InU64x2, Out8x2, Out32, Out32x2, Out64, Out64x2, primitive
from ..ops.hash.reference import as_i64, as_u64, chain_seed, slot_hash, splitmix64
from ..tokens import contradicts
from .cells import EVENT, FIRST, LO, TRUTH, link_entry, next_pending, settle, watch
from .ledger import ALLOC, CONTENT, FREE, HELD, JOINER, LEFT, OWNER, STAMP, STATE
from .rows import SEEN, fresh_from, same_request


@primitive()
def watch_reads(
    rows: In64,
    requests: In64,
    prefixes: In64,
    known: In64,
    event: int,
    offset: int,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
    old_events: Out64,
) -> None:
    """Watch what a forward reads, as an interval executor's plan does; `old_events` takes when each row was read last."""
    for r in range(rows.shape[0]):
        row = rows[r]
        if row != 0:
            truth_len = known[r] if known.shape[0] > 0 else 0
            old_events[r] = book[row, EVENT]
            watch(pending, counts, book, row, requests[r], event - 1, 0, prefixes[r], truth_len, offset)


@primitive()
def restore_events(rows: In64, book: Out64x2, old_events: In64) -> None:
    """Put back when the rows were read last, for an event that is left to others."""
    for r in range(rows.shape[0]):
        if rows[r] != 0:
            book[rows[r], EVENT] = old_events[r]


@primitive()
def gather_reads(
    rows: In64,
    prefixes: In64,
    table: In32x2,
    num_slots: int,
    pending: In8x2,
    counts: In32x2,
    book: Out64x2,
    slots: Out64,
    before: Out64,
    positions: Out64,
    ends: Out64,
) -> int:
    """List what is pending, request by request, and return how many entries these are; -1 where there is no judging them.

    `slots`, `before` take the slots of each entry and of the one before it (-1: none), `ends` `[bs]` where each
    request's entries end.
    """
    count = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        if row != 0:
            position = next_pending(pending, counts, row, max(book[row, LO], book[row, FIRST]), prefixes[r])
            book[row, FIRST] = position
            while position < prefixes[r]:
                slot = int(table[row, position])
                prev = int(table[row, position - 1]) if position > 0 else -1
                if count >= slots.shape[0] or slot <= 0 or slot >= num_slots:
                    return -1
                if position > 0 and (prev <= 0 or prev >= num_slots):
                    return -1
                slots[count] = slot
                before[count] = prev
                positions[count] = position
                count += 1
                position = next_pending(pending, counts, row, position + 1, prefixes[r])
        ends[r] = count
    return count


@primitive(inlined=True)
def may_read(
    ledger: In64x2,
    slot: int,
    position: int,
    request: int,
    fresh: int,
    seen: int,
    event: int,
    serial: int,
    complete: int,
    from_start: int,
) -> int:
    """Say whether a request may read a slot, as `ledger.judge_reads` asks; 0 or 1. `event` is the number + 1."""
    state = ledger[slot, STATE]
    content = ledger[slot, CONTENT]
    alloc = ledger[slot, ALLOC]
    if ledger[slot, STAMP] == serial or alloc > event:
        return 0
    if complete != 0:
        if state == FREE and (from_start != 0 or ledger[slot, LEFT] != 0):
            return 0
        if content < alloc:
            return 0
        if state == HELD and ledger[slot, OWNER] != request:
            return 0
        if position < fresh and 0 < seen < alloc and ledger[slot, JOINER] != request:
            return 0
    elif state == HELD and ledger[slot, OWNER] != request and 0 < content < alloc:
        return 0
    return 1


@primitive(inlined=True)
def record_clean(
    records: In64x2, truth: In32x2, row: int, slot: int, prev: int, position: int, known: int, offset: int
) -> int:
    """Say whether an entry's record fits position, truth and predecessor; 0 or 1.

    The first `known` truth tokens of the row are known; that of position p is number p + `offset`.
    """
    if records[slot, RECORD_POSITION] != position:
        return 0
    place = position + offset
    if place < known and contradicts(int(truth[row, place]), records[slot, RECORD_TOKEN]) != 0:
        return 0
    expected = slot_hash(records, prev) if prev >= 0 else chain_seed()
    return 1 if records[slot, RECORD_PREV_HASH] == as_i64(expected) else 0


@primitive()
def reads_ordinary(
    rows: In64,
    requests: In64,
    prefixes: In64,
    known: In64,
    slots: In64,
    before: In64,
    positions: In64,
    ends: In64,
    records: In64x2,
    truth: In32x2,
    ledger: In64x2,
    last: In64x2,
    runner: int,
    offset: int,
    event: int,
    serial: int,
    complete: int,
    from_start: int,
) -> int:
    """Say whether every gathered entry may be read, and its record in the first TAIL buffer is clean; 0 or 1."""
    i = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        if i >= ends[r]:
            continue
        request = requests[r]
        truth_len = known[r] if known.shape[0] > 0 else 0
        fresh = fresh_from(last, row, request, prefixes[r], runner)
        seen = last[row, SEEN] if same_request(last, row, request) == 1 else 0
        while i < ends[r]:
            if may_read(ledger, slots[i], positions[i], request, fresh, seen, event, serial, complete, from_start) == 0:
                return 0
            if record_clean(records, truth, row, slots[i], before[i], positions[i], truth_len, offset) == 0:
                return 0
            i += 1
    return 1


@primitive()
def records_alike(records: In64x2, other: In64x2, slots: In64, before: In64, count: int) -> int:
    """Say whether two buffers have the same records, but for the KV hash, where entries look; 0 or 1."""
    for i in range(count):
        slot = slots[i]
        prev = max(before[i], 0)
        for word in (RECORD_TOKEN, RECORD_POSITION, RECORD_PREV_HASH):
            if records[slot, word] != other[slot, word] or records[prev, word] != other[prev, word]:
                return 0
    return 1


@primitive()
def clear_hashes(hashes: Out64, count: int) -> None:
    """Begin with no KV hash."""
    for i in range(count):
        hashes[i] = 0


@primitive()
def fold_words(words: InU64x2, slots: In64, count: int, hashed: int, hashes: Out64) -> None:
    """Fold one stream's bytes of each slot into the running KV hashes; at most `hashed` words of a slot count."""
    width = min(hashed, words.shape[1])
    if width == 2:  # the first 16 bytes, which is usual: without a loop of its own for every slot
        for i in range(count):
            slot = slots[i]
            acc = splitmix64(splitmix64(as_u64(words[slot, 0])) ^ as_u64(words[slot, 1]))
            hashes[i] = as_i64(splitmix64(as_u64(hashes[i]) ^ acc))
        return
    for i in range(count):
        slot = slots[i]
        acc = as_u64(0)
        for w in range(width):
            acc = splitmix64(acc ^ as_u64(words[slot, w]))
        hashes[i] = as_i64(splitmix64(as_u64(hashes[i]) ^ acc))


@primitive()
def hashes_stand(records: In64x2, slots: In64, count: int, hashes: In64) -> int:
    """Say whether a buffer's records have these KV hashes; 0 or 1."""
    for i in range(count):
        if records[slots[i], RECORD_KV_HASH] != hashes[i]:
            return 0
    return 1


@primitive()
def settle_reads(
    rows: In64,
    known: In64,
    positions: In64,
    ends: In64,
    table: In32x2,
    no_lut: In64,
    offset: int,
    heads: Out32,
    links: Out32x2,
    pending: Out8x2,
    counts: Out32x2,
    book: Out64x2,
) -> None:
    """Take what was gathered for clean."""
    i = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        truth_len = known[r] if known.shape[0] > 0 else 0
        while i < ends[r]:
            position = positions[i]
            link_entry(table, no_lut, 0, heads, links, row, position)
            settle(pending, counts, book, row, position)
            if truth_len <= position + offset < book[row, TRUTH]:
                book[row, TRUTH] = max(0, position + offset)
            i += 1
