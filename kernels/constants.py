"""The canary's fixed numbers: record and violation layouts, launch tags, fail reasons, reserved slots and rows."""

import re
from enum import IntEnum, IntFlag
from typing import Final

ANCHOR: Final = 0xC0FFEE1234567890  # a chain head's prev_hash is splitmix64(ANCHOR)

PADDING_SLOT: Final = 0  # takes padded writes, is never verified; a zeroed table points here
PADDING_ROW: Final = 0  # the padding row of req_to_token
UNKNOWN_TOKEN: Final = -1  # stored and chained as it is, never compared

# What plan writes in place of a slot that a table does not have: beyond any pool, never negative (that means "none").
SLOT_OUT_OF_RANGE: Final = 1 << 62

# Fields of a canary record, four int64 at the start of each slot.
RECORD_BYTES: Final = 32
RECORD_TOKEN: Final = 0
RECORD_POSITION: Final = 1
RECORD_PREV_HASH: Final = 2
RECORD_KV_HASH: Final = 3

# Fields of a violation row, eight int64.
VIOLATION_FIELDS: Final = 8
VIOLATION_TAG: Final = 0
VIOLATION_SLOT: Final = 1
VIOLATION_POSITION: Final = 2
VIOLATION_STORED_TOKEN: Final = 3
VIOLATION_EXPECTED_TOKEN: Final = 4
VIOLATION_STORED_CHAIN_HASH: Final = 5
VIOLATION_EXPECTED_AUX: Final = 6
VIOLATION_FAIL_REASON: Final = 7

ORACLE_NAME: Final = re.compile(r"hash|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

ANY_NUMBER: Final = 3  # for which Triton compiles what serves all: neither 1 nor a multiple of 16

MAX_KV_SOURCES: Final = 4
KV_ALIGN_BYTES: Final = 16  # device kernels load KV bytes 128 bits at a time


class LaunchTag(IntEnum):
    """Which launch found a violation: when (before the forward, after it, sweep), which half, which pool group."""

    HEAD_K_FULL = 0
    HEAD_V_FULL = 1
    TAIL_K_FULL = 2
    TAIL_V_FULL = 3
    SWEEP_K_FULL = 4
    SWEEP_V_FULL = 5
    HEAD_K_SWA = 6
    HEAD_V_SWA = 7
    TAIL_K_SWA = 8
    TAIL_V_SWA = 9
    SWEEP_K_SWA = 10
    SWEEP_V_SWA = 11


class FailReason(IntFlag):
    """Why a row was written; reasons of one entry are or-ed."""

    VERIFY_CHAIN_HASH = 1
    VERIFY_POSITION = 2
    VERIFY_KV_HASH = 4
    WRITE_TOKEN = 8
    WRITE_POSITION = 16
    VERIFY_TOKEN = 32


class KvHashMode(IntEnum):
    """How much of a slot's KV bytes goes into its record: nothing, the first 16 bytes, or all that may be read."""

    NONE = 0
    PARTIAL = 1
    ALL = 2


# Plain ints for the loops: compiled code knows no enums.
VERIFY_CHAIN_HASH: Final = int(FailReason.VERIFY_CHAIN_HASH)
VERIFY_POSITION: Final = int(FailReason.VERIFY_POSITION)
VERIFY_KV_HASH: Final = int(FailReason.VERIFY_KV_HASH)
WRITE_TOKEN: Final = int(FailReason.WRITE_TOKEN)
WRITE_POSITION: Final = int(FailReason.WRITE_POSITION)
VERIFY_TOKEN: Final = int(FailReason.VERIFY_TOKEN)
