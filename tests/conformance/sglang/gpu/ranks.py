"""Runs SGLang on two GPUs, several ranks an engine, and replays what the ranks recorded as one run.

    python tests/conformance/sglang/gpu/ranks.py           # all runs side by side, and docs/results/ranks-sglang-gpu.md
    python tests/conformance/sglang/gpu/ranks.py --only tensor-2-REQ   # again, and its row of that page

It needs two NVIDIA GPUs and an SGLang that runs on them, in whose environment kvcanary is installed. Each engine runs
twice, with the recorder and without: the tokens must be the same. The folder of traces is then replayed as one run: as
many files as ranks, every rank clean, tensor-parallel ranks with the same schedule, every sampled token told by each
pipeline stage; in runs with SGLang's own faults injected, corrupt. An engine of one rank beside them uses HiCache. Exit
status 1 where a run is not as expected.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parent))
DOCUMENT = HERE.parents[3] / "docs" / "results" / "ranks-sglang-gpu.md"

from kvcanary.recorder.trace.reader import read_trace  # noqa: E402
from run import REPLAY  # noqa: E402
from runs import REQ, GpuRun  # noqa: E402
from sampled import wrong_samples  # noqa: E402
from side_by_side import Engine, run_side_by_side  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRun(GpuRun):
    """A run of an engine of several ranks; `files` that it must leave, `verdict` of the replay that is expected.

    `options` are the engine's, `again` how often the first prompts come again after others took their place.
    """

    options: dict[str, Any] = field(default_factory=dict)
    files: int = 2
    verdict: str = "clean"
    again: int = 0
    canary: bool = False


# All-reduce by NCCL: SGLang's own kernel for it may be missing where only a part of its kernel package travels.
PLAIN = {"disable_custom_all_reduce": True}
TENSOR = {"tp_size": 2, **PLAIN}
HOST_CACHE = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_io_backend": "direct"}

RUNS = (
    RanksRun(name="tensor-2", options=TENSOR),
    RanksRun(name="tensor-2-eager-page16", graph=False, page=16, options=TENSOR),
    RanksRun(name="tensor-2-eagle", eagle=True, options=TENSOR),
    RanksRun(name="tensor-2-hybrid", model="mellum_hybrid", options=TENSOR),
    RanksRun(name="tensor-2-REQ", canary=True, fault=REQ, verdict="corrupt", options=TENSOR),
    # each data-parallel rank has a port of its own, which SGLang chooses
    RanksRun(name="data-2", options={"dp_size": 2, "nccl_port": None, **PLAIN}),
    RanksRun(name="pipeline-2", options={"pp_size": 2, **PLAIN}),
    RanksRun(name="host-cache", page=16, files=1, again=3, options=HOST_CACHE),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--keep", type=Path, help="keep logs, traces and reports in this folder")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds for all engines")
    parser.add_argument("--no-write", action="store_true", help=f"leave {DOCUMENT.name} as it is")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if not any(point.name == "kvcanary" for point in importlib.metadata.entry_points(group="sglang.srt.plugins")):
        print("kvcanary is not installed beside SGLang: pip install . in its environment", file=sys.stderr)
        return 2
    runs = [run for run in RUNS if args.only in run.name]
    with contextlib.ExitStack() as kept:
        folder = args.keep or Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="ranks-sglang-gpu-")))
        folder.mkdir(parents=True, exist_ok=True)
        run_engines(runs, folder, args.timeout)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(lambda run: result_of(run, folder), runs))
    for run, result in zip(runs, results, strict=True):
        print(f"{run.name}: {result['verdict']}, {result['files']} files, {result['forwards']} forwards")
        for wrong in result["wrong"]:
            print(f"    {wrong}")
    if not args.no_write:
        DOCUMENT.write_text(document(runs, results, DOCUMENT.read_text() if args.only else ""))
    return int(any(result["wrong"] for result in results))


def run_engines(runs: list[RanksRun], folder: Path, timeout_s: float) -> None:
    """Run every engine with the recorder and without it, all side by side."""
    engines = []
    for number, (run, recorded) in enumerate((run, recorded) for run in runs for recorded in (True, False)):
        place, env = folder / (run.name if recorded else f"{run.name}-off"), run.environment()
        if recorded:
            env["KVCANARY_TRACE"] = str(place / "traces")
        # One GPU is enough for an engine of one rank; they take turns.
        if run.files == 1:
            env["CUDA_VISIBLE_DEVICES"] = str(number % 2)
        port = 42_000 + 100 * number
        if run.options.get("dp_size"):  # SGLang looks for free ones among the next thousand, which others may want
            port = 52_000 + 2_000 * (number % 2)
        told = {**dataclasses.asdict(run), "port": port}
        engines.append(Engine(place=place, told=told, environment=env))
    run_side_by_side(engines, folder, timeout_s)


def result_of(run: RanksRun, folder: Path) -> dict[str, Any]:
    """Replay a run's traces together, and say what is not as it should be."""
    place, off = folder / run.name, folder / f"{run.name}-off"
    wrong: list[str] = []
    result: dict[str, Any] = {"verdict": "", "files": 0, "forwards": "", "loaded": "", "wrong": wrong}
    for engine in (place, off):
        if (status := (engine / "status").read_text()) != "0":
            log = (engine / "log").read_text(errors="replace")
            wrong.append(f"{engine.name} ended with {status}: {log[-600:]}")
    if wrong:
        return result
    if not run.fault and (place / "outputs.json").read_bytes() != (off / "outputs.json").read_bytes():
        wrong.append("the recorded engine generated other tokens")
    result["files"] = len(list((place / "traces").glob("*.arrow")))
    if result["files"] != run.files:
        wrong.append(f"{result['files']} traces, expected {run.files}")
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, "--json", "--report", str(place / "report"), str(place / "traces")],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1, 125):
        wrong.append(f"the replay ended with {done.returncode}: {done.stderr.strip()}")
        return result
    told = json.loads(done.stdout)
    recordings = told.get("recordings", [told])
    result["verdict"] = told["verdict"]
    result["forwards"] = ", ".join(f"{one['forwards']:,}" for one in recordings)
    if told["verdict"] != run.verdict:
        doubts = [doubt for one in recordings for doubt in one.get("doubts", [])]
        wrong.append(f"the replay says {told['verdict']}, expected {run.verdict}: {doubts[:3]}")
    if run.options.get("pp_size"):
        traces = sorted((place / "traces").glob("*.arrow"))
        wrong += wrong_samples(traces, json.loads((place / "outputs.json").read_text()))
    if run.options.get("enable_hierarchical_cache"):
        events = [event for trace in (place / "traces").glob("*.arrow") for event in read_trace(trace)]
        result["loaded"] = sum(event.kind == "kv_copy" and event.scalar("note") == "load-back" for event in events)
        if not result["loaded"]:
            wrong.append("nothing was loaded back from the host")
    return result


def document(runs: list[RanksRun], results: list[dict[str, Any]], before: str) -> str:
    """Return the page; the rows of runs that were not made now are those of the page `before`."""
    import torch

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "torch", "triton"))
    made = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, 2 x {torch.cuda.get_device_name(0)}, {versions}"
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in before.splitlines() if line.startswith("| ")}
    wrong = []
    for run, result in zip(runs, results, strict=True):
        said = "**not as expected**" if result["wrong"] else "as expected"
        cells = (
            run.name,
            *(result[name] for name in ("files", "forwards", "loaded", "verdict")),
            run.verdict,
            said,
            made,
        )
        rows[run.name] = f"| {' | '.join(map(str, cells))} |"
        if result["wrong"]:
            wrong += ["", f"**{run.name}**", "", *(f"- {' '.join(text.split())[:400]}" for text in result["wrong"])]
    told = [rows[run.name] for run in RUNS if run.name in rows]
    good = sum("**not as expected**" not in row for row in told)
    lines = [
        "# SGLang on two GPUs: ranks recorded together",
        "",
        "Made by `python tests/conformance/sglang/gpu/ranks.py` on a machine with two GPUs; do not edit. Each engine ran",
        "with the recorder and without: the tokens must be the same, but where SGLang's own faults are injected. All that",
        "its ranks recorded is replayed as one run. Each pipeline stage must tell of every token that was sampled. With",
        "HiCache, prefixes go to the host and are loaded back. A run can be made again by itself, so each says when it was.",
        "",
        f"**{good} of {len(told)} runs as expected.**",
        "",
        "| run | traces | forwards of each | loaded back | verdict together | expected | | made |",
        "|---|--:|---|--:|---|---|---|---|",
        *told,
        *wrong,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
