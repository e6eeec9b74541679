"""Runs vLLM on a GPU with the recorder attached: clean runs must replay clean, every injected fault must be found.

    python tests/conformance/vllm/gpu/run.py                        # all runs, and docs/results/conformance-vllm-gpu.md
    python tests/conformance/vllm/gpu/run.py --only hybrid --no-write
    python tests/conformance/vllm/gpu/run.py --keep FOLDER --engines   # there: only the engines
    python tests/conformance/vllm/gpu/run.py --from FOLDER             # on any machine: replay, and write

It needs an NVIDIA GPU and a vLLM 0.32 that runs on it, in whose environment kvcanary is installed. Exit status 1 if
something is not as it should be.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
DOCUMENT = HERE.parents[3] / "docs" / "results" / "conformance-vllm-gpu.md"

from compare import Result, compare  # noqa: E402
from engine import ENVIRONMENT, environment, generate, import_engine  # noqa: E402
from runs import RUNS, GpuRun  # noqa: E402

STARTED: list[subprocess.Popen[bytes]] = []  # one that nobody holds is waited for by the next one's start
OVERHEAD = tuple(
    GpuRun(name=f"overhead-{runner}-{processes}-{kind}", base=base, runner=runner, graph="FULL_DECODE_ONLY",
           spawned=processes == "two", connector="IdleConnector" if processes == "connector" else "", outputs=outputs)
    for runner, processes in (("v2", "two"), ("v2", "one"), ("v1", "one"), ("v2", "connector"), ("v1", "connector"))
    for kind, base, outputs in (("plain", "", 1), ("recorded", "none", 1), ("no_outputs", "none", 0))
    if processes == "one" or outputs
)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="runs whose name contains this, or one of these, joined by commas")
    parser.add_argument("--keep", type=Path, help="keep logs, traces and reports in this folder")
    parser.add_argument("--engines", action="store_true", help="run the engines and keep what they leave")
    parser.add_argument(
        "--from", dest="ran", type=Path, help="judge what engines left in this folder; no GPU is needed"
    )
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for all engines but the overhead's")
    parser.add_argument("--at-once", type=int, default=16, help="engines side by side")
    parser.add_argument("--no-overhead", action="store_true", help="leave out what takes times")
    parser.add_argument(
        "--overhead",
        default="",
        help="take the times of engines whose name contains this; else of those without a connector",
    )
    parser.add_argument("--no-write", action="store_true", help=f"leave {DOCUMENT.name} as it is")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    runs = [run for run in RUNS if any(part in run.name for part in args.only.split(","))]
    folder = args.ran or args.keep or Path(tempfile.mkdtemp(prefix="conformance-vllm-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not args.ran:
        overhead = [] if args.no_overhead else start_overhead(folder, args.overhead)
        run_engines(runs, folder, args.timeout, args.at_once)
        (folder / "machine").write_text(machine())
        finish_overhead(overhead, folder, 200.0)
        if args.engines:
            return 0
    runs = [run for run in runs if (folder / run.name / "status").exists()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda run: judged(run, folder), runs))
    for run, (result, _) in zip(runs, results, strict=True):
        said = "as it should be" if not result.wrong else "WRONG"
        print(f"{run.name}: {said}   {result.forwards} forwards, {result.verdict}, {result.found} of {result.injected}")
        for wrong in result.wrong[:5]:
            print(f"    {wrong[:400]}")
    if not args.no_write:
        DOCUMENT.write_text(document(runs, results, folder, whole=len(runs) == len(RUNS)))
    if not (args.keep or args.ran):
        shutil.rmtree(folder)
    return int(any(result.wrong for result, _ in results))


def run_engines(runs: list[GpuRun], folder: Path, timeout_s: float, at_once: int) -> None:
    """Run all engines, so many side by side; each one's log and exit status go into its folder."""
    os.environ.update(ENVIRONMENT)
    import_engine()
    import torch

    forks = not torch.cuda.is_initialized()  # else each is started anew
    waiting, running = list(runs), dict[int, GpuRun]()
    deadline = time.monotonic() + timeout_s
    while waiting or running:
        while waiting and len(running) < at_once:
            run = waiting.pop(0)
            running[start(run, folder / run.name, forks=forks and not run.compiled and not run.spawned)] = run
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() > deadline
            if not done and late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if done or late:
                said = str(os.waitstatus_to_exitcode(status)) if done else "out of time"
                (folder / running.pop(pid).name / "status").write_text(said)
        if time.monotonic() > deadline:
            waiting.clear()
        time.sleep(0.05)


def start(run: GpuRun, place: Path, *, forks: bool) -> int:
    """Start an engine in a process group of its own; return its process id."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    told = dataclasses.asdict(run)
    if not forks:
        with (place / "log").open("w") as log:
            command = [sys.executable, str(HERE / "engine.py"), str(place), json.dumps(told)]
            STARTED.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        return STARTED[-1].pid
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        log_file = os.open(place / "log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log_file, 1)
        os.dup2(log_file, 2)
        os.environ.update(environment(told, place))
        generate(told, place)
        status = 0
    except BaseException:  # noqa: BLE001  # told, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if status == 0:
            end_traces()
        os._exit(status)


def end_traces() -> None:
    """End what the recorder has open: a forked process does not run what is registered for the end of a process."""
    from kvcanary.recorder.engines.vllm import hooks

    for attachment in hooks.attachments:
        for recorder in attachment.recorders():
            recorder.close()


def start_overhead(folder: Path, only: str) -> list[tuple[GpuRun, subprocess.Popen]]:
    """Start the engines whose times are taken; they wait until all others are through."""
    started = []
    wanted = [run for run in OVERHEAD if (only in run.name if only else not run.connector)]  # ten have no room on a GPU
    for number, run in enumerate(wanted):
        place = folder / run.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        command = [sys.executable, str(HERE / "overhead.py"), str(folder), str(number), str(len(wanted))]
        with (place / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, json.dumps(dataclasses.asdict(run))], stdout=log, stderr=log, start_new_session=True
            )
        started.append((run, process))
    return started


def finish_overhead(started: list[tuple[GpuRun, subprocess.Popen]], folder: Path, timeout_s: float) -> None:
    """Let the engines take their turns."""
    (folder / "go").touch()
    deadline = time.monotonic() + timeout_s
    for _, process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 1))
    for _, process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def judged(run: GpuRun, folder: Path) -> tuple[Result, str]:
    """Return what the replay of a run's trace says, and how its tokens compare with an engine that is not recorded."""
    place = folder / run.name
    status = (place / "status").read_text()
    wrong = [] if status == "0" else [f"the engine ended with {status}: {(place / 'log').read_text()[-300:]}"]
    result = compare(place, faulty=bool(run.fault)) if run.recorded else Result()
    tokens, base = place / "tokens.json", folder / run.base / "tokens.json"
    same = ""
    if run.recorded and not run.fault and tokens.exists() and base.exists():
        same = "the same" if tokens.read_bytes() == base.read_bytes() else "**differ**"
        wrong += ["other tokens than without the recorder"] if same != "the same" else []
    if run.recorded and not wrong:
        wrong += waits(place)
    return dataclasses.replace(result, wrong=(*wrong, *result.wrong)), same


def waits(place: Path) -> list[str]:
    """Return what the trace's header says of waiting for the device."""
    from kvcanary.recorder.trace.reader import TraceReader

    with TraceReader(next((place / "traces").glob("*.arrow"))) as reader:
        return [note for note in reader.header.notes if "waits for the device" in note]


def machine() -> str:
    """Return when and on what the engines ran."""
    import torch

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("vllm", "torch", "triton"))
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {torch.cuda.get_device_name(0)}, {versions}."


def document(runs: list[GpuRun], results: list[tuple[Result, str]], folder: Path, *, whole: bool) -> str:
    both = [(run, *result) for run, result in zip(runs, results, strict=True) if run.recorded]
    clean, faulty = ([one for one in both if bool(one[0].fault) == kind] for kind in (False, True))
    good = sum(not result.wrong for _, result, _ in clean)
    same = sum(
        tokens == "the same" for _, _, tokens in clean
    )  # the others have no engine beside them that is not recorded
    injected, found = (sum(getattr(result, name) for _, result, _ in faulty) for name in ("injected", "found"))
    summary = (
        f"**{good} of {len(clean)} clean runs replay clean, {same} of which were held against the same run without the "
        f"recorder and have its tokens; {found} of {injected} faults found, in {len(faulty)} runs.**"
    )
    lines = [
        "# vLLM on a GPU: clean runs replay clean, injected faults are found",
        "",
        "Made by `python tests/conformance/vllm/gpu/run.py` (the engines on a machine with a GPU, with `--keep FOLDER",
        "--engines`; the page from what they left, with `--from FOLDER`); do not edit. Each run is a vLLM engine with dummy",
        "weights, 13 requests of which some share a prefix, prompts in chunks of at most 48 tokens, blocks of 16, recorded by",
        "the plugin alone; without a word of it, scheduling is asynchronous and attention is FlashAttention 3. `graphs` are",
        "CUDA graphs of whole decode steps, `compiled` is torch.compile with full and piecewise graphs, vLLM's default.",
        "Faults are put in right before the model reads its inputs, as on the page of the CPU's runs, and are there within",
        "the CUDA graphs, but for those of the V2 runner's draft steps, of which nothing is watched. A run is wrong if it waits",
        "for the device.",
        "",
        (folder / "machine").read_text(),
        "" if whole else "\n**Not all runs.**\n",
        summary,
        "",
        "| run | forwards | split steps | slots verified | slots swept | prefix hits | preemptions | evictions | faults | found | the slowest after | verdict | tokens | |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|---|",
    ]
    for run, result, same in both:
        faults = f"{result.injected} | {result.found} | {result.latest}" if run.fault else " | | "
        lines.append(
            f"| {run.name} | {result.forwards} | {result.split_steps} | {result.verified} | {result.swept} | "
            f"{result.shared} | {result.retracted} | {result.evicted} | {faults} | {result.verdict} | {same} | "
            f"{'**wrong**' if result.wrong else ''} |"
        )
    lines += overhead_lines(folder)
    for run, result, _ in both:
        if result.wrong:
            lines += ["", f"**{run.name}**", "", *(f"- {said[:400]}" for said in result.wrong[:10])]
    return "\n".join(lines).rstrip() + "\n"


def overhead_lines(folder: Path) -> list[str]:
    """Return what recording cost, nothing if no times were taken."""
    told = {run.name: folder / run.name / "overhead.json" for run in OVERHEAD}
    told_of = {name: json.loads(path.read_text()) for name, path in told.items() if path.exists()}
    lines = [
        "",
        "## What it costs",
        "",
        "The shape of Llama 3 8B (bfloat16), 32 requests of 512 cached tokens, full CUDA graphs, engines of one run that take",
        "turns on one GPU. A decode step is the difference of two generations of 8 and of 136 tokens; the medians of the turns",
        "count. The settings are the default ones, with the history of slots. With two processes, as `vllm serve` has them, one",
        "runs the engine alone; with one, the thread that launches is the front end too. The three times are what that thread",
        "computes in a step, what the hooks of steps and samples take (the history's are not among them), and what the",
        "recorder's own thread computes. The connector is one that nobody knows, and that never has anything: what lies in the",
        "blocks is looked at all the same. Nobody waits for the device: what is left is that all of them share Python's lock.",
        "Hosts of one kind differ by more than what is measured here: a table holds for the host that it was made on.",
        "",
        "| runner | processes | settings | a step, ms | times as long | each turn, ms | launching thread, us | hooks, us | recorder's thread, us | tokens |",
        "|---|--:|---|--:|--:|---|--:|--:|--:|---|",
    ]
    for run in OVERHEAD:
        one, plain = told_of.get(run.name), told_of.get(run.name.rpartition("-")[0] + "-plain")
        if one is None or plain is None:
            continue
        middle, base = statistics.median(one["steps_ms"]), statistics.median(plain["steps_ms"])
        each = f"{min(one['steps_ms']):.3f} to {max(one['steps_ms']):.3f}, of {len(one['steps_ms'])}"
        main, hooks = statistics.median(one["main_thread_cpu_us"]), sum(one["engine_thread_us"].values())
        spent = f"{main:.0f} | {hooks:.0f} | {one['background_cpu_us']:.0f}" if run.recorded else f"{main:.0f} | | "
        spent = " | | " if run.spawned else spent  # it is the other process that computes
        settings = ("default" if run.recorded else "unrecorded") + (", a connector" if run.connector else "")
        settings += "" if run.outputs else ", no outputs of attention"
        same = "" if not run.recorded else "the same" if one["tokens"] == plain["tokens"] else "**differ**"
        lines.append(
            f"| {run.runner.upper()} | {1 + run.spawned} | {settings} | {middle:.3f} | {middle / base:.4f} | {each} | {spent} | {same} |"
        )
    return lines if told_of else []


if __name__ == "__main__":
    sys.exit(main())
