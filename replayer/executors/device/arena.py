"""What forwards bring to the device: laid out one after another in pinned memory, and copied there once a forward."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import Int64Array

_FEWEST_WORDS: Final = 1 << 21  # of 8 bytes


class Arena:
    """Memory of forwards under way, the same on both sides. What lies there stays until `clear`.

    Every array begins at a multiple of 16 bytes, as kernels like it.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._allocate(_FEWEST_WORDS)

    def _allocate(self, words: int) -> None:
        import torch

        on_gpu = self._device.type == "cuda"
        self._host = torch.empty(words, dtype=torch.int64, pin_memory=on_gpu)
        # On the CPU, where kernels are interpreted, both sides are one.
        self._there = torch.empty(words, dtype=torch.int64, device=self._device) if on_gpu else self._host
        self._words: Int64Array = self._host.numpy()
        self._at = self._sent = 0

    def has_room(self, words: int) -> bool:
        """Whether so many words, what is lost between arrays included, find room."""
        return self._at + words <= len(self._words)

    def clear(self, words: int = 0) -> None:
        """Forget what lies there, which nobody uses any more; room for `words` is made."""
        if words > len(self._words):
            self._allocate(2 * words)
        self._at = self._sent = 0

    def take(self, count: int) -> tuple[Int64Array, Any]:
        """Return room for `count` words, to be filled until `send`, and the same on the device."""
        first = self._at
        self._at += count + count % 2
        return self._words[first : first + count], self._there[first : first + count]

    def put(self, values: Int64Array) -> Any:
        """Lay down an array of words; return it on the device, good from `send` on."""
        here, there = self.take(len(values))
        here[:] = values
        return there

    def put_rows(self, *arrays: Int64Array) -> tuple[Any, ...]:
        """Lay down arrays of one length; `put` for each, in fewer calls."""
        length = len(arrays[0])
        width = length + length % 2
        here, there = self.take(len(arrays) * width)
        rows = here.reshape(len(arrays), width)
        for row, values in zip(rows, arrays, strict=True):
            row[:length] = values
        found: tuple[Any, ...] = there.view(len(arrays), width)[:, :length].unbind(0)
        return found

    def put_bytes(self, values: npt.NDArray[np.uint8]) -> Any:
        """Lay down rows of whole words, `[n, bytes] uint8`; return them on the device, `[n, words] int64`."""
        words = values.shape[1] // 8
        here, there = self.take(len(values) * words)
        here.view(np.uint8).reshape(values.shape)[:] = values
        return there.view(len(values), words)

    def send(self) -> None:
        """Have what was laid down since the last time copied, before whatever is launched next; waits for nothing."""
        if self._there is not self._host and self._at > self._sent:
            some = slice(self._sent, self._at)
            self._there[some].copy_(self._host[some], non_blocking=True)
        self._sent = self._at
