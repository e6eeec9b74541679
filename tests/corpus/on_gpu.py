"""Runs the corpus's bugs of vLLM on a GPU, as many beside one another as there is room for, and judges what was recorded.

    python tests/corpus/on_gpu.py FOLDER --seconds 540 --at-once 12     # there, with the vLLM that runs on it
    python tests/corpus/on_gpu.py FOLDER --judge --machine '2026-11-30, ...'    # here: replays them, and writes the page

The patches are those that were written for the CPU; what they do to the scheduler, the block pool and the block tables is the
same. Those that name what the CPU alone has are left out. Each setup runs without a bug, too.
"""

import argparse
import os
import random
import re
import shutil
import sys
import time
from inspect import getsource
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFORMANCE = HERE.parent / "conformance"
sys.path[:0] = [str(HERE), str(CONFORMANCE / "vllm"), str(CONFORMANCE)]

from bugs import BUGS, load  # noqa: E402

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner that the CPU's is made of
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "KVCANARY_COMPRESSION": "zstd",
}
OF_THE_CPU = re.compile(r"CPU|cpu_attn|cpu_model_runner|cpu_worker")
NOT_THERE = ("mla", "qwen3_next")  # of which the vLLM that runs there has no kernels
A_RUN_S = 150.0
PAGE = HERE.parents[1] / "docs" / "results" / "real-bugs-gpu.md"


def engine_arguments(setup: str) -> dict[str, Any]:
    """Return what the engine is given on a GPU, where heads of 32 are Triton's, and others run beside it."""
    from vllm_setups import SETUPS

    backend = "TRITON_MLA" if SETUPS[setup].model == "mla" else "TRITON_ATTN"
    return {
        "dtype": "bfloat16",
        "attention_config": {"backend": backend},
        "gpu_memory_utilization": 0.02,
        "kv_cache_memory_bytes": 1 << 29,
    }


def runs(seed: int) -> list[str]:
    """Return bugs and setups by turns, in a random order."""
    from vllm_setups import SETUPS

    bugs = [bug for bug in load("vllm").values() if not OF_THE_CPU.search(getsource(bug.patch))]
    bugs = [bug for bug in bugs if SETUPS[bug.setup].model not in NOT_THERE]
    random.Random(seed).shuffle(bugs)
    names: dict[str, None] = {}
    for bug in bugs:
        names |= dict.fromkeys((f"clean:{bug.setup}", bug.trace))
    return list(names)


def setup_of(name: str) -> str:
    """Return the setup of a run."""
    return name.removeprefix("clean:") if ":" in name else load("vllm")[name].setup


def record(folder: Path, names: list[str], at_once: int, seconds: float) -> None:
    """Run engines until all have run or the time is over; keep each one's trace, answers, and log if it failed."""
    import vllm.v1.worker.gpu_worker  # noqa: F401
    import vllm_engine
    from vllm import LLM  # noqa: F401

    vars(sys.modules["__main__"])["adapter"] = (
        vllm_engine.adapter
    )  # which a patch asks for, of the program that runs it

    deadline, running, left = time.monotonic() + seconds, dict[int, tuple[str, float]](), list(names)
    place = Path(os.environ.get("TMPDIR", "/tmp")) / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    while running or (left and time.monotonic() < deadline):
        while left and len(running) < at_once and time.monotonic() < deadline:
            name = left.pop(0)
            pid = vllm_engine.start(name, place / name.replace(":", "-"), engine_arguments(setup_of(name)))
            running[pid] = (name, time.monotonic() + A_RUN_S)
        for pid, (name, until) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and time.monotonic() > min(until, deadline + 30):
                os.killpg(pid, 9)
                done, status = os.waitpid(pid, 0)
            if done:
                del running[pid]
                keep(place / name.replace(":", "-"), folder, os.waitstatus_to_exitcode(status))
        time.sleep(0.05)
    print(f"{len(names) - len(left)} of {len(names)} runs")


def keep(run: Path, folder: Path, status: int) -> None:
    """Keep what a run left: its trace, its answers, and the end of its log if it failed."""
    for trace in sorted((run / "traces").glob("*.arrow"))[:1]:
        shutil.copyfile(trace, folder / f"{run.name}.arrow")
    if (run / "tokens.json").exists():
        shutil.copyfile(run / "tokens.json", folder / f"{run.name}.json")
    if status:
        (folder / f"{run.name}.log").write_text((run / "log").read_text(errors="replace")[-3000:])
    shutil.rmtree(run, ignore_errors=True)


def judge(folder: Path, machine: str) -> None:
    """Replay what was recorded, print what each is found to be, and write the page."""
    from run import CERTAIN, look, outcome

    load("vllm")
    clean, outcomes = {}, []
    for path in sorted(folder.glob("clean-*.arrow")):
        _, summary, found, _ = look(path)
        clean[path.stem.removeprefix("clean-")] = summary.verdict.value
        print(f"{path.stem}: {summary.verdict.value} {[row['kind'] for row in found.rows]}", flush=True)
    for path in sorted(folder.glob("vllm-*.arrow")):
        one = outcome(BUGS[path.stem], folder)
        outcomes.append(one)
        print(
            f"{path.stem}: {one.kind or 'nothing'} {one.score:.2f} in {one.found} of {one.reads}, {one.bug.kinds}",
            flush=True,
        )
    judged = [o for o in outcomes if o.effective]
    told = [o for o in judged if o.incidents]
    sure = [o for o in judged if o.score >= CERTAIN]
    in_time = sum(0 <= o.found <= o.reads for o in judged)
    not_clean = [setup for setup, verdict in clean.items() if verdict != "clean"]
    lines = [
        "# Real bugs of vLLM on a GPU",
        "",
        "Made by `python tests/corpus/on_gpu.py FOLDER` (the engines, on a machine with a GPU) and `--judge` (on any); do not edit.",
        "The patches of [real-bugs.md](real-bugs.md) that do not name what vLLM has on the CPU alone, with Model Runner V1, Triton's",
        "attention, bfloat16 and prefix caching, eager, unchanged but for that: what they do to the scheduler, the block pool, the",
        "block tables, the inputs and the connector is what they do there. Recorded without a wait for the device. A bug counts if",
        "its patch marked a forward that reads the damage. Of what is recorded on the CPU alone (what a layer hands to its cache,",
        "windows at the kernel's call, all bytes of a token) nothing can be found here; the header of each trace says so. The rules",
        "were written with the CPU's traces of these bugs at hand, and known bugs are asked as there, without the bug itself.",
        "",
        f"{machine}.",
        "",
        f"- **{len(clean) - len(not_clean)} of {len(clean)}** runs without a bug replay clean{': not ' if not_clean else ''}{', '.join(not_clean)}",
        f"- {len(outcomes)} bugs ran, {len(judged)} of them effective: found **{len(told)}**, no later than in the forward that reads the damage first {in_time}",
        f"- right kind first: **{sum(o.right for o in told)} of {len(told)}** that were found",
        f"- said with {CERTAIN} or more: {len(sure)}, wrong **{sum(not o.right for o in sure)}**",
        "",
        "| bug | forward | kind | confidence | seen by |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for o in judged:
        kind = o.kind if o.right else f"{o.kind or 'nothing'}, not {o.bug.kinds[0]}"
        lines.append(f"| {o.bug.name} | {o.found} of {o.reads} | {kind} | {o.score:.2f} | {o.seen_by} |")
    PAGE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[10:16]))


def main() -> None:
    """Record on this machine, or judge what another one recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--machine", default="", help="the date, the machine and its versions, for the page")
    parser.add_argument("--only", default="", help="runs whose name, or whose setup's, contains this")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.judge:
        judge(options.folder, options.machine)
        return
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        paths = [str(HERE), str(CONFORMANCE / "vllm"), os.environ.get("PYTHONPATH", "")]
        told = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        os.execve(sys.executable, [sys.executable, *sys.argv], told)
    names = [name for name in runs(options.seed) if options.only in name or options.only in setup_of(name)]
    record(options.folder, names, options.at_once, options.seconds)


if __name__ == "__main__":
    main()
