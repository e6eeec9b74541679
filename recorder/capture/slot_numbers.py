"""The slot numbers of a trace: slot 0 is padding in every trace, whatever it is in the engine.

A canary never looks at slot 0. If an engine uses it, the recorder numbers the group's slots from 1: slot s of the trace
is the engine's slot s - `slot_shift`. Other padding slots that an engine has become slot 0.
"""

import dataclasses

import numpy as np

from ...kernels.arrays import Int64Array
from ..trace.header import PoolGroup, TraceHeader

DEFAULT_PADDING = (0,)


class SlotNumbers:
    """Turns the engine's slot numbers into the trace's; `header` is the engine's own.

    Raises:
        ValueError: groups that share a block table, or lead through a full-to-SWA table, and have other padding slots.
    """

    def __init__(self, header: TraceHeader) -> None:
        self._groups = header.groups
        self._of_table: dict[int, int] = {}  # by its number, a group that uses it
        for number, group in enumerate(header.groups):
            first = header.groups[self._of_table.setdefault(group.table, number)]
            if set(first.padding_slots) != set(group.padding_slots):
                raise ValueError(f"groups {first.name} and {group.name} share a table and have other padding_slots")
            if group.lut >= 0 and set(group.padding_slots) != set(DEFAULT_PADDING):
                raise ValueError(f"group {group.name}: padding_slots {group.padding_slots} behind a full-to-SWA table")
        self.differ = any(set(group.padding_slots) != set(DEFAULT_PADDING) for group in header.groups)

    def header(self, header: TraceHeader) -> TraceHeader:
        """Return the header as the trace has it."""
        if not self.differ:
            return header
        groups = [
            dataclasses.replace(
                group,
                num_slots=group.num_slots + slot_shift(group),
                padding_slots=DEFAULT_PADDING,
                slot_shift=slot_shift(group),
            )
            for group in header.groups
        ]
        notes = [
            f"{group.name}: slot s of this trace is the engine's slot s - {group.slot_shift}, which uses its slot 0"
            for group in groups
            if group.slot_shift
        ]
        return dataclasses.replace(header, groups=tuple(groups), notes=(*header.notes, *notes))

    def of_group(self, number: int, slots: Int64Array) -> Int64Array:
        """Return a group's slots `[n] int64` in the trace's numbers; negative ones stay."""
        if not self.differ:
            return slots
        group = self._groups[number]
        found = np.where(slots < 0, slots, slots + slot_shift(group))
        found[np.isin(slots, group.padding_slots)] = 0
        return found

    def of_table(self, number: int, slots: Int64Array) -> Int64Array:
        """Return what a block table holds in the trace's numbers."""
        group = self._of_table.get(number)
        return slots if group is None else self.of_group(group, slots)

    def of_groups(self, groups: Int64Array, slots: Int64Array) -> Int64Array:
        """Return slots, each of a group of its own, in the trace's numbers."""
        found = slots.copy()
        for number in range(len(self._groups)) if self.differ else ():
            found[groups == number] = self.of_group(number, slots[groups == number])
        return found

    def runs(self, groups: Int64Array, starts: Int64Array) -> Int64Array:
        """Return the starts of runs of slots of a pool in the trace's numbers; of a group that there is not, as they are."""
        found = starts.copy()
        for number, group in enumerate(self._groups):
            found[groups == number] += slot_shift(group)
        return found


def slot_shift(group: PoolGroup) -> int:
    """Return by how much a group's slots are higher in the trace than in the engine."""
    return int(0 not in group.padding_slots)
