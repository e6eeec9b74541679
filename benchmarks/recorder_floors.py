"""What the least that a recorder does on an engine's thread takes on this machine, as JSON: launches and empty hooks.

    python benchmarks/recorder_floors.py

Each is timed by itself, once with warm caches and once after 64 MiB of other things have been touched, as an engine's
step touches them. `recorder_overhead.py` runs it beside the engines, so that its figures can be held against the host.
"""

import json
import statistics
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import triton
from kvcanary.kernels.capture.model_forward import Launches
from kvcanary.recorder.engines.common.hooking import StepCost, harmless

ROUNDS = 300
OTHER_THINGS = np.zeros(64 << 17, np.int64)


@triton.jit(do_not_specialize=["number", "same"])
def empty_kernel(number, same):  # type: ignore[no-untyped-def]  # Triton's own
    """Do nothing."""


def touch() -> None:
    """Put other things into the caches."""
    np.add(OTHER_THINGS, 1, out=OTHER_THINGS)


def microseconds(what: Callable[[], Any], before: Callable[[], None]) -> float:
    """Return the median of what `what` takes, called after `before`."""
    times = []
    for _ in range(ROUNDS):
        before()
        begin = perf_counter_ns()
        what()
        times.append(perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def main() -> None:
    """Measure and print."""
    launch = Launches().launch(empty_kernel, 1, (torch.zeros(1, dtype=torch.int64, device="cuda"),), (5,))
    if launch is None:
        raise SystemExit("Triton's interpreter launches nothing: unset TRITON_INTERPRET")
    hook = harmless(lambda: lambda *_: None, lambda *_: None, StepCost())
    things = {"launch": lambda: launch(0, 5), "hook": lambda: hook(int)}
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    for name, what in things.items():
        for heat, before in (("warm", torch.cuda.synchronize), ("cold", lambda: (torch.cuda.synchronize(), touch()))):
            found[f"{name}_{heat}_us"] = round(microseconds(what, before), 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
