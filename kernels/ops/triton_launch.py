"""Launches, again and again: what Triton found out about a kernel's arguments the first time is not found out again.

Triton looks at each argument of each launch (is a pointer a multiple of 16, does a number fit 32 bits) to choose among the
kernel's compiled forms, which for a kernel of thirty arguments takes longer than the launch. Here, where all pointers are
multiples of 16 and all numbers fit, one form is kept for each set of constants.
"""

from typing import Any

import torch
import triton

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_compiled: dict[tuple[Any, ...], Any] = {}


def _gather(values: Any, words: list[Any], shapes: list[int], *, inner: bool = False) -> int:
    """Append what a compiled kernel takes, pointers as numbers; return 0 if all are as kept forms have them.

    `shapes` gets what forms differ in: Triton makes a constant of a 1 in a tuple, whatever `do_not_specialize` says, and
    takes note of multiples of 16.
    """
    odd = 0
    for value in values:
        if type(value) is int:
            odd |= value >> 31
            words.append(value)
            if inner:
                shapes.append((value == 1) * 2 + (value % 16 == 0))
        elif type(value) is tuple:
            of_tuple: list[Any] = []
            odd |= _gather(value, of_tuple, shapes, inner=True)
            words.append(tuple(of_tuple))
        else:
            address = value.data_ptr()
            odd |= address & 15
            words.append(address)
    return odd


def launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], *, num_warps: int, **options: Any
) -> None:
    """Launch `kernel` in `programs` programs on the current device.

    `arguments`: tensors, ints and tuples of them, as the signature has them; `constants`: the constexprs that follow. Ints
    must be under the kernel's `do_not_specialize`, dtypes and the tuples' lengths the same for the same constants; `options`
    are Triton's, the same for each launch of a kernel.
    """
    if _INTERPRETED:
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, **options)
        return
    words: list[Any] = []
    shapes: list[int] = []
    if _gather(arguments, words, shapes):
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, **options)
        return
    key = (kernel.fn, num_warps, torch.cuda.current_device(), *shapes, *constants.values())
    found = _compiled.get(key)
    if found is None:
        form = kernel[(programs,)](*arguments, **constants, num_warps=num_warps, **options)
        _compiled[key] = form, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        return
    form, rest = found
    form[(programs, 1, 1)](*words, *rest)
