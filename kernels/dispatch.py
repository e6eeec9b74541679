"""One definition, several backends: run an op's plain loops as they stand, compile those very loops with numba, or launch
their Triton form on torch tensors.

An op is a module-level function of plain loops. Its array parameters are annotated with the types below, from which
the one compiled signature is made: strides are free (but see `packed`), inputs may be read-only (memory-mapped), so
that no layout ever triggers a second compilation. Functions that loops call are marked with `@primitive`. numba is
imported at the first use of the "cpu" backend, never before.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import os
import sys
import threading
import typing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from . import native
from .user_cache import is_own, user_cache

_log = logging.getLogger("kvcanary")

BACKENDS: Final = ("reference", "cpu", "triton")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What a loop's array parameter must be: dtype name, dimensions, whether it is written, whether C-contiguous."""

    dtype: str
    ndim: int
    written: bool
    packed: bool = False


In64 = Annotated[npt.NDArray[np.int64], ArraySpec("int64", 1, False)]
Out64 = Annotated[npt.NDArray[np.int64], ArraySpec("int64", 1, True)]
In64x2 = Annotated[npt.NDArray[np.int64], ArraySpec("int64", 2, False)]
Out64x2 = Annotated[npt.NDArray[np.int64], ArraySpec("int64", 2, True)]
InU64x2 = Annotated[npt.NDArray[np.uint64], ArraySpec("uint64", 2, False)]
InU64 = Annotated[npt.NDArray[np.uint64], ArraySpec("uint64", 1, False)]
OutU64x2 = Annotated[npt.NDArray[np.uint64], ArraySpec("uint64", 2, True)]
In32 = Annotated[npt.NDArray[np.int32], ArraySpec("int32", 1, False)]
Out32 = Annotated[npt.NDArray[np.int32], ArraySpec("int32", 1, True)]
In32x2 = Annotated[npt.NDArray[np.int32], ArraySpec("int32", 2, False)]
Out32x2 = Annotated[npt.NDArray[np.int32], ArraySpec("int32", 2, True)]
In8 = Annotated[npt.NDArray[np.uint8], ArraySpec("uint8", 1, False)]
Out8 = Annotated[npt.NDArray[np.uint8], ArraySpec("uint8", 1, True)]
In8x2 = Annotated[npt.NDArray[np.uint8], ArraySpec("uint8", 2, False)]
Out8x2 = Annotated[npt.NDArray[np.uint8], ArraySpec("uint8", 2, True)]

_F = TypeVar("_F", bound=Callable[..., Any])

# What makes each primitive callable from compiled code, given numba.
_PRIMITIVES: Final[list[Callable[[Any], None]]] = []
_PACKED: Final[set[Callable[..., Any]]] = set()
_registered = 0
_telling: Final[dict[Callable[..., Any], Callable[[], None]]] = {}
_compiled: Final[dict[Callable[..., Any], Callable[..., Any]]] = {}
_compile_lock: Final = threading.RLock()


def primitive(compiled: Callable[..., Any] | None = None, *, inlined: bool = False) -> Callable[[_F], _F]:
    """Mark a function that loops may call, in both backends from the same source.

    `compiled` replaces the body in compiled code; it is for the few primitives that say how 64-bit words behave
    (`hashing.as_u64` and its like), where Python's unbounded ints need a mask and machine words do not.
    `inlined` has the compiler put the body in place of every call. It is for what is called once a token and is given
    arrays, each of which is seven words or more on the stack: a call can cost more than the body.
    """

    def mark(function: _F) -> _F:
        def register(numba: Any) -> None:
            if compiled is None:
                numba.extending.register_jitable(forceinline=inlined)(function)
            else:
                numba.extending.overload(function, strict=False)(_always(compiled))

        _PRIMITIVES.append(register)
        return function

    return mark


def register_with_numba(register: Callable[[Any], None]) -> None:
    """Have `register(numba)` called before loops are compiled, for a primitive that says how it is compiled itself."""
    _PRIMITIVES.append(register)


def packed(loops: _F) -> _F:
    """Mark large loops whose arrays must all be C-contiguous, and whose primitives return none: no strides to multiply
    with, and none of numba's reference counts, atomic ones around every call that passes an array.
    """
    _PACKED.add(loops)
    return loops


@functools.cache
def device_form(name: str) -> Any:
    """Return the module `ops.<name>`, which does for torch tensors what the op's `reference` does for arrays.

    Triton (and with it torch) is imported here, at the first launch, never before.
    """
    return importlib.import_module(f".ops.{name}", __package__)


def select(loops: _F, backend: str) -> _F:
    """Return what runs `loops` on `backend`.

    "reference" gives the loops back, "cpu" their compiled form (made at first use, kept on disk). Raises `ValueError`
    for an unknown backend and `NotImplementedError` for "triton": an op that has such a form never comes here with it.
    """
    if backend == "cpu":
        ready = _compiled.get(loops)
        return typing.cast(_F, ready if ready is not None else _compile(loops))
    if backend == "reference":
        return loops
    if backend == "triton":
        raise NotImplementedError(f"{loops.__name__} has no Triton form; use backend='cpu' with numpy arrays")
    raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")


def select_telling(loops: _F, backend: str, tell: Callable[[], None]) -> _F:
    """Return what `select` returns; `tell` is called before it is compiled, where that was never done on this machine.

    For loops so large that a user wonders what is going on.
    """
    _telling[loops] = tell
    try:
        return select(loops, backend)
    finally:
        del _telling[loops]


def is_kept(loops: Callable[..., Any]) -> bool:
    """Return whether the machine code of `loops` lies on the disk, where `select` finds it."""
    path = _machine_code_path(loops)
    return path is not None and path.exists()


def _compile(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Load the machine code of `loops` from the disk, or compile it for its one signature and keep it there."""
    with _compile_lock:
        if loops in _compiled:
            return _compiled[loops]
        path = _machine_code_path(loops)
        function = None
        if path is not None:
            function = native.load(path, path.stem, parameters_of(loops), lambda: numba_caller(loops))
        if function is None:
            if path is not None:
                native.keep(path, path.stem, numba_form(loops), parameters_of(loops))
            function = numba_caller(loops)
        _compiled[loops] = function
        return function


@functools.cache
def numba_form(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `loops` with numba, or load what numba keeps of it."""
    numba = import_numba()
    from numba.core import config

    with _compile_lock:
        _register_primitives(numba)
        signature = _signature(loops, numba.types)
        before = config.CACHE_DIR
        folder = cache_folder(numba.__version__, before)
        # numba reads the folder when the function is decorated. It is put back at once, so that another package's
        # compiled functions in this process (an engine's) keep their own place.
        config.CACHE_DIR = str(folder) if folder else ""
        try:
            compiler = numba.njit([signature], cache=folder is not None, nogil=True, _nrt=loops not in _PACKED)
            with _told(loops):
                function: Callable[..., Any] = compiler(loops)
        finally:
            config.CACHE_DIR = before
        return function


def numba_caller(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Return numba's form, called with named tuples of arrays of any layout: numba converts arrays, but none in a tuple."""
    function, parameters = numba_form(loops), parameters_of(loops)
    if not any(isinstance(parameter, list) for parameter in parameters):
        return function

    def run(*args: Any) -> None:
        given = list(args)
        for index, parameter in enumerate(parameters):
            if isinstance(parameter, list):
                arrays = zip(args[index], parameter, strict=True)
                given[index] = type(args[index])(*(_as_declared(array, spec) for array, spec in arrays))
        function(*given)

    return run


def _as_declared(array: npt.NDArray[Any], spec: native.Array) -> npt.NDArray[Any]:
    """Return a field of a named tuple as its type says: contiguous, and read-only if it is not written."""
    if not spec.written:
        array = np.ascontiguousarray(array).view()
        array.flags.writeable = False
    return array


def import_numba() -> Any:
    """Import numba, unless an engine has, so that nothing of the current folder configures it.

    numba takes settings from a file there, the place of its cache among them, out of which it unpickles.
    """
    if "numba" not in sys.modules:
        yaml = sys.modules.get("yaml")
        sys.modules["yaml"] = None  # type: ignore[assignment]  # without it numba reads no such file
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says so
                config: Any = importlib.import_module("numba.core.config")
        finally:
            del sys.modules["yaml"]
            if yaml is not None:
                sys.modules["yaml"] = yaml
        config._config_fname = os.devnull  # no regular file: not looked at again
    return importlib.import_module("numba")


@contextlib.contextmanager
def _told(loops: Callable[..., Any]) -> Iterator[None]:
    """Call what `select_telling` was given once numba begins to compile `loops`, which it had not kept."""
    if loops not in _telling:
        yield
        return
    tell = _telling[loops]
    from numba.core import event

    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            if event.data["dispatcher"].py_func is loops:
                tell()

        def on_end(self, event: Any) -> None:
            pass  # numba asks every listener for one

    with event.install_listener("numba:compile", Listener()):
        yield


def _machine_code_path(loops: Callable[..., Any]) -> Path | None:
    """Return where the machine code of `loops` is kept; None for numba's form, which other loops than ours have alone."""
    if not native.usable() or not loops.__module__.startswith(f"{__package__}."):
        return None
    folder = _machine_code_folder(os.environ.get("NUMBA_CACHE_DIR", ""))
    return None if folder is None else folder / f"{loops.__module__.removeprefix(f'{__package__}.')}.{loops.__name__}.o"


@functools.cache
def _machine_code_folder(user_choice: str) -> Path | None:
    """Return the folder for this CPU's machine code in that of compiled code, or None where there is none."""
    try:
        parent = cache_folder(importlib.metadata.version("numba"), user_choice)
        if parent is None:
            return None
        folder = parent / f"native-{hashlib.sha256(native.machine_name().encode()).hexdigest()[:16]}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    return folder


def _register_primitives(numba: Any) -> None:
    """Make every primitive that was marked since the last call callable from compiled code."""
    global _registered
    while _registered < len(_PRIMITIVES):
        _PRIMITIVES[_registered](numba)
        _registered += 1


def _always(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_types: body


def parameters_of(loops: Callable[..., Any]) -> list[native.Parameter]:
    """Return what each parameter must be, from its annotation."""
    hints = typing.get_type_hints(loops, include_extras=True)
    returns = hints.pop("return")
    if returns is not type(None):
        raise TypeError(f"{loops.__name__} returns {returns}, expected None: loops fill preallocated arrays")
    parameters: list[native.Parameter] = []
    for name, hint in hints.items():
        spec = hint.__metadata__[0] if typing.get_origin(hint) is Annotated else None
        if hint is int:
            parameters.append(None)
        elif isinstance(spec, ArraySpec):
            parameters.append(replace(spec, packed=loops in _PACKED))
        elif isinstance(hint, type) and issubclass(hint, tuple):  # a NamedTuple of arrays
            parameters.append([replace(one, packed=True) for one in _array_specs(hint)])
        else:
            raise TypeError(f"{loops.__name__}: parameter {name} has type {hint}, expected int or an array type")
    return parameters


def _array_specs(named_tuple: type) -> list[ArraySpec]:
    hints = typing.get_type_hints(named_tuple, include_extras=True)
    return [hint.__metadata__[0] for hint in hints.values()]


def _signature(loops: Callable[..., Any], types: Any) -> Any:
    """Build the compiled signature from the parameters; any stride unless packed, read-only where not written."""
    arguments = []
    hints = typing.get_type_hints(loops, include_extras=True)
    for parameter, hint in zip(parameters_of(loops), hints.values(), strict=False):  # the last hint is what it returns
        if parameter is None:
            arguments.append(types.int64)
        elif isinstance(parameter, list):
            fields = [_array_type(one, types) for one in parameter]
            alike = len(set(fields)) == 1  # numba has a type of its own for those
            named = types.NamedUniTuple(fields[0], len(fields), hint) if alike else types.NamedTuple(fields, hint)
            arguments.append(named)
        else:
            arguments.append(_array_type(parameter, types))
    return types.void(*arguments)


def _array_type(spec: native.Array, types: Any) -> Any:
    layout = "C" if spec.packed else "A"
    return types.Array(getattr(types, spec.dtype), spec.ndim, layout, readonly=not spec.written, aligned=True)


def cache_folder(numba_version: str, user_choice: str) -> Path | None:
    """Return a writable folder for compiled code, or None where there is none (then each process compiles anew).

    numba's own key for a cached function is its file's date and size, which misses a change in a function that it
    calls; so the folder's name is a digest of every source file of this package. It lies in `user_choice`
    (`NUMBA_CACHE_DIR`) where that is set, else beside the package, else in the user's cache; never where another user
    may have put code.
    """
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256(numba_version.encode())
    for source in sorted(here.rglob("*.py")):
        digest.update(str(source.relative_to(here)).encode() + b"\0" + source.read_bytes() + b"\0")
    parents = [Path(user_choice)] if user_choice else [here / "__pycache__", user_cache()]
    for parent in parents:
        folder = parent / f"numba-{digest.hexdigest()[:16]}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            trusted = is_own(folder.lstat())
        except OSError:
            continue
        if not trusted:
            _log.warning("kvcanary: %s is not used: another user may write to it; compiled code is not kept", folder)
        elif os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None
