"""What one call of the compiled pass is given, and how loops find it in the table of addresses.

A list column of a batch is two arrays: its values, and `NUM_LISTS` further on its offsets.
"""

from typing import Final, NamedTuple

from ..dispatch import In64, In64x2, InU64, Out8, Out8x2, Out32, Out32x2, Out64, Out64x2, OutU64x2, primitive
from ..ops.plan.reference import PlanArrays
from ..ops.violation_log import LogArrays
from .array_views import record
from .due import Readers
from .entries import EntryStates, Runs, SlotTable
from .ledger import Found

# --- a batch of events

EVENT_LISTS: Final = (
    *("req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "truth_lens", "sampled_lens", "sampled_tokens"),
    *("input_ids", "positions", "out_cache_loc", "kv_bytes", "slot_group", "slot_start", "slot_count"),
)
_RUN_LISTS: Final = {
    "table": ("table_index", "table_row", "table_start", "table_count", "table_slots"),
    "lut": ("lut_index", "lut_index", "lut_start", "lut_count", "lut_slots"),
    "truth": ("truth_row", "truth_row", "truth_start", "truth_count", "truth_tokens"),
}
# List columns in the order in which the pass gets them: those of `Event`, then those of three `Runs`.
LISTS: Final = (*EVENT_LISTS, *(name for names in _RUN_LISTS.values() for name in names))
NUM_LISTS: Final = len(LISTS)
TABLE_RUNS, LUT_RUNS, TRUTH_RUNS = range(len(EVENT_LISTS), NUM_LISTS, 5)

KINDS: Final = ("forward", "alloc", "free", "evict", "status", "request")
FORWARD_EVENT, ALLOC_EVENT, FREE_EVENT, EVICT_EVENT, STATUS_EVENT, REQUEST_EVENT = range(len(KINDS))
UNUSUAL: Final = -1  # an event that is not for the pass
ALLOC_CODES: Final = ("", "shared", "cached")
FRESH_ALLOC, SHARED_ALLOC, CACHED_ALLOC = range(3)
STATUS_CODES: Final = ("admitted", "finished", "aborted")  # a request that is put back is for the checks
ADMITTED: Final = 0
MODES: Final = ("decode", "draft_extend", "target_verify")
DECODE, DRAFT_EXTEND, TARGET_VERIFY = range(len(MODES))


class Event(NamedTuple):
    """An event's columns; its ints are a row of `Context.events`."""

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
    kv: InU64  # [tokens * words]
    slot_groups: In64  # [runs]
    slot_starts: In64  # [runs]
    slot_counts: In64  # [runs]
    kind: int
    status: int
    mode: int
    runner: int
    forward: int  # its number
    request: int
    prompt: int
    room: int
    place: int  # among the events of the batch
    number: int  # + 1
    offset: int  # token_offset of its runner; -1 if that has no group
    words: int  # of KV a token has in its runner's forwards


# --- what a call is given


class Settings(NamedTuple):
    """What does not change during a call; switches are 0 or 1."""

    start: int  # index of the first event to take
    stop: int  # index behind the last
    allocations: int  # whether the trace has all that allocators give out and take back
    complete: int  # whether the trace has every event of every slot
    from_start: int  # whether slots that no event has named are free
    has_truth: int
    vocab: int  # of the oracle that sampled, 0 without one
    kv_words: int  # 8-byte words hashed of each stream at most; 0: no KV hash
    stall_limit: int  # forwards of the first runner without a walk of the prefix cache, 0 for any number
    padding_reported: int  # whether padding was reported in the forward before
    num_groups: int
    num_tables: int
    num_luts: int
    num_runners: int
    most_due: int  # a forward with more entries due is refused
    # Numbers of arrays in the table of addresses: the first of several.
    lists: int
    tables: int
    luts: int
    rows: int  # a `RowState` for each runner
    work: int


class Progress(NamedTuple):
    """What moves on during a call, `[1]` each: the event it is at, serials, the stall's count, how many requests were new."""

    at: Out64
    serial: Out64
    since_sweep: Out64
    new_ids: Out64
    partner_serial: Out64


class Tally(NamedTuple):
    """What the pass counted, `[groups]` each."""

    verified: Out64
    written: Out64
    forwards: Out64


class Figures(NamedTuple):
    """Of each forward and group, for the divergence figures, `[events, groups]` each; `[0, groups]` without a full-to-SWA table."""

    reads: Out64x2
    no_slots: Out64x2
    other_slots: Out64x2


class Streams(NamedTuple):
    """KV streams, `[streams]` each: TAIL buffer among its group's (-1: none hashes it), words of its runner's streams before it."""

    buffer: In64
    before: In64


class Context(NamedTuple):
    """What a call is given."""

    arrays: In64x2  # [n, 3]: the table of addresses
    groups: In64x2  # [groups, columns]: the ints of `GroupState`
    streams: Streams
    events: In64x2  # [events, columns]: the ints of `Event`
    progress: Progress
    tally: Tally
    figures: Figures
    settings: Settings


class RowState(NamedTuple):
    """What is known by row and by request."""

    last: Out64x2  # [rows, 6]: of the forward's runner
    truth: Out32x2  # [rows, width]; [0, 0] without truth tokens
    status: Out64x2  # [rows, 3]
    samples: Out64x2  # [rows, 5]
    row_stamps: Out64  # [rows]
    held: Out64x2  # requests, with how many slots they hold
    facts: Out64x2  # requests, for the oracle
    reported: In64  # [n]: requests that the checks have to see again: reported, or put back


class Work(NamedTuple):
    """Memory that a forward works with."""

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
    found: Found  # with room for [tokens + most due]
    hashes: Out64  # [tokens + most due]
    plan: PlanArrays  # [most due], but for the offsets
    num_requests: Out32  # [1]
    marks: Out8  # [most due]
    new_requests: Out64  # [ids]
    totals: Out64  # [2]
    written: Out64  # [1]: records, counted by the op
    log: LogArrays  # of one row
    reads: Out64  # [groups]: entries that a forward reads, due or not


class GroupState(NamedTuple):
    """A pool group; behind its arrays lie those of `FullState`, the canary buffers (HEAD and TAIL of the first half, of the
    second, ...) and the streams. Its ints are a row of `Context.groups`.
    """

    table: SlotTable
    states: EntryStates
    ledger: Out64x2  # [slots, 8]
    transfers: Out64  # [slots]
    writers: Out64x2  # [slots, 3]
    partners: Out64x2  # [slots, 2]: of `shared_halves_loops`
    arrays: int  # number of its first array
    number: int
    runner: int
    table_number: int
    lut_number: int  # -1 if the table's slots are the pool's own
    num_slots: int
    window: int  # 0 for full
    ring: int  # whether a forward reads its prefix before its own writes land
    padding: int  # slots below it are padding
    counted_whole: int  # whether divergence figures count positions before the window
    offset: int  # token_offset of its runner
    num_buffers: int
    first_stream: int
    num_streams: int


class FullState(NamedTuple):
    """What divergence figures keep of a sliding group: entry states by full slot, and what kind each cell is."""

    states: EntryStates
    kinds: Out8x2  # [rows, width]


_GROUP_ARRAYS: Final = 11  # of `GroupState`
_FULL_ARRAYS: Final = 6
_ROW_ARRAYS: Final = len(RowState._fields)

_event: Final = record(Event, ends=NUM_LISTS)
_runs: Final = record(Runs, ends=NUM_LISTS)
_group: Final = record(GroupState)
_full: Final = record(FullState)
_rows: Final = record(RowState)
_work: Final = record(Work)
_table: Final = record(Out32x2)
_lut: Final = record(Out64)
_buffer: Final = record(Out64x2)
_stream: Final = record(OutU64x2)
settings_of: Final = record(Settings)


@primitive()
def event_at(context: Context, index: int) -> Event:
    """Return an event; its lists have the lengths that they have."""
    return _event(context.arrays, context.settings.lists, index, context.events[index])


@primitive()
def runs_at(context: Context, number: int, index: int) -> Runs:
    """Return an event's runs for tables: those of `TABLE_RUNS`, `LUT_RUNS` (whose rows say nothing) or `TRUTH_RUNS`."""
    return _runs(context.arrays, context.settings.lists + number, index)


@primitive()
def group_state(context: Context, number: int) -> GroupState:
    """Return a group's state."""
    numbers = context.groups[number]
    return _group(context.arrays, numbers[0], numbers)


@primitive()
def full_state(context: Context, group: GroupState) -> FullState:
    """Return what a sliding group has for divergence figures."""
    return _full(context.arrays, group.arrays + _GROUP_ARRAYS)


@primitive()
def buffer_of(context: Context, group: GroupState, number: int) -> Out64x2:
    """Return the records of one of a group's canary buffers, `[slots, 4]`."""
    return _buffer(context.arrays, group.arrays + _GROUP_ARRAYS + _FULL_ARRAYS + number)


@primitive()
def stream_of(context: Context, group: GroupState, stream: int) -> OutU64x2:
    """Return the captured words of a stream, `[slots, words]`."""
    before = _GROUP_ARRAYS + _FULL_ARRAYS + group.num_buffers
    return _stream(context.arrays, group.arrays + before + stream - group.first_stream)


@primitive()
def table_of(context: Context, number: int) -> Out32x2:
    """Return a block table, `[rows, width]`."""
    return _table(context.arrays, context.settings.tables + number)


@primitive()
def lut_of(context: Context, number: int) -> Out64:
    """Return a full-to-SWA table, `[full slots]`."""
    return _lut(context.arrays, context.settings.luts + number)


@primitive()
def row_state(context: Context, runner: int) -> RowState:
    """Return what is known by row, of a runner's forwards."""
    return _rows(context.arrays, context.settings.rows + runner * _ROW_ARRAYS)


@primitive()
def work_of(context: Context) -> Work:
    """Return the memory to work with."""
    return _work(context.arrays, context.settings.work)


@primitive()
def readers_of(forward: Event) -> Readers:
    """Return the requests of a forward as the plan of due entries takes them."""
    return Readers(forward.rows, forward.requests, forward.prefixes, forward.known)
