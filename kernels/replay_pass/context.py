"""What one call of the compiled pass works on, as named tuples of arrays that it finds in the table of addresses."""

from typing import NamedTuple

from ..dispatch import In64, In64x2, InU64, Out8, Out8x2, Out32, Out32x2, Out64, Out64x2, primitive
from .array_views import (
    int32_rows,
    int32s,
    int64_list,
    int64_rows,
    int64s,
    uint8_rows,
    uint8s,
    uint64_list,
)
from .due import Readers
from .entries import EntryStates, SlotTable
from .layout import (
    EXTENDS,
    FORWARD,
    GROUP_ARRAYS,
    GROUP_LUT,
    GROUP_OFFSET,
    GROUP_PADDING,
    GROUP_RING,
    GROUP_RUNNER,
    GROUP_SLOTS,
    GROUP_TABLE,
    GROUP_WINDOW,
    HAS_TRUTH,
    INPUTS,
    KV,
    LEDGER,
    LIST_ARRAYS,
    LUT_ARRAYS,
    MODE,
    NUM_GROUPS,
    POSITIONS,
    PREFIXES,
    REQUEST_ARRAYS,
    REQUESTS,
    ROW_ARRAYS,
    ROWS,
    RUNNER,
    RUNNER_ARRAYS,
    SAMPLED,
    SAMPLED_LENS,
    SCALAR_ARRAYS,
    STATES,
    TABLE_ARRAYS,
    TRANSFERS,
    TRUTH_LENS,
    WORK_ARRAYS,
    WRITERS,
    WRITTEN,
)


class Context(NamedTuple):
    """What a call is given; the columns are those of `layout.py`."""

    arrays: In64x2  # [n, 3]: the table of addresses
    groups: In64x2  # [groups, GROUP_COLUMNS]
    streams: In64x2  # [streams, 3]
    settings: In64  # [NUM_SETTINGS]
    progress: Out64  # [NUM_PROGRESS]
    tally: Out64x2  # [groups, 3]
    figures: Out64x2  # [events, groups * NUM_FIGURES]; [0, 0] without a full-to-SWA table


class ForwardLists(NamedTuple):
    """A forward's columns."""

    rows: In64  # [bs]
    requests: In64  # [bs]
    prefixes: In64  # [bs]
    extends: In64  # [bs]
    known: In64  # [bs]: truth lens; [0] if there are no truth tokens
    sampled_lens: In64  # [bs] or [0]
    sampled: In64  # [sum(sampled_lens)]
    inputs: In64  # [tokens]
    positions: In64  # [tokens]
    written: In64  # [tables * tokens]
    kv: InU64  # [tokens * words of its runner]
    place: int  # among the events of the batch
    runner: int
    mode: int
    number: int
    event: int  # + 1
    serial: int
    offset: int  # token_offset; -1 if its runner has no group


class RowState(NamedTuple):
    """What is known by row and by request."""

    truth: Out32x2  # [rows, width]; [0, 0] without truth tokens
    last: Out64x2  # [rows, 6]: of the forward's runner
    status: Out64x2  # [rows, 3]
    samples: Out64x2  # [rows, 5]
    row_stamps: Out64  # [rows]
    facts: Out64x2  # requests, for the oracle
    reported: In64  # [n]: requests of which a check remembers that it reported them


class Work(NamedTuple):
    """Memory that a forward works with; `arrays` of `WorkMemory` has it in this order."""

    lens: Out64  # [requests]: tokens of each
    fresh_from: Out64  # [requests]
    seen: Out64  # [requests]
    old_events: Out64x2  # [groups, requests]
    how: Out8x2  # [groups, requests]
    request_offsets: Out64x2  # [groups, requests + 1]: entries due
    write_offsets: Out64  # [requests + 1]
    seeds: Out64x2  # [groups, requests]
    run_starts: Out64  # [requests]
    run_lens: Out64  # [requests]
    run_indices: Out64  # [requests]
    own_slots: Out64x2  # [groups, tokens]
    others: Out64  # [tokens]
    found: Out64  # [tokens + most due]
    bits: Out64  # [tokens + most due]
    hashes: Out64  # [tokens + most due]
    due_slots: Out64  # [most due]
    due_tokens: Out64
    due_positions: Out64
    due_prev_slots: Out64
    due_marks: Out8
    new_requests: Out64  # [ids]
    counters: Out64  # [NUM_COUNTERS]
    counts32: Out32  # [3]
    log: Out64x2  # [2, 8]: a violation, and the entry that it is of
    reads: Out64  # [groups]: entries that a forward reads, due or not


class GroupState(NamedTuple):
    """A pool group."""

    number: int
    table: SlotTable
    states: EntryStates
    ledger: Out64x2  # [slots, 8]
    transfers: Out64  # [slots]
    writers: Out64x2  # [slots, 3]
    num_slots: int
    window: int
    ring: int
    padding: int
    offset: int
    first: int  # number of its first array


@primitive()
def scalar_of(context: Context, column: int, index: int) -> int:
    """Return a scalar of an event."""
    return int64s(context.arrays, context.settings[SCALAR_ARRAYS] + column)[index]


@primitive()
def work_of(context: Context) -> Work:
    """Return the memory to work with."""
    arrays, first = context.arrays, context.settings[WORK_ARRAYS]
    return Work(
        int64s(arrays, first),
        int64s(arrays, first + 1),
        int64s(arrays, first + 2),
        int64_rows(arrays, first + 3),
        uint8_rows(arrays, first + 4),
        int64_rows(arrays, first + 5),
        int64s(arrays, first + 6),
        int64_rows(arrays, first + 7),
        int64s(arrays, first + 8),
        int64s(arrays, first + 9),
        int64s(arrays, first + 10),
        int64_rows(arrays, first + 11),
        int64s(arrays, first + 12),
        int64s(arrays, first + 13),
        int64s(arrays, first + 14),
        int64s(arrays, first + 15),
        int64s(arrays, first + 16),
        int64s(arrays, first + 17),
        int64s(arrays, first + 18),
        int64s(arrays, first + 19),
        uint8s(arrays, first + 20),
        int64s(arrays, first + 21),
        int64s(arrays, first + 22),
        int32s(arrays, first + 23),
        int64_rows(arrays, first + 24),
        int64s(arrays, first + 25),
    )


@primitive()
def states_at(arrays: In64x2, first: int) -> EntryStates:
    """Return the entry states whose arrays begin at a number."""
    return EntryStates(
        int32s(arrays, first),
        int32_rows(arrays, first + 1),
        uint8_rows(arrays, first + 2),
        int32_rows(arrays, first + 3),
        int64_rows(arrays, first + 4),
    )


@primitive()
def table_of(context: Context, number: int, lut: int) -> SlotTable:
    """Return a block table with a full-to-SWA table, or none if `lut` is -1."""
    settings, arrays = context.settings, context.arrays
    return SlotTable(int32_rows(arrays, settings[TABLE_ARRAYS] + number), int64s(arrays, settings[LUT_ARRAYS] + lut))


@primitive()
def group_state(context: Context, number: int) -> GroupState:
    """Return a group's state."""
    group = context.groups[number]
    first = group[GROUP_ARRAYS]
    return GroupState(
        number,
        table_of(context, group[GROUP_TABLE], group[GROUP_LUT]),
        states_at(context.arrays, first + STATES),
        int64_rows(context.arrays, first + LEDGER),
        int64s(context.arrays, first + TRANSFERS),
        int64_rows(context.arrays, first + WRITERS),
        group[GROUP_SLOTS],
        group[GROUP_WINDOW],
        group[GROUP_RING],
        group[GROUP_PADDING],
        group[GROUP_OFFSET],
        first,
    )


@primitive()
def row_state(context: Context, runner: int) -> RowState:
    """Return what is known by row, of a runner's forwards."""
    arrays, first = context.arrays, context.settings[ROW_ARRAYS]
    by_request = context.settings[REQUEST_ARRAYS]
    return RowState(
        int32_rows(arrays, first),
        int64_rows(arrays, context.settings[RUNNER_ARRAYS] + runner),
        int64_rows(arrays, first + 1),
        int64_rows(arrays, first + 2),
        int64s(arrays, first + 3),
        int64_rows(arrays, by_request + 1),
        int64s(arrays, by_request + 2),
    )


@primitive()
def forward_lists(context: Context, index: int, event: int, serial: int) -> ForwardLists:
    """Return a forward's columns; its lists have the lengths that they have."""
    runner = scalar_of(context, RUNNER, index)
    offset = -1
    for g in range(context.settings[NUM_GROUPS]):
        if context.groups[g, GROUP_RUNNER] == runner:
            offset = context.groups[g, GROUP_OFFSET]
    arrays, lists = context.arrays, context.settings[LIST_ARRAYS]
    known = int64_list(arrays, lists + TRUTH_LENS, index)
    return ForwardLists(
        int64_list(arrays, lists + ROWS, index),
        int64_list(arrays, lists + REQUESTS, index),
        int64_list(arrays, lists + PREFIXES, index),
        int64_list(arrays, lists + EXTENDS, index),
        known if context.settings[HAS_TRUTH] != 0 else known[:0],
        int64_list(arrays, lists + SAMPLED_LENS, index),
        int64_list(arrays, lists + SAMPLED, index),
        int64_list(arrays, lists + INPUTS, index),
        int64_list(arrays, lists + POSITIONS, index),
        int64_list(arrays, lists + WRITTEN, index),
        uint64_list(arrays, lists + KV, index),
        index,
        runner,
        scalar_of(context, MODE, index),
        scalar_of(context, FORWARD, index),
        event,
        serial,
        offset,
    )


@primitive()
def readers_of(forward: ForwardLists) -> Readers:
    """Return the requests of a forward as the plan of due entries takes them."""
    return Readers(forward.rows, forward.requests, forward.prefixes, forward.known)
