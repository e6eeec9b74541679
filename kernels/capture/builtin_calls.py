"""Functions of machine code that Python calls as it calls its own builtin ones.

An engine's thread comes to a recorder's hooks once a step, after its caches have seen a model's worth of other things.
What ctypes, struct and the interpreter touch for a few numbers then takes ten times as long as on a second call. LLVM
makes of a few lines of its language what touches nothing else. Such a function keeps Python's lock, and relies on the C
API alone: objects are seen through its functions, not by where their fields lie.
"""

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence, Sized
from typing import Any, Final

_FASTCALL: Final = 0x80  # METH_FASTCALL: (self, arguments, their number)
_engines: Final[list[Any]] = []  # hold the code


class Method(ctypes.Structure):
    """`PyMethodDef` of the C API."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


def builtin(made: Method, owner: object) -> Callable[..., Any]:
    """Return a builtin function whose `self` is `owner`."""
    make = ctypes.pythonapi.PyCMethod_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p]
    function: Callable[..., Any] = make(ctypes.addressof(made), owner, None, None)
    return function


def api(name: str) -> str:
    """Return a function of Python's C API, as LLVM calls it."""
    address = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    return f"inttoptr (i64 {address} to ptr)"


def method(name: str, body: str) -> Method:
    """Compile a function of `%self`, `%args` and their `%count`, and return what builtin ones are made from, for good.

    Raises:
        ImportError: there is no llvmlite.
        AttributeError: this Python has no such C API.
        RuntimeError: LLVM does not make the code.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(f"define ptr @{name}(ptr %self, ptr %args, i64 %count) {{\nbegin:{body}}}\n")
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True, opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    made = Method(name.encode(), engine.get_function_address(name), _FASTCALL, None)
    _engines.append((engine, made))
    return made


@functools.cache
def lengths() -> Callable[[Sequence[Sized]], bytes]:
    """Return what tells how long each item of a list is, as bytes of int64; by the interpreter where LLVM cannot."""
    try:
        made = _lengths()
    except (ImportError, AttributeError, RuntimeError, OSError):
        return lengths_by_python
    return builtin(made, None)


def lengths_by_python(items: Sequence[Sized]) -> bytes:
    """Return how long each item is, as bytes of int64."""
    return array("q", map(len, items)).tobytes()


def _lengths() -> Method:
    return method(
        "lengths",
        f"""
  %given = icmp eq i64 %count, 1
  br i1 %given, label %take, label %refuse
take:
  %list = load ptr, ptr %args
  %n = call i64 {api("PyList_Size")}(ptr %list)
  %size = mul i64 %n, 8
  %is_list = icmp sge i64 %n, 0
  br i1 %is_list, label %make, label %refuse
make:
  %bytes = call ptr {api("PyBytes_FromStringAndSize")}(ptr null, i64 %size)
  %made = icmp ne ptr %bytes, null
  br i1 %made, label %fill, label %refuse
fill:
  %to = call ptr {api("PyBytes_AsString")}(ptr %bytes)
  br label %loop
loop:
  %i = phi i64 [0, %fill], [%next, %store]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %item, label %done
item:
  %object = call ptr {api("PyList_GetItem")}(ptr %list, i64 %i)
  %there = icmp ne ptr %object, null
  br i1 %there, label %measure, label %fail
measure:
  %length = call i64 {api("PyObject_Size")}(ptr %object)
  %measured = icmp sge i64 %length, 0
  br i1 %measured, label %store, label %fail
store:
  %at = getelementptr i64, ptr %to, i64 %i
  store i64 %length, ptr %at
  %next = add i64 %i, 1
  br label %loop
done:
  ret ptr %bytes
fail:
  call void {api("Py_DecRef")}(ptr %bytes)
  ret ptr null
refuse:
  ret ptr null
""",
    )
