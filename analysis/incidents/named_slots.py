"""The slots that an event names, from runs that nobody has checked."""

import numpy as np
import numpy.typing as npt

from ...recorder.capture.host_arrays import runs_to_slots
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.reader import EventView

Int64Array = npt.NDArray[np.int64]


def named_slots(view: EventView, header: TraceHeader) -> dict[int, Int64Array]:
    """Return the slots that an event names, `{pool group: [n] int64}`, in its order; runs that leave their pool are none."""
    found: dict[int, Int64Array] = {}
    groups, starts, counts = (view.ints(f"slot_{name}") for name in ("group", "start", "count"))
    for number in np.unique(groups).tolist():
        if not 0 <= number < len(header.groups):
            continue
        limit = header.groups[number].num_slots
        mine = (groups == number) & (starts >= 0) & (counts > 0) & (starts < limit)
        mine &= counts <= limit - np.where(mine, starts, 0)
        if mine.any() and int(counts[mine].sum()) <= limit * 2:
            found[number] = runs_to_slots(starts[mine], counts[mine])
    return found
