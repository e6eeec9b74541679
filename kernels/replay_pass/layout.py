"""Where things lie in what the lane is given: columns of a batch, codes of events, numbers of a call and of a group."""

from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ..dispatch import ArraySpec, TupleSpec

# List columns of a record batch, in the order in which the lane gets their values and offsets.
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
    "truth_row",
    "truth_start",
    "truth_count",
    "truth_tokens",
    "slot_group",
    "slot_start",
    "slot_count",
)
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
    TRUTH_ROW,
    TRUTH_START,
    TRUTH_COUNT,
    TRUTH_TOKENS,
    SLOT_GROUP,
    SLOT_START,
    SLOT_COUNT,
) = range(len(LISTS))

# Scalars of the events, [events] int64 each.
KIND, STATUS, MODE, RUNNER, FORWARD, REQUEST, PROMPT, ROOM = range(8)
NUM_SCALARS: Final = 8

KINDS: Final = ("forward", "alloc", "free", "evict", "status", "request")
FORWARD_EVENT, ALLOC_EVENT, FREE_EVENT, EVICT_EVENT, STATUS_EVENT, REQUEST_EVENT = range(len(KINDS))
UNUSUAL: Final = -1  # an event that is not for the lane

ALLOC_CODES: Final = ("", "shared", "cached")
FRESH_ALLOC, SHARED_ALLOC, CACHED_ALLOC = range(3)
STATUS_CODES: Final = ("admitted", "retracted", "finished", "aborted")
ADMITTED: Final = 0

MODES: Final = ("decode", "draft_extend", "target_verify")
DECODE, DRAFT_EXTEND, TARGET_VERIFY = range(len(MODES))

# What does not change during a call, [12] int64. Switches are 0 or 1.
(
    FIRST_EVENT,  # number of the batch's first event
    START,  # index of the first event to take
    STOP,  # index behind the last
    COMPLETE,  # whether the trace tells of every slot
    FROM_START,  # whether slots that no event has named are free
    HAS_TRUTH,
    VOCAB,  # of the oracle that sampled, 0 without one
    KV_WORDS,  # 8-byte words hashed of each stream at most; 0: no KV hash
    STALL_LIMIT,  # forwards of the first runner without a walk of the prefix cache, 0 for any number
    PADDING_TOLD,  # whether padding was reported in the forward before
    NUM_GROUPS,
    NUM_TABLES,
) = range(12)
NUM_SETTINGS: Final = 12

# What moves on during a call, [3] int64.
AT, SERIAL, SINCE_SWEEP, NEW_IDS = range(4)
NUM_PROGRESS: Final = 4

# A pool group, [groups, 8] int64.
(
    GROUP_RUNNER,
    GROUP_TABLE,
    GROUP_SLOTS,
    FIRST_BUFFER,  # its canary buffers: HEAD and TAIL of the first half, of the second, ...
    NUM_BUFFERS,
    FIRST_STREAM,
    NUM_STREAMS,
    GROUP_OFFSET,  # token_offset of its runner
) = range(8)

# A stream, [streams, 3] int64.
STREAM_BUFFER, STREAM_WORDS, STREAM_BEFORE = range(
    3
)  # TAIL buffer, captured words, words of the runner's streams before

# What the lane counted, [groups, 3] int64.
COUNT_VERIFIED, COUNT_WRITTEN, COUNT_FORWARDS = range(3)

# Compiled code grows with these.
MAX_GROUPS: Final = 2
MAX_BUFFERS: Final = 8
MAX_STREAMS: Final = 8
MAX_TABLES: Final = 2
MAX_RUNNERS: Final = 2

ListValues = Annotated[tuple[npt.NDArray[np.int64], ...], TupleSpec(ArraySpec("int64", 1, False), len(LISTS))]
Scalars = Annotated[tuple[npt.NDArray[np.int64], ...], TupleSpec(ArraySpec("int64", 1, False), NUM_SCALARS)]
GroupRows = Annotated[tuple[npt.NDArray[np.int64], ...], TupleSpec(ArraySpec("int64", 2, True), MAX_GROUPS)]
GroupSlots = Annotated[tuple[npt.NDArray[np.int64], ...], TupleSpec(ArraySpec("int64", 1, True), MAX_GROUPS)]
GroupLinks = Annotated[tuple[npt.NDArray[np.int32], ...], TupleSpec(ArraySpec("int32", 2, True), MAX_GROUPS)]
GroupPending = Annotated[tuple[npt.NDArray[np.uint8], ...], TupleSpec(ArraySpec("uint8", 2, True), MAX_GROUPS)]
GroupHeads = Annotated[tuple[npt.NDArray[np.int32], ...], TupleSpec(ArraySpec("int32", 1, True), MAX_GROUPS)]
Buffers = Annotated[tuple[npt.NDArray[np.int64], ...], TupleSpec(ArraySpec("int64", 2, True), MAX_BUFFERS)]
Streams = Annotated[tuple[npt.NDArray[np.uint64], ...], TupleSpec(ArraySpec("uint64", 2, True), MAX_STREAMS)]
Tables = Annotated[tuple[npt.NDArray[np.int32], ...], TupleSpec(ArraySpec("int32", 2, True), MAX_TABLES)]
RunnerRows = Annotated[tuple[npt.NDArray[np.int64], ...], TupleSpec(ArraySpec("int64", 2, True), MAX_RUNNERS)]
