"""Models on the CPU, looked at right before their first layer and right after their last, as SGLang's canary does.

What a model is called with is another batch than the one that its runner is given: a copy in buffers of the runner's
own. And what is damaged between the last layer and the runner's return is damage to what was written, not written.
"""

from collections.abc import Callable
from typing import Any

from ..common.hooking import Finish, Hook, wrap_method
from ..common.step_cost import StepCost

# Called with the model runner and the batch that its model is called with, before the first layer.
Begin = Callable[[Any, Any], Finish]


class ModelLayers:
    """What stands around the forward of each model of a process that runs on the CPU.

    Args:
        on_fault: is told of a hook that failed.
        cost: what the hooks took is added to it.
    """

    def __init__(self, on_fault: Callable[[str, Exception], None], cost: StepCost) -> None:
        self._on_fault = on_fault
        self._cost = cost
        self._wrapped: dict[int, Any] = {}  # model runners by their ids
        self._expected: tuple[int, Begin] | None = None

    def wrap(self, runner: Any) -> None:
        """Stand around a runner's model from now on, nearest to it: whoever wraps it later stands around this."""
        if id(runner) not in self._wrapped and can_be_hooked(runner):
            self._wrapped[id(runner)] = runner
            wrap_method(runner.model, "forward", self._around(runner), self._on_fault, self._cost)

    def watches(self, runner: int) -> bool:
        """Say whether a runner's model is hooked; `runner` is its id."""
        return runner in self._wrapped

    def expect(self, runner: int, begin: Begin) -> None:
        """Have `begin` called once the model of a runner is called, and what it returns after that."""
        self._expected = (runner, begin)

    def still_expected(self) -> bool:
        """Say whether the model has not been called since `expect`; nothing is expected any more."""
        expected, self._expected = self._expected, None
        return expected is not None

    def _around(self, runner: Any) -> Hook:
        def on_layers(*args: Any, **kwargs: Any) -> Finish | None:
            expected = self._expected
            if expected is None or expected[0] != id(runner):
                return None
            batch = next((one for one in (*args, *kwargs.values()) if hasattr(one, "forward_mode")), None)
            if batch is None:
                return None
            self._expected = None
            return expected[1](runner, batch)

        return on_layers


def can_be_hooked(runner: Any) -> bool:
    """Say whether a runner's model can be hooked: on the CPU, and not compiled, since the hook would be, too."""
    settings, model = getattr(runner, "server_args", None), getattr(runner, "model", None)
    on_cpu = str(getattr(runner, "device", "")).startswith("cpu")
    return on_cpu and not getattr(settings, "enable_torch_compile", False) and callable(getattr(model, "forward", None))
