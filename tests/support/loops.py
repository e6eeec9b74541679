"""Running an op's loops with arguments by name."""

import inspect
from collections.abc import Callable
from typing import Any

from kvcanary.kernels.dispatch import select


def run(loops: Callable[..., None], backend: str = "cpu", **given: Any) -> None:
    """Run loops on a backend."""
    select(loops, backend)(*(given.pop(name) for name in inspect.signature(loops).parameters))
    assert not given
