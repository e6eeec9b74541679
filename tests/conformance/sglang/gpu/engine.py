"""One SGLang engine on the GPU: engine.py FOLDER RUN, a run of runs.py as JSON. It generates and writes outputs.json."""

import json
import os
import random
import sys
import time
from pathlib import Path

MODELS = Path(__file__).parents[1] / "models"
sys.path.append(str(MODELS.parent))


def main() -> None:
    folder, run = Path(sys.argv[1]), json.loads(sys.argv[2])
    from sglang.srt.entrypoints.engine import Engine

    options = {"nccl_port": run["port"], **run.get("options", {})}
    if run["canary"]:
        options |= {
            "kv_canary": "log",
            "kv_canary_real_data": "partial",
            "kv_canary_sweep_interval": run["sweep"],
        }
    if run["eagle"]:
        options |= {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": str(MODELS / "llama_gpu_eagle"),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": run["topk"],
            "speculative_num_draft_tokens": 4 if run["topk"] == 1 else 8,
        }
    if run["model"] == "falcon_h1" and run["graph"]:  # 0.5.16's prefills in graphs end with an illegal access there
        options["disable_prefill_cuda_graph"] = True
    # Several prompts in one chunk; of others' checkpoints there are some only if they come one by one.
    together = (run.get("saves") or run["model"] == "qwen3_next") and run.get("damage") != "state-another"
    if run["model"] == "qwen3_next":
        options |= {"disable_prefill_cuda_graph": True, "mamba_track_interval": 64}
    if run.get("saves"):
        options |= {"json_model_override_args": json.dumps({"mamba_chunk_size": 16}), "mamba_track_interval": 16}
    if run.get("host_cache"):
        options |= {"enable_hierarchical_cache": True, "hicache_ratio": 3.0, "hicache_io_backend": "direct"}
    if run.get("host_cache") == "storage":
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "stored")
        options |= {
            "hicache_ratio": 1.2,
            "hicache_storage_backend": "file",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": run["page"]}),
        }
    names = (None, "first", "second") if run.get("adapters") else ()  # of whom there is room for two
    if names:
        from clients import adapter_folder

        folders = [f"{name}={adapter_folder(name, run['model'], folder / 'adapters')}" for name in names if name]
        options |= {"lora_paths": folders, "lora_backend": "triton", "max_loras_per_batch": 2, "max_lora_rank": 8}
        options |= {"lora_target_modules": ["q_proj", "k_proj", "v_proj"]}
    engine = Engine(
        model_path=str(MODELS / run["model"]),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        attention_backend="triton",
        mem_fraction_static=0.3,
        disable_cuda_graph=not run["graph"],
        disable_overlap_schedule=not run["overlap"],
        page_size=run["page"],
        max_total_tokens=512 * run.get("longer", 1),
        max_running_requests=8,
        chunked_prefill_size=(128 if together else 32) * run.get("longer", 1),
        random_seed=1,
        port=run["port"] + 1,
        log_level="info",
        **options,
    )
    rng = random.Random(run["seed"])

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count * run.get("longer", 1))]

    shared = tokens(20)
    prompts = [(shared if i % 2 == 0 else []) + tokens(rng.randrange(5, 40)) for i in range(5)]
    prompts.append(prompts[0][: 28 * run.get("longer", 1)] + tokens(9))
    batches = [prompts[:4], prompts[4:]]  # the later ones hit the prefix cache
    for _ in range(run.get("again", 0)):  # others push the first ones out of the pool before they come again
        batches += [[tokens(60) for _ in range(6)], prompts[:4]]
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    outputs = []
    for turn in range(len(batches) + run.get("turns", 0)):
        if turn >= len(batches):
            answered = outputs if turn == len(batches) else outputs[-4:]
            prompts = [p + o + tokens(5) for p, o in zip(prompts[:3], answered, strict=False)]
            batch = [*prompts, batches[0][0] + tokens(5 + turn)]  # the last goes on behind a prompt alone
        else:
            batch = batches[turn]
        lora = {"lora_path": [names[i % len(names)] for i in range(len(batch))]} if names else {}
        for output in engine.generate(input_ids=batch, sampling_params=sampling, **lora):
            print("\ngenerated", output["output_ids"], "cached", output["meta_info"].get("cached_tokens"), flush=True)
            outputs.append(output["output_ids"])
    (folder / "outputs.json").write_text(json.dumps(outputs))
    if run.get("options", {}).get("pp_size"):
        time.sleep(1)  # the last stage takes over the last tokens after the first has answered
    engine.shutdown()


if __name__ == "__main__":
    main()
