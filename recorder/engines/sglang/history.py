"""Which slots SGLang's allocators give out and take back, in the trace's words.

An allocator does not know for whom it allocates, and the versions differ in who asks it. So a slot that was given out
is told when a forward first writes it, for the request that writes it, with the rest of its page; a free is told
when it is asked for, even where the engine puts it off to the end of its step.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...capture.device.recorder import DeviceRecorder
from ...capture.host_arrays import Int64Array, own_int64
from ...capture.recorder import Recorder
from ..common.hooking import Finish

ALLOCS: Final = ("alloc", "alloc_extend", "alloc_decode")
FREES: Final = ("free", "free_segment", "free_page_ids")


class GroupHistory:
    """One allocator and the groups (target's, drafts') whose slots it gives out; slot 0 is nobody's."""

    def __init__(
        self, allocator: Any, groups: tuple[int, ...], num_slots: int, recorder: Recorder | DeviceRecorder
    ) -> None:
        self.allocator = allocator
        self.groups = groups
        self.page_size = max(1, int(getattr(allocator, "page_size", 1) or 1))
        self.evicting = False
        self._recorder = recorder
        self._pending: npt.NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self._depth = 0

    def on_alloc(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Note what an allocation gives out; allocators call their own methods, so only the outermost counts."""
        return self._outermost(self._gave_out)

    def on_free(self, free_index: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell what is given back."""
        if not self._depth:
            self.told_free(own_int64(free_index))
        return self._outermost(lambda _: None)

    def on_free_page_ids(self, page_ids: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell what pages are given back."""
        if not self._depth:
            self.told_free(own_int64(page_ids) * self.page_size)
        return self._outermost(lambda _: None)

    def on_group_end(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Pass over the frees that the engine had put off: they were told when they were asked for."""
        return self._outermost(lambda _: None)

    def on_clear(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell of everything that is not free: the engine flushes its cache."""
        if not self._depth:
            held = np.ones(self._pending.size, np.bool_)
            held[0] = False
            for name in ("free_pages", "release_pages"):
                pages = getattr(self.allocator, name, None)
                slots = self._whole_pages(own_int64([] if pages is None else pages) * self.page_size)
                held[slots[slots < held.size]] = False
            slots = np.flatnonzero(held & self._known())
            self.told_free(slots, kind="evict", note="flush")
        return self._outermost(lambda _: None)

    def _known(self) -> npt.NDArray[np.bool_]:
        """Return `[num_slots]` which slots the allocator has at all: its first page is padding."""
        known = np.zeros(self._pending.size, np.bool_)
        size = int(getattr(self.allocator, "size", self._pending.size - 1))
        known[self.page_size : size + self.page_size] = True
        return known

    def _outermost(self, finish: Any) -> Finish:
        self._depth += 1

        def leave(result: Any, _: BaseException | None) -> None:
            self._depth -= 1
            if not self._depth:
                finish(result)

        return leave

    def _gave_out(self, result: Any) -> None:
        if result is None:
            return
        slots = own_int64(result)
        slots = self._whole_pages(slots[slots % self.page_size == 0])  # further tokens of a page that was given out
        self._pending[slots[(slots > 0) & (slots < self._pending.size)]] = True

    def _whole_pages(self, slots: Int64Array) -> Int64Array:
        """Return all slots of the pages in which these lie, each once, ascending."""
        if self.page_size == 1:
            return np.unique(slots)
        pages = np.unique(slots // self.page_size)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def told_free(self, slots: Int64Array, *, kind: str = "free", note: str = "") -> None:
        """Tell that slots go back to the pool."""
        slots = self._whole_pages(slots)
        slots = slots[(slots > 0) & (slots < self._pending.size)]
        if not slots.size:
            return
        unwritten = slots[self._pending[slots]]
        if unwritten.size:
            self._pending[unwritten] = False
            self._tell("alloc", unwritten, -1, -1, "never written")
        self._tell("evict" if self.evicting else kind, slots, -1, -1, note)

    def written(self, slots: Int64Array, rows: Int64Array, request_ids: Int64Array, extend: Int64Array) -> None:
        """Tell of the slots among those that a forward writes that were given out since they were last told of.

        Args:
            slots: `[T]` in this allocator's numbering; what lies outside is passed over.
            rows: `[bs]`.
            request_ids: `[bs]`.
            extend: `[bs]` tokens of each request; padding rows have none.
        """
        inside = np.where((slots > 0) & (slots < self._pending.size), slots, 0)
        if not self._pending[inside].any():
            return
        ends = np.cumsum(np.where(rows == 0, 0, extend))
        for r, end in enumerate(ends.tolist()):
            mine = inside[end - int(extend[r]) : end] if rows[r] else inside[:0]
            fresh = self._whole_pages(mine[self._pending[mine]])
            fresh = fresh[self._pending[fresh]]
            if fresh.size:
                self._pending[fresh] = False
                # The history checks take a negative id for nobody's; such a slot is said to be several requests'.
                status = "" if request_ids[r] >= 0 else "shared"
                self._tell("alloc", fresh, int(request_ids[r]), int(rows[r]), "", status)

    def filled(self, slots: Int64Array) -> None:
        """Tell of slots that got their content otherwise than by a forward; the cache holds them, no request."""
        slots = self._whole_pages(slots)
        slots = slots[(slots > 0) & (slots < self._pending.size)]
        fresh = slots[self._pending[slots]]
        if fresh.size:
            self._pending[fresh] = False
            self._tell("alloc", fresh, -1, -1, "load-back")

    def _tell(self, kind: str, slots: Int64Array, request_id: int, row: int, note: str, status: str = "") -> None:
        for group in self.groups:
            self._recorder.slots(
                kind, group=group, slots=slots, request_id=request_id, row=row, status=status, note=note
            )
