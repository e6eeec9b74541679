"""Doing something to a module as soon as a process has imported it, and nothing if it never does."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Imported = Callable[[ModuleType], None]


class WhenImported(importlib.abc.MetaPathFinder):
    """A finder that lets the others find a module, and calls `then[name]` with it once it has been executed."""

    def __init__(self, then: dict[str, Imported]) -> None:
        self._then = dict(then)
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec with a loader around its loader, None for a module that is not waited for."""
        if fullname not in self._then or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find is not None and finder is not self else None
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader, self._then.pop(fullname))
                    return spec
        finally:
            self._looking.discard(fullname)
        return None


class _Loader(importlib.abc.Loader):
    """A module's own loader, and a call after it."""

    def __init__(self, loader: Any, then: Imported) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Leave it to the loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module as its loader does, then the call."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def when_imported(then: dict[str, Imported]) -> None:
    """Call `then[name]` with each module once it is imported; at once where it has been."""
    waiting = {}
    for name, call in then.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            call(module)
        else:
            waiting[name] = call
    if waiting:
        sys.meta_path.insert(0, WhenImported(waiting))
