"""Violations that last, as one row: rows that are equal in all but when they were found, in consecutive forwards.

`MergingSink` stands where `TableSink` stands in a stepwise replay, takes the same tables, and writes one row with the first
forward, the last and their number, in order of the first. `analysis/store/expansion.py` gives back the rows that went in, each in its
place; what it could not give back is not merged: a row ends where its request ran without it, and where the order of a
launch's rows would not come out right (`turns`).
"""

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ....kernels.arrays import BoolArray, Int64Array
from ....recorder.files import new_private_file
from ....recorder.remote import arrow_file
from ....recorder.state.forward import Forward
from ....recorder.trace.header import TraceHeader
from ...run.planning import Sweep
from ..violations import VIOLATION_SCHEMA, LaunchViolations, TableSink
from .turns import SWEEP_TAGS, Turns, are_writes, first_places, out_of_order

UInt64Array = npt.NDArray[np.uint64]

# Rows that may go on are held at 200 bytes each; past these the ones seen longest ago begin anew when they come again.
MAX_OPEN: Final = 500_000
# How often the order within launches is tried anew before a whole table is taken as it is.
_MAX_TRIES: Final = 8

_KEY_NUMBERS: Final = (
    *VIOLATION_SCHEMA.names[:8],
    *("runner", "group", "request_id", "req_pool_idx", "expected_position"),
    *("writer_event", "writer_forward", "writer_request_id"),
)
_KEY_NAMES: Final = ("request", "writer_request")
_TAG, _RUNNER, _ROW = (_KEY_NUMBERS.index(name) for name in ("launch_tag", "runner", "req_pool_idx"))


class _Open(NamedTuple):
    """Rows that may go on, `[m]` each: what they are, their number in the file, when last, how often."""

    keys: npt.NDArray[Any]  # [m, k] int64
    hashes: npt.NDArray[Any]  # uint64, the others int64
    turns: npt.NDArray[Any]
    numbers: npt.NDArray[Any]
    counts: npt.NDArray[Any]


def _taken(rows: _Open, chosen: Int64Array) -> _Open:
    return _Open(*(array[chosen] for array in rows))


class MergingSink:
    """Streams violations to a Parquet file, those that last merged; what is needed on the way lies beside it.

    Whoever steps says what comes next (`begin`), has `with_turns` see each launch that found something, and says `done`.
    """

    def __init__(self, path: Path, header: TraceHeader, *, max_open: int = MAX_OPEN) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        path.unlink(missing_ok=True)
        self._spans = _Spans(path.parent)
        try:
            self._sink = TableSink(self._partial, VIOLATION_SCHEMA)
        except BaseException:
            self._spans.close()
            raise
        self._turns = Turns(header)
        self._max_open = max_open
        self._closed = False
        none = np.zeros(0, np.int64)
        keys = np.zeros((0, len(_KEY_NUMBERS) + len(_KEY_NAMES)), np.int64)
        self._open = _Open(keys, none.astype(np.uint64), none, none, none)
        self._now: Forward | Sweep | None = None
        self._turn_now: Int64Array | None = None
        self._first_place: Int64Array = np.zeros(0, np.int64)

    @property
    def num_open(self) -> int:
        """The rows that may go on."""
        return len(self._open.turns)

    def begin(self, what: Forward | Sweep) -> None:
        """Say which forward or sweep is stepped next."""
        self._now, self._turn_now = what, None

    def with_turns(self, launch: LaunchViolations) -> LaunchViolations:
        """Return a launch of what was begun with the turns of its rows, as `append` needs it."""
        now = self._now
        if self._turn_now is None:
            if isinstance(now, Forward):
                self._turn_now = self._turns.forward(now.runner, now.req_pool_indices, now.request_ids)
                self._first_place = first_places(now.req_pool_indices)
            else:
                self._turn_now = np.array([self._turns.sweep(launch.runner)], np.int64)
        if isinstance(now, Forward):
            return dataclasses.replace(
                launch, turns=self._turn_now[launch.places], places=self._first_place[launch.places]
            )
        return dataclasses.replace(launch, turns=np.full(len(launch.rows), self._turn_now[0]))

    def done(self) -> None:
        """Say that the forward or sweep is over."""
        now, self._now = self._now, None
        if self._turn_now is not None or now is None:
            return
        if isinstance(now, Forward):
            self._turns.pass_by(now.runner, now.req_pool_indices)
        else:
            self._turns.pass_by_sweep(now.runner)

    def pass_by(self, runner: int, rows: Int64Array) -> None:
        """Say that forwards of a runner found nothing; `rows` `[n] int64` are the req_pool_indices of all of them."""
        self._turns.pass_by(runner, rows)

    def part(self) -> None:
        """Let no row go on over what comes now: an event that cannot be judged, a gap."""
        self._now = None
        self._turns.part_all()

    def append(self, table: pa.Table, launches: Sequence[LaunchViolations]) -> pa.Table:
        """Add the rows of launches, `table` being what `violation_table` makes of them; return those that are new."""
        turns = np.concatenate([launch.turns for launch in launches if launch.turns is not None])
        places = np.concatenate([launch.places for launch in launches])
        rows = _Rows(table, turns, places)
        found = _Merge(rows, self._open)
        numbers = found.numbers(self._sink.num_rows)
        fresh = np.flatnonzero(found.is_fresh)
        new = table if len(fresh) == table.num_rows else table.take(pa.array(fresh))
        self._sink.append(new)
        self._open = self._still_open(rows, found, numbers)
        return new

    def close(self) -> None:
        """Write the file; once, however often it is called."""
        closed, self._closed = self._closed, True
        if closed:
            return
        try:
            self._sink.close()
            self._finish()
        finally:
            self._spans.close()

    def _finish(self) -> None:
        if not self._spans.any:
            self._partial.replace(self._path)
            return
        with (
            arrow_file(self._partial) as source,
            pq.ParquetFile(source) as read,
            new_private_file(self._path) as target,
            pq.ParquetWriter(target, VIOLATION_SCHEMA, compression="zstd") as written,
        ):
            row = 0
            for group in range(read.num_row_groups):
                table = read.read_row_group(group).cast(VIOLATION_SCHEMA)
                written.write_table(self._spans.applied(table, row))
                row += table.num_rows
        self._partial.unlink()

    def _still_open(self, rows: "_Rows", found: "_Merge", numbers: Int64Array) -> _Open:
        """Note how far each row has come, and return those that may go on."""
        chains, num_open = found.chains(), self.num_open
        has_new = chains.last >= num_open
        at = chains.last[has_new] - num_open
        counts = chains.counts.copy()
        old = chains.first < num_open
        counts[old] += self._open.counts[chains.first[old]] - 1
        lasting = counts[has_new] > 1
        self._spans.note(numbers[chains.first[has_new][lasting]], rows.forwards[at[lasting]], counts[has_new][lasting])
        gone_on = _Open(rows.keys[at], rows.hashes[at], rows.turns[at], numbers[chains.first[has_new]], counts[has_new])
        kept = _taken(self._open, chains.first[~has_new])
        # Those seen longest ago come first, and are the first to go.
        gone_on = _taken(gone_on, np.argsort(at, kind="stable"))
        joined = _Open(*map(np.concatenate, zip(kept, gone_on, strict=True)))
        tags, runners, request_rows = (joined.keys[:, column] for column in (_TAG, _RUNNER, _ROW))
        alive = self._turns.may_go_on(joined.turns, runners=runners, rows=request_rows, is_sweep=SWEEP_TAGS[tags])
        return _taken(joined, np.flatnonzero(alive)[-self._max_open :])


class _Spans:
    """Last forward and number of forwards of merged rows, by their number in the file; in a nameless file of `folder`."""

    _GROW: Final = 1 << 20

    def __init__(self, folder: Path) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # `close` gives it back
        self._values: Int64Array = np.zeros((0, 2), np.int64)
        self.any = False

    def note(self, numbers: Int64Array, last_forwards: Int64Array, counts: Int64Array) -> None:
        if not len(numbers):
            return
        self.any = True
        size = len(self._values)
        wanted = int(numbers.max()) + 1
        if wanted > size:
            size = max(wanted, min(2 * size, size + self._GROW), 1024)
            # Written, not only made longer: a full disk is an error here, and would be the process's end in a map.
            self._file.seek(0, os.SEEK_END)
            self._file.write(bytes(16 * (size - len(self._values))))
            self._file.flush()
            self._values = np.memmap(self._file, np.int64, "r+", shape=(size, 2))
        self._values[numbers, 0] = last_forwards
        self._values[numbers, 1] = counts

    def applied(self, table: pa.Table, first: int) -> pa.Table:
        """Return rows of the file from number `first` on with what is noted of them."""
        part = np.zeros((table.num_rows, 2), np.int64)
        known = self._values[first : first + table.num_rows]
        part[: len(known)] = known
        merged = part[:, 1] > 0
        for name, column in (("last_forward", 0), ("num_forwards", 1)):
            at = table.schema.get_field_index(name)
            values = np.where(merged, part[:, column], table[name].to_numpy())
            table = table.set_column(at, table.schema.field(at), pa.array(values))
        return table

    def close(self) -> None:
        self._values = np.zeros((0, 2), np.int64)
        self._file.close()


class _Rows:
    """A table's rows as arrays, `[n]` each; `keys` `[n, k] int64` are what merged rows have in common."""

    def __init__(self, table: pa.Table, turns: Int64Array, places: Int64Array) -> None:
        columns = {name: _numbers(table, name) for name in _KEY_NUMBERS}
        names = [_name_codes(table, name) for name in _KEY_NAMES]
        self.keys = np.stack([*columns.values(), *names], axis=1)
        self.turns = turns
        self.forwards = _numbers(table, "forward")
        self.writes = are_writes(columns["fail_reason_bits"])
        launch = np.stack([_numbers(table, "event"), columns["group"], columns["launch_tag"], self.writes], axis=1)
        begins = np.ones(len(launch), np.bool_)
        begins[1:] = (launch[1:] != launch[:-1]).any(axis=1)
        self.launches: Int64Array = np.cumsum(begins, dtype=np.int64)
        position = np.where(SWEEP_TAGS[columns["launch_tag"]], 0, columns["expected_position"])
        self.order = places, position
        self.hashes = self._hashes()

    def __len__(self) -> int:
        return len(self.turns)

    def _hashes(self) -> UInt64Array:
        """A hash of each key, and of how many equal ones came before it in the same launch."""
        hashes = np.zeros(len(self), np.uint64)
        for column in self.keys.T:
            hashes = _mixed(hashes ^ column.view(np.uint64))
        order = np.lexsort((self.launches, hashes))
        again = (hashes[order][1:] == hashes[order][:-1]) & (self.launches[order][1:] == self.launches[order][:-1])
        if again.any():
            starts = np.flatnonzero(np.concatenate([np.ones(1, np.bool_), ~again]))
            counts = np.diff(np.append(starts, len(order)))
            nth = np.arange(len(order)) - np.repeat(starts, counts)
            hashes[order] = np.where(nth > 0, _mixed(hashes[order] ^ nth.astype(np.uint64)), hashes[order])
        return hashes


class _Chains(NamedTuple):
    """Merged rows, `[c]` each: their first and last row and how many; open rows are numbered ahead of new ones."""

    first: Int64Array
    last: Int64Array
    counts: Int64Array


class _Merge:
    """Which rows of a table go on from an earlier one."""

    def __init__(self, rows: _Rows, open_rows: _Open) -> None:
        self._num_open = len(open_rows.turns)
        mine = np.flatnonzero(~rows.writes)  # what a forward wrote wrong it writes once
        hashes = np.concatenate([open_rows.hashes, rows.hashes[mine]])
        order = np.argsort(hashes, kind="stable")
        self._order = np.concatenate([np.arange(self._num_open), mine + self._num_open])[order]
        hashes = hashes[order]
        self._links = np.zeros(len(order), np.bool_)  # whether each goes on from the one ahead of it in this order
        pairs = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
        before, after = self._order[pairs - 1], self._order[pairs]
        fits = after >= self._num_open
        pairs, before, after = pairs[fits], before[fits], after[fits] - self._num_open
        keys, turns = (np.concatenate(both) for both in ((open_rows.keys, rows.keys), (open_rows.turns, rows.turns)))
        follows = (turns[before] + 1 == rows.turns[after]) & (keys[before] == rows.keys[after]).all(axis=1)
        self._links[pairs] = follows
        self._rows, self._open = rows, open_rows
        self._settle()

    @property
    def is_fresh(self) -> BoolArray:
        fresh = np.ones(self._num_open + len(self._rows), np.bool_)
        fresh[self._order[self._links]] = False
        return fresh[self._num_open :]

    def chains(self) -> _Chains:
        """Return what is merged, and all open rows; write rows, which never go on, are none of them."""
        starts = np.flatnonzero(~self._links)
        counts = np.diff(np.append(starts, len(self._links)))
        return _Chains(self._order[starts], self._order[starts + counts - 1], counts)

    def numbers(self, first: int) -> Int64Array:
        """Return each row's number in the file, open rows ahead of new ones; `first` is the first new one's."""
        fresh, chains = self.is_fresh, self.chains()
        numbers = np.concatenate([self._open.numbers, first + np.cumsum(fresh) - fresh])
        numbers[self._order] = np.repeat(numbers[chains.first], chains.counts)
        return numbers

    def _settle(self) -> None:
        """Part rows in launches whose rows would not come out in their order again."""
        rows = self._rows
        for _ in range(_MAX_TRIES):
            linked = rows.launches[self._order[self._links] - self._num_open]
            numbers = self.numbers(1 << 62)[self._num_open :]
            wrong = rows.launches[out_of_order(rows.launches, (*rows.order, numbers))]
            bad = np.intersect1d(wrong, linked)
            if not len(bad):
                return
            self._links[self._links] = ~np.isin(linked, bad)
        self._links[:] = False


def _numbers(table: pa.Table, name: str) -> Int64Array:
    return table[name].to_numpy().astype(np.int64, copy=False)


def _name_codes(table: pa.Table, name: str) -> Int64Array:
    """Names as numbers, the same for the same name in any table."""
    encoded = table[name].combine_chunks().dictionary_encode()
    codes = np.array([_code(text) for text in encoded.dictionary.to_pylist()], np.int64)
    return codes[encoded.indices.to_numpy()]


def _code(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _mixed(values: UInt64Array) -> UInt64Array:
    """A cheap mix of bits, good enough to bring equal keys together; they are compared in full."""
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    return values ^ (values >> np.uint64(32))
