"""Forwards like the last one by machine code, where there is any: what makes it, and what stands in for it."""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ....kernels.capture.frame_again import Repeater, Rounds
from ....kernels.capture.frame_ledger import Ledger
from .same_size import SameSize

if TYPE_CHECKING:
    from ....kernels.capture.frame_driver import CudaDriver

logger = logging.getLogger("kvcanary")

INT32_MAX: Final = 2**31 - 1


def never(*_: Any) -> None:
    """Stand for what machine code cannot do."""


class Repeating:
    """What takes down forwards like the last one, and ends them; `end` is `never` where there is no machine code.

    Args:
        ledger: what both it and the capture count in.
        driver: None where there is none.
        device: where the forwards run.
        flights: how many forwards may be on their way.
        counters: rows of counters.
        watch_every: forwards between two looks at the prefix's bytes, 0 never.
    """

    def __init__(
        self, ledger: Ledger, driver: "CudaDriver | None", device: Any, *, flights: int, counters: int, watch_every: int
    ) -> None:
        self._watch_every = watch_every
        self._repeater: Repeater | None = None
        self.end: Callable[[], int | None] = never
        if driver is None:
            return
        try:
            repeater = Repeater(ledger, Rounds(counters=counters, stamps=INT32_MAX, flights=flights), driver.address)
            self.end = repeater.ending(device)
            self._repeater = repeater
        except (ImportError, RuntimeError, AttributeError, ValueError, OSError) as error:
            logger.info("kvcanary: each launch is put together in Python: %s", error)

    def of(self, same: SameSize, tensors: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return what takes down another forward of a size; None as long as its launches are not all made.

        Args:
            same: what such forwards have in common.
            tensors: this one's rows, input_ids, positions and out_cache_loc.
        """
        if same.again is None and self._repeater is not None and same.down is not None and same.ends:
            made = self._repeater.again(
                tensors,
                down=same.down,
                back=same.back,
                watching=same.back_watching,
                words=same.words,
                watch_every=self._watch_every if same.watchable else 0,
            )
            same.again, same.kept = (never, None) if made is None else made
        return same.again


def find_driver(device: Any) -> tuple[Any, Callable[[], int]]:
    """Return the CUDA driver for direct calls, None where it cannot be had, and what gives the current stream's address."""
    import torch

    from ....kernels.capture.frame_driver import CudaDriver

    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        return CudaDriver(), functools.partial(torch._C._cuda_getCurrentRawStream, index)
    except (OSError, AttributeError) as error:
        logger.warning("kvcanary: launches go through Triton, which takes longer: %s", error)
        return None, lambda: 0
