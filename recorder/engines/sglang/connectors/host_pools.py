"""How HiCache's pool on the host lies beside the engine's: which layouts are known, and pages as runs of slots."""

from typing import Any, Final

import numpy as np

from .....kernels.arrays import Int64Array
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import CopyEnds
from ....capture.recorder import Recorder
from ....trace.schema import TIER_HOST, TIER_POOL
from ..layout import POOLS, host_pool

# The pools on the host whose layouts are known, by their very classes: of which pool's halves they hold copies.
HOST_POOLS: Final = {"MHATokenToKVPoolHost": "MHATokenToKVPool", "MLATokenToKVPoolHost": "MLATokenToKVPool"}

# Where layer, page, token of the page, head and word are among the axes of a host pool's buffer, of which pages are one.
AXES: Final = {"page_first_direct": (1, 0, 2, 3, 4), "page_head": (3, 0, 2, 1, 4)}


def pool_layers(controller: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the layers' halves in a controller's two pools, `[pages, page_size, heads, dim]` each; None if not known."""
    device, host, size = controller.mem_pool_device, host_pool(controller), int(controller.page_size)
    kind = HOST_POOLS.get(type(host).__name__, "")
    if type(device).__name__ != kind:
        return None
    here: list[Any] = []
    there: list[Any] = []
    for name in POOLS[kind].values():
        here += (layer.unflatten(0, (-1, size)) for layer in getattr(device, name))
        there += by_layer(getattr(host, name), host.layout, size)
    alike = len(here) == len(there) and len({(end.shape[1:], end.dtype) for end in [*here, *there]}) == 1
    return (here, there) if alike else None


def by_layer(buffer: Any, layout: str, page_size: int) -> Any:
    """Return a host pool's buffer as `[layers, pages, page_size, heads, dim]`, nothing if its layout is not known."""
    if layout == "layer_first":
        return buffer.unflatten(1, (-1, page_size))
    if layout == "page_first":
        return buffer.unflatten(0, (-1, page_size)).permute(2, 0, 1, 3, 4)
    return buffer.permute(AXES[layout]) if layout in AXES else ()


def copy_runs(src: Int64Array, dst: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return pairs of slots `[n]`, `[n]` as runs in which both rise by one: first of each, first of each, lengths."""
    ends = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate([np.zeros(min(src.size, 1), np.int64), ends])
    return src[starts], dst[starts], np.diff(np.append(starts, src.size))


def first_slots(slots: Int64Array, page_size: int) -> Int64Array:
    """Return the first slot of each page, `[n]`, of slots that are whole pages.

    Raises:
        ValueError: they are not.
    """
    whole = slots.size % page_size == 0
    pages = slots.reshape(-1, page_size if whole else 1)
    if not whole or (pages[:, 0] % page_size).any() or (np.diff(pages, axis=1) != 1).any():
        raise ValueError(f"HiCache copies other than whole pages of {page_size} slots")
    return pages[:, 0].copy()


def copy_sides(note: str, pool: Any, host: Any, *, to_host: bool) -> dict[str, Any]:
    """Return a copy between slots of the engine's pool and of the host's as `Recorder.kv_copy` is told of it."""
    tiers = (TIER_POOL, TIER_HOST) if to_host else (TIER_HOST, TIER_POOL)
    src, dst = (pool, host) if to_host else (host, pool)
    return {"group": 0, "src_tier": tiers[0], "dst_tier": tiers[1], "src": src, "dst": dst, "note": note}


def on_host(
    recorder: Recorder | DeviceRecorder,
    note: str,
    src: Int64Array,
    dst: Int64Array,
    count: Int64Array,
    ends: CopyEnds | None,
) -> None:
    """Record runs of the host's tier that are copied within it; runs of no slots say what lies there."""
    tiers = {"src_tier": TIER_HOST, "dst_tier": TIER_HOST}
    recorder.kv_copy(group=0, src=src, dst=dst, count=count, note=note, ends=ends, **tiers)


def record_held(recorder: Recorder, host: Int64Array, held: Int64Array) -> None:
    """Record that pages of the host's pool, by their first slots, are stored, and what lies there; 0 for what was not read."""
    none = np.zeros_like(held)
    on_host(recorder, "stored", host, host, none, CopyEnds(none, held, none, none - 1))
