"""Real engines on real, tiny checkpoints, with and without a fault inside the model: what `kvcanary-replay --model` makes of them.

    python tests/conformance/checkpoints.py vllm -o FOLDER [--python .venv-vllm/bin/python] [--only llama,mla] [--dtype bfloat16]

The checkpoints are transformers', with random weights, norms and biases included. Each engine runs in a process of its own:
clean, and with one fault of the first layer that the recorder cannot see. Exit code 1 if one is missed, or a clean run is not
clean. Needs torch and transformers here, and the engine where --python points.

    token      one decoded token is embedded as the next one of the vocabulary
    position   one forward's rotary embedding of the first layer is one position ahead
    weights    one token is embedded by other weights
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

SHAPE = {
    "vocab_size": 640,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
HEADS = {**SHAPE, "head_dim": 32}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
CHECKPOINTS = {
    "llama": ("LlamaConfig", HEADS),
    "qwen2": ("Qwen2Config", SHAPE),
    "qwen3": ("Qwen3Config", HEADS),
    "mistral": ("MistralConfig", {**HEADS, "sliding_window": None}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, "sliding_window": 32, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    "mla": ("DeepseekV3Config", {**SHAPE, "num_key_value_heads": 4, **MLA}),
}  # fmt: skip
FAULTS = ("none", "token", "position", "weights")
AT = 12  # forward
# MLA's latent has no position, SGLang's Gemma 3 has a rotary embedding of its own, and its DeepSeek-V3 refuses this configuration.
NOT_THERE = {("vllm", "mla", "position"), ("sglang", "gemma3", "position"), *(("sglang", "mla", f) for f in FAULTS)}


def make_checkpoint(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Write a checkpoint of a shape with random weights, and return its folder."""
    import torch
    import transformers

    kind, options = CHECKPOINTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**options, dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases begin as ones and zeros
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def break_first_layer(fault: str, embedding: type, rotary: type, layers: int) -> None:
    """Let one forward of an engine's model compute otherwise."""
    import torch

    counts = {"embedded": 0, "turned": 0}

    def embedded(call):
        def embed(self, ids, *rest, **named):
            counts["embedded"] += 1
            hit = counts["embedded"] == AT
            if hit and fault == "token":
                ids = ids.clone()
                ids[0] = (ids[0] + 1) % 640
            out = call(self, ids, *rest, **named)
            if hit and fault == "weights":
                out = out.clone()
                out[0] = out[0].roll(1)
            return out

        return embed

    def turned(call):
        def turn(self, positions, *rest, **named):
            counts["turned"] += 1
            first = counts["turned"] == (AT - 1) * layers + 1
            return call(self, positions + 1 if first and fault == "position" else positions, *rest, **named)

        return turn

    for kind in (embedding, torch.nn.Embedding):  # a model has one or the other
        kind.forward = embedded(kind.forward)
    rotary.__call__ = turned(rotary.__call__)


def prompts() -> list[list[int]]:
    """Return prompts of which some share a beginning."""
    import random

    rng = random.Random(1)
    shared = [rng.randrange(3, 600) for _ in range(40)]
    return [(shared if i % 2 else []) + [rng.randrange(3, 600) for _ in range(rng.randrange(5, 40))] for i in range(6)]


def run_vllm(checkpoint: str, fault: str, dtype: str, cache: str) -> None:
    """Run vLLM on a checkpoint."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    break_first_layer(fault, VocabParallelEmbedding, RotaryEmbedding, 2)
    limits = {"max_model_len": 256, "block_size": 32, "max_num_seqs": 6, "max_num_batched_tokens": 48}
    llm = LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        num_gpu_blocks_override=64,
        kv_cache_dtype=cache,
        **limits,
    )
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": one} for one in prompts()], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()


def run_sglang(checkpoint: str, fault: str, dtype: str, cache: str) -> None:
    """Run SGLang on a checkpoint, its scheduler in a forked process."""
    import multiprocessing

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    break_first_layer(fault, VocabParallelEmbedding, RotaryEmbedding, 2)
    cpu = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    limits = {
        "max_total_tokens": 1024,
        "max_running_requests": 8,
        "chunked_prefill_size": 32,
        "mem_fraction_static": 0.3,
    }
    engine = Engine(
        model_path=checkpoint,
        skip_tokenizer_init=True,
        dtype=dtype,
        kv_cache_dtype=cache,
        disable_cuda_graph=True,
        **cpu,
        **limits,
    )
    engine.generate(input_ids=prompts(), sampling_params={"max_new_tokens": 16, "temperature": 0, "ignore_eos": True})
    engine.shutdown()


ENGINES = {"vllm": run_vllm, "sglang": run_sglang}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_STANDIN": "cpu",
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run_forked(engine: str, jobs: list[tuple[str, str, str]], dtype: str, cache: str) -> None:
    """Run an engine on each checkpoint with its fault, in a process each, forked from this one that has imported it."""
    if engine == "vllm":
        from vllm.platforms import current_platform

        # A worker does this before it imports its runner; done after that, it stumbles over a module of llvmlite's.
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        import vllm.v1.worker.cpu_worker  # noqa: F401
    else:
        import sglang.srt.entrypoints.engine
        import sglang.srt.managers.scheduler  # noqa: F401
    for checkpoint, fault, folder in jobs:
        pid = os.fork()
        if pid == 0:
            log, status = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY), 1
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["KVCANARY_TRACE"] = f"{folder}/traces"
            try:
                ENGINES[engine](checkpoint, fault, dtype, cache)
                status = 0
            except BaseException:  # noqa: BLE001  # a child ends here, whatever it was
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        if os.waitpid(pid, 0)[1]:
            Path(folder, "failed").touch()
        print(folder, flush=True)


def said(name: str, fault: str, folder: Path, checkpoint: str) -> bool:
    """Replay what a run recorded against its checkpoint, print what was found, and say whether it is right."""
    from kvcanary.replayer.run.replay import ReplaySettings, replay

    traces = sorted((folder / "traces").glob("*.arrow"))
    if not traces or (folder / "failed").exists():
        print(f"{name:8} {fault:9} did not run to its end: {folder / 'log'}", flush=True)
        return False
    summary = replay(traces[0], settings=ReplaySettings(model=checkpoint))
    found, counts = summary.findings_by_kind.get("model_bytes", 0), summary.model_bytes
    right = bool(found) == (fault != "none") and counts.get("compared", 0) > 0
    right = right and (fault != "none" or summary.verdict.value == "clean")
    first = summary.first_finding["detail"] if summary.first_finding else ""
    verdict = f"{summary.verdict.value:8} {counts.get('compared', 0):5,} of {counts.get('written', 0):5,} compared"
    print(f"{name:8} {fault:9} {'ok ' if right else 'NOT'} {verdict}   {first}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--python", help="the engine's; default .venv-ENGINE/bin/python")
    parser.add_argument("--only", default=",".join(CHECKPOINTS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache", default="auto", help="the KV cache's dtype: fp8, fp8_e5m2")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jobs:
        run_forked(args.engine, json.loads(args.jobs), args.dtype, args.cache)
        return 0
    jobs, asked = [], []
    for name in args.only.split(","):
        checkpoint = make_checkpoint(name, (args.output / name / args.dtype).absolute(), args.dtype)
        for fault in (f for f in args.faults.split(",") if (args.engine, name, f) not in NOT_THERE):
            folder = checkpoint.with_name(f"{args.dtype}-{fault}")
            folder.mkdir(parents=True)
            jobs.append((str(checkpoint), fault, str(folder)))
            asked.append((name, fault, folder, str(checkpoint)))
    command = [args.python or f".venv-{args.engine}/bin/python", __file__, args.engine, "-o", str(args.output)]
    command += ["--jobs", json.dumps(jobs), "--dtype", args.dtype, "--cache", args.cache]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True)
    return int(sum(said(*one) for one in asked) < len(asked))


if __name__ == "__main__":
    sys.exit(main())
