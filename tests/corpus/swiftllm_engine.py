"""Runs swiftLLM for the corpus: with one bug, or with none. SWIFTLLM names a clone of github.com/interestingLSY/swiftLLM.

python swiftllm_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import random
import sys
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "conformance" / "swiftllm")]

import engine as real  # noqa: E402
from cloned import Patch, asking, main  # noqa: E402

SETUPS = {
    "swift-plain": real.Setup(block=8, blocks=30, running=5),
    "swift-swaps": real.Setup(block=4, blocks=15, host=20, running=4, layers=1),
    "swift-full": real.Setup(block=4, blocks=18, host=30, running=6, kv_heads=4, layers=1),
    "swift-rows": real.Setup(block=4, blocks=40, running=3, tokens=40, heads=2, kv_heads=1),
    "swift-long": real.Setup(block=16, blocks=9, host=12, running=4, tokens=90, dim=32, layers=1),
    "swift-waits": real.Setup(block=8, blocks=11, host=16, running=4, tokens=30, layers=3, heads=2, kv_heads=2),
    "swift-grows": real.Setup(block=8, blocks=26, running=4, tokens=56, layers=4, kv_heads=1),
    "swift-spans": real.Setup(block=4, blocks=21, host=28, running=5, tokens=44, layers=3, heads=2, kv_heads=1),
    "swift-keeps": real.Setup(block=16, blocks=17, running=6, tokens=80, heads=3, kv_heads=3, dim=32),
}


def workload(setup: str) -> dict[int, list]:
    """Return what is asked before each step: (name, prompt, new tokens)."""
    rng = random.Random(39)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, 97) for _ in range(count)]

    shared = tokens(14)
    if setup == "swift-plain":  # room for all
        return {
            0: [("a", tokens(13), 18), ("b", tokens(22), 10)],
            5: [("c", shared + tokens(3), 12), ("d", tokens(7), 9)],
            11: [("h", tokens(19), 1)],  # which is over with its prompt
            16: [("e", shared + tokens(9), 11)],
            22: [("f", tokens(16), 8), ("g", tokens(9), 9)],
        }
    if setup == "swift-swaps":  # more than there is room for: some are swapped out, and in again
        return {
            0: [("a", tokens(14), 20), ("b", tokens(11), 16), ("c", tokens(9), 18)],
            20: [("d", shared, 9)],
            26: [("e", tokens(18), 10), ("f", shared + tokens(5), 8)],
        }
    if setup == "swift-full":  # many short ones, several of which are swapped out at once
        return {
            0: [("a", tokens(10), 16), ("b", tokens(9), 14), ("c", tokens(12), 12), ("d", tokens(6), 17)],
            4: [("e", tokens(5), 12), ("f", tokens(8), 10)],
            30: [("g", tokens(11), 12), ("h", shared + tokens(4), 10), ("i", tokens(13), 11)],
        }
    if setup == "swift-rows":  # that take the ids of others that have left
        return {
            0: [("a", tokens(9), 6), ("b", tokens(15), 14), ("c", tokens(6), 9)],
            4: [("d", tokens(18), 10), ("e", tokens(7), 12)],
            14: [("f", shared, 7), ("g", tokens(12), 9), ("h", tokens(5), 6)],
        }
    if setup == "swift-long":  # long ones beside short ones, in large blocks
        return {
            0: [("a", tokens(47), 20), ("b", tokens(12), 25)],
            4: [("c", tokens(35), 16)],
            12: [("d", tokens(60), 14)],
            30: [("e", shared + tokens(20), 9), ("f", tokens(5), 14)],
        }
    if setup == "swift-grows":  # of several lengths, with room for all
        return {
            0: [("a", tokens(12), 15), ("b", shared + tokens(5), 11)],
            6: [("c", tokens(21), 13)],
            13: [("d", shared + tokens(9), 10), ("e", tokens(8), 12)],
            21: [("f", tokens(17), 9)],
        }
    if setup == "swift-spans":  # some of which are swapped out while others are away already, and come back one by one
        return {
            0: [("a", tokens(13), 22), ("b", tokens(10), 19), ("c", tokens(15), 16)],
            3: [("d", tokens(9), 18), ("e", tokens(12), 14)],
            30: [("f", shared + tokens(6), 15), ("g", tokens(7), 12)],
            36: [("h", shared + tokens(2), 10), ("i", tokens(16), 9)],
        }
    if setup == "swift-keeps":  # many of which decode together, while the engine is kept warm
        return {
            0: [("a", tokens(31), 20), ("b", tokens(8), 24), ("c", tokens(19), 11)],
            4: [("d", shared + tokens(8), 16), ("e", tokens(5), 13)],
            15: [("f", tokens(37), 9)],
            22: [("g", shared + tokens(13), 10), ("h", tokens(11), 8)],
        }
    return {  # some of which have to wait for room, and for others that come back
        0: [("a", tokens(20), 22), ("b", tokens(14), 18)],
        2: [("c", tokens(23), 12), ("d", tokens(9), 10)],
        9: [("e", tokens(16), 14)],
        24: [("f", shared + tokens(6), 12), ("g", tokens(11), 8)],
    }


GROWTH = 7.0  # of what a layer adds to the residual


def grows() -> None:
    """Have what the layers add be large, so that the residual is in the hundreds behind some of them, as in deep models."""
    load = real._load

    def loaded(weights: Any, getter: Any) -> None:
        load(weights, getter)
        if hasattr(weights, "down_proj"):
            weights.down_proj *= GROWTH

    real._load = loaded


EVERY = 7  # steps that are between two of what keeps the engine warm


def keep_warm(model: Any, rows: int) -> None:
    """Compute a step of nobody's tokens, one a row: nothing of it is stored, and none of it is recorded."""
    recorded, model._forward = model._forward, type(model)._forward.__get__(model)
    model.forward([[0]] * rows, list(range(rows)), [], ignore_kvcache=True)
    model._forward = recorded


def kept_warm() -> None:
    """Have a step of nobody's tokens computed now and then between those of the requests."""
    step, steps = real.Engine.step, count(1)

    def stepped(engine: Any) -> bool:
        goes_on = step(engine)
        if not next(steps) % EVERY:
            with real._OnHost():
                keep_warm(engine.model, engine.engine.engine_config.max_batch_size)
        return goes_on

    real.Engine.step = stepped


def prepare(setup: str, patch: Patch) -> None:
    """Make the engine's module ready."""
    ready(setup, patch)
    if setup == "swift-grows":
        grows()
    if setup == "swift-keeps":
        kept_warm()


ready, generate = asking(real, SETUPS, workload)

if __name__ == "__main__":
    main("swiftllm", prepare, generate)
