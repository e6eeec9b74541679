"""Write on the device: the chains, which are serial, beside everything that is not; exact whatever slots repeat.

A request's chain is three hashes a token, one after the other, and nothing shortens it. Few tokens are one program's work,
a request a lane (`write_few`); of many tokens a warp walks each chain and does nothing else (`write_many`). Tokens,
positions and KV hashes are laid into the records by other programs of the same launch.
"""

from collections.abc import Sequence
from typing import Any

from ...arrays import require_tensor
from ..plan.reference import WritePlan
from ..plan_verify.reference import CanaryBuffer, require_buffers
from ..triton_buffers import BufferPointers
from .triton_few import write_few
from .triton_many import write_many

FEW_TOKENS = 1024


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
) -> None:
    """`fused.write_shared` on tensors: one launch for few tokens, else three."""
    require_buffers(buffers)
    require_tensor("out_cache_loc", out_cache_loc, "int64", 1)
    tokens = out_cache_loc.shape[0]
    require_tensor("input_ids", input_ids, "int64", 1, length=tokens)
    require_tensor("positions", positions, "int64", 1, length=tokens)
    if (expected_tokens is None) != (expected_positions is None):
        raise ValueError("expected_tokens and expected_positions go together; one of them is None")
    want_tokens = input_ids if expected_tokens is None else expected_tokens
    want_positions = positions if expected_positions is None else expected_positions
    require_tensor("expected_tokens", want_tokens, "int64", 1, length=tokens)
    require_tensor("expected_positions", want_positions, "int64", 1, length=tokens)
    many = BufferPointers.of(buffers)
    capacity = plan.seed_slots.shape[0]
    if not capacity:
        for buffer in buffers:
            buffer.kernel_counter.add_(1)
        return
    constants = many.layout | {"ASSERTS": (expected_tokens is not None, chain_step_assert)}
    few = tokens <= FEW_TOKENS and capacity <= FEW_TOKENS and tokens <= 8 * capacity
    (write_few if few else write_many)(
        (plan.offsets, plan.seed_slots, plan.num_valid_reqs),
        (out_cache_loc, input_ids, positions, want_tokens, want_positions),
        many,
        constants,
    )


def write(*, plan: WritePlan, input_ids: Any, positions: Any, out_cache_loc: Any, expected_tokens: Any | None,
          expected_positions: Any | None, chain_step_assert: bool, **buffer: Any) -> None:  # fmt: skip
    """`write.write` on tensors."""
    write_shared(
        plan=plan, input_ids=input_ids, positions=positions, out_cache_loc=out_cache_loc, expected_tokens=expected_tokens,
        expected_positions=expected_positions, chain_step_assert=chain_step_assert, buffers=[CanaryBuffer(**buffer)],
    )  # fmt: skip
