"""What keeps a hook around an engine's function harmless: nothing that it raises gets into the engine."""

import functools
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Final

KINDS_TOLD: Final = 16

Finish = Callable[[Any, BaseException | None], None]
Hook = Callable[..., Finish | None]


class StepCost:
    """How long the hooks kept the engine's thread, engine step by engine step; only the latest steps are kept.

    `spent` counts the nanoseconds that one hook took; a list's own method, since it is called several times a step.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Any, int]] = deque(maxlen=65_536)  # nanoseconds, mode and rows
        self._this_step: list[int] = []
        self.spent: Callable[[int], None] = self._this_step.append

    def next_step(self, mode: Any, rows: int) -> None:
        """Begin another step; the one before was a forward of `mode`, an enum, with `rows` requests.

        What was spent before the first one was the start-up.
        """
        self._steps.append((sum(self._this_step), mode, rows))
        self._this_step.clear()

    def summary(self) -> dict[str, Any]:
        """Return steps, and the nanoseconds of engine thread that the median and the slowest hundredth of them took.

        `by_forward` has the same of the most frequent kinds of forwards, by mode and number of requests: steps, median
        and slowest hundredth.
        """
        steps = list(self._steps)[1:]
        if not steps:
            return {"steps": 0}
        kinds: dict[str, list[int]] = {}
        for spent, mode, rows in steps:
            kinds.setdefault(f"{getattr(mode, 'name', mode)} {rows}", []).append(spent)
        frequent = sorted(kinds, key=lambda kind: -len(kinds[kind]))[:KINDS_TOLD]
        whole = [spent for spent, _, _ in steps]
        return {
            "steps": len(steps),
            "engine_thread_ns_p50": _place(whole, 50),
            "engine_thread_ns_p99": _place(whole, 99),
            "by_forward": {k: [len(kinds[k]), _place(kinds[k], 50), _place(kinds[k], 99)] for k in frequent},
        }


def _place(values: list[int], percent: int) -> int:
    return sorted(values)[len(values) * percent // 100]


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
        begin = perf_counter_ns()
        finish: Finish | None
        try:
            finish = hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            finish = None
            on_fault(name, error)
        on_spent(perf_counter_ns() - begin)
        if finish is None:
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            try:
                finish(None, error)
            except Exception as fault:  # noqa: BLE001  # the engine gets its own error
                on_fault(name, fault)
            raise
        begin = perf_counter_ns()
        try:
            finish(result, None)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            on_fault(name, error)
        on_spent(perf_counter_ns() - begin)
        return result

    return wrapper


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
