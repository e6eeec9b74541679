"""What HiCache copies to its pool on the host and back: which slots, and what lies at both ends.

A copy is recorded where the controller begins it: a store behind all that was launched before it, a load before the forward
that reads what it brings. On the CPU all layers' bytes are hashed at both ends, page by page: of a store the slots right before
it, the host's pool once the controller takes it for done; of a load the host's pool and the slots right before it, the slots
again when the next forward begins. What has not landed by then is looked at again behind that forward and the next ones. On a
GPU a hash would wait for the device: there copies are recorded without.

What lies in a storage behind the host's pool is followed page by page (`storage.py`). What somebody else has stored there is
unknown, as are the slots that it is loaded to; on the CPU their bytes are recorded.

Only the plain case is recorded slot by slot: one pool, no draft model (`layout.host_pool`). In any other the trace says at each
load-back that everything before it is unknown.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .....kernels.arrays import BoolArray, Int64Array
from .....kernels.ops.end_hash.reference import end_hashes
from ....capture.device.host_copy import HostCopy
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import CopyEnds, own_int64
from ....capture.recorder import Recorder
from ....errors import error_text
from ....trace.schema import TIER_HOST, TIER_POOL
from ...common.copy_bounds import LATE_STEPS, MAX_HASHED_BYTES, MAX_LATE, MAX_SEARCHED_SLOTS, SEARCHES
from ...common.hooking import Around, Finish, Hook, around, beside
from ..history import GroupHistory
from ..layout import POOLS, host_pool
from .storage import Move, Storage, ends_of, storage_slots
from .transfers import record_unknown

logger = logging.getLogger("kvcanary")


# The pools on the host whose layouts are known, by their very classes: of which pool's halves they hold copies.
HOST_POOLS: Final = {"MHATokenToKVPoolHost": "MHATokenToKVPool", "MLATokenToKVPoolHost": "MLATokenToKVPool"}

OF_OTHERS: Final = "a load of what somebody else has stored"

# Where layer, page, token of the page, head and word are among the axes of a host pool's buffer, of which pages are one.
AXES: Final = {"page_first_direct": (1, 0, 2, 3, 4), "page_head": (3, 0, 2, 1, 4)}


class Load(NamedTuple):
    """Pages that are loaded: their first slots in both pools, what lay on the host, and in the slots before, `[n]` each."""

    pool: Int64Array
    host: Int64Array
    there: Int64Array
    before: Int64Array


class PoolBytes:
    """Hashes what lies in the engine's pool, and in the host's: pages `[pages, page_size, heads, dim]` of each layer's halves."""

    def __init__(self, here: Sequence[Any], there: Sequence[Any], page_size: int) -> None:
        self.page_size = page_size
        self._here, self._there = here, there
        self._page_bytes = sum(int(layer[0].nbytes) for layer in here)

    def here(self, pages: Int64Array) -> Int64Array:
        """Return the hash of each page of the engine's pool, by its first slot, `[n]`; zeros if they are too many."""
        return self._hashes(pages, self._here)

    def there(self, pages: Int64Array) -> Int64Array:
        """Return the same of pages of the host's pool."""
        return self._hashes(pages, self._there)

    def _hashes(self, pages: Int64Array, layers: Sequence[Any]) -> Int64Array:
        import torch

        if not pages.size or pages.size * self._page_bytes > MAX_HASHED_BYTES:
            return np.zeros(pages.size, np.int64)
        which = torch.from_numpy(pages // self.page_size)
        return end_hashes([layer[which].view(torch.uint8).view(pages.size, -1).numpy() for layer in layers])


def pool_bytes(controller: Any) -> PoolBytes | None:
    """Return what hashes the two pools of a controller, None if they do not both lie in the host's memory in a known way."""
    device, host, size = controller.mem_pool_device, host_pool(controller), int(controller.page_size)
    kind = HOST_POOLS.get(type(host).__name__, "")
    if type(device).__name__ != kind:
        return None
    here: list[Any] = []
    there: list[Any] = []
    for name in POOLS[kind].values():
        here += (layer.unflatten(0, (-1, size)) for layer in getattr(device, name))
        there += by_layer(getattr(host, name), host.layout, size)
    ends = [*here, *there]
    alike = len(here) == len(there) and len({(end.shape[1:], end.dtype) for end in ends}) == 1
    return PoolBytes(here, there, size) if alike and all(end.device.type == "cpu" for end in ends) else None


def by_layer(buffer: Any, layout: str, page_size: int) -> Any:
    """Return a host pool's buffer as `[layers, pages, page_size, heads, dim]`, nothing if its layout is not known."""
    if layout == "layer_first":
        return buffer.unflatten(1, (-1, page_size))
    if layout == "page_first":
        return buffer.unflatten(0, (-1, page_size)).permute(2, 0, 1, 3, 4)
    return buffer.permute(AXES[layout]) if layout in AXES else ()


class HostCache:
    """Records what one controller copies, of the only group that there is."""

    def __init__(self, controller: Any, recorder: Recorder | DeviceRecorder, histories: list[GroupHistory]) -> None:
        self.controller = controller
        self._recorder = recorder
        self._histories = histories
        self._kv: Any = None
        self._bytes: PoolBytes | None = None
        if not isinstance(recorder, DeviceRecorder):
            self._kv = recorder.kv
            if any(group.host_num_slots for group in recorder.header.groups):
                try:
                    self._bytes = pool_bytes(controller)
                except Exception as error:  # noqa: BLE001  # pools of another shape
                    logger.warning("kvcanary: HiCache's copies are recorded without hashes: %s", error_text(error))
        self._stores: list[tuple[Any, Int64Array]] = []  # the controller's word for one that is under way, and where to
        # Loads that have begun, and are not recorded yet; and which of their pages somebody else has stored.
        self._started: list[tuple[Load, BoolArray]] = []
        self._waiting: list[Any] = []  # loads that had not begun before the last forward
        self._late: list[tuple[int, Load]] = []  # steps left, and pages of a load that had not landed
        self._searches = SEARCHES
        self._load_backs = 0  # calls that are under way
        self._storage: Storage | None = None
        first = int(getattr(host_pool(controller), "size", 0) or 0)
        room = storage_slots(controller, first)
        if room and any(group.host_num_slots for group in recorder.header.groups):
            self._storage = Storage(first, room, int(controller.page_size), self._there, self._record_stored)

    @property
    def reads_bytes(self) -> bool:
        """Whether both ends are hashed, for which forwards are hooked, too."""
        return self._bytes is not None

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
        if self._bytes is None:
            yield
            for pool, host in ops:
                self._record_slots(pool, host, to_host=True)
            return
        pool, host = self._pages(ops)
        given, known = self._bytes.here(pool), len(self._acks())
        yield
        zeros = np.zeros_like(given)
        self._record("offload", pool, host, CopyEnds(given, zeros, zeros, zeros - 1), to_host=True)
        if len(self._acks()) > known and given.any():
            self._stores.append((self._acks()[-1], host))

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
        if self._bytes is None:
            self._record_slots(device_indices, host_indices, to_host=False)

    @around
    def on_start_loading(self, *_args: Any, **_kwargs: Any) -> Around:
        """Take note of the loads that were asked for, and that begin now."""
        self._flush()
        ops = _operations(self.controller.load_queue)
        if self._bytes is None or not ops:
            return
        pool, host = self._pages(ops)
        load = Load(pool, host, self._bytes.there(host), self._bytes.here(pool))
        yield
        self._started.append((load, self._unknown(host)))

    @beside
    def on_forward(self, *_args: Any, **_kwargs: Any) -> Around:
        """Record the loads that a forward may read, before it, and what has landed late, behind it."""
        self._flush()
        self._flush_loads()
        self._make_unknown()
        yield
        self._record_late()

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
                record_unknown(self._recorder, 0, own_int64(op.device_indices), "a load that has not begun", read=True)

    def _acks(self) -> list[Any]:
        """Return what stands for the stores that the controller does not take for done yet."""
        return getattr(self.controller, "ack_write_queue", None) or []

    def _pages(self, ops: Sequence[tuple[Any, Any]]) -> tuple[Int64Array, Int64Array]:
        """Return the first slot of each page in both pools, `[n]` each.

        Raises:
            ValueError: what is copied is not made of whole pages.
        """
        size = 1 if self._bytes is None else self._bytes.page_size
        pool, host = (
            np.concatenate([own_int64(side) for side in sides]).reshape(-1, size) for sides in zip(*ops, strict=True)
        )
        for side in (pool, host):
            if (side[:, 0] % size).any() or (np.diff(side, axis=1) != 1).any():
                raise ValueError(f"HiCache copies other than whole pages of {size} slots")
        return pool[:, 0].copy(), host[:, 0].copy()

    def _flush(self) -> None:
        """Record what lies on the host of the stores that the controller takes for done, and what the storage got and gave."""
        self._flush_stores()
        if self._storage is not None:
            self._storage.flush()

    def _flush_stores(self) -> None:
        if not self._stores or self._bytes is None:
            return
        waiting = {id(ack) for ack in self._acks()}
        done = [host for ack, host in self._stores if id(ack) not in waiting]
        self._stores = [(ack, host) for ack, host in self._stores if id(ack) in waiting]
        for host in done:
            there = self._bytes.there(host)
            if self._storage is not None:  # another page may lie there by now
                there[self._storage.overwritten(host)] = 0
            zeros = np.zeros_like(there)
            self._on_host("stored", host, host, zeros, CopyEnds(zeros, there, zeros, zeros - 1))

    def _record_stored(self, move: Move, places: Int64Array) -> None:
        """Record pages that went to the storage, or came from there, where they have `places`."""
        count = np.full(places.size, int(self.controller.page_size), np.int64)
        if move.to_storage:
            self._on_host("to storage", move.host, places, count, ends_of(move))
        else:
            self._on_host("from storage", places, move.host, count, ends_of(move))

    def _on_host(self, note: str, src: Int64Array, dst: Int64Array, count: Int64Array, ends: CopyEnds | None) -> None:
        """Record runs of the host's tier that are copied within it; runs of no slots say what lies there."""
        tiers = {"src_tier": TIER_HOST, "dst_tier": TIER_HOST}
        self._recorder.kv_copy(group=0, src=src, dst=dst, count=count, note=note, ends=ends, **tiers)

    def _unknown(self, slots: Int64Array) -> BoolArray:
        """Say of each slot of the host's pool whether somebody else has stored what lies there, `[n] bool`."""
        return np.zeros(slots.size, np.bool_) if self._storage is None else self._storage.unknown(slots)

    def _flush_loads(self) -> None:
        """Record the loads that have begun, with what their slots hold now."""
        started, self._started = self._started, []
        for load, unknown in started:
            if unknown.any() and self._bytes is not None:
                slots = (load.pool[unknown][:, None] + np.arange(self._bytes.page_size)).reshape(-1)
                record_unknown(self._recorder, 0, slots, OF_OTHERS, read=True)
                load = Load(*(part[~unknown] for part in load))
            here = self._here(load.pool)
            missing = np.flatnonzero((here != load.there) & (here == load.before) & (here != 0))
            ends = CopyEnds(load.there, here, load.before, self._landed_at(load, missing))
            self._record("load-back", load.pool, load.host, ends, to_host=False)
            room = MAX_LATE - sum(one.pool.size for _, one in self._late)
            if missing.size and room > 0:
                self._late.append((LATE_STEPS, Load(*(part[missing[:room]] for part in load))))

    def _record_late(self) -> None:
        """Record what has landed behind the forward that was to read it."""
        late, self._late = self._late, []
        for left, load in late:
            landed = self._here(load.pool) == load.there
            if landed.any():
                there = load.there[landed]
                zeros = np.zeros_like(there)
                ends = CopyEnds(there, there, zeros, zeros - 1)
                self._record("landed late", load.pool[landed], zeros, ends, to_host=False, whole=False)
            if left > 1 and not landed.all():
                self._late.append((left - 1, Load(*(part[~landed] for part in load))))

    def _there(self, pages: Int64Array) -> Int64Array:
        return np.zeros(pages.size, np.int64) if self._bytes is None else self._bytes.there(pages)

    def _here(self, pages: Int64Array) -> Int64Array:
        return np.zeros(pages.size, np.int64) if self._bytes is None else self._bytes.here(pages)

    def _landed_at(self, load: Load, missing: Int64Array) -> Int64Array:
        """Return the first slot of the page that has the bytes of each page of a load, `[n]`, -1 for none that is found."""
        found = np.full(load.pool.size, -1, np.int64)
        if missing.size and self._searches and self._recorder.header.groups[0].num_slots <= MAX_SEARCHED_SLOTS:
            self._searches -= 1
            size = self._bytes.page_size if self._bytes is not None else 1
            others = np.setdiff1d(self._kv[0].otherwise() // size * size, [0, *load.pool.tolist()])
            at = dict(zip(self._here(others).tolist(), others.tolist(), strict=True))
            found[missing] = [at.get(lay, -1) for lay in load.there[missing].tolist()]
        return found

    def _record(
        self, note: str, pool: Int64Array, host: Int64Array, ends: CopyEnds, *, to_host: bool, whole: bool = True
    ) -> None:
        """Record copies of pages, one run each; if not `whole`, only what lies at their ends."""
        size = self._bytes.page_size if self._bytes is not None and whole else 0
        count = np.full(pool.size, size, np.int64)
        looked_at = ends.src.any() or ends.dst.any()
        self._recorder.kv_copy(count=count, ends=ends if looked_at else None, **_sides(note, pool, host, to_host))

    def _record_slots(self, pool: Any, host: Any, *, to_host: bool) -> None:
        """Record slots that are copied, without what lies there; nothing waits for those that a device knows."""
        copy = _sides("offload" if to_host else "load-back", pool, host, to_host)
        sides = copy.pop("src"), copy.pop("dst")
        unknown = self._unknown(own_int64(host)) if self._storage is not None and not to_host else None
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
            self._record_unknown(pool, unknown)

    def _record_unknown(self, pool: Any, unknown: BoolArray) -> None:
        """Record which slots of the engine's pool, `[n]`, get what somebody else has stored; nothing waits for a device."""
        if isinstance(self._recorder, DeviceRecorder):
            own = self._recorder.recorder
            self._recorder.later_with(lambda slots: record_unknown(own, 0, slots[unknown], OF_OTHERS), pool)
        else:
            record_unknown(self._recorder, 0, own_int64(pool)[unknown], OF_OTHERS)


def _operations(queue: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return `(device_indices, host_indices)` of what a controller is about to copy.

    Raises:
        ValueError: pools beside the only one that is known are copied, too.
    """
    if any(getattr(op, "pool_transfers", None) for op in queue):
        raise ValueError("HiCache copies other pools beside the one that is recorded")
    return [(op.device_indices, op.host_indices) for op in queue]


def _sides(note: str, pool: Any, host: Any, to_host: bool) -> dict[str, Any]:
    tiers = (TIER_POOL, TIER_HOST) if to_host else (TIER_HOST, TIER_POOL)
    src, dst = (pool, host) if to_host else (host, pool)
    return {"group": 0, "src_tier": tiers[0], "dst_tier": tiers[1], "src": src, "dst": dst, "note": note}


def copy_runs(src: Int64Array, dst: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return pairs of slots `[n]`, `[n]` as runs in which both rise by one: first of each, first of each, lengths."""
    ends = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate([np.zeros(min(src.size, 1), np.int64), ends])
    return src[starts], dst[starts], np.diff(np.append(starts, src.size))
