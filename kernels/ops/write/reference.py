"""Write: put a canary record into every slot that a forward writes, chained to the request's previous one."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...arrays import record_words, require
from ...constants import (
    RECORD_KV_HASH,
    RECORD_POSITION,
    RECORD_PREV_HASH,
    RECORD_TOKEN,
    WRITE_POSITION,
    WRITE_TOKEN,
    KvHashMode,
)
from ...dispatch import In64, Out64, Out64x2, device_form, select
from ..hash.kv_source import KvSource, fold_kv
from ..hash.reference import as_i64, as_u64, bump, mix3, slot_hash
from ..plan.reference import WritePlan
from ..violation_log import ViolationLog, append_violation


def write_loops(
    records: Out64x2,
    tag: int,
    offsets: In64,
    seed_slots: In64,
    active_reqs: int,
    input_ids: In64,
    positions: In64,
    out_cache_loc: In64,
    assert_inputs: int,
    expected_tokens: In64,
    expected_positions: In64,
    chain_step_assert: int,
    kv_hashes: In64,
    rows: Out64x2,
    entries: Out64,
    write_index: Out64,
    out_of_range: Out64,
    slot_counter: Out64,
    kernel_counter: Out64,
) -> None:
    """Write the active requests' records, strictly in order; expected inputs are read only when `assert_inputs`."""
    num_slots = records.shape[0]
    num_tokens = len(out_cache_loc)
    written = 0
    bump(kernel_counter, 1)
    for r in range(active_reqs):
        start = int(offsets[r])
        end = int(offsets[r + 1])
        if start < 0 or end < start or end > num_tokens:
            bump(out_of_range, 1)
            start = max(0, start)
            end = min(end, num_tokens)
        if end <= start:
            continue
        seed = int(seed_slots[r])
        if seed >= num_slots:
            bump(out_of_range, 1)
            seed = -1
        running = slot_hash(records, seed)
        assert_step = chain_step_assert != 0 and seed >= 0
        prev_position = int(records[seed, RECORD_POSITION]) if assert_step else 0

        for i in range(start, end):
            slot = int(out_cache_loc[i])
            if slot < 0:
                continue
            if slot >= num_slots:
                bump(out_of_range, 1)
                continue
            token = int(input_ids[i])
            position = int(positions[i])
            if assert_inputs != 0:
                reason = 0
                if token != int(expected_tokens[i]):
                    reason |= WRITE_TOKEN
                if position != int(expected_positions[i]):
                    reason |= WRITE_POSITION
                if reason != 0:
                    append_violation(
                        rows,
                        entries,
                        write_index,
                        i,
                        tag,
                        slot,
                        position,
                        token,
                        int(expected_tokens[i]),
                        as_i64(running),
                        int(expected_positions[i]),
                        reason,
                    )
            if assert_step:
                next_position = as_i64(as_u64(prev_position) + as_u64(1))
                if position != next_position:
                    append_violation(
                        rows,
                        entries,
                        write_index,
                        i,
                        tag,
                        slot,
                        position,
                        token,
                        token,
                        as_i64(running),
                        next_position,
                        WRITE_POSITION,
                    )
                prev_position = position
            records[slot, RECORD_TOKEN] = token
            records[slot, RECORD_POSITION] = position
            records[slot, RECORD_PREV_HASH] = as_i64(running)
            records[slot, RECORD_KV_HASH] = kv_hashes[i]
            running = mix3(running, as_u64(token), as_u64(position))
            written += 1
    bump(slot_counter, written)


def write(
    *,
    canary: npt.NDArray[np.uint8],
    tag: int,
    plan: WritePlan,
    input_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    out_cache_loc: npt.NDArray[np.int64],
    expected_tokens: npt.NDArray[np.int64] | None,
    expected_positions: npt.NDArray[np.int64] | None,
    chain_step_assert: bool,
    sources: Sequence[KvSource],
    kv_hash_mode: KvHashMode,
    violations: ViolationLog,
    slot_counter: npt.NDArray[np.int64],
    kernel_counter: npt.NDArray[np.int64],
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
    if backend == "triton":
        device_form("write.triton").write(
            canary=canary,
            tag=tag,
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            expected_tokens=expected_tokens,
            expected_positions=expected_positions,
            chain_step_assert=chain_step_assert,
            sources=sources,
            kv_hash_mode=kv_hash_mode,
            violations=violations,
            slot_counter=slot_counter,
            kernel_counter=kernel_counter,
        )
        return
    records = record_words(canary, written=True)
    num_tokens = len(out_cache_loc)
    require("out_cache_loc", out_cache_loc, np.int64, 1)
    require("input_ids", input_ids, np.int64, 1, length=num_tokens)
    require("positions", positions, np.int64, 1, length=num_tokens)
    if (expected_tokens is None) != (expected_positions is None):
        raise ValueError("expected_tokens and expected_positions go together; one of them is None")
    assert_inputs = expected_tokens is not None
    want_tokens = input_ids if expected_tokens is None else expected_tokens
    want_positions = positions if expected_positions is None else expected_positions
    require("expected_tokens", want_tokens, np.int64, 1, length=num_tokens)
    require("expected_positions", want_positions, np.int64, 1, length=num_tokens)
    require("slot_counter", slot_counter, np.int64, 1, length=1, written=True)
    require("kernel_counter", kernel_counter, np.int64, 1, length=1, written=True)

    active_reqs = max(0, min(int(plan.num_valid_reqs[0]), len(plan.seed_slots)))
    kv_hashes = np.empty(num_tokens, np.int64)
    fold_kv(sources=sources, mode=kv_hash_mode, slots=out_cache_loc, out=kv_hashes, backend=backend)
    select(write_loops, backend)(
        records,
        int(tag),
        plan.offsets,
        plan.seed_slots,
        active_reqs,
        input_ids,
        positions,
        out_cache_loc,
        int(assert_inputs),
        want_tokens,
        want_positions,
        int(chain_step_assert),
        kv_hashes,
        violations.rows,
        violations.entries,
        violations.write_index,
        violations.out_of_range,
        slot_counter,
        kernel_counter,
    )
