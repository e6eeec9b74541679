"""Runs LMDeploy's PyTorch engine for the corpus: with one bug, or with none. LMDEPLOY names a clone of github.com/InternLM/lmdeploy.

python lmdeploy_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "conformance" / "lmdeploy")]

import engine as real  # noqa: E402
from cloned import asking, main  # noqa: E402

SETUPS = {
    "lmd-chunks": real.Setup(block=8, blocks=30, chunk=16, ahead=3),
    "lmd-full": real.Setup(block=4, blocks=23, chunk=48, ahead=1, layers=1),
    "lmd-equal": real.Setup(block=4, blocks=48, chunk=64, ahead=4, layers=1, kv_heads=1),
    "lmd-split": real.Setup(block=8, kernel=4, blocks=28, chunk=24, ahead=2, layers=1),
    "lmd-evicts": real.Setup(block=8, blocks=17, chunk=48, ahead=2, layers=1, running=3, dim=32),
    "lmd-plain": real.Setup(block=4, blocks=24, chunk=48, ahead=1, layers=1, cached=False, dtype="bfloat16"),
    "lmd-graphs": real.Setup(block=4, blocks=60, chunk=40, ahead=1, layers=1, running=6, kv_heads=4),
    "lmd-aborts": real.Setup(block=8, blocks=26, chunk=16, ahead=2, heads=2, kv_heads=1, cached=False, graphs=False),
}


def workload(setup: str) -> dict[int, list]:
    """Return what is asked before each step: (name, prompt, new tokens), or who is aborted."""
    rng = random.Random(17)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, 97) for _ in range(count)]

    shared, other = tokens(20), tokens(13)
    if setup == "lmd-chunks":  # long ones beside short ones
        return {
            0: [("a", tokens(39), 6)],
            3: [("b", tokens(10), 14)],
            7: [("c", shared + tokens(25), 7)],
            12: [("d", tokens(7), 9), ("e", shared + tokens(21), 6)],
        }
    if setup == "lmd-full":  # more than there is room for: some are preempted
        return {
            0: [("a", tokens(14), 18), ("b", tokens(17), 16), ("c", tokens(13), 14)],
            6: [("d", shared, 8)],
            26: [("e", shared + tokens(3), 6)],
        }
    if setup == "lmd-equal":  # two of which are the same, and run side by side
        return {
            0: [("a", shared[:18], 12), ("b", shared[:18], 12)],
            7: [("c", shared + other, 8)],
            16: [("d", other + tokens(8), 9), ("e", other + tokens(4), 7)],
            24: [("f", shared + tokens(6), 8)],
        }
    if setup == "lmd-split":  # with two of the kernels' blocks to each of the scheduler's
        return {
            0: [("a", tokens(21), 10), ("b", tokens(12), 12)],
            6: [("c", shared + tokens(16), 8)],
            16: [("d", shared + tokens(5), 9), ("e", tokens(30), 6)],
        }
    if setup == "lmd-evicts":  # one of which needs all room that others do not read
        return {
            0: [("a", shared, 4)],
            7: [("b", tokens(40), 4)],
            14: [("c", tokens(41), 4)],
            21: [("d", shared[:16] + tokens(2), 8)],
            22: [("e", tokens(104), 4)],
            40: [("f", shared + tokens(3), 6)],
        }
    if setup == "lmd-plain":  # without a prefix cache; some are preempted
        return {
            0: [("a", tokens(14), 18), ("b", tokens(19), 20), ("c", tokens(22), 14)],
            20: [("d", tokens(30), 7)],
            26: [("e", tokens(12), 9), ("f", tokens(8), 8)],
        }
    if setup == "lmd-graphs":  # many, which end one after the other
        return {
            0: [("a", tokens(9), 5), ("b", tokens(14), 14), ("c", tokens(6), 8), ("d", tokens(11), 11)],
            7: [("e", shared + tokens(4), 9), ("f", tokens(17), 6)],
            14: [("g", shared + tokens(7), 8), ("h", tokens(5), 9)],
        }
    return {  # some of which are aborted: before, in the midst of and after their prompt
        0: [("a", tokens(12), 14), ("b", tokens(40), 8)],
        2: ["b"],
        4: [("c", shared + tokens(13), 9)],
        9: ["a"],
        11: [("d", shared + tokens(6), 8), ("e", tokens(20), 9)],
        18: ["d"],
        21: [("f", tokens(17), 8)],
    }


if __name__ == "__main__":
    main("lmdeploy", *asking(real, SETUPS, workload))
