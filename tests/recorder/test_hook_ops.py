"""What the hooks of a decode step have torch and the GPU do on the engine's thread: each of it takes microseconds there.

On a GPU an operation of torch takes five to ten, a launch as long, a copy to the host with its event more. The engines here
do nothing but decode (`support/engines/steady.py`).
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.capture.device import recorder as device_recorder
from torch.utils._python_dispatch import TorchDispatchMode

from ..support.engines.hook_watch import HookWatch
from ..support.engines.steady import SteadySglang, SteadyVllm, no_kernels

REQUESTS, BLOCK = 3, 16


class Operations(TorchDispatchMode):
    """Counts what hooks have torch do on this thread, by hook and operation."""

    def __init__(self) -> None:
        super().__init__()
        self.hook = ""
        self.found: Counter[tuple[str, str]] = Counter()

    def change(self, hook: str) -> None:
        self.hook = hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.hook:
            self.found[self.hook, func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def decode(
    engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 4 * BLOCK
) -> tuple[Counter[Any], Counter[str], int]:
    """Return the operations, launches and copies to the host of so many steps."""
    operations = Operations()
    copies: list[Any] = []
    copy = device_recorder.HostCopy
    monkeypatch.setattr(device_recorder, "HostCopy", lambda *args: copies.append(args) or copy(*args))
    with no_kernels() as kernels, HookWatch(operations.change).hooks():
        if engine == "sglang":
            one: Any = SteadySglang(folder, kernels, REQUESTS)
        else:
            one = SteadyVllm(folder, kernels, REQUESTS, v2=engine == "vllm v2")
        for _ in range(3):
            one.step()
        kernels.launched.clear()
        copies.clear()
        with operations:
            for _ in range(steps):
                one.step()
        launched = kernels.launched.copy()
        one.close()
    return operations.found, launched, len(copies)


@pytest.mark.parametrize(
    ("engine", "operations", "kernels"),
    [
        # The forward's kernels are in its CUDA graph.
        ("sglang", {}, ["write_ticket_kernel"]),
        # How far each request has come, which the host alone knows.
        ("vllm v1", {"add_": 1}, ["write_ticket_kernel", "begin_kernel", "end_kernel"]),
        ("vllm v2", {}, ["write_ticket_kernel", "begin_kernel", "end_kernel"]),
    ],
)
def test_a_decode_step_has_the_device_do_no_more_than_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, operations: dict[str, int], kernels: list[str]
) -> None:
    steps = 4 * BLOCK
    found, launched, copies = decode(engine, tmp_path, monkeypatch, steps)
    by_operation: Counter[str] = Counter()
    for (_, operation), count in found.items():
        by_operation[operation] += count
    assert by_operation == {operation: count * steps for operation, count in operations.items()}, found
    assert launched == dict.fromkeys(kernels, steps)
    assert copies == 0
