"""What keeps a hook around an engine's function harmless: nothing that it raises gets into the engine."""

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

Finish = Callable[[Any, BaseException | None], None]
Hook = Callable[..., Finish | None]


class StepCost:
    """How long the hooks kept the engine's thread, engine step by engine step; only the latest steps are kept."""

    def __init__(self) -> None:
        self._steps: deque[int] = deque(maxlen=65_536)
        self._this_step = 0

    def spent(self, nanoseconds: int) -> None:
        """Count the time that one hook took."""
        self._this_step += nanoseconds

    def next_step(self) -> None:
        """Begin another step; what was spent before the first one was the start-up."""
        self._steps.append(self._this_step)
        self._this_step = 0

    def summary(self) -> dict[str, int]:
        """Return steps, and the nanoseconds of engine thread that the median and the slowest hundredth of them took."""
        steps = sorted(list(self._steps)[1:])
        if not steps:
            return {"steps": 0}
        return {
            "steps": len(steps),
            "engine_thread_ns_p50": steps[len(steps) // 2],
            "engine_thread_ns_p99": steps[len(steps) * 99 // 100],
        }


def harmless(
    hook: Hook, on_fault: Callable[[str, Exception], None], on_spent: Callable[[int], None] = lambda _: None
) -> Callable[..., Any]:
    """Return a wrapper `(original, *args, **kwargs)` that calls `hook` before the original and what it returns after.

    The hook gets the original's arguments; what it returns, if anything, is called with the original's result and
    the exception that it raised. The engine sees the original's result or exception and no other. `on_spent` is told
    how many nanoseconds each of the two calls took.
    """
    name = getattr(hook, "__name__", "hook")

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        finish: Finish | None = None
        begin = time.perf_counter_ns()
        try:
            finish = hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            on_fault(name, error)
        on_spent(time.perf_counter_ns() - begin)
        if finish is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            _finish(finish, None, error, name, on_fault)
            raise
        begin = time.perf_counter_ns()
        _finish(finish, result, None, name, on_fault)
        on_spent(time.perf_counter_ns() - begin)
        return result

    return wrapper


def _finish(
    finish: Finish, result: Any, raised: BaseException | None, name: str, on_fault: Callable[[str, Exception], None]
) -> None:
    try:
        finish(result, raised)
    except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
        on_fault(name, error)


def wrap_method(
    owner: Any,
    name: str,
    hook: Hook,
    on_fault: Callable[[str, Exception], None],
    on_spent: Callable[[int], None] = lambda _: None,
) -> bool:
    """Put `hook` around one object's method; return whether the object has such a method."""
    original = getattr(owner, name, None)
    if not callable(original):
        return False
    setattr(
        owner, name, functools.update_wrapper(functools.partial(harmless(hook, on_fault, on_spent), original), original)
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
