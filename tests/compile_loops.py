"""Compile every loop of kernels/ to machine code on disk, on two cores, before tests run: `python tests/compile_loops.py`.

In a fresh clone each of pytest's workers would compile the same loops at the same time. With a warm cache this takes no
time worth naming; a loop that it does not find is compiled by the first test that needs it. Triton need not be there yet.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from kvcanary import kernels
from kvcanary.kernels.dispatch import select

# One takes as long as all the others together.
LONGEST = "kvcanary.kernels.replay_pass"


def loops_of(name: str) -> list[Callable[..., Any]]:
    """Return the loops that a module holds: what is passed to `select` is named so."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "triton"):
            raise
        return []  # it runs on a GPU: its kernels are Triton's to compile
    found = [value for key, value in vars(module).items() if key.endswith("_loops") and inspect.isfunction(value)]
    return [loops for loops in found if loops.__module__ == name]


def compile_module(name: str) -> int:
    """Compile a module's loops, and return how many there are."""
    return len([select(loops, "cpu") for loops in loops_of(name)])


def main() -> None:
    modules = [m.name for m in pkgutil.walk_packages(kernels.__path__, "kvcanary.kernels.")]
    modules.sort(key=lambda name: not name.startswith(LONGEST))
    with ProcessPoolExecutor(2) as processes:
        count = sum(processes.map(compile_module, modules))
    if not count:
        sys.exit("no loops found in kernels/: is kvcanary installed from here?")
    print(f"{count} loops compiled, or there already")


if __name__ == "__main__":
    main()
