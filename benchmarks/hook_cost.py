"""What the hooks of a decode step take of an engine's thread, and the recorder's own thread beside it, hook by hook.

    python benchmarks/hook_cost.py                       # SGLang with CUDA graphs, vLLM's two runners; 32 requests
    python benchmarks/hook_cost.py --requests 256 --engines sglang --profile

It needs no GPU and no engine: engines that do nothing but decode are hooked as on a GPU, and no kernel is launched, so a
launch costs what Python does for it. Between two steps 64 MiB of other things are touched, as an engine's step touches them;
`warm` is without that. The medians of the steps are printed, the recorder's thread by its CPU time. To compare two versions
of the code, run it for both on the same machine, in turns.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np
import torch
from kvcanary.tests.support.engines.hook_watch import HookWatch
from kvcanary.tests.support.engines.steady import SteadySglang, SteadyVllm, no_kernels

ENGINES = ("sglang", "vllm v1", "vllm v2")
WARM_UP, REST_S = 40, 0.003
OTHER_THINGS = np.zeros(64 << 17, np.int64)


class Clock:
    """Nanoseconds that each hook has taken in the step that runs, without what it is around."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = defaultdict(int)
        self._running, self._since = "", 0

    def change(self, name: str) -> None:
        """Another runs from now on: a hook, or the engine."""
        if self._running:
            self.spent[self._running] += time.perf_counter_ns() - self._since
        self._running, self._since = name, time.perf_counter_ns()


def background_ns() -> int:
    """Return the CPU time of the recorder's own thread, and the writer's."""
    ours = [one for one in threading.enumerate() if one.name.startswith("kvcanary-")]
    return sum(time.clock_gettime_ns(time.pthread_getcpuclockid(one.ident or 0)) for one in ours)


def measure(engine: str, requests: int, steps: int, *, cold: bool, profile: bool) -> dict[str, Any]:
    """Run an engine and return microseconds: of all hooks, of each hook, of the recorder's threads, a step."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, no_kernels() as kernels, HookWatch(clock.change).hooks():
        where = Path(folder)
        of_vllm = {"v2": engine.endswith("v2")}
        one: Any = (
            SteadySglang(where, kernels, requests)
            if engine == "sglang"
            else SteadyVllm(where, kernels, requests, **of_vllm)
        )
        profiler, told = cProfile.Profile(), list[dict[str, int]]()
        for number in range(WARM_UP + steps):
            if cold:
                np.add(OTHER_THINGS, 1, out=OTHER_THINGS)
            time.sleep(REST_S)
            if number == WARM_UP:
                kernels.launched.clear()
                before = background_ns()
            clock.spent.clear()
            if profile and number >= WARM_UP:
                profiler.enable()
            one.step()
            profiler.disable()
            told.append(dict(clock.spent))
        time.sleep(0.2)
        background = (background_ns() - before) / steps
        launched = {name: count / steps for name, count in kernels.launched.items()}
        one.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    kept = told[WARM_UP:]
    names = sorted({name for step in kept for name in step})
    return {
        "all": round(statistics.median(sum(step.values()) for step in kept) / 1000, 1),
        "mean": round(statistics.mean(sum(step.values()) for step in kept) / 1000, 1),
        "by_hook": {name: round(statistics.median(step.get(name, 0) for step in kept) / 1000, 1) for name in names},
        "recorder_thread": round(background / 1000, 1),
        "launches": launched,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help="which, by comma")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="print what the steps spend their time in")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for engine in args.engines.split(","):
        for cold in (False, True):
            found = measure(engine, args.requests, args.steps, cold=cold, profile=args.profile and not cold)
            print(
                json.dumps(
                    {"engine": engine, "requests": args.requests, "caches": "cold" if cold else "warm", **found}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
