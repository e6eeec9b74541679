"""One definition, several backends: run an op's plain loops as they stand, compile those very loops with numba, or launch
their Triton form on torch tensors.

An op is a module-level function of plain loops. Its array parameters are annotated with the types below, from which
the one compiled signature is made: strides are free (but see `packed`), inputs may be read-only (memory-mapped), so
that no layout ever triggers a second compilation. Functions that loops call are marked with `@primitive`. numba is
imported at the first use of the "cpu" backend, never before.
"""

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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from . import native
from .native import ArraySpec as ArraySpec
from .user_cache import is_own, user_cache

_log = logging.getLogger("kvcanary")

BACKENDS: Final = ("reference", "cpu", "triton")


In64 = Annotated[npt.NDArray[np.int64], ArraySpec("int64", 1, False)]
Out64 = Annotated[npt.NDArray[np.int64], ArraySpec("int64", 1, True)]
In64x2 = Annotated[npt.NDArray[np.int64], ArraySpec("int64", 2, False)]
Out64x2 = Annotated[npt.NDArray[np.int64], ArraySpec("int64", 2, True)]
InU64x2 = Annotated[npt.NDArray[np.uint64], ArraySpec("uint64", 2, False)]
InU64 = Annotated[npt.NDArray[np.uint64], ArraySpec("uint64", 1, False)]
OutU64x2 = Annotated[npt.NDArray[np.uint64], ArraySpec("uint64", 2, True)]
Out32 = Annotated[npt.NDArray[np.int32], ArraySpec("int32", 1, True)]
In32x2 = Annotated[npt.NDArray[np.int32], ArraySpec("int32", 2, False)]
Out32x2 = Annotated[npt.NDArray[np.int32], ArraySpec("int32", 2, True)]
In8 = Annotated[npt.NDArray[np.uint8], ArraySpec("uint8", 1, False)]
Out8 = Annotated[npt.NDArray[np.uint8], ArraySpec("uint8", 1, True)]
In8x2 = Annotated[npt.NDArray[np.uint8], ArraySpec("uint8", 2, False)]
Out8x2 = Annotated[npt.NDArray[np.uint8], ArraySpec("uint8", 2, True)]

_F = TypeVar("_F", bound=Callable[..., Any])

# What makes each primitive callable from compiled code, given the module `compiling`.
_PRIMITIVES: Final[list[Callable[[Any], None]]] = []
_PACKED: Final[set[Callable[..., Any]]] = set()
_registered = 0
_compiled: Final[dict[Callable[..., Any], Callable[..., Any]]] = {}
_compile_lock: Final = threading.RLock()


def primitive(compiled: Callable[..., Any] | None = None, *, inlined: bool = False) -> Callable[[_F], _F]:
    """Mark a function that loops may call, in both backends from the same source.

    `compiled` replaces the body in compiled code; it is for the few primitives that say how 64-bit words behave
    (`hashing.as_u64` and its like), where Python's unbounded ints need a mask and machine words do not.
    `inlined` has the compiler put the body in place of every call, for what is called once a token and is given arrays.
    """

    def mark(function: _F) -> _F:
        body = function if compiled is None else compiled
        _PRIMITIVES.append(lambda compiling: compiling.add_primitive(function, body, inlined=inlined))
        return function

    return mark


def register_compiled(register: Callable[[Any], None]) -> None:
    """Have `register(compiling)` called before loops are compiled, for a primitive that says how it is compiled itself."""
    _PRIMITIVES.append(register)


def packed(loops: _F) -> _F:
    """Mark large loops whose arrays must all be C-contiguous: no strides to hand on and to multiply with."""
    _PACKED.add(loops)
    return loops


@functools.cache
def device_form(name: str) -> Any:
    """Return the module `ops.<name>`, which does for torch tensors what the op's `reference` does for arrays.

    Triton (and with it torch) is imported here, at the first launch, never before.
    """
    return importlib.import_module(f".ops.{name}", __package__)


def has_device_form(module: str) -> Callable[[_F], _F]:
    """Have an op with backend="triton" call the function of its name in `ops.<module>`, with all other arguments."""

    def mark(op: _F) -> _F:
        @functools.wraps(op)
        def run(*, backend: str = "cpu", **given: Any) -> Any:
            if backend == "triton":
                return getattr(device_form(module), op.__name__)(**given)
            return op(**given, backend=backend)

        return typing.cast(_F, run)

    return mark


def select(loops: _F, backend: str, *, before_compiling: Callable[[], None] | None = None) -> _F:
    """Return what runs `loops` on `backend`.

    "reference" gives the loops back, "cpu" their compiled form (made at first use, kept on disk); `before_compiling` is
    called if it has to be made now. Raises `ValueError` for an unknown backend and `NotImplementedError` for "triton": an
    op that has such a form never comes here with it.
    """
    if backend == "cpu":
        ready = _compiled.get(loops)
        return typing.cast(_F, ready if ready is not None else _compile(loops, before_compiling))
    if backend == "reference":
        return loops
    if backend == "triton":
        raise NotImplementedError(f"{loops.__name__} has no Triton form; use backend='cpu' with numpy arrays")
    raise ValueError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")


def prepare(*loops: Callable[..., Any], backend: str) -> None:
    """Compile now what there is to compile, so that nobody waits for it later."""
    for one in loops:
        select(one, backend)


def is_kept(loops: Callable[..., Any]) -> bool:
    """Return whether the machine code of `loops` lies on the disk, where `select` finds it."""
    path = _machine_code_path(loops)
    return path is not None and path.exists()


def _compile(loops: Callable[..., Any], before_compiling: Callable[[], None] | None) -> Callable[..., Any]:
    """Load the machine code of `loops` from the disk, or compile it for its one signature and keep it there."""
    with _compile_lock:
        if loops in _compiled:
            return _compiled[loops]
        name, parameters = name_of(loops), parameters_of(loops)
        path = _machine_code_path(loops)
        code = None if path is None else native.read(path)
        function = None if code is None else native.caller(code, name, parameters)
        if function is None:
            if before_compiling is not None:
                before_compiling()
            code = object_code(loops)
            function = native.caller(code, name, parameters)
            if function is None:
                raise RuntimeError(f"LLVM cannot link the code that it made of {name}")
            if path is not None:
                native.keep(path, code)
        _compiled[loops] = function
        return function


def object_code(loops: Callable[..., Any]) -> bytes:
    """Compile `loops` with numba and LLVM, now."""
    global _registered
    import_numba()
    compiling: Any = importlib.import_module(".compiling", __package__)
    while _registered < len(_PRIMITIVES):
        _PRIMITIVES[_registered](compiling)
        _registered += 1
    parameters, entry = parameters_of(loops), native.entry_name(name_of(loops))
    arguments = [compiling.argument_type(hint, packed=loops in _PACKED) for hint in _hints(loops).values()]
    source = functools.partial(native.entry_source, entry=entry, parameters=parameters)
    code: bytes = compiling.object_code(loops, arguments, source, native.SYMBOLS)
    return code


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


def _machine_code_path(loops: Callable[..., Any]) -> Path | None:
    """Return where the machine code of `loops` is kept; None if it is not, as that of other loops than ours."""
    if not loops.__module__.startswith(f"{__package__}."):
        return None
    folder = _machine_code_folder(os.environ.get("NUMBA_CACHE_DIR", ""))
    return None if folder is None else folder / f"{name_of(loops)}.o"


@functools.cache
def _machine_code_folder(user_choice: str) -> Path | None:
    try:
        versions = f"{importlib.metadata.version('numba')} {native.machine_name()}"
    except importlib.metadata.PackageNotFoundError:
        return None
    return cache_folder(versions, user_choice)


def name_of(loops: Callable[..., Any]) -> str:
    """Return what loops are called in messages and on disk: the module within this package, and the function."""
    return f"{loops.__module__.removeprefix(f'{__package__}.')}.{loops.__name__}"


def _hints(loops: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotation of each parameter."""
    hints = dict(type_hints(loops))
    returns = hints.pop("return")
    if returns is not type(None):
        raise TypeError(f"{loops.__name__} returns {returns}, expected None: loops fill preallocated arrays")
    return hints


def parameters_of(loops: Callable[..., Any]) -> list[native.Parameter]:
    """Return what each parameter must be, from its annotation."""
    found: list[native.Parameter] = []
    for name, hint in _hints(loops).items():
        try:
            found.append(parameter_of(hint, packed=loops in _PACKED))
        except TypeError as error:
            raise TypeError(f"{loops.__name__}: parameter {name} {error}") from None
    return found


def parameter_of(hint: Any, *, packed: bool = False) -> native.Parameter:
    """Return what a parameter must be: None for an int, or an array, or what a NamedTuple, packed ones, has in order."""
    spec = hint.__metadata__[0] if typing.get_origin(hint) is Annotated else None
    if hint is int:
        return None
    if isinstance(spec, ArraySpec):
        return replace(spec, packed=packed)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return [parameter_of(one, packed=True) for one in type_hints(hint).values()]
    raise TypeError(f"has type {hint}, expected int, an array type or a NamedTuple of those")


@functools.cache
def type_hints(of: Any) -> dict[str, Any]:
    """Return the annotations of a function's parameters or a NamedTuple's fields."""
    return typing.get_type_hints(of, include_extras=True)


def cache_folder(versions: str, user_choice: str) -> Path | None:
    """Return a writable folder for compiled code, or None if there is none (then each process compiles anew).

    Its name is a digest of `versions` and every source file of this package. It lies in `user_choice` (`NUMBA_CACHE_DIR`) if that is
    set, else in the user's cache, where all environments with this version find it, else beside the package; never
    where another user may have put code.
    """
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256(versions.encode())
    for source in sorted(here.rglob("*.py")):
        digest.update(str(source.relative_to(here)).encode() + b"\0" + source.read_bytes() + b"\0")
    parents = [Path(user_choice)] if user_choice else [user_cache(), here / "__pycache__"]
    for parent in parents:
        folder = parent / f"compiled-{digest.hexdigest()[:16]}"
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
