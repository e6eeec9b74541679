"""Where things lie in what the compiled pass is given: columns of a batch, codes of events, arrays of a trace's state."""

from typing import Final

# List columns of a record batch, in the order in which the pass gets their values and offsets.
LISTS: Final = (
    "req_pool_indices",
    "request_ids",
    "prefix_lens",
    "extend_lens",
    "truth_lens",
    "sampled_lens",
    "input_ids",
    "positions",
    "out_cache_loc",
    "sampled_tokens",
    "table_index",
    "table_row",
    "table_start",
    "table_count",
    "table_slots",
    "lut_index",
    "lut_start",
    "lut_count",
    "lut_slots",
    "truth_row",
    "truth_start",
    "truth_count",
    "truth_tokens",
    "slot_group",
    "slot_start",
    "slot_count",
    "kv_bytes",  # as 8-byte words
)
NUM_LISTS: Final = len(LISTS)
(
    ROWS,
    REQUESTS,
    PREFIXES,
    EXTENDS,
    TRUTH_LENS,
    SAMPLED_LENS,
    INPUTS,
    POSITIONS,
    WRITTEN,
    SAMPLED,
    TABLE_INDEX,
    TABLE_ROW,
    TABLE_START,
    TABLE_COUNT,
    TABLE_SLOTS,
    LUT_INDEX,
    LUT_START,
    LUT_COUNT,
    LUT_SLOTS,
    TRUTH_ROW,
    TRUTH_START,
    TRUTH_COUNT,
    TRUTH_TOKENS,
    SLOT_GROUP,
    SLOT_START,
    SLOT_COUNT,
    KV,
) = range(NUM_LISTS)

# Scalars of the events, [events] int64 each.
KIND, STATUS, MODE, RUNNER, FORWARD, REQUEST, PROMPT, ROOM = range(8)
NUM_SCALARS: Final = 8

KINDS: Final = ("forward", "alloc", "free", "evict", "status", "request")
FORWARD_EVENT, ALLOC_EVENT, FREE_EVENT, EVICT_EVENT, STATUS_EVENT, REQUEST_EVENT = range(len(KINDS))
UNUSUAL: Final = -1  # an event that is not for the pass

ALLOC_CODES: Final = ("", "shared", "cached")
FRESH_ALLOC, SHARED_ALLOC, CACHED_ALLOC = range(3)
STATUS_CODES: Final = ("admitted", "retracted", "finished", "aborted")
ADMITTED: Final = 0

MODES: Final = ("decode", "draft_extend", "target_verify")
DECODE, DRAFT_EXTEND, TARGET_VERIFY = range(len(MODES))

# What does not change during a call, [NUM_SETTINGS] int64. Switches are 0 or 1.
(
    FIRST_EVENT,  # number of the batch's first event
    START,  # index of the first event to take
    STOP,  # index behind the last
    COMPLETE,  # whether the trace has every event of every slot
    FROM_START,  # whether slots that no event has named are free
    HAS_TRUTH,
    VOCAB,  # of the oracle that sampled, 0 without one
    KV_WORDS,  # 8-byte words hashed of each stream at most; 0: no KV hash
    STALL_LIMIT,  # forwards of the first runner without a walk of the prefix cache, 0 for any number
    PADDING_REPORTED,  # whether padding was reported in the forward before
    NUM_GROUPS,
    NUM_TABLES,
    NUM_LUTS,
    NUM_RUNNERS,
    MOST_DUE,  # a forward with more entries due is refused
    # Numbers of arrays in the table of addresses: the first of several.
    SCALAR_ARRAYS,
    LIST_ARRAYS,  # values of each, then offsets of each
    TABLE_ARRAYS,
    LUT_ARRAYS,
    RUNNER_ARRAYS,  # rows of each runner, see `rows.py`
    ROW_ARRAYS,  # truth, status, samples, row stamps
    REQUEST_ARRAYS,  # slots held, facts for the oracle, requests reported
    WORK_ARRAYS,  # see `context.Work`
) = range(23)
NUM_SETTINGS: Final = 23

# What moves on during a call, [NUM_PROGRESS] int64.
AT, SERIAL, SINCE_SWEEP, NEW_IDS, PARTNER_SERIAL = range(5)
NUM_PROGRESS: Final = 5

# A pool group, [groups, GROUP_COLUMNS] int64.
(
    GROUP_RUNNER,
    GROUP_TABLE,
    GROUP_LUT,  # -1 if the table's slots are the pool's own
    GROUP_SLOTS,
    GROUP_WINDOW,  # 0 for full
    GROUP_RING,  # whether a forward reads its prefix before its own writes land
    GROUP_PADDING,  # slots below it are padding
    GROUP_COUNTED_WHOLE,  # whether divergence figures count positions before the window
    GROUP_OFFSET,  # token_offset of its runner
    GROUP_ARRAYS,  # number of its first array, see `STATE`
    NUM_BUFFERS,  # canary buffers: HEAD and TAIL of the first half, of the second, ...
    FIRST_STREAM,
    NUM_STREAMS,
) = range(13)
GROUP_COLUMNS: Final = 13

# The arrays of a group, from GROUP_ARRAYS on: ledger, transfers, writers, the five of its entry states and, for the
# divergence figures, the five by full slot and their kinds; `swa_mapping_stale`'s partners; then buffers, then streams.
LEDGER, TRANSFERS, WRITERS, STATES, FULL_STATES, CELL_KINDS, PARTNERS, BUFFERS = 0, 1, 2, 3, 8, 13, 14, 15

# A stream, [streams, 3] int64: TAIL buffer among its group's, captured words, words of the runner's streams before it.
STREAM_BUFFER, STREAM_WORDS, STREAM_BEFORE = range(3)

# What the pass counted, [groups, 3] int64.
COUNT_VERIFIED, COUNT_WRITTEN, COUNT_FORWARDS = range(3)

# Of each forward and group, for the divergence figures, [events, groups, 3] int64 flattened to two axes.
FIGURE_READS, FIGURE_NO_SLOTS, FIGURE_OTHER_SLOTS, NUM_FIGURES = range(4)

# Of the counters to work with.
TOTALS, FOUND_COUNT, OUT_OF_RANGE, NUM_VIOLATIONS, SLOTS_COUNTED, LAUNCHES, FIGURES = 0, 2, 3, 4, 5, 6, 7
NUM_COUNTERS: Final = 9
