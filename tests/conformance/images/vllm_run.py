"""vLLM with real images: its healthy runs, what is planted, and how it is run."""

import random
import sys
from pathlib import Path

from model import prompts_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "vllm"))

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
HEALTHY = {
    "plain": {},
    "few-blocks": {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 48},
    "async": {"async_scheduling": True, "num_gpu_blocks_override": 14},
    "nocache": {"enable_prefix_caching": False, "max_num_batched_tokens": 48},
    "ngram": {"speculative_config": NGRAM},
}
# Of the others the decodes run in CUDA graphs on a GPU.
EAGER = ("few-blocks", "nocache")
# What is planted, and the kinds of incidents that are right.
FAULTS = {
    "key": ("the prefix cache's key leaves out the images", {"identity_not_in_key"}),
    "fed": (
        "text behind an image is fed positions that are one off, in one dimension",
        {"position_off", "draft_position_plus_one"},
    ),
    "slot": ("a token behind an image is written to its neighbour's slot", {"slot_mapping", "req_to_token"}),
}


def plant(fault: str) -> None:
    """Have the engine make a mistake."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if fault == "key":
        kv_cache_utils._gen_mm_extra_hash_keys = lambda _request, _start, _end, first: ([], first)
    if fault == "fed":
        made = GPUModelRunner._calc_mrope_positions

        def calc(runner, scheduled):
            made(runner, scheduled)
            if scheduled.total_num_scheduled_tokens == runner.input_batch.num_reqs:
                runner.mrope_positions.cpu[1, : runner.input_batch.num_reqs] += 1

        GPUModelRunner._calc_mrope_positions = calc
    if fault == "slot":
        from vllm.v1.worker.block_table import BlockTable

        computed, done = BlockTable.compute_slot_mapping, []

        def compute(table, count, starts, positions):
            computed(table, count, starts, positions)
            if not done and int(positions.shape[0]) == count and int(positions[0]) > 80:
                done.append(1)
                table.slot_mapping.gpu[0] -= 1

        BlockTable.compute_slot_mapping = compute


def environment(_name: str, _folder: Path, runner: str, *, gpu: bool) -> dict[str, str]:
    """Return what a run's process needs beside its parent's environment."""
    from engine import ENVIRONMENT

    return {**ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": str(int(gpu and runner == "v2"))}


def generate(folder: Path, name: str, seed: int, *, gpu: bool) -> list[list[int]]:
    """Start the engine, generate from prompts with images, three times, and shut it down; return its answers."""
    from vllm import LLM, SamplingParams

    plant(name)
    settings = {"max_model_len": 288, "max_num_seqs": 6, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 96}
    where = {"dtype": "float32", "enforce_eager": True}
    if gpu:
        where = {"dtype": "bfloat16", "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 28}
        graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
        where |= {"enforce_eager": True} if name in EAGER else graphs
    llm = LLM(
        model=str(folder / "model"), load_format="dummy", block_size=32, seed=0,
        limit_mm_per_prompt={"image": 2, "video": 0}, **{**settings, **where, **HEALTHY.get(name, {})},
    )  # fmt: skip
    rng, outputs = random.Random(seed), []
    for _ in range(3):
        prompts = prompts_of(rng, 10)
        sampling = [
            SamplingParams(max_tokens=rng.choice([1, 5, 12, 30]), temperature=0, ignore_eos=True) for _ in prompts
        ]
        outputs += [list(o.outputs[0].token_ids) for o in llm.generate(prompts, sampling, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()
    return outputs
