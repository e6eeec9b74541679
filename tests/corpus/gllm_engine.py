"""Runs gLLM for the corpus: with one bug, or with none. GLLM names a clone of github.com/gty111/gLLM.

python gllm_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import random
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "conformance" / "gllm")]

import engine as real  # noqa: E402
from cloned import Patch, answering, main  # noqa: E402

QWEN2, LLAMA = "qwen2.Qwen2ForCausalLM", "llama.LlamaForCausalLM"
SETUPS = {
    "gllm-chunks": real.Setup(page=8, pages=40, chunk=20),
    "gllm-mixed": real.Setup(model=LLAMA, page=4, pages=60, chunk=24, graphs=2),
    "gllm-contiguous": real.Setup(
        model=QWEN2, heads=2, kv_heads=2, dim=32, page=16, pages=12, chunk=64, prefix_cache=False, schedule="split_pd"
    ),
    "gllm-twice": real.Setup(page=8, pages=14, layers=3, chunk=40),
    "gllm-detach": real.Setup(model=QWEN2, page=4, pages=22, chunk=32, running=3, schedule="token_throttling"),
    "gllm-encoding": real.Setup(
        model=LLAMA, dim=32, page=4, pages=50, prefix_cache=False, graphs=0, dtype=torch.bfloat16
    ),
    "gllm-preempt": real.Setup(page=4, pages=19, chunk=18, running=3, reserve=1.0, prefix_cache=False),
    "gllm-idle": real.Setup(model=LLAMA, kv_heads=1, page=4, pages=36, running=2),
    "gllm-ragged": real.Setup(layers=3, page=8, pages=32, chunk=28, running=6, graphs=6, penalty=1.2),
    "gllm-cancel": real.Setup(model=QWEN2, kv_heads=4, page=8, pages=30, chunk=15, running=3),
    "gllm-whole": real.Setup(model=QWEN2, heads=6, kv_heads=3, page=16, pages=26, chunk=96, running=3, graphs=0),
    "gllm-digests": real.Setup(
        model=LLAMA, layers=4, page=4, pages=64, chunk=30, running=5, graphs=3, schedule="token_throttling"
    ),
    "gllm-swaps": real.Setup(
        heads=2, dim=32, page=8, pages=15, chunk=56, running=4, graphs=3, reserve=0.1, prefix_cache=False
    ),
}


def workload(setup: str) -> dict[int, list]:
    """Return what is asked before each step: (name, prompt, new tokens), or who is aborted. A prompt of a pair goes on from another's answer."""
    rng = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, 97) for _ in range(count)]

    shared = tokens(16)
    if setup == "gllm-chunks":  # long ones, in two and three parts
        return {
            0: [("a", tokens(12), 14)],
            3: [("b", tokens(45), 8)],
            9: [("c", shared + tokens(15), 10), ("d", tokens(7), 12)],
            17: [("e", shared + tokens(22), 6)],
        }
    if setup == "gllm-mixed":  # that come one by one while others are answered
        return {
            0: [("a", tokens(9), 20), ("b", shared + tokens(3), 14)],
            5: [("c", tokens(13), 9)],
            8: [("d", shared + tokens(7), 10)],
            14: [("e", tokens(6), 8)],
        }
    if setup == "gllm-contiguous":  # that leave holes behind them
        return {
            0: [("a", tokens(20), 4), ("b", tokens(18), 26), ("c", tokens(35), 5)],
            6: [("d", tokens(17), 12)],
            10: [("e", tokens(50), 9)],
            20: [("f", tokens(40), 7)],
        }
    if setup == "gllm-twice":  # two of which are the same, whole pages, and others behind them
        return {
            0: [("a", shared, 30)],
            4: [("b", shared, 3)],
            9: [("c", tokens(26), 6)],
            14: [("d", tokens(23), 7)],
            20: [("e", tokens(30), 5)],
        }
    if setup == "gllm-detach":  # many short ones
        return {step: [(f"r{step}", shared[:8] + tokens(1 + step % 5), 5)] for step in range(0, 36, 4)}
    if setup == "gllm-encoding":
        return {
            0: [("a", tokens(11), 10), ("b", tokens(1), 12)],
            4: [("c", tokens(24), 8)],
            9: [("d", tokens(15), 7)],
        }
    if setup == "gllm-preempt":  # more than there is room for
        return {
            0: [("a", tokens(14), 46), ("b", tokens(10), 20)],
            12: [("c", tokens(9), 10)],
        }
    if setup == "gllm-idle":  # a conversation, with pauses
        return {
            0: [("a", tokens(9), 7)],
            20: [("b", ("a", tokens(6)), 9)],
            45: [("c", ("a", tokens(3)), 6), ("d", tokens(12), 8)],
        }
    if setup == "gllm-ragged":
        return {
            0: [("a", tokens(13), 16), ("b", tokens(5), 18)],
            3: [("c", tokens(21), 10), ("d", tokens(9), 12)],
            8: [("e", shared + tokens(14), 9)],
            15: [("f", shared + tokens(4), 8), ("g", tokens(3), 7)],
        }
    if setup == "gllm-whole":  # that are asked again for longer, each in one piece
        first = tokens(40)
        return {
            0: [("a", first, 12), ("b", shared + tokens(7), 15)],
            6: [("c", first[:32] + tokens(21), 9)],
            14: [("d", shared + tokens(30), 10), ("e", tokens(19), 6)],
            22: [("f", ("a", tokens(5)), 8)],
        }
    if setup == "gllm-digests":  # of many pages, some of which come again
        return {
            0: [("a", tokens(25), 12), ("b", shared + tokens(13), 10)],
            5: [("c", tokens(38), 7), ("d", shared + tokens(4), 14)],
            11: [("e", tokens(29), 9)],
            18: [("f", shared[:12] + tokens(17), 8), ("g", tokens(33), 6)],
            26: [("h", ("a", tokens(9)), 7)],
        }
    if setup == "gllm-swaps":  # that all grow, while others wait for room
        return {
            0: [("a", tokens(22), 40), ("b", tokens(17), 36), ("c", tokens(26), 30)],
            8: [("d", tokens(20), 18)],
            40: [("e", tokens(31), 9)],
        }
    return {  # one of which is aborted between two parts of it, and asked again
        0: [("a", tokens(12), 16)],
        4: [("b", shared + tokens(26), 6)],
        5: ["b"],
        9: [("c", shared + tokens(7), 10)],
        14: [("d", shared[:8] + tokens(9), 8)],
    }


def prepare(setup: str, patch: Patch) -> None:
    """Make the engine's module ready."""
    real.SETUP = SETUPS[setup]
    real.stand_ins()
    patch()


if __name__ == "__main__":
    main("gllm", prepare, answering(real, workload))
