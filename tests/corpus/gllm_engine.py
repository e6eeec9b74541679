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
from bugs import replaces  # noqa: E402
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
    "gllm-reloads": real.Setup(model=QWEN2, layers=3, kv_heads=4, page=8, pages=44, chunk=36, running=3, graphs=2),
    "gllm-half": real.Setup(
        model=LLAMA, layers=4, heads=3, kv_heads=3, page=8, pages=38, chunk=26, graphs=2, dtype=torch.float16
    ),
    "gllm-exact": real.Setup(layers=3, heads=2, kv_heads=1, dim=32, page=4, pages=56, chunk=22, running=5),
    "gllm-gathers": real.Setup(
        model=QWEN2, heads=6, page=8, pages=48, chunk=56, running=6, graphs=5, schedule="token_throttling"
    ),
    "gllm-adapters": real.Setup(kv_heads=4, page=16, pages=24, chunk=40, schedule="split_pd"),
    "gllm-rejects": real.Setup(
        model=LLAMA, dim=32, page=4, pages=40, chunk=10, running=3, graphs=3, reserve=0.5, longest=96
    ),
}
RELOADED = 26  # the step before which gllm-reloads gets new weights
HEAVY = 95  # a token of gllm-half
ADAPTERS = {"b": 1, "c": 2, "d": 1, "f": 2, "g": 1}  # of gllm-adapters: whose request is whose


def workload(setup: str) -> dict[int, list]:
    """Return what is asked before each step: (name, prompt, new tokens), or who is aborted. A prompt of a pair goes on from another's answer."""
    rng = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1, 97 if setup != "gllm-half" else HEAVY) for _ in range(count)]

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
    if setup == "gllm-reloads":  # some of which begin as what was asked of the weights before
        first = tokens(24)
        return {
            0: [("a", shared + tokens(9), 12), ("b", tokens(13), 9)],
            6: [("c", shared + tokens(5), 8), ("d", first + tokens(6), 7)],
            27: [("e", tokens(11), 10)],
            31: [("f", shared + tokens(12), 9), ("g", tokens(7), 12)],
            38: [("h", first + tokens(3), 8), ("i", shared + tokens(4), 6)],
        }
    if setup == "gllm-half":  # some with a token of very great values
        return {
            0: [("a", tokens(15), 12), ("b", shared + tokens(4), 14)],
            5: [("c", tokens(22), 8)],
            9: [("d", [*shared, *tokens(3), HEAVY, *tokens(9)], 11), ("e", tokens(8), 9)],
            17: [("f", shared + tokens(8), 10)],
            22: [("g", [*tokens(6), HEAVY, *tokens(2)], 7)],
        }
    if setup == "gllm-exact":  # some of which are asked again word for word, while others run
        first = tokens(24)
        return {
            0: [("a", shared, 14), ("b", tokens(9), 20)],
            4: [("c", first, 8), ("d", shared + tokens(7), 10)],
            12: [("e", shared, 13), ("f", tokens(18), 9)],
            18: [("g", first, 10), ("h", first[:12] + tokens(5), 7)],
        }
    if setup == "gllm-gathers":  # that come many at once, and some of them twice
        same = tokens(14)
        return {
            0: [("a", tokens(10), 18), ("b", shared + tokens(5), 12)],
            5: [("c", tokens(12), 9), ("d", tokens(9), 14), ("e", same, 11), ("f", shared + tokens(3), 8)],
            14: [("g", same, 10), ("h", tokens(17), 7), ("i", tokens(13), 9)],
            24: [("j", shared + tokens(11), 8), ("k", tokens(6), 6)],
        }
    if setup == "gllm-adapters":  # of adapters and of none, which begin alike
        return {
            0: [("a", shared + tokens(12), 14)],
            4: [("b", shared + shared + tokens(3), 12), ("c", tokens(19), 10)],
            9: [("d", shared + shared + tokens(7), 9)],
            16: [("e", shared + tokens(6), 8), ("f", shared + tokens(5), 11)],
            24: [("g", shared + tokens(8), 7), ("h", tokens(11), 6)],
        }
    if setup == "gllm-rejects":  # long ones, of which some are refused half-way
        return {
            0: [("a", tokens(11), 24), ("b", shared + tokens(4), 10)],
            6: [("c", shared + tokens(25), 8)],
            8: ["c"],
            10: [("d", tokens(9), 16)],
            14: [("e", tokens(34), 9)],
            16: ["e"],
            18: [("f", shared + tokens(7), 12)],
            26: [("g", tokens(21), 14), ("h", shared + tokens(10), 9)],
            36: [("i", tokens(15), 10)],
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
    if setup == "gllm-reloads":
        reloads()
    elif setup == "gllm-half":
        half()
    elif setup == "gllm-adapters":
        adapters()
    patch()


def reloads() -> None:
    """Give the model new weights while nobody runs, as training does; the prefix cache is emptied with it."""
    from gllm.memory_manager import PrefixMemoryManager

    def forget_cached(manager) -> None:
        pool = manager.segment
        pool.hash2page.clear()
        pool.page2hash[:] = [0] * len(pool.page2hash)
        pool.page2canary[:] = [None] * len(pool.page2canary)

    PrefixMemoryManager.forget_cached = forget_cached  # type: ignore[attr-defined]
    taken = [0]

    @replaces(real.Engine, "step")
    def step(before, engine):
        scheduler = engine.worker.scheduler
        if taken[0] == RELOADED:
            assert not (scheduler.seqs_to_prefill or scheduler.seqs_to_decode or scheduler.batch_running)
            seeded = torch.Generator().manual_seed(8)
            for name, weight in engine.runner.model.named_parameters():
                if "norm" not in name:
                    weight.data.copy_(torch.randn(weight.shape, generator=seeded) * 0.3)
            engine.memory.forget_cached()
        taken[0] += 1
        return before(engine)


def half() -> None:
    """Give a token values that do not fit 16 bits when they are squared; norms are computed in 32 bits."""
    ops = sys.modules["gllm._custom_ops"]

    def rms_norm(out, x, weight, eps) -> None:
        wide = x.float()
        out.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float())

    def fused_add_rms_norm(x, residual, weight, eps) -> None:
        residual += x
        rms_norm(x, residual, weight, eps)

    ops.rms_norm, ops.fused_add_rms_norm = rms_norm, fused_add_rms_norm  # type: ignore[attr-defined]

    @replaces(real._Loader, "load_model")
    def load_model(before, loader, progress):
        model = before(loader, progress)
        model.model.embed_tokens.weight.data[HEAVY] *= 1200
        return model


def adapters() -> None:
    """Let each request have an adapter: a part of low rank that is added to q, k and v. The prefix cache tells them apart."""
    from gllm import memory_manager
    from gllm.model_runner import OverlapModelRunner

    of_token = torch.zeros(1 << 14, dtype=torch.long)
    OverlapModelRunner.adapter_of_token = of_token  # type: ignore[attr-defined]

    @replaces(real._Loader, "load_model")
    def load_model(before, loader, progress):
        model, seeded = before(loader, progress), torch.Generator().manual_seed(9)
        for layer in model.model.layers:
            adapt(layer.self_attn.qkv_proj, loader.hidden_size, seeded)
        return model

    def adapt(projection, hidden: int, seeded) -> None:
        forward = projection.forward
        down = torch.randn(3, 2, hidden, generator=seeded) * 0.3
        up = torch.randn(3, projection(torch.zeros(1, hidden)).shape[-1], 2, generator=seeded) * 0.25
        up[0] = 0

        def adapted(x):
            rows = of_token[: len(x)]
            return forward(x) + torch.einsum("tor,trh,th->to", up[rows], down[rows], x)

        projection.forward = adapted

    @replaces(real.Engine, "add")
    def add(before, engine, name, *args):
        before(engine, name, *args)
        engine.comm.asked[-1].schedule_lists[0].adapter = ADAPTERS.get(name, 0)

    @replaces(memory_manager, "_ensure_page_hash")
    def _ensure_page_hash(before, seq, page_size, page_idx):
        return hash((getattr(seq, "adapter", 0), before(seq, page_size, page_idx)))

    @replaces(OverlapModelRunner, "prepare_input_gpu")
    def prepare_input_gpu(before, runner):
        before(runner)
        of_token.zero_()
        rows = [getattr(s, "adapter", 0) for s in runner.input_data.seqs for _ in range(s.to_compute_token_num)]
        of_token[: len(rows)] = torch.tensor(rows)


if __name__ == "__main__":
    main("gllm", prepare, answering(real, workload))
