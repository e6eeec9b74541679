"""Bytes that changed without a write, as the kernels take them: each slot of a stream once a phase."""

import numpy as np
import numpy.typing as npt

from ....recorder.trace.batch import EventView
from ....recorder.trace.header import TraceHeader
from ....recorder.trace.schema import PHASE_AFTER, PHASE_BEFORE
from .state import DeviceState
from .words import Words, address_of

Int64Array = npt.NDArray[np.int64]


def packed_changes(view: EventView, header: TraceHeader, runner: int, words: Words, state: DeviceState) -> list[int]:
    """Add a forward's checked changes to its piece; return the words of its descriptor, addresses as offsets yet."""
    streams = header.streams(runner)
    groups = {index: number for number, index in enumerate(state.groups_of(runner))}
    stream, slot, phase = (view.ints(f"kv_change_{name}") for name in ("stream", "slot", "phase"))
    widths = np.array([one.capture_bytes for _, one in streams], np.int64)[stream]
    local = np.array([groups[index] for index, _ in streams], np.int64)[stream]
    data = address_of(words.add(view.bytes("kv_change_bytes")))
    where = np.cumsum(widths) - widths
    found: list[int] = []
    for wanted in (PHASE_BEFORE, PHASE_AFTER):
        mine = np.flatnonzero(phase == wanted)[::-1]  # of two changes of one slot the last one stays
        _, last = np.unique(np.stack([stream[mine], slot[mine]], axis=1), axis=0, return_index=True)
        mine = mine[last]
        changes = np.stack([stream[mine], slot[mine], data + where[mine]], axis=1)
        folds = np.unique(np.stack([local[mine], slot[mine]], axis=1), axis=0)
        if len(mine):
            found += [
                address_of(words.add_addresses(changes, [2])),
                len(changes),
                address_of(words.add(folds)),
                len(folds),
            ]
        else:
            found += [0, 0, 0, 0]
    return found
