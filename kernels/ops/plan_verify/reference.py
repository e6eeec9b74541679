"""Ops joined where it pays: plan and verify without the entries between them, chains shared by several buffers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...arrays import record_words
from ...constants import KvHashMode
from ...dispatch import has_device_form
from ...tokens import expect_stored
from ..hash.kv_source import KvSource
from ..plan.reference import VerifyPlan, plan_capacity, plan_reads
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

    @property
    def arguments(self) -> dict[str, Any]:
        """What `verify` and `write` call its fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def require_buffers(buffers: Sequence[CanaryBuffer]) -> None:
    """Raise `ValueError` for no buffer, more than 4, and buffers of different sizes."""
    if not 1 <= len(buffers) <= MAX_BUFFERS:
        raise ValueError(f"{len(buffers)} canary buffers, expected 1 to {MAX_BUFFERS}")
    sizes = {int(buffer.canary.shape[0]) for buffer in buffers}
    if len(sizes) > 1:
        raise ValueError(f"canary buffers have {sorted(sizes)} slots, expected the same number: they share a chain")


@has_device_form("plan_verify.triton")
def plan_verify(
    *, buffers: Sequence[CanaryBuffer], check_tokens: bool, low_bits: bool = False, backend: str = "cpu", **asked: Any
) -> None:
    """Plan one forward of one pool group and verify its buffers, as `plan_reads` and then `verify` for each would.

    `asked` are the other arguments of `plan_reads`, whose capacity is never too small here. Several buffers share the chain:
    the caller promises that token, position and prev_hash of all their records are equal, as they are for the HEAD and
    TAIL buffers of both halves of a group between two forwards; KV hashes are each buffer's own. `violations.entries`
    holds the number that an entry would have in the plan; a log that must lose no row has room for every entry.
    `low_bits` says that the truth tokens are the low 32 bits of tokens, of which a stored -1 contradicts none.
    Raises `ValueError` as `require_buffers` does.
    """
    require_buffers(buffers)
    capacity = plan_capacity(asked["prefix_lens"], asked["window"])
    plan = VerifyPlan.allocate(capacity=capacity, request_capacity=len(asked["req_pool_indices"]))
    plan_reads(verify_plan=plan, backend=backend, **asked)
    if low_bits:
        expect_stored(plan, record_words(buffers[0].canary, written=False))
    for buffer in buffers:
        verify(plan=plan, check_tokens=check_tokens, backend=backend, **buffer.arguments)


@has_device_form("write.triton")
def write_shared(*, buffers: Sequence[CanaryBuffer], backend: str = "cpu", **given: Any) -> None:
    """Write several buffers for one forward, as `write` for each would; chains are computed once.

    `given` are the other arguments of `write`, the promise is that of `plan_verify`: seeds are read from the first buffer.
    KV hashes are those of the bytes as they are now.
    """
    require_buffers(buffers)
    for buffer in buffers:
        write(backend=backend, **given, **buffer.arguments)
