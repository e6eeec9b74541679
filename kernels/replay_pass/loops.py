"""The lane: a batch's ordinary events in one pass over its columns, up to the first that is unusual.

An interval replay spends most of its time between kernels, for most events are small and say nothing new. The lane does
for an ordinary event what the executor and the history checks do for it, with "nothing is wrong" for an answer. Before
it changes anything it makes sure that this is the answer: whatever gives a row or a finding, contradicts itself, leaves
a pool or a table, or is of a kind that is seldom, ends the pass in front of it, and is for the executor. What the lane
does not cover costs time, never a result.

Some things are touched before that is sure: tables, which are put back; stamps of the ledger, whose serial is used up;
entries made pending, which costs another look.
"""

from ..dispatch import In64, In64x2, InU64, Out32x2, Out64, Out64x2, packed
from .changes import fill_run, keep_run, run_fits, touch_run, touch_truth_run
from .forward import runs_are_read
from .layout import (
    ALLOC_EVENT,
    AT,
    COMPLETE,
    EVICT_EVENT,
    FIRST_EVENT,
    FORWARD_EVENT,
    FREE_EVENT,
    FROM_START,
    GROUP_OFFSET,
    GROUP_TABLE,
    HAS_TRUTH,
    KIND,
    NUM_GROUPS,
    NUM_TABLES,
    PREFIXES,
    PROMPT,
    REQUEST,
    REQUEST_EVENT,
    ROOM,
    ROWS,
    SERIAL,
    SLOT_COUNT,
    SLOT_GROUP,
    SLOT_START,
    START,
    STATUS,
    STATUS_EVENT,
    STOP,
    TABLE_COUNT,
    TABLE_INDEX,
    TABLE_ROW,
    TABLE_SLOTS,
    TABLE_START,
    TRUTH_COUNT,
    TRUTH_ROW,
    TRUTH_START,
    TRUTH_TOKENS,
    VOCAB,
    Buffers,
    GroupHeads,
    GroupLinks,
    GroupPending,
    GroupRows,
    GroupSlots,
    ListValues,
    RunnerRows,
    Scalars,
    Streams,
    Tables,
)
from .rows import end_samples, learn_request, note_status, start_over
from .slots import run_ordinary, status_ordinary, take_run
from .take import take_forward


@packed
def lane_loops(
    scalars: Scalars,
    lists: ListValues,
    offsets: ListValues,
    kv: InU64,
    kv_offsets: In64,
    settings: In64,
    groups: In64x2,
    stream_of: In64x2,
    words_of: In64,
    progress: Out64,
    tally: Out64x2,
    tables: Tables,
    truth: Out32x2,
    buffers: Buffers,
    streams: Streams,
    ledgers: GroupRows,
    transfers: GroupSlots,
    writers: GroupRows,
    heads: GroupHeads,
    links: GroupLinks,
    pending: GroupPending,
    counts: GroupLinks,
    books: GroupRows,
    lasts: RunnerRows,
    status: Out64x2,
    samples: Out64x2,
    held: Out64x2,
    facts: Out64x2,
    told: In64,
    row_stamps: Out64,
    old_slots: Out64,
    old_tokens: Out64,
    old_events: Out64x2,
    ends: Out64x2,
    lens: Out64,
    chain: Out64,
    hashes: Out64,
    read_slots: Out64x2,
    read_before: Out64x2,
    read_positions: Out64x2,
    new_ids: Out64,
) -> None:
    """Take events `settings[START] ..` until one is unusual; `progress[AT]` is its index."""
    num_groups = settings[NUM_GROUPS]
    complete = settings[COMPLETE]
    from_start = settings[FROM_START]
    index = settings[START]
    while index < settings[STOP]:
        kind = scalars[KIND][index]
        request = scalars[REQUEST][index]
        code = scalars[STATUS][index]
        event = settings[FIRST_EVENT] + index + 1
        progress[SERIAL] += 1
        serial = progress[SERIAL]
        rows = lists[ROWS][offsets[ROWS][index] : offsets[ROWS][index + 1]]
        fine = 1 if kind >= 0 else 0

        # The changes that the event carries, undone again if it turns out to be unusual.
        run_tables = lists[TABLE_INDEX][offsets[TABLE_INDEX][index] : offsets[TABLE_INDEX][index + 1]]
        run_rows = lists[TABLE_ROW][offsets[TABLE_ROW][index] : offsets[TABLE_ROW][index + 1]]
        run_starts = lists[TABLE_START][offsets[TABLE_START][index] : offsets[TABLE_START][index + 1]]
        run_counts = lists[TABLE_COUNT][offsets[TABLE_COUNT][index] : offsets[TABLE_COUNT][index + 1]]
        run_slots = lists[TABLE_SLOTS][offsets[TABLE_SLOTS][index] : offsets[TABLE_SLOTS][index + 1]]
        table_runs = run_tables.shape[0]
        if run_rows.shape[0] != table_runs or run_starts.shape[0] != table_runs or run_counts.shape[0] != table_runs:
            fine = 0
        tables_done = 0
        slots_done = 0
        while fine == 1 and tables_done < table_runs:
            number = run_tables[tables_done]
            if number < 0 or number >= settings[NUM_TABLES]:
                fine = 0
                break
            table = tables[number]
            row = run_rows[tables_done]
            start = run_starts[tables_done]
            count = run_counts[tables_done]
            if run_fits(table, row, start, count, run_slots, slots_done) == 0:
                fine = 0
                break
            for g in range(num_groups):
                if groups[g, GROUP_TABLE] == number:
                    touch_run(
                        heads[g],
                        links[g],
                        pending[g],
                        counts[g],
                        books[g],
                        table,
                        row,
                        start,
                        run_slots,
                        slots_done,
                        count,
                    )
            keep_run(table, row, start, old_slots, slots_done, count)
            fill_run(table, row, start, run_slots, slots_done, count)
            slots_done += count
            tables_done += 1
        if slots_done != run_slots.shape[0]:
            fine = 0

        truth_rows = lists[TRUTH_ROW][offsets[TRUTH_ROW][index] : offsets[TRUTH_ROW][index + 1]]
        truth_starts = lists[TRUTH_START][offsets[TRUTH_START][index] : offsets[TRUTH_START][index + 1]]
        truth_counts = lists[TRUTH_COUNT][offsets[TRUTH_COUNT][index] : offsets[TRUTH_COUNT][index + 1]]
        truth_tokens = lists[TRUTH_TOKENS][offsets[TRUTH_TOKENS][index] : offsets[TRUTH_TOKENS][index + 1]]
        truth_runs = truth_rows.shape[0] if settings[HAS_TRUTH] != 0 else 0
        truths_fit = truth_starts.shape[0] == truth_runs and truth_counts.shape[0] == truth_runs
        if settings[HAS_TRUTH] != 0 and not truths_fit:
            fine = 0
        truths_done = 0
        tokens_done = 0
        while fine == 1 and truths_done < truth_runs:
            row = truth_rows[truths_done]
            start = truth_starts[truths_done]
            count = truth_counts[truths_done]
            if run_fits(truth, row, start, count, truth_tokens, tokens_done) == 0:
                fine = 0
                break
            for g in range(num_groups):
                touch_truth_run(
                    pending[g],
                    counts[g],
                    books[g],
                    groups[g, GROUP_OFFSET],
                    truth,
                    row,
                    start,
                    truth_tokens,
                    tokens_done,
                    count,
                )
            keep_run(truth, row, start, old_tokens, tokens_done, count)
            fill_run(truth, row, start, truth_tokens, tokens_done, count)
            tokens_done += count
            truths_done += 1
        if settings[HAS_TRUTH] != 0 and tokens_done != truth_tokens.shape[0]:
            fine = 0

        if fine == 1 and kind == FORWARD_EVENT and table_runs > 0:
            prefixes = lists[PREFIXES][offsets[PREFIXES][index] : offsets[PREFIXES][index + 1]]
            fine = runs_are_read(rows, prefixes, run_rows, run_starts, run_counts) if len(prefixes) == len(rows) else 0
        if fine == 1 and kind == FORWARD_EVENT:
            fine = take_forward(
                scalars,
                lists,
                offsets,
                kv,
                kv_offsets,
                index,
                event,
                serial,
                settings,
                groups,
                stream_of,
                words_of,
                progress,
                tally,
                tables,
                truth,
                buffers,
                streams,
                ledgers,
                writers,
                heads,
                links,
                pending,
                counts,
                books,
                lasts,
                status,
                samples,
                facts,
                told,
                row_stamps,
                old_events,
                ends,
                lens,
                chain,
                hashes,
                read_slots,
                read_before,
                read_positions,
                new_ids,
            )
        elif fine == 1 and kind in (ALLOC_EVENT, FREE_EVENT, EVICT_EVENT):
            slot_groups = lists[SLOT_GROUP][offsets[SLOT_GROUP][index] : offsets[SLOT_GROUP][index + 1]]
            slot_starts = lists[SLOT_START][offsets[SLOT_START][index] : offsets[SLOT_START][index + 1]]
            slot_counts = lists[SLOT_COUNT][offsets[SLOT_COUNT][index] : offsets[SLOT_COUNT][index + 1]]
            slot_runs = slot_groups.shape[0]
            if slot_starts.shape[0] != slot_runs or slot_counts.shape[0] != slot_runs or rows.shape[0] > 1:
                fine = 0
            if kind == ALLOC_EVENT and code < 0:
                fine = 0
            for run in range(slot_runs):
                g = slot_groups[run]
                if g < 0 or g >= num_groups:
                    fine = 0
                if fine == 0:
                    break
                fine = run_ordinary(
                    ledgers[g],
                    transfers[g],
                    slot_starts[run],
                    slot_counts[run],
                    kind,
                    code,
                    request,
                    serial,
                    complete,
                    from_start,
                )
            for run in range(slot_runs if fine == 1 else 0):
                g = slot_groups[run]
                take_run(
                    ledgers[g],
                    transfers[g],
                    heads[g],
                    links[g],
                    pending[g],
                    counts[g],
                    books[g],
                    slot_starts[run],
                    slot_counts[run],
                    kind,
                    code,
                    request,
                    event,
                    complete,
                    from_start,
                    held,
                )
        elif fine == 1 and kind == STATUS_EVENT:
            fine = status_ordinary(code, request, rows, complete, held, told)
            if fine == 1:
                for runner in range(words_of.shape[0]):
                    start_over(lasts[runner], request)
                row = rows[0] if rows.shape[0] == 1 else -1
                end_samples(samples, row, request, event)
                note_status(status, row, request, code, event)
        elif fine == 1 and kind == REQUEST_EVENT and settings[VOCAB] != 0:  # only the token oracle asks for it
            learn_request(facts, request, scalars[ROOM][index], scalars[PROMPT][index])

        if fine == 0:
            while truths_done > 0:
                truths_done -= 1
                tokens_done -= truth_counts[truths_done]
                fill_run(
                    truth,
                    truth_rows[truths_done],
                    truth_starts[truths_done],
                    old_tokens,
                    tokens_done,
                    truth_counts[truths_done],
                )
            while tables_done > 0:
                tables_done -= 1
                slots_done -= run_counts[tables_done]
                fill_run(
                    tables[run_tables[tables_done]],
                    run_rows[tables_done],
                    run_starts[tables_done],
                    old_slots,
                    slots_done,
                    run_counts[tables_done],
                )
            break
        index += 1
    progress[AT] = index
