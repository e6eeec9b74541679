"""What a repeated launch of a Triton kernel leaves out, on a stand-in for the kernel: there is no GPU here."""

from typing import Any

import pytest
import torch
from kvcanary.kernels.ops import triton_launch as launch_module
from kvcanary.kernels.ops.triton_launch import launch


class Kernel:
    """Notes how it is launched, as Triton's kernels and their compiled forms are."""

    arg_names = ("words", "count", "several", "SIZE")

    def __init__(self) -> None:
        self.fn = object()
        self.looked_at: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **named: self.looked_at.append((grid, arguments, named))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **named: Any) -> "Form":
        self.looked_at.append((grid, arguments, named))
        return Form(self)


class Form:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_INTERPRETED", False)
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_the_second_launch_takes_the_form_that_is_there() -> None:
    kernel, words = Kernel(), torch.zeros(8, dtype=torch.int64)
    assert words.data_ptr() % 16 == 0
    for count in (5, 7):
        launch(kernel, 3, (words, count, (words, 2)), {"SIZE": 4}, num_warps=1)
    # Triton makes a constant of a 1 in a tuple, whatever `do_not_specialize` says: the form is made with another number.
    assert kernel.looked_at == [((3,), (words, 5, (words, 3)), {"SIZE": 4, "num_warps": 1})]
    address = words.data_ptr()
    assert kernel.launched == [((3, 1, 1), (address, count, (address, 2), 4)) for count in (5, 7)]
    for tag in (1, 7, 16):
        launch(kernel, 3, (words, 5, (words, tag)), {"SIZE": 4}, num_warps=1)
    assert len(kernel.looked_at) == 1
    assert [seen[1][2][1] for seen in kernel.launched[2:]] == [1, 7, 16]
    kernel.looked_at.clear()
    # Other constants are another form.
    launch(kernel, 3, (words, 5, (words, 2)), {"SIZE": 8}, num_warps=1)
    assert len(kernel.looked_at) == 1


@pytest.mark.parametrize("odd", ["pointer", "pointer within", "number", "negative"])
def test_what_another_form_may_be_for_goes_the_long_way(odd: str) -> None:
    kernel, words = Kernel(), torch.zeros(8, dtype=torch.int64)
    arguments = {
        "pointer": (words[1:], 5, (words, 2)),
        "pointer within": (words, 5, (words[1:], 2)),
        "number": (words, 1 << 31, (words, 2)),
        "negative": (words, -1, (words, 2)),
    }[odd]
    launch(kernel, 1, (words, 5, (words, 2)), {"SIZE": 4}, num_warps=1)
    launch(kernel, 1, arguments, {"SIZE": 4}, num_warps=1)
    assert len(kernel.looked_at) == 2 and len(kernel.launched) == 1
