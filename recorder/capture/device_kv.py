"""KV bytes of a pool on a device: gathered there with torch, then brought to the host; this waits for the device."""

from typing import Any

import numpy as np

from ...kernels.ops.hash.kv_source import KvSource
from .host_arrays import ByteArray, Int64Array


def on_device(source: KvSource) -> bool:
    """Say whether the source's memory is a torch tensor that numpy cannot look at."""
    return hasattr(source.tensor, "detach") and source.tensor.device.type != "cpu"


def gather_device(source: KvSource, slots: Int64Array, capture_bytes: int) -> ByteArray:
    """Return the leading bytes of each slot, `[n, capture_bytes] uint8`; zeros for a slot outside the source.

    Works on any torch device, the CPU too (which is how it is tested without another).
    """
    import torch

    tensor = source.tensor
    out = np.zeros((slots.size, capture_bytes), np.uint8)
    inside = (slots >= 0) & (slots < source.num_slots)
    wanted = torch.from_numpy(slots[inside]).to(tensor.device)
    rows = wanted // source.page_size
    first = (wanted % source.page_size) * source.bytes_per_token
    columns = first[:, None] + torch.arange(capture_bytes, device=tensor.device)
    out[inside] = tensor[rows[:, None], columns].cpu().numpy()
    return out


def as_rows(value: Any) -> ByteArray:
    """Return an array, numpy's or torch's, as `[T, bytes of a token] uint8` on the host."""
    if hasattr(value, "detach"):
        import torch

        value = value.detach()
        value = value.reshape(value.shape[0], int(np.prod(value.shape[1:], dtype=np.int64))).contiguous()
        return np.asarray(value.view(torch.uint8).cpu().numpy())
    array = np.ascontiguousarray(value)
    return array.reshape(array.shape[0], int(np.prod(array.shape[1:], dtype=np.int64))).view(np.uint8)
