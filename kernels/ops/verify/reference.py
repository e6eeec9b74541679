"""Verify: check the canary record of every plan entry against its predecessor, the plan, and the KV bytes."""

from collections.abc import Sequence

import numpy as np

from ...arrays import ByteArray, Int64Array, record_words, require
from ...constants import (
    PADDING_SLOT,
    RECORD_KV_HASH,
    RECORD_POSITION,
    RECORD_PREV_HASH,
    RECORD_TOKEN,
    VERIFY_CHAIN_HASH,
    VERIFY_KV_HASH,
    VERIFY_POSITION,
    VERIFY_TOKEN,
    KvHashMode,
)
from ...dispatch import In64, In64x2, has_device_form, select
from ..hash.kv_source import KvSource, fold_kv
from ..hash.reference import as_i64, bump, slot_hash
from ..plan.reference import VerifyPlan
from ..violation_log import LogArrays, ViolationLog, append_violation


def verify_loops(
    records: In64x2,
    tag: int,
    slots: In64,
    expected_tokens: In64,
    expected_positions: In64,
    prev_slots: In64,
    kv_hashes: In64,
    check_tokens: int,
    log: LogArrays,
) -> None:
    """Verify the active entries, all arrays cut to them; `kv_hashes` are the hashes of the slots' bytes as they are."""
    num_slots = records.shape[0]
    for i in range(len(slots)):
        slot = int(slots[i])
        if slot == PADDING_SLOT:
            continue
        if slot < 0 or slot >= num_slots:
            bump(log.out_of_range, 1)
            continue
        token = int(records[slot, RECORD_TOKEN])
        position = int(records[slot, RECORD_POSITION])
        prev_hash = int(records[slot, RECORD_PREV_HASH])

        prev = int(prev_slots[i])
        expected_prev_hash = prev_hash
        if prev >= num_slots:
            bump(log.out_of_range, 1)
        elif prev != PADDING_SLOT:
            expected_prev_hash = as_i64(slot_hash(records, prev))

        expected_token = int(expected_tokens[i]) if check_tokens != 0 else -1
        reason = 0
        if prev_hash != expected_prev_hash:
            reason |= VERIFY_CHAIN_HASH
        if expected_token != -1 and token != expected_token:
            reason |= VERIFY_TOKEN
        if position != int(expected_positions[i]):
            reason |= VERIFY_POSITION
        if int(records[slot, RECORD_KV_HASH]) != int(kv_hashes[i]):
            reason |= VERIFY_KV_HASH
        if reason != 0:
            append_violation(log, i, tag, slot, position, token, expected_token, prev_hash, expected_prev_hash, reason)


@has_device_form("verify.triton")
def verify(
    *,
    canary: ByteArray,
    tag: int,
    plan: VerifyPlan,
    check_tokens: bool,
    sources: Sequence[KvSource],
    kv_hash_mode: KvHashMode,
    violations: ViolationLog,
    slot_counter: Int64Array,
    kernel_counter: Int64Array,
    backend: str = "cpu",
) -> None:
    """Verify one canary buffer, which stays as it is, against a plan; one violation row for each entry that fails.

    `canary` [num_slots, stride] uint8, stride at least 32 and a multiple of 8, any row stride that 8 divides; `tag` a
    `LaunchTag`; `slot_counter` [1] int64 grows by the active entries, `kernel_counter` [1] int64 by one. An entry
    whose slot is negative or beyond the buffer is not read and counts in `violations.out_of_range`; so does a
    predecessor beyond the buffer, whose entry's chain check is left out. Raises `TypeError` and `ValueError` for
    shapes and dtypes, never for values.
    """
    records = record_words(canary, written=False)
    require("slot_counter", slot_counter, np.int64, 1, length=1, written=True)
    require("kernel_counter", kernel_counter, np.int64, 1, length=1, written=True)
    active = plan.active
    slots, kv_hashes = plan.slots[:active], np.empty(active, np.int64)
    fold_kv(sources=sources, mode=kv_hash_mode, slots=slots, out=kv_hashes, backend=backend)
    tokens, positions, prevs = plan.expected_tokens[:active], plan.expected_positions[:active], plan.prev_slots[:active]
    select(verify_loops, backend)(
        records, int(tag), slots, tokens, positions, prevs, kv_hashes, int(check_tokens), violations
    )
    bump(kernel_counter, 1)
    bump(slot_counter, active)
