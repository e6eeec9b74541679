"""Runs LMDeploy's PyTorch engine for the corpus: with one bug, or with none. LMDEPLOY names a clone of github.com/InternLM/lmdeploy.

python lmdeploy_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "conformance" / "lmdeploy")]

import engine as real  # noqa: E402
from bugs import replaces  # noqa: E402
from cloned import Patch, asking, main  # noqa: E402

SETUPS = {
    "lmd-chunks": real.Setup(block=8, blocks=30, chunk=16, ahead=3),
    "lmd-full": real.Setup(block=4, blocks=23, chunk=48, ahead=1, layers=1),
    "lmd-equal": real.Setup(block=4, blocks=48, chunk=64, ahead=4, layers=1, kv_heads=1),
    "lmd-split": real.Setup(block=8, kernel=4, blocks=28, chunk=24, ahead=2, layers=1),
    "lmd-evicts": real.Setup(block=8, blocks=17, chunk=48, ahead=2, layers=1, running=3, dim=32),
    "lmd-plain": real.Setup(block=4, blocks=24, chunk=48, ahead=1, layers=1, cached=False, dtype="bfloat16"),
    "lmd-graphs": real.Setup(block=4, blocks=60, chunk=40, ahead=1, layers=1, running=6, kv_heads=4),
    "lmd-aborts": real.Setup(block=8, blocks=26, chunk=16, ahead=2, heads=2, kv_heads=1, cached=False, graphs=False),
    "lmd-between": real.Setup(block=4, blocks=60, chunk=8, ahead=2, running=5, dtype="bfloat16"),
    "lmd-follows": real.Setup(block=4, blocks=64, chunk=12, ahead=2, layers=1, heads=2, kv_heads=1, dim=32),
    "lmd-embeds": real.Setup(block=8, blocks=40, chunk=56, ahead=2, heads=2, dim=32),
    "lmd-replays": real.Setup(block=8, kernel=4, blocks=40, chunk=40, ahead=1, heads=8, dim=8, running=3),
}
PLACE = 97  # the token in whose place an embedding is given
EMBEDS = {"a": (1, 4, 20), "b": (2, 4, 20), "c": (1, 4, 20), "d": (2, 4, 20), "e": (3, 2, 12)}  # name: seed, start, end


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
    if setup == "lmd-between":  # long ones whose parts run between the steps of others
        return {
            0: [("a", tokens(7), 22), ("b", tokens(5), 17)],
            5: [("c", tokens(37), 6)],
            20: [("d", tokens(6), 12), ("e", shared + tokens(9), 5)],
            34: [("f", shared + tokens(2), 6)],
        }
    if setup == "lmd-follows":  # that begin as a long one does whose parts are not through yet
        return {
            0: [("a", tokens(9), 16)],
            3: [("b", shared + other + tokens(6), 6)],
            5: [("c", shared + other + tokens(3), 8)],
            24: [("d", tokens(26), 5)],
            26: [("e", shared + tokens(4), 7)],
        }
    if setup == "lmd-embeds":  # with embeddings in the place of some tokens, the same and others
        start, end = shared[:4] + [PLACE] * 16, tokens(9)
        return {
            0: [("a", start + end, 6)],
            9: [("b", start + end, 8)],
            19: [("c", start + end[:5] + tokens(3), 6)],
            28: [("d", start + end[:7], 6)],
            36: [("e", shared[:2] + [PLACE] * 10 + tokens(7), 7), ("f", shared + tokens(6), 5)],
        }
    if setup == "lmd-replays":  # of which as many run at a time as ran before, and others
        return {
            0: [("a", tokens(11), 9)],
            3: [("b", tokens(6), 14)],
            16: [("c", shared + tokens(3), 12)],
            22: [("d", tokens(13), 7), ("e", shared + tokens(5), 8)],
            36: [("f", tokens(19), 6)],
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


def embedded(hidden: int) -> None:
    """Send requests their embeddings, and put these into the keys of the prefix cache, as InternLM/lmdeploy#4985 does."""
    import numpy as np

    messages = import_module("lmdeploy.pytorch.messages")

    @replaces(messages.SchedulerSequence, "get_prefix_cache_extra_identity")
    def get_prefix_cache_extra_identity(before: Any, seq: Any, start: int, end: int) -> tuple[Any, ...]:
        mine = [one for one in seq.history_embeddings.embeddings if one.start < end and start < one.end]
        return before(seq, start, end) + tuple((one.start, one.end, one.embeddings.tobytes()) for one in mine)

    @replaces(real.Engine, "_send")
    def _send(before: Any, engine: Any, handler: str, **data: Any) -> None:
        name = next(name for name, session in engine.sessions.items() if session == data["session_id"])
        if handler == "_on_add_message" and name in EMBEDS:
            seed, start, end = EMBEDS[name]
            values = np.random.default_rng(seed).normal(0, 0.3, (end - start, hidden)).astype(np.float32)
            data["input_embeddings"] = [messages.InputEmbeddings(values, start, end)]
        before(engine, handler, **data)


def prepared(setup: str, patch: Patch) -> None:
    """Make the engine's module ready, and give it embeddings in the setup that has them."""

    def begun() -> None:
        if setup == "lmd-embeds":
            embedded(SETUPS[setup].heads * SETUPS[setup].dim)
        patch()

    prepare(setup, begun)


if __name__ == "__main__":
    prepare, generate = asking(real, SETUPS, workload)
    main("lmdeploy", prepared, generate)
