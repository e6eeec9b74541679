"""Launches, again and again: what Triton found out about a kernel's arguments the first time is not found out again.

Triton looks at each argument of each launch (is a pointer a multiple of 16, does a number fit 32 bits) to choose among the
kernel's compiled forms, which for a kernel of thirty arguments takes longer than the launch. Here, where all pointers are
multiples of 16 and all numbers fit, one form is kept for each set of constants.
"""

import functools
from typing import Any

import torch
import triton


class Prepared(tuple[Any, ...]):
    """A tuple that is launched with again and again: what `_gather` makes of it is kept."""

    @functools.cached_property
    def gathered(self) -> tuple[int, tuple[Any, ...], tuple[int, ...]]:
        """What it has of odd arguments, its words, and what forms differ in."""
        words: list[Any] = []
        shapes: list[int] = []
        odd = _gather(tuple(self), words, shapes, inner=True)
        return odd, tuple(words), tuple(shapes)


_INTERPRETED = bool(triton.knobs.runtime.interpret)
_compiled: dict[tuple[Any, ...], Any] = {}


def _gather(values: Any, words: list[Any], shapes: list[int], *, inner: bool = False) -> int:
    """Append what a compiled kernel takes, pointers as numbers; return 0 if all are as kept forms have them.

    `shapes` gets what forms differ in: Triton makes a constant of a 1 in a tuple, whatever `do_not_specialize` says, and
    takes note of multiples of 16.
    """
    odd = 0
    for value in values:
        if type(value) is Prepared:
            its_odd, its_words, its_shapes = value.gathered
            odd |= its_odd
            words.append(its_words)
            shapes.extend(its_shapes)
        elif type(value) is int:
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


def cdiv(number: int, by: int) -> int:
    """How often `by` goes into a number, rounded up; Triton's own, made for kernels, takes its time on the host."""
    return -(-number // by)


def launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], *, num_warps: int, **options: Any
) -> None:
    """Launch `kernel` in `programs` programs on the current device.

    `arguments`: tensors, ints and tuples of them, as the signature has them; `constants`: the constexprs that follow. Ints
    must be under the kernel's `do_not_specialize`, dtypes and the tuples' lengths the same for the same constants; `options`
    are Triton's, the same for each launch of a kernel.
    """
    words: list[Any] = []
    shapes: list[int] = []
    if _INTERPRETED or _gather(arguments, words, shapes):
        kernel[(programs,)](*_plain(arguments), **constants, num_warps=num_warps, **options)
        return
    key = (kernel.fn, num_warps, torch.cuda.current_device(), *shapes, *constants.values())
    found = _compiled.get(key)
    if found is None:
        form = kernel[(programs,)](*_plain(arguments), **constants, num_warps=num_warps, **options)
        _compiled[key] = form, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        return
    form, rest = found
    form[(programs, 1, 1)](*words, *rest)


def _plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_plain(value) if isinstance(value, tuple) else value for value in arguments)
