"""What keeps a hook around an engine's function harmless: nothing that it raises gets into the engine."""

import contextlib
import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from .step_cost import OTHERS, PLACES, StepCost

Finish = Callable[[Any, BaseException | None], None]
Hook = Callable[..., Finish | None]


def harmless(
    hook: Hook, on_fault: Callable[[str, Exception], None], cost: StepCost | None = None
) -> Callable[..., Any]:
    """Return a wrapper `(original, *args, **kwargs)` that calls `hook` before the original and what it returns after.

    The hook gets the original's arguments; what it returns, if anything, is called with the original's result and
    the exception that it raised. The engine sees the original's result or exception and no other. What the two calls
    took is added to `cost`.
    """
    name = getattr(hook, "__name__", "hook")
    before, after = (OTHERS, OTHERS) if cost is None else cost.places(name)
    spent: Callable[[int], object] = abs if cost is None else cost.spent  # the first is told in vain

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = perf_counter_ns()
        finish: Finish | None
        try:
            finish = hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            finish = None
            _tell(on_fault, name, error)
        spent((perf_counter_ns() - begin) * PLACES + before)
        if finish is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            try:
                finish(None, error)
            except Exception as fault:  # noqa: BLE001  # the engine gets its own error
                _tell(on_fault, name, fault)
            raise
        begin = perf_counter_ns()
        try:
            finish(result, None)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            _tell(on_fault, name, error)
        spent((perf_counter_ns() - begin) * PLACES + after)
        return result

    return wrapper


def _tell(on_fault: Callable[[str, Exception], None], name: str, error: Exception) -> None:
    """Tell of a hook that failed; a log that cannot be written to must not fail the engine either."""
    with contextlib.suppress(Exception):
        on_fault(name, error)


def wrap_method(
    owner: Any,
    name: str,
    hook: Hook,
    on_fault: Callable[[str, Exception], None],
    cost: StepCost | None = None,
) -> bool:
    """Put `hook` around one object's method; return whether the object has such a method."""
    original = getattr(owner, name, None)
    if not callable(original):
        return False
    setattr(
        owner, name, functools.update_wrapper(functools.partial(harmless(hook, on_fault, cost), original), original)
    )
    return True


def wrap_function(owner: Any, name: str, hook: Hook, on_fault: Callable[[str, Exception], None]) -> None:
    """Put `hook` around a function of a class or module, which must have it; as a method it gets `self` too."""
    original = getattr(owner, name)
    around = harmless(hook, on_fault)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
