"""The engine's own account of its slots and requests, as events of the recorder: whole pages, as runs of slots."""

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.host_arrays import ordered_runs
from ...capture.recorder import Recorder
from ...trace.schema import TIER_HOST, TIER_POOL, AllocStatus, RequestStatus, SlotChange
from .pools import NO_PAGES, SimulatedLayout
from .requests import Request


class SlotEvents:
    """Records pages given, given back, evicted and copied."""

    def __init__(self, recorder: Recorder, layout: SimulatedLayout, *, page_size: int) -> None:
        self.recorder = recorder
        self._layout = layout
        self._page_size = page_size

    def record(
        self,
        kind: SlotChange,
        pages: Int64Array,
        *,
        halves: Int64Array = NO_PAGES,
        request: Request | None = None,
        status: AllocStatus = "",
        note: str = "",
    ) -> None:
        """Record that pages of the full pool (and of the draft's, which goes along) changed hands.

        `halves` are pages of the sliding-window pool. `status` is the alloc event's: "" for fresh pages, "shared" for a
        request that joins pages which somebody holds, "cached" for one that hands its own to the prefix cache.
        """
        parts = [(group, pages) for group in self._layout.full_groups if pages.size]
        if halves.size and self._layout.swa_group >= 0:
            parts.append((self._layout.swa_group, halves))
        if not parts:
            return
        runs = [ordered_runs(np.sort(part)) for _, part in parts]
        self.recorder.slots(
            kind,
            group=np.repeat([group for group, _ in parts], [starts.size for starts, _ in runs]),
            runs=(
                np.concatenate([starts for starts, _ in runs]) * self._page_size,
                np.concatenate([counts for _, counts in runs]) * self._page_size,
            ),
            request_id=request.request_id if request is not None else -1,
            row=request.row if request is not None else -1,
            status=status,
            note=note,
        )

    def request_status(self, request: Request, status: RequestStatus, *, note: str = "") -> None:
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
        pool, host = (TIER_POOL, [page * size]), (TIER_HOST, [host_page * size])
        (src_tier, src), (dst_tier, dst) = (pool, host) if to_host else (host, pool)
        note = "offload" if to_host else "load-back"
        for group in self._layout.full_groups:
            self.recorder.kv_copy(
                group=group, src=src, dst=dst, count=[size], src_tier=src_tier, dst_tier=dst_tier, note=note
            )
