"""For `pytest -p`: loops are compiled so that one that reads or writes outside an array ends the process (SIGILL)."""

from importlib import import_module
from typing import Any

from kvcanary.kernels import dispatch, native

dispatch.import_numba()
views: Any = import_module("kvcanary.kernels.views")
views.CHECK_INDICES = True
machine_name = native.machine_name
native.machine_name = lambda: f"{machine_name()}, indices looked at"  # code that is kept in a folder of its own
