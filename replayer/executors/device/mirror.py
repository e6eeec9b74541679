"""The replayed state on the device: block tables, full-to-SWA tables, truth tokens, canary records and KV bytes.

The host keeps the tables, too; what changes there is noted (`TableNotes`) and sent along with the next forward. Records and bytes are the
device's alone: slots come to the host, and go back, for events that the host carries out.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array, record_words
from ....kernels.constants import RECORD_KV_HASH
from ....kernels.dispatch import select
from ....kernels.replay_pass.entries import Runs
from ....kernels.replay_pass.state import read_cells_loops
from ....recorder.state.pools import GroupPool
from ....recorder.state.tables import StateListener, StateTables
from ....recorder.trace.header import TraceHeader
from .arena import Arena

_AT_ONCE: Final = 1 << 20  # slots
_ALIGNED: Final = 64  # cells


@dataclass(slots=True, kw_only=True)
class PoolMirror:
    """One group's pool: `head`, `tail` map a half to `[slots, 32] uint8`, `kv` has `[slots, words] int64` a stream.

    `alike`: token, position and chain hash of a slot's records are the same in all buffers.
    """

    head: dict[str, Any]
    tail: dict[str, Any]
    kv: list[Any]
    alike: bool = True


class TableNotes(StateListener):
    """Notes which cells of the host's tables change, for the device's.

    `odd`: some slot is in a table that not all who read it have. Runs of truth tokens count as those of a table more.
    """

    def __init__(self, header: TraceHeader) -> None:
        self.runs: list[tuple[int, Int64Array, Int64Array, Int64Array]] = []
        self.lut_places: list[tuple[int, Int64Array]] = []
        self.num_cells = 0
        self.odd = False
        self._limits = []
        for table in range(len(header.tables)):
            readers = [group for group in header.groups if group.table == table]
            lens = [header.lut_lens[group.lut] if group.lut >= 0 else group.num_slots for group in readers]
            self._limits.append(min(lens, default=0))
        self._lut_limits = [
            min((group.num_slots for group in header.groups if group.lut == lut), default=0)
            for lut in range(len(header.lut_lens))
        ]

    def clear(self) -> None:
        """Forget what was noted."""
        self.runs.clear()
        self.lut_places.clear()
        self.num_cells = 0

    def table_runs(self, tables: StateTables, index: int, runs: Runs) -> None:
        """Note runs of a block table."""
        del tables
        indices, rows, starts, lens, values = runs
        mine = indices == index
        if mine.all():
            self.odd |= leaves(values, self._limits[index])
        elif mine.any():
            self.odd |= leaves(values, min(self._limits))
            rows, starts, lens = rows[mine], starts[mine], lens[mine]
        else:
            return
        self._note(index, rows, starts, lens)

    def truth_runs(self, tables: StateTables, runs: Runs) -> None:
        """Note runs of the truth tokens."""
        del tables
        self._note(len(self._limits), runs.rows, runs.starts, runs.lens)

    def lut_entries(self, tables: StateTables, *, index: int, places: Int64Array, values: Int64Array) -> None:
        """Note entries of a full-to-SWA table."""
        del tables
        self.odd |= leaves(values, self._lut_limits[index])
        self.lut_places.append((index, places))
        self.num_cells += len(places)

    def _note(self, table: int, rows: Int64Array, starts: Int64Array, lens: Int64Array) -> None:
        self.runs.append((table, rows, starts, lens))
        self.num_cells += int(np.maximum(lens, 0).sum())


def leaves(values: Int64Array, limit: int) -> bool:
    """Whether any of some values, `[n] int64`, contiguous, is negative, or `limit` or more."""
    return len(values) > 0 and int(values.view(np.uint64).max()) >= limit


class Mirror:
    """The state's arrays on `device`: `tables`, `luts`, `truth` (None where the trace has none), `pools`."""

    def __init__(self, header: TraceHeader, pools: list[GroupPool], notes: TableNotes, device: Any) -> None:
        import torch

        self._torch = torch
        self.device = device
        shapes = [(table.rows, table.width) for table in header.tables]
        if header.truth_table is not None:
            shapes.append((header.truth_table.rows, header.truth_table.width))
        sizes = [-(-rows * width // _ALIGNED) * _ALIGNED for rows, width in shapes]
        self._bases = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))]).tolist()
        self._cells = torch.zeros(self._bases[-1], dtype=torch.int32, device=device)
        parts = [
            self._cells[base : base + rows * width].view(rows, width)
            for base, (rows, width) in zip(self._bases, shapes, strict=False)
        ]
        self.tables, self.truth = parts[: len(header.tables)], (parts[len(header.tables) :] or [None])[0]
        self.luts = [torch.zeros(length, dtype=torch.int64, device=device) for length in header.lut_lens]
        self.pools = [self._allocate(pool) for pool in pools]
        self._notes = notes

    def _allocate(self, pool: GroupPool) -> PoolMirror:
        def zeros(arrays: dict[str, Any]) -> dict[str, Any]:
            # As words, so that every record begins at a multiple of 8 bytes.
            return {
                half: self._torch.zeros((len(a), a.shape[1] // 8), dtype=self._torch.int64, device=self.device).view(
                    self._torch.uint8
                )
                for half, a in arrays.items()
            }

        kv = [
            self._torch.zeros((len(a), a.shape[1] // 8), dtype=self._torch.int64, device=self.device)
            for a in pool.pool.kv
        ]
        return PoolMirror(head=zeros(pool.pool.head), tail=zeros(pool.pool.tail), kv=kv)

    def send_noted(self, tables: StateTables, arena: Arena, *, backend: str) -> list[tuple[Any, Any, Any]]:
        """Lay down what noted cells hold now; return what `put_cells` takes once the arena has been sent."""
        found = []
        notes = self._notes
        if notes.runs:
            host = [*tables.req_to_token, *([] if tables.truth is None else [tables.truth])]
            cells, there = arena.take(notes.num_cells)
            values, values_there = arena.take(-(-notes.num_cells // 2))
            filled = np.zeros(1, np.int64)
            for number, rows, starts, counts in notes.runs:
                into = cells, values.view(np.int32), filled
                select(read_cells_loops, backend)(rows, starts, counts, host[number], self._bases[number], *into)
            count = int(filled[0])
            if count:
                found.append((self._cells, there[:count], values_there.view(self._torch.int32)[:count]))
        for number, places in notes.lut_places:
            found.append((self.luts[number], arena.put(places), arena.put(tables.luts[number][places])))
        notes.clear()
        return found

    def put_cells(self, found: list[tuple[Any, Any, Any]]) -> None:
        """Put the cells that `send_noted` laid down into the device's tables; a cell that comes twice has one value."""
        for tensor, cells, values in found:
            tensor.index_copy_(0, cells, values)

    def push_tables(self, tables: StateTables) -> None:
        """Bring all tables from the host."""
        self._notes.clear()
        host = [*tables.req_to_token, *tables.luts, *([] if tables.truth is None else [tables.truth])]
        mine = [*self.tables, *self.luts, *([] if self.truth is None else [self.truth])]
        for here, there in zip(host, mine, strict=True):
            there.copy_(self._torch.from_numpy(here))

    def pull_slots(self, pool: GroupPool, slots: Int64Array) -> None:
        """Bring records and bytes of slots `[n] int64`, all of them the pool's, to the host."""
        mine, tier = self.pools[pool.index], pool.pool
        for first in range(0, len(slots), _AT_ONCE):
            some = slots[first : first + _AT_ONCE]
            where = self._torch.from_numpy(some).to(self.device)
            for half in pool.group.halves:
                tier.head[half][some] = mine.head[half][where].cpu().numpy()
                tier.tail[half][some] = mine.tail[half][where].cpu().numpy()
        self.pull_bytes(pool, slots)

    def pull_bytes(self, pool: GroupPool, slots: Int64Array) -> None:
        """Bring the KV bytes of slots to the host."""
        where = self._torch.from_numpy(slots).to(self.device)
        for data, words in zip(pool.pool.kv, self.pools[pool.index].kv, strict=True):
            data[slots] = words[where].cpu().numpy().view(np.uint8)

    def push_slots(self, pool: GroupPool, slots: Int64Array) -> None:
        """Bring records and bytes of slots `[n] int64` from the host."""
        mine, tier = self.pools[pool.index], pool.pool
        base = record_words(tier.tail[pool.group.halves[0]], written=False)
        for first in range(0, len(slots), _AT_ONCE):
            some = slots[first : first + _AT_ONCE]
            where = self._torch.from_numpy(some).to(self.device)
            for half in pool.group.halves:
                for here, there in ((tier.head[half], mine.head[half]), (tier.tail[half], mine.tail[half])):
                    there[where] = self._torch.from_numpy(here[some]).to(self.device)
                    words = record_words(here, written=False)[some]
                    mine.alike &= np.array_equal(words[:, :RECORD_KV_HASH], base[some][:, :RECORD_KV_HASH])
        self.push_bytes(pool, slots)

    def push_bytes(self, pool: GroupPool, slots: Int64Array) -> None:
        """Bring the KV bytes of slots from the host."""
        where = self._torch.from_numpy(slots).to(self.device)
        for data, words in zip(pool.pool.kv, self.pools[pool.index].kv, strict=True):
            words[where] = self._torch.from_numpy(data[slots].view(np.int64)).to(self.device)
