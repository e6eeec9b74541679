"""SGLang with real images: its healthy runs, what is planted, and how it is run."""

import random
import sys
from pathlib import Path
from typing import Any

from model import prompts_of

sys.path.append(str(Path(__file__).resolve().parents[1] / "sglang"))

HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "few-slots": {"max_total_tokens": 448, "chunked_prefill_size": 48},
    "pages": {"page_size": 16, "max_total_tokens": 1024},
    "eager": {"disable_cuda_graph": True, "disable_overlap_schedule": True},
    "nocache": {"disable_radix_cache": True, "chunked_prefill_size": 64},
}
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
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    if fault == "key":
        from sglang.srt.managers import schedule_batch

        padded = schedule_batch._compute_pad_values
        schedule_batch._compute_pad_values = lambda identity: padded(bytes(len(identity)))
    if fault == "fed":
        made = ForwardBatch._compute_mrope_positions

        def compute(batch: Any, *args: Any) -> None:
            made(batch, *args)
            if batch.forward_mode.is_decode():
                batch.mrope_positions[1] += 1

        ForwardBatch._compute_mrope_positions = compute
    if fault == "slot":
        begun, done = ForwardBatch.init_new.__func__, []

        def init_new(cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            new = begun(cls, batch, *args, **kwargs)
            if not done and new.forward_mode.is_decode() and int(batch.seq_lens_cpu[0]) > 60:
                done.append(1)
                new.out_cache_loc[0] -= 1
            return new

        ForwardBatch.init_new = classmethod(init_new)


def environment(_runner: str, *, gpu: bool) -> dict[str, str]:
    """Return what a run's process needs beside its parent's environment."""
    from engine import ENVIRONMENT

    told = {} if gpu else {name: value for name, value in ENVIRONMENT.items() if "CANARY" not in name}
    return {**told, "SGLANG_USE_CUDA_IPC_TRANSPORT": "0"}


def generate(folder: Path, name: str, seed: int, *, gpu: bool) -> list[list[int]]:
    """Start the engine, generate from prompts with images, three times, and shut it down; return its answers."""
    from engine import CPU_ENGINE, import_engine
    from sglang.srt.entrypoints.engine import Engine

    settings = {**CPU_ENGINE, "skip_tokenizer_init": False, "chunked_prefill_size": 96, "max_total_tokens": 2048}
    if gpu:
        settings |= {"device": "cuda", "attention_backend": "triton", "dtype": "bfloat16", "mem_fraction_static": 0.04}
        settings |= {"disable_cuda_graph": False, "mm_attention_backend": "triton_attn"}
    else:
        import_engine()
    plant(name)
    port = 45_000 + 40 * ([*HEALTHY, *FAULTS].index(name) + 10 * seed)
    engine = Engine(
        model_path=str(folder / "model"),
        port=port,
        nccl_port=port + 1,
        random_seed=1,
        **(settings | HEALTHY.get(name, {})),
    )
    rng, outputs = random.Random(seed), []
    for _ in range(3):
        prompts = prompts_of(rng, 10)
        sampling = [
            {"max_new_tokens": rng.choice([1, 5, 12, 30]), "temperature": 0, "ignore_eos": True} for _ in prompts
        ]
        images = [prompt.get("multi_modal_data", {}).get("image", []) for prompt in prompts]
        answers = engine.generate([prompt["prompt"] for prompt in prompts], sampling, image_data=images)
        outputs += [answer["output_ids"] for answer in answers]
    engine.shutdown()
    return outputs
