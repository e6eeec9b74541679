"""What an ordinary forward changes, once it is known to be one: nothing is asked here.

All buffers of a group take the same records but for the KV hash, so the write op runs once, on the first HEAD.
"""

from ..constants import RECORD_KV_HASH, RECORD_POSITION, RECORD_PREV_HASH, RECORD_TOKEN
from ..dispatch import In64, Out64, Out64x2, OutU64x2, primitive
from ..ops.hash.reference import as_i64, as_u64, splitmix64
from ..ops.write.reference import WrittenTokens, write_loops
from .context import (
    Context,
    Event,
    GroupState,
    RowState,
    buffer_of,
    full_state,
    group_state,
    readers_of,
    stream_of,
    work_of,
)
from .due import mark_verified_loops
from .entries import HI, TRUTH, invalidate_slots_loops, link_cell, make_due
from .forward import due_entries
from .ledger import note_writes_loops
from .rows import note_rows
from .state import mark_writer_loops
from .swa import watched_divergence_loops
from .table_changes import apply_own_changes

primitive()(write_loops)


@primitive()
def store_stream(words: OutU64x2, forward: Event, at: int, slots: In64, hashed: int, hashes: Out64) -> None:
    """Put one stream's bytes of every token into the pool, and fold those that are hashed into the tokens' KV hashes.

    `forward.kv` from `at` on holds them; `fold_source_loops` says what a hash is.
    """
    width = words.shape[1]
    for i in range(slots.shape[0]):
        slot, first = slots[i], at + i * width
        if slot < 0:
            continue
        acc = as_u64(0)
        for w in range(width):
            word = forward.kv[first + w]
            words[slot, w] = word
            if w < hashed:
                acc = splitmix64(acc ^ as_u64(word))
        if hashed > 0:
            hashes[i] = as_i64(splitmix64(as_u64(hashes[i]) ^ acc))


@primitive()
def copy_records(records: Out64x2, head: Out64x2, slots: In64, end: int, hashes: In64) -> None:
    """Write one buffer's records: those of the first HEAD, with their own KV hashes."""
    for i in range(end):
        slot = slots[i]
        if slot >= 0:
            records[slot, RECORD_TOKEN] = head[slot, RECORD_TOKEN]
            records[slot, RECORD_POSITION] = head[slot, RECORD_POSITION]
            records[slot, RECORD_PREV_HASH] = head[slot, RECORD_PREV_HASH]
            records[slot, RECORD_KV_HASH] = hashes[i]


@primitive()
def write_group(context: Context, forward: Event, group: GroupState, slots: Out64, end: int) -> int:
    """Write a group's records and bytes, and who wrote them; return how many records that were, a buffer."""
    memory = work_of(context)
    bs, inputs, positions = forward.rows.shape[0], forward.inputs, forward.positions
    hashes, offsets = memory.hashes[: slots.shape[0]], memory.write_offsets[: bs + 1]
    head = buffer_of(context, group, 0)
    for i in range(slots.shape[0]):
        hashes[i] = 0
    memory.written[0] = 0
    tokens = WrittenTokens(inputs, positions, slots, inputs, positions)
    seeds = memory.seeds[group.number, :bs]
    write_loops(head, 0, offsets, seeds, tokens, 0, 0, hashes, memory.log, memory.written)
    for buffer in range(1, group.num_buffers):
        if buffer > 1:
            for i in range(slots.shape[0]):
                hashes[i] = 0
        for s in range(group.first_stream, group.first_stream + group.num_streams):
            hashed = context.streams.buffer[s] == buffer
            if hashed or (context.streams.buffer[s] < 0 and buffer == 1):
                at, most = context.streams.before[s] * forward.inputs.shape[0], context.settings.kv_words
                store_stream(stream_of(context, group, s), forward, at, slots, most if hashed else 0, hashes)
        copy_records(buffer_of(context, group, buffer), head, slots, end, hashes)
    mark_writer_loops(slots, offsets, forward.requests, forward.number, forward.forward, group.writers)
    note_writes_loops(slots, end, forward.number, group.ledger)
    return memory.written[0]


@primitive()
def watch_written(context: Context, forward: Event, group: GroupState, slots: In64) -> None:
    """Watch what was written as verified: nothing but what was just checked is in it. The tables name the new slots."""
    memory = work_of(context)
    offsets, states = memory.write_offsets, group.states
    for r in range(forward.rows.shape[0]):
        row, prefix = forward.rows[r], forward.prefixes[r]
        count = offsets[r + 1] - offsets[r]
        if count == 0:
            continue
        states.rows[row, HI] = prefix + count
        whole = slots[offsets[r]] >= 0  # else its chain began anew, somewhere
        linked = prefix == 0 or link_cell(states, group.table, row, prefix - 1) == 1
        for i in range(count):
            position = prefix + i
            before_linked = linked
            linked = link_cell(states, group.table, row, position) == 1
            if not (whole and linked and before_linked and slots[offsets[r] + i] >= group.padding):
                make_due(states, row, position)
        known = forward.known[r] if forward.known.shape[0] > 0 else 0
        unchecked = max(prefix + forward.offset, known)
        if unchecked - forward.offset < prefix + count and unchecked < states.rows[row, TRUTH]:
            states.rows[row, TRUTH] = max(0, unchecked)


@primitive()
def count_divergence(context: Context, forward: Event, group: GroupState) -> None:
    """Count how far a sliding-window pool has diverged from the full one, over what the batch has cached now."""
    memory = work_of(context)
    bs, lens = forward.rows.shape[0], memory.lens
    starts, ends = memory.run_starts[:bs], memory.run_lens[:bs]
    for r in range(bs):
        starts[r] = 0 if group.counted_whole != 0 else max(0, forward.prefixes[r] - group.window - 1)
        ends[r] = forward.prefixes[r] + lens[r]
    figures = memory.totals
    figures[0] = 0
    figures[1] = 0
    full = full_state(context, group)
    watched_divergence_loops(forward.rows, starts, ends, group.table, full.states, full.kinds, figures)
    context.figures.no_slots[forward.place, group.number] = figures[0]
    context.figures.other_slots[forward.place, group.number] = figures[1]


@primitive()
def apply_forward(context: Context, forward: Event, rows: RowState) -> None:
    """Carry out a forward that `forward_ordinary` has found to be one."""
    memory = work_of(context)
    settings, bs, tokens = context.settings, forward.rows.shape[0], forward.inputs.shape[0]
    end = int(memory.write_offsets[bs])
    readers = readers_of(forward)
    start = 0
    for g in range(settings.num_groups):
        group = group_state(context, g)
        if group.runner != forward.runner:
            continue
        slots = memory.own_slots[g, :tokens]
        how = memory.how[g, :bs]
        plan, marks = due_entries(context, g, bs, start), memory.marks[start:]
        start += memory.request_offsets[g, bs]
        mark_verified_loops(
            readers, forward.number - 1, group.table, forward.offset, how, plan, marks, group.ledger, group.states
        )
        if group.window > 0:  # what stands before the window was linked just now, and may be what is written
            invalidate_slots_loops(slots, group.states)
        context.tally.written[g] += write_group(context, forward, group, slots, end)
        context.tally.verified[g] += memory.reads[g]
        context.tally.forwards[g] += 1
        if context.figures.reads.shape[0] > 0:
            context.figures.reads[forward.place, g] = memory.reads[g]
    apply_own_changes(context, forward, rows)
    for g in range(settings.num_groups):
        group = group_state(context, g)
        if group.runner == forward.runner:
            watch_written(context, forward, group, memory.own_slots[g, :tokens])
            if len(group.table.lut) > 0:
                count_divergence(context, forward, group)
    new_ids = memory.new_requests
    context.progress.new_ids[0] = note_rows(forward, rows, memory.lens, new_ids, context.progress.new_ids[0])
    if forward.runner == 0:
        context.progress.since_sweep[0] += 1
