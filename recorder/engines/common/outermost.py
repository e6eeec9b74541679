"""What stands around functions of an engine that are called in every step, and has something to say behind them alone."""

import contextlib
import functools
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from .hooking import OTHERS, PLACES, OnFault, StepCost, lost_by, put_in_place


class OutermostCalls:
    """Puts functions of an object around each other's calls: of those that call one another only the outermost counts.

    For what is called in every step, and has nothing to say before: all that it costs then is the count of calls under way.
    """

    def __init__(self, on_fault: OnFault, live: Callable[[], object], cost: StepCost | None = None) -> None:
        self._depth = 0  # calls under way
        self._on_fault, self._live = on_fault, live
        self._spent: Callable[[int], object] = abs if cost is None else cost.spent

    @property
    def under_way(self) -> bool:
        """Whether a call is under way."""
        return self._depth > 0

    def begin(self) -> None:
        """Count a call that somebody else stands around."""
        self._depth += 1

    def end(self) -> None:
        """Count the end of such a call."""
        self._depth -= 1

    def wrap(self, owner: Any, name: str, after: Callable[[Any], object] | None) -> bool:
        """Have `after(result)` called behind a method that is no other's part, unless its result is None; for no `after`, count it.

        Return whether the object has such a method.
        """
        original = getattr(owner, name, None)
        if not callable(original):
            return False

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if after is not None and self._live():
                    self._guarded(name, lost_by, error)
                raise
            finally:
                self._depth -= 1
            if after is not None and not self._depth and result is not None and self._live():
                begin = perf_counter_ns()
                self._guarded(name, after, result)
                self._spent((perf_counter_ns() - begin) * PLACES + OTHERS)
            return result

        put_in_place(owner, name, counted)
        return True

    def _guarded(self, name: str, call: Callable[[Any], object], value: Any) -> None:
        try:
            call(value)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            with contextlib.suppress(Exception):  # a log that cannot be written to must not fail the engine either
                self._on_fault(name, error)
