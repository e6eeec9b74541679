"""vLLM engines on the GPU: engine.py FOLDER RUN (a run of runs.py as JSON), or forked from a process that has imported it."""

import json
import os
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent / "models"
sys.path[:0] = [str(HERE), str(HERE.parent)]

OURS = ("HostConnector", "SilentConnector", "IdleConnector")
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def import_engine() -> None:
    """Import what an engine needs, so that it can be forked instead of started anew; CUDA must not be touched."""
    import vllm.model_executor.models.gemma3
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.mistral
    import vllm.v1.engine.core
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401


def environment(run: dict, folder: Path) -> dict[str, str]:
    """Return what a run's process needs beside its parent's environment."""
    told = ENVIRONMENT | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(run["spawned"])),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(run["runner"] == "v2")),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    if run["base"]:
        told |= {
            "KVCANARY_TRACE": str(folder / "traces"),
            "KVCANARY_SWEEP_EVERY": str(run["sweep"]),
            "KVCANARY_HISTORY": run["history"],
            "KVCANARY_OUTPUTS_EVERY": str(run["outputs"]),
        }
    if run["fault"]:
        told |= {"CONFORMANCE_FAULT": run["fault"], "CONFORMANCE_SEED": str(run["seed"])}
    return told


def engine_of(run: dict, **more: object) -> object:
    """Start a run's engine."""
    from vllm import LLM

    if run["model"] == "mrope":
        import mrope

        mrope.register()
    options: dict = {"enforce_eager": True}
    if run["compiled"] or run["graph"] != "NONE":
        options = {"compilation_config": {"mode": 3 if run["compiled"] else 0, "cudagraph_mode": run["graph"]}}
    if run["ngram"]:
        drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        options["speculative_config"] = drafts
    if run["draft"]:
        model = MODELS / ("eagle" if run["draft"] == "eagle" else run["model"])
        drafts = {"method": run["draft"], "model": str(model), "num_speculative_tokens": 3}
        options |= {"speculative_config": drafts, "max_num_batched_tokens": 64}
    if run["connector"]:
        from vllm.config import KVTransferConfig

        extra = {"cpu_bytes_to_use": 1 << 27, "shared_storage_path": run.get("stored", "")}
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=run["connector"],
            kv_connector_module_path="host_connector" if run["connector"] in OURS else None,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        )
    if run["connector"] == "ExampleConnector":  # which takes whole prompts
        options |= {"enable_prefix_caching": False, "max_num_batched_tokens": 1024, "enable_chunked_prefill": False}
    if run["attention"]:
        options["attention_config"] = {"backend": run["attention"]}
    arguments = {
        "model": str(MODELS / run["model"]),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": run["kv_dtype"],
        "seed": 1,
        "max_model_len": 256,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "enable_prefix_caching": True,
        "async_scheduling": run["asynchronous"],
        "num_gpu_blocks_override": run["blocks"],
        "gpu_memory_utilization": 0.02,
        "kv_cache_memory_bytes": 1 << 28,
        "disable_log_stats": True,
    }
    return LLM(**(arguments | options | more))


def generate(run: dict, folder: Path) -> None:
    """Start an engine, generate from seeded random prompts, some of which share a prefix, and shut it down."""
    from both_runners import install_faults
    from vllm import SamplingParams

    install_faults()
    llm = engine_of(run | {"stored": str(folder / "stored")})
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    shared = tokens(40)
    prompts = [(shared if i % 2 == 0 else []) + tokens(rng.randrange(5, 60)) for i in range(8)]
    late = [prompts[0] + tokens(4), tokens(9), shared[:34], prompts[2], tokens(6) * 6]
    outputs = []
    for number, batch in enumerate((prompts, late + prompts if run["loads"] else late)):
        if number and run["loads"]:  # else the late ones hit the prefix cache
            llm.reset_prefix_cache()
        sampling = [
            SamplingParams(max_tokens=rng.randrange(16, 25), temperature=0, ignore_eos=True, detokenize=False)
            for _ in batch
        ]
        given = [{"prompt_token_ids": prompt} for prompt in batch]
        outputs += [list(o.outputs[0].token_ids) for o in llm.generate(given, sampling, use_tqdm=False)]
    (folder / "tokens.json").write_text(json.dumps(outputs))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    os.environ.update(environment(told, Path(sys.argv[1])))
    generate(told, Path(sys.argv[1]))
