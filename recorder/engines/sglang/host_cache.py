"""SGLang's HiCache: KV that goes to a pool on the host and comes back, recorded as copies between the two tiers.

`HiCacheController.write` puts a node's slots into slots of the host's pool, `load` brings them back into other slots of
the device's. Its copies run on streams of their own, the write behind all that was launched before it, the load before
the forward that reads what it brings: in the trace's order, a copy stands where it was asked for.

Only the plain case is recorded slot by slot: one pool, no draft model, no storage behind the host's pool, which fills the
host's slots past the controller (`layout.host_slots`). In any other the trace says at each load-back that everything
before it is unknown.
"""

from typing import Any

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.device.recorder import DeviceRecorder
from ...capture.host_arrays import own_int64
from ...capture.recorder import Recorder
from ...trace.schema import TIER_HOST, TIER_POOL
from ..common.hooking import Around, around
from .history import GroupHistory


class HostCache:
    """Records what one controller copies, of the only group that there is."""

    def __init__(self, controller: Any, recorder: Recorder | DeviceRecorder, histories: list[GroupHistory]) -> None:
        self.controller = controller
        self._recorder = recorder
        self._histories = histories

    @around
    def on_write(self, device_indices: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record slots that go to the host; the controller returns which of the host's they went to, None for none."""
        host_indices = yield
        if host_indices is not None:
            self._record(device_indices, host_indices, to_host=True)

    @around
    def on_load(self, host_indices: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record slots that come back; the controller returns which of the device's they come to, None for none."""
        device_indices = yield
        if device_indices is None:
            return
        if getattr(self.controller, "enable_storage", False):  # attached since the recording began
            self._recorder.lost("KV was loaded back from the host cache, which is filled from a storage")
            return
        for history in self._histories:
            history.filled(own_int64(device_indices))
        self._record(device_indices, host_indices, to_host=False)

    def on_load_back(self, *_args: Any, **_kwargs: Any) -> None:
        """Record that slots may have got content from a host cache; which ones is unknown."""
        self._recorder.lost("KV was loaded back from the host cache, which is not recorded")

    def _record(self, pool: Any, host: Any, *, to_host: bool) -> None:
        src_tier, dst_tier = (TIER_POOL, TIER_HOST) if to_host else (TIER_HOST, TIER_POOL)
        note = "offload" if to_host else "load-back"
        copy: dict[str, Any] = {"group": 0, "src_tier": src_tier, "dst_tier": dst_tier, "note": note}
        on_device = isinstance(self._recorder, DeviceRecorder)
        sides = [_to_host(side) if on_device else (side, None) for side in (pool, host)]

        def copies() -> tuple[Int64Array, Int64Array, Int64Array]:
            for _, there in sides:
                if there is not None:
                    there.synchronize()
            first, second = (own_int64(side) for side, _ in (sides if to_host else reversed(sides)))
            return copy_runs(first, second)

        if isinstance(self._recorder, DeviceRecorder):
            self._recorder.kv_copy_later(copies, filled=None if to_host else pool, **copy)
        else:
            src, dst, count = copies()
            self._recorder.kv_copy(src=src, dst=dst, count=count, **copy)


def copy_runs(src: Int64Array, dst: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return pairs of slots `[n]`, `[n]` as runs in which both rise by one: first of each, first of each, lengths."""
    ends = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate([np.zeros(min(src.size, 1), np.int64), ends])
    return src[starts], dst[starts], np.diff(np.append(starts, src.size))


def _to_host(indices: Any) -> tuple[Any, Any]:
    """Have indices copied to the host without waiting; return the copy, and an event after which it is there."""
    if indices.device.type == "cpu":
        return indices.clone(), None
    import torch

    copied = torch.empty(indices.shape, dtype=indices.dtype, pin_memory=True)
    copied.copy_(indices, non_blocking=True)
    there = torch.cuda.Event()
    there.record()
    return copied, there
