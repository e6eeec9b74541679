"""What is known of each row of the block tables: whom the engine gave it to, and what was last run on it."""

import numpy as np
import numpy.typing as npt

from ..trace.header import TraceHeader
from .forward import Forward
from .slot_events import StatusEvent

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Columns of `last[runner]`, a row's last forward: event + 1 (0: none), request id, prefix, end, end at which it sampled.
SEEN, REQUEST, PREFIX, END, SAMPLED_END, VERIFY = range(6)
# Columns of `status`: event + 1 (0: nothing is known), request id, whether the row is that request's now.
EVENT, HOLDER, GIVEN = range(3)


class RowBook:
    """`last[runner]` `[rows, 6] int64` and `status` `[rows, 3] int64`; rows outside the tables are nobody's."""

    def __init__(self, header: TraceHeader) -> None:
        rows = max([1, *(table.rows for table in header.tables)])  # row 0 is looked up in place of any that is none
        self.last = [np.zeros((rows, 6), np.int64) for _ in header.runners]
        self.status = np.zeros((rows, 3), np.int64)
        self._asked: Forward | None = None
        self._answer = (np.zeros((0, 6), np.int64), np.zeros(0, np.bool_))

    def forget(self) -> None:
        """Take everything for unknown."""
        self.last = [np.zeros(last.shape, np.int64) for last in self.last]
        self.status = np.zeros(self.status.shape, np.int64)
        self._asked = None

    def inside(self, forward: Forward) -> BoolArray:
        """Say for each request, `[bs] bool`, whether it has a row of the tables that is not the padding row."""
        rows = forward.req_pool_indices
        inside: BoolArray = (rows > 0) & (rows < len(self.status))
        return inside

    def same(self, forward: Forward) -> tuple[Int64Array, BoolArray]:
        """Return what was last run on each request's row, `[bs, 6]`, and whether that was the same request.

        Neither may be changed: both are kept for whoever asks about the same forward again.
        """
        if forward is self._asked:
            return self._answer
        inside = self.inside(forward)
        last = self.last[forward.runner][np.where(inside, forward.req_pool_indices, 0)]
        self._asked = forward
        self._answer = last, inside & (last[:, SEEN] > 0) & (last[:, REQUEST] == forward.request_ids)
        return self._answer

    def fresh_from(self, forward: Forward) -> Int64Array:
        """Return the first position, `[bs] int64`, that each request has neither read nor written on its row before."""
        last, same = self.same(forward)
        if forward.runner == 0:  # a draft goes back to verify; a target that does has started over
            same = same & (forward.prefix_lens >= last[:, PREFIX])
        return np.where(same, last[:, END], 0)

    def seen(self, forward: Forward) -> Int64Array:
        """Return the event + 1 of each request's forward before this one on its row, `[bs] int64`; 0 for none."""
        last, same = self.same(forward)
        return np.where(same, last[:, SEEN], 0)

    def take_forward(self, forward: Forward) -> None:
        """Move on by a forward."""
        last, same = self.same(forward)
        inside = self.inside(forward)
        end = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        if forward.runner:
            end = np.where(same, np.maximum(end, last[:, END]), end)
        sampled = forward.sampled_lens > 0 if len(forward.sampled_lens) else np.zeros(len(end), np.bool_)
        sampled_end = np.where(sampled, end, np.where(same, last[:, SAMPLED_END], 0))
        verify = np.full(len(end), int(forward.mode == "target_verify"), np.int64)
        seen = np.full(len(end), forward.event + 1, np.int64)
        values = np.stack((seen, forward.request_ids, forward.prefix_lens, end, sampled_end, verify), axis=1)
        self.last[forward.runner][forward.req_pool_indices[inside]] = values[inside]
        self._asked = None

    def take_status(self, event: StatusEvent) -> None:
        """Move on by what became of a request: it starts from nothing, or is gone."""
        for last in self.last:
            last[(last[:, SEEN] > 0) & (last[:, REQUEST] == event.request_id), SEEN] = 0
        if 0 < event.row < len(self.status):
            self.status[event.row] = event.event + 1, event.request_id, int(event.status == "admitted")
