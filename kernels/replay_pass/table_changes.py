"""The changes of tables and truth tokens that an event carries, or that a forward makes by itself.

What an event that turns out not to be ordinary has changed stays: whoever takes it then writes the same values again.
"""

from ..dispatch import In64, Out32x2, primitive
from .array_views import int32_rows, int64_list, int64s
from .context import Context, ForwardLists, RowState, group_state, states_at, table_of, work_of
from .entries import bucket_of, invalidate_slot
from .invalidation import Runs, invalidate_lut_entry, invalidate_table_loops, invalidate_truth_loops
from .layout import (
    FULL_STATES,
    GROUP_LUT,
    GROUP_TABLE,
    HAS_TRUTH,
    LIST_ARRAYS,
    LUT_ARRAYS,
    LUT_COUNT,
    LUT_INDEX,
    LUT_SLOTS,
    LUT_START,
    NUM_GROUPS,
    NUM_LUTS,
    NUM_TABLES,
    ROW_ARRAYS,
    TABLE_COUNT,
    TABLE_INDEX,
    TABLE_ROW,
    TABLE_SLOTS,
    TABLE_START,
    TRUTH_COUNT,
    TRUTH_ROW,
    TRUTH_START,
    TRUTH_TOKENS,
)
from .state import INT32_MAX, INT32_MIN, apply_forward_loops


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
def fill_runs(index: int, runs: Runs, table: Out32x2) -> int:
    """Write the runs of one table, and return 1; 0 if one lies outside it or is no run of 32-bit numbers."""
    at = 0
    for run in range(runs.rows.shape[0]):
        row, start, count = runs.rows[run], runs.starts[run], runs.lens[run]
        if count < 0 or count > runs.values.shape[0] - at:
            return 0
        if runs.indices[run] == index:
            if row < 0 or row >= table.shape[0] or start < 0 or start > table.shape[1] - count:
                return 0
            for i in range(count):
                table[row, start + i] = runs.values[at + i]
        at += count
    return 1 if at == runs.values.shape[0] else 0


@primitive()
def change_table(context: Context, index: int, runs: Runs) -> None:
    """Make due what depends on the cells of a block table that runs are about to change."""
    for g in range(context.settings[NUM_GROUPS]):
        if context.groups[g, GROUP_TABLE] == index:
            group = group_state(context, g)
            invalidate_table_loops(index, runs, group.table.req_to_token, group.states)
            if context.groups[g, GROUP_LUT] >= 0:
                full_states = states_at(context.arrays, group.first + FULL_STATES)
                invalidate_table_loops(index, runs, group.table.req_to_token, full_states)


@primitive()
def change_truth(context: Context, runs: Runs, truth: Out32x2) -> None:
    """Make due what was compared with the truth tokens that runs are about to change."""
    for g in range(context.settings[NUM_GROUPS]):
        group = group_state(context, g)
        invalidate_truth_loops(runs, truth, group.offset, group.states)


@primitive()
def apply_table_changes(context: Context, index: int) -> int:
    """Apply an event's changes of block tables; 0 if they do not fit."""
    arrays, lists = context.arrays, context.settings[LIST_ARRAYS]
    runs = Runs(
        int64_list(arrays, lists + TABLE_INDEX, index),
        int64_list(arrays, lists + TABLE_ROW, index),
        int64_list(arrays, lists + TABLE_START, index),
        int64_list(arrays, lists + TABLE_COUNT, index),
        int64_list(arrays, lists + TABLE_SLOTS, index),
    )
    count = runs.indices.shape[0]
    if runs.rows.shape[0] != count or runs.starts.shape[0] != count or runs.lens.shape[0] != count:
        return 0
    if count == 0:
        return 1 if runs.values.shape[0] == 0 else 0
    for run in range(count):
        if runs.indices[run] < 0 or runs.indices[run] >= context.settings[NUM_TABLES]:
            return 0
    if are_32_bits(runs.values) == 0:
        return 0
    for number in range(context.settings[NUM_TABLES]):
        change_table(context, number, runs)
        if fill_runs(number, runs, table_of(context, number, -1).req_to_token) == 0:
            return 0
    return 1


@primitive()
def apply_lut_changes(context: Context, index: int) -> int:
    """Apply an event's changes of full-to-SWA tables; 0 if they do not fit."""
    arrays, lists = context.arrays, context.settings[LIST_ARRAYS]
    indices, starts = int64_list(arrays, lists + LUT_INDEX, index), int64_list(arrays, lists + LUT_START, index)
    lens, slots = int64_list(arrays, lists + LUT_COUNT, index), int64_list(arrays, lists + LUT_SLOTS, index)
    if starts.shape[0] != indices.shape[0] or lens.shape[0] != indices.shape[0]:
        return 0
    at = 0
    for run in range(indices.shape[0]):
        number, start, count = indices[run], starts[run], lens[run]
        if number < 0 or number >= context.settings[NUM_LUTS] or count < 0 or count > slots.shape[0] - at:
            return 0
        lut = int64s(context.arrays, context.settings[LUT_ARRAYS] + number)
        if start < 0 or start > lut.shape[0] - count:
            return 0
        for g in range(context.settings[NUM_GROUPS]):
            if context.groups[g, GROUP_LUT] == number:
                group = group_state(context, g)
                full_states = states_at(context.arrays, group.first + FULL_STATES)
                for i in range(count):
                    place = start + i
                    if lut[place] != slots[at + i]:
                        invalidate_lut_entry(group.states, group.table, place, lut[place])
                        if full_states.heads[bucket_of(full_states, place)] != 0:
                            invalidate_slot(full_states, bucket_of(full_states, place))
        for i in range(count):
            lut[start + i] = slots[at + i]
        at += count
    return 1 if at == slots.shape[0] else 0


@primitive()
def apply_truth_changes(context: Context, index: int) -> int:
    """Apply an event's changes of truth tokens; 0 if they do not fit."""
    arrays, lists = context.arrays, context.settings[LIST_ARRAYS]
    if context.settings[HAS_TRUTH] == 0:
        return 1
    rows = int64_list(arrays, lists + TRUTH_ROW, index)
    runs = Runs(
        rows,
        rows,
        int64_list(arrays, lists + TRUTH_START, index),
        int64_list(arrays, lists + TRUTH_COUNT, index),
        int64_list(arrays, lists + TRUTH_TOKENS, index),
    )
    if runs.starts.shape[0] != rows.shape[0] or runs.lens.shape[0] != rows.shape[0]:
        return 0
    if are_32_bits(runs.values) == 0:
        return 0
    truth = int32_rows(context.arrays, context.settings[ROW_ARRAYS])
    change_truth(context, runs, truth)
    at = 0
    for run in range(rows.shape[0]):
        row, start, count = rows[run], runs.starts[run], runs.lens[run]
        if row < 0 or row >= truth.shape[0] or count < 0 or count > runs.values.shape[0] - at:
            return 0
        if start < 0 or start > truth.shape[1] - count:
            return 0
        for i in range(count):
            truth[row, start + i] = runs.values[at + i]
        at += count
    return 1 if at == runs.values.shape[0] else 0


@primitive()
def apply_own_changes(context: Context, forward: ForwardLists, rows: RowState) -> None:
    """Put a forward's own slots and sampled tokens into the tables, as the recorder did."""
    memory = work_of(context)
    bs, tokens = forward.rows.shape[0], forward.inputs.shape[0]
    lens, indices = memory.lens[:bs], memory.run_indices[:bs]
    for number in range(context.settings[NUM_TABLES]):
        for r in range(bs):
            indices[r] = number
        values = forward.written[number * tokens : (number + 1) * tokens]
        change_table(context, number, Runs(indices, forward.rows, forward.prefixes, lens, values))
        table = table_of(context, number, -1).req_to_token
        apply_forward_loops(forward.rows, forward.prefixes, lens, values, table)
    if context.settings[HAS_TRUTH] == 0 or forward.sampled_lens.shape[0] == 0:
        return
    starts, counts = memory.run_starts[:bs], memory.run_lens[:bs]
    for r in range(bs):
        starts[r] = forward.prefixes[r] + lens[r]
        counts[r] = forward.sampled_lens[r] if forward.rows[r] != 0 else 0
    change_truth(context, Runs(indices, forward.rows, starts, counts, forward.sampled), rows.truth)
    apply_forward_loops(forward.rows, starts, counts, forward.sampled, rows.truth)
