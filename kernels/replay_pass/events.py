"""The compiled pass: a batch's ordinary events over its columns, up to the first that is not ordinary.

A replay spends most of its time between kernels, for most events are small and nothing is found about them. The pass does
for an ordinary event what the executor and the history checks do for it, with "nothing is wrong" for an answer. Before
it changes anything it makes sure that this is the answer, by the ops' and the ledger's own loops: whatever gives a row or
a finding, contradicts itself, leaves a pool or a table, or is of a kind that is seldom, ends the pass in front of it, and
is for the executor. What the pass does not cover costs time, never a result.

Some things are changed before that is sure: tables, into which the executor writes the same values again; stamps of the
ledger, whose serial is used up; entries made due, which are verified once more.
"""

from ..dispatch import In64, In64x2, Out64, Out64x2, packed, primitive
from .apply import apply_forward
from .array_views import int64_list, int64_rows, int64s
from .context import Context, forward_lists, group_state, row_state, scalar_of
from .forward import forward_ordinary
from .layout import (
    ALLOC_EVENT,
    AT,
    COMPLETE,
    EVICT_EVENT,
    FIRST_EVENT,
    FORWARD_EVENT,
    FREE_EVENT,
    FROM_START,
    KIND,
    LIST_ARRAYS,
    NUM_GROUPS,
    NUM_RUNNERS,
    PADDING_REPORTED,
    PREFIXES,
    PROMPT,
    REQUEST,
    REQUEST_ARRAYS,
    REQUEST_EVENT,
    ROOM,
    ROW_ARRAYS,
    ROWS,
    RUNNER,
    RUNNER_ARRAYS,
    SERIAL,
    SINCE_SWEEP,
    SLOT_COUNT,
    SLOT_GROUP,
    SLOT_START,
    STALL_LIMIT,
    START,
    STATUS,
    STATUS_EVENT,
    STOP,
    TABLE_COUNT,
    TABLE_ROW,
    TABLE_START,
    VOCAB,
)
from .rows import end_samples, learn_request, note_status, start_over
from .slots import run_ordinary, status_ordinary, take_run
from .table_changes import apply_lut_changes, apply_table_changes, apply_truth_changes


@primitive()
def runs_are_read(context: Context, index: int) -> int:
    """Say whether every cell that a forward's event gives is of the prefix that its row's request reads; 0 or 1."""
    arrays, lists = context.arrays, context.settings[LIST_ARRAYS]
    rows, prefixes = int64_list(arrays, lists + ROWS, index), int64_list(arrays, lists + PREFIXES, index)
    run_rows, starts = int64_list(arrays, lists + TABLE_ROW, index), int64_list(arrays, lists + TABLE_START, index)
    counts = int64_list(arrays, lists + TABLE_COUNT, index)
    if run_rows.shape[0] > 0 and prefixes.shape[0] != rows.shape[0]:
        return 0
    for i in range(run_rows.shape[0]):
        for r in range(rows.shape[0]):
            if rows[r] == run_rows[i] and starts[i] + counts[i] > prefixes[r]:
                return 0
    return 1


@primitive()
def take_forward(context: Context, index: int, event: int, serial: int, words_of: In64) -> int:
    """Carry out a forward whose changes are in the tables already; 0 if it is not ordinary, and then nothing was done."""
    settings, runner = context.settings, scalar_of(context, RUNNER, index)
    if runner < 0 or runner >= settings[NUM_RUNNERS] or settings[PADDING_REPORTED] != 0:
        return 0
    if runner == 0 and settings[STALL_LIMIT] > 0 and context.progress[SINCE_SWEEP] + 1 > settings[STALL_LIMIT]:
        return 0
    forward = forward_lists(context, index, event, serial)
    rows = row_state(context, runner)
    if runs_are_read(context, index) == 0 or forward_ordinary(context, forward, rows, words_of[runner]) == 0:
        return 0
    apply_forward(context, forward, rows)
    return 1


@primitive()
def take_slots(context: Context, index: int, event: int, serial: int) -> int:
    """Carry out an alloc, a free or an eviction; 0 if it is not ordinary."""
    arrays, lists = context.arrays, context.settings[LIST_ARRAYS]
    settings = context.settings
    kind, code, request = (
        scalar_of(context, KIND, index),
        scalar_of(context, STATUS, index),
        scalar_of(context, REQUEST, index),
    )
    owners, starts = int64_list(arrays, lists + SLOT_GROUP, index), int64_list(arrays, lists + SLOT_START, index)
    counts, rows = int64_list(arrays, lists + SLOT_COUNT, index), int64_list(arrays, lists + ROWS, index)
    if starts.shape[0] != owners.shape[0] or counts.shape[0] != owners.shape[0] or rows.shape[0] > 1:
        return 0
    if kind == ALLOC_EVENT and code < 0:
        return 0
    complete, from_start = settings[COMPLETE], settings[FROM_START]
    for run in range(owners.shape[0]):
        if owners[run] < 0 or owners[run] >= settings[NUM_GROUPS]:
            return 0
        group = group_state(context, owners[run])
        start, count = starts[run], counts[run]
        ledger, moving = group.ledger, group.transfers
        if run_ordinary(ledger, moving, start, count, kind, code, request, serial, complete, from_start) == 0:
            return 0
    held = int64_rows(context.arrays, settings[REQUEST_ARRAYS])
    for run in range(owners.shape[0]):
        group = group_state(context, owners[run])
        start, count = starts[run], counts[run]
        ledger, moving = group.ledger, group.transfers
        take_run(ledger, moving, group.states, start, count, kind, code, request, event, complete, from_start, held)
    return 1


@primitive()
def take_status(context: Context, index: int, event: int) -> int:
    """Carry out a request's change of status; 0 if it is not ordinary."""
    arrays, lists = context.arrays, context.settings[LIST_ARRAYS]
    settings = context.settings
    code, request = scalar_of(context, STATUS, index), scalar_of(context, REQUEST, index)
    rows = int64_list(arrays, lists + ROWS, index)
    held = int64_rows(arrays, settings[REQUEST_ARRAYS])
    reported = int64s(arrays, settings[REQUEST_ARRAYS] + 2)
    if status_ordinary(code, request, rows, settings[COMPLETE], held, reported) == 0:
        return 0
    for runner in range(settings[NUM_RUNNERS]):
        start_over(int64_rows(arrays, settings[RUNNER_ARRAYS] + runner), request)
    row = rows[0] if rows.shape[0] == 1 else -1
    end_samples(int64_rows(arrays, settings[ROW_ARRAYS] + 2), row, request, event)
    note_status(int64_rows(arrays, settings[ROW_ARRAYS] + 1), row, request, code, event)
    return 1


@packed
def replay_events_loops(
    arrays: In64x2,
    groups: In64x2,
    streams: In64x2,
    words_of: In64,
    settings: In64,
    progress: Out64,
    tally: Out64x2,
    figures: Out64x2,
) -> None:
    """Take events `settings[START] ..` until one is not ordinary; `progress[AT]` is its index.

    `words_of` `[runners]` is how many words of KV each runner's forwards have a token; the others are those of `Context`.
    """
    context = Context(arrays, groups, streams, settings, progress, tally, figures)
    index = settings[START]
    while index < settings[STOP]:
        kind = scalar_of(context, KIND, index)
        event = settings[FIRST_EVENT] + index + 1
        progress[SERIAL] += 1
        if kind < 0 or apply_table_changes(context, index) == 0 or apply_lut_changes(context, index) == 0:
            break
        if apply_truth_changes(context, index) == 0:
            break
        fine = 1
        if kind == FORWARD_EVENT:
            fine = take_forward(context, index, event, progress[SERIAL], words_of)
        elif kind in (ALLOC_EVENT, FREE_EVENT, EVICT_EVENT):
            fine = take_slots(context, index, event, progress[SERIAL])
        elif kind == STATUS_EVENT:
            fine = take_status(context, index, event)
        elif kind == REQUEST_EVENT and settings[VOCAB] != 0:  # only the token oracle asks for it
            facts = int64_rows(arrays, settings[REQUEST_ARRAYS] + 1)
            request = scalar_of(context, REQUEST, index)
            learn_request(facts, request, scalar_of(context, ROOM, index), scalar_of(context, PROMPT, index))
        if fine == 0:
            break
        index += 1
    progress[AT] = index
