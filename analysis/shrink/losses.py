"""Of which slots nobody knows what they hold, because what touched them is left out, and where that has to be said."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...recorder.capture.host_arrays import ordered_runs
from ...recorder.trace.event import TraceEvent, loss_event
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.schema import SLOTS_LISTED
from .parts import LEFT_OUT, NOBODY, NOTHING, Slots


@dataclass(slots=True)
class _Known:
    """What became of a pool group's slots, or of the rows of requests: `named` is 1 + the place of the last kept event that
    names one, `lost` the place from which on nobody knows what it holds, -1 if everybody does, `holder` who was given it, `free` if it was given back.
    """

    named: Int64Array
    lost: Int64Array
    holder: Int64Array
    free: BoolArray


class Losses:
    """Where a part of a trace has to say that slots are unknown. Groups are the header's; `rows` stands for requests' rows.

    A loss is placed right behind the last kept event that named the slot before: so most stand at the beginning.
    """

    def __init__(self, header: TraceHeader) -> None:
        sizes = [group.num_slots for group in header.groups] + [max([1, *(table.rows for table in header.tables)])]
        self.rows = len(header.groups)
        self._known = [
            _Known(np.zeros(n, np.int64), np.full(n, -1), np.full(n, NOBODY), np.ones(n, np.bool_)) for n in sizes
        ]
        self._places: dict[int, dict[int, list[Int64Array]]] = defaultdict(lambda: defaultdict(list))

    def names(self, slots: Slots) -> bool:
        """Whether something kept has named one of these slots."""
        return any(bool(self.named(group, part).any()) for group, part in slots.items())

    def named(self, group: int, slots: Int64Array) -> Int64Array:
        """Return for each slot 1 + the place of the last kept event that names it, 0 for none."""
        return self._known[group].named[slots]

    def name(self, slots: Slots, place: int, *, begins: bool = False) -> None:
        """Note that the event at `place` names slots; one that `begins` a slot's history asks nothing of the past."""
        for group, given in slots.items():
            known = self._known[group]
            named = given[(given > 0) & (given < len(known.named))]
            lost = known.lost[named]
            due = lost >= 0
            if begins:
                due &= (lost > 0) & ~known.free[named]
            for at in np.unique(lost[due]).tolist():
                self._places[at][group].append(named[due & (lost == at)])
            known.lost[named], known.named[named] = -1, place + 1

    def give(self, slots: Slots, request: int, *, back: bool) -> None:
        """Note who is given slots, or gives them back."""
        for group, given in slots.items():
            self._known[group].holder[given], self._known[group].free[given] = request, back

    def fill(self, slots: Slots) -> None:
        """Note that slots get content before somebody is given them."""
        for group, given in slots.items():
            self._known[group].free[given] = False

    def held(self, request: int) -> dict[int, Int64Array]:
        """Return the slots that a request was given last."""
        return {group: np.flatnonzero(self._known[group].holder == request) for group in range(self.rows)}

    def drop(self, slots: Slots) -> None:
        """Note that something left out has touched slots."""
        for group, given in slots.items():
            known = self._known[group]
            touched = given[(given > 0) & (given < len(known.named))]
            new = touched[known.lost[touched] < 0]
            known.lost[new] = known.named[new]

    def forget(self) -> None:
        """Begin anew: everything is unknown."""
        self._places.clear()
        for known in self._known:
            known.named[:], known.lost[:], known.holder[:], known.free[:] = 0, -1, NOBODY, True

    def put_between(
        self, events: list[TraceEvent], numbers: Iterable[int], number: int
    ) -> tuple[list[TraceEvent], list[int]]:
        """Return events with their losses between them, and their numbers; a loss has `number`."""
        found: list[tuple[TraceEvent, int]] = []
        kept = list(zip(events, numbers, strict=True))
        for place in range(len(kept) + 1):
            if place in self._places:
                found.append((self._loss(place, kept[min(place, len(kept) - 1)][0].time_ns), number))
            found += kept[place : place + 1]
        return [event for event, _ in found], [one for _, one in found]

    def _loss(self, place: int, time_ns: int) -> TraceEvent:
        event = loss_event(lost_events=-1, note=LEFT_OUT, time_ns=time_ns)
        event.scalars["status"] = SLOTS_LISTED
        runs = [(NOTHING, NOTHING, NOTHING)]
        for group, parts in sorted(self._places[place].items()):
            starts, counts = ordered_runs(np.unique(np.concatenate(parts)) if group < self.rows else NOTHING)
            runs.append((np.full(len(starts), group), starts, counts))
        columns = [np.concatenate(column) for column in zip(*runs, strict=True)]
        event.ints = dict(zip(("slot_group", "slot_start", "slot_count"), columns, strict=True))
        return event
