"""The KV hash on the device: rows are read by all lanes together, 128 bytes of each a turn, and folded a slot a lane.

A slot's words hash one after another, so a lane must own a slot; memory wants neighbouring lanes on neighbouring bytes.
Each turn therefore loads a tile of slots x 16 words the second way and splits it into 16 columns, which the compiler
turns round through shared memory.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from ...arrays import require_tensor
from ...constants import KV_ALIGN_BYTES, MAX_KV_SOURCES, KvHashMode
from .kv_source import KvSource
from .triton import hash_word, load_pair, signed

SLOTS_PER_PROGRAM = 32

# One source as a kernel's constant: slots to a row, words from row to row, words a slot, words read.
Geometry = tuple[int, int, int, int]


@triton.jit
def _columns(tile, S: tl.constexpr):
    """The 16 columns of a tile [S, 16], in order."""
    low, high = tl.split(tl.reshape(tile, (S, 2, 2, 2, 2)))
    low_0, low_1 = tl.split(low)
    high_0, high_1 = tl.split(high)
    a0, a4 = tl.split(low_0)
    a2, a6 = tl.split(low_1)
    a1, a5 = tl.split(high_0)
    a3, a7 = tl.split(high_1)
    c0, c8 = tl.split(a0)
    c4, c12 = tl.split(a4)
    c2, c10 = tl.split(a2)
    c6, c14 = tl.split(a6)
    c1, c9 = tl.split(a1)
    c5, c13 = tl.split(a5)
    c3, c11 = tl.split(a3)
    c7, c15 = tl.split(a7)
    return c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15


@triton.jit
def first_word(slot, PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, TOKEN_WORDS: tl.constexpr):
    """Where a slot's bytes begin, in words."""
    row = slot // PAGE
    return row * ROW_WORDS + (slot - row * PAGE) * TOKEN_WORDS


@triton.jit
def _fold_source(
    words, slots, mask, PAGE: tl.constexpr, ROW_WORDS: tl.constexpr, TOKEN_WORDS: tl.constexpr, READ_WORDS: tl.constexpr,
    S: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Fold the first words of each slot [S] of one source; with `AHEAD` each turn's words are asked for a turn before."""
    first = first_word(tl.where(mask, slots, 0), PAGE, ROW_WORDS, TOKEN_WORDS)
    acc = tl.zeros([S], tl.uint64)
    if READ_WORDS >= 16:
        column = tl.arange(0, 16)[None, :]
        at = words + first[:, None] + column
        if AHEAD:
            ahead = tl.load(at, mask=mask[:, None], other=0, eviction_policy="evict_first")
        for turn in range(READ_WORDS // 16):
            if AHEAD:
                tile = ahead
                there = mask[:, None] & (column + (turn * 16 + 16) < READ_WORDS // 16 * 16)
                ahead = tl.load(at + (turn * 16 + 16), mask=there, other=0, eviction_policy="evict_first")
            else:
                tile = tl.load(at + turn * 16, mask=mask[:, None], other=0, eviction_policy="evict_first")
            tile = tile.to(tl.uint64, bitcast=True)
            c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15 = _columns(tile, S)
            acc = hash_word(hash_word(hash_word(hash_word(acc ^ c0) ^ c1) ^ c2) ^ c3)
            acc = hash_word(hash_word(hash_word(hash_word(acc ^ c4) ^ c5) ^ c6) ^ c7)
            acc = hash_word(hash_word(hash_word(hash_word(acc ^ c8) ^ c9) ^ c10) ^ c11)
            acc = hash_word(hash_word(hash_word(hash_word(acc ^ c12) ^ c13) ^ c14) ^ c15)
    for pair in tl.static_range((READ_WORDS % 16) // 2):
        word_0, word_1 = load_pair(words, first + (READ_WORDS // 16 * 16 + pair * 2), mask, S, True)
        acc = hash_word(hash_word(acc ^ word_0) ^ word_1)
    return acc


@triton.jit
def fold_slots(
    kv, slots, mask, num_slots, SOURCES: tl.constexpr, FIRST: tl.constexpr, END: tl.constexpr, S: tl.constexpr,
    AHEAD: tl.constexpr = False,
):  # fmt: skip
    """The KV hash of slots [S] over sources FIRST to END, uint64.

    It is 0 without a source, where `mask` is off, and for a slot that not all of them hold.
    """
    total = tl.zeros([S], tl.uint64)
    if END > FIRST:
        held = mask & (slots >= 0) & (slots < num_slots)
        for n in tl.static_range(FIRST, END):
            acc = _fold_source(kv[n], slots, held, SOURCES[n][0], SOURCES[n][1], SOURCES[n][2], SOURCES[n][3], S, AHEAD)
            total = hash_word(total ^ acc)
        total = tl.where(held, total, 0)
    return total


@triton.jit(do_not_specialize=["count", "num_slots"])
def _fold_kernel(slots_in, out, count, kv, num_slots, SOURCES: tl.constexpr, NUM: tl.constexpr, S: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * S + tl.arange(0, S)
    mask = i < count
    slots = tl.load(slots_in + i, mask=mask, other=-1)
    tl.store(out + i, signed(fold_slots(kv, slots, mask, num_slots, SOURCES, 0, NUM, S)), mask=mask)


def source_words(sources: Sequence[KvSource], mode: KvHashMode) -> tuple[tuple[Any, ...], tuple[Geometry, ...], int]:
    """Return the sources as kernels take them: word pointers, their geometry, how many slots all of them hold.

    Mode NONE has no source and 0 slots.
    """
    if len(sources) > MAX_KV_SOURCES:
        raise ValueError(f"{len(sources)} KV sources, expected at most {MAX_KV_SOURCES}")
    mode = KvHashMode(mode)
    if mode == KvHashMode.NONE or not sources:
        return (), (), 0
    pointers, geometry = [], []
    for source in sources:
        require_tensor("KV source tensor", source.tensor, "uint8", 2)
        if source.tensor.data_ptr() % 8:
            raise ValueError("KV source: tensor does not start at a multiple of 8 bytes; pass an aligned copy")
        read_bytes = KV_ALIGN_BYTES if mode == KvHashMode.PARTIAL else source.read_bytes
        row_bytes = source.tensor.stride(0)
        pointers.append(triton.reinterpret(source.tensor, tl.int64))
        geometry.append((source.page_size, row_bytes // 8, source.bytes_per_token // 8, read_bytes // 8))
    return tuple(pointers), tuple(geometry), min(source.num_slots for source in sources)


def fold_kv(*, sources: Sequence[KvSource], mode: KvHashMode, slots: Any, out: Any) -> None:
    """`kv_source.fold_kv` on tensors."""
    require_tensor("slots", slots, "int64", 1)
    require_tensor("out", out, "int64", 1, length=len(slots))
    pointers, geometry, num_slots = source_words(sources, mode)
    if not geometry or not len(slots):
        out.zero_()
        return
    programs = triton.cdiv(len(slots), SLOTS_PER_PROGRAM)
    _fold_kernel[(programs,)](
        slots,
        out,
        len(slots),
        pointers,
        num_slots,
        SOURCES=geometry,
        NUM=len(geometry),
        S=SLOTS_PER_PROGRAM,
        num_warps=1,
    )
