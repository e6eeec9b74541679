"""The PTX that a walk's step is written in, done by hand here: no GPU, and Triton's interpreter knows no PTX.

On a GPU `tests/kernels/gpu` runs it.
"""

import random
import re

import pytest
from kvcanary.kernels.ops.hash.reference import splitmix64
from kvcanary.kernels.ops.hash.triton_chain import STEP_PTX

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def run_ptx(text: str, given: dict[str, int]) -> dict[str, int]:
    """Do straight-line PTX on 32-bit registers; operands are registers or numbers."""
    registers, carry = dict(given), 0

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name)

    for line in text.strip().strip("{}").split(";"):
        words = re.findall(r"[^\s,]+", line)
        if not words or words[0] == ".reg":
            continue
        name, target, *operands = words
        a, b, c = [value(operand) for operand in operands] + [0] * (3 - len(operands))
        match name:
            case "xor.b32":
                result = a ^ b
            case "shr.u32":
                result = a >> b
            case "shf.l.wrap.b32":
                result = ((b << 32 | a) << (c & 31)) >> 32
            case "mov.u32":
                result = a
            case "mul.lo.u32":
                result = a * b
            case "mad.lo.u32":
                result = a * b + c
            case "mad.lo.cc.u32":
                result = (a * b & MASK32) + c
                carry = result >> 32
            case "madc.hi.u32":
                result = (a * b >> 32) + c + carry
            case _:
                raise AssertionError(f"an instruction unknown here: {line}")
        registers[target] = result & MASK32
    return registers


def opened(running: int) -> int:
    """The product of which the last xor-shift makes `running`."""
    return running ^ (running >> 31) ^ (running >> 62)


EDGES = [0, 1, MASK64, 1 << 63, 1 << 31, MASK32, MASK32 << 32, 0x5555555555555555]


@pytest.mark.parametrize("word", [0, 1, (1 << 30) - 1, 0x2AAAAAAA, None])
def test_a_step_is_a_hash(word: int | None) -> None:
    rng = random.Random(str(word))
    for running in EDGES + [rng.getrandbits(64) for _ in range(200)]:
        mixed = rng.getrandbits(30) if word is None else word
        m = opened(running)
        assert m ^ (m >> 31) == running
        given = {"$2": m & MASK32, "$3": m >> 32, "$4": mixed, "$5": 0, "$6": 0}
        done = run_ptx(STEP_PTX, given)
        assert done["$0"] | done["$1"] << 32 == opened(splitmix64(running ^ mixed))
