"""Ops joined where it pays: plan and verify without the entries between them, chains shared by several buffers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...arrays import record_words
from ...constants import KvHashMode
from ...dispatch import device_form
from ...tokens import expect_stored
from ..hash.kv_source import KvSource
from ..plan.reference import VerifyPlan, WritePlan, plan, plan_capacity
from ..verify.reference import verify
from ..violation_log import ViolationLog
from ..write.reference import write

MAX_BUFFERS = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class CanaryBuffer:
    """One canary buffer as a launch sees it: what it is hashed over, where its findings and counts go.

    `canary` `[num_slots, stride] uint8`; `tag` a `LaunchTag`; `violations` its own log; `slot_counter`,
    `kernel_counter` `[1] int64`. All of them numpy arrays, or all torch tensors.
    """

    canary: Any
    tag: int
    sources: Sequence[KvSource]
    kv_hash_mode: KvHashMode
    violations: ViolationLog
    slot_counter: Any
    kernel_counter: Any


def _require_buffers(buffers: Sequence[CanaryBuffer]) -> None:
    if not 1 <= len(buffers) <= MAX_BUFFERS:
        raise ValueError(f"{len(buffers)} canary buffers, expected 1 to {MAX_BUFFERS}")
    sizes = {int(buffer.canary.shape[0]) for buffer in buffers}
    if len(sizes) > 1:
        raise ValueError(f"canary buffers have {sorted(sizes)} slots, expected the same number: they share a chain")


def plan_verify(
    *,
    req_pool_indices: Any,
    prefix_lens: Any,
    req_to_token: Any,
    window: int,
    full_to_swa: Any | None,
    truth_tokens: Any | None,
    truth_lens: Any | None,
    token_offset: int,
    check_tokens: bool,
    buffers: Sequence[CanaryBuffer],
    out_of_range: Any,
    low_bits: bool = False,
    backend: str = "cpu",
) -> None:
    """Plan one forward of one pool group and verify its buffers, as `plan` and then `verify` for each would.

    Arguments as for `plan`, whose capacity is never too small here, and `verify`. Several buffers share the chain: the
    caller promises that token, position and prev_hash of all their records are equal, as they are for the HEAD and
    TAIL buffers of both halves of a group between two forwards; KV hashes are each buffer's own. `violations.entries`
    holds the number that an entry would have in the plan; a log that must lose no row has room for every entry.
    `low_bits` says that the truth tokens are the low 32 bits of tokens, of which a stored -1 contradicts none.
    Raises `ValueError` for no buffer, more than 4, and buffers of different sizes.
    """
    _require_buffers(buffers)
    if backend == "triton":
        device_form("plan_verify.triton").plan_verify(
            req_pool_indices=req_pool_indices,
            prefix_lens=prefix_lens,
            req_to_token=req_to_token,
            window=window,
            full_to_swa=full_to_swa,
            truth_tokens=truth_tokens,
            truth_lens=truth_lens,
            token_offset=token_offset,
            check_tokens=check_tokens,
            low_bits=low_bits,
            buffers=buffers,
            out_of_range=out_of_range,
        )
        return
    bs = len(req_pool_indices)
    verify_plan = VerifyPlan.allocate(capacity=plan_capacity(prefix_lens, window), request_capacity=bs)
    plan(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_lens=prefix_lens * 0,
        req_to_token=req_to_token,
        window=window,
        full_to_swa=full_to_swa,
        truth_tokens=truth_tokens,
        truth_lens=truth_lens,
        token_offset=token_offset,
        verify_plan=verify_plan,
        write_plan=WritePlan.allocate(request_capacity=bs),
        out_of_range=out_of_range,
        backend=backend,
    )
    if low_bits:
        expect_stored(verify_plan, record_words(buffers[0].canary, written=False))
    for buffer in buffers:
        verify(
            canary=buffer.canary,
            tag=buffer.tag,
            plan=verify_plan,
            check_tokens=check_tokens,
            sources=buffer.sources,
            kv_hash_mode=buffer.kv_hash_mode,
            violations=buffer.violations,
            slot_counter=buffer.slot_counter,
            kernel_counter=buffer.kernel_counter,
            backend=backend,
        )


def write_shared(
    *,
    plan: WritePlan,
    input_ids: Any,
    positions: Any,
    out_cache_loc: Any,
    expected_tokens: Any | None,
    expected_positions: Any | None,
    chain_step_assert: bool,
    buffers: Sequence[CanaryBuffer],
    backend: str = "cpu",
) -> None:
    """Write several buffers for one forward, as `write` for each would; chains are computed once.

    Arguments as for `write`, the promise as for `plan_verify`: seeds are read from the first buffer. KV hashes are
    those of the bytes as they are now.
    """
    _require_buffers(buffers)
    if backend == "triton":
        device_form("write.triton").write_shared(
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            expected_tokens=expected_tokens,
            expected_positions=expected_positions,
            chain_step_assert=chain_step_assert,
            buffers=buffers,
        )
        return
    for buffer in buffers:
        write(
            canary=buffer.canary,
            tag=buffer.tag,
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            expected_tokens=expected_tokens,
            expected_positions=expected_positions,
            chain_step_assert=chain_step_assert,
            sources=buffer.sources,
            kv_hash_mode=buffer.kv_hash_mode,
            violations=buffer.violations,
            slot_counter=buffer.slot_counter,
            kernel_counter=buffer.kernel_counter,
            backend=backend,
        )
