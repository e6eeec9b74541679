"""Whether a forward is ordinary: its lists fit, its requests run where they should, and no op or check finds anything.

What an op finds is asked of the op: the loops that stepwise replay runs on whole plans run here on what is due.
"""

from ..constants import RECORD_POSITION, RECORD_TOKEN
from ..dispatch import In64, InU64x2, Out64, Out64x2, primitive
from ..ops.hash.reference import as_u64
from ..ops.plan.reference import MAX_PLAN_ENTRIES, PlanArrays, WriteArrays, plan_writes_loops
from .context import (
    Context,
    Event,
    GroupState,
    RowState,
    buffer_of,
    group_state,
    stream_of,
    table_of,
    work_of,
)
from .entries import EVENT, invalidate_slots_loops
from .ledger import ALLOC, CONTENT, HELD, OWNER, STAMP, STATE
from .reads import entries_ordinary, ledger_ordinary, partners_ordinary, plan_group
from .rows import SEEN, fresh_from, inputs_ordinary, row_ordinary, same_request
from .state import translate_loops
from .table_changes import are_32_bits

primitive()(plan_writes_loops)


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
            or rows.row_stamps[row] == context.progress.serial[0]
            or request < 0
        ):
            return 0
        rows.row_stamps[row] = context.progress.serial[0]
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
def due_entries(context: Context, g: int, bs: int, start: int) -> PlanArrays:
    """Return room for a group's plan behind the `start` entries of the groups before it."""
    memory = work_of(context)
    plan, offsets = memory.plan, memory.request_offsets[g, : bs + 1]
    return PlanArrays(
        plan.slots[start:], plan.expected_tokens[start:], plan.expected_positions[start:], plan.prev_slots[start:],
        plan.num_valid, plan.enable, offsets,
    )  # fmt: skip


@primitive()
def translate_slots(context: Context, forward: Event, group: GroupState, slots: Out64) -> None:
    """Give where a forward's tokens go in a group, in the pool's own numbering; beyond the pool if that is unknown."""
    tokens, number = forward.inputs.shape[0], group.table_number
    named = forward.written[number * tokens : (number + 1) * tokens]
    if len(group.table.lut) == 0:
        for i in range(tokens):
            slots[i] = named[i]
    else:
        translate_loops(named, group.table.lut, slots, work_of(context).log.out_of_range)


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
                and ledger[before, STAMP] != context.progress.serial[0]
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
def group_ordinary(
    context: Context, forward: Event, group: GroupState, plan: PlanArrays, slots: Out64, start: int
) -> int:
    """Say whether nothing is to be found about a forward in one of its groups; 0 or 1. Its entries are watched then."""
    memory = work_of(context)
    bs, outside = forward.rows.shape[0], memory.log.out_of_range
    records = buffer_of(context, group, 1)  # of the first TAIL buffer
    seeds = memory.seeds[group.number, :bs]
    table, has_lut = group.table, 1 if len(group.table.lut) > 0 else 0
    if plan_group(context, forward, group, records, plan, start) == 0:
        return 0
    outside[0] = 0
    writes = WriteArrays(memory.write_offsets[: bs + 1], seeds, memory.num_requests)
    plan_writes_loops(
        forward.rows, forward.prefixes, forward.extends, table.req_to_token, table.lut, has_lut, writes, outside
    )
    if outside[0] != 0 or seeds_ordinary(context, forward, group, records, slots, seeds) == 0:
        return 0
    others = targets_ordinary(context, forward, group, records, slots, seeds)
    if others < 0:
        return 0
    for s in range(group.first_stream, group.first_stream + (group.num_streams if others > 0 else 0)):
        at = context.streams.before[s] * forward.inputs.shape[0]
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
        if group_ordinary(context, forward, group, plan, slots, start) == 0:
            restore_events(context, forward, g + 1)
            return 0
        start += plan.num_valid[0]
    return 1
