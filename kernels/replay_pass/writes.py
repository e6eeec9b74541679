"""What an ordinary forward writes: whether every slot is its request's to write, and then records, bytes and books.

All buffers of a group take the same records but for the KV hash, so the chain runs once for all of them.
"""

from ..constants import RECORD_KV_HASH, RECORD_POSITION, RECORD_PREV_HASH, RECORD_TOKEN
from ..dispatch import In32x2, In64, In64x2, InU64, InU64x2, Out8x2, Out32, Out32x2, Out64, Out64x2, OutU64x2, primitive
from ..ops.hash.reference import as_i64, as_u64, chain_seed, slot_hash, splitmix64
from .cells import BEFORE, HI, TRUTH, invalidate_slot, link
from .ledger import ALLOC, CACHED, CONTENT, FREE, HELD, LEFT, OWNER, SHARED, STAMP, STAMP_REQUEST, STATE


@primitive(inlined=True)
def may_write(ledger: In64x2, slot: int, request: int, from_start: int) -> int:
    """Say whether a request may write a slot, in a trace that tells of every slot, as `ledger.judge_writes` asks."""
    state = ledger[slot, STATE]
    if state == FREE:
        return 0 if from_start != 0 or ledger[slot, LEFT] != 0 else 1
    if state == CACHED:
        return 0
    if state in (HELD, SHARED) and ledger[slot, OWNER] != request:
        return 0
    return 1


@primitive()
def writes_ordinary(
    records: In64x2,
    ledger: Out64x2,
    writers: In64x2,
    rows: In64,
    requests: In64,
    lens: In64,
    inputs: In64,
    slots: In64,
    event: int,
    serial: int,
    complete: int,
    from_start: int,
    others: Out64,
) -> int:
    """Stamp each token's slot, and return how many slots hold another token by now; -1 where one is not to be written.

    `lens` `[bs]` are the tokens of each request; tokens behind them are padding, which may go to slot 0 alone. `others`
    takes the tokens whose slot holds another one.
    """
    found = 0
    at = 0
    for r in range(rows.shape[0]):
        request = requests[r]
        for i in range(at, at + lens[r]):
            slot = slots[i]
            if slot <= 0 or slot >= ledger.shape[0]:
                return -1
            if complete != 0 and may_write(ledger, slot, request, from_start) == 0:
                return -1
            if ledger[slot, STAMP] == serial or ledger[slot, ALLOC] > event:
                return -1
            ledger[slot, STAMP] = serial
            ledger[slot, STAMP_REQUEST] = request
            if writers[slot, 0] > 0 and records[slot, RECORD_TOKEN] != inputs[i]:
                others[found] = i
                found += 1
        at += lens[r]
    for i in range(at, inputs.shape[0]):
        if slots[i] != 0:
            return -1
    return found


@primitive()
def stream_stays(words: InU64x2, kv: InU64, at: int, slots: In64, others: In64, count: int) -> int:
    """Say whether a write would leave a slot's bytes as they are, and not all zero; 0 or 1.

    `kv` from `at` on holds one stream's bytes of every token. A write that changes nothing may have been lost.
    """
    width = words.shape[1]
    for k in range(count):
        slot = slots[others[k]]
        first = at + others[k] * width
        w = 0
        anything = 0
        while w < width and words[slot, w] == kv[first + w]:
            if kv[first + w] != as_u64(0):
                anything = 1
            w += 1
        if w == width and anything == 1:
            return 1
    return 0


@primitive()
def nothing_dropped(
    records: In64x2,
    ledger: In64x2,
    table: In32x2,
    rows: In64,
    requests: In64,
    prefixes: In64,
    lens: In64,
    slots: In64,
    serial: int,
) -> int:
    """Say whether no request loses a slot that it holds out of its row, as `DroppedSlots.note` asks; 0 or 1."""
    at = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        for i in range(lens[r]):
            position = prefixes[r] + i
            before = int(table[row, position])
            if before <= 0 or before >= ledger.shape[0] or before == slots[at + i]:
                continue
            if (
                ledger[before, OWNER] == requests[r]
                and ledger[before, STATE] == HELD
                and ledger[before, STAMP] != serial
                and ledger[before, CONTENT] > ledger[before, ALLOC]
                and records[before, RECORD_POSITION] == position
            ):
                return 0
        at += lens[r]
    return 1


@primitive()
def seeds_ordinary(records: In64x2, table: In32x2, rows: In64, prefixes: In64, lens: In64) -> int:
    """Say whether every chain goes on from a record of the position before; 0 or 1.

    Verify says so of what it looked at, but never looks at slot 0, from which a chain of the reference goes on all the same.
    """
    for r in range(rows.shape[0]):
        if lens[r] == 0 or prefixes[r] <= 0:
            continue
        seed = int(table[rows[r], prefixes[r] - 1])
        if seed <= 0 or seed >= records.shape[0] or records[seed, RECORD_POSITION] != prefixes[r] - 1:
            return 0
    return 1


@primitive()
def touch_written(
    slots: In64, end: int, heads: Out32, links: Out32x2, pending: Out8x2, counts: Out32x2, book: Out64x2
) -> None:
    """Make pending whatever reads a slot that is about to be written."""
    for i in range(end):
        if heads[slots[i]] != 0:
            invalidate_slot(heads, links, pending, counts, book, slots[i])


@primitive()
def store_words(slots: In64, kv: InU64, at: int, words: OutU64x2) -> None:
    """Put one stream's bytes of every token into the pool; `kv` from `at` on holds them."""
    width = words.shape[1]
    if width == 2:
        for i in range(slots.shape[0]):
            slot = slots[i]
            words[slot, 0] = kv[at + 2 * i]
            words[slot, 1] = kv[at + 2 * i + 1]
        return
    for i in range(slots.shape[0]):
        slot = slots[i]
        for w in range(width):
            words[slot, w] = kv[at + w]
        at += width


@primitive()
def seed_chains(records: In64x2, table: In32x2, rows: In64, prefixes: In64, lens: In64, chain: Out64) -> None:
    """Put each request's seed, the hash of the record before its first, in its first token's place of `chain`."""
    at = 0
    for r in range(rows.shape[0]):
        if lens[r] > 0:
            seed = chain_seed()
            if prefixes[r] > 0:
                seed = slot_hash(records, int(table[rows[r], prefixes[r] - 1]))
            chain[at] = as_i64(seed)
        at += lens[r]


@primitive()
def write_chains(
    records: Out64x2,
    writers: Out64x2,
    ledger: Out64x2,
    requests: In64,
    lens: In64,
    slots: In64,
    inputs: In64,
    positions: In64,
    event: int,
    forward: int,
    chain: Out64,
) -> None:
    """Write the records of the first buffer, note who wrote each slot, and work out every token's previous-hash on the way.

    `chain` has each request's seed in its first token's place, see `seed_chains`, and takes the others. Each link waits
    for the one before it, and the processor does all the rest meanwhile. `event` is the forward's number + 1.
    """
    at = 0
    for r in range(requests.shape[0]):
        running = as_u64(chain[at]) if lens[r] > 0 else as_u64(0)
        for i in range(at, at + lens[r]):
            slot = slots[i]
            chain[i] = as_i64(running)
            records[slot, RECORD_TOKEN] = inputs[i]
            records[slot, RECORD_POSITION] = positions[i]
            records[slot, RECORD_PREV_HASH] = as_i64(running)
            records[slot, RECORD_KV_HASH] = 0
            writers[slot, 0] = event
            writers[slot, 1] = forward
            writers[slot, 2] = requests[r]
            ledger[slot, CONTENT] = event
            word = splitmix64(splitmix64(running) ^ as_u64(inputs[i]))
            running = splitmix64(word ^ as_u64(positions[i]))
        at += lens[r]


@primitive()
def write_records(
    records: Out64x2, slots: In64, end: int, inputs: In64, positions: In64, chain: In64, hashes: In64
) -> None:
    """Write one buffer's records."""
    for i in range(end):
        slot = slots[i]
        records[slot, RECORD_TOKEN] = inputs[i]
        records[slot, RECORD_POSITION] = positions[i]
        records[slot, RECORD_PREV_HASH] = chain[i]
        records[slot, RECORD_KV_HASH] = hashes[i]


@primitive()
def write_words(
    records: Out64x2,
    words: OutU64x2,
    slots: In64,
    end: int,
    kv: InU64,
    at: int,
    inputs: In64,
    positions: In64,
    chain: In64,
) -> None:
    """Write the records of a buffer with one stream of 16 bytes, which is usual, and store the stream: in one pass."""
    for i in range(end):
        slot = slots[i]
        first = kv[at + 2 * i]
        second = kv[at + 2 * i + 1]
        words[slot, 0] = first
        words[slot, 1] = second
        records[slot, RECORD_TOKEN] = inputs[i]
        records[slot, RECORD_POSITION] = positions[i]
        records[slot, RECORD_PREV_HASH] = chain[i]
        acc = splitmix64(splitmix64(as_u64(first)) ^ as_u64(second))
        records[slot, RECORD_KV_HASH] = as_i64(splitmix64(acc))
    for i in range(end, slots.shape[0]):  # padding
        words[slots[i], 0] = kv[at + 2 * i]
        words[slots[i], 1] = kv[at + 2 * i + 1]


@primitive()
def watch_written(
    rows: In64,
    prefixes: In64,
    lens: In64,
    known: In64,
    offset: int,
    slots: In64,
    width: int,
    heads: Out32,
    links: Out32x2,
    book: Out64x2,
) -> None:
    """Watch what was written as clean: nothing but what was just checked is in it. The tables name the new slots."""
    at = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        if lens[r] == 0:
            continue
        prefix = prefixes[r]
        for i in range(lens[r]):
            cell = row * width + prefix + i
            if links[cell, BEFORE] == 0:
                link(heads, links, cell, slots[at + i])
        book[row, HI] = prefix + lens[r]
        truth_len = known[r] if known.shape[0] > 0 else 0
        unchecked = max(prefix + offset, truth_len)
        if unchecked - offset < prefix + lens[r] and unchecked < book[row, TRUTH]:
            book[row, TRUTH] = max(0, unchecked)
        at += lens[r]
