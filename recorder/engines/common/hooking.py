"""What keeps a hook around an engine's function harmless: nothing that it raises gets into the engine."""

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Generator
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

from .step_cost import OTHERS, PLACES, StepCost

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
            if loses and not hasattr(error, _SAID):
                setattr(error, _SAID, True)
                raise EngineError(f"the engine's function raised {type(error).__name__}") from error

        return finish

    return begin


# For a hook that prepares something, or records whatever its function's end.
beside = functools.partial(around, loses=False)


def while_true(condition: Callable[[], object], hook: Hook) -> Hook:
    """Return a hook that does nothing once `condition` no longer holds."""

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Finish | None:
        return hook(*args, **kwargs) if condition() else None

    return guarded


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


def wrap_method(owner: Any, name: str, hook: Hook, on_fault: OnFault, cost: StepCost | None = None) -> bool:
    """Put `hook` around one object's method; return whether the object has such a method."""
    original = getattr(owner, name, None)
    if not callable(original):
        return False
    around = functools.partial(harmless(hook, on_fault, cost), original)
    setattr(owner, name, functools.update_wrapper(around, original))
    return True


def wrap_often(
    owner: Any, name: str, before: Callable[..., Any], after: Callable[..., object], on_fault: OnFault
) -> bool:
    """As `wrap_method`, for what is called for each request in each step and mostly has nothing to say.

    `before(*args)` gives a value; `after(value, result, *args)` is called if the result is true, or `before` gives another
    value now.
    """
    original = getattr(owner, name, None)
    if not callable(original):
        return False

    def report(error: Exception) -> None:
        with contextlib.suppress(Exception):  # a log that cannot be written to must not fail the engine either
            on_fault(name, error)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        value = None
        try:
            value = before(*args)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            report(error)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            if not hasattr(error, _SAID):
                setattr(error, _SAID, True)
                report(EngineError(f"the engine's function raised {type(error).__name__}"))
            raise
        try:
            if result or before(*args) != value:
                after(value, result, *args)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            report(error)
        return result

    setattr(owner, name, watched)
    return True


def wrap_function(owner: Any, name: str, hook: Hook, on_fault: OnFault) -> None:
    """Put `hook` around a function of a class or module, which must have it; as a method it gets `self` too."""
    original = getattr(owner, name)
    around = harmless(hook, on_fault)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
