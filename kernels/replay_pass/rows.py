"""What an ordinary forward says of its rows: whose they are, how far they were, what was sampled for them.

The columns are those of `recorder.state.history`, which owns these arrays.
"""

from typing import Final

from ..constants import UNKNOWN_TOKEN
from ..dispatch import In64, In64x2, Out64, Out64x2, primitive
from ..ops.hash.reference import as_i64, as_u64, splitmix64
from ..tokens import contradicts
from .context import ADMITTED, DECODE, DRAFT_EXTEND, TARGET_VERIFY, Event, RowState, Settings
from .slots import KEY, USED, VALUE, place_of

SEEN, REQUEST, PREFIX, END, SAMPLED_END, VERIFY = range(6)
STATUS_EVENT, HOLDER, GIVEN = range(3)
SAMPLE_REQUEST, SAMPLE_POSITION, SAMPLE_TOKEN, SAMPLE_FORWARD, SAMPLE_TOLD = range(5)

# Beside `slots.VALUE`, the generalised id, in the facts of requests: the prompt's length.
PROMPT_LEN: Final = VALUE + 1


@primitive()
def same_request(last: In64x2, row: int, request: int) -> int:
    """Say whether a row's last forward was of this request; 0 or 1."""
    return 1 if last[row, SEEN] > 0 and last[row, REQUEST] == request else 0


@primitive()
def fresh_from(last: In64x2, row: int, request: int, prefix: int, runner: int) -> int:
    """Return the first position that a request has neither read nor written on its row before."""
    if same_request(last, row, request) == 0:
        return 0
    if runner == 0 and prefix < last[row, PREFIX]:
        return 0
    return last[row, END]


@primitive()
def row_ordinary(
    rows: RowState, runner: int, row: int, request: int, prefix: int, end: int, sampled: int, complete: int
) -> int:
    """Say whether a row is its request's, and the request no shorter than it was; 0 or 1."""
    last, status = rows.last, rows.status
    its_own = status[row, GIVEN] != 0 and status[row, HOLDER] == request
    taken_back = status[row, GIVEN] == 0 and status[row, HOLDER] == request
    if status[row, STATUS_EVENT] > 0 and not its_own and (complete != 0 or taken_back):
        return 0
    if runner == 0 and same_request(last, row, request) == 1:
        if complete != 0 or its_own:
            least = last[row, END] if last[row, VERIFY] == 0 else last[row, PREFIX] + 1
            if prefix < least:
                return 0
        elif sampled > 0 and end < last[row, SAMPLED_END] and last[row, VERIFY] == 0:
            return 0
    return 1


@primitive()
def inputs_ordinary(settings: Settings, forward: Event, rows: RowState, r: int, at: int, count: int, known: int) -> int:
    """Say whether the `count` tokens of request number `r` are those sampled, known and predicted, in their place; 0 or 1.

    They begin at token `at` of the batch; `known` is how many truth tokens the request has.
    """
    row, request, prefix, offset = forward.rows[r], forward.requests[r], forward.prefixes[r], forward.offset
    inputs, positions = forward.inputs[at : at + count], forward.positions[at : at + count]
    others = 0  # counted without a way out, so that several tokens are looked at at once
    for i in range(count):
        others += 1 if positions[i] != prefix + i else 0
    if settings.has_truth != 0:
        first = prefix + offset
        for i in range(min(count, known - first)):
            others += contradicts(int(rows.truth[row, first + i]), inputs[i])
    if others != 0:
        return 0
    if forward.runner == 0 and rows.samples[row, SAMPLE_TOLD] > 0 and rows.samples[row, SAMPLE_REQUEST] == request:
        i = rows.samples[row, SAMPLE_POSITION] - prefix
        token = rows.samples[row, SAMPLE_TOKEN]
        if 0 <= i < count and token != UNKNOWN_TOKEN and inputs[i] not in (UNKNOWN_TOKEN, token):
            return 0
    if settings.vocab > 0 and (forward.mode == DRAFT_EXTEND or (forward.mode == DECODE and offset == 0)):
        place = place_of(rows.facts, request)
        if rows.facts[place, USED] != 0 and rows.facts[place, KEY] == request:
            begin = 0
            if forward.mode == DRAFT_EXTEND:  # its inputs may be the prompt's
                prompt_len = rows.facts[place, PROMPT_LEN]
                begin = count if prompt_len < 0 else max(0, prompt_len - prefix - offset)
            for i in range(begin, count):
                word = splitmix64(as_u64(rows.facts[place, VALUE]) ^ as_u64(prefix + i + offset))
                if inputs[i] not in (UNKNOWN_TOKEN, as_i64(word % as_u64(settings.vocab))):
                    return 0
    return 1


@primitive()
def note_row(
    last: Out64x2, row: int, request: int, prefix: int, end: int, sampled: int, event: int, mode: int, runner: int
) -> None:
    """Move a row on by a forward; `event` is its number + 1."""
    same = same_request(last, row, request)
    reached = end
    if runner != 0 and same == 1:
        reached = max(end, last[row, END])
    sampled_end = 0
    if sampled > 0:
        sampled_end = reached
    elif same == 1:
        sampled_end = last[row, SAMPLED_END]
    last[row, SEEN] = event
    last[row, REQUEST] = request
    last[row, PREFIX] = prefix
    last[row, END] = reached
    last[row, SAMPLED_END] = sampled_end
    last[row, VERIFY] = 1 if mode == TARGET_VERIFY else 0


@primitive()
def note_sample(
    samples: Out64x2, row: int, request: int, end: int, count: int, token: int, forward: int, event: int, mode: int
) -> None:
    """Remember the last token that a target forward sampled for a row; `event` is its number + 1."""
    if samples[row, SAMPLE_FORWARD] > forward:
        return  # what was sampled by a later forward is news already
    if mode == TARGET_VERIFY:
        samples[row, SAMPLE_TOLD] = 0
    elif count > 0:
        samples[row, SAMPLE_REQUEST] = request
        samples[row, SAMPLE_POSITION] = end + count - 1
        samples[row, SAMPLE_TOKEN] = token
        samples[row, SAMPLE_FORWARD] = forward
        samples[row, SAMPLE_TOLD] = event


@primitive()
def note_rows(forward: Event, rows: RowState, lens: In64, new_ids: Out64, num_ids: int) -> int:
    """Move rows and samples on by a forward; return how many ids `new_ids` holds, those of requests new to their rows."""
    at = 0
    for r in range(forward.rows.shape[0]):
        count = forward.sampled_lens[r] if forward.sampled_lens.shape[0] > 0 else 0
        at += count
        row, request, prefix = forward.rows[r], forward.requests[r], forward.prefixes[r]
        if row == 0:
            continue
        if same_request(rows.last, row, request) == 0:
            new_ids[num_ids] = request
            num_ids += 1
        end, mode, event = prefix + lens[r], forward.mode, forward.number
        if forward.runner == 0 and forward.sampled_lens.shape[0] > 0:
            token = forward.sampled[at - 1] if count > 0 else 0
            note_sample(rows.samples, row, request, end, count, token, forward.forward, event, mode)
        note_row(rows.last, row, request, prefix, end, count, event, mode, forward.runner)
    return num_ids


@primitive()
def end_samples(samples: Out64x2, row: int, request: int, event: int) -> None:
    """Forget what was sampled for a request that begins or ends, as `LastSamples.take_status`; `event` is the number + 1."""
    for other in range(samples.shape[0]):
        mine = samples[other, SAMPLE_TOLD] > 0 and samples[other, SAMPLE_REQUEST] == request
        if mine or (other == row and row > 0):
            samples[other, SAMPLE_TOLD] = -event


@primitive()
def start_over(last: Out64x2, request: int) -> None:
    """Forget a request's forwards of one runner: it starts from nothing, or is gone."""
    for row in range(last.shape[0]):
        if last[row, SEEN] > 0 and last[row, REQUEST] == request:
            last[row, SEEN] = 0


@primitive()
def note_status(status: Out64x2, row: int, request: int, code: int, event: int) -> None:
    """Note to whom a row was given, or who gave it back; `event` is the event's number + 1."""
    if 0 < row < status.shape[0]:
        status[row, STATUS_EVENT] = event
        status[row, HOLDER] = request
        status[row, GIVEN] = 1 if code == ADMITTED else 0


@primitive()
def learn_request(facts: Out64x2, request: int, room: int, prompt: int) -> None:
    """Note what a request event says, for the token oracle."""
    place = place_of(facts, request)
    facts[place, KEY] = request
    facts[place, USED] = 1
    facts[place, VALUE] = room if room >= 0 else request
    facts[place, PROMPT_LEN] = prompt
