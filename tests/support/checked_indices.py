"""For `pytest -p`: loops are compiled anew in each process, and one that reads or writes outside an array ends it (SIGILL)."""

from importlib import import_module
from typing import Any

from kvcanary.kernels import dispatch

dispatch.import_numba()
views: Any = import_module("kvcanary.kernels.views")
views.CHECK_INDICES = True
dispatch.cache_folder = lambda *_: None  # nor is anything kept
