"""Runs SGLang on the CPU with several ranks an engine, and replays what the ranks recorded as one run.

    python tests/conformance/sglang/ranks.py                  # all runs, and docs/results/conformance-sglang-ranks.md
    python tests/conformance/sglang/ranks.py --only pipeline --no-write

Each engine runs with the recorder and without it. Exit status 1 where a run is not as expected.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs" / "results" / "conformance-sglang-ranks.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """An engine of two ranks; `options` are the engine's."""

    kind: str
    model: str
    page_size: int
    overlap: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the run is called."""
        return f"{self.kind}-{self.model}-page{self.page_size}{'-overlap' if self.overlap else ''}"


RUNS = (
    Ranks(kind="tensor", model="llama", page_size=1, options={"tp_size": 2}),
    Ranks(kind="tensor", model="mellum_hybrid", page_size=4, overlap=True, options={"tp_size": 2}),
    Ranks(kind="data", model="llama", page_size=4, overlap=True, options={"dp_size": 2}),
    Ranks(kind="data", model="mellum_hybrid", page_size=1, options={"dp_size": 2}),
    Ranks(kind="pipeline", model="llama", page_size=1, options={"pp_size": 2}),
    Ranks(kind="pipeline", model="mellum_hybrid", page_size=4, options={"pp_size": 2}),
    Ranks(kind="pipeline", model="llama", page_size=4, options={"pp_size": 2, "pp_async_batch_depth": 1}),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="taken for the other programs' sake; there is one")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--keep", type=Path, help="keep logs and traces in this folder")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds an engine")
    parser.add_argument("--no-write", action="store_true", help=f"leave {DOCUMENT.name} as it is")
    return parser.parse_args()


def main() -> int:
    from engine import ENVIRONMENT

    # SGLang binds each rank to cores of its own; one core is enough for a rank.
    cores = sorted(os.sched_getaffinity(0))
    environment = {**ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    if any(os.environ.get(name) != value for name, value in environment.items()):  # read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    from engine import forked, import_engine

    args = arguments()
    runs = [run for run in RUNS if args.only in run.name]
    folder = args.keep or Path(tempfile.mkdtemp(prefix="conformance-sglang-ranks-"))
    folder.mkdir(parents=True, exist_ok=True)
    if runs:
        import_engine()
    results = []
    for run in runs:
        statuses = {}
        for place, recorded in ((folder / run.name, True), (folder / f"{run.name}-off", False)):
            shutil.rmtree(place, ignore_errors=True)
            env = {"KVCANARY_TRACE": str(place / "traces")} if recorded else {}
            statuses[place] = forked(place, env, lambda run=run, place=place: serve(run, place), args.timeout)
        result = judge(run, statuses)
        results.append((run, result))
        said = "DIFFERS" if result["wrong"] else "as expected"
        print(f"{run.name}: {said}   {result['verdict']}, forwards {result['forwards']}", flush=True)
        for wrong in result["wrong"][:5]:
            print(f"    {wrong}", flush=True)
    if runs and not args.no_write:
        DOCUMENT.write_text(document(results, whole=len(runs) == len(RUNS)))
    if not args.keep:
        shutil.rmtree(folder)
    return int(any(result["wrong"] for _, result in results))


def serve(run: Ranks, place: Path) -> None:
    """Start an engine, generate, write the outputs down and shut it down."""
    from engine import CPU_ENGINE, MODELS
    from pair_engine import make_prompts
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=str(MODELS / run.model),
        **CPU_ENGINE,
        disable_overlap_schedule=not run.overlap,
        page_size=run.page_size,
        max_total_tokens=512,
        random_seed=1,
        **run.options,
    )
    prompts = make_prompts(1)
    sampling = {"max_new_tokens": 14, "temperature": 0, "ignore_eos": True}
    outputs = []
    for batch in (prompts[:4], prompts[4:]):  # the later ones hit the prefix cache
        outputs += [answer["output_ids"] for answer in engine.generate(input_ids=batch, sampling_params=sampling)]
    (place / "outputs.json").write_text(json.dumps(outputs))
    time.sleep(1)  # the last stage takes over the last tokens after the first has answered
    engine.shutdown()


def judge(run: Ranks, statuses: dict[Path, int]) -> dict[str, Any]:
    """Replay a run's traces as one, and say what is not as it should be."""
    from sampled import wrong_samples

    place, off = statuses
    wrong: list[str] = []
    result: dict[str, Any] = {"verdict": "", "files": 0, "forwards": "", "wrong": wrong}
    for engine, status in statuses.items():
        if status != 0:
            wrong.append(f"{engine.name} ended with {status}: {(engine / 'log').read_text(errors='replace')[-600:]}")
    if wrong:
        return result
    outputs = json.loads((place / "outputs.json").read_text())
    if outputs != json.loads((off / "outputs.json").read_text()):
        wrong.append("the recorded engine generated other tokens")
    traces = sorted((place / "traces").glob("*.arrow"))
    result["files"] = len(traces)
    done = subprocess.run(
        [Path(sys.executable).with_name("kvcanary-replay"), "--no-report", "--json", str(place / "traces")],
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
    if len(traces) != 2 or told["verdict"] != "clean":
        doubts = [doubt for one in recordings for doubt in one.get("doubts", [])]
        wrong.append(f"{len(traces)} traces, {told['verdict']}: {doubts[:3]}")
    elif run.kind == "data":  # each rank has requests of its own
        wrong += wrong_samples_of_all(traces, outputs)
    else:
        wrong += wrong_samples(traces, outputs)
    return result


def wrong_samples_of_all(traces: list[Path], outputs: list[list[int]]) -> list[str]:
    """Return what is wrong with data-parallel ranks: together they must tell of all tokens that were generated."""
    from sampled import told_samples

    parts = [told_samples(trace) for trace in traces]
    if not all(parts):
        return ["a rank had no request"]
    told = sorted(tokens for part in parts for tokens in part)
    return [] if told == sorted(outputs) else [f"sampled tokens of {len(told)} requests told, not those generated"]


def document(results: list[tuple[Ranks, dict[str, Any]]], *, whole: bool) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "torch", "kvcanary"))
    good = sum(not result["wrong"] for _, result in results)
    lines = [
        "# SGLang: ranks recorded together",
        "",
        "Made by `make conformance-sglang`; do not edit. Each engine has two ranks on the CPU, which record by the plugin",
        "alone, and ran without the recorder, too: same tokens. All that its ranks recorded is replayed as one run: as many",
        "traces as ranks, all clean, tensor-parallel ranks with the same schedule, and every token that was generated told as",
        "sampled: on each tensor-parallel rank, on each pipeline stage, and once by the data-parallel ranks together.",
        "On two GPUs: [ranks-sglang-gpu.md](ranks-sglang-gpu.md).",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {versions}, Python {platform.python_version()}, {platform.machine()}.",
        "" if whole else "\n**Not all runs.**\n",
        f"**{good} of {len(results)} runs as expected.**",
        "",
        "| run | options | traces | forwards of each | verdict together | |",
        "|---|---|--:|---|---|---|",
    ]
    for run, result in results:
        options = ", ".join(f"{name} {value}" for name, value in run.options.items())
        said = "**not as expected**" if result["wrong"] else "as expected"
        lines.append(
            f"| {run.name} | {options} | {result['files']} | {result['forwards']} | {result['verdict']} | {said} |"
        )
    for run, result in results:
        if result["wrong"]:
            lines += ["", f"**{run.name}**", "", *(f"- {' '.join(text.split())[:400]}" for text in result["wrong"])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
