"""Runs healthy engines, each a random combination of model, cache, graphs and requests: none may replay corrupt.

    python tests/conformance/healthy/run.py vllm --seeds 0:40 FOLDER             # on the CPU
    python tests/conformance/healthy/run.py sglang --gpu --seeds 0:60 --engines FOLDER    # there: only the engines
    python tests/conformance/healthy/run.py sglang --from FOLDER                 # on any machine: replay

A seed is a run, the same one on all machines of a kind. Exit status 1 if a trace is not clean. An engine that does not
start, since it has no kernel for what the seed says, is counted and is no failure.
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
sys.path.append(str(HERE.parent))

from forking import fork  # noqa: E402

ALL = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
STARTED: list[subprocess.Popen[bytes]] = []  # one that nobody holds is waited for by the next one's start


def start(engine: ModuleType, run: dict[str, Any], folder: Path, *, gpu: bool, forks: bool) -> int:
    """Start an engine in a process group of its own; return its process id."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    told = engine.environment(run, folder, gpu=gpu)
    told |= {"KVCANARY_TRACE": str(folder / "traces"), "KVCANARY_SWEEP_EVERY": str(run["sweep"])}
    if not forks or not run["forks"]:
        command = [sys.executable, __file__, engine.__name__.removesuffix("_run"), *(["--gpu"] if gpu else [])]
        with (folder / "log").open("w") as log:
            given = {"stdout": log, "stderr": log, "env": os.environ | told, "start_new_session": True}
            STARTED.append(subprocess.Popen([*command, "--one", str(folder)], **given))
        return STARTED[-1].pid
    return fork(folder / "log", lambda: engine.generate(run, folder, gpu=gpu), told)


def run_engines(
    engine: ModuleType, seeds: list[int], folder: Path, *, gpu: bool, timeout_s: float, at_once: int
) -> None:
    """Run all engines, so many side by side; each one's exit status goes into its folder."""
    told = ALL | engine.environment({}, folder, gpu=gpu)
    if any(os.environ.get(name) != value for name, value in told.items()):  # some are read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **told})
    forks = engine.prepare(gpu=gpu)
    waiting, running = [engine.plan(seed, gpu=gpu) for seed in seeds], dict[int, Path]()
    deadline = time.monotonic() + timeout_s
    while waiting or running:
        late = time.monotonic() > deadline
        while waiting and len(running) < at_once and not late:
            run = waiting.pop(0)
            place = folder / f"{run['seed']:05}"
            running[start(engine, run, place, gpu=gpu, forks=forks)] = place
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done or late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                if not done:
                    os.waitpid(pid, 0)
                place = running.pop(pid)
                (place / "status").write_text(str(os.waitstatus_to_exitcode(status)) if done else "out of time")
                shutil.rmtree(place / "cache", ignore_errors=True)
        if late:
            waiting.clear()
        time.sleep(0.05)


def judged(place: Path) -> tuple[str, str]:
    """Return what came of a run - clean, corrupt, exit N, failed, not started, out of time - and the end of what was said of it."""
    traces = sorted((place / "traces").glob("*.arrow"))
    if (status := (place / "status").read_text()) == "out of time":
        return status, ""
    if status != "0" or not traces:
        said = (place / "log").read_text(errors="replace").strip().splitlines()
        return "not started" if not traces else "failed", said[-1] if said else ""
    told = ""
    for trace in traces:
        command = [
            sys.executable,
            "-c",
            "from kvcanary.cli import replay_main; replay_main()",
            "--no-report",
            str(trace),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        told += done.stdout + done.stderr
        if done.returncode:
            return "corrupt" if done.returncode == 1 else f"exit {done.returncode}", told
    return "clean", told


def seeds_of(told: str) -> list[int]:
    """Return the numbers that `3,10:20` names: 3, and 10 to 19."""
    parts = [part.partition(":") for part in told.split(",")]
    return [n for first, to, end in parts for n in range(int(first), int(end) if to else int(first) + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["vllm", "sglang", "transformers"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default="0:40", type=seeds_of, help="such as 3,10:20; each is one run")
    parser.add_argument("--gpu", action="store_true", help="engines on a GPU, with its runners and graphs")
    parser.add_argument("--engines", action="store_true", help="run the engines alone, replay later")
    parser.add_argument("--from", dest="ran", action="store_true", help="replay what engines left in this folder")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for all engines")
    parser.add_argument("--at-once", type=int, default=1, help="engines side by side")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    engine = importlib.import_module(f"{args.engine}_run")
    if args.one:
        engine.generate(json.loads((args.folder / "run.json").read_text()), args.folder, gpu=args.gpu)
        return 0
    if not args.ran:
        run_engines(engine, args.seeds, args.folder, gpu=args.gpu, timeout_s=args.timeout, at_once=args.at_once)
    if args.engines:
        return 0
    places = sorted(path.parent for path in args.folder.glob("*/status"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(judged, places))
    for place, (what, said) in zip(places, results, strict=True):
        if what not in ("clean", "out of time"):
            print(
                f"{place.name} {what}: {(place / 'run.json').read_text()}\n    {said[-1500 if what != 'not started' else -200 :]}"
            )
    print(dict(Counter(what for what, _ in results)))
    judged_clean = any(what == "clean" for what, _ in results)  # else nothing was shown
    return int(not judged_clean or any(what not in ("clean", "not started", "out of time") for what, _ in results))


if __name__ == "__main__":
    sys.exit(main())
