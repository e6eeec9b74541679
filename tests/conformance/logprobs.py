"""Real engines that compute log-probabilities, with and without a byte of K changed where nothing is captured: what
`kvcanary rerun` makes of each request.

    python tests/conformance/logprobs.py vllm -o FOLDER [--python .venv-vllm/bin/python] [--only llama] [--dtype bfloat16]

Captured is layer 0. Clean, every request's log-probabilities have to be the model's; with one byte of a key of layer 1 changed in
one forward, requests that read it have to be named: elsewhere, from that forward on, and no other request. Exit code 1 if not.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from checkpoints import ENVIRONMENT
from shapes import make_checkpoint, prompts

FAULTS = ("none", "key")
AT = 12  # the forward whose first token's key is changed


def changed(states, calls: list[int]):
    """Return keys `[tokens, heads, dim]` of layer 1, in forward AT with another exponent in the first value of the first token."""
    import torch

    calls[0] += 1
    if calls[0] == AT:
        states = states.clone()
        states.view(-1).view(torch.uint8)[states.element_size() - 1] ^= 0x40
    return states


def run_vllm(checkpoint: str, fault: str, dtype: str, drafts: bool = False) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    update, calls = CPUAttentionBackendImpl.do_kv_cache_update, [0]

    def updated(self, layer, key, *rest):
        return update(self, layer, changed(key, calls) if ".1." in layer.layer_name else key, *rest)

    limits = {"max_model_len": 256, "block_size": 32, "max_num_seqs": 6, "max_num_batched_tokens": 48}
    if drafts:
        limits["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}  # fmt: skip
    llm = LLM(model=checkpoint, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, num_gpu_blocks_override=64, **limits)  # fmt: skip
    if fault == "key":
        CPUAttentionBackendImpl.do_kv_cache_update = updated
    sampling = SamplingParams(
        max_tokens=16, temperature=0 if drafts else 0.8, ignore_eos=True, detokenize=False, logprobs=2
    )
    llm.generate([{"prompt_token_ids": one} for one in prompts()], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()


def run_sglang(checkpoint: str, fault: str, dtype: str) -> None:
    import multiprocessing

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    store, calls = MHATokenToKVPool.set_kv_buffer, [0]

    def stored(self, layer, loc_info, cache_k, *rest, **named):
        return store(self, layer, loc_info, changed(cache_k, calls) if layer.layer_id == 1 else cache_k, *rest, **named)

    if fault == "key":
        MHATokenToKVPool.set_kv_buffer = stored
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    options = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}  # fmt: skip
    options |= {"max_total_tokens": 1024, "max_running_requests": 8, "chunked_prefill_size": 32, "mem_fraction_static": 0.3}  # fmt: skip
    engine = Engine(model_path=checkpoint, skip_tokenizer_init=True, dtype=dtype, disable_cuda_graph=True, **options)
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    engine.generate(input_ids=prompts(), sampling_params=sampling, return_logprob=True)
    engine.shutdown()


def run_transformers(checkpoint: str, fault: str, dtype: str) -> None:
    import torch
    from kvcanary.recorder.engines.transformers import attach_from_environment
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    update, calls = PagedAttentionCache.update, [0]

    def updated(self, key_states, value_states, layer_idx, kwargs):
        if layer_idx == 1:
            key_states = changed(key_states[0].transpose(0, 1).contiguous(), calls).transpose(0, 1)[None]
        return update(self, key_states, value_states, layer_idx, kwargs)

    if fault == "key":
        PagedAttentionCache.update = updated
    attach_from_environment()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    batching = {
        "page_size": 8,
        "num_blocks": 96,
        "max_batch_tokens": 48,
        "use_cuda_graph": False,
        "return_logprobs": True,
    }
    model.generate_batch(
        prompts(),
        generation_config=GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=6, **batching),
    )


ENGINES = {
    "vllm": run_vllm,
    "vllm-drafts": partial(run_vllm, drafts=True),
    "sglang": run_sglang,
    "transformers": run_transformers,
}


def said(name: str, fault: str, folder: Path, checkpoint: str) -> bool:
    """Compute each request of a recording again, print what was found, and say whether it is right."""
    from kvcanary.recorder.trace.reader import read_trace
    from kvcanary.replayer.model.rerun import rerun

    (trace,) = sorted((folder / "traces").glob("*.arrow"))
    names = [str(view.scalar("request_id")) for view in read_trace(trace) if view.kind == "request"]
    found = [rerun([trace], one, Path(checkpoint)) for one in names]
    most = max(int(n) for view in read_trace(trace) for n in view.ints("sampled_lens"))
    hit = [one for one in found if one.fault != "agrees"]
    compared, tolerance = sum(one.logprobs for one in found), max(one.logprob_tolerance for one in found)
    first = min((one.first_logprob for one in hit if one.first_logprob), key=lambda one: one.forward, default=None)
    right = all(one.logprobs for one in found) and not any(one.not_compared for one in found)
    if fault == "none":
        right = right and not hit
    else:
        right = right and first is not None and len(hit) < len(found) and {one.fault for one in hit} == {"elsewhere"}
        right = right and all(one.logprobs_differing <= one.logprobs for one in hit)
    print(f"{name:8} {fault:5} {'ok ' if right else 'NOT'} {compared} log-probabilities, up to {most} a forward, within {tolerance:.4f}: "
          f"{len(hit)} of {len(found)} requests hit   {[one.fault for one in hit]} {first or ''}", flush=True)  # fmt: skip
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--python", help="the engine's; default .venv-ENGINE/bin/python")
    parser.add_argument("--only", default="llama")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        ENGINES[args.engine](*json.loads(args.job), args.dtype)
        return 0
    python = args.python or (
        sys.executable if args.engine == "transformers" else f".venv-{args.engine.split('-')[0]}/bin/python"
    )
    right = []
    for name in args.only.split(","):
        checkpoint = make_checkpoint(name, (args.output / name / args.dtype).absolute(), args.dtype)
        for fault in FAULTS:
            folder = checkpoint.with_name(f"{args.dtype}-{fault}")
            folder.mkdir(parents=True)
            own = {"KVCANARY_TRACE": str(folder / "traces"), "KVCANARY_ALL_LAYERS": "off"}
            job = ["--job", json.dumps([str(checkpoint), fault]), "--dtype", args.dtype]
            with (folder / "log").open("w") as log:
                subprocess.run([python, __file__, args.engine, "-o", str(args.output), *job], env={**os.environ, **ENVIRONMENT, **own}, stdout=log, stderr=log, check=True)  # fmt: skip
            right.append(said(name, fault, folder, str(checkpoint)))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
