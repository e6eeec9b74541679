"""What a replay knows, on the device: block tables, full-to-SWA tables, bytes of slots."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ....kernels.arrays import ByteArray, Int64Array
from ....kernels.capture.frames import (
    STATES_AT,
    TABLE_WORDS,
    TABLES_AT,
    EngineTable,
    GroupOnDevice,
    LayersOnDevice,
    LutOnDevice,
    RunnerOnDevice,
    StatesOnDevice,
    StreamOnDevice,
    TableOnDevice,
)
from ....kernels.capture.layers import FLOATS, words_on_device
from ....kernels.ops.hash.kv_source import KvSource
from ....kernels.ops.state_hash.reference import POOL_WORDS
from ...trace.header import KvStream, TraceHeader
from ..host_arrays import own_int64
from ..kv_layers import LayerPlaces
from ..kv_tensor import KvTensor

HASHING_PROGRAMS: Final = 64  # of what is changed between forwards: few slots


class DeviceShadows:
    """Every runner's shadows; `bytes` is what they take on the device.

    `tables` are the engine's block tables, as `[rows, width] int32` or a `EngineTable`, `luts` its full-to-SWA tables,
    `sources` say for each `(group, stream)` where the bytes lie, `states` of each state pool the parts of the sampled layer,
    `[num_slots, ...]`. Raises `ValueError`, which says why, for an engine that cannot be recorded this way.
    """

    def __init__(
        self,
        header: TraceHeader,
        *,
        tables: Sequence[Any],
        luts: Sequence[Any],
        sources: Mapping[tuple[int, int], KvSource | KvTensor],
        states: Mapping[int, Sequence[Any]] | None = None,
    ) -> None:
        import torch

        self._owned: list[Any] = []
        engine_tables = [one if isinstance(one, EngineTable) else EngineTable(one) for one in tables]
        device = engine_tables[0].table.device

        def zeros(shape: Sequence[int], dtype: Any) -> Any:
            self._owned.append(torch.zeros(tuple(shape), dtype=dtype, device=device))
            return self._owned[-1]

        shapes = [(one.rows, one.width) for one in header.tables]
        known_tables = [
            TableOnDevice(number, table, zeros(shapes[number] if table.by_place else table.table.shape, torch.int32))
            for number, table in enumerate(engine_tables)
        ]
        known_luts = [LutOnDevice(number, lut, zeros(lut.shape, torch.int64)) for number, lut in enumerate(luts)]
        apart = (
            len({frozenset(one.table for one in header.groups if one.runner == n) for n in range(len(header.runners))})
            > 1
        )
        self.runners: list[RunnerOnDevice] = []
        for number in range(len(header.runners)):
            mine = [(g, group) for g, group in enumerate(header.groups) if group.runner == number]
            used = sorted({group.lut for _, group in mine if group.lut >= 0})
            if any(group.reads_before_write for _, group in mine):
                raise ValueError(f"runner {number} has ring buffers, which must be looked at before a forward")
            # A replay puts what any forward writes into all tables, so runners with tables of their own have them all.
            used_tables = list(range(len(known_tables))) if apart else sorted({group.table for _, group in mine}) or [0]
            groups = []
            for g, group in mine:
                known = zeros((group.num_slots,), torch.uint8)
                samples = any(stream.samples for stream in group.streams)
                groups.append(
                    GroupOnDevice(
                        number=g,
                        table=used_tables.index(group.table),
                        window=group.window,
                        lut=used.index(group.lut) if group.lut >= 0 else -1,
                        num_slots=group.num_slots,
                        stamps=zeros((group.num_slots,), torch.int32),
                        known=known,
                        sampled=zeros((group.num_slots,), torch.uint8) if samples else known,
                    )
                )
            streams = [
                _stream(
                    sources[g, s], stream, zeros((group.num_slots, stream.capture_bytes // 8), torch.int64), place, to
                )
                for place, ((g, group), to) in enumerate(zip(mine, groups, strict=True))
                for s, stream in enumerate(group.streams)
            ]
            runner = RunnerOnDevice(
                tables=[known_tables[table] for table in used_tables],
                groups=groups,
                luts=[known_luts[lut] for lut in used],
                streams=streams,
                states=[
                    _states(header, pool, (states or {}).get(pool, ()))
                    for pool, one in enumerate(header.states)
                    if one.runner == number
                ],
            )
            self.runners.append(runner)
        self.descriptors = [
            torch.tensor(runner.descriptor(), dtype=torch.int64, device=device) for runner in self.runners
        ]

    @property
    def bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._owned)

    def reset(self) -> None:
        """Take everything for unknown, as a replay does after a loss; runs on the current stream."""
        for tensor in self._owned:
            tensor.zero_()

    def move_table(self, runner: int, place: int, table: Any) -> None:
        """Have a runner's block table, by its place among those, read elsewhere from now on, `[any, columns] int32`.

        Runs on the current stream, and copies nothing from the host, which would wait.
        """
        words = (int(table.data_ptr()), *map(int, table.shape), int(table.stride(0)))
        for word, value in enumerate(words, TABLES_AT + place * TABLE_WORDS):
            self.descriptors[runner][word].fill_(value)

    def learn(self, group: int, slots: Int64Array, content: Sequence[ByteArray]) -> None:
        """Take over bytes that the trace has got otherwise than by a forward; runs on the current stream.

        `slots` `[n]` are the group's own, none outside the pool, `content` for each of its streams `[n, capture_bytes]`.
        """
        import torch

        shadow, streams = self._find(group)
        where = torch.from_numpy(slots).to(shadow.known.device)
        for stream, rows in zip(streams, content, strict=True):
            stream.shadow[where] = torch.from_numpy(np.ascontiguousarray(rows).view(np.int64)).to(where.device)
        shadow.known[where] = shadow.sampled[where] = 1

    def copy(self, group: int, src: Int64Array | None, dst: Int64Array) -> None:
        """Copy what is known of whole slots, all read before any is written; `src` None: nothing is known of `dst` now.

        `src`, `dst` `[n]` in the group's own numbering; runs on the current stream.
        """
        shadow, streams = self._find(group)
        inside = (dst >= 0) & (dst < shadow.num_slots)
        if src is not None:
            inside &= (src >= 0) & (src < shadow.num_slots)
        there = _sent(dst[inside], shadow.known.device)
        if src is None:
            shadow.known[there] = shadow.sampled[there] = 0
            return
        here = _sent(src[inside], shadow.known.device)
        for stream in streams:
            stream.shadow[there] = stream.shadow[here]
        shadow.known[there] = shadow.known[here]
        if shadow.sampled is not shadow.known:
            shadow.sampled[there] = 0  # of each slot other bytes are looked at

    def forget_slots(self, group: int, slots: Any) -> None:
        """Take slots' bytes for unknown; `slots` `[n]`, any integers, in the group's own numbering, none outside."""
        shadow = self._find(group)[0]
        where = shadow.known.device
        there = _sent(slots, where) if isinstance(slots, np.ndarray) else slots.to(where).long()
        shadow.known[there] = shadow.sampled[there] = 0

    def hash_states(self, pool: int, slots: Any, sources: Any | None) -> Any:
        """Return what slots of a state pool hold by now, `[3 * n] int64`: slots, sources (-1 for None) and hashes.

        `slots`, `sources` `[n]`, any integer tensors on the device; runs on the current stream. What the host knows is hashed
        by nobody (0): of a copy the bytes are known by its source.
        """
        if not hasattr(slots, "get_device"):
            to = own_int64(slots).reshape(-1)
            of = np.full_like(to, -1) if sources is None else own_int64(sources).reshape(-1)
            return np.concatenate((to, of, np.zeros_like(to)))
        import torch

        from ....kernels.capture.model_forward import launches_on
        from ....kernels.ops.state_hash.triton import TILE, slots_kernel

        runner, place = next(
            (number, place)
            for number, runner in enumerate(self.runners)
            for place, one in enumerate(runner.states)
            if one.number == pool
        )
        found = torch.empty((3, slots.numel()), dtype=torch.int64, device=slots.device)
        found[0].copy_(slots.reshape(-1))
        found[1].fill_(-1) if sources is None else found[1].copy_(sources.reshape(-1))
        words = self.descriptors[runner][STATES_AT + place * POOL_WORDS :]
        arguments = words, found[0], found[2], slots.numel(), 1
        launches_on(found).launch(slots_kernel, HASHING_PROGRAMS, arguments, (TILE,))
        return found.reshape(-1)

    def prepare_states(self, runner: int) -> None:
        """Compile what `hash_states` launches, if the runner has state pools."""
        import torch

        for one in self.runners[runner].states[:1]:
            self.hash_states(one.number, torch.zeros(1, dtype=torch.int64, device=self.descriptors[0].device), None)

    def _find(self, group: int) -> tuple[GroupOnDevice, list[StreamOnDevice]]:
        """Return the shadow of a group of the header's, and those of its streams."""
        return next(
            (one, [stream for stream in runner.streams if stream.group == place])
            for runner in self.runners
            for place, one in enumerate(runner.groups)
            if one.number == group
        )


def bytes_of_slots(parts: Sequence[Any]) -> tuple[int, ...]:
    """Return how many bytes a slot has of each of some torch tensors `[num_slots, ...]`."""
    return tuple(int(part[0].numel() * part.element_size()) for part in parts)


def slots_as_bytes(part: Any, most: int, *, from_end: bool = False) -> Any | None:
    """Return the first `most` bytes, or the last, of each slot of a torch tensor `[num_slots, ...]` as they lie in memory,
    `[num_slots, n] uint8`; None if a slot's elements do not lie side by side, in any order.
    """
    import torch

    dense, expected = sorted((step, size) for step, size in zip(part.stride()[1:], part.shape[1:], strict=True)), 1
    for step, size in dense:
        if size > 1 and step != expected:
            return None
        expected *= size
    rows = part.as_strided((part.shape[0], part[0].numel()), (part.stride(0), 1)).view(torch.uint8)
    return rows[:, max(rows.shape[1] - most, 0) :] if from_end else rows[:, :most]


def _sent(slots: Int64Array, device: Any) -> Any:
    """Return slots on the device, `[n] int64`; nobody waits for them."""
    import torch

    here = torch.from_numpy(slots)
    return (here.pin_memory() if device.type == "cuda" else here).to(device, non_blocking=True)


def _states(header: TraceHeader, pool: int, parts: Sequence[Any]) -> StatesOnDevice:
    said = header.states[pool]
    rows = [slots_as_bytes(part, said.hashed_bytes, from_end=said.from_end) for part in parts]
    if any(row is None or row.shape[0] < said.num_slots for row in rows):
        raise ValueError(f"state pool {said.name}: a slot's bytes do not lie side by side")
    return StatesOnDevice(pool, rows, said.num_slots)


def _stream(
    source: KvSource | KvTensor, stream: KvStream, shadow: Any, place: int, group: GroupOnDevice
) -> StreamOnDevice:
    """Return where a stream of a group's, by its place among the runner's, lies."""
    import torch

    if isinstance(source, KvTensor):
        places = LayerPlaces.of(source)
        if not stream.samples or source.first_slot:
            raise ValueError("a KvTensor on a device, expected one of a stream that samples layers, from slot 0 on")
        begins, chunks = (torch.from_numpy(words).to(shadow.device) for words in (places.begins, places.chunks))
        lanes = words_on_device(stream.dtype) if stream.dtype in FLOATS else ()
        return StreamOnDevice(
            address=places.address,
            num_slots=min(places.num_slots, group.num_slots),
            shadow=shadow,
            known=group.sampled,
            group=place,
            page_size=places.page_size,
            page_words=places.page_words,
            token_words=places.token_words,
            layers=LayersOnDevice(begins, chunks, stream.seed, lanes),
        )
    rows = source.tensor
    if source.page_size > 1 and source.bytes_per_token % 8:
        raise ValueError(f"tokens of {source.bytes_per_token} bytes in a page, expected 64-bit words")
    if rows.stride(1) != 1 or rows.stride(0) % 8 or rows.data_ptr() % 8:
        raise ValueError("a stream's bytes do not lie as aligned 64-bit words")
    return StreamOnDevice(
        address=rows.data_ptr(),
        num_slots=min(int(rows.shape[0]) * source.page_size, group.num_slots),
        shadow=shadow,
        known=group.known,
        group=place,
        page_size=source.page_size,
        page_words=rows.stride(0) // 8,
        token_words=source.bytes_per_token // 8 if source.page_size > 1 else 1,
    )
