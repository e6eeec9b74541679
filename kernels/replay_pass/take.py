"""Carrying out one ordinary forward, group by group: first everything is asked, then everything is done."""

from ..dispatch import In64, In64x2, InU64, Out32x2, Out64, Out64x2, primitive
from .carry_out import carry_out
from .forward import lists_fit, requests_ordinary
from .layout import (
    COMPLETE,
    EXTENDS,
    FIRST_BUFFER,
    FIRST_STREAM,
    FORWARD,
    FROM_START,
    GROUP_OFFSET,
    GROUP_RUNNER,
    GROUP_TABLE,
    HAS_TRUTH,
    INPUTS,
    KV_WORDS,
    MODE,
    NUM_BUFFERS,
    NUM_GROUPS,
    NUM_STREAMS,
    NUM_TABLES,
    PADDING_TOLD,
    POSITIONS,
    PREFIXES,
    REQUESTS,
    ROWS,
    RUNNER,
    SAMPLED,
    SAMPLED_LENS,
    SINCE_SWEEP,
    STALL_LIMIT,
    STREAM_BEFORE,
    STREAM_BUFFER,
    TRUTH_LENS,
    WRITTEN,
    Buffers,
    GroupHeads,
    GroupLinks,
    GroupPending,
    GroupRows,
    ListValues,
    RunnerRows,
    Scalars,
    Streams,
    Tables,
)
from .reads import (
    clear_hashes,
    fold_words,
    gather_reads,
    hashes_stand,
    reads_ordinary,
    records_alike,
    restore_events,
    watch_reads,
)
from .writes import (
    nothing_dropped,
    seeds_ordinary,
    stream_stays,
    touch_written,
    writes_ordinary,
)


@primitive()
def take_forward(
    scalars: Scalars,
    lists: ListValues,
    offsets: ListValues,
    words: InU64,
    kv_offsets: In64,
    index: int,
    event: int,
    serial: int,
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
    writers: GroupRows,
    heads: GroupHeads,
    links: GroupLinks,
    pending: GroupPending,
    counts: GroupLinks,
    books: GroupRows,
    lasts: RunnerRows,
    status: In64x2,
    samples: Out64x2,
    facts: In64x2,
    told: In64,
    row_stamps: Out64,
    old_events: Out64x2,
    ends: Out64x2,
    lens: Out64,
    chain: Out64,
    hashes: Out64,
    read_slots: Out64x2,
    read_before: Out64x2,
    read_positions: Out64x2,
    new_ids: Out64,
) -> int:
    """Carry out a forward, its changes in the tables already; 0 where it is unusual, and then nothing was done."""
    runner = scalars[RUNNER][index]
    mode = scalars[MODE][index]
    rows = lists[ROWS][offsets[ROWS][index] : offsets[ROWS][index + 1]]
    requests = lists[REQUESTS][offsets[REQUESTS][index] : offsets[REQUESTS][index + 1]]
    prefixes = lists[PREFIXES][offsets[PREFIXES][index] : offsets[PREFIXES][index + 1]]
    extends = lists[EXTENDS][offsets[EXTENDS][index] : offsets[EXTENDS][index + 1]]
    truth_lens = lists[TRUTH_LENS][offsets[TRUTH_LENS][index] : offsets[TRUTH_LENS][index + 1]]
    sampled_lens = lists[SAMPLED_LENS][offsets[SAMPLED_LENS][index] : offsets[SAMPLED_LENS][index + 1]]
    sampled = lists[SAMPLED][offsets[SAMPLED][index] : offsets[SAMPLED][index + 1]]
    inputs = lists[INPUTS][offsets[INPUTS][index] : offsets[INPUTS][index + 1]]
    positions = lists[POSITIONS][offsets[POSITIONS][index] : offsets[POSITIONS][index + 1]]
    written = lists[WRITTEN][offsets[WRITTEN][index] : offsets[WRITTEN][index + 1]]
    kv = words[kv_offsets[index] : kv_offsets[index + 1]]
    if runner < 0 or runner >= words_of.shape[0] or settings[PADDING_TOLD] != 0:
        return 0
    if runner == 0 and settings[STALL_LIMIT] > 0 and progress[SINCE_SWEEP] + 1 > settings[STALL_LIMIT]:
        return 0
    if (
        lists_fit(
            rows,
            requests,
            prefixes,
            extends,
            truth_lens,
            sampled_lens,
            sampled,
            inputs,
            positions,
            written,
            kv.shape[0],
            words_of[runner],
            settings,
        )
        == 0
    ):
        return 0
    known = truth_lens if settings[HAS_TRUTH] != 0 else truth_lens[:0]
    num_groups = settings[NUM_GROUPS]
    complete = settings[COMPLETE]
    from_start = settings[FROM_START]
    offset = -1
    for g in range(num_groups):
        if groups[g, GROUP_RUNNER] == runner:
            offset = groups[g, GROUP_OFFSET]
    if offset < 0:
        return 0
    width = tables[0].shape[1]
    for number in range(1, settings[NUM_TABLES]):
        width = min(width, tables[number].shape[1])
    last = lasts[runner]
    if (
        requests_ordinary(
            rows,
            requests,
            prefixes,
            extends,
            known,
            sampled_lens,
            inputs,
            positions,
            runner,
            offset,
            mode,
            width,
            serial,
            settings,
            truth,
            last,
            status,
            samples,
            facts,
            told,
            row_stamps,
            lens,
        )
        == 0
    ):
        return 0
    tokens = inputs.shape[0]
    end = 0
    reads = 0
    for r in range(rows.shape[0]):
        end += lens[r]
        if rows[r] != 0:
            reads += prefixes[r]

    fine = 1
    looked = 0  # the groups before this one had their rows watched
    for g in range(num_groups):
        if fine == 0 or groups[g, GROUP_RUNNER] != runner:
            continue
        number = groups[g, GROUP_TABLE]
        slots = written[number * tokens : (number + 1) * tokens]
        table = tables[number]
        ledger = ledgers[g]
        first = groups[g, FIRST_BUFFER]
        last_buffer = first + groups[g, NUM_BUFFERS]
        records = buffers[first + 1]
        others = writes_ordinary(
            records,
            ledger,
            writers[g],
            rows,
            requests,
            lens,
            inputs,
            slots,
            event,
            serial,
            complete,
            from_start,
            chain,
        )
        if others < 0:
            fine = 0
            continue
        if others > 0:
            for s in range(groups[g, FIRST_STREAM], groups[g, FIRST_STREAM] + groups[g, NUM_STREAMS]):
                if stream_stays(streams[s], kv, stream_of[s, STREAM_BEFORE] * tokens, slots, chain, others) == 1:
                    fine = 0
        if fine == 1:
            fine = seeds_ordinary(records, table, rows, prefixes, lens)
        if fine == 1 and complete != 0:
            fine = nothing_dropped(records, ledger, table, rows, requests, prefixes, lens, slots, serial)
        if fine == 0:
            continue
        touch_written(slots, end, heads[g], links[g], pending[g], counts[g], books[g])
        watch_reads(rows, requests, prefixes, known, event, offset, pending[g], counts[g], books[g], old_events[g])
        looked = g + 1
        count = gather_reads(
            rows,
            prefixes,
            table,
            ledger.shape[0],
            pending[g],
            counts[g],
            books[g],
            read_slots[g],
            read_before[g],
            read_positions[g],
            ends[g],
        )
        if count < 0:
            fine = 0
            continue
        fine = reads_ordinary(
            rows,
            requests,
            prefixes,
            known,
            read_slots[g],
            read_before[g],
            read_positions[g],
            ends[g],
            records,
            truth,
            ledger,
            last,
            runner,
            offset,
            event,
            serial,
            complete,
            from_start,
        )
        for number in range(first, last_buffer if count > 0 else first):
            if fine == 1 and number != first + 1:
                fine = records_alike(records, buffers[number], read_slots[g], read_before[g], count)
            if fine == 1:
                clear_hashes(hashes, count)
                for s in range(groups[g, FIRST_STREAM], groups[g, FIRST_STREAM] + groups[g, NUM_STREAMS]):
                    if settings[KV_WORDS] > 0 and stream_of[s, STREAM_BUFFER] == number:
                        fold_words(streams[s], read_slots[g], count, settings[KV_WORDS], hashes)
                fine = hashes_stand(buffers[number], read_slots[g], count, hashes)
    if fine == 0:
        for g in range(looked):
            if groups[g, GROUP_RUNNER] == runner:
                restore_events(rows, books[g], old_events[g])
        return 0

    # Nothing is unusual; from here on nothing is asked any more.
    carry_out(
        rows,
        requests,
        prefixes,
        known,
        sampled_lens,
        sampled,
        inputs,
        positions,
        written,
        kv,
        runner,
        mode,
        scalars[FORWARD][index],
        event,
        end,
        reads,
        settings,
        groups,
        stream_of,
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
        last,
        samples,
        told,
        ends,
        lens,
        chain,
        hashes,
        read_positions,
        new_ids,
    )
    return 1
