"""What HiCache copies to its pool on the host and back: which slots, and what lies at both ends.

A copy is recorded where the controller begins it: a store behind all that was launched before it, a load before the forward
that reads what it brings. Both ends are hashed page by page where both pools lie as is known: in the host's memory
(`host_copies.py`), or on a device and in pinned memory (`device_copies.py`).

What lies in a storage behind the host's pool is followed page by page (`storage.py`). What somebody else has stored there is
unknown, as are the slots that it is loaded to; on the CPU their bytes are recorded.

Only the plain case is recorded slot by slot: one pool, no draft model (`layout.host_pool`). In any other the trace says at each
load-back that everything before it is unknown.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .....kernels.arrays import BoolArray, Int64Array
from ....capture.device.host_copy import HostCopy
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import own_int64
from ....capture.recorder import Recorder
from ....errors import error_text
from ...common.hooking import Around, Finish, Hook, around, beside
from ..history import GroupHistory
from ..layout import host_pool
from .device_copies import DeviceCopies
from .host_copies import HostCopies
from .host_pools import copy_runs, copy_sides, on_host, pool_layers
from .storage import Move, Storage, ends_of, storage_slots
from .unknown import OF_OTHERS, record_unknown

logger = logging.getLogger("kvcanary")

Operations = Sequence[tuple[Any, Any]]  # slots of the engine's pool and of the host's


class Copies(Protocol):
    """Records what a controller copies; `unknown` are slots whose content somebody else has stored, `[n]`."""

    storage: Storage | None

    def store(self, ops: Operations) -> AbstractContextManager[None]:
        """Record slots that go to the host, while the controller begins it."""

    def asked(self, pool: Any, host: Any) -> None:
        """Take note of slots that are to be loaded, whose load has not begun."""

    def load(self, ops: Operations, unknown: BoolArray) -> AbstractContextManager[None]:
        """Record slots that come back, while the controller begins it."""

    def flush(self) -> None:
        """Record what is known by now of the stores."""

    def before_forward(self) -> None:
        """Record what a forward may read."""

    def after_forward(self) -> None:
        """Record what has come behind it."""

    def there(self, pages: Int64Array) -> Int64Array:
        """Return the hash of what lies in pages of the host's pool now, by their first slots, `[n]`; zeros if nobody looks."""


class SlotCopies:
    """Records which slots are copied, and not what lies there; nothing waits for slots that a device knows."""

    def __init__(self, recorder: Recorder | DeviceRecorder) -> None:
        self._recorder = recorder
        self.storage: Storage | None = None

    @contextlib.contextmanager
    def store(self, ops: Operations) -> Iterator[None]:
        """Record slots that go to the host."""
        yield
        for pool, host in ops:
            self._record(pool, host, to_host=True)

    def asked(self, pool: Any, host: Any) -> None:
        """Record slots that come back, before any forward may read them."""
        self._record(pool, host, to_host=False)

    def load(self, ops: Operations, unknown: BoolArray) -> AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    def flush(self) -> None:
        """Do nothing."""

    before_forward = after_forward = flush

    def there(self, pages: Int64Array) -> Int64Array:
        """Return zeros."""
        return np.zeros(pages.size, np.int64)

    def _record(self, pool: Any, host: Any, *, to_host: bool) -> None:
        copy = copy_sides("offload" if to_host else "load-back", pool, host, to_host=to_host)
        sides = copy.pop("src"), copy.pop("dst")
        unknown = self.storage.unknown(own_int64(host)) if self.storage is not None and not to_host else None
        known = slice(None) if unknown is None else ~unknown
        if isinstance(self._recorder, DeviceRecorder):
            read, written = (HostCopy(side) for side in sides)
            self._recorder.kv_copy_later(
                lambda: copy_runs(read.read()[known], written.read()[known]), filled=None if to_host else pool, **copy
            )
        else:
            src, dst, count = copy_runs(*(own_int64(side)[known] for side in sides))
            self._recorder.kv_copy(src=src, dst=dst, count=count, **copy)
        if unknown is not None and unknown.any():
            record_unknown(self._recorder, 0, pool, OF_OTHERS, which=unknown)


def copies_of(controller: Any, recorder: Recorder | DeviceRecorder) -> Copies:
    """Return what records a controller's copies, with what lies at both ends if that can be read."""
    try:
        layers = pool_layers(controller) if any(group.host_num_slots for group in recorder.header.groups) else None
        if layers is None:
            return SlotCopies(recorder)
        if isinstance(recorder, DeviceRecorder):
            return DeviceCopies(controller, recorder, *layers)
        if all(layer.device.type == "cpu" for side in layers for layer in side):
            return HostCopies(controller, recorder, *layers)
    except Exception as error:  # noqa: BLE001  # pools of another shape
        logger.warning("kvcanary: HiCache's copies are recorded without hashes: %s", error_text(error))
    return SlotCopies(recorder)


class HostCache:
    """Records what one controller copies, of the only group that there is."""

    def __init__(self, controller: Any, recorder: Recorder | DeviceRecorder, histories: list[GroupHistory]) -> None:
        self.controller = controller
        self._recorder = recorder
        self._histories = histories
        self._copies = copies_of(controller, recorder)
        self._waiting: list[Any] = []  # loads that had not begun before the last forward
        self._load_backs = 0  # calls that are under way
        self._storage: Storage | None = None
        first = int(getattr(host_pool(controller), "size", 0) or 0)
        room = storage_slots(controller, first)
        if room and any(group.host_num_slots for group in recorder.header.groups):
            self._storage = self._copies.storage = Storage(
                first, room, int(controller.page_size), self._copies.there, self._record_stored
            )

    @property
    def reads_bytes(self) -> bool:
        """Whether both ends are hashed, for which forwards are hooked, too."""
        return not isinstance(self._copies, SlotCopies)

    def hooks(self) -> dict[str, Hook]:
        """Return the hooks around the controller's functions, by their names."""
        own = {"start_writing": self.on_start_writing, "load": self.on_load, "start_loading": self.on_start_loading}
        return own | (self._storage.hooks() if self._storage is not None else {})

    @around
    def on_start_writing(self, *_args: Any, **_kwargs: Any) -> Around:
        """Record slots that go to the host, of all the stores that were asked for."""
        self._flush()
        ops = _operations(self.controller.write_queue)
        if not ops:
            return
        if self._storage is not None:
            self._storage.filled(np.concatenate([own_int64(host) for _, host in ops]))
        with self._copies.store(ops):
            yield

    @around
    def on_load(self, host_indices: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record that slots are given to what comes back; the controller returns which, None for none."""
        self._flush()
        device_indices = yield
        if device_indices is None:
            return
        if self._storage is None and getattr(self.controller, "enable_storage", False):
            self._recorder.lost("KV was loaded back from the host cache, which is filled from a storage attached since")
            return
        for history in self._histories:
            history.filled(device_indices)
        self._copies.asked(device_indices, host_indices)

    @around
    def on_start_loading(self, *_args: Any, **_kwargs: Any) -> Around:
        """Record the loads that were asked for, and that begin now."""
        self._flush()
        ops = _operations(self.controller.load_queue)
        if not ops:
            return
        with self._copies.load(ops, self._unknown(ops)):
            yield

    @beside
    def on_forward(self, *_args: Any, **_kwargs: Any) -> Around:
        """Record the loads that a forward may read, before it, and what has landed late, behind it."""
        self._flush()
        self._copies.before_forward()
        self._make_unknown()
        yield
        self._copies.after_forward()

    def on_load_back(self, *_args: Any, **_kwargs: Any) -> Finish:
        """Record that slots may have got content from a host cache; which ones is unknown.

        One call may make another, of the same load.
        """
        if not self._load_backs:
            self._recorder.lost("KV was loaded back from the host cache, which is not recorded")
        self._load_backs += 1

        def leave(_: Any, __: BaseException | None) -> None:
            self._load_backs -= 1

        return leave

    def _make_unknown(self) -> None:
        """Record that nothing is known of slots whose load was asked for and has not begun: the prefix cache holds them."""
        known, self._waiting = self._waiting, list(self.controller.load_queue)
        for op in self._waiting:
            if not any(op is other for other in known):
                record_unknown(self._recorder, 0, op.device_indices, "a load that has not begun", read=True)

    def _flush(self) -> None:
        """Record what lies on the host of the stores that the controller takes for done, and what the storage got and gave."""
        self._copies.flush()
        if self._storage is not None:
            self._storage.flush()

    def _record_stored(self, move: Move, places: Int64Array) -> None:
        """Record pages that went to the storage, or came from there, where they have `places`."""
        count = np.full(places.size, int(self.controller.page_size), np.int64)
        if move.to_storage:
            on_host(self._recorder, "to storage", move.host, places, count, ends_of(move))
        else:
            on_host(self._recorder, "from storage", places, move.host, count, ends_of(move))

    def _unknown(self, ops: Operations) -> BoolArray:
        """Say of each slot that is loaded, `[n] bool`, whether somebody else has stored what lies there on the host."""
        if self._storage is None:
            return np.zeros(sum(len(host) for _, host in ops), np.bool_)
        return self._storage.unknown(np.concatenate([own_int64(host) for _, host in ops]))


def _operations(queue: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return `(device_indices, host_indices)` of what a controller is about to copy.

    Raises:
        ValueError: pools beside the only one that is known are copied, too.
    """
    if any(getattr(op, "pool_transfers", None) for op in queue):
        raise ValueError("HiCache copies other pools beside the one that is recorded")
    return [(op.device_indices, op.host_indices) for op in queue]
