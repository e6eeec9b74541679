"""What an ordinary forward reads in one group: planned, verified and judged by the loops of the ops and of the ledger."""

from ..constants import RECORD_TOKEN
from ..dispatch import In64, Out64, Out64x2, primitive
from ..ops.hash.kv_source import fold_source_loops
from ..ops.plan.reference import PlanArrays
from ..ops.verify.reference import verify_loops
from ..tokens import contradicts
from .context import (
    Context,
    Event,
    GroupState,
    buffer_of,
    readers_of,
    row_state,
    stream_of,
    work_of,
)
from .due import plan_due_loops, watch_forward_loops
from .ledger import PADDED_WRITTEN, STAMP, WRITES_AGAIN, WRITTEN_TWICE, Reads, judge_reads_loops, judge_writes_loops
from .swa import shared_halves_loops

for _op in (fold_source_loops, verify_loops):
    primitive()(_op)


@primitive()
def hash_slots(context: Context, group: GroupState, buffer: int, slots: In64, hashes: Out64) -> None:
    """Hash the bytes that slots hold now, of the streams that one TAIL buffer covers."""
    most = context.settings.kv_words
    for i in range(slots.shape[0]):
        hashes[i] = 0
    for s in range(group.first_stream, group.first_stream + (group.num_streams if most > 0 else 0)):
        if context.streams.buffer[s] == buffer:
            words = stream_of(context, group, s)
            width = words.shape[1]
            fold_source_loops(words, 1, 0, width, min(width, most), words.shape[0], slots, hashes)


@primitive()
def entries_ordinary(context: Context, group: GroupState, plan: PlanArrays) -> int:
    """Say whether the canary verifies every entry that is due, in each of the group's buffers; 0 or 1."""
    memory = work_of(context)
    count, log = plan.num_valid[0], memory.log
    slots, hashes = plan.slots[:count], memory.hashes[:count]
    tokens, positions, prevs = plan.expected_tokens[:count], plan.expected_positions[:count], plan.prev_slots[:count]
    for i in range(count):  # what a forward writes, others of its tokens see half written, but in a ring
        if group.ring == 0 and group.ledger[slots[i], STAMP] == context.progress.serial[0]:
            return 0
    for buffer in range(group.num_buffers if count > 0 else 0):
        hash_slots(context, group, buffer, slots, hashes)
        log.write_index[0] = 0
        log.out_of_range[0] = 0
        verify_loops(buffer_of(context, group, buffer), 0, slots, tokens, positions, prevs, hashes, 1, log)
        if log.write_index[0] != 0 or log.out_of_range[0] != 0:
            return 0
    return 1


@primitive()
def ledger_ordinary(
    context: Context, forward: Event, group: GroupState, records: Out64x2, plan: PlanArrays, slots: In64
) -> int:
    """Say whether the ledger lets every request write and read as it does, and stamp what is written; 0 or 1."""
    memory = work_of(context)
    settings, bs, count, serial = context.settings, forward.rows.shape[0], plan.num_valid[0], context.progress.serial[0]
    found, ledger, from_start = memory.found, group.ledger, settings.from_start
    judge_writes_loops(slots, memory.write_offsets[: bs + 1], forward.requests, serial, from_start, ledger, found)
    always = WRITTEN_TWICE | WRITES_AGAIN | PADDED_WRITTEN
    for i in range(found.total[0]):
        if settings.complete != 0 or found.bits[i] & always != 0:
            return 0
    reads = Reads(
        plan.slots[:count], plan.expected_positions[:count], plan.expected_tokens[:count], plan.request_offsets,
        forward.requests, memory.fresh_from[:bs], memory.seen[:bs],
    )  # fmt: skip
    judge_reads_loops(reads, serial, settings.complete, from_start, ledger, group.writers, records, found)
    return 1 if found.total[0] == 0 else 0


@primitive()
def partners_ordinary(context: Context, forward: Event, group: GroupState, plan: PlanArrays, slots: In64) -> int:
    """Say whether no two full slots that a forward uses lead to one SWA slot; 0 or 1."""
    memory = work_of(context)
    bs, tokens, count = forward.rows.shape[0], forward.inputs.shape[0], plan.num_valid[0]
    written = forward.written[group.table_number * tokens : (group.table_number + 1) * tokens]
    context.progress.partner_serial[0] += 1
    shared_halves_loops(
        plan.slots[:count], plan.expected_positions[:count], plan.request_offsets, forward.rows,
        group.table.req_to_token, slots, written, int(memory.write_offsets[bs]), context.progress.partner_serial[0],
        group.partners, memory.found,
    )  # fmt: skip
    return 1 if memory.found.total[0] == 0 else 0


@primitive()
def plan_group(
    context: Context, forward: Event, group: GroupState, records: Out64x2, plan: PlanArrays, start: int
) -> int:
    """Plan what is due in a group for a forward, behind `start` entries; 0 if that is too much, or leads to no slot."""
    memory = work_of(context)
    how, marks, readers = memory.how[group.number, : forward.rows.shape[0]], memory.marks[start:], readers_of(forward)
    watch_forward_loops(
        readers, forward.number - 1, context.progress.serial[0], group.table, group.window, forward.offset, group.states,
        how, memory.totals,
    )  # fmt: skip
    memory.reads[group.number] = memory.totals[0]
    if memory.totals[1] > context.settings.most_due - start:
        return 0
    outside, truth = memory.log.out_of_range, row_state(context, 0).truth
    outside[0] = 0
    plan_due_loops(
        readers,
        group.table,
        group.window,
        truth,
        forward.offset,
        how,
        group.states,
        group.num_slots,
        plan,
        marks,
        outside,
    )
    if outside[0] != 0:
        return 0
    for i in range(plan.num_valid[0]):
        slot, expected = plan.slots[i], plan.expected_tokens[i]
        if marks[i] != 0 or slot < group.padding:
            return 0
        if expected != -1 and contradicts(expected, records[slot, RECORD_TOKEN]) == 0:
            plan.expected_tokens[i] = records[slot, RECORD_TOKEN]  # a truth table has 32 bits of a token
    return 1
