"""Random inputs for the device kernels, hostile ones among them, and the same launch on arrays and on tensors.

Used by `test_device_kernels.py` (in Triton's interpreter) and `gpu/test_on_gpu.py` (on a GPU).
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from kvcanary.kernels.constants import KvHashMode
from kvcanary.kernels.ops.hash.kv_source import KvSource, fold_kv
from kvcanary.kernels.ops.plan.reference import VerifyPlan, WritePlan, plan, plan_writes
from kvcanary.kernels.ops.plan_verify.reference import CanaryBuffer, plan_verify, write_shared
from kvcanary.kernels.ops.scatter.reference import scatter
from kvcanary.kernels.ops.verify.reference import verify
from kvcanary.kernels.ops.violation_log import ViolationLog

POISON = -0x5A5A5A5A5A5A5A5B
EXTREMES = np.array([-(1 << 63), -(1 << 31) - 1, -2, -1, 1 << 31, 1 << 32, 1 << 61, 1 << 62, (1 << 63) - 1])
ANCHOR, M = 0xC0FFEE1234567890, (1 << 64) - 1


def s(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def spoil(rng: np.random.Generator, values: Any, rate: float) -> None:
    """Put extreme values into some places."""
    chosen = rng.random(values.shape) < rate
    if values.dtype == np.int64:
        values[chosen] = rng.choice(EXTREMES, int(chosen.sum()))
    else:
        values[chosen] = rng.choice([-(1 << 31), -3, (1 << 31) - 1], int(chosen.sum()))


class Side:
    """Turns a case's arrays into what one side takes: themselves, copied, or tensors on a device."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        self.backend = "cpu" if device is None else "triton"
        self.kept: list[Any] = []

    def given(self, array: Any, *, rows_apart: int = 1) -> Any:
        """A copy for this launch, kept for the comparison; every `rows_apart`-th row of a larger, poisoned one."""
        if array is None:
            return None
        whole = np.full((max(1, len(array)) * rows_apart + 2, *array.shape[1:]), 0x5A, array.dtype)
        part = slice(1, 1 + len(array) * rows_apart, rows_apart)
        whole[part] = array
        kept = whole if self.device is None else torch.from_numpy(whole).to(self.device)
        self.kept.append(kept)
        return kept[part]

    def log(self, capacity: int, first: int) -> ViolationLog:
        return ViolationLog(
            rows=self.given(np.full((capacity, 8), POISON)),
            entries=self.given(np.full(capacity, POISON)),
            write_index=self.given(np.array([first])),
            out_of_range=self.given(np.array([3])),
        )

    def counter(self, value: int) -> Any:
        return self.given(np.array([value]))

    def plan(self, made: Any) -> Any:
        return type(made)(**{name: self.given(getattr(made, name)) for name in type(made)._fields})

    def sources(self, sources: Any, rows_apart: int = 1) -> tuple[KvSource, ...]:
        return tuple(replace(one, tensor=self.given(one.tensor, rows_apart=rows_apart)) for one in sources)

    def bytes(self) -> list[bytes]:
        if self.device not in (None, "cpu"):
            torch.cuda.synchronize()
        return [(k if isinstance(k, np.ndarray) else k.cpu().numpy()).tobytes() for k in self.kept]


def both(run: Any, device: str) -> list[bytes]:
    """Run `run(side)` on arrays and on tensors; everything given or written must be equal, byte for byte."""
    sides = Side(None), Side(device)
    for side in sides:
        run(side)
    ours, theirs = sides[1].bytes(), sides[0].bytes()
    assert [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b] == []
    return theirs


def kv_sources(rng: np.random.Generator, num_slots: int, kind: str) -> tuple[tuple[KvSource, ...], KvHashMode]:
    """KV sources of one of a few layouts, so that a GPU compiles each once."""
    layouts = {
        "none": ((), KvHashMode.NONE),
        "partial": (((1, 32, 32),), KvHashMode.PARTIAL),
        "all": (((1, 160, 160),), KvHashMode.ALL),
        "several": (((2, 48, 32), (3, 16, 16), (1, 272, 272)), KvHashMode.ALL),
        "pairs": (((1, 32, 16), (4, 48, 48)), KvHashMode.PARTIAL),
    }
    shapes, mode = layouts[kind]
    sources = []
    for page, bytes_per_token, read in shapes:
        rows = max(1, num_slots // page - int(rng.integers(0, 2)))
        tensor = rng.integers(0, 256, (rows, page * bytes_per_token + 16), dtype=np.uint8)
        sources.append(KvSource(tensor=tensor, page_size=page, bytes_per_token=bytes_per_token, read_bytes=read))
    return tuple(sources), mode


def buffers(
    rng: np.random.Generator,
    side_seed: int,
    num_slots: int,
    kinds: tuple[str, ...],
    stride: int,
    capacity: int,
    first: int,
) -> Any:
    """Return what makes each side's buffers: they share all but KV hashes."""
    whole = np.zeros((num_slots, stride // 8), np.int64)
    whole[:] = rng.integers(-2, 6, whole.shape)
    spoil(rng, whole, 0.02)
    layouts = [kv_sources(rng, num_slots, kind) for kind in kinds]
    words = [whole.copy() for _ in kinds]
    for one, (sources, mode) in zip(words, layouts, strict=True):
        # Most KV hashes hold.
        hashes = np.empty(num_slots, np.int64)
        fold_kv(sources=sources, mode=mode, slots=np.arange(num_slots), out=hashes)
        one[:, 3] = np.where(rng.random(num_slots) < 0.9, hashes, one[:, 3])

    def make(side: Side) -> list[CanaryBuffer]:
        return [
            CanaryBuffer(
                canary=side.given(one.view(np.uint8), rows_apart=1 + side_seed % 2),
                tag=n + side_seed % 8,
                sources=side.sources(sources),
                kv_hash_mode=mode,
                violations=side.log(capacity, first),
                slot_counter=side.counter(5),
                kernel_counter=side.counter((1 << 63) - 1),
            )
            for n, (one, (sources, mode)) in enumerate(zip(words, layouts, strict=True))
        ]

    make.words = words  # type: ignore[attr-defined]
    return make


def lay_chains(rng: np.random.Generator, table: Any, rows: Any, prefix: Any, words: list[Any], lut: Any) -> None:
    """Lay clean records along each request's cells, so that most of what is checked holds."""
    num_slots = len(words[0])
    for row, length in zip(rows.tolist(), prefix.tolist(), strict=True):
        running = s(ANCHOR)
        if not 0 <= row < len(table):
            continue
        for p in range(max(0, min(length, table.shape[1]))):
            slot = int(table[row, p])
            slot = int(lut[slot]) if lut is not None and 0 <= slot < len(lut) else slot
            token = int(rng.integers(0, 50))
            if 0 <= slot < num_slots:
                for one in words:
                    one[slot, :3] = (token, p, signed(running))
            running = s(s(s(running) ^ (token & M)) ^ p)


def check_plan_verify(seed: int, device: str, *, scale: int, kinds: tuple[str, ...]) -> None:
    """Fused plan and verify, and both apart, against the CPU's."""
    rng = np.random.default_rng(seed)
    bs, rows, width = int(rng.integers(0, 6)), int(rng.integers(1, 8)), int(rng.choice([1, 7, 60, 60 * scale]))
    num_slots = int(rng.choice([1, 30, rows * width + 1]))
    table = rng.integers(0, num_slots, (rows, width)).astype(np.int32)
    if rng.random() < 0.5 and num_slots > rows * width:
        table = (rng.permutation(rows * width) + 1).reshape(rows, width).astype(np.int32)
    spoil(rng, table, float(rng.choice([0, 0, 0.02])))
    # Four forms of the kernels, which is what a GPU takes its time to compile.
    has_lut, has_truth, checked = ((0, 1, 1), (1, 1, 1), (0, 0, 1), (1, 1, 0))[seed % 4]
    lut = rng.integers(-1, num_slots + 1, int(rng.integers(1, num_slots + 2))) if has_lut else None
    requests, prefix = rng.integers(-1, rows + 1, bs), rng.integers(0, width + 2, bs)
    make = buffers(
        rng,
        seed,
        num_slots,
        kinds,
        40 if kinds[0] == "partial" else 32,
        int(rng.choice([0, 3, 4000])),
        int(rng.choice([0, 2])),
    )
    lay_chains(rng, table, requests, prefix, make.words, lut)
    truth = rng.integers(-1, 50, (rows, int(rng.integers(1, width + 2)))).astype(np.int32) if has_truth else None
    truth_lens = rng.integers(-1, width + 3, bs) if has_truth else None
    spoil(rng, requests, 0.05)
    spoil(rng, prefix, 0.05)
    prefix = np.clip(prefix, -(1 << 62), 1000 * scale)  # past the table, but what a CPU walks in no time
    window, offset = int(rng.choice([0, 0, 1, 5, 30])), int(rng.integers(-1, 2))

    def fused(side: Side) -> None:
        plan_verify(
            req_pool_indices=side.given(requests),
            prefix_lens=side.given(prefix),
            req_to_token=side.given(table),
            window=window,
            full_to_swa=side.given(lut),
            truth_tokens=side.given(truth),
            truth_lens=side.given(truth_lens),
            token_offset=offset,
            check_tokens=bool(checked),
            low_bits=seed % 3 == 1,
            buffers=make(side),
            out_of_range=side.counter(9),
            backend=side.backend,
        )

    def apart(side: Side) -> None:
        counts = np.clip(prefix, 0, window or 1 << 40) * (requests != 0)
        capacity = max(0, int(counts.sum()) - (seed % 7 == 0))
        verify_plan = side.plan(VerifyPlan.allocate(capacity=capacity, request_capacity=bs + seed % 3))
        outside = side.counter(9)
        plan(
            req_pool_indices=side.given(requests),
            prefix_lens=side.given(prefix),
            extend_lens=side.given(prefix - 1),
            req_to_token=side.given(table),
            window=window,
            full_to_swa=side.given(lut),
            truth_tokens=side.given(truth),
            truth_lens=side.given(truth_lens),
            token_offset=offset,
            verify_plan=verify_plan,
            write_plan=side.plan(WritePlan.allocate(request_capacity=max(0, bs + seed % 3 - 1))),
            out_of_range=outside,
            backend=side.backend,
        )
        one = make(side)[0]
        verify(
            canary=one.canary,
            tag=one.tag,
            plan=verify_plan,
            check_tokens=bool(checked),
            sources=one.sources,
            kv_hash_mode=one.kv_hash_mode,
            violations=one.violations,
            slot_counter=one.slot_counter,
            kernel_counter=one.kernel_counter,
            backend=side.backend,
        )

    both(fused, device)
    both(apart, device)


def check_write(seed: int, device: str, *, scale: int, kinds: tuple[str, ...]) -> None:
    """Writes of few tokens and of many, with all that goes wrong, against the CPU's."""
    rng = np.random.default_rng(seed)
    bs = int(rng.choice([1, 2, 5, 40]))
    longest = int(rng.choice([1, 2, 9, 40 * scale]))
    if device == "cpu":  # the interpreter takes milliseconds for a token and a buffer
        longest = min(longest, 200 // bs)
    num_slots = int(rng.choice([9, bs * longest + 60]))
    lens = rng.integers(0, longest + 1, bs)
    if rng.random() < 0.3:
        lens[:] = 1  # a decode step
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    tokens = int(offsets[-1]) + int(rng.choice([0, 3]))
    slots = rng.integers(0, num_slots, tokens)
    if rng.random() < 0.7 and tokens < num_slots:
        slots = rng.permutation(num_slots - 1)[:tokens] + 1
    slots[rng.random(tokens) < float(rng.choice([0, 0, 0.1]))] = int(rng.choice([-1, 0, 0]))
    seeds = np.where(rng.random(bs) < 0.5, -1, rng.integers(-1, num_slots, bs))
    if rng.random() < 0.2 and tokens:
        seeds[-1] = slots[0]
    ids, positions = rng.integers(0, 60, tokens), rng.integers(0, 60, tokens)
    if rng.random() < 0.6:
        positions = np.concatenate([np.arange(n) for n in lens] + [np.zeros(tokens - offsets[-1], np.int64)])
    wrong = float(rng.choice([0, 0, 0.05]))
    for array in (ids, positions, slots, offsets, seeds):
        spoil(rng, array, wrong)
    expected = (None, None)
    if seed % 2:
        expected = ids.copy(), positions.copy()
        spoil(rng, expected[seed // 2 % 2], float(rng.choice([0, 0.05])))
    made = WritePlan.allocate(request_capacity=bs + seed % 3)
    made.offsets[:] = 0
    made.offsets[: bs + 1] = offsets
    made.seed_slots[:bs] = seeds
    made.seed_slots[bs:] = 1 << 50
    made.num_valid_reqs[0] = int(rng.choice([bs, bs, bs, bs // 2, -3])) if seed % 3 else bs
    make = buffers(
        rng,
        seed,
        num_slots,
        kinds,
        40 if kinds[0] == "partial" else 32,
        int(rng.choice([0, 3, 4000])),
        int(rng.choice([0, 2])),
    )
    steps = bool(seed % 4)

    def run(side: Side) -> None:
        write_shared(
            plan=side.plan(made),
            input_ids=side.given(ids),
            positions=side.given(positions),
            out_cache_loc=side.given(slots),
            expected_tokens=side.given(expected[0]),
            expected_positions=side.given(expected[1]),
            chain_step_assert=steps,
            buffers=make(side),
            backend=side.backend,
        )

    # With seeds among what is written, buffers whose KV hashes differ still share a chain.
    both(run, device)


def check_small_ops(seed: int, device: str, *, scale: int) -> None:
    """Scatter, KV fold and the write plan alone against the CPU's."""
    rng = np.random.default_rng(seed)
    bs, rows, width = (
        int(rng.integers(0, 700 if scale > 1 else 6)),
        int(rng.integers(1, 9)),
        int(rng.integers(1, 30 * scale)),
    )
    lens = rng.integers(0, width + 4, bs)
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
    flat, targets = rng.integers(-5, 1 << 40, int(offsets[-1])), rng.integers(0, rows, bs)
    pool = rng.integers(0, 99, (rows, width)).astype(np.int32)
    for array in (offsets, targets):
        spoil(rng, array, float(rng.choice([0, 0.05])))
    sources, mode = kv_sources(rng, 50, ("none", "partial", "all", "several", "pairs")[seed % 5])
    slots = rng.integers(-2, 70, int(rng.integers(0, 90 * scale)))
    prefix, extends = rng.integers(-1, width + 2, bs), rng.integers(-2, 9, bs)
    for array in (slots, prefix, extends):
        spoil(rng, array, float(rng.choice([0, 0.05])))
    lut = rng.integers(-1, 99, 40) if seed % 2 else None

    def run(side: Side) -> None:
        given = {"flat": side.given(flat), "offsets": side.given(offsets), "rows": side.given(targets)}
        scatter(**given, pool=side.given(pool), out_of_range=side.counter(1), backend=side.backend)
        out = side.given(np.full(len(slots), POISON))
        fold_kv(
            sources=side.sources(sources, 1 + seed % 2),
            mode=mode,
            slots=side.given(slots),
            out=out,
            backend=side.backend,
        )
        plan_writes(
            req_pool_indices=side.given(targets),
            prefix_lens=side.given(prefix),
            extend_lens=side.given(extends),
            req_to_token=side.given(pool),
            full_to_swa=side.given(lut),
            write_plan=side.plan(WritePlan.allocate(request_capacity=max(0, bs + seed % 4 - 2))),
            out_of_range=side.counter(1),
            backend=side.backend,
        )

    both(run, device)
