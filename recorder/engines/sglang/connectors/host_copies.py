"""HiCache's copies where both pools lie in the host's memory: all bytes are hashed at both ends, page by page.

Of a store the slots are hashed right before it, and the host's pool once the controller takes it for done; of a load the host's
pool and the slots right before it, and the slots again when the next forward begins. What has not landed by then is looked at
again behind that forward and the next ones.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .....kernels.arrays import BoolArray, Int64Array
from .....kernels.ops.end_hash.reference import end_hashes
from ....capture.host_arrays import CopyEnds, own_int64
from ....capture.recorder import Recorder
from ...common.copy_bounds import LATE_STEPS, MAX_HASHED_BYTES, MAX_LATE, MAX_SEARCHED_SLOTS, SEARCHES
from .host_pools import copy_sides, first_slots, record_held
from .storage import Storage
from .unknown import OF_OTHERS, record_unknown


class Load(NamedTuple):
    """Pages that are loaded: their first slots in both pools, what lay on the host, and in the slots before, `[n]` each."""

    pool: Int64Array
    host: Int64Array
    there: Int64Array
    before: Int64Array


class HostCopies:
    """Records what one controller copies; `here` and `there` are the layers of both pools, as `pool_layers` gives them."""

    def __init__(self, controller: Any, recorder: Recorder, here: Sequence[Any], there: Sequence[Any]) -> None:
        self._controller, self._recorder = controller, recorder
        self._size = int(controller.page_size)
        self._layers = here, there
        self._page_bytes = sum(int(layer[0].nbytes) for layer in here)
        self.storage: Storage | None = None
        self._stores: list[tuple[Any, Int64Array]] = []  # the controller's word for one that is under way, and where to
        # Loads that have begun, and are not recorded yet; and which of their pages somebody else has stored.
        self._started: list[tuple[Load, BoolArray]] = []
        self._late: list[tuple[int, Load]] = []  # steps left, and pages of a load that had not landed
        self._right: dict[int, int] = {}  # what a page was to get by its last load
        self._searches = SEARCHES

    def here(self, pages: Int64Array) -> Int64Array:
        """Return the hash of each page of the engine's pool, by its first slot, `[n]`; zeros if they are too many."""
        return self._hashes(pages, self._layers[0])

    def there(self, pages: Int64Array) -> Int64Array:
        """Return the same of pages of the host's pool."""
        return self._hashes(pages, self._layers[1])

    def _hashes(self, pages: Int64Array, layers: Sequence[Any]) -> Int64Array:
        import torch

        if not pages.size or pages.size * self._page_bytes > MAX_HASHED_BYTES:
            return np.zeros(pages.size, np.int64)
        which = torch.from_numpy(pages // self._size)
        return end_hashes([layer[which].view(torch.uint8).view(pages.size, -1).numpy() for layer in layers])

    @contextlib.contextmanager
    def store(self, ops: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """Record pages that go to the host, while the controller begins it."""
        pool, host = self._pages(ops)
        given, known = self.here(pool), len(self._acks())
        yield
        zeros = np.zeros_like(given)
        self._record("offload", pool, host, CopyEnds(given, zeros, zeros, zeros - 1), to_host=True)
        if len(self._acks()) > known and given.any():
            self._stores.append((self._acks()[-1], host))

    def asked(self, pool: Any, host: Any) -> None:
        """Take note that slots are to be loaded: they are recorded once that has begun."""

    @contextlib.contextmanager
    def load(self, ops: Sequence[tuple[Any, Any]], unknown: BoolArray) -> Iterator[None]:
        """Take note of pages that come back, while the controller begins it; of slots that are `unknown` `[n]` nobody here has stored them."""
        pool, host = self._pages(ops)
        load = Load(pool, host, self.there(host), self.here(pool))
        self._right |= dict(zip(pool.tolist(), load.there.tolist(), strict=True))
        yield
        self._started.append((load, unknown[:: self._size]))

    def flush(self) -> None:
        """Record what lies on the host of the stores that the controller takes for done."""
        if not self._stores:
            return
        waiting = {id(ack) for ack in self._acks()}
        done = [host for ack, host in self._stores if id(ack) not in waiting]
        self._stores = [(ack, host) for ack, host in self._stores if id(ack) in waiting]
        for host in done:
            there = self.there(host)
            if self.storage is not None:  # another page may lie there by now
                there[self.storage.overwritten(host)] = 0
            record_held(self._recorder, host, there)

    def before_forward(self) -> None:
        """Record the loads that have begun, with what their slots hold now."""
        started, self._started = self._started, []
        for load, unknown in started:
            if unknown.any():
                slots = (load.pool[unknown][:, None] + np.arange(self._size)).reshape(-1)
                record_unknown(self._recorder, 0, slots, OF_OTHERS, read=True)
                load = Load(*(part[~unknown] for part in load))
            here = self.here(load.pool)
            missing = np.flatnonzero((here != load.there) & (here == load.before) & (here != 0))
            ends = CopyEnds(load.there, here, load.before, self._landed_at(load, missing))
            self._record("load-back", load.pool, load.host, ends, to_host=False)
            room = MAX_LATE - sum(one.pool.size for _, one in self._late)
            wrong = np.flatnonzero((here != load.there) & (here != 0) & (load.there != 0))  # or a part of it is missing
            if wrong.size and room > 0:
                self._late.append((LATE_STEPS, Load(*(part[wrong[:room]] for part in load))))

    def after_forward(self) -> None:
        """Record what has landed behind the forward that was to read it."""
        late, self._late = self._late, []
        for left, load in late:
            landed = self.here(load.pool) == load.there
            if landed.any():
                there = load.there[landed]
                zeros = np.zeros_like(there)
                ends = CopyEnds(there, there, zeros, zeros - 1)
                self._record("landed late", load.pool[landed], zeros, ends, to_host=False, whole=False)
            if left > 1 and not landed.all():
                self._late.append((left - 1, Load(*(part[~landed] for part in load))))

    def _landed_at(self, load: Load, missing: Int64Array) -> Int64Array:
        """Return the first slot of the page that has the bytes of each page of a load, `[n]`, -1 for none that is found."""
        found = np.full(load.pool.size, -1, np.int64)
        if missing.size and self._searches and self._recorder.header.groups[0].num_slots <= MAX_SEARCHED_SLOTS:
            self._searches -= 1
            others = self._recorder.kv[0].otherwise() // self._size * self._size
            others = np.setdiff1d(others, [0, *load.pool.tolist()])
            hashes = zip(self.here(others).tolist(), others.tolist(), strict=True)
            # What another load has brought is not this one's.
            at = {lay: page for lay, page in hashes if self._right.get(page) != lay}
            found[missing] = [at.get(lay, -1) for lay in load.there[missing].tolist()]
        return found

    def _acks(self) -> list[Any]:
        """Return what stands for the stores that the controller does not take for done yet."""
        return getattr(self._controller, "ack_write_queue", None) or []

    def _pages(self, ops: Sequence[tuple[Any, Any]]) -> tuple[Int64Array, Int64Array]:
        """Return the first slot of each page in both pools, `[n]` each."""
        pool, host = (np.concatenate([own_int64(one) for one in side]) for side in zip(*ops, strict=True))
        return first_slots(pool, self._size), first_slots(host, self._size)

    def _record(
        self, note: str, pool: Int64Array, host: Int64Array, ends: CopyEnds, *, to_host: bool, whole: bool = True
    ) -> None:
        """Record copies of pages, one run each; if not `whole`, only what lies at their ends."""
        count = np.full(pool.size, self._size if whole else 0, np.int64)
        looked_at = ends.src.any() or ends.dst.any()
        self._recorder.kv_copy(
            count=count, ends=ends if looked_at else None, **copy_sides(note, pool, host, to_host=to_host)
        )
