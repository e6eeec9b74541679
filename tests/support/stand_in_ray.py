"""Ray's calls, as far as `kvcanary fleet` makes them, done at once in this process: what they stand for is Ray's own business."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    """As ray.exceptions.RayError."""


class RayTaskError(RayError):
    """What a task raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("a traceback")
        self.cause = cause


class _Ref:
    def __init__(self, value: Any, error: RayError | None = None) -> None:
        self.value, self.error = value, error


class StandInRay:
    """`asked` are the options of each task."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, cores: int = 2, memory_bytes: int = 1 << 40) -> None:
        self.cores, self.memory_bytes = cores, memory_bytes
        self.asked: list[dict[str, Any]] = []

    def init(self, address: str, **_: Any) -> None:
        if address == "nowhere:1":
            raise ConnectionError("nobody there")

    def shutdown(self) -> None:
        print("(raylet) what Ray still has to say")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cores), "memory": float(self.memory_bytes)}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"memory": float(self.memory_bytes)}}]

    def remote(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        def wrapped(act: Callable[..., Any]) -> Any:
            return SimpleNamespace(
                options=lambda **more: SimpleNamespace(remote=lambda *given: self._do(act, given, options | more))
            )

        return wrapped

    def _do(self, act: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> _Ref:
        self.asked.append(options)
        try:
            return _Ref(act(*[self.get(one) if isinstance(one, _Ref) else one for one in given]))
        except Exception as error:  # noqa: BLE001  # as Ray does
            return _Ref(None, error if isinstance(error, RayError) else RayTaskError(error))

    def wait(
        self, refs: list[_Ref], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[_Ref], list[_Ref]]:
        print("(raylet) A worker died or was killed")
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref: _Ref) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value


@pytest.fixture
def stand_in_ray(monkeypatch: pytest.MonkeyPatch) -> StandInRay:
    ray = StandInRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray
