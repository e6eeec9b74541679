"""Real engines on real, tiny checkpoints, with and without a fault inside the model: what `kvcanary-replay --model` makes of them.

    python tests/conformance/checkpoints.py vllm -o FOLDER [--python .venv-vllm/bin/python] [--only llama,mla] [--dtype bfloat16]

The checkpoints are transformers', with random weights, norms and biases included. Each engine runs in a process of its own:
clean, and with one fault of the first layer that the recorder cannot see. Exit code 1 if one is missed, or a clean run is not
clean. Needs torch and transformers here, and the engine where --python points.

    token      one decoded token is embedded as the next one of the vocabulary
    position   one forward's rotary embedding of the first layer is one position ahead
    weights    one token is embedded by other weights
    slot       one forward writes its first token's K and V one slot before its own
    scale      one forward stores V of 8 bits by twice its scale

On a GPU (`--device cuda`, with `--python python3` of an environment that has engine and kvcanary) the jobs run beside one another. With
`--cache fp8` the KV cache has 8-bit values, and `--scale` is what they are multiplied with. Each request is also computed again
(`kvcanary rerun`): all of it agrees where there is no fault, and something does not where one is.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from shapes import CHECKPOINTS, make_checkpoint, prompts

AGAIN = "CHECKPOINTS_JOB"  # the job of a process whose child imports this file
FAULTS = ("none", "token", "position", "weights")
OF_CACHES = ("slot", "scale")
AT = 12  # forward
# MLA's latent has no position, SGLang's Gemma 3 has a rotary embedding of its own, and its DeepSeek-V3 refuses this configuration.
NOT_THERE = {("vllm", "mla", "position"), ("sglang", "gemma3", "position"), *(("sglang", "mla", f) for f in FAULTS)}


class Forwards:
    """How many forwards there were since requests came; the engine's own warm-up does not count."""

    def __init__(self) -> None:
        self.counting, self.embedded, self.turned = False, 0, 0

    def stores(self, fault: str) -> bool:
        """Say whether the fault is of what is stored now."""
        return self.counting and self.embedded == AT and fault in OF_CACHES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One engine to run."""

    checkpoint: str
    fault: str
    folder: str
    dtype: str
    cache: str
    scale: float = 1.0
    device: str = "cpu"
    attention: str = ""
    runner: str = "v1"
    scales: str = ""  # a file of scales that the engine reads itself


def break_first_layer(fault: str, embedding: type, rotary: type, layers: int) -> Forwards:
    """Let one forward of an engine's model compute otherwise."""
    import torch

    counts = Forwards()

    def embedded(call):
        def embed(self, ids, *rest, **named):
            counts.embedded += counts.counting
            hit = counts.counting and counts.embedded == AT
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
            counts.turned += counts.counting
            first = counts.counting and counts.turned == (AT - 1) * layers + 1
            return call(self, positions + 1 if first and fault == "position" else positions, *rest, **named)

        return turn

    for kind in (embedding, torch.nn.Embedding):  # a model has one or the other
        kind.forward = embedded(kind.forward)
    rotary.__call__ = turned(rotary.__call__)
    return counts


def run_vllm(job: Job) -> None:
    """Run vLLM on a checkpoint."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.attention import attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    forwards = break_first_layer(job.fault, VocabParallelEmbedding, RotaryEmbedding, 2)
    set_scales = attention.set_default_quant_scales

    def scaled(layer: Any, register_buffer: bool = False) -> None:
        set_scales(layer, register_buffer)
        for half in "kv":
            getattr(layer, f"_{half}_scale").fill_(job.scale)
            setattr(layer, f"_{half}_scale_float", job.scale)

    attention.set_default_quant_scales = scaled
    limits = {"max_model_len": 256, "block_size": 32, "max_num_seqs": 6, "max_num_batched_tokens": 48}
    if job.device == "cuda":
        limits |= {"block_size": 16, "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 1 << 28}
        limits |= {"attention_config": {"backend": job.attention}} if job.attention else {}
    llm = LLM(
        model=job.checkpoint,
        skip_tokenizer_init=True,
        dtype=job.dtype,
        enforce_eager=True,
        num_gpu_blocks_override=64,
        kv_cache_dtype=job.cache,
        **limits,
    )
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    first = next(layer for name, layer in context.items() if ".0." in name and hasattr(layer, "impl"))
    update = first.impl.do_kv_cache_update

    def stored(layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        if forwards.stores(job.fault):
            slots = slots.clone()
            slots[0] -= int(job.fault == "slot")
            value = value / 2 if job.fault == "scale" else value
        update(layer, key, value, kv_cache, slots)

    first.impl.do_kv_cache_update = stored
    forwards.counting = True
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": one} for one in prompts()], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()


def break_sglang(job: Job) -> None:
    """Put a fault into SGLang, in the process whose child its scheduler is, or in that child."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    forwards = break_first_layer(job.fault, VocabParallelEmbedding, RotaryEmbedding, 2)
    forwards.counting = True
    begin, store = RadixAttention.__init__, MHATokenToKVPool.set_kv_buffer

    def scaled(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        if job.scale != 1:
            self.k_scale = self.v_scale = torch.tensor(job.scale, device=job.device)
            self.k_scale_float = self.v_scale_float = job.scale

    def stored(self: Any, layer: Any, slots: Any, key: Any, value: Any, *rest: Any, **named: Any) -> None:
        if forwards.stores(job.fault) and layer.layer_id == 0:
            value = value / 2 if job.fault == "scale" else value
            if job.fault == "slot":
                given = (slots if torch.is_tensor(slots) else slots.loc).clone()
                given[0] -= 1
                slots = given if torch.is_tensor(slots) else dataclasses.replace(slots, loc=given)
        store(self, layer, slots, key, value, *rest, **named)

    RadixAttention.__init__, MHATokenToKVPool.set_kv_buffer = scaled, stored


def run_sglang(job: Job) -> None:
    """Run SGLang on a checkpoint, its scheduler in a forked process; on a GPU in one that is started anew, and imports this file."""
    import multiprocessing

    from sglang.srt.entrypoints.engine import Engine

    options: dict[str, Any] = {"sampling_backend": "pytorch", "grammar_backend": "none", "mem_fraction_static": 0.3}
    if job.device == "cuda":
        os.environ[AGAIN] = json.dumps(dataclasses.asdict(job))
        port = 31_000 + os.getpid() % 20_000
        options |= {
            "attention_backend": job.attention or "triton",
            "page_size": 16,
            "nccl_port": port,
            "port": port + 1,
        }
        options |= {"quantization_param_path": job.scales} if job.scales else {}
    else:
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *args, **kwargs: None
        break_sglang(job)
        options |= {"device": "cpu", "attention_backend": "torch_native"}
    limits = {"max_total_tokens": 1024, "max_running_requests": 8, "chunked_prefill_size": 32}
    engine = Engine(
        model_path=job.checkpoint,
        skip_tokenizer_init=True,
        dtype=job.dtype,
        kv_cache_dtype=job.cache,
        disable_cuda_graph=True,
        **options,
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


def run_job(engine: str, job: Job) -> None:
    """Run an engine in this process, and end it."""
    log, status = os.open(f"{job.folder}/log", os.O_CREAT | os.O_WRONLY), 1
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"KVCANARY_TRACE": f"{job.folder}/traces", "VLLM_USE_V2_MODEL_RUNNER": str(int(job.runner == "v2"))}
    try:
        ENGINES[engine](job)
        status = 0
    except BaseException:  # noqa: BLE001  # a child ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def run_forked(engine: str, jobs: list[Job]) -> None:
    """Run an engine on each checkpoint with its fault, in a process each, forked from this one that has imported it.

    On a GPU all at once, and SGLang's, whose import may touch the device, not before that.
    """
    if engine == "vllm" and jobs[0].device == "cpu":
        from vllm.platforms import current_platform

        # A worker does this before it imports its runner; done after that, it stumbles over a module of llvmlite's.
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    elif engine == "vllm":
        from vllm import LLM  # noqa: F401
    elif jobs[0].device == "cpu":
        import sglang.srt.entrypoints.engine
        import sglang.srt.managers.scheduler  # noqa: F401
    running = {}
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            run_job(engine, job)
        running[pid] = job
        while running and (job is jobs[-1] or job.device == "cpu"):
            done, status = os.wait()
            ended = running.pop(done)
            if status:
                Path(ended.folder, "failed").touch()
            print(ended.folder, flush=True)


def said(name: str, job: Job) -> bool:
    """Replay what a run recorded against its checkpoint, print what was found, and say whether it is right."""
    from kvcanary.replayer.run.replay import ReplaySettings, replay

    folder, fault = Path(job.folder), job.fault
    traces = sorted((folder / "traces").glob("*.arrow"))
    if not traces or (folder / "failed").exists():
        print(f"{name:8} {fault:9} did not run to its end: {folder / 'log'}", flush=True)
        return False
    summary = replay(traces[0], settings=ReplaySettings(model=job.checkpoint))
    found, counts = summary.findings_by_kind.get("model_bytes", 0), summary.model_bytes
    # What is written to another's slot is that token's, and its own slot may never have been written.
    right = (fault == "slot" or bool(found) == (fault != "none")) and counts.get("compared", 0) > 0
    right = right and summary.verdict.value == ("clean" if fault == "none" else "corrupt")
    again, compared, faults = rerun_all(traces[0], job.checkpoint)
    right = right and compared > 0 and bool(faults) == (fault != "none")
    first = summary.first_finding["detail"] if summary.first_finding else ""
    verdict = f"{summary.verdict.value:8} {counts.get('compared', 0):5,} of {counts.get('written', 0):5,} compared"
    print(f"{name:8} {fault:9} {'ok ' if right else 'NOT'} {verdict}   {first}", flush=True)
    print(
        f"{'':18} rerun of {again} requests: {compared:,} pieces compared; {faults[0] if faults else 'all agree'}",
        flush=True,
    )
    return right


def rerun_all(trace: Path, checkpoint: str) -> tuple[int, int, list[str]]:
    """Compute each request of a trace again; return how many, how many pieces of slots were compared, and what differs."""
    from kvcanary.recorder.trace.reader import TraceReader
    from kvcanary.replayer.model.rerun import rerun

    with TraceReader(trace) as reader:
        requests = {int(one) for batch in reader.stream() for one in batch.values("request_ids")}
    found = [rerun([trace], str(one), Path(checkpoint)) for one in sorted(requests - {-1})]
    faults = [
        f"{one.fault} at {one.first.half} of position {one.first.position}: {one.first.words}"
        for one in found
        if one.first
    ]
    return len(found), sum(one.compared for one in found), faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--python", help="the engine's; default .venv-ENGINE/bin/python")
    parser.add_argument("--only", default=",".join(CHECKPOINTS))
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"of {', '.join((*FAULTS, *OF_CACHES))}")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache", default="auto", help="the KV cache's dtype, or several: fp8, fp8_e5m2")
    parser.add_argument("--scale", type=float, default=1.0, help="of values of 8 bits")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--attention", default="", help="backends, joined by commas")
    parser.add_argument("--runner", default="v1", help="vLLM's, joined by commas: v1,v2")
    parser.add_argument("--scales", default="", help="SGLang's --quantization-param-path")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jobs:
        run_forked(args.engine, [Job(**one) for one in json.loads(args.jobs)])
        return 0
    asked: list[tuple[str, Job]] = []
    for name in args.only.split(","):
        wide = {"head_dim": 128} if args.device == "cuda" and name == "llama" else {}
        checkpoint = make_checkpoint(name, (args.output / name / args.dtype).absolute(), args.dtype, **wide)
        ways = itertools.product(args.cache.split(","), args.attention.split(","), args.runner.split(","))
        for (cache, attention, runner), fault in itertools.product(ways, args.faults.split(",")):
            if (args.engine, name, fault) in NOT_THERE:
                continue
            way = "-".join(filter(None, (args.dtype, fault, cache, attention, runner)))
            folder = checkpoint.with_name(way)
            folder.mkdir(parents=True)
            job = Job(checkpoint=str(checkpoint), fault=fault, folder=str(folder), dtype=args.dtype, cache=cache)
            job = dataclasses.replace(
                job, scale=args.scale, device=args.device, attention=attention, runner=runner, scales=args.scales
            )
            asked.append((f"{name} {way}", job))
    command = [args.python or f".venv-{args.engine}/bin/python", __file__, args.engine, "-o", str(args.output)]
    command += ["--jobs", json.dumps([dataclasses.asdict(job) for _, job in asked])]
    told = ENVIRONMENT | (
        {"SGLANG_STANDIN": "gpu", "SGLANG_USE_CPU_ENGINE": "0", "OMP_NUM_THREADS": "2"} if args.device == "cuda" else {}
    )
    subprocess.run(command, env={**os.environ, **told}, check=True)
    return int(sum(said(*one) for one in asked) < len(asked))


if __name__ == "__mp_main__" and AGAIN in os.environ:  # SGLang's scheduler on a GPU
    break_sglang(Job(**json.loads(os.environ[AGAIN])))
if __name__ == "__main__":
    sys.exit(main())
