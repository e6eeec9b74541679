"""What a history check sees of a forward: the batch, the tables, and for each group what it reads and writes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import Int64Array
from ...kernels.ops.plan.reference import VerifyPlan
from ...recorder.state.forward import Forward
from ...recorder.state.pools import GroupPool
from ...recorder.state.tables import StateTables
from ...recorder.trace.reader import EventView


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReads:
    """One pool group's part of a forward, before it runs.

    `plan`'s first `num_valid` entries are the prefix positions that it reads, request by request (`request_offsets`);
    slot 0 stands for entries that nobody can judge. `written` `[T] int64`: slots that the tokens go to, in the pool's
    own numbering; request r's are `write_offsets[r]` to `write_offsets[r + 1]`, padding comes behind them. The incremental
    pass leaves out entries that were verified before and have not changed since: in `marks` `[n] uint8`, None for nobody,
    a check notes the entries that it has to see again in the next forward.
    """

    pool: GroupPool
    plan: VerifyPlan
    written: Int64Array
    write_offsets: Int64Array
    marks: npt.NDArray[np.uint8] | None = None

    @property
    def slots(self) -> Int64Array:
        """The slots read, `[n] int64`."""
        return self.plan.slots[: int(self.plan.num_valid[0])]

    @property
    def positions(self) -> Int64Array:
        """The position of each slot read, `[n] int64`."""
        return self.plan.expected_positions[: int(self.plan.num_valid[0])]

    @property
    def request_slots(self) -> Int64Array:
        """The slots that tokens of requests go to, without those of padding."""
        return self.written[: int(self.write_offsets[-1])]

    def readers(self, entries: Int64Array) -> Int64Array:
        """Return whose plan entries `[m] int64` are: indices into the batch."""
        return np.searchsorted(self.plan.request_offsets[1 : len(self.write_offsets)], entries, side="right")

    def writers(self, tokens: Int64Array) -> Int64Array:
        """Return whose tokens `[m] int64` are: indices into the batch, its length for padding."""
        return np.searchsorted(self.write_offsets[1:], tokens, side="right")

    def mark(self, entries: Int64Array) -> None:
        """Note entries `[m] int64` that something is wrong with."""
        if self.marks is not None:
            self.marks[entries] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardView:
    """A forward about to run; `groups` are those of its runner. `event` is what the trace says of it, applied already."""

    event: EventView
    forward: Forward
    tables: StateTables
    groups: list[GroupReads]
