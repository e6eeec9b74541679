"""Waiting for what a page comes to hold: asked again and again from outside, since its policy forbids it to evaluate text."""

import time
from typing import Any

SECONDS = 30


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until an expression, or a function of `arg`, is true in a page."""
    end = time.monotonic() + SECONDS
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"not so after {SECONDS} s: {expression}"
        page.wait_for_timeout(20)
