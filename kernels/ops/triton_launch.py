"""Launches, again and again: what Triton found out about a kernel's arguments the first time is not found out again.

Triton looks at each argument of each launch (is a pointer a multiple of 16, does a number fit 32 bits) to choose among the
kernel's compiled forms, which for a kernel of thirty arguments takes longer than the launch. Here, where all pointers are
multiples of 16 and all numbers fit, one form is kept for each set of constants. Of a number in a tuple Triton would make a
constant if it is 1, whatever `do_not_specialize` says: a form is compiled with a number in its place that tells nothing.
"""

import functools
from typing import Any

import torch
import triton

from ..constants import ANY_NUMBER


class Prepared(tuple[Any, ...]):
    """A tuple that is launched with again and again: what `_gather` makes of it is kept."""

    @functools.cached_property
    def gathered(self) -> tuple[int, tuple[Any, ...]]:
        """What it has of odd arguments, and its words."""
        words: list[Any] = []
        return _gather(tuple(self), words), tuple(words)


_INTERPRETED = bool(triton.knobs.runtime.interpret)
_compiled: dict[tuple[Any, ...], Any] = {}


def _gather(values: Any, words: list[Any]) -> int:
    """Append what a compiled kernel takes, pointers as numbers; return 0 if all are as kept forms have them."""
    odd = 0
    for value in values:
        if type(value) is Prepared:
            its_odd, its_words = value.gathered
            odd |= its_odd
            words.append(its_words)
        elif type(value) is int:
            odd |= value >> 31
            words.append(value)
        elif type(value) is tuple:
            of_tuple: list[Any] = []
            odd |= _gather(value, of_tuple)
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
    if _INTERPRETED or _gather(arguments, words):
        kernel[(programs,)](*_plain(arguments), **constants, num_warps=num_warps, **options)
        return
    key = (kernel.fn, num_warps, torch.cuda.current_device(), *constants.values())
    found = _compiled.get(key)
    if found is None:
        form = kernel.warmup(
            *_plain(arguments, numbers=False), grid=(programs,), **constants, num_warps=num_warps, **options
        )
        found = _compiled[key] = form, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    form, rest = found
    form[(programs, 1, 1)](*words, *rest)


def _plain(arguments: tuple[Any, ...], *, numbers: bool = True, inner: bool = False) -> tuple[Any, ...]:
    """Return arguments as Triton takes them; without `numbers` those in tuples are any."""
    return tuple(
        _plain(value, numbers=numbers, inner=True)
        if isinstance(value, tuple)
        else ANY_NUMBER
        if inner and not numbers and type(value) is int
        else value
        for value in arguments
    )
