"""SGLang's HiCache: KV that goes to a pool on the host and comes back, told as copies between the two tiers.

`HiCacheController.write` puts a node's slots into slots of the host's pool, `load` brings them back into other slots of
the device's. Its copies run on streams of their own, the write behind all that was launched before it, the load before
the forward that reads what it brings: in the trace's order, a copy stands where it was asked for.

Only the plain case is told slot by slot: one pool, no draft model, no storage behind the host's pool, which fills the
host's slots past the controller. `HostCache.of` says whether it is this one; in any other the trace says at each
load-back that everything before it is unknown.
"""

import functools
from typing import Any, Final

import numpy as np

from ...capture.device.recorder import DeviceRecorder
from ...capture.host_arrays import Int64Array, own_int64
from ...capture.recorder import Recorder
from ...trace.header import PoolGroup
from ...trace.schema import TIER_HOST, TIER_POOL
from ..common.hooking import Finish
from .history import GroupHistory

CONTROLLER: Final = "HiCacheController"
GROUP: Final = 0


def host_slots(scheduler: Any, groups: list[PoolGroup]) -> int:
    """Return how many slots the host's pool has, 0 where there is none or it cannot be told slot by slot."""
    controller = controller_of(scheduler)
    if type(controller).__name__ != CONTROLLER or len(groups) != 1 or groups[0].kind != "full":
        return 0
    if getattr(controller, "enable_storage", False):
        return 0
    pool = getattr(controller, "mem_pool_host", None)
    return int(getattr(pool, "size", 0) or 0)


def controller_of(scheduler: Any) -> Any:
    """Return what moves a scheduler's KV between device and host; None without HiCache."""
    if not getattr(scheduler, "enable_hierarchical_cache", False):
        return None
    return getattr(getattr(scheduler, "tree_cache", None), "cache_controller", None)


class HostCache:
    """Tells what one controller copies, of the only group that there is."""

    def __init__(self, controller: Any, recorder: Recorder | DeviceRecorder, histories: list[GroupHistory]) -> None:
        self.controller = controller
        self._recorder = recorder
        self._histories = histories

    def on_write(self, device_indices: Any, *_args: Any, **_kwargs: Any) -> Finish:
        """Tell of slots that go to the host; the controller returns which of the host's they went to, None for none."""

        def finish(host_indices: Any, error: BaseException | None) -> None:
            if error is None and host_indices is not None:
                self._tell(device_indices, host_indices, to_host=True)

        return finish

    def on_load(self, host_indices: Any, *_args: Any, **_kwargs: Any) -> Finish:
        """Tell of slots that come back; the controller returns which of the device's they come to, None for none."""

        def finish(device_indices: Any, error: BaseException | None) -> None:
            if error is not None or device_indices is None:
                return
            if getattr(self.controller, "enable_storage", False):  # attached since the recording began
                self._recorder.lost("KV was loaded back from the host cache, which is filled from a storage")
                return
            for history in self._histories:
                history.filled(own_int64(device_indices))
            self._tell(device_indices, host_indices, to_host=False)

        return finish

    def _tell(self, pool: Any, host: Any, *, to_host: bool) -> None:
        told: dict[str, Any] = {
            "group": GROUP,
            "src_tier": TIER_POOL if to_host else TIER_HOST,
            "dst_tier": TIER_HOST if to_host else TIER_POOL,
            "note": "offload" if to_host else "load-back",
        }
        if isinstance(self._recorder, DeviceRecorder):
            copies = functools.partial(_runs_later, *_landing(pool), *_landing(host), to_host)
            self._recorder.kv_copy_later(copies, filled=None if to_host else pool, **told)
        else:
            src, dst, count = copy_runs(*_ordered(own_int64(pool), own_int64(host), to_host))
            self._recorder.kv_copy(src=src, dst=dst, count=count, **told)


def copy_runs(src: Int64Array, dst: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return pairs of slots `[n]`, `[n]` as runs in which both rise by one: first of each, first of each, lengths."""
    ends = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate([np.zeros(min(src.size, 1), np.int64), ends])
    return src[starts], dst[starts], np.diff(np.append(starts, src.size))


def _ordered(pool: Int64Array, host: Int64Array, to_host: bool) -> tuple[Int64Array, Int64Array]:
    return (pool, host) if to_host else (host, pool)


def _landing(indices: Any) -> tuple[Any, Any]:
    """Have indices copied to the host without waiting; return where they land, and an event after which they are there."""
    if indices.device.type == "cpu":
        return indices.clone(), None
    import torch

    landing = torch.empty(indices.shape, dtype=indices.dtype, pin_memory=True)
    landing.copy_(indices, non_blocking=True)
    there = torch.cuda.Event()
    there.record()
    return landing, there


def _runs_later(
    pool: Any, pool_there: Any, host: Any, host_there: Any, to_host: bool
) -> tuple[Int64Array, Int64Array, Int64Array]:
    for there in (pool_there, host_there):
        if there is not None:
            there.synchronize()
    return copy_runs(*_ordered(own_int64(pool), own_int64(host), to_host))
