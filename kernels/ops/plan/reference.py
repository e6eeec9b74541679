"""Plan: from the batch's requests and the block table to flat verify entries and per-request write metadata."""

from typing import Any, Final, NamedTuple, Self

import numpy as np

from ...arrays import Int32Array, Int64Array, filled, require, require_either
from ...constants import PADDING_ROW, SLOT_OUT_OF_RANGE
from ...dispatch import In32x2, In64, Out32, Out64, has_device_form, primitive, select
from ..hash.reference import bump

MAX_ENTRIES = (1 << 31) - 1  # counts travel as int32
MAX_PLAN_ENTRIES = 1 << 28  # 512 requests of half a million positions; more is a damaged or hostile file
MAX_LEN = 1 << 61  # lengths beyond it are taken as it: two of them still add up within int64


class PlanArrays(NamedTuple):
    """The arrays of a `VerifyPlan`, as loops fill them."""

    slots: Out64  # [capacity]
    expected_tokens: Out64  # [capacity], -1 if unchecked
    expected_positions: Out64  # [capacity]
    prev_slots: Out64  # [capacity], -1 for a chain head
    num_valid: Out32  # [1]
    enable: Out32  # [1]
    request_offsets: Out64  # [request capacity + 1]


class VerifyPlan(PlanArrays):
    """What verify checks, one entry a (request, position), requests in order; torch tensors, or packed numpy arrays.

    `request_offsets` are exclusive prefix sums of each request's entries, the tail filled with the total. Entries past
    `num_valid` are unspecified. On overflow `enable` is 0, no entry is written, and `request_offsets` says what would have
    been needed. Raises `TypeError` or `ValueError` for other shapes and dtypes.
    """

    __slots__ = ()

    def __new__(cls, **arrays: Any) -> Self:
        """Check shapes and dtypes."""
        plan = super().__new__(cls, **arrays)
        capacity = len(plan.slots)
        if capacity > MAX_ENTRIES:
            raise ValueError(f"verify capacity is {capacity}, expected at most {MAX_ENTRIES}; split the batch")
        for name in ("slots", "expected_tokens", "expected_positions", "prev_slots"):
            require_either(f"verify_plan.{name}", getattr(plan, name), np.int64, 1, length=capacity)
        for name in ("num_valid", "enable"):
            require_either(f"verify_plan.{name}", getattr(plan, name), np.int32, 1, length=1)
        require_either("verify_plan.request_offsets", plan.request_offsets, np.int64, 1)
        if not len(plan.request_offsets):
            raise ValueError("verify_plan.request_offsets is empty, expected request capacity + 1 values")
        return plan

    @classmethod
    def allocate(cls, *, capacity: int, request_capacity: int, device: Any = None) -> Self:
        """Return an empty plan (no valid entry, enabled): numpy arrays, or torch tensors on `device`."""
        _require_capacity("verify capacity", capacity)
        _require_capacity("request capacity", request_capacity)
        return cls(
            slots=filled(capacity, np.int64, 0, device),
            expected_tokens=filled(capacity, np.int64, -1, device),
            expected_positions=filled(capacity, np.int64, 0, device),
            prev_slots=filled(capacity, np.int64, -1, device),
            num_valid=filled(1, np.int32, 0, device),
            enable=filled(1, np.int32, 1, device),
            request_offsets=filled(request_capacity + 1, np.int64, 0, device),
        )

    @property
    def active(self) -> int:
        """How many entries verify goes through: none when disabled or when `num_valid` is negative."""
        if not int(self.enable[0]):
            return 0
        return max(0, min(int(self.num_valid[0]), len(self.slots)))


class WriteArrays(NamedTuple):
    """The arrays of a `WritePlan`, as loops fill them."""

    offsets: Out64  # [request capacity + 1]
    seed_slots: Out64  # [request capacity], -1 for a chain head
    num_valid_reqs: Out32  # [1], may exceed the capacity


class WritePlan(WriteArrays):
    """What write chains: request r's tokens are `offsets[r] .. offsets[r + 1]`, chained on from `seed_slots[r]`.

    Torch tensors, or packed numpy arrays; raises `TypeError` or `ValueError` for other shapes and dtypes.
    """

    __slots__ = ()

    def __new__(cls, **arrays: Any) -> Self:
        """Check shapes and dtypes."""
        plan = super().__new__(cls, **arrays)
        require_either("write_plan.seed_slots", plan.seed_slots, np.int64, 1)
        require_either("write_plan.offsets", plan.offsets, np.int64, 1, length=len(plan.seed_slots) + 1)
        require_either("write_plan.num_valid_reqs", plan.num_valid_reqs, np.int32, 1, length=1)
        return plan

    @classmethod
    def allocate(cls, *, request_capacity: int, device: Any = None) -> Self:
        """Return a plan of no requests: numpy arrays, or torch tensors on `device`."""
        _require_capacity("request capacity", request_capacity)
        return cls(
            offsets=filled(request_capacity + 1, np.int64, 0, device),
            seed_slots=filled(request_capacity, np.int64, -1, device),
            num_valid_reqs=filled(1, np.int32, 0, device),
        )


def _require_capacity(name: str, capacity: int) -> None:
    if not 0 <= capacity <= MAX_ENTRIES:
        raise ValueError(f"{name} is {capacity}, expected 0 to {MAX_ENTRIES}")


def plan_capacity(prefix_lens: Int64Array, window: int) -> int:
    """Return how many verify entries `plan` may want for these prefixes ([bs] int64); window 0 means FULL."""
    counts = np.minimum(np.maximum(prefix_lens, 0), window if window > 0 else 1 << 40)
    return int(counts.sum(dtype=np.int64))


@primitive()
def look_up_slot(req_to_token: In32x2, lut: In64, has_lut: int, row: int, position: int, out_of_range: Out64) -> int:
    """Return the slot at a table cell, through the full-to-SWA table where there is one; negative slots pass it."""
    if row < 0 or row >= req_to_token.shape[0] or position < 0 or position >= req_to_token.shape[1]:
        bump(out_of_range, 1)
        return SLOT_OUT_OF_RANGE
    slot = int(req_to_token[row, position])
    if has_lut == 0 or slot < 0:
        return slot
    if slot >= len(lut):
        bump(out_of_range, 1)
        return SLOT_OUT_OF_RANGE
    return int(lut[slot])


@primitive()
def window_start(prefix_len: int, window: int) -> int:
    """Return the first position that a forward reads."""
    return max(0, prefix_len - window) if window > 0 else 0


@primitive()
def expected_token_at(truth_tokens: In32x2, truth_len: int, row: int, position: int, out_of_range: Out64) -> int:
    """Return the truth token at a position of a row, -1 if there is none; one that the table lacks is counted."""
    if position < 0 or position >= truth_len:
        return -1
    if row < 0 or row >= truth_tokens.shape[0] or position >= truth_tokens.shape[1]:
        bump(out_of_range, 1)
        return -1
    return int(truth_tokens[row, position])


@primitive()
def put_entry(plan: PlanArrays, entry: int, slot: int, expected_token: int, position: int, prev: int) -> None:
    """Write an entry of a plan."""
    plan.slots[entry] = slot
    plan.expected_tokens[entry] = expected_token
    plan.expected_positions[entry] = position
    plan.prev_slots[entry] = prev


def plan_entries_loops(
    req_pool_indices: In64,
    prefix_lens: In64,
    req_to_token: In32x2,
    window: int,
    lut: In64,
    has_lut: int,
    truth_tokens: In32x2,
    truth_lens: In64,
    token_offset: int,
    plan: PlanArrays,
    out_of_range: Out64,
) -> None:
    """Count, then write, the verify entries; `truth_lens` is empty where there are no truth tokens."""
    bs = len(req_pool_indices)
    capacity = len(plan.slots)
    total = 0
    for r in range(bs):
        if r < len(plan.request_offsets):
            plan.request_offsets[r] = total
        if int(req_pool_indices[r]) != PADDING_ROW:
            prefix_len = max(0, min(int(prefix_lens[r]), MAX_LEN))
            total = min(total + prefix_len - window_start(prefix_len, window), MAX_LEN)
    for r in range(bs, len(plan.request_offsets)):
        plan.request_offsets[r] = total
    plan.num_valid[0] = min(total, capacity)
    plan.enable[0] = 0 if total > capacity else 1
    if total > capacity:
        return

    entry = 0
    for r in range(bs):
        row = int(req_pool_indices[r])
        if row == PADDING_ROW:
            continue
        prefix_len = max(0, min(int(prefix_lens[r]), MAX_LEN))
        start = window_start(prefix_len, window)
        truth_len = int(truth_lens[r]) if len(truth_lens) > 0 else 0
        prev = -1
        if 0 < start < prefix_len:
            prev = look_up_slot(req_to_token, lut, has_lut, row, start - 1, out_of_range)
        for position in range(start, prefix_len):
            slot = look_up_slot(req_to_token, lut, has_lut, row, position, out_of_range)
            expected = expected_token_at(truth_tokens, truth_len, row, position + token_offset, out_of_range)
            put_entry(plan, entry, slot, expected, position, prev)
            prev = slot
            entry += 1


def plan_writes_loops(
    req_pool_indices: In64,
    prefix_lens: In64,
    extend_lens: In64,
    req_to_token: In32x2,
    lut: In64,
    has_lut: int,
    plan: WriteArrays,
    out_of_range: Out64,
) -> None:
    """Write each request's token range and the slot whose record its chain goes on from."""
    bs, offsets, seed_slots = len(req_pool_indices), plan.offsets, plan.seed_slots
    total = 0
    for r in range(bs):
        row = int(req_pool_indices[r])
        extend_len = max(0, min(int(extend_lens[r]), MAX_LEN)) if row != PADDING_ROW else 0
        prefix_len = int(prefix_lens[r])
        if r < len(offsets):
            offsets[r] = total
        if r < len(seed_slots):
            seed = -1
            if extend_len > 0 and prefix_len > 0:
                seed = look_up_slot(req_to_token, lut, has_lut, row, prefix_len - 1, out_of_range)
            seed_slots[r] = seed
        total = min(total + extend_len, MAX_LEN)
    if bs < len(offsets):
        offsets[bs] = total
    for r in range(bs + 1, len(offsets)):
        offsets[r] = 0
    plan.num_valid_reqs[0] = bs


@has_device_form("plan.triton")
def plan(
    *, extend_lens: Int64Array, verify_plan: VerifyPlan, write_plan: WritePlan, backend: str = "cpu", **asked: Any
) -> None:
    """Fill both plans for one forward of one pool group; `asked` are the other arguments of `plan_reads`.

    A cell is looked up once for the verify entries, and once more if it is a seed.
    """
    plan_reads(verify_plan=verify_plan, backend=backend, **asked)
    names = ("req_pool_indices", "prefix_lens", "req_to_token", "full_to_swa", "out_of_range")
    given = {name: asked[name] for name in names}
    plan_writes(extend_lens=extend_lens, write_plan=write_plan, backend=backend, **given)


def plan_reads(
    *,
    req_pool_indices: Int64Array,
    prefix_lens: Int64Array,
    req_to_token: Int32Array,
    window: int,
    full_to_swa: Int64Array | None,
    truth_tokens: Int32Array | None,
    truth_lens: Int64Array | None,
    token_offset: int,
    verify_plan: VerifyPlan,
    out_of_range: Int64Array,
    backend: str = "cpu",
) -> None:
    """Fill the verify plan.

    `req_pool_indices`, `prefix_lens` [bs] int64; `req_to_token` [rows, width] int32; `window` positions before the prefix's
    end (0 for FULL); `full_to_swa` [n] int64, None where the table's slots are the group's own; `truth_tokens` [rows, width]
    int32 with `truth_lens` [bs] int64, or neither; `token_offset` 0 for a target, 1 for an EAGLE draft; `out_of_range` [1]
    int64 grows by one for each look-up that cannot be made: a row or position that the table does not have, a slot beyond
    `full_to_swa` (such a slot becomes `SLOT_OUT_OF_RANGE`), a truth token that the truth table does not have. Raises
    `TypeError` and `ValueError` for shapes and dtypes, never for values.
    """
    require_plan_numbers(len(req_pool_indices), window, token_offset, truth_tokens, truth_lens)
    lut, has_lut = _checked_requests(req_pool_indices, prefix_lens, req_to_token, full_to_swa, out_of_range)
    _require_writable(verify_plan)
    truth = _NO_TRUTH if truth_tokens is None else truth_tokens
    lens = _NO_LUT if truth_lens is None else truth_lens
    require("truth_tokens", truth, np.int32, 2)
    require("truth_lens", lens, np.int64, 1, length=None if truth_lens is None else len(req_pool_indices))
    select(plan_entries_loops, backend)(
        req_pool_indices, prefix_lens, req_to_token, window, lut, has_lut, truth, lens, token_offset, verify_plan,
        out_of_range,
    )  # fmt: skip


@has_device_form("plan.triton")
def plan_writes(
    *,
    req_pool_indices: Int64Array,
    prefix_lens: Int64Array,
    extend_lens: Int64Array,
    req_to_token: Int32Array,
    full_to_swa: Int64Array | None,
    write_plan: WritePlan,
    out_of_range: Int64Array,
    backend: str = "cpu",
) -> None:
    """Fill the write plan; `extend_lens` [bs] int64, the other arguments as for `plan_reads`."""
    lut, has_lut = _checked_requests(req_pool_indices, prefix_lens, req_to_token, full_to_swa, out_of_range)
    require("extend_lens", extend_lens, np.int64, 1, length=len(req_pool_indices))
    _require_writable(write_plan)
    select(plan_writes_loops, backend)(
        req_pool_indices, prefix_lens, extend_lens, req_to_token, lut, has_lut, write_plan, out_of_range
    )


def require_plan_numbers(bs: int, window: int, token_offset: int, truth_tokens: Any, truth_lens: Any) -> None:
    """Raise `ValueError` for numbers that no plan takes, and for truth tokens without lens."""
    if bs > MAX_ENTRIES:
        raise ValueError(f"{bs} requests, expected at most {MAX_ENTRIES}")
    if not 0 <= window <= MAX_LEN:
        raise ValueError(f"window is {window}, expected 0 (FULL) or a positive number of positions")
    if abs(token_offset) > MAX_ENTRIES:
        raise ValueError(f"token_offset is {token_offset}, expected 0 (target) or 1 (draft)")
    if (truth_tokens is None) != (truth_lens is None):
        raise ValueError("truth_tokens and truth_lens go together; one of them is None")


def _checked_requests(
    req_pool_indices: Int64Array,
    prefix_lens: Int64Array,
    req_to_token: Int32Array,
    full_to_swa: Int64Array | None,
    out_of_range: Int64Array,
) -> tuple[Int64Array, int]:
    """Check what both plans read; return the full-to-SWA table as loops take it, and whether there is one."""
    lut = _NO_LUT if full_to_swa is None else full_to_swa
    require("req_pool_indices", req_pool_indices, np.int64, 1)
    require("prefix_lens", prefix_lens, np.int64, 1, length=len(req_pool_indices))
    require("req_to_token", req_to_token, np.int32, 2)
    require("full_to_swa", lut, np.int64, 1)
    require("out_of_range", out_of_range, np.int64, 1, length=1, written=True)
    return lut, int(full_to_swa is not None)


# Stand-ins for absent inputs, so that compiled code has one signature.
_NO_LUT: Final = np.zeros(0, np.int64)
_NO_TRUTH: Final = np.zeros((0, 0), np.int32)


def _require_writable(plan: VerifyPlan | WritePlan) -> None:
    for name, array in plan._asdict().items():
        if not array.flags.writeable:
            raise ValueError(f"{type(plan).__name__}.{name} is read-only, but the plan goes there")
