"""Compiled loops without their compiler: machine code that was made before, kept on disk and run through LLVM alone.

Importing numba and waking its type system takes longer than replaying a small trace, and a loop compiled on an earlier
day needs neither. Machine code has an entry that reads its arguments where CPython and numpy keep them, and checks each;
`caller` gives back a function that calls it, with the GIL released, and raises for what does not fit.
"""

import contextlib
import ctypes
import functools
import hashlib
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

# What an entry answers where it did not run the loop; numba's own codes are 0 (done), -2 (done, None) and errors.
_UNFIT: Final = 77
_DONE: Final = (0, -2)

# Where CPython and numpy keep what an entry reads: offsets in bytes behind an object's header.
_HEADER: Final = object.__basicsize__
_TUPLE_ITEMS: Final = tuple.__basicsize__
_TUPLE_SIZE: Final = _HEADER
_DATA, _NDIM, _SHAPE, _STRIDES, _DTYPE, _FLAGS = (_HEADER + offset for offset in (0, 8, 16, 24, 40, 48))
_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x1, 0x100, 0x400
_DTYPES: Final = ("int64", "uint64", "int32", "uint32", "uint8")

# All that machine code may ask of the process; the loops allocate nothing.
SYMBOLS: Final = frozenset({"memcpy", "memset", "memmove", "bcmp", "memcmp"})
_SUM_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What a loop's array parameter must be: dtype name, dimensions, whether it is written, whether C-contiguous."""

    dtype: str
    ndim: int
    written: bool
    packed: bool = False


# A parameter: None for an int64, an array, or those of a named tuple.
Parameter = ArraySpec | None | list[Any]


def read(path: Path) -> bytes | None:
    """Return the machine code in a file, or None if there is none that is whole."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    code = stored[_SUM_BYTES:]
    return code if hashlib.sha256(code).digest() == stored[:_SUM_BYTES] else None


def keep(path: Path, code: bytes) -> None:
    """Write machine code to a file, if that can be done."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(hashlib.sha256(code).digest() + code)
            file.close()
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink()


def machine_name() -> str:
    """Return what machine code with its entry depends on: LLVM's version, the CPU and all it can, and Python's layout.

    Several Pythons may share a folder, and where one keeps a tuple's items another has its hash.
    """
    import llvmlite
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    python = f"{sys.implementation.cache_tag}{sys.abiflags} {_HEADER} {_TUPLE_ITEMS}"
    return " ".join((python, llvmlite.__version__, llvm.get_process_triple(), llvm.get_host_cpu_name(), features))


def caller(code: bytes, name: str, parameters: Sequence[Parameter]) -> Callable[..., Any] | None:
    """Return what calls the machine code of the loops `name`, with the GIL released; None if it cannot be linked.

    A call raises `TypeError` for what a parameter does not take, `ArithmeticError` if the loops divide by zero.
    """
    if not _laid_out_so():
        raise NotImplementedError("arrays of this Python and numpy lie otherwise in memory; use backend='reference'")
    entry = _entry(code, entry_name(name))
    if entry is None:
        return None
    places = [index for index, parameter in enumerate(parameters) if parameter is None]
    pack = struct.Struct(f"={len(places)}q").pack
    count, types = len(parameters), _types()
    named_tuples = [index for index, parameter in enumerate(parameters) if isinstance(parameter, list)]
    one = places[0] if len(places) == 1 else -1
    pick: Callable[..., Any] = itemgetter(*places) if len(places) > 1 else lambda _: ()

    def run(*args: Any) -> None:
        if len(args) != count:
            raise TypeError(f"{name} takes {count} arguments, not {len(args)}")
        try:
            numbers = pack(args[one]) if one >= 0 else pack(*pick(args))
        except struct.error:
            raise TypeError(f"{name}: {pick(args)} are not all 64-bit integers") from None
        answer = entry(types, _plain(args, named_tuples), numbers)
        if answer == _UNFIT:
            answer = entry(
                types, _plain([_fitted(*given) for given in zip(args, parameters, strict=True)], named_tuples), numbers
            )
        if answer == _UNFIT:
            raise TypeError(f"{name}: {_described(args)} are not what its parameters take")
        if answer not in _DONE:
            raise ArithmeticError(f"{name} divides by zero")

    return run


def _fitted(value: Any, parameter: Parameter) -> Any:
    """Return an array as a plain one of the very type object that entries know; other values as they are."""
    if isinstance(parameter, list):
        fields = isinstance(value, tuple) and len(value) == len(parameter)
        return tuple(map(_fitted, value, parameter)) if fields else value
    if parameter is None or not isinstance(value, np.ndarray) or value.dtype != np.dtype(parameter.dtype):
        return value
    return np.asarray(value).view(np.dtype(parameter.dtype))


def _described(args: Sequence[Any]) -> str:
    return ", ".join(
        f"{one.dtype}{list(one.shape)}" if isinstance(one, np.ndarray) else type(one).__name__ for one in args
    )


def _plain(args: Sequence[Any], named_tuples: list[int]) -> tuple[Any, ...]:
    """Return the arguments with named tuples as tuples, which is the type that an entry knows."""
    plain = list(args)
    for index in named_tuples:
        if isinstance(plain[index], tuple):
            plain[index] = tuple(plain[index])
    return tuple(plain)


@functools.cache
def _types() -> Any:
    """Return the addresses of the types that entries compare with, in the order of `_type_index`."""
    known = [np.ndarray, tuple, *map(np.dtype, _DTYPES)]
    return (ctypes.c_void_p * len(known))(*map(id, known))


@functools.cache
def _laid_out_so() -> bool:
    """Return whether an array's and a tuple's fields lie where entries look for them."""
    array = np.zeros((3, 5), np.int64)[:, ::2]
    shape, strides = ((ctypes.c_int64 * 2)(*numbers) for numbers in (array.shape, array.strides))
    if id(array.dtype) != id(np.dtype("int64")) or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    at = id(array)
    found = [ctypes.c_void_p.from_address(at + offset).value or 0 for offset in (_DATA, _SHAPE, _STRIDES, _DTYPE)]
    flags = ctypes.c_int32.from_address(at + _FLAGS).value
    given = (array,)
    return (
        found[0] == array.ctypes.data
        and ctypes.c_int32.from_address(at + _NDIM).value == 2
        and ctypes.string_at(found[1], 16) == bytes(shape)
        and ctypes.string_at(found[2], 16) == bytes(strides)
        and found[3] == id(array.dtype)
        and flags & (_ALIGNED | _WRITEABLE) == _ALIGNED | _WRITEABLE
        and ctypes.c_int64.from_address(id(given) + _TUPLE_SIZE).value == 1
        and ctypes.c_void_p.from_address(id(given) + _TUPLE_ITEMS).value == at
    )


# What holds the code that entries run, the last one open for more, and the entries in that.
_engines: Final[list[Any]] = []
_entries: Final[set[str]] = set()


def _entry(code: bytes, name: str) -> Callable[..., int] | None:
    """Link machine code into this process, and return its entry."""
    import llvmlite.binding as llvm

    try:
        if not _engines or name in _entries:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
            _engines.append(llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine))
            _entries.clear()
        _entries.add(name)
        _engines[-1].add_object_file(llvm.ObjectFileRef.from_data(code))
        _engines[-1].finalize_object()
        address = _engines[-1].get_function_address(name)
    except RuntimeError:
        return None
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return kind(address) if address else None


def entry_name(name: str) -> str:
    """Return what the entry of loops is called."""
    return f"kvcanary.{name}"


def _type_index(name: str) -> int:
    return ("ndarray", "tuple", *_DTYPES).index(name)


def entry_source(function: str, entry: str, parameters: Sequence[Parameter]) -> str:
    """Return the entry's LLVM source: `int32 entry(types, args, numbers)`.

    `types` holds the addresses of known types, `args` is the tuple of arguments, `numbers` the int64 ones of them.
    """
    lines: list[str] = []
    given: list[str] = []
    names = (f"%v{number}" for number in range(1 << 30))

    def load_at(pointer: str, offset: int, kind: str) -> str:
        place, value = next(names), next(names)
        lines.append(f"  {place} = getelementptr i8, ptr {pointer}, i64 {offset}")
        lines.append(f"  {value} = load {kind}, ptr {place}")
        return value

    def require(kind: str, value: str, expected: str) -> None:
        fits, label = next(names), next(names)[1:]
        lines.append(f"  {fits} = icmp eq {kind} {value}, {expected}")
        lines.append(f"  br i1 {fits}, label %{label}, label %unfit")
        lines.append(f"{label}:")

    def require_type(thing: str, offset: int, name: str) -> None:
        require("ptr", load_at(thing, offset, "ptr"), load_at("%types", 8 * _type_index(name), "ptr"))

    def array(spec: ArraySpec, thing: str) -> None:
        require_type(thing, _HEADER - 8, "ndarray")
        require_type(thing, _DTYPE, spec.dtype)
        require("i32", load_at(thing, _NDIM, "i32"), str(spec.ndim))
        wanted = _ALIGNED | (_WRITEABLE if spec.written else 0) | (_CONTIGUOUS if spec.packed else 0)
        masked = next(names)
        lines.append(f"  {masked} = and i32 {load_at(thing, _FLAGS, 'i32')}, {wanted}")
        require("i32", masked, str(wanted))
        shape, strides = load_at(thing, _SHAPE, "ptr"), load_at(thing, _STRIDES, "ptr")
        lengths = [load_at(shape, 8 * axis, "i64") for axis in range(spec.ndim)]
        data = load_at(thing, _DATA, "ptr")
        given.append(f"ptr {data}")
        given.extend(f"i64 {length}" for length in lengths)
        if not spec.packed:
            given.extend(f"i64 {load_at(strides, 8 * axis, 'i64')}" for axis in range(spec.ndim))

    numbers = 0
    for index, parameter in enumerate(parameters):
        if parameter is None:
            given.append(f"i64 {load_at('%numbers', 8 * numbers, 'i64')}")
            numbers += 1
            continue
        thing = load_at("%args", _TUPLE_ITEMS + 8 * index, "ptr")
        if not isinstance(parameter, list):
            array(parameter, thing)
            continue
        require_type(thing, _HEADER - 8, "tuple")
        require("i64", load_at(thing, _TUPLE_SIZE, "i64"), str(len(parameter)))
        for item, spec in enumerate(parameter):
            array(spec, load_at(thing, _TUPLE_ITEMS + 8 * item, "ptr"))
    declared = [text.split()[0] for text in given]
    return "\n".join(
        [
            f'declare i32 @"{function}"(ptr, ptr, {", ".join(declared)})',
            f'define i32 @"{entry}"(ptr %types, ptr %args, ptr %numbers) {{',
            "begin:",
            "  %result = alloca ptr",
            "  %error = alloca ptr",
            "  store ptr null, ptr %result",
            *lines,
            f'  %code = call i32 @"{function}"(ptr %result, ptr %error, {", ".join(given)})',
            "  ret i32 %code",
            "unfit:",
            f"  ret i32 {_UNFIT}",
            "}",
            "",
        ]
    )
