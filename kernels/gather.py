"""Gather: the bytes of listed slots out of a KV source; a slot that does not exist gives zeros."""

import numpy as np
import numpy.typing as npt

from .dispatch import In8x2, In64, Out8x2, select
from .kv_source import KvSource


def gather_kv(
    *, source: KvSource, slots: npt.NDArray[np.int64], out: npt.NDArray[np.uint8], backend: str = "cpu"
) -> None:
    """Copy the leading bytes of each slot.

    Args:
        source: where the bytes lie; its tensor is `[rows, row_bytes] uint8` with any row stride.
        slots: `[n] int64`; a negative slot, or one beyond the source's rows, gives zeros.
        out: `[n, capture_bytes] uint8`, capture_bytes at most the source's `bytes_per_token`; every byte is written.
        backend: "cpu" or "reference".

    Raises:
        ValueError: `out` does not fit `slots` or the source.
    """
    if out.ndim != 2 or out.shape[0] != slots.shape[0] or out.shape[1] > source.bytes_per_token:
        raise ValueError(
            f"out has shape {list(out.shape)}, expected [{slots.shape[0]}, up to {source.bytes_per_token}]: "
            "one row per slot, at most bytes_per_token wide"
        )
    select(_gather_kv_loops, backend)(source.tensor, source.page_size, source.bytes_per_token, slots, out)


def prepare(backend: str) -> None:
    """Compile what there is to compile now, so that no engine waits for it later."""
    select(_gather_kv_loops, backend)


def _gather_kv_loops(tensor: In8x2, page_size: int, bytes_per_token: int, slots: In64, out: Out8x2) -> None:
    num_slots = tensor.shape[0] * page_size
    for i in range(slots.shape[0]):
        slot = slots[i]
        if slot < 0 or slot >= num_slots:
            for b in range(out.shape[1]):
                out[i, b] = 0
        else:
            row = slot // page_size
            column = (slot % page_size) * bytes_per_token
            for b in range(out.shape[1]):
                out[i, b] = tensor[row, column + b]
