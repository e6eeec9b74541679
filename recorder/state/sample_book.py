"""What was sampled last for each row, and by which of the last forwards."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..trace.batch import TraceBatch
from ..trace.header import TraceHeader
from .batch_tokens import BatchTokens, batch_tokens
from .forward import Forward, UnusableEventError, read_forward
from .slot_events import SampleEvent, StatusEvent

Int64Array = npt.NDArray[np.int64]

# Columns of `SampleBook.last`; the event that told of it + 1 is 0 where nothing is known, and negative where nothing is
# known since the row's request ended: - (that event + 1).
REQUEST, POSITION, TOKEN, FORWARD, TOLD = range(5)

# How many forwards back a sample event may reach: no engine overlaps that many.
MAX_LATE: Final = 64

# What is kept of a forward until it was told of; of its slots, those in the first table.
FED_COLUMNS: Final = ("req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "input_ids", "positions")


@dataclass(slots=True, kw_only=True)
class FedForward:
    """A target forward that may yet be told what was sampled before it, or by it; `told` once it was for itself."""

    forward: Forward
    tokens: BatchTokens
    told: bool


@dataclass(frozen=True, slots=True)
class Unread:
    """A target forward in row `row` of a batch that nobody has asked about yet."""

    batch: TraceBatch
    row: int
    header: TraceHeader

    def read(self) -> FedForward:
        """Return it without what keeps its batch in memory."""
        forward = read_forward(self.batch.event(self.row), self.header)
        told = len(forward.sampled_lens) > 0
        return FedForward(forward=_slim_copy(forward), tokens=batch_tokens(forward), told=told)


class SampleBook:
    """`last` `[rows, 5] int64`: the last token sampled for each row, and whose it was."""

    def __init__(self, header: TraceHeader) -> None:
        rows = max([1, *(table.rows for table in header.tables)])
        self.last: Int64Array = np.zeros((rows, 5), dtype=np.int64)
        self._fed: deque[FedForward | Unread] = deque(maxlen=MAX_LATE)

    def forget(self) -> None:
        """Take every sampled token for unknown."""
        self.last = np.zeros(self.last.shape, dtype=np.int64)
        self._fed.clear()

    def take_forward(self, forward: Forward, tokens: BatchTokens) -> None:
        """Move on by a target forward with requests."""
        if len(forward.sampled_lens):
            self._remember(forward, forward.sampled_lens, forward.sampled_tokens, forward.event)
        told = len(forward.sampled_lens) > 0
        self._fed.append(FedForward(forward=_slim_copy(forward), tokens=tokens, told=told))

    @property
    def fed(self) -> Sequence[FedForward]:
        """The last target forwards, those that nobody asked about before read now."""
        if any(isinstance(one, Unread) for one in self._fed):
            read = [one.read() if isinstance(one, Unread) else one for one in self._fed]
            self._fed = deque(read, maxlen=MAX_LATE)
        return [one for one in self._fed if isinstance(one, FedForward)]

    def put_off(self, batch: TraceBatch, rows: Int64Array, header: TraceHeader) -> None:
        """Move on by target forwards, rows `[n] int64` of a batch, whose samples are in `last` already; read them later.

        The batch stays in memory for as long as one of these is among the last.
        """
        self._fed.extend(Unread(batch, row, header) for row in rows[-MAX_LATE:].tolist())

    def take_sample(self, event: SampleEvent) -> list[FedForward]:
        """Learn tokens that arrive late; return the forwards behind the one that sampled them, none where it is gone.

        Raises:
            UnusableEventError: they do not fit the forward that sampled them.
        """
        known = self.fed
        at = next((i for i, fed in enumerate(known) if fed.forward.forward == event.forward), None)
        if at is None:
            return []
        sampler = known[at].forward
        if len(event.lens) != len(sampler.req_pool_indices):
            raise UnusableEventError(
                f"sampled_lens has {len(event.lens)} entries, forward {event.forward} had "
                f"{len(sampler.req_pool_indices)} requests"
            )
        known[at].told = True
        self._remember(sampler, event.lens, event.tokens, event.event)
        return list(known[at + 1 :])

    def take_status(self, event: StatusEvent) -> None:
        """Forget what was sampled for a request that begins or ends, and what will be told late of it: an id may come again."""
        ended = (self.last[:, TOLD] > 0) & (self.last[:, REQUEST] == event.request_id)
        if 0 < event.row < len(self.last):
            ended[event.row] = True
        self.last[ended, TOLD] = -(event.event + 1)

    def waiting(self) -> list[FedForward]:
        """Return the forwards from the first on whose samples are still to come; a sample event may speak of them."""
        fed = list(self.fed)
        first = next((at for at, one in enumerate(fed) if not one.told), len(fed))
        return fed[first:]

    def put_back(self, forward: Forward, tokens: BatchTokens, *, told: bool) -> None:
        """Take a forward over that was waiting when a keyframe was written."""
        self._fed.append(FedForward(forward=forward, tokens=tokens, told=told))

    def _remember(self, forward: Forward, counts: Int64Array, sampled: Int64Array, event: int) -> None:
        rows = forward.req_pool_indices
        inside = (rows > 0) & (rows < len(self.last))
        # What was sampled by a later forward is news already, and what was before the row's request ended is nobody's.
        known = self.last[np.where(inside, rows, 0)]
        inside &= (known[:, FORWARD] <= forward.forward) & (known[:, TOLD] > -(forward.event + 1))
        if forward.mode == "target_verify":
            self.last[rows[inside], TOLD] = 0
            return
        chosen = np.flatnonzero((counts > 0) & inside)
        ends = np.cumsum(counts)
        after = forward.prefix_lens + np.maximum(forward.extend_lens, 0)
        self.last[rows[chosen], REQUEST] = forward.request_ids[chosen]
        self.last[rows[chosen], POSITION] = (after + counts - 1)[chosen]
        self.last[rows[chosen], TOKEN] = sampled[ends[chosen] - 1]
        self.last[rows[chosen], FORWARD] = forward.forward
        self.last[rows[chosen], TOLD] = event + 1


def _slim_copy(forward: Forward) -> Forward:
    """Return a forward without what keeps its batch of events in memory."""
    nothing = np.empty(0, np.int64)
    return replace(
        forward,
        **{name: getattr(forward, name).copy() for name in FED_COLUMNS},
        out_cache_loc=tuple(slots.copy() for slots in forward.out_cache_loc[:1]),
        truth_lens=None,
        sampled_lens=nothing,
        sampled_tokens=nothing,
        kv_bytes=(),
        attention=None,
    )
