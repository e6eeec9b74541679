"""The engine's own account of its slots and requests, as events of the recorder: whole pages, as runs of slots."""

import numpy as np
import numpy.typing as npt

from ...recorder import Recorder
from ...schema import TIER_HOST, TIER_POOL
from .layout import Layout
from .requests import Request

Int64Array = npt.NDArray[np.int64]
NOBODY = -1


class History:
    """Tells the recorder of pages given, given back, evicted and copied."""

    def __init__(self, recorder: Recorder, layout: Layout, *, page_size: int) -> None:
        self.recorder = recorder
        self._layout = layout
        self._page_size = page_size
        self._one_page = np.array([page_size], np.int64)

    def tell(
        self,
        kind: str,
        pages: Int64Array,
        *,
        swa: bool = False,
        request_id: int = NOBODY,
        row: int = -1,
        status: str = "",
        note: str = "",
    ) -> None:
        """Say that pages of the full pool (and of the draft's, which goes along) or of the sliding one changed hands.

        `status` is the alloc event's: "" for fresh pages, "shared", "cached".
        """
        if not pages.size:
            return
        starts, counts = self._runs(pages)
        groups = self._layout.full_groups if not swa else (self._layout.swa_group,)
        for group in groups:
            self.recorder.slots(
                kind,
                group=group,
                runs=(starts, counts),
                request_id=request_id,
                row=row,
                status=status,
                note=note,
            )

    def passed(self, request: Request, status: str, pages: Int64Array, swa_pages: Int64Array) -> None:
        """Say that a request joined pages that somebody holds ("shared"), or handed its own to the cache ("cached")."""
        request_id, row = request.request_id, request.row
        self.tell("alloc", pages, request_id=request_id, row=row, status=status)
        self.tell("alloc", swa_pages, swa=True, request_id=request_id, row=row, status=status)

    def request_status(self, request: Request, status: str, *, note: str = "") -> None:
        """Say that a request got its row, or that it gave everything back."""
        self.recorder.request_status(request_id=request.request_id, status=status, row=request.row, note=note)

    def copied(self, group: int, src: Int64Array, dst: Int64Array, *, request_id: int, note: str) -> None:
        """Say that single slots were copied within a pool."""
        self.recorder.kv_copy(
            group=group, src=src, dst=dst, count=np.ones(src.size, np.int64), request_id=request_id, note=note
        )

    def moved(self, page: int, host_page: int, *, to_host: bool) -> None:
        """Say that a page went to the host tier, or came back."""
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

    def _runs(self, pages: Int64Array) -> tuple[Int64Array, Int64Array]:
        if pages.size == 1:  # by far the most frequent: a decode's next page
            return pages * self._page_size, self._one_page
        pages = np.sort(pages)
        first = np.concatenate(([0], np.flatnonzero(pages[1:] - pages[:-1] != 1) + 1))
        counts = np.concatenate((first[1:], [pages.size])) - first
        return pages[first] * self._page_size, counts * self._page_size
