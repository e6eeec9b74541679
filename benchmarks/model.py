"""Measure what `kvcanary-replay --model` and `kvcanary rerun` cost on this machine, on its GPU if it has one.

    python benchmarks/model.py [--tokens 262144] [--layers 8] [--hidden 4096] [--capture 16,2048] [--runs 3] [--json]

A checkpoint of Llama's shape with random weights is made, and recordings of requests of 8,192 tokens, whose bytes are what its first
layer gives. The oracle: how many captured bytes a second are compared (a replay with the model less one without, medians, in turn),
and which share of that machine's memory speed it is (a copy on the device, bytes read and written); where the time is, in one
more run. Rerun: a request of 8,192 tokens computed and compared, beside the model's own prefill of it in the engine's dtype. The model
is in memory each time. The exit status is 2 if a replay is not clean or compares less than everything, 1 if the target of 60 %, or
of 2 times, is missed.
"""

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import KvStream, ModelInfo, PoolGroup, Ranks, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.model import model_bytes
from kvcanary.replayer.model import rerun as again
from kvcanary.replayer.model.first_layer import Expected, FirstLayer, first_layer, load_model, read_config
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings
from making_traces import tell

DTYPE = "bfloat16"
LENGTH = 8192  # tokens of a request
VOCABULARY = 128_256
TARGET_SHARE, TARGET_TIMES = 0.6, 2.0
PARTS = ((model_bytes, "written_tokens"), (FirstLayer, "expected"), (Expected, "differ"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 18)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--capture", default="16,2048", help="bytes of a token's K, and of its V, that are recorded")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"}
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", options)
        found["memory, GB a second"] = round(memory_speed() / 1e9)
        captures = [int(one) for one in options.capture.split(",")]
        for capture in sorted(captures, reverse=True):  # the least is what a request is computed again from
            trace = record(Path(folder) / f"{capture}.arrow", checkpoint, options.tokens, capture)
            tell(f"recorded {trace.name}, {trace.stat().st_size >> 20} MiB")
            figures = oracle(trace, checkpoint, options, capture)
            figures["share of memory speed"] = figures["bytes a second"] / memory_speed()
            missed |= figures["share of memory speed"] < TARGET_SHARE
            found[f"oracle, {capture} bytes of a half"] = figures
            tell(str(figures))
        found["rerun"] = times = rerun(trace, checkpoint, options.runs)
        missed |= times["times its prefill"] > TARGET_TIMES
    print(json.dumps(found, indent=None if options.json else 2, default=float))
    return int(missed)


def make_checkpoint(path: Path, options: argparse.Namespace) -> Path:
    """Write a checkpoint with random weights."""
    from transformers import LlamaConfig, LlamaModel

    heads = options.hidden // 128
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=min(8, heads),
        head_dim=128,
        max_position_embeddings=2 * LENGTH,
        rope_theta=500000.0,
        dtype=DTYPE,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        LlamaModel(config).to(torch.bfloat16).save_pretrained(path)
    return path


def record(path: Path, checkpoint: Path, tokens: int, capture: int) -> Path:
    """Write a recording whose captured bytes are what the model gives."""
    streams = tuple(KvStream(half=half, layer=0, bytes_per_token=2048, capture_bytes=capture) for half in "KV")
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=tokens + 16, halves=("K", "V"), streams=streams),),
        tables=(StateTable(rows=2, width=LENGTH),),
        model=ModelInfo(dtype=DTYPE),
    )
    layer, rng, at = first_layer(str(checkpoint), DTYPE), np.random.default_rng(1), np.arange(LENGTH)
    with TraceWriter(path, header, max_queued_bytes=4 << 30, compression="none") as writer:
        for number in range(tokens // LENGTH):
            fed = rng.integers(3, VOCABULARY, LENGTH)
            values = [layer.expected(half, fed, at, Ranks(), capture // 2).values for half in "KV"]
            data = [torch.from_numpy(part).to(torch.bfloat16).view(torch.uint8).numpy().ravel() for part in values]
            ints = {"req_pool_indices": [1], "request_ids": [number + 1], "prefix_lens": [0], "extend_lens": [LENGTH]}
            columns = {"input_ids": fed, "positions": at, "out_cache_loc": at + number * LENGTH + 1}
            writer.append(
                TraceEvent(
                    kind="forward",
                    scalars={"forward": number, "mode": "extend"},
                    ints={**{name: np.array(one) for name, one in ints.items()}, **columns},
                    bytes={"kv_bytes": np.concatenate(data)},
                )
            )
    return path


def oracle(trace: Path, checkpoint: Path, options: argparse.Namespace, capture: int) -> dict[str, Any]:
    """Return what comparing costs beside a replay, and where the time is."""
    tokens = options.tokens // LENGTH * LENGTH
    seconds: dict[str, list[float]] = {"": [], str(checkpoint): []}
    for run in range(options.runs + 1):  # the first warms up
        for model in seconds:
            begin = time.perf_counter()
            summary = replay(trace, settings=ReplaySettings(model=model or None))
            if run:
                seconds[model].append(time.perf_counter() - begin)
            if summary.verdict.value != "clean" or (model and summary.model_bytes["compared"] != 2 * tokens):
                print(f"{trace}: {summary.verdict.value}, {summary.model_bytes}", file=sys.stderr)
                raise SystemExit(2)
    without, whole = (statistics.median(one) for one in seconds.values())
    spent: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for owner, name in PARTS:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), name, spent)))
        replay(trace, settings=ReplaySettings(model=str(checkpoint)))
    return {
        "replay, s": round(without, 3),
        "replay with the model, s": round(whole, 3),
        "tokens a second": round(tokens / (whole - without)),
        "bytes a second": round(2 * capture * tokens / (whole - without)),
        "where it is, s": {name: round(seconds, 3) for name, seconds in spent.items()},
    }


def timed(function: Callable[..., Any], name: str, spent: Counter[str]) -> Callable[..., Any]:
    """Return a function that also counts its seconds."""

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - begin

    return counting


def rerun(trace: Path, checkpoint: Path, runs: int) -> dict[str, float]:
    """Return what computing a request again takes, beside the model's own prefill."""
    model = again.Model(checkpoint, DTYPE)
    own = load_model(checkpoint, read_config(checkpoint, first_layer_only=False), DTYPE, DEVICE)
    fed = torch.randint(3, VOCABULARY, (1, LENGTH), device=DEVICE)
    times: dict[str, list[float]] = {"prefill, s": [], "rerun, s": [], "of it reading the recording, s": []}
    with mock.patch.object(again, "Model", lambda *_: model):  # it is loaded once
        for run in range(runs + 1):
            begin = time.perf_counter()
            with torch.inference_mode():
                own(input_ids=fed, use_cache=True).last_hidden_state.float().sum().item()
            middle = time.perf_counter()
            found = again.rerun([trace], "1", checkpoint)
            end = time.perf_counter()
            if found.fault != again.AGREES or not found.compared:
                print(f"rerun: {found}", file=sys.stderr)
                raise SystemExit(2)
            with TraceReader(trace) as reader:
                again.RequestWalk(reader.header, "1").walk([trace])
            if run:
                for part, seconds in zip(
                    times.values(), (middle - begin, end - middle, time.perf_counter() - end), strict=True
                ):
                    part.append(seconds)
    medians = {name: statistics.median(one) for name, one in times.items()}
    return {**medians, "times its prefill": medians["rerun, s"] / medians["prefill, s"]}


def memory_speed() -> float:
    """Return the bytes a second that a copy on the device reads and writes."""
    source = torch.empty(1 << 31 if DEVICE == "cuda" else 1 << 28, dtype=torch.uint8, device=DEVICE).fill_(1)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * source.numel() / min(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
