"""Whether a forward is ordinary: its lists fit, its requests run where they should, and no op or check finds anything.

What an op finds is asked of the op: the loops that stepwise replay runs on whole plans run here on what is due.
"""

from ..constants import RECORD_POSITION, RECORD_TOKEN
from ..dispatch import In64, InU64x2, Out64, Out64x2, primitive
from ..ops.hash.kv_source import fold_source_loops
from ..ops.hash.reference import as_u64
from ..ops.plan.reference import MAX_PLAN_ENTRIES, plan_writes_loops
from ..ops.verify.reference import verify_loops
from ..tokens import contradicts
from .context import (
    FOUND_COUNT,
    LAUNCHES,
    NUM_VIOLATIONS,
    OUT_OF_RANGE,
    PARTNER_SERIAL,
    SERIAL,
    SLOTS_COUNTED,
    STREAM_BEFORE,
    STREAM_BUFFER,
    TOTALS,
    Context,
    Event,
    GroupState,
    RowState,
    buffer_of,
    group_state,
    readers_of,
    row_state,
    stream_of,
    table_of,
    work_of,
)
from .due import DueEntries, plan_due_loops, watch_forward_loops
from .entries import EVENT
from .invalidation import invalidate_slots_loops
from .ledger import (
    ALLOC,
    CONTENT,
    HELD,
    OWNER,
    PADDED_WRITTEN,
    STAMP,
    STATE,
    WRITES_AGAIN,
    WRITTEN_TWICE,
    judge_reads_loops,
    judge_writes_loops,
)
from .rows import SEEN, fresh_from, inputs_ordinary, row_ordinary, same_request
from .state import translate_loops
from .swa_partners import shared_halves_loops
from .table_changes import are_32_bits

for _op in (fold_source_loops, plan_writes_loops, verify_loops):
    primitive()(_op)


@primitive()
def lists_fit(context: Context, forward: Event) -> int:
    """Say whether a forward's lists have the lengths that they must have, and there is a request at all; 0 or 1."""
    bs, tokens = forward.rows.shape[0], forward.inputs.shape[0]
    if bs == 0 or forward.kv.shape[0] != tokens * forward.words:
        return 0
    if forward.requests.shape[0] != bs or forward.prefixes.shape[0] != bs or forward.extends.shape[0] != bs:
        return 0
    if forward.positions.shape[0] != tokens or forward.written.shape[0] != tokens * context.settings.num_tables:
        return 0
    for lens in (forward.known, forward.sampled_lens):
        if lens.shape[0] != 0 and lens.shape[0] != bs:
            return 0
    left = forward.sampled.shape[0]
    for r in range(forward.sampled_lens.shape[0]):
        if forward.sampled_lens[r] < 0 or forward.sampled_lens[r] > left:
            return 0
        left -= forward.sampled_lens[r]
    if left != 0 or are_32_bits(forward.sampled) == 0:
        return 0
    return are_32_bits(forward.written)


@primitive()
def requests_ordinary(context: Context, forward: Event, rows: RowState, width: int, lens: Out64) -> int:
    """Say whether each request runs where and how far it should, on the tokens it should; 0 or 1.

    `lens` takes how many tokens of the batch each request has; `width` is that of the narrowest table.
    """
    tokens = forward.inputs.shape[0]
    at = 0
    entries = 0
    for r in range(forward.rows.shape[0]):
        row, request, prefix = forward.rows[r], forward.requests[r], forward.prefixes[r]
        lens[r] = 0
        # Padding, too: a check goes by the ids of a batch, whatever their rows, and absurd prefixes are refused.
        for i in range(rows.reported.shape[0]):
            if rows.reported[i] == request:
                return 0
        if prefix < 0 or prefix > width or prefix > MAX_PLAN_ENTRIES - entries:
            return 0
        entries += prefix
        if row == 0:
            continue
        extend = forward.extends[r]
        if (
            row < 0
            or row >= rows.row_stamps.shape[0]
            or rows.row_stamps[row] == context.progress[SERIAL]
            or request < 0
        ):
            return 0
        rows.row_stamps[row] = context.progress[SERIAL]
        if extend < 0 or extend > width - prefix or extend > tokens - at:
            return 0
        known = forward.known[r] if forward.known.shape[0] > 0 else 0
        if known < 0 or known > rows.truth.shape[1]:
            return 0
        sampled = forward.sampled_lens[r] if forward.sampled_lens.shape[0] > 0 else 0
        complete = context.settings.complete
        if row_ordinary(rows, forward.runner, row, request, prefix, prefix + extend, sampled, complete) == 0:
            return 0
        if inputs_ordinary(context.settings, forward, rows, r, at, extend, known) == 0:
            return 0
        lens[r] = extend
        at += extend
    return 1


@primitive()
def due_entries(context: Context, g: int, bs: int, start: int) -> DueEntries:
    """Return room for a group's plan behind the `start` entries of the groups before it."""
    memory = work_of(context)
    counts = memory.counts32
    return DueEntries(
        memory.due_slots[start:],
        memory.due_tokens[start:],
        memory.due_positions[start:],
        memory.due_prev_slots[start:],
        memory.due_marks[start:],
        counts[:1],
        counts[1:2],
        memory.request_offsets[g, : bs + 1],
    )


@primitive()
def translate_slots(context: Context, forward: Event, group: GroupState, slots: Out64) -> None:
    """Give where a forward's tokens go in a group, in the pool's own numbering; beyond the pool if that is unknown."""
    tokens, number = forward.inputs.shape[0], group.table_number
    named = forward.written[number * tokens : (number + 1) * tokens]
    if len(group.table.lut) == 0:
        for i in range(tokens):
            slots[i] = named[i]
    else:
        outside = work_of(context).counters[OUT_OF_RANGE : OUT_OF_RANGE + 1]
        translate_loops(named, group.table.lut, slots, outside)


@primitive()
def targets_ordinary(
    context: Context, forward: Event, group: GroupState, records: Out64x2, slots: In64, seeds: In64
) -> int:
    """Say whether tokens go to slots that are theirs, padding to none; -1, or how many slots hold another token by now.

    Tokens of a sliding group may go to no slot, or through a full-to-SWA table to slot 0, if nobody will read them.
    """
    memory = work_of(context)
    offsets, others = memory.write_offsets, memory.others
    has_lut, found, nowhere = len(group.table.lut) > 0, 0, 0
    for r in range(forward.rows.shape[0]):
        for i in range(offsets[r], offsets[r + 1]):
            slot = slots[i]
            if slot >= group.num_slots:
                return -1
            if slot < 0:
                if group.window == 0 or has_lut or seeds[r] >= 0 or slots[offsets[r]] >= 0:
                    return -1
                continue
            if slot < group.padding:
                if slot != 0 or not has_lut:
                    return -1
                nowhere += 1
                continue
            if group.ledger[slot, ALLOC] > forward.number:
                return -1
            if group.writers[slot, 0] > 0 and records[slot, RECORD_TOKEN] != forward.inputs[i]:
                others[found] = i
                found += 1
    for i in range(offsets[forward.rows.shape[0]], slots.shape[0]):
        if slots[i] > 0 or nowhere > 0:  # nor may padding overwrite what a token left in slot 0
            return -1
    return found


@primitive()
def stream_stays(words: InU64x2, forward: Event, at: int, slots: In64, others: In64, count: int) -> int:
    """Say whether a write would leave a slot's bytes as they are, and not all zero; 0 or 1.

    `forward.kv` from `at` on holds one stream's bytes of every token. A write that changes nothing may have been lost.
    """
    width = words.shape[1]
    for k in range(count):
        slot = slots[others[k]]
        first = at + others[k] * width
        w = 0
        anything = 0
        while w < width and words[slot, w] == forward.kv[first + w]:
            if forward.kv[first + w] != as_u64(0):
                anything = 1
            w += 1
        if w == width and anything == 1:
            return 1
    return 0


@primitive()
def nothing_dropped(context: Context, forward: Event, group: GroupState, records: Out64x2, slots: In64) -> int:
    """Say whether no request loses a slot that it holds out of its row, as `DroppedSlots.note` asks; 0 or 1."""
    memory = work_of(context)
    offsets, ledger = memory.write_offsets, group.ledger
    for r in range(forward.rows.shape[0]):
        for i in range(offsets[r], offsets[r + 1]):
            position = forward.prefixes[r] + i - offsets[r]
            before = int(group.table.req_to_token[forward.rows[r], position])
            if before <= 0 or before >= ledger.shape[0] or before == slots[i]:
                continue
            if (
                ledger[before, OWNER] == forward.requests[r]
                and ledger[before, STATE] == HELD
                and ledger[before, STAMP] != context.progress[SERIAL]
                and ledger[before, CONTENT] > ledger[before, ALLOC]
                and records[before, RECORD_POSITION] == position
            ):
                return 0
    return 1


@primitive()
def seeds_ordinary(
    context: Context, forward: Event, group: GroupState, records: Out64x2, slots: In64, seeds: Out64
) -> int:
    """Say whether every chain goes on from a record of the position before; 0 or 1.

    Verify says so of what was due, but never looks at slot 0, from which a chain of the reference goes on all the same.
    Chains of a sliding group's own table begin anew if their first token goes to no slot.
    """
    memory = work_of(context)
    offsets = memory.write_offsets
    for r in range(forward.rows.shape[0]):
        if offsets[r + 1] == offsets[r]:
            continue
        if group.window > 0 and len(group.table.lut) == 0 and slots[offsets[r]] < 0:
            seeds[r] = -1
        if forward.prefixes[r] == 0 or (seeds[r] == -1 and slots[offsets[r]] < 0):
            continue
        if seeds[r] <= 0 or seeds[r] >= records.shape[0]:
            return 0
        if records[seeds[r], RECORD_POSITION] != forward.prefixes[r] - 1:
            return 0
    return 1


@primitive()
def hash_slots(context: Context, group: GroupState, buffer: int, slots: In64, hashes: Out64) -> None:
    """Hash the bytes that slots hold now, of the streams that one TAIL buffer covers."""
    most = context.settings.kv_words
    for i in range(slots.shape[0]):
        hashes[i] = 0
    for s in range(group.first_stream, group.first_stream + (group.num_streams if most > 0 else 0)):
        if context.streams[s, STREAM_BUFFER] == buffer:
            words = stream_of(context, group, s)
            width = words.shape[1]
            fold_source_loops(words, 1, 0, width, min(width, most), words.shape[0], slots, hashes)


@primitive()
def entries_ordinary(context: Context, group: GroupState, plan: DueEntries) -> int:
    """Say whether the canary verifies every entry that is due, in each of the group's buffers; 0 or 1."""
    memory = work_of(context)
    count, room = plan.num_valid[0], memory.counters
    slots = plan.slots[:count]
    for i in range(count):  # what a forward writes, others of its tokens see half written, but in a ring
        if group.ring == 0 and group.ledger[slots[i], STAMP] == context.progress[SERIAL]:
            return 0
    hashes = memory.hashes[:count]
    log = memory.log
    for buffer in range(group.num_buffers if count > 0 else 0):
        hash_slots(context, group, buffer, slots, hashes)
        room[NUM_VIOLATIONS] = 0
        room[OUT_OF_RANGE] = 0
        verify_loops(
            buffer_of(context, group, buffer),
            0,
            slots,
            plan.expected_tokens[:count],
            plan.expected_positions[:count],
            plan.prev_slots[:count],
            hashes,
            1,
            log[:1],
            log[1, :1],
            room[NUM_VIOLATIONS : NUM_VIOLATIONS + 1],
            room[OUT_OF_RANGE : OUT_OF_RANGE + 1],
            room[SLOTS_COUNTED : SLOTS_COUNTED + 1],
            room[LAUNCHES : LAUNCHES + 1],
        )
        if room[NUM_VIOLATIONS] != 0 or room[OUT_OF_RANGE] != 0:
            return 0
    return 1


@primitive()
def ledger_ordinary(
    context: Context, forward: Event, group: GroupState, records: Out64x2, plan: DueEntries, slots: In64
) -> int:
    """Say whether the ledger lets every request write and read as it does, and stamp what is written; 0 or 1."""
    memory = work_of(context)
    settings, bs, count = context.settings, forward.rows.shape[0], plan.num_valid[0]
    found, bits = memory.found, memory.bits
    counter = memory.counters[FOUND_COUNT : FOUND_COUNT + 1]
    offsets = memory.write_offsets[: bs + 1]
    judge_writes_loops(
        slots,
        offsets,
        forward.requests,
        context.progress[SERIAL],
        settings.from_start,
        group.ledger,
        found,
        bits,
        counter,
    )
    always = WRITTEN_TWICE | WRITES_AGAIN | PADDED_WRITTEN
    for i in range(counter[0]):
        if settings.complete != 0 or bits[i] & always != 0:
            return 0
    judge_reads_loops(
        plan.slots[:count],
        plan.expected_positions[:count],
        plan.expected_tokens[:count],
        plan.request_offsets,
        forward.requests,
        memory.fresh_from[:bs],
        memory.seen[:bs],
        context.progress[SERIAL],
        settings.complete,
        settings.from_start,
        group.ledger,
        group.writers,
        records,
        found,
        bits,
        counter,
    )
    return 1 if counter[0] == 0 else 0


@primitive()
def partners_ordinary(context: Context, forward: Event, group: GroupState, plan: DueEntries, slots: In64) -> int:
    """Say whether no two full slots that a forward uses lead to one SWA slot; 0 or 1."""
    memory = work_of(context)
    bs, tokens, count = forward.rows.shape[0], forward.inputs.shape[0], plan.num_valid[0]
    number = group.table_number
    counter = memory.counters[FOUND_COUNT : FOUND_COUNT + 1]
    context.progress[PARTNER_SERIAL] += 1
    shared_halves_loops(
        plan.slots[:count],
        plan.expected_positions[:count],
        plan.request_offsets,
        forward.rows,
        group.table.req_to_token,
        slots,
        forward.written[number * tokens : (number + 1) * tokens],
        int(memory.write_offsets[bs]),
        context.progress[PARTNER_SERIAL],
        group.partners,
        memory.found,
        counter,
    )
    return 1 if counter[0] == 0 else 0


@primitive()
def watch_group(
    context: Context, forward: Event, group: GroupState, records: Out64x2, plan: DueEntries, room: int
) -> int:
    """Plan what is due in a group for a forward; 0 if that is more than there is `room` for, or leads to no slot."""
    memory = work_of(context)
    bs, counters = forward.rows.shape[0], memory.counters
    how = memory.how[group.number, :bs]
    totals = counters[TOTALS : TOTALS + 2]
    outside = counters[OUT_OF_RANGE : OUT_OF_RANGE + 1]
    readers = readers_of(forward)
    watch_forward_loops(
        readers,
        forward.number - 1,
        context.progress[SERIAL],
        group.table,
        group.window,
        forward.offset,
        group.states,
        how,
        totals,
    )
    memory.reads[group.number] = totals[0]
    if totals[1] > room:
        return 0
    outside[0] = 0
    truth = row_state(context, 0).truth
    plan_due_loops(
        readers, group.table, group.window, truth, forward.offset, how, group.states, group.num_slots, plan, outside
    )
    if outside[0] != 0:
        return 0
    for i in range(plan.num_valid[0]):
        slot, expected = plan.slots[i], plan.expected_tokens[i]
        if plan.marks[i] != 0 or slot < group.padding:
            return 0
        if expected != -1 and contradicts(expected, records[slot, RECORD_TOKEN]) == 0:
            plan.expected_tokens[i] = records[slot, RECORD_TOKEN]  # a truth table has 32 bits of a token
    return 1


@primitive()
def group_ordinary(
    context: Context, forward: Event, group: GroupState, plan: DueEntries, slots: Out64, room: int
) -> int:
    """Say whether nothing is to be found about a forward in one of its groups; 0 or 1. Its entries are watched then."""
    memory = work_of(context)
    bs, counters = forward.rows.shape[0], memory.counters
    records = buffer_of(context, group, 1)  # of the first TAIL buffer
    seeds = memory.seeds[group.number, :bs]
    offsets = memory.write_offsets[: bs + 1]
    table, has_lut = group.table.req_to_token, 1 if len(group.table.lut) > 0 else 0
    requests = memory.counts32[2:3]
    outside = counters[OUT_OF_RANGE : OUT_OF_RANGE + 1]
    if watch_group(context, forward, group, records, plan, room) == 0:
        return 0
    outside[0] = 0
    plan_writes_loops(
        forward.rows,
        forward.prefixes,
        forward.extends,
        table,
        group.table.lut,
        has_lut,
        offsets,
        seeds,
        requests,
        outside,
    )
    if outside[0] != 0 or seeds_ordinary(context, forward, group, records, slots, seeds) == 0:
        return 0
    others = targets_ordinary(context, forward, group, records, slots, seeds)
    if others < 0:
        return 0
    for s in range(group.first_stream, group.first_stream + (group.num_streams if others > 0 else 0)):
        at = context.streams[s, STREAM_BEFORE] * forward.inputs.shape[0]
        if stream_stays(stream_of(context, group, s), forward, at, slots, memory.others, others) == 1:
            return 0
    if ledger_ordinary(context, forward, group, records, plan, slots) == 0:
        return 0
    if has_lut == 1 and partners_ordinary(context, forward, group, plan, slots) == 0:
        return 0
    judged = has_lut == 0 and context.settings.complete != 0
    if judged and nothing_dropped(context, forward, group, records, slots) == 0:
        return 0
    return entries_ordinary(context, group, plan)


@primitive()
def restore_events(context: Context, forward: Event, end: int) -> None:
    """Put back when the rows were read last, in the groups before `end`, for a forward that others will take."""
    memory = work_of(context)
    old = memory.old_events
    for g in range(end):
        group = group_state(context, g)
        for r in range(forward.rows.shape[0] if group.runner == forward.runner else 0):
            group.states.rows[forward.rows[r], EVENT] = old[g, r]


@primitive()
def forward_ordinary(context: Context, forward: Event, rows: RowState) -> int:
    """Say whether nothing is to be found about a forward whose changes are in the tables already; 0 or 1.

    Then each group's plan of what was due lies in the memory to work with; else what it watched is as it was.
    """
    memory = work_of(context)
    settings, bs = context.settings, forward.rows.shape[0]
    if lists_fit(context, forward) == 0:
        return 0
    width = table_of(context, 0).shape[1]
    for number in range(1, settings.num_tables):
        width = min(width, table_of(context, number).shape[1])
    if requests_ordinary(context, forward, rows, width, memory.lens) == 0:
        return 0
    fresh, seen, old = memory.fresh_from, memory.seen, memory.old_events
    for r in range(bs):
        row, request = forward.rows[r], forward.requests[r]
        fresh[r] = fresh_from(rows.last, row, request, forward.prefixes[r], forward.runner)
        seen[r] = rows.last[row, SEEN] if same_request(rows.last, row, request) == 1 else 0
    start = 0
    for g in range(settings.num_groups):
        group = group_state(context, g)
        if group.runner != forward.runner:
            continue
        for r in range(bs):
            old[g, r] = group.states.rows[forward.rows[r], EVENT]
        plan = due_entries(context, g, bs, start)
        slots = memory.own_slots[g, : forward.inputs.shape[0]]
        translate_slots(context, forward, group, slots)
        invalidate_slots_loops(slots, group.states)
        if group_ordinary(context, forward, group, plan, slots, settings.most_due - start) == 0:
            restore_events(context, forward, g + 1)
            return 0
        start += plan.num_valid[0]
    return 1
