"""Runs mini-sglang for the corpus: with one bug, or with none. MINI_SGLANG names a clone of github.com/sgl-project/mini-sglang.

python minisgl_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "conformance" / "mini_sglang")]

import engine as real  # noqa: E402
from cloned import Patch, answering, main  # noqa: E402

SETUPS = {
    "mini-abort": real.Setup(page=4, pages=20, running=3, chunk=64),
    "mini-table": real.Setup(page=4, pages=48),
    "mini-pad": real.Setup(page=8, pages=18, graphs=(4,)),
    "mini-chunks": real.Setup(page=4, pages=26, chunk=12),
    "mini-positions": real.Setup(page=8, pages=24, chunk=32, graphs=(2, 4)),
    "mini-reload": real.Setup(page=1, pages=150),
    "mini-tiles": real.Setup(page=4, pages=22, chunk=64, graphs=()),
    "mini-evict": real.Setup(page=4, pages=22, chunk=64),
    "mini-cut": real.Setup(page=4, pages=30, chunk=40, graphs=(1, 3)),
    "mini-grow": real.Setup(page=8, pages=16, chunk=24, running=2, graphs=(2,)),
    "mini-rotated": real.Setup(page=2, pages=90, chunk=20, running=3, graphs=(1, 2, 3)),
    "mini-contiguous": real.Setup(page=4, pages=36, chunk=56, running=5, graphs=(2, 5)),
    "mini-doubles": real.Setup(page=4, pages=34, chunk=44, running=4, graphs=(1, 4)),
    "mini-withdrawn": real.Setup(page=8, pages=26, chunk=18, running=5, graphs=(1, 2, 5)),
    "mini-together": real.Setup(page=4, pages=44, chunk=72, running=6, graphs=(3, 6)),
    "mini-synced": real.Setup(page=2, pages=84, chunk=38, running=4, graphs=(1, 2)),
}
# Of the model, where it is another one.
SHAPES = {
    "mini-withdrawn": {"HEADS": 4, "KV_HEADS": 2},
    "mini-together": {"LAYERS": 3, "KV_HEADS": 2},
    "mini-synced": {"HEADS": 3, "HIDDEN": 48},
}


def workload(setup: str) -> dict[int, list]:
    """Return what is asked before each step: (name, prompt, new tokens), or who is aborted."""
    rng = random.Random(7)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, 97) for _ in range(count)]

    shared = tokens(16)
    if setup == "mini-abort":  # while its prompt is computed, and another comes in the same moment
        return {
            0: [("a", tokens(9), 12)],
            3: [("b", tokens(15), 6)],
            4: [("c", tokens(22), 14), "b"],
            8: [("d", tokens(18), 8)],
            14: [("e", tokens(26), 8)],
            20: [("f", tokens(31), 6)],
        }
    if setup == "mini-table":  # that run side by side for many pages
        return {
            0: [("a", tokens(10), 18), ("b", tokens(13), 20)],
            5: [("c", shared + tokens(3), 12)],
            22: [("d", shared + tokens(7), 14), ("e", tokens(6), 10)],
        }
    if setup == "mini-pad":  # of which one leaves early, and the others go on over what was its own
        return {
            0: [("a", tokens(11), 20), ("b", tokens(14), 22), ("c", tokens(9), 16), ("d", tokens(12), 5)],
            9: [("e", tokens(20), 9)],
            16: [("f", tokens(17), 12)],
        }
    if setup == "mini-chunks":  # long prompts in chunks, one of which is aborted between two of them
        return {
            0: [("a", tokens(17), 10)],
            4: [("b", tokens(40), 12)],
            6: ["b"],
            7: [("c", tokens(14), 12)],
            9: [("d", shared + tokens(11), 10)],
            14: [("e", shared + tokens(4), 8)],
        }
    if setup == "mini-positions":
        return {
            0: [("a", shared + tokens(5), 9), ("b", tokens(12), 12)],
            4: [("c", shared + tokens(9), 8)],
            12: [("d", tokens(40), 6)],
        }
    if setup == "mini-reload":  # of which some leave while the others decode
        return {
            0: [("a", shared + tokens(4), 6), ("b", tokens(9), 14), ("c", tokens(7), 18)],
            9: [("d", shared + tokens(6), 8)],
            20: [("e", tokens(12), 7), ("f", tokens(5), 10)],
        }
    if setup == "mini-tiles":  # of all lengths
        return {
            0: [("a", tokens(24), 3)],
            1: [("b", tokens(15), 24), ("c", tokens(11), 6)],
            6: [("d", shared + tokens(2), 5)],
            11: [("e", tokens(26), 8)],
            18: [("f", shared + tokens(9), 7)],
        }
    if setup == "mini-cut":  # of which some come to be longer than 24
        return {
            0: [("a", tokens(13), 16), ("b", shared + tokens(4), 20)],
            6: [("c", shared + tokens(9), 10)],
            15: [("d", tokens(27), 9)],
        }
    if setup == "mini-grow":  # a long one, whose row a short one gets, and then it comes again
        long = shared + tokens(25)
        return {
            0: [("a", long, 4), ("b", tokens(10), 12)],
            7: [("c", tokens(9), 22)],
            32: [("d", long + tokens(3), 8)],
            45: [("e", tokens(14), 6)],
        }
    if setup == "mini-rotated":  # that begin alike, some of which are computed in two parts
        return {
            0: [("a", shared + tokens(7), 11), ("b", tokens(8), 15)],
            5: [("c", shared + tokens(3), 9)],
            13: [("d", tokens(33), 7), ("e", shared[:10] + tokens(6), 8)],
        }
    if setup == "mini-contiguous":  # that go on behind what others have asked while many are answered
        return {
            0: [("a", tokens(13), 17), ("b", shared + tokens(6), 13), ("c", tokens(21), 9)],
            4: [("d", tokens(10), 15)],
            9: [("e", shared + tokens(13), 10)],
            17: [("f", shared[:12] + tokens(18), 8), ("g", tokens(7), 9)],
        }
    if setup == "mini-doubles":  # that leave one after another, while others come in twos
        return {
            0: [("a", tokens(10), 7), ("b", tokens(18), 19)],
            5: [("c", tokens(7), 15)],
            12: [("d", tokens(11), 16), ("e", shared + tokens(5), 13)],
            24: [("f", tokens(14), 11), ("g", shared + tokens(9), 9)],
        }
    if setup == "mini-withdrawn":  # three of which are aborted between two chunks of their prompts
        return {
            0: [("a", shared + tokens(6), 14), ("b", tokens(11), 20)],
            5: [("c", shared + tokens(58), 9)],
            7: ["c", ("d", tokens(13), 12)],
            12: [("e", tokens(47), 8)],
            14: ["e"],
            16: [("f", shared + tokens(15), 10), ("g", tokens(9), 8)],
            29: [("h", tokens(38), 6)],
            30: ["h"],
            33: [("i", shared + tokens(21), 9), ("j", tokens(17), 7)],
        }
    if setup == "mini-together":  # several of whose prompts are computed in one step, short ones in front of long ones
        return {
            0: [("a", shared + tokens(5), 15)],
            6: [("b", tokens(9), 12), ("c", tokens(27), 10), ("d", shared + tokens(3), 9)],
            14: [("e", tokens(19), 8)],
            20: [("f", shared + tokens(11), 9), ("g", tokens(7), 11), ("h", shared[:12] + tokens(16), 6)],
        }
    if setup == "mini-synced":  # one or two of which decode with a graph, and more of which without
        return {
            0: [("a", tokens(11), 16)],
            4: [("b", shared + tokens(7), 14)],
            9: [("c", tokens(15), 9), ("d", shared + tokens(4), 12)],
            25: [("e", shared + tokens(7) + tokens(6), 10)],
            38: [("f", tokens(29), 9)],
        }
    return {  # two that begin alike, of which the one that came second leaves first, and then others that fill the pool
        0: [("a", shared + tokens(2), 34)],
        2: [("b", shared + tokens(9), 4)],
        8: [("c", tokens(24), 6)],
        16: [("d", tokens(23), 7)],
        24: [("e", tokens(19), 6)],
    }


def take_over(model: Any, weights: dict[str, Any]) -> None:
    """Take over weights that are sent to the engine: each is copied over what the model has by its name."""
    for name, there in model.state_dict().items():
        there.copy_(weights[name])


def synced() -> None:
    """Have the engine sent a trainer's weights when it has started, before anything is asked."""
    from minisgl.llm import LLM

    start = LLM.__init__

    def begin(llm: Any, *args: Any, **kwargs: Any) -> None:
        start(llm, *args, **kwargs)
        drawn = torch.Generator().manual_seed(11)
        sent = {
            name: torch.ones(there.shape) if "norm" in name else torch.randn(there.shape, generator=drawn) * 0.35
            for name, there in llm.engine.model.state_dict().items()
        }
        take_over(llm.engine.model, sent)

    LLM.__init__ = begin


def prepare(setup: str, patch: Patch) -> None:
    """Make the engine's module ready."""
    real.SETUP = SETUPS[setup]
    for name, value in SHAPES.get(setup, {}).items():
        setattr(real, name, value)
    real.stand_ins()
    if setup == "mini-synced":
        synced()
    patch()


if __name__ == "__main__":
    main("minisgl", prepare, answering(real, workload))
