"""Who runs in an engine's step: the engine, or which hook of the recorder's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from kvcanary.recorder.engines.common import hooking
from kvcanary.recorder.engines.sglang import history as sglang_history
from kvcanary.recorder.engines.vllm import blocks as vllm_blocks
from kvcanary.recorder.engines.vllm import recording as vllm_recording


class HookWatch:
    """Calls `change(name)` each time that another runs: a hook by its name, the engine itself with nothing."""

    def __init__(self, change: Callable[[str], object]) -> None:
        self._change = change
        self._running = [""]

    def run(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as part of what is called so."""
        self._running.append(name)
        self._change(name)
        try:
            return function(*args, **kwargs)
        finally:
            self._running.pop()
            self._change(self._running[-1])

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch all hooks that are set meanwhile."""
        harmless, often = hooking.harmless, hooking.wrap_often
        calls: Any = getattr(sglang_history, "OutermostCalls", None)  # another version of the code may have none
        outermost = getattr(calls, "wrap", None)

        def watched(hook: Any, *args: Any) -> Any:
            wrapper, name = harmless(hook, *args), getattr(hook, "__name__", "hook")

            def around(original: Any, *given: Any, **named: Any) -> Any:
                return self.run(name, wrapper, lambda *a, **k: self.run("", original, *a, **k), *given, **named)

            return around

        def watched_put(owner: Any, name: str, put: Callable[[], bool]) -> bool:
            original = getattr(owner, name, None)
            if original is None:
                return put()
            setattr(owner, name, lambda *given, **named: self.run("", original, *given, **named))
            done, wrapper = put(), getattr(owner, name)
            setattr(owner, name, lambda *given, **named: self.run(name, wrapper, *given, **named))
            return done

        def watched_often(owner: Any, name: str, *told: Any) -> bool:
            return watched_put(owner, name, lambda: often(owner, name, *told))

        def watched_outermost(own: Any, owner: Any, name: str, *told: Any) -> bool:
            return watched_put(owner, name, lambda: bool(outermost and outermost(own, owner, name, *told)))

        places: list[tuple[Any, str, Any]] = [(hooking, "harmless", watched), (hooking, "wrap_often", watched_often)]
        by_name = [module for module in (vllm_blocks, vllm_recording) if hasattr(module, "wrap_often")]
        places += [(module, "wrap_often", watched_often) for module in by_name]
        places += [(calls, "wrap", watched_outermost)] if outermost else []
        with ExitStack() as stack:
            for owner, name, value in places:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield
