"""Triton's interpreter without what it does again at every call: two thirds of the time of the tests that run kernels in it.

Before every device function that a kernel calls, it goes through all of `triton.language` and replaces what it has
replaced at the launch already. Here it does so once a launch for each set of modules. What it works out anew for each
value - a type's numpy form, a shape - is kept. What a kernel computes is the same.
"""

import dataclasses
import functools
import inspect
import sys
from typing import Any


def quicken_interpreter() -> None:
    """Patch the interpreter, if it is imported and is of the form known here; else leave it as slow as it is."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    names = (
        "_patch_lang",
        "_patch_attr",
        "_get_np_dtype",
        "_LangPatchScope",
        "GridExecutor",
        "interpreter_builder",
        "tl",
    )
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
    _quicken_values(interpreter)


def _quicken_values(interpreter: Any) -> None:
    """Keep what is worked out anew for each value, and leave out what nobody sees."""
    tl, semantic = interpreter.tl, interpreter.interpreter_semantic
    of_type, first_init, unwrap = interpreter._get_np_dtype, tl.tensor.__init__, tl.core._unwrap_if_constexpr
    first_block_init = tl.block_type.__init__
    shapes: dict[Any, Any] = {}
    blocks: dict[Any, Any] = {}

    # Without `debug` its look for an overflow after every sum of int32 ends in an assertion that is never made.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    def np_dtype(dtype: Any) -> Any:
        known = dtype.__dict__.get("_np_dtype")
        if known is None:
            known = dtype._np_dtype = of_type(dtype)
        return known

    def init(tensor: Any, handle: Any, kind: Any) -> None:
        shape = (*kind.shape,) if kind.is_block() else ()
        if shape not in shapes:
            first_init(tensor, handle, kind)
            shapes[shape] = tensor.numel, tensor.shape
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = shapes[shape]

    def block_init(block: Any, element: Any, shape: Any) -> None:
        known = (*shape,)
        if known not in blocks:
            first_block_init(block, element, shape)
            blocks[known] = block.shape, block.numel, str(block.shape)
        block.element_ty, (block.shape, block.numel, name) = element, blocks[known]
        block.name = f"<{name}, {element}>"

    def plain(value: Any) -> Any:
        return value if type(value) in (tl.tensor, int, bool, str, None.__class__) else unwrap(value)

    def patch_attr(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        # `builtin` wraps a function to ask for `_semantic`, which is given here.
        inner = getattr(member, "__wrapped__", member)

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*given, **named)

        scope.set_attr(owner, name, call)

    interpreter._get_np_dtype, interpreter._patch_attr = np_dtype, patch_attr
    tl.tensor.__init__, tl.block_type.__init__, tl.core._unwrap_if_constexpr = init, block_init, plain
