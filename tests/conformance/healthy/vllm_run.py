"""A healthy vLLM engine: what a seed makes of it, and how it is run."""

import random
import sys
from pathlib import Path
from typing import Any

from families import FAMILIES, model_of
from requests_of import prompts_of

VLLM = Path(__file__).resolve().parents[1] / "vllm"
sys.path += [str(VLLM)]
OWN = ("hybrid", "sliding", "mrope", "lfm2", "olmo_hybrid")  # of vLLM's conformance runs
GRAPHS = ("NONE", "NONE", "FULL_DECODE_ONLY", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE")


def plan(seed: int, *, gpu: bool) -> dict[str, Any]:
    """Return a seed's run: its model, its engine's arguments, what its requests are made of."""
    rng = random.Random(seed)
    family = [*FAMILIES, *OWN][seed % (len(FAMILIES) + len(OWN))]
    recurrent = family in ("lfm2", "olmo_hybrid")
    groups = 3 if FAMILIES.get(family, {}).get("layer_types") else 1
    block = rng.choice([16, 32, 64] if gpu else [32, 64, 128])
    arguments: dict[str, Any] = {
        "dtype": rng.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        "block_size": block,
        "max_num_seqs": rng.choice([2, 3, 5, 8, 16]),
        "max_num_batched_tokens": rng.choice([24, 48, 64, 128, 512]),
        "enable_prefix_caching": rng.random() < 0.85,
        "async_scheduling": rng.random() < 0.6,
        "num_gpu_blocks_override": (256 // block + rng.choice([2, 6, 20, 100])) * groups,
    }
    if family in ("gemma", "gemma2", "gemma3") and arguments["dtype"] == "float16":
        arguments["dtype"] = "bfloat16"  # they refuse it
    if recurrent or family == "hybrid":
        arguments["num_gpu_blocks_override"] = max(60, arguments["num_gpu_blocks_override"])
        arguments["dtype"] = "bfloat16"
    if recurrent:
        arguments["max_num_batched_tokens"] = max(128, arguments["max_num_batched_tokens"])
    elif rng.random() < 0.2:
        arguments["kv_cache_dtype"] = rng.choice(["fp8_e4m3", "fp8_e5m2", "fp8"])
    if rng.random() < 0.15 and family.startswith(("llama", "qwen")):
        drafts = {"method": "ngram", "num_speculative_tokens": rng.randrange(1, 5)}
        arguments["speculative_config"] = {**drafts, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        arguments["async_scheduling"] = False
    graph = rng.choice(GRAPHS) if gpu else "NONE"
    compiled = graph in ("PIECEWISE", "FULL_AND_PIECEWISE")
    flash = arguments["dtype"] == "bfloat16" and "kv_cache_dtype" not in arguments
    if gpu and (not flash or rng.random() < 0.4):
        arguments["attention_config"] = {"backend": "TRITON_ATTN"}
    if graph == "NONE":
        arguments["enforce_eager"] = True
    else:
        arguments["compilation_config"] = {"mode": 3 if compiled else 0, "cudagraph_mode": graph}
    return {
        "seed": seed,
        "family": family,
        "arguments": arguments,
        "runner": "v1" if "speculative_config" in arguments or not gpu else rng.choice(["v1", "v2"]),
        "forks": not compiled,  # what a fork has compiled, another may not use
        "sweep": rng.choice([0, 0, 9]),
        "twice": rng.random() < 0.5,
        "samples": rng.choice([1, 1, 1, 3]),
        "warm": rng.choice([0.0, 0.0, 0.8]),
        "aborts": rng.random() < 0.3,
        "bias": rng.random() < 0.5,
    }


def prepare(*, gpu: bool) -> bool:
    """Import what all engines need; return whether they can be forked from here."""
    if not gpu:
        from engine import import_engine

        import_engine()
        return True
    sys.path.insert(0, str(VLLM / "gpu"))
    import torch
    from engine import import_engine

    import_engine()
    return not torch.cuda.is_initialized()


def environment(run: dict[str, Any], folder: Path, *, gpu: bool) -> dict[str, str]:
    """Return what a run's process needs beside its parent's environment."""
    told = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    if gpu:
        return told | {"VLLM_USE_V2_MODEL_RUNNER": str(int(run.get("runner") == "v2"))}
    return told | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def generate(run: dict[str, Any], folder: Path, *, gpu: bool) -> None:
    """Start a run's engine, have it answer, and shut it down."""
    from vllm import LLM, SamplingParams

    if run["family"] == "mrope":
        import mrope

        mrope.register()
    model = str(VLLM / "models" / run["family"])
    if run["family"] not in OWN:
        model = model_of(run["family"], folder / "model", dtype=run["arguments"]["dtype"], bias=run["bias"])
    memory = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 28} if gpu else {}
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, "seed": 1}
    engine = LLM(model=model, disable_log_stats=True, **given, **memory, **run["arguments"]).llm_engine
    number = 0
    for batch in prompts_of(run):
        for prompt, most in batch:
            sampling = SamplingParams(
                n=run["samples"] if run["warm"] else 1,
                temperature=run["warm"],
                seed=number if run["warm"] and gpu else None,  # on the CPU vLLM has no generators of their own
                max_tokens=most,
                ignore_eos=True,
                detokenize=False,
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
            number += 1
        steps = 0
        while engine.has_unfinished_requests():
            engine.step()
            steps += 1
            if run["aborts"] and steps % 7 == 3:
                engine.abort_request([str(number - 1 - steps // 7)])
    engine.engine_core.shutdown()
