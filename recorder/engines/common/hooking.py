"""What keeps a hook around an engine's function harmless: nothing that it raises gets into the engine.

Also how modules are hooked once they are imported, and what hooks cost. numpy is imported when that is summed up: a process
that records nothing imports this too.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import pkgutil
import sys
from array import array
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from time import perf_counter_ns
from types import ModuleType
from typing import Any, Final, NamedTuple

KINDS_KEPT: Final = 16
ENTRIES_KEPT: Final = 500_000  # of eight bytes; a step has some seven
PLACES: Final = 16
OTHERS: Final = 14  # the place of all other hooks
BEGINS: Final = 15  # no hook's: a step begins

Imported = Callable[[ModuleType], None]
Finish = Callable[[Any, BaseException | None], None]
Hook = Callable[..., Finish | None]
Around = Generator[None, Any, None]
OnFault = Callable[[str, Exception], None]


class Target(NamedTuple):
    """A function of an engine's, the hook around it (`on_<hook>`), and what is missing without it.

    `paths` are where it was in the versions known, newest first: `module:Class.name` or `module:name`. An `essential` one
    must be there; one for `drafts` is looked for only if there is a draft model.
    """

    hook: str
    without: str
    paths: tuple[str, ...]
    essential: bool = False
    drafts: bool = False

    def find(self) -> str | None:
        """Return the path under which this version of the engine has it, None for none."""
        for path in self.paths:
            try:
                if callable(pkgutil.resolve_name(path)):
                    return path
            except (ImportError, AttributeError, ValueError):
                continue
        return None


class EngineError(Exception):
    """The engine's own function raised, so what it has done is not recorded; for `OnFault`: the hook itself works."""


_SAID: Final = "_kvcanary_said"  # on an exception of the engine's that goes through several hooks


def around(hook: Callable[..., Around], *, loses: bool = True) -> Hook:
    """Return a generator as a hook: behind its `yield` it goes on with the result once the engine's function has returned.

    If that raised, or the generator never yields, nothing goes on; a `finally` runs all the same. What it would have
    recorded is lost then, unless it `loses` nothing: the first hook that the exception goes through says so.
    """

    @functools.wraps(hook)
    def begin(*args: Any, **kwargs: Any) -> Finish | None:
        running = hook(*args, **kwargs)
        if next(running, running) is running:  # it has ended
            return None

        def finish(result: Any, error: BaseException | None) -> None:
            if error is None:
                with contextlib.suppress(StopIteration):
                    running.send(result)
                return
            running.close()
            if loses:
                lost_by(error)

        return finish

    return begin


def lost_by(error: BaseException) -> None:
    """Raise an `EngineError` for what is not recorded since the engine's function raised; only the first call does."""
    if not hasattr(error, _SAID):
        setattr(error, _SAID, True)
        raise EngineError(f"the engine's function raised {type(error).__name__}") from error


# For a hook that prepares something, or records whatever its function's end.
beside = functools.partial(around, loses=False)


def while_true(condition: Callable[[], object], hook: Hook) -> Hook:
    """Return a hook that does nothing once `condition` no longer holds."""

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Finish | None:
        return hook(*args, **kwargs) if condition() else None

    return guarded


class StepCost:
    """How long the hooks kept the engine's thread, engine step by engine step; only the latest steps are kept.

    One list holds everything in the order in which it was spent, so that little is touched in a step: `spent` takes
    nanoseconds times `PLACES`, plus the place that the hook has been given. `apart` are the names of at most 7 hooks whose
    time is also counted for itself.
    """

    def __init__(self, apart: Sequence[str] = ()) -> None:
        self._apart = tuple(apart)
        self.log = array("q")
        self.spent: Callable[[int], None] = self.log.append
        self._kinds: dict[tuple[str, int], int] = {}
        self._mode: Any = None
        self._rows = -1
        self._begins = 0  # the entry with which a step of this kind begins

    def places(self, hook: str) -> tuple[int, int]:
        """Return the places of what a hook takes before and after the engine's function."""
        at = 2 * self._apart.index(hook) if hook in self._apart else OTHERS
        return at, min(at + 1, OTHERS)

    def next_step(self, mode: Any, rows: int) -> None:
        """Begin another step, a forward of `mode`, an enum, with `rows` requests.

        What was spent before the first one was the start-up.
        """
        if mode is not self._mode or rows != self._rows:
            self._mode, self._rows = mode, rows
            kind = self._kinds.setdefault((getattr(mode, "name", str(mode)), rows), len(self._kinds))
            self._begins = kind * PLACES + BEGINS
        if len(self.log) > 2 * ENTRIES_KEPT:
            del self.log[:-ENTRIES_KEPT]
        self.spent(self._begins)

    def forget(self) -> None:
        """Keep nothing of what was spent so far: no step is counted, since nothing is recorded."""
        del self.log[:]

    def summary(self) -> dict[str, Any]:
        """Return steps, and the nanoseconds of engine thread that the median and the slowest hundredth of them took.

        `by_forward` has the same of the most frequent kinds of forwards, by mode and number of requests. `by_hook` has,
        of the same kinds, the median of each hook in `apart`, before and after the engine's function, and of all
        others together. The step that has not ended is left out.
        """
        import numpy as np

        log = self.log[:]  # the engine's thread may go on, and cannot append to what numpy is reading
        values, places = np.divmod(np.array(log, np.int64), PLACES)
        begins = np.flatnonzero(places == BEGINS)
        if len(begins) < 2:
            return {"steps": 0}
        kinds = values[begins[:-1]]
        step = np.cumsum(places == BEGINS) - 1
        counts = (places != BEGINS) & (step >= 0) & (step < len(kinds))
        times = np.zeros((len(kinds), BEGINS), np.int64)
        np.add.at(times, (step[counts], places[counts]), values[counts])

        def place(mine: Any, percent: int) -> int:
            return int(np.sort(mine)[len(mine) * percent // 100])

        whole = times.sum(axis=1)
        names = [f"{hook} {side}" for hook in self._apart for side in ("before", "after")]
        columns = {name: at for at, name in enumerate(names)} | {"others": OTHERS}
        by_forward: dict[str, list[int]] = {}
        by_hook: dict[str, dict[str, int]] = {}
        for (mode, rows), number in sorted(self._kinds.items(), key=lambda kind: -int((kinds == kind[1]).sum())):
            mine = kinds == number
            if mine.any() and len(by_forward) < KINDS_KEPT:
                by_forward[f"{mode} {rows}"] = [int(mine.sum()), place(whole[mine], 50), place(whole[mine], 99)]
                by_hook[f"{mode} {rows}"] = {name: place(times[mine, at], 50) for name, at in columns.items()}
        slowest = {f"engine_thread_ns_p{percent}": place(whole, percent) for percent in (50, 99)}
        return {"steps": len(kinds), **slowest, "by_forward": by_forward, "by_hook": by_hook}


def harmless(hook: Hook, on_fault: OnFault, cost: StepCost | None = None) -> Callable[..., Any]:
    """Return a wrapper `(original, *args, **kwargs)` that calls `hook` before the original and what it returns after.

    The hook gets the original's arguments; what it returns, if anything, is called with the original's result and
    the exception that it raised. The engine sees the original's result or exception and no other. What the two calls
    took is added to `cost`.
    """
    name = getattr(hook, "__name__", "hook")
    before, after = (OTHERS, OTHERS) if cost is None else cost.places(name)
    spent: Callable[[int], object] = abs if cost is None else cost.spent  # abs does nothing with it

    def report(error: Exception) -> None:
        with contextlib.suppress(Exception):  # a log that cannot be written to must not fail the engine either
            on_fault(name, error)

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = perf_counter_ns()
        finish: Finish | None
        try:
            finish = hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            finish = None
            report(error)
        spent((perf_counter_ns() - begin) * PLACES + before)
        if finish is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            try:
                finish(None, error)
            except Exception as fault:  # noqa: BLE001  # the engine gets its own error
                report(fault)
            raise
        begin = perf_counter_ns()
        try:
            finish(result, None)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            report(error)
        spent((perf_counter_ns() - begin) * PLACES + after)
        return result

    return wrapper


class Wraps:
    """What `wrap_method` and `wrap_often` wrap while it is entered; `undo` puts that back, but for what others wrapped since."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> "Wraps":
        self._token = _wraps.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _wraps.reset(self._token)

    def put(self, owner: Any, name: str, wrapper: Any) -> None:
        """Set an attribute of an object, and remember its own one, or that it had none."""
        self._put.append((owner, name, wrapper, vars(owner).get(name, _NONE) if hasattr(owner, "__dict__") else _NONE))
        setattr(owner, name, wrapper)

    def undo(self) -> None:
        """Take off what is still on top; a second call does nothing."""
        while self._put:
            owner, name, wrapper, before = self._put.pop()
            if vars(owner).get(name) is wrapper:
                delattr(owner, name) if before is _NONE else setattr(owner, name, before)


_NONE: Final = object()
_wraps: ContextVar[Wraps | None] = ContextVar("kvcanary_wraps", default=None)


def put_in_place(owner: Any, name: str, wrapper: Any) -> None:
    """Set an object's method, so that the `Wraps` that is entered can put it back."""
    wraps = _wraps.get()
    if wraps is None:
        setattr(owner, name, wrapper)
    else:
        wraps.put(owner, name, wrapper)


def wrap_method(owner: Any, name: str, hook: Hook, on_fault: OnFault, cost: StepCost | None = None) -> bool:
    """Put `hook` around one object's method; return whether the object has such a method."""
    original = getattr(owner, name, None)
    if not callable(original):
        return False
    around = functools.partial(harmless(hook, on_fault, cost), original)
    put_in_place(owner, name, functools.update_wrapper(around, original))
    return True


def wrap_often(owner: Any, name: str, after: Callable[..., object], on_fault: OnFault) -> bool:
    """As `wrap_method`, for what is called for each request in each step and mostly has nothing to say.

    `after(result, *args)` is called if the result is true.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        return False

    def report(error: Exception) -> None:
        with contextlib.suppress(Exception):  # a log that cannot be written to must not fail the engine either
            on_fault(name, error)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if not hasattr(error, _SAID):
                setattr(error, _SAID, True)
                report(EngineError(f"the engine's function raised {type(error).__name__}"))
            raise
        if not result:
            return result
        try:
            after(result, *args)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            report(error)
        return result

    put_in_place(owner, name, watched)
    return True


def wrap_function(owner: Any, name: str, hook: Hook, on_fault: OnFault) -> None:
    """Put `hook` around a function of a class or module, which must have it; as a method it gets `self` too."""
    original = getattr(owner, name)
    around = harmless(hook, on_fault)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)


class WhenImported(importlib.abc.MetaPathFinder):
    """A finder that lets the others find a module, and calls `then[name]` with it once it has been executed."""

    def __init__(self, then: dict[str, Imported]) -> None:
        self._then = dict(then)
        self._looking: set[str] = set()

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls us; None for a module that is not waited for."""
        if fullname not in self._then or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module") and not isinstance(loader, type):
            execute, then = loader.exec_module, self._then.pop(fullname)

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # as it was
                execute(module)
                then(module)

            loader.exec_module = exec_module
        return spec


def when_imported(then: dict[str, Imported]) -> None:
    """Call `then[name]` with each module once it is imported; at once if it has been."""
    waiting = {}
    for name, call in then.items():
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            call(module)
        else:
            waiting[name] = call
    if waiting:
        sys.meta_path.insert(0, WhenImported(waiting))
