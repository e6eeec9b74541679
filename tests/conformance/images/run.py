"""Engines with real images, recorded: healthy runs must replay clean with the tokens of unrecorded ones, faults must be found.

    python tests/conformance/images/run.py vllm FOLDER            # on the CPU, every healthy run and every fault
    python tests/conformance/images/run.py sglang FOLDER --only few --seeds 3
    python tests/conformance/images/run.py vllm FOLDER --gpu --runner v2 --at-once 8   # on a GPU, with that model runner of vLLM's
    python tests/conformance/images/run.py sglang FOLDER --gpu --engines     # there: only the engines
    python tests/conformance/images/run.py sglang FOLDER --judge             # of what they left, on any machine

With the engine's own interpreter. Needs `torchvision` without its dependencies beside what `install.sh` has; of builds for
another torch two operators are declared that nobody calls. The model is model.py's. Exit status 1 if something is not as it
should be.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["vllm", "sglang"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--seeds", type=int, default=1, help="so many workloads of each healthy run")
    parser.add_argument("--gpu", action="store_true", help="run on a GPU")
    parser.add_argument("--runner", choices=("v1", "v2"), default="v1", help="vLLM's model runner there")
    parser.add_argument("--at-once", type=int, default=1, help="so many engines at a time")
    parser.add_argument("--engines", action="store_true", help="run the engines, and replay nothing")
    parser.add_argument(
        "--judge", action="store_true", help="replay what engines have left in the folder, and run none"
    )
    parser.add_argument("--run", nargs=3, metavar=("NAME", "SEED", "OUTPUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    engine: Any = importlib.import_module(f"{args.engine}_run")
    if args.run:
        from model import declare, make_model

        declare()
        if args.run[0] == "make":
            make_model(args.folder / "model")
            return 0
        outputs = engine.generate(args.folder, args.run[0], int(args.run[1]), gpu=args.gpu)
        Path(args.run[2]).write_text(json.dumps(outputs))
        return 0
    # The V2 runner makes positions and slots in kernels of its own, which these faults do not reach.
    faults = [name for name in engine.FAULTS if not (args.gpu and args.runner == "v2") or name == "key"]
    runs = [*((name, seed) for name in engine.HEALTHY for seed in range(args.seeds)), *((name, 0) for name in faults)]
    runs = [(name, seed) for name, seed in runs if args.only in name]
    if not args.judge:
        args.folder.mkdir(parents=True, exist_ok=True)
        run(args, engine, "make", 0, None)
        with ThreadPoolExecutor(args.at_once) as pool:
            list(pool.map(lambda one: run_both(args, engine, *one), runs))
    said = [] if args.engines else [judged(engine, name, seed, args.folder) for name, seed in runs]
    for (name, seed), wrong in zip(runs, said, strict=False):
        print(f"{args.engine} {name} {seed}: {wrong or 'as it should be'}", flush=True)
    return int(any(said))


def run_both(args: argparse.Namespace, engine: Any, name: str, seed: int) -> None:
    """Run once, and what is healthy once more without the recorder."""
    for traces in (args.folder / f"{name}-{seed}", *([None] if name in engine.HEALTHY else [])):
        run(args, engine, name, seed, traces)


def judged(engine: Any, name: str, seed: int, folder: Path) -> str:
    """Return what is not as it should be of a run."""
    traces = folder / f"{name}-{seed}"
    recorded, plain = (folder / f"{name}-{seed}{what}.json" for what in ("", "-unrecorded"))
    if not recorded.exists():
        return f"the engine ended early: {recorded.with_suffix('.log')}"
    command = [sys.executable, "-c", "from kvcanary.cli import replay_main; replay_main()", "--json"]
    command += ["--report", str(traces / "report"), *map(str, traces.glob("*.arrow"))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        return ran.stderr[-300:]
    if name in engine.HEALTHY:
        same = plain.exists() and recorded.read_text() == plain.read_text()
        if same and not ran.returncode:
            return ""
        return f"replay {ran.returncode}, the tokens are {'' if same else 'not '}the same"
    find = [
        sys.executable,
        "-c",
        "from kvcanary.cli import main; main()",
        "incidents",
        str(traces / "report"),
        "--json",
    ]
    told = subprocess.run(find, capture_output=True, text=True, check=False)
    kinds = [incident["kind"] for incident in json.loads(told.stdout)["incidents"]] if not told.returncode else []
    return "" if kinds and kinds[0] in engine.FAULTS[name][1] else f"not found: {kinds} {told.stderr[-200:]}"


def run(args: argparse.Namespace, engine: Any, name: str, seed: int, traces: Path | None) -> int:
    """Run this file in a process of its own, recorded if there is a folder for traces; return its exit status."""
    told, folder = f"{name}-{seed}{'' if traces else '-unrecorded'}", args.folder
    environment = {**os.environ, **engine.environment(name, folder, args.runner, gpu=args.gpu)}
    environment |= {"KVCANARY_TRACE": str(traces)} if traces else {}
    if (
        not args.gpu and args.engine == "vllm"
    ):  # it looks at a model in processes of its own, which import torchvision, too
        stand_in = folder / "stand-in"
        stand_in.mkdir(exist_ok=True)
        text = f"import sys; sys.path.append({str(HERE)!r})\nimport model; model.declare()\n"
        (stand_in / "sitecustomize.py").write_text(text)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(stand_in), os.environ.get("PYTHONPATH"))))
    output = str(folder / f"{told}.json")
    with (folder / f"{told}.log").open("w") as log:
        command = [sys.executable, __file__, args.engine, str(folder), "--run", name, str(seed), output]
        command += ["--gpu"] if args.gpu else []
        return subprocess.run(
            command, stdout=log, stderr=log, env=environment, timeout=PATIENCE_S, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
