"""Runs LightLLM for the corpus: with one bug, or with none. LIGHTLLM names a clone of github.com/ModelTC/LightLLM.

python lightllm_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import random
import sys
from importlib import import_module
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "conformance" / "lightllm")]

import engine as real  # noqa: E402
from bugs import replaces  # noqa: E402
from cloned import asking, main  # noqa: E402

QWEN2 = "qwen2.model.Qwen2TpPartModel"
SETUPS = {
    "light-parts": real.Setup(slots=180, chunk=12, tokens=40, graphs=0),
    "light-graphs": real.Setup(kv_heads=4, slots=170, running=5, graphs=4, graph_longest=30),
    "light-rows": real.Setup(model=QWEN2, slots=200, running=6, chunk=40, tokens=80, graphs=2, step=1),
    "light-split": real.Setup(slots=112, running=4, chunk=32, tokens=40, longest=100, expected=4, merge=3),
    "light-wide": real.Setup(layers=3, kv_heads=1, dim=32, slots=150, chunk=48, tokens=56, aggressive=False),
    "light-overlap": real.Setup(model=QWEN2, kv_heads=4, slots=160, chunk=30, running=5, graphs=5, penalty=1.3),
    "light-passes": real.Setup(slots=150, running=5, chunk=20, tokens=20, graphs=3, dtype="bfloat16"),
    "light-freed": real.Setup(layers=1, slots=120, running=3, chunk=28, tokens=30, overlap=False, longest=90),
    "light-equal": real.Setup(heads=2, kv_heads=1, slots=128, running=4, chunk=16, tokens=36, step=1, longest=100),
    "light-mixed": real.Setup(dim=32, slots=190, chunk=16, tokens=48, mixed=True, graphs=0),
    "light-uncached": real.Setup(kv_heads=4, slots=180, chunk=20, tokens=50, running=4, radix=False, step=1),
    "light-tuned": real.Setup(model=QWEN2, kv_heads=1, slots=160, chunk=26, tokens=52, graphs=3),
    "light-uneven": real.Setup(layers=3, dim=32, slots=210, chunk=64, tokens=70, graphs=4, step=1),
    "light-reserved": real.Setup(model=QWEN2, layers=1, heads=2, slots=200, chunk=18, tokens=36, running=5, graphs=0),
}
NEW_WEIGHTS = "new weights"  # who is "aborted" where a trainer brings them; nothing may run then


@replaces(real.Engine, "abort")
def abort(before, engine, name: str) -> None:
    """Load new weights as LightLLM's own operations for trainers do, and flush the prefix cache."""
    if name != NEW_WEIGHTS:
        return before(engine, name)
    operations = import_module("lightllm.server.router.model_infer.mode_backend.rl_backend_ops").RlBackendOps
    seeded = torch.Generator().manual_seed(29)
    weights = {
        key: one if "norm" in key else one + 0.2 * torch.randn(one.shape, generator=seeded)
        for key, one in real._weights().items()
    }
    engine.model.load_weights(weights)
    return operations(engine.backend).flush_cache(None)


def workload(setup: str) -> dict[int, list]:
    """Return what is asked before each step: (name, prompt, new tokens), or who is aborted."""
    rng = random.Random(13)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, 97) for _ in range(count)]

    shared, other = tokens(18), tokens(13)
    if setup == "light-parts":  # long ones beside short ones
        return {
            0: [("a", tokens(31), 9), ("b", tokens(20), 12)],
            6: [("c", shared + tokens(15), 8)],
            11: [("d", tokens(9), 10), ("e", shared + tokens(21), 6)],
        }
    if setup == "light-graphs":  # some of which come to be longer than graphs decode
        return {
            0: [("a", tokens(12), 30), ("b", tokens(8), 16)],
            5: [("c", shared + tokens(4), 14)],
            16: [("d", shared + tokens(6), 12)],
        }
    if setup == "light-rows":  # that take rows as others leave them
        return {
            0: [("a", tokens(9), 5), ("b", tokens(14), 16), ("c", tokens(6), 7)],
            12: [("d", tokens(17), 9), ("e", shared + tokens(5), 8)],
            20: [("f", shared + tokens(9), 6), ("g", tokens(11), 6)],
        }
    if setup == "light-split":  # that begin as others did, and part
        return {
            0: [("a", shared + other, 4)],
            9: [("b", shared + other + tokens(3), 14)],
            12: [("c", shared + tokens(4), 5)],
            34: [("d", shared + tokens(2), 36)],
            38: [("e", tokens(24), 8)],
            50: [("f", tokens(26), 9)],
        }
    if setup == "light-wide":
        return {
            0: [("a", tokens(22), 10), ("b", tokens(30), 8)],
            8: [("c", shared + tokens(19), 9)],
            16: [("d", tokens(40), 7)],
            24: [("e", shared + tokens(6), 7)],
        }
    if setup == "light-overlap":
        return {
            0: [("a", tokens(11), 12), ("b", tokens(17), 9), ("c", tokens(5), 14)],
            7: [("d", shared + tokens(6), 9)],
            15: [("e", shared + tokens(12), 7), ("f", other, 6)],
        }
    if setup == "light-passes":  # more at once than a step has room for
        return {
            0: [("a", tokens(12), 14), ("b", tokens(16), 9)],
            5: [("c", tokens(14), 8), ("d", shared, 7)],
            14: [("e", shared + tokens(5), 8)],
        }
    if setup == "light-freed":  # a conversation, and others
        return {
            0: [("a", shared + tokens(3), 6)],
            10: [("b", tokens(25), 7)],
            20: [("c", shared + tokens(3), 8), ("d", tokens(12), 9)],
            34: [("e", shared + tokens(8), 6)],
        }
    if setup == "light-equal":  # two of which are the same, and run side by side
        return {
            0: [("a", shared, 9), ("b", shared, 9)],
            16: [("c", other + tokens(8), 10)],
            20: [("d", other + tokens(4), 7), ("e", tokens(30), 6)],
            34: [("f", shared + tokens(9), 8)],
        }
    if setup == "light-uncached":  # without a prefix cache: who comes takes what was just given back
        return {
            0: [("a", tokens(10), 6), ("b", tokens(16), 22), ("c", tokens(7), 12)],
            5: [("d", tokens(24), 9)],
            13: [("e", shared + tokens(8), 8), ("f", tokens(12), 7)],
            24: [("g", tokens(28), 8), ("h", tokens(9), 10)],
        }
    if setup == "light-tuned":  # between which a trainer brings new weights
        return {
            0: [("a", shared + tokens(7), 8), ("b", tokens(15), 6)],
            14: [("c", shared + tokens(3), 5)],
            32: [NEW_WEIGHTS],
            34: [("d", tokens(12), 8)],
            37: [("e", shared + tokens(9), 9), ("f", other, 7)],
            56: [("g", shared + tokens(4), 6)],
        }
    if setup == "light-uneven":  # the first of which is always the shortest
        return {
            0: [("a", tokens(6), 34), ("b", tokens(14), 12)],
            8: [("c", tokens(25), 10)],
            19: [("d", tokens(38), 8), ("e", tokens(30), 6)],
        }
    if setup == "light-reserved":  # prompts that come while others are answered
        return {
            0: [("a", tokens(9), 20), ("b", tokens(13), 18)],
            5: [("c", shared + tokens(2), 12)],
            11: [("d", tokens(16), 9)],
            19: [("e", shared + tokens(11), 8), ("f", tokens(8), 8)],
        }
    return {  # that are answered beside prompts of others, one of which is aborted
        0: [("a", tokens(10), 14)],
        4: [("b", tokens(28), 10)],
        6: [("c", shared + tokens(9), 9)],
        9: ["b"],
        12: [("d", shared + tokens(14), 7)],
    }


if __name__ == "__main__":
    main("lightllm", *asking(real, SETUPS, workload))
