"""Between Python and the CUDA driver: two instructions a parameter, where packing and calling by ctypes takes thousands."""

import functools
from collections.abc import Callable, Sequence
from typing import Final

from .builtin_calls import Method, api, builtin, method

Place = tuple[int, int]  # of a parameter: its offset and size in bytes

_TYPES: Final = {4: "i32", 8: "i64"}


def filler(places: Sequence[Place]) -> Callable[[int], Callable[..., None]]:
    """Return what makes, for the address of a launch's parameters, a function that stores a number in each of `places`.

    The function raises a `TypeError` for anything but integers, a `SystemError` for another number of them, or for one
    that does not fit its place. Whoever calls it keeps the memory.

    Raises:
        ImportError: there is no llvmlite.
        RuntimeError: LLVM does not make the code.
    """
    return functools.partial(builtin, _filling(tuple(places)))


def launcher(launch: int) -> Callable[[int], Callable[[int], int]]:
    """Return what makes, for the address of four words, a function that launches on a stream and returns the error.

    Args:
        launch: the address of `cuLaunchKernelEx`. The four words are those of its parameters: addresses of the
            configuration, of the kernel and of the kernel's parameters in either form. The stream is stored in the
            configuration, 32 bytes behind its begin.

    Raises:
        ImportError: there is no llvmlite.
        RuntimeError: LLVM does not make the code.
    """
    return functools.partial(builtin, _launching(launch))


@functools.cache
def _filling(places: tuple[Place, ...]) -> Method:
    lines = []
    for number, (offset, size) in enumerate(places):
        kind = _TYPES[size]
        lines += [
            f"  %p{number} = getelementptr ptr, ptr %args, i64 {number}",
            f"  %o{number} = load ptr, ptr %p{number}",
            f"  %v{number} = call i64 {api('PyLong_AsUnsignedLongLongMask')}(ptr %o{number})",
            f"  %a{number} = getelementptr i8, ptr %to, i64 {offset}",
        ]
        if size == 8:
            lines += [f"  store i64 %v{number}, ptr %a{number}", f"  %b{number} = add i64 0, 0"]
        else:
            lines += [
                f"  %t{number} = trunc i64 %v{number} to {kind}",
                f"  store {kind} %t{number}, ptr %a{number}",
                f"  %s{number} = sext {kind} %t{number} to i64",
                f"  %b{number} = xor i64 %s{number}, %v{number}",
            ]
        before = f"%w{number - 1}" if number else "0"
        lines.append(f"  %w{number} = or i64 {before}, %b{number}")
    return method(
        "fill",
        f"""
  %to = call ptr {api("PyLong_AsVoidPtr")}(ptr %self)
  %given = icmp eq i64 %count, {len(places)}
  br i1 %given, label %take, label %refuse
take:
{chr(10).join(lines)}
  %raised = call ptr {api("PyErr_Occurred")}()
  %none_raised = icmp eq ptr %raised, null
  %fits = icmp eq i64 %w{len(places) - 1}, 0
  %good = and i1 %none_raised, %fits
  br i1 %good, label %done, label %refuse
done:
  call void {api("Py_IncRef")}(ptr inttoptr (i64 {id(None)} to ptr))
  ret ptr inttoptr (i64 {id(None)} to ptr)
refuse:
  ret ptr null
""",
    )


@functools.cache
def _launching(launch: int) -> Method:
    words = "\n".join(
        f"  %p{number} = getelementptr ptr, ptr %to, i64 {number}\n  %w{number} = load ptr, ptr %p{number}"
        for number in range(4)
    )
    return method(
        "fire",
        f"""
  %to = call ptr {api("PyLong_AsVoidPtr")}(ptr %self)
  %given = icmp eq i64 %count, 1
  br i1 %given, label %take, label %refuse
take:
{words}
  %o = load ptr, ptr %args
  %stream = call i64 {api("PyLong_AsUnsignedLongLongMask")}(ptr %o)
  %raised = call ptr {api("PyErr_Occurred")}()
  %none_raised = icmp eq ptr %raised, null
  br i1 %none_raised, label %launch, label %refuse
launch:
  %at = getelementptr i8, ptr %w0, i64 32
  store i64 %stream, ptr %at
  %error = call i32 inttoptr (i64 {launch} to ptr)(ptr %w0, ptr %w1, ptr %w2, ptr %w3)
  %wide = sext i32 %error to i64
  %result = call ptr {api("PyLong_FromLong")}(i64 %wide)
  ret ptr %result
refuse:
  ret ptr null
""",
    )
