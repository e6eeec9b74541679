"""The serial part of a chain: three hashes a token, one after the other, in as few cycles as a warp can do them.

Between the last product of one hash and the first of the next lie two xor-shifts, which together are one: with m the
product, and a word t below 2**30 to be mixed in,

    x = m ^ (m >> 31) ^ t    and    x ^ (x >> 30) == m ^ (m >> 31) ^ (m >> 30) ^ (m >> 61) ^ t

A walk therefore carries m, and `closed` makes a hash of it where nobody waits. Words are kept as halves of 32 bits, and a
step is written in PTX: left to itself the compiler puts the three products that make one of 64 bits into an order that
takes half as long again. The widening product adds the other two for nothing if its addend's low half is 0, for which the
compiler would find a register anew each time, unless that 0 is a value it does not know: hence `zeros`.
"""

import triton
import triton.language as tl

from .triton import MULTIPLIER_1, MULTIPLIER_2, hash_word

_PLAIN = tl.constexpr(bool(triton.knobs.runtime.interpret))  # Triton's interpreter knows no PTX


def _product(low: str, high: str, result: tuple[str, str], multiplier: int, zero: str) -> str:
    """PTX of {low, high} * multiplier, modulo 2**64."""
    upper, lower = divmod(multiplier, 1 << 32)
    return (
        f"mul.lo.u32 p, {high}, {lower}; mad.lo.u32 p, {low}, {upper}, p; mad.lo.cc.u32 q, {low}, {lower}, {zero}; "
        f"madc.hi.u32 {result[1]}, {low}, {lower}, p; mov.u32 {result[0]}, q; "
    )


# In: $2, $3 the halves of m, $4 the word, $5 and $6 zeros; out: $0, $1 the halves of the next m.
STEP_PTX = (
    "{ .reg .b32 a, b, c, l, h, p, q; "
    "shr.u32 a, $3, 31; shr.u32 b, $3, 30; xor.b32 h, $3, a; xor.b32 h, h, b; "
    "shf.l.wrap.b32 a, $2, $3, 1; shf.l.wrap.b32 b, $2, $3, 2; shr.u32 c, $3, 29; "
    "xor.b32 l, $2, $4; xor.b32 l, l, a; xor.b32 l, l, b; xor.b32 l, l, c; "
    + _product("l", "h", ("l", "h"), MULTIPLIER_1, "$5")
    + "shf.l.wrap.b32 a, l, h, 5; shr.u32 b, h, 27; xor.b32 h, h, b; xor.b32 l, l, a; "
    + _product("l", "h", ("$0", "$1"), MULTIPLIER_2, "$6")
    + "}"
)
_STEP = tl.constexpr(STEP_PTX)
# No GPU has a million multiprocessors: what is left of their numbers is 0.
SM_NUMBER, SM_COUNT = (
    tl.constexpr(
        f"{{ .reg .b32 s; mov.u32 s, {name}; " + " ".join(f"shr.u32 ${n}, s, {31 - n};" for n in range(12)) + " }"
    )
    for name in ("%smid", "%nsmid")
)


@triton.jit
def zeros(like, SOURCE: tl.constexpr):
    """Twelve zeros, uint32 scalars, for two tokens; `SOURCE` is SM_NUMBER or SM_COUNT, for as many more."""
    if _PLAIN:
        nought = (like * 0).to(tl.uint32)
        return nought, nought, nought, nought, nought, nought, nought, nought, nought, nought, nought, nought
    else:  # noqa: RET505  # one branch is compiled
        return tl.inline_asm_elementwise(
            SOURCE, "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,r", [like.to(tl.uint32)],
            dtype=(tl.uint32,) * 12, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def opened(running):
    """The halves of the m of which `closed` makes the uint64 `running`."""
    m = running ^ (running >> 31) ^ (running >> 62)
    return m.to(tl.uint32), (m >> 32).to(tl.uint32)


@triton.jit
def closed(low, high):
    """The hash, uint64, whose last product has these halves."""
    m = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    return m ^ (m >> 31)


@triton.jit
def _step(low, high, word, zero_1, zero_2):
    if _PLAIN:
        return opened(hash_word(closed(low, high) ^ word.to(tl.uint64)))
    else:  # noqa: RET505  # one branch is compiled
        return tl.inline_asm_elementwise(
            _STEP,
            "=r,=r,r,r,r,r,r",
            [low, high, word, zero_1, zero_2],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def pass_token(low, high, token, position, z1, z2, z3, z4, z5, z6):
    """What `hashing.hash_chain` does to `closed(low, high)`; token and position uint32 below 2**30."""
    low, high = _step(low, high, token * 0, z1, z2)
    low, high = _step(low, high, token, z3, z4)
    return _step(low, high, position, z5, z6)
