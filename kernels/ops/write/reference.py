"""Write: put a canary record into every slot that a forward writes, chained to the request's previous one."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...arrays import ByteArray, Int64Array, record_words, require
from ...constants import (
    RECORD_KV_HASH,
    RECORD_POSITION,
    RECORD_PREV_HASH,
    RECORD_TOKEN,
    WRITE_POSITION,
    WRITE_TOKEN,
    KvHashMode,
)
from ...dispatch import In64, Out64, Out64x2, has_device_form, select
from ..hash.kv_source import KvSource, fold_kv
from ..hash.reference import as_i64, as_u64, bump, mix3, slot_hash
from ..plan.reference import WritePlan
from ..violation_log import LogArrays, ViolationLog, append_violation


class WrittenTokens(NamedTuple):
    """What a forward writes, token by token; expected inputs are read only if they are asserted."""

    input_ids: In64  # [tokens]
    positions: In64  # [tokens]
    slots: In64  # [tokens]
    expected_ids: In64  # [tokens]
    expected_positions: In64  # [tokens]


def write_loops(
    records: Out64x2,
    tag: int,
    offsets: In64,
    seed_slots: In64,
    tokens: WrittenTokens,
    assert_inputs: int,
    assert_steps: int,
    kv_hashes: In64,
    log: LogArrays,
    slot_counter: Out64,
) -> None:
    """Write the requests' records, strictly in order; `seed_slots` is cut to the active ones."""
    num_slots, num_tokens = records.shape[0], len(tokens.slots)
    written = 0
    for r in range(len(seed_slots)):
        start = int(offsets[r])
        end = int(offsets[r + 1])
        if start < 0 or end < start or end > num_tokens:
            bump(log.out_of_range, 1)
            start = max(0, start)
            end = min(end, num_tokens)
        if end <= start:
            continue
        seed = int(seed_slots[r])
        if seed >= num_slots:
            bump(log.out_of_range, 1)
            seed = -1
        running = slot_hash(records, seed)
        follows = assert_steps != 0 and seed >= 0
        prev_position = int(records[seed, RECORD_POSITION]) if follows else 0

        for i in range(start, end):
            slot = int(tokens.slots[i])
            if slot < 0:
                continue
            if slot >= num_slots:
                bump(log.out_of_range, 1)
                continue
            token, position = int(tokens.input_ids[i]), int(tokens.positions[i])
            carried = as_i64(running)
            if assert_inputs != 0:
                expected, expected_position = int(tokens.expected_ids[i]), int(tokens.expected_positions[i])
                reason = WRITE_TOKEN if token != expected else 0
                if position != expected_position:
                    reason |= WRITE_POSITION
                if reason != 0:
                    append_violation(log, i, tag, slot, position, token, expected, carried, expected_position, reason)
            if follows:
                following = as_i64(as_u64(prev_position) + as_u64(1))
                if position != following:
                    append_violation(log, i, tag, slot, position, token, token, carried, following, WRITE_POSITION)
                prev_position = position
            records[slot, RECORD_TOKEN] = token
            records[slot, RECORD_POSITION] = position
            records[slot, RECORD_PREV_HASH] = carried
            records[slot, RECORD_KV_HASH] = kv_hashes[i]
            running = mix3(running, as_u64(token), as_u64(position))
            written += 1
    bump(slot_counter, written)


@has_device_form("write.triton")
def write(
    *,
    canary: ByteArray,
    tag: int,
    plan: WritePlan,
    input_ids: Int64Array,
    positions: Int64Array,
    out_cache_loc: Int64Array,
    expected_tokens: Int64Array | None,
    expected_positions: Int64Array | None,
    chain_step_assert: bool,
    sources: Sequence[KvSource],
    kv_hash_mode: KvHashMode,
    violations: ViolationLog,
    slot_counter: Int64Array,
    kernel_counter: Int64Array,
    backend: str = "cpu",
) -> None:
    """Write one canary buffer for one forward.

    `canary` as for `verify`; `input_ids`, `positions`, `out_cache_loc` [tokens] int64, the slots already this group's
    own; `expected_tokens`, `expected_positions` [tokens] int64, both None to assert no inputs; `chain_step_assert`
    asks that positions go up by one from a seed's on; `slot_counter` [1] int64 grows by the records written,
    `kernel_counter` [1] int64 by one. Negative slots are skipped wholly, and so are slots beyond the buffer, which
    count in `violations.out_of_range`; a seed beyond the buffer counts there too and starts a new chain, and so does a
    request whose offsets run backwards or past the tokens, of which what lies within is written. Raises `TypeError`
    and `ValueError` for shapes and dtypes, never for values.
    """
    records = record_words(canary, written=True)
    num_tokens = len(out_cache_loc)
    require("out_cache_loc", out_cache_loc, np.int64, 1)
    require("input_ids", input_ids, np.int64, 1, length=num_tokens)
    require("positions", positions, np.int64, 1, length=num_tokens)
    if (expected_tokens is None) != (expected_positions is None):
        raise ValueError("expected_tokens and expected_positions go together; one of them is None")
    want_tokens = input_ids if expected_tokens is None else expected_tokens
    want_positions = positions if expected_positions is None else expected_positions
    require("expected_tokens", want_tokens, np.int64, 1, length=num_tokens)
    require("expected_positions", want_positions, np.int64, 1, length=num_tokens)
    require("slot_counter", slot_counter, np.int64, 1, length=1, written=True)
    require("kernel_counter", kernel_counter, np.int64, 1, length=1, written=True)

    seeds = plan.seed_slots[: max(0, min(int(plan.num_valid_reqs[0]), len(plan.seed_slots)))]
    kv_hashes = np.empty(num_tokens, np.int64)
    fold_kv(sources=sources, mode=kv_hash_mode, slots=out_cache_loc, out=kv_hashes, backend=backend)
    given = (input_ids, positions, out_cache_loc, want_tokens, want_positions)
    tokens = WrittenTokens(*map(np.ascontiguousarray, given))
    asserts = int(expected_tokens is not None), int(chain_step_assert)
    select(write_loops, backend)(
        records, int(tag), plan.offsets, seeds, tokens, *asserts, kv_hashes, violations, slot_counter
    )
    bump(kernel_counter, 1)
