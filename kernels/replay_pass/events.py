"""The compiled pass: a batch's ordinary events over its columns, up to the first that is not ordinary.

A replay spends most of its time between kernels, for most events are small and nothing is found about them. The pass does
for an ordinary event what the executor and the history checks do for it, with "nothing is wrong" for an answer. Before
it changes anything it makes sure that this is the answer, by the ops' and the ledger's own loops: whatever gives a row or
a finding, contradicts itself, leaves a pool or a table, or is of a kind that is seldom, ends the pass in front of it, and
is for the executor. What the pass does not cover costs time, never a result.

Some things are changed before that is sure: tables, into which the executor writes the same values again; stamps of the
ledger, whose serial is used up; entries made due, which are verified once more.
"""

from ..dispatch import In64, In64x2, packed, primitive
from .apply import apply_forward
from .context import (
    ALLOC_EVENT,
    EVICT_EVENT,
    FORWARD_EVENT,
    FREE_EVENT,
    REQUEST_EVENT,
    STATUS_EVENT,
    TABLE_RUNS,
    Context,
    Event,
    Figures,
    Progress,
    Streams,
    Tally,
    event_at,
    group_state,
    row_state,
    runs_at,
    settings_of,
)
from .forward import forward_ordinary
from .rows import end_samples, learn_request, note_status, start_over
from .slots import run_ordinary, status_ordinary, take_run
from .table_changes import apply_lut_changes, apply_table_changes, apply_truth_changes


@primitive()
def runs_are_read(context: Context, event: Event) -> int:
    """Say whether every cell that a forward's event gives is of the prefix that its row's request reads; 0 or 1."""
    rows, runs = event.rows, runs_at(context, TABLE_RUNS, event.place)
    if runs.rows.shape[0] > 0 and event.prefixes.shape[0] != rows.shape[0]:
        return 0
    for i in range(runs.rows.shape[0]):
        for r in range(rows.shape[0]):
            if rows[r] == runs.rows[i] and runs.starts[i] + runs.lens[i] > event.prefixes[r]:
                return 0
    return 1


@primitive()
def take_forward(context: Context, event: Event) -> int:
    """Carry out a forward whose changes are in the tables already; 0 if it is not ordinary, and then nothing was done."""
    settings = context.settings
    if event.offset < 0 or settings.padding_reported != 0:
        return 0
    if event.runner == 0 and settings.stall_limit > 0 and context.progress.since_sweep[0] + 1 > settings.stall_limit:
        return 0
    rows = row_state(context, event.runner)
    if runs_are_read(context, event) == 0 or forward_ordinary(context, event, rows) == 0:
        return 0
    apply_forward(context, event, rows)
    return 1


@primitive()
def take_slots(context: Context, event: Event) -> int:
    """Carry out an alloc, a free or an eviction; 0 if it is not ordinary."""
    settings, owners, starts, counts = context.settings, event.slot_groups, event.slot_starts, event.slot_counts
    runs = owners.shape[0]
    if starts.shape[0] != runs or counts.shape[0] != runs or event.rows.shape[0] > 1:
        return 0
    if event.kind == ALLOC_EVENT and event.status < 0:
        return 0
    for run in range(runs):
        if owners[run] < 0 or owners[run] >= settings.num_groups:
            return 0
        if run_ordinary(group_state(context, owners[run]), starts[run], counts[run], event, settings,
                        context.progress.serial[0]) == 0:  # fmt: skip
            return 0
    held = row_state(context, 0).held
    for run in range(runs):
        take_run(group_state(context, owners[run]), starts[run], counts[run], event, settings, held)
    return 1


@primitive()
def take_status(context: Context, event: Event) -> int:
    """Carry out a request's change of status; 0 if it is not ordinary."""
    rows, request = row_state(context, 0), event.request
    if status_ordinary(event, context.settings.complete, rows.held, rows.reported) == 0:
        return 0
    for runner in range(context.settings.num_runners):
        start_over(row_state(context, runner).last, request)
    row = event.rows[0] if event.rows.shape[0] == 1 else -1
    end_samples(rows.samples, row, request, event.number)
    note_status(rows.status, row, request, event.status, event.number)
    return 1


@packed
def replay_events_loops(
    arrays: In64x2,
    groups: In64x2,
    streams: Streams,
    events: In64x2,
    settings: In64,
    progress: Progress,
    tally: Tally,
    figures: Figures,
) -> None:
    """Take events from `settings.start` on until one is not ordinary; `progress.at[0]` is its index. See `Context`."""
    context = Context(arrays, groups, streams, events, progress, tally, figures, settings_of(settings))
    index = context.settings.start
    while index < context.settings.stop:
        event = event_at(context, index)
        progress.serial[0] += 1
        if event.kind < 0 or apply_table_changes(context, index) == 0 or apply_lut_changes(context, index) == 0:
            break
        if apply_truth_changes(context, index) == 0:
            break
        fine = 1
        if event.kind == FORWARD_EVENT:
            fine = take_forward(context, event)
        elif event.kind in (ALLOC_EVENT, FREE_EVENT, EVICT_EVENT):
            fine = take_slots(context, event)
        elif event.kind == STATUS_EVENT:
            fine = take_status(context, event)
        elif event.kind == REQUEST_EVENT and context.settings.vocab != 0:  # only the token oracle asks for it
            learn_request(row_state(context, 0).facts, event.request, event.room, event.prompt)
        if fine == 0:
            break
        index += 1
    progress.at[0] = index
