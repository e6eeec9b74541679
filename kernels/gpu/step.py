"""Stepping forwards on the device: how what a kernel reads lies in device memory, as 64-bit words.

A *piece* is a run of a trace's forwards that was brought to the device in one copy. `root` `[2]` holds the address of
the piece being stepped and whether stepping has halted; a piece's block holds what its forwards share; each forward has
a descriptor; each runner of the trace has a *machine*, which says where its pools and tables lie. Kernels find all else
from there, so that a launch passes two numbers and a captured graph of launches steps any forward.

Nothing is lost and nothing is judged twice: a forward whose findings do not fit the log, or which needs the host (a slot
that there is not, two requests on one row, a chain that goes on from a slot written in the same forward), is not
committed, and everything behind it stands still until the host has seen to it.

The kernels are in `step_prepare`, `step_judge` and `step_commit`. Their definition is what `plan`,
`verify`, `write`, `kv_source` and `state` do one after another.
"""

from typing import Final

# root
ROOT_PIECE: Final = 0
ROOT_HALT: Final = 1
ROOT_WORDS: Final = 2

# The block of a piece.
PIECE_DESCRIPTORS: Final = 0
PIECE_STEPS: Final = 1
PIECE_RESULT: Final = 2
PIECE_STATS: Final = 3
PIECE_LOG: Final = 4  # rows of what verify finds
PIECE_LOG_ROWS: Final = 5
PIECE_WRITE_LOG: Final = 6  # rows of what write finds
PIECE_WRITE_LOG_ROWS: Final = 7
PIECE_OWN: Final = 8  # scratch, [groups, stride]: the slots that a forward writes, in the group's numbering
PIECE_CHAIN: Final = 9  # scratch, [groups, stride]: the chain hash of each token
PIECE_TOKEN_STRIDE: Final = 10
PIECE_SEEDS: Final = 11  # scratch, [groups, stride, 2]: whether a request's chain has a seed, and the seed's position
PIECE_REQUEST_STRIDE: Final = 12
PIECE_WORDS: Final = 16

# What a piece's kernels leave behind.
RESULT_NEXT: Final = 0  # the next step
RESULT_DONE: Final = 1  # steps committed
RESULT_ROWS: Final = 2
RESULT_WRITE_ROWS: Final = 3
RESULT_HOST: Final = 4  # the step behind the last one committed needs the host
RESULT_FULL: Final = 5  # its write violations might not fit
RESULT_WORDS: Final = 8

# Per step and group.
STAT_UNKNOWN: Final = 0
STAT_OUT_OF_WINDOW: Final = 1
STAT_OTHER_INDEX: Final = 2
STAT_WORDS: Final = 4

MAX_GROUPS: Final = 4  # of a runner
MAX_STREAMS: Final = 16  # of a runner
MAX_TABLES: Final = 4

# A forward's descriptor.
STEP_MACHINE: Final = 0
STEP_REQUESTS: Final = 1
STEP_TOKENS: Final = 2
STEP_WRITTEN: Final = 3  # tokens that are no padding
STEP_ROWS: Final = 4
STEP_REQUEST_IDS: Final = 5
STEP_PREFIX: Final = 6
STEP_EXTEND: Final = 7
STEP_TRUTH_LENS: Final = 8  # 0: tokens are not checked
STEP_INPUT_IDS: Final = 9
STEP_POSITIONS: Final = 10
STEP_LOC: Final = 11  # [tables, tokens]
STEP_EXPECTED: Final = 12  # 0: inputs are not asserted
STEP_OFFSETS: Final = 13  # [requests + 1] prefix sums of the tokens written, which begin at the next word
STEP_OFFSETS_BASE: Final = 14
STEP_SAMPLED: Final = 15  # 0: nothing was sampled
STEP_SAMPLED_OFFSETS: Final = 16
STEP_SAMPLED_BASE: Final = 17
STEP_KV: Final = 18
STEP_EVENT: Final = 19  # + 1
STEP_FORWARD: Final = 20
STEP_SERIAL: Final = 21
STEP_CELLS: Final = 22  # [n, 2]: address of an int32, value
STEP_NUM_CELLS: Final = 23
STEP_LUT_CELLS: Final = 24  # [n, 2]: address of an int64, value
STEP_NUM_LUT_CELLS: Final = 25
STEP_UNKNOWN: Final = 26  # bit g: some slots of group g may be unknown
STEP_SEARCH: Final = 27  # halvings that find one request among them
STEP_KV_CHANGES: Final = (
    28  # twice, before and after: [n, 3] stream, slot, address of its words; n; [m, 2] group, slot; m
)
STEP_KV_WORDS: Final = 4
STEP_GROUPS: Final = 36
STEP_GROUP_WORDS: Final = 6
GROUP_TILES: Final = 0  # [requests + 1] prefix sums of the tiles that verify looks at, which begin at the next word
GROUP_TILES_BASE: Final = 1
GROUP_NUM_TILES: Final = 2
GROUP_DIVERGENCE: Final = 3  # the same for the figures of divergence
STEP_WORDS: Final = 64

# A machine: its head, its groups, streams and tables.
MACHINE_GROUPS: Final = 0
MACHINE_STREAMS: Final = 1
MACHINE_TABLES: Final = 2
MACHINE_TRUTH: Final = 3
MACHINE_TRUTH_ROWS: Final = 4
MACHINE_TRUTH_WIDTH: Final = 5
MACHINE_TOKEN_OFFSET: Final = 6
MACHINE_ROW_STAMPS: Final = 7
MACHINE_NUM_ROW_STAMPS: Final = 8
POOLS_AT: Final = 16
POOL_WORDS: Final = 24
POOL_TABLE: Final = 0
POOL_TABLE_WIDTH: Final = 1
POOL_TABLE_INDEX: Final = 2
POOL_WINDOW: Final = 3
POOL_LUT: Final = 4  # 0: the table's slots are the pool's own
POOL_LUT_LEN: Final = 5
POOL_SLOTS: Final = 6
POOL_RECORDS: Final = 7  # [slots, 4]: token, position, prev_hash, and the hash that a successor must carry
POOL_STAMPS: Final = 8  # [slots]: serial << 32 | token of the last that wrote the slot, padding left out
POOL_ALL_STAMPS: Final = 9  # padding too
POOL_WRITERS: Final = 10
POOL_UNKNOWN: Final = 11
POOL_RING: Final = 12  # 1: its prefix is read before the forward's own bytes land
POOL_FULL_STARTS: Final = 13  # 1: divergence is counted from position 0
POOL_HALVES: Final = 14
POOL_HALF_WORDS: Final = 2  # for each half: its records' KV hashes [slots], the hashes of the bytes as they are [slots]
STREAMS_AT: Final = POOLS_AT + MAX_GROUPS * POOL_WORDS
STREAM_WORDS: Final = 8
STREAM_POOL: Final = 0
STREAM_SLOT_WORDS: Final = 1
STREAM_GROUP: Final = 2
STREAM_HALF: Final = 3
STREAM_BEFORE: Final = 4  # words of a token in the streams before this one
STREAM_HASHED: Final = 5  # words of a slot that are hashed, 0 for none
TABLES_AT: Final = STREAMS_AT + MAX_STREAMS * STREAM_WORDS
TABLE_WORDS: Final = 4
TABLE_CELLS: Final = 0
TABLE_ROWS: Final = 1
TABLE_WIDTH: Final = 2
MACHINE_WORDS: Final = TABLES_AT + MAX_TABLES * TABLE_WORDS

# A row of what verify finds.
FOUND_STEP: Final = 0
FOUND_GROUP: Final = 1
FOUND_REQUEST: Final = 2
FOUND_POSITION: Final = 3
FOUND_SLOT: Final = 4
FOUND_STORED_TOKEN: Final = 5
FOUND_STORED_POSITION: Final = 6
FOUND_PREV_HASH: Final = 7
FOUND_EXPECTED_HASH: Final = 8
FOUND_EXPECTED_TOKEN: Final = 9
FOUND_REASON: Final = 10  # without KV hashes
FOUND_KV: Final = 11  # bit h: the KV hash of half h differs
FOUND_WRITER: Final = 12  # three words, as the pool has them
FOUND_WORDS: Final = 16

# A row of what write finds; the first three as above.
WROTE_TOKEN_INDEX: Final = 3
WROTE_SLOT: Final = 4
WROTE_POSITION: Final = 5
WROTE_TOKEN: Final = 6
WROTE_EXPECTED: Final = 7
WROTE_CHAIN: Final = 8
WROTE_AUX: Final = 9
WROTE_REASON: Final = 10
WROTE_ORDER: Final = 11  # of two rows of one token
