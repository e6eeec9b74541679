"""Turns: a number for each request's forward that grows by one where the same request comes next on the same row.

A row of `violations.parquet` may stand for several forwards only if nothing lies between them: forwards of one runner
that hold one request on one row of its block table, nobody else on that row in between, nothing left out. Then, and
only then, their turns follow on one another. Sweeps of a runner are counted likewise.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from ....recorder.trace.header import TraceHeader

Int64Array = npt.NDArray[np.int64]

_NOBODY: Final = np.iinfo(np.int64).min
_APART: Final = 2  # turns that do not follow on one another


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

    def may_go_on(
        self, turns: Int64Array, *, runners: Int64Array, rows: Int64Array, is_sweep: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Return whether these turns, of rows or of sweeps, are the last ones counted there, `[n] bool`."""
        last = np.where(is_sweep, self._sweeps[runners], self._turns[runners, self._inside(rows)])
        found: npt.NDArray[np.bool_] = turns == last
        return found

    def _inside(self, rows: Int64Array) -> Int64Array:
        """Rows, 0 in place of one that no table has."""
        found: Int64Array = np.where((rows > 0) & (rows < self._turns.shape[1]), rows, 0)
        return found
