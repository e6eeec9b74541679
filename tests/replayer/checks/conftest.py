"""A scene for each test; `make_scene` for those that want several, or another engine."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .scene import Scene


@pytest.fixture
def make_scene(tmp_path: Path) -> Callable[..., Scene]:
    count = 0

    def make(**options) -> Scene:
        nonlocal count
        count += 1
        return Scene(tmp_path / f"{count}.arrow", **options)

    return make


@pytest.fixture
def scene(make_scene: Callable[..., Scene]) -> Scene:
    return make_scene()
