# ruff: noqa: N803, N806 -- constexprs are capitals
"""What no kernel gets below, measured in the same run: kernels that do a part of the work which cannot be left out.

A walk of a chain in registers alone; reading the bytes that a check must read, in the same order, and nothing else; an empty
kernel. Each in several forms, of which the fastest counts.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from kernel_sides import DEVICE, Scenario
from kvcanary.kernels.ops.hash.triton import hash_chain
from kvcanary.kernels.ops.hash.triton_chain import SM_COUNT, SM_NUMBER, closed, opened, pass_token, zeros

Timer = Callable[[Callable[[], None]], float]

# Entries of a program, its warps, whether what is read once is marked so.
GATHERS = ((128, 4, False), (256, 8, False), (256, 4, False), (512, 4, False), (128, 4, True), (256, 8, True))
ROW_GATHERS = ((32, 1, False), (32, 4, False), (64, 4, False), (128, 4, False), (32, 1, True), (32, 4, True))


@triton.jit
def _empty_kernel(out):
    pass


@triton.jit(do_not_specialize=["steps"])
def _chain_kernel(out, steps):
    """A chain as it is defined."""
    running = tl.load(out).to(tl.uint64, bitcast=True)
    for i in range(0, steps, 8):
        for k in tl.static_range(8):
            running = hash_chain(running, running * 0 + (i + k), running * 0 + (i + k))
    tl.store(out, running.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["steps"])
def _passing_kernel(out, steps):
    """The same chain as a write walks it."""
    low, high = opened(tl.load(out).to(tl.uint64, bitcast=True))
    z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10, z11 = zeros(steps, SM_NUMBER)
    y0, y1, y2, y3, y4, y5, y6, y7, y8, y9, y10, y11 = zeros(steps, SM_COUNT)
    for i in range(0, steps, 4):
        word = i.to(tl.uint32)
        low, high = pass_token(low, high, word, word, z0, z1, z2, z3, z4, z5)
        low, high = pass_token(low, high, word + 1, word + 1, z6, z7, z8, z9, z10, z11)
        low, high = pass_token(low, high, word + 2, word + 2, y0, y1, y2, y3, y4, y5)
        low, high = pass_token(low, high, word + 3, word + 3, y6, y7, y8, y9, y10, y11)
    tl.store(out, closed(low, high).to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["count"])
def _gather_kernel(slots, truth, words, kv, out, count, WORDS: tl.constexpr, T: tl.constexpr, ONCE: tl.constexpr):
    """Read each entry's slot and token, its slot's record and the first WORDS words of its KV row."""
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    i = tl.program_id(0) * T + tl.arange(0, T)
    slot = tl.load(slots + i, mask=i < count, other=0, eviction_policy=POLICY).to(tl.int64)
    seen = tl.load(truth + i, mask=i < count, other=0, eviction_policy=POLICY).to(tl.int64)
    pair = tl.arange(0, 2)[None, :]
    record = words + slot[:, None] * 4 + pair
    seen ^= tl.xor_sum(tl.load(record) ^ tl.load(record + 2), 1)
    if WORDS > 0:
        WIDTH: tl.constexpr = 16 if WORDS > 16 else WORDS
        row = kv + slot[:, None] * 128 + tl.arange(0, WIDTH)[None, :]
        tile = tl.load(row, eviction_policy=POLICY)
        for turn in range(1, WORDS // WIDTH):
            tile ^= tl.load(row + turn * WIDTH, eviction_policy=POLICY)
        seen ^= tl.xor_sum(tile, 1)
    # Never so, but the compiler cannot know.
    tl.store(out + i, seen, mask=seen == 0x0123456789ABCDEF)


def launch_ms(timer: Timer) -> float:
    """An empty kernel of one program."""
    out = torch.ones(1, dtype=torch.int64, device=DEVICE)
    return timer(lambda: _empty_kernel[(1,)](out, num_warps=1))


def chain_ms(timer: Timer, tokens: int) -> float:
    """A chain of so many tokens, a multiple of 8, in registers alone."""
    ends, figures = [], []
    for kernel in (_chain_kernel, _passing_kernel):
        out = torch.ones(1, dtype=torch.int64, device=DEVICE)
        run = functools.partial(kernel[(1,)], out, tokens, num_warps=1)
        run()
        ends.append(int(out))
        figures.append(timer(run))
    if len(set(ends)) > 1:
        raise RuntimeError(f"the two forms of a chain of {tokens} tokens end in {ends}")
    return min(figures)


def gather_ms(timer: Timer, scenario: Scenario) -> float:
    """What plan and verify of the prefixes must read, in their order."""
    state = scenario.state
    slots = scenario.part("slots", decode=False).int()
    truth = scenario.part("tokens", decode=False).int()
    words = torch.ones(state["count"] + 1, 4, dtype=torch.int64, device=DEVICE)
    kv = state["kv"].view(torch.int64)
    out: Any = torch.empty(len(slots), dtype=torch.int64, device=DEVICE)
    read = (0, 2, 128)[scenario.mode]

    def run(tile: int, warps: int, once: bool) -> Callable[[], None]:
        programs = triton.cdiv(len(slots), tile)
        return lambda: _gather_kernel[(programs,)](
            slots, truth, words, kv, out, len(slots), WORDS=read, T=tile, ONCE=once, num_warps=warps
        )

    return min(timer(run(*shape)) for shape in (ROW_GATHERS if read > 16 else GATHERS))
