"""How far back attention looks in a step, on the CPU: by the window that its kernel is called with.

The kernel masks by that argument alone; the window that its schedule was made with only cuts the work. Of kernels on a GPU
nothing is seen here: inside a CUDA graph they are not called, and what their layers are made with is all that is known.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .....kernels.arrays import Int64Array
from ...common.hooking import OnFault, wrap_method
from ..layout import CPU_KERNEL, CPU_OPS, WINDOW_ARGUMENTS, VllmGroup, kernel_places, looks_back
from ..step import Step


class WindowCalls:
    """Sees with which window the layers of each group call their kernel in a step; a call is a group's by its block table."""

    def __init__(self, groups: Sequence[VllmGroup]) -> None:
        self._groups = groups
        self._watched = [group for group in groups if group.window_at_call]
        self._places = kernel_places(*WINDOW_ARGUMENTS)
        self._step: Step | None = None
        self._by_table: dict[int, int] | None = None  # by the address of a block table its group, -1 of several
        self._looks: dict[int, set[int]] = {}  # by group, how far back its calls of this step have looked; 0 for all

    def attach(self, on_fault: OnFault) -> None:
        """Hook the kernel."""
        if self._watched:
            wrap_method(sys.modules[CPU_OPS], CPU_KERNEL, self.on_kernel, on_fault)

    def begin(self, step: Step | None) -> None:
        """Forget what was seen, and look at a step's calls from now on; None: at none."""
        self._step, self._by_table = step, None
        self._looks.clear()

    def counts(self, prefix: Int64Array) -> dict[int, Int64Array]:
        """Return by group how many positions of its prefix, `[bs]`, each request's first token was let look at.

        If layers of a group differ, it is what is not the group's window.
        """
        found = {}
        for group in self._watched:
            looks = self._looks.get(group.index)
            if looks:
                look = max(looks, key=lambda one: (one != group.window, one))
                found[group.index] = np.minimum(prefix, look) if look else prefix
        return found

    def on_kernel(self, *args: Any, **kwargs: Any) -> None:
        """Take note of a call: of a whole step, as the layers of one group make it."""
        step = self._step
        if step is None or not isinstance(step.given, dict):
            return
        places = self._places.items()
        window, table, lens = (kwargs[name] if name in kwargs else args[at] for name, at in places)
        if self._by_table is None:
            self._by_table = tables_of(step.given, self._groups)
        group = self._by_table.get(int(table.data_ptr()), -1)
        look = looks_back(window)
        if group >= 0 and look is not None and int(lens.shape[0]) >= step.prefix.size:
            self._looks.setdefault(group, set()).add(look)


def tables_of(given: Mapping[str, Any], groups: Sequence[VllmGroup]) -> dict[int, int]:
    """Return which group each block table of the layers' metadata is of, by the table's address; -1 if of several."""
    found: dict[int, int] = {}
    for group in groups:
        for layer in group.layers:
            table: Any = getattr(given.get(layer), "block_table", None)
            if hasattr(table, "data_ptr"):
                at = int(table.data_ptr())
                found[at] = group.index if found.get(at, group.index) == group.index else -1
    return found
