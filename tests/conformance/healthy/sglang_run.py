"""A healthy SGLang engine: what a seed makes of it, and how it is run."""

import random
import sys
from pathlib import Path
from typing import Any

from families import FAMILIES, model_of
from requests_of import prompts_of

SGLANG = Path(__file__).resolve().parents[1] / "sglang"
sys.path += [str(SGLANG)]
OWN = ("mellum_hybrid", "lfm2", "falcon_h1", "qwen3_next")
# Of the families those that SGLang has.
KNOWN = (
    *(name for name in FAMILIES if name.startswith("llama")),
    *("mistral", "qwen2", "qwen3", "phi", "phi3", "gemma", "gemma2", "gemma3", "olmo2", "granite", "cohere"),
    *("stablelm", "gpt2", "gptj", "starcoder2", "glm4", "exaone4", "seed-oss", "nemotron"),
)


def plan(seed: int, *, gpu: bool) -> dict[str, Any]:
    """Return a seed's run: its model, its engine's arguments, what its requests are made of."""
    rng = random.Random(seed)
    family = [*KNOWN, *OWN][seed % (len(KNOWN) + len(OWN))]
    recurrent = family in ("lfm2", "falcon_h1", "qwen3_next")
    page = rng.choice([1, 1, 16, 32])
    arguments: dict[str, Any] = {
        "dtype": rng.choice(["bfloat16", "bfloat16", "float16"]) if gpu else rng.choice(["bfloat16", "float32"]),
        "page_size": page,
        "max_running_requests": rng.choice([2, 3, 5, 8, 16]),
        "chunked_prefill_size": rng.choice([32, 64, 128, 512]),
        "max_total_tokens": rng.choice([512, 768, 1024, 4096]),
        "disable_radix_cache": rng.random() < 0.15,
        "disable_overlap_schedule": rng.random() < 0.4,
    }
    if recurrent:
        arguments |= {"dtype": "bfloat16", "chunked_prefill_size": 512, "page_size": 1, "disable_radix_cache": False}
    if family.startswith("gemma"):
        arguments["dtype"] = "bfloat16"
    if gpu:
        arguments["disable_cuda_graph"] = rng.random() < 0.4
        if family in ("falcon_h1", "qwen3_next"):
            arguments["disable_prefill_cuda_graph"] = True
        if rng.random() < 0.2 and not recurrent:
            arguments["kv_cache_dtype"] = rng.choice(["fp8_e4m3", "fp8_e5m2"])
    if gpu and page > 1 and rng.random() < 0.4 and not recurrent and not arguments["disable_radix_cache"]:
        arguments |= {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_io_backend": "direct"}
    return {
        "seed": seed,
        "family": family,
        "arguments": arguments,
        "forks": True,
        "sweep": rng.choice([0, 0, 9]),
        "twice": rng.random() < 0.5,
        "samples": rng.choice([1, 1, 1, 3]),
        "warm": rng.choice([0.0, 0.0, 0.8]),
        "retracts": rng.random() < 0.3,
        "bias": rng.random() < 0.5,
    }


def prepare(*, gpu: bool) -> bool:
    """Import what all engines need; return whether they can be forked from here."""
    if gpu:
        return False
    from engine import import_engine

    import_engine()
    return True


def environment(run: dict[str, Any], folder: Path, *, gpu: bool) -> dict[str, str]:
    """Return what a run's process needs beside its parent's environment."""
    told = {} if gpu else {"SGLANG_STANDIN": "cpu", "SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}
    if run.get("retracts"):
        told |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
    return told


def generate(run: dict[str, Any], folder: Path, *, gpu: bool) -> None:
    """Start a run's engine, have it answer, and shut it down."""
    from sglang.srt.entrypoints.engine import Engine

    if run["retracts"] and not gpu:  # read when it was imported
        from engine import retract_now_and_then

        retract_now_and_then()
    if run["family"] == "lfm2" and not gpu:
        from request_kinds import use_plain_convolutions

        use_plain_convolutions()
    model = str(SGLANG / "models" / run["family"])
    if run["family"] not in OWN:
        model = model_of(run["family"], folder / "model", dtype=run["arguments"]["dtype"], bias=run["bias"])
    port = 41_000 + 20 * (run["seed"] % 1000)
    machine = {"attention_backend": "triton", "mem_fraction_static": 0.3}
    if not gpu:
        machine = {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.1}
        machine |= {"disable_cuda_graph": True}
    engine = Engine(
        model_path=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        random_seed=1,
        nccl_port=port,
        port=port + 1,
        log_level="info",
        **machine,
        **run["arguments"],
    )
    for batch in prompts_of(run):
        sampling = [
            {"max_new_tokens": most, "temperature": run["warm"], "ignore_eos": True}
            | ({"n": run["samples"]} if run["warm"] else {})
            for _, most in batch
        ]
        engine.generate(input_ids=[prompt for prompt, _ in batch], sampling_params=sampling)
    engine.shutdown()
