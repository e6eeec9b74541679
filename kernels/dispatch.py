"""One definition, several backends: run an op's plain loops as they stand, compile those very loops with numba, or launch
their Triton form on torch tensors.

An op is a module-level function of plain loops. Its array parameters are annotated with the types below, from which
the one compiled signature is made: strides are free, inputs may be read-only (memory-mapped), so that no layout ever
triggers a second compilation. Functions that loops call are marked with `@primitive`. numba is imported at the first
use of the "cpu" backend, never before.
"""

import hashlib
import importlib
import os
import threading
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

BACKENDS: Final = ("reference", "cpu", "triton")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What a loop's array parameter must be: dtype name, number of dimensions, whether it is written."""

    dtype: str
    ndim: int
    written: bool


@dataclass(frozen=True, slots=True)
class TupleSpec:
    """What a loop's parameter of several arrays of one kind must be; who has fewer passes empty ones behind them."""

    item: ArraySpec
    length: int


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

# Each primitive with the body that replaces it in compiled code (None: its own).
_PRIMITIVES: Final[list[tuple[Callable[..., Any], Callable[..., Any] | None]]] = []
_registered = 0
_compiled: Final[dict[Callable[..., Any], Callable[..., Any]]] = {}
_compile_lock: Final = threading.RLock()


def primitive(compiled: Callable[..., Any] | None = None) -> Callable[[_F], _F]:
    """Mark a function that loops may call, in both backends from the same source.

    `compiled` replaces the body in compiled code; it is for the few primitives that say how 64-bit words behave
    (`hashing.as_u64` and its like), where Python's unbounded ints need a mask and machine words do not.
    """

    def mark(function: _F) -> _F:
        _PRIMITIVES.append((function, compiled))
        return function

    return mark


def device_form(name: str) -> Any:
    """Return the module `gpu.<name>`, which does for torch tensors what module `name` does for arrays.

    Triton (and with it torch) is imported here, at the first launch, never before.
    """
    return importlib.import_module(f".gpu.{name}", __package__)


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


def _compile(loops: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `loops` for its one signature, or load it from the disk cache."""
    import numba
    from numba.core import config

    with _compile_lock:
        if loops in _compiled:
            return _compiled[loops]
        _register_primitives(numba)
        signature = _signature(loops, numba.types)
        before = config.CACHE_DIR
        folder = _cache_folder(numba.__version__, before)
        # numba reads the folder when the function is decorated. It is put back at once, so that another package's
        # compiled functions in this process (an engine's) keep their own place.
        config.CACHE_DIR = str(folder) if folder else ""
        try:
            function: Callable[..., Any] = numba.njit([signature], cache=folder is not None, nogil=True)(loops)
        finally:
            config.CACHE_DIR = before
        _compiled[loops] = function
        return function


def _register_primitives(numba: Any) -> None:
    """Make every primitive that was marked since the last call callable from compiled code."""
    global _registered
    while _registered < len(_PRIMITIVES):
        function, compiled = _PRIMITIVES[_registered]
        if compiled is None:
            numba.extending.register_jitable(function)
        else:
            numba.extending.overload(function, strict=False)(_always(compiled))
        _registered += 1


def _always(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_types: body


def _signature(loops: Callable[..., Any], types: Any) -> Any:
    """Build the compiled signature from the parameters' annotations; any stride, read-only where not written."""
    hints = typing.get_type_hints(loops, include_extras=True)
    returns = hints.pop("return")
    if returns is not type(None):
        raise TypeError(f"{loops.__name__} returns {returns}, expected None: loops fill preallocated arrays")
    arguments = []
    for name, hint in hints.items():
        spec = hint.__metadata__[0] if typing.get_origin(hint) is Annotated else None
        if hint is int:
            arguments.append(types.int64)
        elif isinstance(spec, ArraySpec):
            arguments.append(_array_type(spec, types))
        elif isinstance(spec, TupleSpec):
            arguments.append(types.UniTuple(_array_type(spec.item, types), spec.length))
        else:
            raise TypeError(f"{loops.__name__}: parameter {name} has type {hint}, expected int or an array type")
    return types.void(*arguments)


def _array_type(spec: ArraySpec, types: Any) -> Any:
    return types.Array(getattr(types, spec.dtype), spec.ndim, "A", readonly=not spec.written, aligned=True)


def _cache_folder(numba_version: str, user_choice: str) -> Path | None:
    """Return a writable folder for compiled code, or None where there is none (then each process compiles anew).

    numba's own key for a cached function is its file's date and size, which misses a change in a function that it
    calls; so the folder's name is a digest of every source file of this package. It lies in `user_choice`
    (`NUMBA_CACHE_DIR`) where that is set, else beside the package, else in the user's cache.
    """
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256(numba_version.encode())
    for source in sorted(here.rglob("*.py")):
        digest.update(str(source.relative_to(here)).encode() + b"\0" + source.read_bytes() + b"\0")
    user_cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    parents = [Path(user_choice)] if user_choice else [here / "__pycache__", Path(user_cache) / "kvcanary"]
    for parent in parents:
        folder = parent / f"numba-{digest.hexdigest()[:16]}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None
