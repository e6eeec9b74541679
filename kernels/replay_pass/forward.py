"""The parts of one ordinary forward that no pool group has for itself: its lists, its requests, its rows afterwards."""

from ..dispatch import In32x2, In64, In64x2, Out64, Out64x2, primitive
from ..ops.plan.reference import MAX_PLAN_ENTRIES
from .changes import are_32_bits
from .layout import COMPLETE, NUM_TABLES
from .rows import inputs_ordinary, note_row, note_sample, row_ordinary, same_request


@primitive()
def lists_fit(
    rows: In64,
    requests: In64,
    prefixes: In64,
    extends: In64,
    known: In64,
    sampled_lens: In64,
    sampled: In64,
    inputs: In64,
    positions: In64,
    written: In64,
    kv_words: int,
    words_a_token: int,
    settings: In64,
) -> int:
    """Say whether a forward's lists have the lengths that they must have, and there is a request at all; 0 or 1."""
    bs = rows.shape[0]
    tokens = inputs.shape[0]
    if bs == 0 or kv_words != tokens * words_a_token:
        return 0
    if requests.shape[0] != bs or prefixes.shape[0] != bs or extends.shape[0] != bs:
        return 0
    if positions.shape[0] != tokens or written.shape[0] != tokens * settings[NUM_TABLES]:
        return 0
    if (known.shape[0] != 0 and known.shape[0] != bs) or (sampled_lens.shape[0] != 0 and sampled_lens.shape[0] != bs):
        return 0
    left = sampled.shape[0]
    for r in range(sampled_lens.shape[0]):
        if sampled_lens[r] < 0 or sampled_lens[r] > left:
            return 0
        left -= sampled_lens[r]
    if left != 0 or are_32_bits(sampled) == 0:
        return 0
    return are_32_bits(written)


@primitive()
def runs_are_read(rows: In64, prefixes: In64, run_rows: In64, run_starts: In64, run_counts: In64) -> int:
    """Say whether every cell that a forward's event tells is of the prefix that its row's request reads; 0 or 1."""
    for i in range(run_rows.shape[0]):
        for r in range(rows.shape[0]):
            if rows[r] == run_rows[i] and run_starts[i] + run_counts[i] > prefixes[r]:
                return 0
    return 1


@primitive()
def requests_ordinary(
    rows: In64,
    requests: In64,
    prefixes: In64,
    extends: In64,
    known: In64,
    sampled_lens: In64,
    inputs: In64,
    positions: In64,
    runner: int,
    offset: int,
    mode: int,
    width: int,
    serial: int,
    settings: In64,
    truth: In32x2,
    last: In64x2,
    status: In64x2,
    samples: In64x2,
    facts: In64x2,
    told: In64,
    row_stamps: Out64,
    lens: Out64,
) -> int:
    """Say whether each request runs where and how far it should, on the tokens it should; 0 or 1.

    `lens` takes how many tokens of the batch each request has; `width` is that of the narrowest table. `known` is empty
    where there are no truth tokens.
    """
    tokens = inputs.shape[0]
    at = 0
    entries = 0
    for r in range(rows.shape[0]):
        row = rows[r]
        request = requests[r]
        lens[r] = 0
        for i in range(told.shape[0]):  # of padding, too: a check goes by the ids of a batch, whatever their rows
            if told[i] == request:
                return 0
        prefix = prefixes[r]
        if (
            prefix < 0 or prefix > width or prefix > MAX_PLAN_ENTRIES - entries
        ):  # absurd ones are refused, padding's too
            return 0
        entries += prefix
        if row == 0:
            continue
        extend = extends[r]
        if row < 0 or row >= row_stamps.shape[0] or row_stamps[row] == serial or request < 0:
            return 0
        row_stamps[row] = serial
        if extend < 0 or extend > width - prefix or extend > tokens - at:
            return 0
        truth_len = known[r] if known.shape[0] > 0 else 0
        if truth_len < 0 or truth_len > truth.shape[1]:
            return 0
        sampled = sampled_lens[r] if sampled_lens.shape[0] > 0 else 0
        if row_ordinary(last, status, row, request, prefix, prefix + extend, sampled, runner, settings[COMPLETE]) == 0:
            return 0
        fed = inputs[at : at + extend]
        placed = positions[at : at + extend]
        if (
            inputs_ordinary(
                fed, placed, row, request, prefix, truth_len, offset, mode, runner, settings, truth, samples, facts
            )
            == 0
        ):
            return 0
        lens[r] = extend
        at += extend
    return 1


@primitive()
def note_rows(
    rows: In64,
    requests: In64,
    prefixes: In64,
    lens: In64,
    sampled_lens: In64,
    sampled: In64,
    runner: int,
    mode: int,
    forward: int,
    event: int,
    last: Out64x2,
    samples: Out64x2,
    new_ids: Out64,
    num_ids: int,
) -> int:
    """Move rows and samples on by a forward; return how many ids `new_ids` holds, those of requests new to their rows."""
    at = 0
    for r in range(rows.shape[0]):
        count = sampled_lens[r] if sampled_lens.shape[0] > 0 else 0
        at += count
        row = rows[r]
        if row == 0:
            continue
        if same_request(last, row, requests[r]) == 0:
            new_ids[num_ids] = requests[r]
            num_ids += 1
        end = prefixes[r] + lens[r]
        if runner == 0 and sampled_lens.shape[0] > 0:
            token = sampled[at - 1] if count > 0 else 0
            note_sample(samples, row, requests[r], end, count, token, forward, event, mode)
        note_row(last, row, requests[r], prefixes[r], end, count, event, mode, runner)
    return num_ids
