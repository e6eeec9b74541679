"""Doing something to a module as soon as a process has imported it, and nothing if it never does."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Imported = Callable[[ModuleType], None]


class WhenImported(importlib.abc.MetaPathFinder):
    """A finder that lets the others find a module, and calls `then[name]` with it once it has been executed."""

    def __init__(self, then: dict[str, Imported]) -> None:
        self._then = dict(then)
        self._looking: set[str] = set()

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls us; None for a module that is not waited for."""
        if fullname not in self._then or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, type):
            _call_after(spec.loader, self._then.pop(fullname))
        return spec


def _call_after(loader: Any, then: Imported) -> None:
    """Have a module's loader call `then` once it has executed the module, and be as it was."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)
        execute(module)
        then(module)

    loader.exec_module = exec_module


def when_imported(then: dict[str, Imported]) -> None:
    """Call `then[name]` with each module once it is imported; at once if it has been."""
    waiting = {}
    for name, call in then.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            call(module)
        else:
            waiting[name] = call
    if waiting:
        sys.meta_path.insert(0, WhenImported(waiting))
