"""Triton's interpreter without what it does again at every call: half of the time of the tests that run kernels in it.

Before every device function that a kernel calls, it goes through all of `triton.language` and replaces what it has
replaced at the launch already. Here it does so once a launch for each set of modules; what a kernel computes is the same.
"""

import functools
import inspect
import sys
from typing import Any


def quicken_interpreter() -> None:
    """Patch the interpreter, if it is imported and is of the form known here; else leave it as slow as it is."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    names = ("_patch_lang", "_LangPatchScope", "GridExecutor", "tl")
    if not all(hasattr(interpreter, name) for name in names) or hasattr(interpreter._patch_lang, "__wrapped__"):
        return
    patch, launch, tl = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter.tl
    done: set[frozenset[str]] = set()

    @functools.cache
    def modules(function: Any) -> frozenset[str]:
        known = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(value.__name__ for value in known if value in (tl, tl.core))

    @functools.wraps(patch)
    def patch_once(function: Any) -> Any:
        if modules(function) in done:
            return interpreter._LangPatchScope()
        scope = patch(function)
        done.add(modules(function))
        return scope

    @functools.wraps(launch)
    def launch_anew(*given: Any, **named: Any) -> Any:
        done.clear()
        try:
            return launch(*given, **named)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
