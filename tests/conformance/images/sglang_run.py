"""SGLang with real images: its healthy runs, what is planted, and how it is run."""

import asyncio
import os
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

        for name, same in (
            ("_compute_pad_values", bytes(8)),
            ("_compute_pad_value", 0),
        ):  # the latter of older versions
            if hasattr(schedule_batch, name):
                value = getattr(schedule_batch, name)(same)
                setattr(schedule_batch, name, lambda _identity, value=value: value)
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
                new.out_cache_loc = new.out_cache_loc.clone()  # what the allocator has given out stays as it is
                new.out_cache_loc[0] -= 1
            return new

        ForwardBatch.init_new = classmethod(init_new)


def planted() -> None:
    """Have the engine make the mistake that the environment asks for: a plugin of SGLang's."""
    plant(os.environ["IMAGES_FAULT"])


def environment(name: str, folder: Path, _runner: str, *, gpu: bool) -> dict[str, str]:
    """Return what a run's process needs beside its parent's environment; what is planted goes with its own processes' plugins."""
    from engine import ENVIRONMENT

    if not gpu:
        return {name: value for name, value in ENVIRONMENT.items() if "CANARY" not in name}
    if name not in FAULTS:
        return {}
    info = folder / "plugins" / "images_faults-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: images-faults\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nimages_faults = sglang_run:planted\n")
    paths = str(info.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH")
    return {"IMAGES_FAULT": name, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def generate(folder: Path, name: str, seed: int, *, gpu: bool) -> list[list[int]]:
    """Start the engine, generate from prompts with images, three times, and shut it down; return its answers."""
    from engine import CPU_ENGINE, import_engine
    from sglang.srt.entrypoints.engine import Engine

    settings = {**CPU_ENGINE, "skip_tokenizer_init": False, "chunked_prefill_size": 96, "max_total_tokens": 2048}
    if gpu:
        settings |= {"device": "cuda", "attention_backend": "triton", "dtype": "bfloat16", "mem_fraction_static": 0.3}
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
        asked = zip(prompts, sampling, images, strict=True)
        # One by one: of a batch with images older versions lose what is answered before the last is taken apart.
        answers = [engine.async_generate(prompt["prompt"], how, image_data=shown) for prompt, how, shown in asked]
        outputs += [answer["output_ids"] for answer in engine.loop.run_until_complete(asyncio.gather(*answers))]
    engine.shutdown()
    return outputs
