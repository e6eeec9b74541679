"""The rows of K and V that the cache hands to attention, held against the memory that they come from."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ....kernels.arrays import BoolArray, ByteArray, Int64Array
from ....kernels.ops.hash.kv_source import KvSource
from ...capture.forward_input import TableRead
from ...capture.host_arrays import as_rows, gather_kv
from ...trace.header import TraceHeader
from ..common.hooking import Finish
from .layout import ALIGN_BYTES, RowsRead, TransformersGroup

NO_SLOT: Final = -1
_HALVES: Final = np.array([[True, False], [False, True], [True, True]])  # that may be another slot's


class ReturnedRows:
    """Which slots attention reads in a step, by the leading bytes of the rows that the cache's `update` returns.

    Of each group the first captured layer is looked at, on the host alone. A row whose bytes are not those that its place held
    when it was read is of the slot that alone holds them, else of none.
    """

    def __init__(
        self, layouts: Sequence[TransformersGroup], header: TraceHeader, sources: Mapping[tuple[int, int], Any]
    ) -> None:
        self._layers: dict[int, tuple[TransformersGroup, list[KvSource]]] = {}
        for layout in layouts:
            streams = [stream for stream in header.groups[layout.index].streams if not stream.samples]
            if streams and layout.allocator._copy_view.device.type == "cpu":
                halves = [sources[layout.index, number] for number in (0, 1)]
                self._layers[streams[0].layer] = layout, halves
        self._rows: list[RowsRead | None] = []
        self._written: Sequence[Int64Array] = ()
        self._seen: dict[int, TableRead] = {}

    def begin(self, rows: list[RowsRead | None], written: Sequence[Int64Array]) -> None:
        """Take what the indices of a step say: the rows of each group, and the slots that its tokens are written to."""
        self._rows, self._written = rows, written
        self._seen.clear()

    def seen(self, group: int, otherwise: TableRead | None) -> TableRead | None:
        """Return what attention has read of a group in this step; `otherwise` if nobody has looked."""
        return self._seen.get(group, otherwise)

    def on_update(self, layer: int, states: Sequence[Any]) -> Finish | None:
        """Look at what a layer hands in, K and V `[1, heads, T, head_dim]`, and at the pool before it is written to."""
        if layer not in self._layers or not self._rows:
            return None
        layout, halves = self._layers[layer]
        rows, written = self._rows[layout.index], self._written[layout.index]
        if rows is None:
            return None
        expected = before = None
        if layout.ring_size:  # it is read before it is written to, and tokens of the step are taken as they come
            expected, before = _gather(halves, rows.read.slots), _gather(halves, written)
            own = rows.tokens >= 0
            expected[own] = _leading(states, rows.tokens[own])

        def finish(result: Any, error: BaseException | None) -> None:
            if error is not None or result[0].shape[2] <= rows.at.max(initial=-1):
                return
            got, slots = _leading(result, rows.at), rows.read.slots.copy()
            differs = (got != (_gather(halves, slots) if expected is None else expected)).any(axis=2)
            differs[slots >= layout.num_slots] = False  # no token's place
            if differs.any():  # a token that was damaged on its way into its slot is read from there all the same
                own = rows.tokens >= 0
                differs[own] &= (got[own] != _gather(halves, slots[own])).any(axis=2)
            wrong = np.flatnonzero(differs.any(axis=1))
            if wrong.size:
                pool = _gather(halves, np.arange(layout.num_slots))
                pools = [pool]
                if before is not None:
                    pools.insert(0, pool.copy())
                    pools[0][written] = before
                slots[wrong] = _found(pools, layout.first_slot, got[wrong], differs[wrong], slots[wrong])
            self._seen[layout.index] = dataclasses.replace(rows.read, slots=slots)

        return finish


def _found(pools: list[ByteArray], first: int, got: ByteArray, differs: BoolArray, places: Int64Array) -> Int64Array:
    """Return of each row the slot from `first` on that alone holds its bytes, but not at its own place; of the first pool that has one."""
    found = np.full(len(got), NO_SLOT)
    for pool in reversed(pools):
        for halves in _HALVES:
            mine = np.flatnonzero((differs == halves).all(axis=1))
            if mine.size:
                slots = _only(pool[first:, halves], got[mine][:, halves])
                known = (slots != NO_SLOT) & (slots + first != places[mine])
                found[mine[known]] = slots[known] + first
    return found


def _only(pool: ByteArray, wanted: ByteArray) -> Int64Array:
    """Return the place of each of the `wanted` rows in the pool, if it is there once; else `NO_SLOT`."""
    both = np.concatenate((pool.reshape(len(pool), -1), wanted.reshape(len(wanted), -1)))
    ids = np.unique(np.ascontiguousarray(both).view(np.uint64), axis=0, return_inverse=True)[1].reshape(-1)
    of_pool, of_wanted = ids[: len(pool)], ids[len(pool) :]
    place = np.zeros(len(both), np.int64)
    place[of_pool] = np.arange(len(pool))
    return np.where(np.bincount(of_pool, minlength=len(both))[of_wanted] == 1, place[of_wanted], NO_SLOT)


def _gather(halves: list[KvSource], slots: Int64Array) -> ByteArray:
    """Return the leading bytes of the slots' K and V, `[n, 2, ALIGN_BYTES]`."""
    return np.stack([gather_kv(source, slots, ALIGN_BYTES) for source in halves], axis=1)


def _leading(states: Sequence[Any], rows: Int64Array) -> ByteArray:
    """Return the leading bytes of rows of K and V, each `[1, heads, T, head_dim]`, as `[n, 2, ALIGN_BYTES]`."""
    import torch

    chosen = torch.from_numpy(rows)
    parts = [half[0].transpose(0, 1).flatten(1)[:, : ALIGN_BYTES // half.itemsize][chosen] for half in states[:2]]
    return np.stack([as_rows(part) for part in parts], axis=1)
