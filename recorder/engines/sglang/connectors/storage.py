"""What HiCache keeps in a storage behind its pool on the host: files, Mooncake, or another server's memory.

A page there has a key. The recorder gives each key that this process has stored a place behind the host's own slots, so that
for a replay a storage is more of the host. What comes from the storage under another key nobody here has stored: its pages are
unknown until something else lies in their place, and so is what is loaded from them.

SGLang stores and fetches in threads of its own. What they did is queued there, and recorded by the scheduler's thread before
it records the next copy: SGLang does not touch such a page again before the scheduler has been told.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .....kernels.arrays import BoolArray, Int64Array
from ....capture.host_arrays import CopyEnds, own_int64
from ...common.hooking import Around, Hook, beside

HELD: Final = 4  # times as many pages of a storage as the host's pool has are followed
NEWEST: Final = 64  # fetches whose pages are known once they are over
MAX_PAGES: Final = 1 << 18  # and no more than these, whose keys the recorder keeps


def storage_slots(controller: Any, host_slots: int) -> int:
    """Return how many slots behind the host's are for what lies in a storage, 0 if there is none."""
    most = MAX_PAGES * int(getattr(controller, "page_size", 1) or 1)
    return min(HELD * host_slots, most) if getattr(controller, "enable_storage", False) else 0


class Move(NamedTuple):
    """Pages that went to the storage, or came from there: their keys, first slots on the host, and what lay there, `[n]` each."""

    to_storage: bool
    keys: list[str]
    host: Int64Array
    hashes: Int64Array


class Storage:
    """Follows which pages lie in the storage of one controller; `moved(move, places)` records those that go to and fro.

    `hashes` gives what lies in pages of the host's pool, by their first slots, zeros if nobody looks.
    """

    def __init__(
        self,
        first_slot: int,
        num_slots: int,
        page_size: int,
        hashes: Callable[[Int64Array], Int64Array],
        moved: Callable[[Move, Int64Array], None],
    ) -> None:
        self.page_size = page_size
        self._hashes, self._moved = hashes, moved
        self._unused = iter(range(first_slot, first_slot + num_slots // page_size * page_size, page_size))
        self._given_up: list[int] = []  # places whose keys are forgotten
        self._places: OrderedDict[str, int] = OrderedDict()  # of keys, the one stored longest ago first
        self._unknown: set[int] = set()
        self._moves: deque[Move] = deque()
        self._coming: list[list[int]] = []  # pages of fetches that are under way, or not recorded yet
        self.fetches = 0  # that have begun
        self._newest: deque[Int64Array] = deque(maxlen=NEWEST)  # their pages

    def hooks(self) -> dict[str, Hook]:
        """Return the hooks around the controller's functions that store and fetch pages, by their names."""
        return {"page_set_func": self.on_set, "page_get_func": self.on_get}

    @beside
    def on_set(self, keys: Sequence[str], host_indices: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Note pages that are stored; what lies under their keys if the storage fails is unknown."""
        host = self._pages(host_indices)
        hashes, stored = self._hashes(host), False
        try:
            stored = bool((yield))
        finally:
            self._moves.append(Move(True, list(keys), host if stored else np.full_like(host, -1), hashes))

    @beside
    def on_get(self, operation: Any, keys: Sequence[str], host_indices: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Note pages that are fetched; of those behind the first that is missing a part may have come."""
        host, came = self._pages(host_indices), 0
        before = int(getattr(operation, "completed_tokens", 0) or 0)
        self._coming.append(host.tolist())
        self._newest.append(host)
        self.fetches += 1
        try:
            answer = yield
            # Older versions, 0.5.16 among them, count what has come at the operation.
            told = (int(operation.completed_tokens) - before) // self.page_size if answer is None else int(answer)
            came = min(max(told, 0), host.size)
        finally:
            found = [*keys[:came], *([""] * (host.size - came))]
            self._moves.append(Move(False, found, host, self._hashes(host)))

    def _pages(self, host_indices: Any) -> Int64Array:
        return own_int64(host_indices)[:: self.page_size].copy()

    def flush(self) -> None:
        """Have recorded what was stored and fetched since the last call."""
        while self._moves:
            move = self._moves.popleft()
            if move.to_storage:
                self._store(move)
            else:
                self._fetch(move)

    def _store(self, move: Move) -> None:
        known = ~self.unknown(move.host) & (move.host >= 0)
        places = np.full(move.host.size, -1, np.int64)
        for i, key in enumerate(move.keys):
            place = self._places.pop(key, -1)
            if known[i]:
                self._places[key] = places[i] = self._place() if place < 0 else place
            elif place >= 0:
                self._given_up.append(place)
        self._record(move, places)

    def _place(self) -> int:
        """Return a place for another key: an unused one, or that of the key that was stored longest ago."""
        if self._given_up:
            return self._given_up.pop()
        place = next(self._unused, None)
        return self._places.popitem(last=False)[1] if place is None else place

    def _fetch(self, move: Move) -> None:
        self._coming.remove(move.host.tolist())
        places = np.array([self._places.get(key, -1) for key in move.keys], np.int64)
        self.filled(move.host[places >= 0])
        self._unknown.update(move.host[places < 0].tolist())
        self._record(move, places)

    def _record(self, move: Move, places: Int64Array) -> None:
        at = np.flatnonzero(places >= 0)
        if at.size:
            self._moved(Move(move.to_storage, [], move.host[at], move.hashes[at]), places[at])

    def filled(self, slots: Int64Array) -> None:
        """Note slots of the host's pool in which something else lies now."""
        if self._unknown:
            self._unknown.difference_update(self._page(slots).tolist())

    def unknown(self, slots: Int64Array) -> BoolArray:
        """Say of each slot of the host's pool, `[n] bool`, whether nobody here has stored what lies in it."""
        return np.isin(self._page(slots), sorted(self._unknown))

    def overwritten(self, slots: Int64Array) -> BoolArray:
        """Say of each slot of the host's pool, `[n] bool`, whether the storage has put something there since the last `flush`."""
        return np.isin(self._page(slots), [page for pages in tuple(self._coming) for page in pages])

    def fetched_since(self, fetches: int, slots: Int64Array) -> BoolArray:
        """Say of each slot of the host's pool, `[n] bool`, whether a fetch has begun to fill it since there were so many."""
        begun, newest = self.fetches - fetches, list(self._newest)
        if begun > len(newest):
            return np.ones(slots.size, np.bool_)
        return np.isin(self._page(slots), np.concatenate([slots[:0], *newest[len(newest) - begun :]]))

    def _page(self, slots: Int64Array) -> Int64Array:
        return slots // self.page_size * self.page_size


def ends_of(move: Move) -> CopyEnds | None:
    """Return what lay at the ends of pages that went to a storage or came from there; the storage's own end is not read."""
    zeros = np.zeros_like(move.hashes)
    left, came = (move.hashes, zeros) if move.to_storage else (zeros, move.hashes)
    return CopyEnds(left, came, zeros, zeros - 1) if move.hashes.any() else None
