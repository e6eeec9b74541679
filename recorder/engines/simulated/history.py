"""The engine's own account of its slots and requests, as events of the recorder: whole pages, as runs of slots."""

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.recorder import Recorder
from ...trace.schema import TIER_HOST, TIER_POOL
from .pools import SimulatedLayout
from .requests import Request

NOBODY = -1

_NO_PAGES = np.empty(0, np.int64)


class SlotEvents:
    """Records pages given, given back, evicted and copied."""

    def __init__(self, recorder: Recorder, layout: SimulatedLayout, *, page_size: int) -> None:
        self.recorder = recorder
        self._layout = layout
        self._page_size = page_size
        self._swa_groups = (layout.swa_group,) if layout.swa_group >= 0 else ()
        # Of most events: one page, and perhaps the one sliding-window half that goes with it.
        self._one = _Groups(layout.full_groups, (), page_size)
        self._one_and_half = _Groups(layout.full_groups, self._swa_groups, page_size)

    def record(
        self,
        kind: str,
        pages: Int64Array,
        *,
        swa: bool = False,
        halves: Int64Array = _NO_PAGES,
        request_id: int = NOBODY,
        row: int = -1,
        status: str = "",
        note: str = "",
    ) -> None:
        """Record that pages of the full pool (and of the draft's, which goes along) or of the sliding one changed hands.

        `halves` are pages of the sliding-window pool that go along with those of the full one. `status` is the alloc
        event's: "" for fresh pages, "shared", "cached".
        """
        if swa:
            pages, halves = pages[:0], pages
        if pages.size == 1 and halves.size <= 1 and self._layout.full_groups:
            known = self._one_and_half if halves.size else self._one
            starts = np.array([int(pages[0])] * known.full + halves.tolist(), np.int64) * self._page_size
            groups, counts = known.groups, known.counts
        else:
            groups, starts, counts = self._all_runs(pages, halves)
        if starts.size:
            self.recorder.slots(
                kind, group=groups, runs=(starts, counts), request_id=request_id, row=row, status=status, note=note
            )

    def passed(self, request: Request, status: str, pages: Int64Array, swa_pages: Int64Array) -> None:
        """Record that a request joined pages that somebody holds ("shared"), or handed its own to the cache ("cached")."""
        self.record("alloc", pages, halves=swa_pages, request_id=request.request_id, row=request.row, status=status)

    def request_status(self, request: Request, status: str, *, note: str = "") -> None:
        """Record that a request got its row, or that it gave everything back."""
        self.recorder.request_status(request_id=request.request_id, status=status, row=request.row, note=note)

    def copied(self, group: int, src: Int64Array, dst: Int64Array, *, request_id: int, note: str) -> None:
        """Record that single slots were copied within a pool."""
        self.recorder.kv_copy(
            group=group, src=src, dst=dst, count=np.ones(src.size, np.int64), request_id=request_id, note=note
        )

    def moved(self, page: int, host_page: int, *, to_host: bool) -> None:
        """Record that a page went to the host tier, or came back."""
        size = self._page_size
        pool, host = [page * size], [host_page * size]
        for group in self._layout.full_groups:
            self.recorder.kv_copy(
                group=group,
                src=pool if to_host else host,
                dst=host if to_host else pool,
                count=[size],
                src_tier=TIER_POOL if to_host else TIER_HOST,
                dst_tier=TIER_HOST if to_host else TIER_POOL,
                note="offload" if to_host else "load-back",
            )

    def _all_runs(self, pages: Int64Array, halves: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return `(group, start, count)` of each run of slots."""
        full, half = self._runs(pages), self._runs(halves)
        runs = [(group, *full) for group in self._layout.full_groups] + [(group, *half) for group in self._swa_groups]
        return (
            np.concatenate([np.full(starts.size, group, np.int64) for group, starts, _ in runs]),
            np.concatenate([starts for _, starts, _ in runs]),
            np.concatenate([counts for _, _, counts in runs]),
        )

    def _runs(self, pages: Int64Array) -> tuple[Int64Array, Int64Array]:
        if not pages.size:
            return _NO_PAGES, _NO_PAGES
        pages = np.sort(pages)
        first = np.concatenate(([0], np.flatnonzero(pages[1:] - pages[:-1] != 1) + 1))
        counts = np.concatenate((first[1:], [pages.size])) - first
        return pages[first] * self._page_size, counts * self._page_size


class _Groups:
    """The columns of an event about one page in each of some groups, `full` of which are the full pool's."""

    __slots__ = ("counts", "full", "groups")

    def __init__(self, full_groups: tuple[int, ...], more: tuple[int, ...], page_size: int) -> None:
        self.full = len(full_groups)
        self.groups = np.array(full_groups + more, np.int64)
        self.counts = np.full(self.groups.size, page_size, np.int64)
