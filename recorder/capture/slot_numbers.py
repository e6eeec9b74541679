"""The numbers of a trace: of slots, of which slot 0 is padding whatever it is in the engine, and of rows that are lent.

A canary never looks at slot 0. If an engine uses it, the recorder numbers the group's slots from 1: slot s of the trace
is the engine's slot s - `slot_shift`. Other padding slots that an engine has become slot 0. Slots that change hands become rows
of the trace here, those of many requests at once.
"""

import dataclasses
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ..trace.event import EventRows
from ..trace.header import PoolGroup, TraceHeader
from ..trace.schema import ALLOC_FRESH, ALLOC_SHARED, AllocStatus, SlotChange
from .host_arrays import ragged_index

DEFAULT_PADDING = (0,)
_AT_ONCE = np.zeros(1, np.int64)


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
        if group.padding_slots:
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


class LentRows:
    """Rows of a block table for the requests of an engine that has none, by their ids; `num_rows` with row 0, padding.

    If all are lent, the request that has not run for longest gives up its row, and gets another when it runs again.
    """

    def __init__(self, num_rows: int) -> None:
        self._lent: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(num_rows - 1, 0, -1))

    def of(self, request_ids: Int64Array) -> Int64Array:
        """Return the rows of a forward's requests, `[bs] int64`; a negative id is padding. Raises `ValueError` if they are too few."""
        wanted = [request for request in request_ids.tolist() if request >= 0]
        for request in wanted:
            if request in self._lent:
                self._lent.move_to_end(request)
        for request in wanted:
            if request in self._lent:
                continue
            if not self._free and (idle := next(iter(self._lent), -1)) not in wanted and idle >= 0:
                self.give_back(idle)
            if not self._free:
                raise ValueError(
                    f"a forward of {len(wanted)} requests, the tables have {len(self._lent)} rows beside row 0"
                )
            self._lent[request] = self._free.pop()
        return np.array([self._lent.get(request, 0) for request in request_ids.tolist()], np.int64)

    def give_back(self, request_id: int) -> None:
        """Take the row of a request that is over."""
        if row := self._lent.pop(request_id, 0):
            self._free.insert(0, row)


def request_id_of(name: str, *, signed: bool = False) -> int:
    """Return the 64-bit id of a request, the same in every rank and on both sides of a prefill and decode pair.

    `signed` is SGLang's own, by which its token oracle samples; else none is negative, which would be nobody's.
    """
    digest = hashlib.blake2b(str(name).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    number = int.from_bytes(digest, "little", signed=True)
    return number if signed else number & ((1 << 63) - 1)


def slot_shift(group: PoolGroup) -> int:
    """Return by how much a group's slots are higher in the trace than in the engine."""
    return int(0 not in group.padding_slots)


class SlotsChanged(NamedTuple):
    """Runs of `each` slots, from `starts` on in each of `groups`, that changed hands; the rest as `slots` has it."""

    kind: SlotChange
    groups: Sequence[int]
    starts: Sequence[int]
    each: int
    request_id: int = -1
    row: int = -1
    status: AllocStatus = ALLOC_FRESH
    note: str = ""


class GivenOut(NamedTuple):
    """Slots that a forward's requests were given, those of a request together and ascending, in each group the same."""

    groups: Sequence[int]
    slots: Int64Array  # [n]
    requests: Int64Array  # [n] places in the batch, ascending
    request_ids: Int64Array  # [bs], negative: nobody's, or several requests'
    rows: Int64Array  # [bs]


def allocation_rows(given: GivenOut, numbers: SlotNumbers, time_ns: int) -> EventRows:
    """Return an allocation for each request and group, with the runs of slots that the request got there; some are given."""
    slots, requests = given.slots, given.requests
    begins = _begins((slots[1:] != slots[:-1] + 1) | (requests[1:] != requests[:-1]))
    starts, counts, owners = slots[begins], _lens(begins, slots.size), requests[begins]
    first = _begins(owners[1:] != owners[:-1])
    each = np.asarray(given.groups, np.int64)
    ids, rows = (np.repeat(of[owners[first]], each.size) for of in (given.request_ids, given.rows))
    lens = np.repeat(_lens(first, begins.size), each.size)
    runs, groups = ragged_index(np.repeat(first, each.size), lens), np.repeat(np.tile(each, first.size), lens)
    statuses = [ALLOC_SHARED if one < 0 else ALLOC_FRESH for one in ids.tolist()]
    return EventRows(
        kind="alloc",
        times_ns=np.full(ids.size, time_ns, np.int64),
        scalars={"request_id": ids, "status": _one_or_each(statuses)},
        ints={
            "slot_group": (groups, lens),
            "slot_start": (numbers.runs(groups, starts[runs]), lens),
            "slot_count": (counts[runs], lens),
            "req_pool_indices": (rows, np.ones_like(rows)),
        },
    )


def _begins(differs: BoolArray) -> Int64Array:
    """Return where runs begin, at 0 and where an entry `differs` from the one before it."""
    return np.concatenate((_AT_ONCE, np.flatnonzero(differs) + 1))


def _lens(begins: Int64Array, size: int) -> Int64Array:
    """Return how long runs are that begin there, of `size` entries together."""
    lens = np.empty_like(begins)
    lens[:-1] = begins[1:] - begins[:-1]
    lens[-1] = size - begins[-1]
    return lens


def change_rows(changes: Sequence[SlotsChanged], times_ns: Sequence[int], numbers: SlotNumbers) -> list[EventRows]:
    """Return changes in their order, those of a kind that follow one another together."""
    sizes = np.array([len(one.groups) * len(one.starts) for one in changes], np.int64)
    groups = np.array([group for one in changes for group in one.groups for _ in one.starts], np.int64)
    starts = np.array([start for one in changes for _ in one.groups for start in one.starts], np.int64)
    starts = numbers.runs(groups, starts)
    told = [(one.each, one.row, one.request_id) for one in changes]
    counts, rows, ids = np.array(told, np.int64).reshape(-1, 3).T.copy()
    times = np.array(times_ns, np.int64)
    counts, found, first, at = np.repeat(counts, sizes), list[EventRows](), 0, 0
    for kind, several in itertools.groupby(changes, attrgetter("kind")):
        mine = list(several)
        of, first = slice(first, first + len(mine)), first + len(mine)
        lens, has_row = sizes[of], rows[of] >= 0
        runs, at = slice(at, at + int(lens.sum())), at + int(lens.sum())
        texts = {name: _one_or_each([getattr(one, name) for one in mine]) for name in ("status", "note")}
        ints = {
            "slot_group": (groups[runs], lens),
            "slot_start": (starts[runs], lens),
            "slot_count": (counts[runs], lens),
        }
        if has_row.any():
            ints["req_pool_indices"] = (rows[of][has_row], has_row.astype(np.int64))
        found.append(EventRows(kind=kind, times_ns=times[of], scalars={"request_id": ids[of], **texts}, ints=ints))
    return found


def _one_or_each(texts: list[str]) -> str | list[str]:
    """Return a column's texts; one for all rows if they are the same."""
    return texts[0] if len(set(texts)) == 1 else texts
