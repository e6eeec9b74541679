"""Measure what `kvcanary-replay --model` and `kvcanary rerun` cost on this machine, on its GPU if it has one.

    python benchmarks/model.py [--tokens 262144] [--layers 8] [--hidden 4096] [--vocabulary 128256] [--capture 16,2048] [--runs 3]
        [--more 4194304,16777216] [--only oracle|kernel] [--json]

A checkpoint of Llama's shape with random weights is made, and recordings of requests of 8,192 tokens, whose bytes are what its first
layer gives in the engine's dtype. The oracle: how many bytes a second the comparison takes in, captured bytes and the table's, where
both lie on the device, beside what a copy on that device reads and writes, measured in the same run, and the captured
bytes alone; with `--more` also of so many tokens, with the fewest bytes of each; and a replay with the model
beside one without (medians, in turn), and where its time is, in one more run. Rerun: a request of 8,192 tokens computed and compared, from a
recording that is mostly others' (behind it, and before it), one that is all its own, and one that has bytes of every layer, beside the model's own prefill of it
in the engine's dtype. The model is in memory each time. The exit status is 2 if a replay is not clean or compares less than everything,
or if more than 1 % of the rows do not fit the table; 1 if the target of 60 %, or of 2 times, is missed.
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
from kvcanary.kernels.ops.token_rows.reference import FILLED, FITS, Encoding, TokenTable, Turns, token_rows
from kvcanary.recorder.trace.event import TraceEvent
from kvcanary.recorder.trace.header import KvStream, ModelInfo, PoolGroup, Ranks, StateTable, TraceHeader
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.writing.writer import TraceWriter
from kvcanary.replayer.model import model_bytes
from kvcanary.replayer.model import rerun as again
from kvcanary.replayer.model.first_layer import FirstLayer, first_layer, load_model, load_one, of_rank, read_config
from kvcanary.replayer.model.token_tables import TokenTables
from kvcanary.replayer.model.turning import Turning
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings
from kvcanary.replayer.run.streams import Checks
from making_traces import tell

DTYPE = "bfloat16"
LENGTH = 8192  # tokens of a request
TARGET_SHARE, TARGET_TIMES = 0.6, 2.0
PARTS = (
    (model_bytes, "forward_tokens", "laying out the tokens"),
    (TokenTables, "load", "bytes to the device"),
    (TokenTables, "_learn", "computing tokens"),
    (Turning, "learn", "learning angles"),
    (TokenTables, "_run", "comparing"),
    (FirstLayer, "expected", "the definition, for what does not fit"),
)
LAUNCHES = 20
FIT = 0.99  # of the rows
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 18)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--capture", default="16,2048", help="bytes of a token's K, and of its V, that are recorded")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--more", default="", help="tokens, joined by commas, of which rows are compared, too")
    parser.add_argument("--only", choices=("oracle", "kernel"), help="leave rerun out, or replays, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"}
    missed = failed = False
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", options)
        found["memory, GB a second"] = round(memory_speed() / 1e9)
        captures = [int(one) for one in options.capture.split(",")]
        for capture in sorted(captures):
            figures: dict[str, Any] = {}
            if options.only != "kernel":
                largest = trace = record(Path(folder) / f"{capture}.arrow", checkpoint, options.tokens, capture)
                tell(f"recorded {trace.name}, {trace.stat().st_size >> 20} MiB")
                figures = oracle(trace, checkpoint, options, capture)
            figures |= kernel(checkpoint, options.tokens, capture)
            failed |= min(figures["K"]["rows that fit"], figures["V"]["rows that fit"]) < FIT
            missed |= min(figures["K"]["share of memory speed"], figures["V"]["share of memory speed"]) < TARGET_SHARE
            found[f"oracle, {capture} bytes of a half"] = figures
            tell(str(figures))
        for tokens in map(int, filter(None, options.more.split(","))):
            found[f"oracle, {tokens:,} tokens"] = kernel(checkpoint, tokens, min(captures))
            tell(str(found[f"oracle, {tokens:,} tokens"]))
        if not options.only:
            own = record(Path(folder) / "own.arrow", checkpoint, LENGTH, max(captures))
            layers = record_layers(Path(folder) / "layers.arrow", checkpoint, options.layers)
            last = str(options.tokens // LENGTH)
            traces = {"others' mostly, behind it": (largest, "1"), "others' mostly, before it": (largest, last)}
            traces |= {"its own alone": (own, "1"), "its own, of all layers": (layers, "1")}
            found["rerun"] = {name: rerun(*one, checkpoint, options.runs) for name, one in traces.items()}
            missed |= max(times["times its prefill"] for times in found["rerun"].values()) > TARGET_TIMES
    print(json.dumps(found, indent=None if options.json else 2, default=float))
    return 2 if failed else int(missed)


def make_checkpoint(path: Path, options: argparse.Namespace) -> Path:
    """Write a checkpoint with random weights."""
    from transformers import LlamaConfig, LlamaModel

    heads = options.hidden // 128
    config = LlamaConfig(
        vocab_size=options.vocabulary,
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
            fed = rng.integers(3, layer.vocab_size, LENGTH)
            heads = layer.both(fed, at)[1]
            values = [of_rank(heads[half], Ranks())[:, : capture // 2] for half in "KV"]
            data = [part.to(torch.bfloat16).contiguous().view(torch.uint8).cpu().numpy().ravel() for part in values]
            writer.append(forward(number, fed, np.concatenate(data)))
    return path


def record_layers(path: Path, checkpoint: Path, layers: int) -> Path:
    """Write a recording of one request, with the first 16 bytes of every layer's K and V."""
    streams = tuple(
        KvStream(half=half, layers=tuple(range(layers)), bytes_per_token=2048 * layers, capture_bytes=16 * layers)
        for half in "KV"
    )
    header = TraceHeader(
        groups=(PoolGroup(name="full", num_slots=LENGTH + 16, halves=("K", "V"), streams=streams),),
        tables=(StateTable(rows=2, width=LENGTH),),
        model=ModelInfo(dtype=DTYPE),
    )
    fed = np.random.default_rng(1).integers(3, int(read_config(checkpoint).vocab_size), LENGTH)
    model = load_one(checkpoint, read_config(checkpoint), DTYPE, DEVICE, precise=False)
    with torch.inference_mode():
        cache = model(input_ids=torch.from_numpy(fed)[None].to(DEVICE), use_cache=True).past_key_values
    data = []
    for half in ("keys", "values"):
        parts = [getattr(one, half)[0].transpose(0, 1).reshape(LENGTH, -1)[:, :8] for one in cache.layers]
        data.append(torch.cat(parts, dim=1).contiguous().view(torch.uint8).cpu().numpy().ravel())
    with TraceWriter(path, header, max_queued_bytes=4 << 30, compression="none") as writer:
        writer.append(forward(0, fed, np.concatenate(data)))
    return path


def forward(number: int, fed: Any, data: Any) -> TraceEvent:
    """Return the forward of a request of its own."""
    at = np.arange(LENGTH)
    ints = {"req_pool_indices": [1], "request_ids": [number + 1], "prefix_lens": [0], "extend_lens": [LENGTH]}
    columns = {"input_ids": fed, "positions": at, "out_cache_loc": at + number * LENGTH + 1}
    return TraceEvent(
        kind="forward",
        scalars={"forward": number, "mode": "extend"},
        ints={**{name: np.array(one) for name, one in ints.items()}, **columns},
        bytes={"kv_bytes": data},
    )


def kernel(checkpoint: Path, tokens: int, capture: int) -> dict[str, Any]:
    """Return how fast rows on the device are compared with the table, beside a copy on the device, and whether all fit."""
    layer, rng, width = first_layer(str(checkpoint), DTYPE), np.random.default_rng(2), capture // 2
    tables = TokenTables(layer, Ranks(), dict.fromkeys("KV", width))
    fed, at, begins = rng.integers(3, layer.vocab_size, tokens), np.arange(tokens) % LENGTH, np.arange(tokens) * capture
    found: dict[str, Any] = {}
    for half in "KV":
        data = torch.empty((tokens, width), dtype=torch.bfloat16, device=DEVICE)
        for some in np.array_split(np.arange(tokens), -(-tokens // layer.batch)):
            heads = layer.both(fed[some], at[some])[1][half]
            data[torch.from_numpy(some).to(DEVICE)] = of_rank(heads, Ranks())[:, :width].bfloat16()
        data = data.view(torch.uint8).flatten()
        launch: dict[str, Any] = {}
        whole = tables._run

        def kept(*args: Any, whole: Any = whole, launch: dict[str, Any] = launch) -> Any:
            launch["args"] = args
            return whole(*args)

        with mock.patch.object(tables, "_run", kept):
            flags = tables.flags(half, data if DEVICE == "cuda" else data.numpy(), begins, fed, at, Encoding(DTYPE))
        turned = launch["args"][3] is not None
        row_bytes = len(tables._columns[half][0]) * (6 if turned else 4)
        seconds = seconds_of(launch["args"])
        figures = {"rows that fit": float((flags == FILLED | FITS).mean()), "us": 1e6 * seconds}
        figures["captured bytes"], figures["table bytes"] = tokens * capture, tokens * row_bytes
        figures["bytes a second"] = tokens * (capture + row_bytes) / seconds
        figures["memory, bytes a second"] = memory_speed()
        figures["share of memory speed"] = figures["bytes a second"] / figures["memory, bytes a second"]
        figures["by captured bytes alone"] = tokens * capture / seconds / figures["memory, bytes a second"]
        found[half] = figures
    return found


def seconds_of(args: tuple[Any, ...]) -> float:
    """Return what one comparison takes, everything being in place: the least of some launches."""
    data, (begins, rows, positions), table, turns, encoding = args
    if DEVICE == "cpu":
        given = {"begins": begins, "rows": rows, "positions": positions, "flags": np.zeros(len(rows), np.uint8)}
        on_host = TokenTable(*(one.numpy() if isinstance(one, torch.Tensor) else one for one in table))
        angles = (
            None if turns is None else Turns(*(one.numpy() if isinstance(one, torch.Tensor) else one for one in turns))
        )
        begin = time.perf_counter()
        token_rows(data=data, **given, table=on_host, turns=angles, encoding=encoding)
        return time.perf_counter() - begin
    given = {"begins": begins, "rows": rows, "positions": positions}
    given = {name: torch.from_numpy(one).to(DEVICE) for name, one in given.items()}
    given["flags"] = torch.zeros(len(rows), dtype=torch.uint8, device=DEVICE)

    def launch() -> None:
        token_rows(data=data, **given, table=table, turns=turns, encoding=encoding, backend="triton")

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # so that the host's part of a launch is not in it
        for _ in range(LAUNCHES):
            launch()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / LAUNCHES)
    return statistics.median(times)


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
        for owner, name, words in PARTS:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), words, spent)))
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
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            spent[name] += time.perf_counter() - begin

    return counting


def rerun(trace: Path, request: str, checkpoint: Path, runs: int) -> dict[str, float]:
    """Return what computing a request again takes, beside the model's own prefill."""
    captured = max(one.layers[-1] if one.layers else 0 for _, one in TraceReader(trace).header.streams(0)) + 1
    model = again.Model(checkpoint, DTYPE, most_layers=captured)
    own = load_model(checkpoint, read_config(checkpoint), DTYPE, DEVICE)
    fed = torch.randint(3, model.vocab_size, (1, LENGTH), device=DEVICE)
    times: dict[str, list[float]] = {
        "prefill, s": [],
        "rerun, s": [],
        "of it following the request, s": [],
        "checking the rest, s": [],
    }
    with mock.patch.object(again, "Model", lambda *_, **__: model):  # it is loaded once
        for run in range(runs + 1):
            begin = time.perf_counter()
            with torch.inference_mode():
                own(input_ids=fed, use_cache=True).last_hidden_state.float().sum().item()
            middle = time.perf_counter()
            found = again.rerun([trace], request, checkpoint)
            end = time.perf_counter()
            if found.fault != again.AGREES or not found.compared:
                print(f"rerun: {found}", file=sys.stderr)
                raise SystemExit(2)
            with TraceReader(trace) as reader, Checks() as checks:
                again.RequestWalk(reader.header, request).walk([trace], checks)
                walked = time.perf_counter()
                checks.hold()
            if run:
                for part, seconds in zip(
                    times.values(),
                    (middle - begin, end - middle, walked - end, time.perf_counter() - walked),
                    strict=True,
                ):
                    part.append(seconds)
    medians = {name: statistics.median(one) for name, one in times.items()}
    medians["recording, MB"] = trace.stat().st_size / 1e6
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
