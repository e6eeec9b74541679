"""A healthy continuous batching of transformers: what a seed makes of it, and how it is run."""

import random
import sys
from pathlib import Path
from typing import Any

from families import FAMILIES, model_of
from requests_of import prompts_of

sys.path += [str(Path(__file__).resolve().parents[3] / "data")]
# Its batches need an attention that takes pages: not all families of other engines have one.
KNOWN = tuple(
    name for name in FAMILIES if name not in ("gpt2", "opt", "bloom", "gptj", "gemma2", "stablelm", "nemotron")
)


def plan(seed: int, *, gpu: bool) -> dict[str, Any]:
    """Return a seed's run: its model, its batches, what its requests are made of."""
    rng = random.Random(seed)
    family = KNOWN[seed % len(KNOWN)]
    page = rng.choice([8, 16, 32])
    few = rng.random() < 0.4
    batching: dict[str, Any] = {
        "num_blocks": (260 // page + rng.choice([2, 6])) if few else 400 // page * rng.choice([2, 4]),
        "max_batch_tokens": rng.choice([24, 48, 64, 128]),
    }
    if few:
        batching["safety_margin"] = 0.0
    if rng.random() < 0.3:
        batching["scheduler_type"] = "prefill_first"
    return {
        "seed": seed,
        "family": family,
        "arguments": {"dtype": rng.choice(["float32", "bfloat16"]), "batching": batching, "page": page},
        "forks": True,
        "sweep": 0,
        "twice": rng.random() < 0.5,
        "samples": rng.choice([1, 1, 1, 2]),
        "bias": rng.random() < 0.5,
    }


def prepare(*, gpu: bool) -> bool:
    """Import what all engines need; return whether they can be forked from here."""
    import driver  # noqa: F401

    return not gpu


def environment(run: dict[str, Any], folder: Path, *, gpu: bool) -> dict[str, str]:
    """Return what a run's process needs beside its parent's environment."""
    return {}


def generate(run: dict[str, Any], folder: Path, *, gpu: bool) -> None:
    """Start a run's engine, have it answer, and shut it down."""
    import driver
    from transformers import AutoConfig

    dtype = run["arguments"]["dtype"]
    config = AutoConfig.from_pretrained(
        model_of(run["family"], folder / "model", dtype=dtype, bias=run["bias"]), dtype=dtype
    )
    driver.PAGE_SIZE = run["arguments"]["page"]
    rng, step, requests = random.Random(run["seed"]), 0, []
    for batch in prompts_of(run):
        for prompt, most in batch:
            name = f"request-{len(requests)}"
            requests.append(driver.Request(name=name, prompt=prompt, new_tokens=most, at_step=step))
            step += rng.randrange(3)
        step += rng.randrange(4, 30)
    # Without anything to do no step would come by which the others begin.
    requests.append(driver.Request(name="first", prompt=[7, 8, 9], new_tokens=step))
    (folder / "traces").mkdir()
    path = folder / "traces" / "trace.arrow"
    driver.record(path, config, requests, num_return_sequences=run["samples"], **run["arguments"]["batching"])
