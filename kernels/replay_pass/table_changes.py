"""The changes of tables and truth tokens that an event carries, or that a forward makes by itself.

What an event that turns out not to be ordinary has changed stays: whoever takes it then writes the same values again.
"""

from ..dispatch import In64, Out32x2, primitive
from .context import (
    LUT_RUNS,
    TABLE_RUNS,
    TRUTH_RUNS,
    Context,
    Event,
    RowState,
    full_state,
    group_state,
    lut_of,
    row_state,
    runs_at,
    table_of,
    work_of,
)
from .entries import (
    Runs,
    bucket_of,
    invalidate_lut_entry,
    invalidate_slot,
    invalidate_table_loops,
    invalidate_truth_loops,
)
from .state import INT32_MAX, INT32_MIN, apply_forward_loops, apply_runs_loops


@primitive()
def are_32_bits(values: In64) -> int:
    """Say whether all values are 32-bit numbers; 0 or 1."""
    low = 0
    high = 0
    for i in range(values.shape[0]):  # without a way out, so that several values are looked at at once
        low = min(low, values[i])
        high = max(high, values[i])
    return 1 if low >= INT32_MIN and high <= INT32_MAX else 0


@primitive()
def runs_fit(runs: Runs) -> int:
    """Say whether an event's runs have all that runs have; 0 or 1."""
    count = runs.rows.shape[0]
    return 1 if runs.indices.shape[0] == count and runs.starts.shape[0] == count and runs.lens.shape[0] == count else 0


@primitive()
def change_table(context: Context, index: int, runs: Runs) -> None:
    """Make due what depends on the cells of a block table that runs are about to change."""
    for g in range(context.settings.num_groups):
        group = group_state(context, g)
        if group.table_number == index:
            invalidate_table_loops(index, runs, group.table.req_to_token, group.states)
            if group.lut_number >= 0:
                invalidate_table_loops(index, runs, group.table.req_to_token, full_state(context, group).states)


@primitive()
def change_truth(context: Context, runs: Runs, truth: Out32x2) -> None:
    """Make due what was compared with the truth tokens that runs are about to change."""
    for g in range(context.settings.num_groups):
        group = group_state(context, g)
        invalidate_truth_loops(runs, truth, group.offset, group.states)


@primitive()
def apply_table_changes(context: Context, index: int) -> int:
    """Apply an event's changes of block tables; 0 if they do not fit."""
    runs = runs_at(context, TABLE_RUNS, index)
    if runs_fit(runs) == 0:
        return 0
    if runs.rows.shape[0] == 0:
        return 1 if runs.values.shape[0] == 0 else 0
    for run in range(runs.rows.shape[0]):
        if runs.indices[run] < 0 or runs.indices[run] >= context.settings.num_tables:
            return 0
    outside = work_of(context).log.out_of_range
    for number in range(context.settings.num_tables):
        change_table(context, number, runs)
        apply_runs_loops(number, runs, table_of(context, number), outside)
        if outside[0] != 0:
            return 0
    return 1


@primitive()
def apply_lut_changes(context: Context, index: int) -> int:
    """Apply an event's changes of full-to-SWA tables; 0 if they do not fit."""
    runs = runs_at(context, LUT_RUNS, index)
    if runs_fit(runs) == 0:
        return 0
    at = 0
    for run in range(runs.indices.shape[0]):
        number, start, count = runs.indices[run], runs.starts[run], runs.lens[run]
        if number < 0 or number >= context.settings.num_luts or count < 0 or count > runs.values.shape[0] - at:
            return 0
        lut = lut_of(context, number)
        if start < 0 or start > lut.shape[0] - count:
            return 0
        for g in range(context.settings.num_groups):
            group = group_state(context, g)
            if group.lut_number == number:
                full_states = full_state(context, group).states
                for i in range(count):
                    place = start + i
                    if lut[place] != runs.values[at + i]:
                        invalidate_lut_entry(group.states, group.table, place, lut[place])
                        if full_states.heads[bucket_of(full_states, place)] != 0:
                            invalidate_slot(full_states, bucket_of(full_states, place))
        for i in range(count):
            lut[start + i] = runs.values[at + i]
        at += count
    return 1 if at == runs.values.shape[0] else 0


@primitive()
def apply_truth_changes(context: Context, index: int) -> int:
    """Apply an event's changes of truth tokens; 0 if they do not fit."""
    if context.settings.has_truth == 0:
        return 1
    runs = runs_at(context, TRUTH_RUNS, index)
    if runs_fit(runs) == 0:
        return 0
    truth, outside = row_state(context, 0).truth, work_of(context).log.out_of_range
    change_truth(context, runs, truth)
    apply_runs_loops(-1, runs, truth, outside)
    return 1 if outside[0] == 0 else 0


@primitive()
def apply_own_changes(context: Context, forward: Event, rows: RowState) -> None:
    """Put a forward's own slots and sampled tokens into the tables, as the recorder did."""
    memory = work_of(context)
    bs, tokens = forward.rows.shape[0], forward.inputs.shape[0]
    lens, indices = memory.lens[:bs], memory.run_indices[:bs]
    for number in range(context.settings.num_tables):
        for r in range(bs):
            indices[r] = number
        values = forward.written[number * tokens : (number + 1) * tokens]
        change_table(context, number, Runs(indices, forward.rows, forward.prefixes, lens, values))
        apply_forward_loops(forward.rows, forward.prefixes, lens, values, table_of(context, number))
    if context.settings.has_truth == 0 or forward.sampled_lens.shape[0] == 0:
        return
    starts, counts = memory.run_starts[:bs], memory.run_lens[:bs]
    for r in range(bs):
        starts[r] = forward.prefixes[r] + lens[r]
        counts[r] = forward.sampled_lens[r] if forward.rows[r] != 0 else 0
    change_truth(context, Runs(indices, forward.rows, starts, counts, forward.sampled), rows.truth)
    apply_forward_loops(forward.rows, starts, counts, forward.sampled, rows.truth)
