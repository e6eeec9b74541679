"""What an ordinary forward changes, once it is known to be one: nothing is asked here."""

from ..dispatch import In64, In64x2, InU64, Out32x2, Out64, Out64x2, primitive
from .changes import fill_tables
from .forward import note_rows
from .layout import (
    COUNT_FORWARDS,
    COUNT_VERIFIED,
    COUNT_WRITTEN,
    FIRST_BUFFER,
    FIRST_STREAM,
    GROUP_OFFSET,
    GROUP_RUNNER,
    GROUP_TABLE,
    KV_WORDS,
    NEW_IDS,
    NUM_BUFFERS,
    NUM_GROUPS,
    NUM_STREAMS,
    SINCE_SWEEP,
    STREAM_BEFORE,
    STREAM_BUFFER,
    STREAM_WORDS,
    Buffers,
    GroupHeads,
    GroupLinks,
    GroupPending,
    GroupRows,
    Streams,
    Tables,
)
from .reads import clear_hashes, fold_words, settle_reads
from .writes import (
    seed_chains,
    store_words,
    watch_written,
    write_chains,
    write_records,
    write_words,
)


@primitive()
def carry_out(
    rows: In64,
    requests: In64,
    prefixes: In64,
    known: In64,
    sampled_lens: In64,
    sampled: In64,
    inputs: In64,
    positions: In64,
    written: In64,
    kv: InU64,
    runner: int,
    mode: int,
    forward: int,
    event: int,
    end: int,
    reads: int,
    settings: In64,
    groups: In64x2,
    stream_of: In64x2,
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
    last: Out64x2,
    samples: Out64x2,
    told: In64,
    ends: In64x2,
    lens: In64,
    chain: Out64,
    hashes: Out64,
    read_positions: In64x2,
    new_ids: Out64,
) -> None:
    """Carry out a forward whose requests write `lens`, `end` tokens together, and read `reads` of a prefix.

    `read_positions`, `ends` are what it had to look at, by group, as `reads.gather_reads` left them; `told` is any
    array, for a full-to-SWA table that there is none of.
    """
    num_groups = settings[NUM_GROUPS]
    tokens = inputs.shape[0]
    offset = 0
    for g in range(num_groups):
        if groups[g, GROUP_RUNNER] == runner:
            offset = groups[g, GROUP_OFFSET]
    for g in range(num_groups):
        if groups[g, GROUP_RUNNER] != runner:
            continue
        number = groups[g, GROUP_TABLE]
        slots = written[number * tokens : (number + 1) * tokens]
        table = tables[number]
        first = groups[g, FIRST_BUFFER]
        settle_reads(
            rows,
            known,
            read_positions[g],
            ends[g],
            table,
            told,
            offset,
            heads[g],
            links[g],
            pending[g],
            counts[g],
            books[g],
        )
        first_stream = groups[g, FIRST_STREAM]
        end_stream = first_stream + groups[g, NUM_STREAMS]
        seed_chains(buffers[first], table, rows, prefixes, lens, chain)
        write_chains(  # the first is a HEAD, without KV hashes
            buffers[first], writers[g], ledgers[g], requests, lens, slots, inputs, positions, event, forward, chain
        )
        for buffer in range(first + 1, first + groups[g, NUM_BUFFERS]):
            mine = 0
            its_own = -1
            for s in range(first_stream, end_stream):
                if stream_of[s, STREAM_BUFFER] == buffer:
                    mine += 1
                    its_own = s
            if mine == 1 and settings[KV_WORDS] >= 2 and stream_of[its_own, STREAM_WORDS] == 2:
                at = stream_of[its_own, STREAM_BEFORE] * tokens
                write_words(buffers[buffer], streams[its_own], slots, end, kv, at, inputs, positions, chain)
                continue
            clear_hashes(hashes, end)
            for s in range(first_stream, end_stream):
                if stream_of[s, STREAM_BUFFER] == buffer:
                    store_words(slots, kv, stream_of[s, STREAM_BEFORE] * tokens, streams[s])
                    if settings[KV_WORDS] > 0:
                        fold_words(streams[s], slots, end, settings[KV_WORDS], hashes)
            write_records(buffers[buffer], slots, end, inputs, positions, chain, hashes)
        tally[g, COUNT_VERIFIED] += reads
        tally[g, COUNT_WRITTEN] += end
        tally[g, COUNT_FORWARDS] += 1
    fill_tables(
        rows,
        prefixes,
        lens,
        sampled_lens,
        sampled,
        written,
        tokens,
        settings,
        groups,
        tables,
        truth,
        heads,
        links,
        pending,
        counts,
        books,
    )
    for g in range(num_groups):
        if groups[g, GROUP_RUNNER] == runner:
            number = groups[g, GROUP_TABLE]
            slots = written[number * tokens : (number + 1) * tokens]
            watch_written(
                rows, prefixes, lens, known, offset, slots, tables[number].shape[1], heads[g], links[g], books[g]
            )
    progress[NEW_IDS] = note_rows(
        rows,
        requests,
        prefixes,
        lens,
        sampled_lens,
        sampled,
        runner,
        mode,
        forward,
        event,
        last,
        samples,
        new_ids,
        progress[NEW_IDS],
    )
    if runner == 0:
        progress[SINCE_SWEEP] += 1
