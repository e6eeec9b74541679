"""What the recorder costs a real SGLang on a GPU: the same engine with and without it, in alternation.

    python benchmarks/recorder_overhead.py                     # all shapes, three rounds, a table
    python benchmarks/recorder_overhead.py --rounds 2 --write  # and docs/results/overhead.md
    python benchmarks/recorder_overhead.py --json FILE         # keeps figures engine by engine
    python benchmarks/recorder_overhead.py --from FILE --from FILE --write # docs/results/overhead.md from figures kept, no GPU

It needs a CUDA GPU with 100 GB and an SGLang in whose environment kvcanary is installed. The model has the shape of
Llama 3 8B and made-up weights. Decode is timed as the difference of two generations that start from the same cached
prompts, so that prefill and start-up cancel; the median of the repetitions counts: disturbances add, and a GPU that
has rested runs its first steps faster, by up to two hundredths. Prefill is timed over prompts that nobody has seen
before. The process that asks, in which nothing is recorded, collects no garbage meanwhile: looking at all that SGLang
has loaded there takes a good part of a second. The engine's own process collects as ever. A ratio is printed only where
both engines gave the same tokens.
"""

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recorder_overhead_page import page

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "results" / "overhead.md"

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 9216,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

# name: requests, prompt tokens, repetitions
DECODES = {"decode 64 x 8,192": (64, 8192, 4), "decode 256 x 1,024": (256, 1024, 8), "decode 8 x 2,048": (8, 2048, 6)}
SHORT, LONG = 8, 104  # tokens generated; their difference is timed
WARM_UP = 4  # requests before anything is timed
PREFILL, PREFILL_PROMPTS, PREFILL_REPEATS = "prefill 8,192", 4, 4

# The default compares the bytes of every forward's prefix with those that were written.
MODES = {
    "off": None,
    "default": {},
    "no KV watch": {"KVCANARY_KV_WATCH_EVERY": "0"},
    "segments": {"KVCANARY_SEGMENT_SECONDS": "20"},
}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="engines of each mode, in alternation")
    parser.add_argument("--modes", default=",".join(MODES), help="which, by comma; off is always there")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds an engine")
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    parser.add_argument("--keep", type=Path, help="keep the engines' logs and traces in this folder")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    parser.add_argument(
        "--from",
        dest="kept",
        type=Path,
        action="append",
        default=[],
        help="take figures from this file instead of measuring; again for other hosts'",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the engines in turns, compare, print; return the exit status."""
    args = arguments()
    if args.child:
        run_engine(json.loads(args.child))
        return 0
    measured = []
    for kept in [json.loads(file.read_text()) for file in args.kept] or [measure(args)]:
        # A measurement that was broken off has taken the first modes of its last round alone, and off before all others.
        runs = {mode: results for mode, results in kept["runs"].items() if results}
        tokens = {json.dumps(result["tokens"]) for results in runs.values() for result in results}
        if len(tokens) > 1:
            print("the engines did not give the same tokens, so their times are not compared", file=sys.stderr)
            return 1
        measured.append((kept["host"], runs))
    text = page(measured, list(DECODES))
    print(text)
    if args.write:
        DOCUMENT.write_text(text)
    return 0


def measure(args: argparse.Namespace) -> dict:
    """Run the engines in turns and return their figures; they are kept after each one, where a file is named."""
    modes = [mode for mode in MODES if mode == "off" or mode in args.modes.split(",")]
    runs: dict[str, list[dict]] = {mode: [] for mode in modes}
    kept = {"host": about_host(), "runs": runs}
    with tempfile.TemporaryDirectory(prefix="kvcanary-overhead-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(args.rounds):
            for mode in modes:
                begin = time.monotonic()
                result = start(mode, folder / f"{number}-{mode.replace(' ', '-')}", args)
                runs[mode].append(result)
                if args.json:
                    args.json.write_text(json.dumps(kept, indent=1))
                shown = {name: figure["all"] for name, figure in result["shapes"].items()}
                hooks = result.get("recording", {}).get("engine_thread_us_by_decode", "")
                took = time.monotonic() - begin
                print(f"round {number + 1}, {mode}, {took:.0f} s: ms a step or prompt {shown} {hooks}", flush=True)
    return kept


def about_host() -> dict[str, Any]:
    """Return which machine this is, and what launches and empty hooks take on it."""
    script = Path(__file__).with_name("recorder_floors.py")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{script.name} ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return {**found, "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"}


def start(mode: str, folder: Path, args: argparse.Namespace) -> dict:
    """Run one engine in a process of its own."""
    folder.mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    settings = MODES[mode]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCANARY_")}
    if settings is not None:
        environment |= {"KVCANARY_TRACE": str(folder / "traces"), **settings}
    child = {"folder": str(folder), "only": args.only, "attention_backend": args.attention_backend}
    with (folder / "log").open("w") as log:
        status = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(child)],
            env=environment,
            stdout=log,
            stderr=log,
            timeout=args.timeout,
            check=False,
        ).returncode
    result_file = folder / "result.json"
    if status or not result_file.exists():
        raise SystemExit(f"the engine ended with {status}:\n" + (folder / "log").read_text()[-6000:])
    result: dict = json.loads(result_file.read_text())
    if settings is not None:
        result["recording"] = recording(folder, result)
    for trace in (folder / "traces").glob("*.arrow") if args.keep is None else ():
        trace.unlink()
    return result


def run_engine(child: dict) -> None:
    """Be the engine: generate, take times, write them down."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    folder = Path(child["folder"])
    named_by_version = ("cuda_graph_bs_decode", "cuda_graph_bs")
    sizes = sorted({count for count, *_ in DECODES.values()} | {WARM_UP})
    graphs = {next(name for name in named_by_version if name in ServerArgs.__dataclass_fields__): sizes}
    engine = Engine(
        model_path=str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        attention_backend=child["attention_backend"],
        mem_fraction_static=0.8,
        chunked_prefill_size=8192,
        max_running_requests=256,
        random_seed=1,
        log_level="info",
        **graphs,
    )
    rng = random.Random(1)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(10, 128000) for _ in range(length)] for _ in range(count)]

    def generate(batch: list[list[int]], new: int) -> tuple[float, list]:
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        begin = time.perf_counter()
        out = engine.generate(input_ids=batch, sampling_params=sampling)
        return time.perf_counter() - begin, [one["output_ids"] for one in out]

    shapes, tokens = {}, {}
    generate(prompts(WARM_UP, 300), 8)
    gc.collect()
    gc.disable()
    for name, (count, length, repeats) in DECODES.items():
        if child["only"] not in name:
            continue
        batch = prompts(count, length)
        generate(batch, 2)  # into the prefix cache
        generate(batch, LONG)
        begin = time.time_ns()
        pairs = [(generate(batch, SHORT)[0], generate(batch, LONG)) for _ in range(repeats)]
        steps = [round(1000 * (b - a) / (LONG - SHORT), 4) for a, (b, _) in pairs]
        shapes[name] = {
            "ms": statistics.median(steps),
            "all": steps,
            "from_ns": begin,
            "to_ns": time.time_ns(),
        }
        tokens[name] = [hash(tuple(map(tuple, pairs[0][1][1])))]
        engine.flush_cache()
    if child["only"] in PREFILL:
        begin = time.time_ns()
        times = [generate(prompts(PREFILL_PROMPTS, 8192), 1)[0] for _ in range(PREFILL_REPEATS)]
        each = [round(1000 * seconds / PREFILL_PROMPTS, 4) for seconds in times]
        shapes[PREFILL] = {
            "ms": statistics.median(each),
            "all": each,
            "from_ns": begin,
            "to_ns": time.time_ns(),
        }
    versions = {"sglang": importlib.metadata.version("sglang")}
    (folder / "result.json").write_text(json.dumps({"shapes": shapes, "tokens": tokens, **versions}))
    engine.shutdown()


def recording(folder: Path, result: dict) -> dict:
    """Read off the trace what recording took: bytes, engine-thread time, memory, losses."""
    from kvcanary.recorder.trace.reader import TraceGap, TraceReader

    traces = sorted((folder / "traces").glob("*.arrow"))  # segments, where they are wanted
    size = sum(trace.stat().st_size for trace in traces)
    costs, lost, shapes = [], 0, {name: {"forwards": 0, "tokens": 0} for name in result["shapes"]}
    complete = False
    for trace in traces:
        with TraceReader(trace) as reader:
            for batch in reader.stream():
                if isinstance(batch, TraceGap):
                    print(f"{trace.name}: after event {batch.after_event}: {batch.reason}", file=sys.stderr)
                    lost += 1
                    continue
                for view in batch:
                    if view.kind == "mark":
                        costs.append(json.loads(str(view.scalar("labels"))))
                    if view.kind == "loss":
                        lost += 1
                    if view.kind != "forward":
                        continue
                    for name, shape in result["shapes"].items():
                        if shape["from_ns"] <= int(view.scalar("time_ns")) < shape["to_ns"]:
                            shapes[name]["forwards"] += 1
                            shapes[name]["tokens"] += len(view.ints("input_ids"))
            complete = reader.complete
    if not costs:
        raise SystemExit("the trace ends without what the recording cost")
    cost = costs[-1]
    forwards = max(cost["forwards"], 1)
    tokens = sum(shape["tokens"] for shape in shapes.values())
    kinds = {name: f"DECODE {count}" for name, (count, *_) in DECODES.items()}
    kinds = {name: kind for name, kind in kinds.items() if kind in cost["by_forward"]}
    return {
        "complete": complete,
        "losses": lost,
        "files": len(traces),
        "trace_bytes": size,
        "bytes_a_forward": size / forwards,
        "bytes_a_token": size / max(tokens, 1),
        "engine_thread_us_p50": cost["engine_thread_ns_p50"] / 1000,
        "engine_thread_us_p99": cost["engine_thread_ns_p99"] / 1000,
        "engine_thread_us_by_decode": {name: cost["by_forward"][kind][1] / 1000 for name, kind in kinds.items()},
        "hooks_us_by_decode": {
            name: {hook: took / 1000 for hook, took in cost["by_hook"][kind].items()} for name, kind in kinds.items()
        },
        "device_mib": cost.get("device_bytes", 0) / 2**20,
        "pinned_mib": cost.get("pinned_bytes", 0) / 2**20,
        "shapes": shapes,
    }


if __name__ == "__main__":
    sys.exit(main())
