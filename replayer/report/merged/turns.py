"""The order of violation rows: of the launches of one event, and of the forwards that hold one request in turn.

Launches leave their rows in the order of docs/reference/replay.md; rows of one verify launch come request by request, as the
batch has them, and by position; those of a sweep as the sweep lists its slots.

A row of `violations.parquet` may stand for several forwards only if nothing lies between them: forwards of one runner that
hold one request on one row of its block table, nobody else on that row in between, nothing left out. Then, and only then,
their turns follow on one another. Sweeps of a runner are counted likewise.
"""

from typing import Final

import numpy as np

from ....kernels.arrays import BoolArray, Int64Array
from ....kernels.constants import FailReason, LaunchTag
from ....recorder.trace.header import TraceHeader

_NOBODY: Final = np.iinfo(np.int64).min
_APART: Final = 2  # turns that do not follow on one another
WRITES: Final = int(FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION)
_TAGS: Final = [tag.name.split("_") for tag in LaunchTag]
SWEEP_TAGS: Final = np.array([endpoint == "SWEEP" for endpoint, _, _ in _TAGS])


def are_writes(bits: Int64Array) -> BoolArray:
    """Return whether rows are of write launches, by their reason bits."""
    found: BoolArray = (bits & WRITES) != 0
    return found


def launch_ranks(header: TraceHeader) -> Int64Array:
    """Return a number for each launch of an event, `[groups, tags, 2] int64`, last verify and write: lower comes first."""
    ranks = np.zeros((len(header.groups), len(LaunchTag), 2), np.int64)
    for number, group in enumerate(header.groups):
        for tag, (endpoint, half, _) in enumerate(_TAGS):
            place = group.halves.index(half) if half in group.halves else len(group.halves)
            for is_write in (0, 1):
                early = group.reads_before_write and not is_write
                phase = 0 if endpoint != "TAIL" else 1 if early else 2
                ranks[number, tag, is_write] = ((phase * len(header.groups) + number) * 3 + place) * 2 + is_write
    return ranks


def first_places(keys: Int64Array) -> Int64Array:
    """Return for each of `[n]` or `[n, k]` keys the first place where an equal one stands, `[n] int64`."""
    if not len(keys):
        return np.zeros(0, np.int64)
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    found: Int64Array = first[inverse.reshape(-1)]
    return found


def out_of_order(launches: Int64Array, columns: tuple[Int64Array, ...]) -> BoolArray:
    """Return whether a row belongs, by `columns`, most weighty first, before the row ahead of it in its launch."""
    wrong = np.zeros(len(launches), np.bool_)
    tie = launches[1:] == launches[:-1]
    for column in columns:
        wrong[1:] |= tie & (column[1:] < column[:-1])
        tie = tie & (column[1:] == column[:-1])
    return wrong


class Turns:
    """Counts the turns of each runner's rows, and of its sweeps; memory is 16 bytes a row and runner."""

    def __init__(self, header: TraceHeader) -> None:
        tables = [*header.tables, *([header.truth_table] if header.truth_table is not None else [])]
        shape = len(header.runners), max((table.rows for table in tables), default=0) + 1
        self._turns = np.zeros(shape, np.int64)
        self._holders = np.full(shape, _NOBODY, np.int64)
        self._sweeps = np.zeros(len(header.runners), np.int64)
        self._strangers = 0

    def forward(self, runner: int, rows: Int64Array, request_ids: Int64Array) -> Int64Array:
        """Count a forward, and return the turn of each entry of its batch, `[bs] int64`.

        A row that comes twice in the batch, the padding row, and one that no table has get a turn that nothing follows.
        """
        turns, holders = self._turns[runner], self._holders[runner]
        at = self._inside(rows)
        steps = np.where(holders[at] == request_ids, 1, _APART)
        holder = request_ids
        unique, place, counts = np.unique(at, return_inverse=True, return_counts=True)
        if len(unique) < len(at):
            twice = counts[place] > 1
            steps = np.where(twice, _APART, steps)
            holder = np.where(twice, _NOBODY, request_ids)
        turns[at] += steps
        holders[at] = holder
        self._strangers -= _APART
        found: Int64Array = np.where(at > 0, turns[at], self._strangers)
        return found

    def sweep(self, runner: int) -> int:
        """Count a sweep, and return its turn."""
        self._sweeps[runner] += 1
        return int(self._sweeps[runner])

    def pass_by(self, runner: int, rows: Int64Array) -> None:
        """Count forwards in which nothing was found, `rows` being those of all their batches."""
        self._turns[runner][self._inside(rows)] += _APART

    def pass_by_sweep(self, runner: int) -> None:
        """Count sweeps in which nothing was found."""
        self._sweeps[runner] += _APART

    def part_all(self) -> None:
        """Let nothing that comes follow on what was."""
        self._turns += _APART
        self._sweeps += _APART

    def may_go_on(self, turns: Int64Array, *, runners: Int64Array, rows: Int64Array, is_sweep: BoolArray) -> BoolArray:
        """Return whether these turns, of rows or of sweeps, are the last ones counted there, `[n] bool`."""
        last = np.where(is_sweep, self._sweeps[runners], self._turns[runners, self._inside(rows)])
        found: BoolArray = turns == last
        return found

    def _inside(self, rows: Int64Array) -> Int64Array:
        found: Int64Array = np.where((rows > 0) & (rows < self._turns.shape[1]), rows, 0)
        return found
