"""The KV bytes that a replay knows, slot by slot, and the slots that it lost sight of.

The bytes of a slot are known from the first write that the recorder saw; a later read of other bytes is a change that
nobody wrote. Slots that dropped events wrote are marked lost, to be named by the next loss event.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.capture.changes import kv_same
from ...kernels.ops.hash.kv_source import KvSource
from ..trace.header import SAMPLE_BYTES, KvStream, PoolGroup, TraceHeader
from ..trace.schema import PHASE_AFTER, PHASE_BEFORE, SUBMITTED, TIER_POOL
from .forward_input import CopiedForward, KvChange
from .host_arrays import gather_kv, mask_to_runs, on_device, on_host
from .kv_layers import KvLayers, SubmittedLayers
from .kv_tensor import KvTensor

Source = KvSource | KvTensor
StreamSource = Source | KvLayers
_NOTHING = np.empty(0, np.int64)


class GroupKvShadow:
    """One pool group: its streams' bytes, slot by slot, in the pool and in the offload tier.

    `any_lost` says that slots of the pool are lost and not yet named by a loss event.
    """

    __slots__ = ("_backend", "_tiers", "any_lost", "group", "sources")

    def __init__(self, group: PoolGroup, sources: list[StreamSource], *, backend: str) -> None:
        self.group = group
        self.sources = sources
        self.any_lost = False
        self._tiers = tuple(_Tier(group.streams, size) for size in (group.num_slots, group.host_num_slots))
        self._backend = backend

    def gather(self, stream: int, slots: Int64Array) -> ByteArray:
        """Return the stream's bytes of each slot now, `[n, capture_bytes] uint8`; zeros outside the pool."""
        source, capture_bytes = self.sources[stream], self.group.streams[stream].capture_bytes
        if isinstance(source, KvLayers):
            return source.gather(slots)
        slots = slots - self.group.slot_shift if self.group.slot_shift else slots
        if isinstance(source, KvTensor):
            return source.gather(slots, capture_bytes)
        return gather_kv(source, slots, capture_bytes)

    def changes(self, read: Int64Array, written: Int64Array) -> list[tuple[int, Int64Array, ByteArray]]:
        """Compare the slots of a prefix, each once, with what is known; `written` ones and padding are left out.

        Returns `(stream, slots [n] int64, bytes [n, capture_bytes] uint8)` for each stream with a change.
        """
        pool = self._tiers[TIER_POOL]
        if self._plainly_same(read):
            return []
        read = read[(read > 0) & (read < pool.known.size)]
        read = read[(pool.known[read] != 0) & ~np.isin(read, written)]
        slots = read[np.sort(np.unique(read, return_index=True)[1])]
        found = []
        for stream, known in enumerate(pool.content):
            content = self.gather(stream, slots)
            changed = (content != known[slots]).any(axis=1)
            if self.group.streams[stream].samples:
                changed &= pool.sampled[slots] != 0
            if changed.any():
                found.append((stream, slots[changed], content[changed]))
        return found

    def otherwise(self) -> Int64Array:
        """Return the slots that do not hold what is known of them, or of which nothing is known, `[n]`; it reads the whole pool."""
        every = np.arange(1, self._tiers[TIER_POOL].known.size, dtype=np.int64)
        changed = [slots for _, slots, _ in self.changes(every, every[:0])]
        return np.concatenate((np.setdiff1d(every, self.known_bytes(every)[0]), *changed))

    def _plainly_same(self, read: Int64Array) -> bool:
        """Say whether compiled loops see that nothing differs, which is nearly always so."""
        pool, shift = self._tiers[TIER_POOL], self.group.slot_shift
        first = np.full(shift, shift, np.int64)  # the engine's slot 0, which the loops take for padding
        return all(
            source.plainly_same(read, content, pool.sampled)
            if isinstance(source, KvLayers)
            else isinstance(source, KvSource)
            and not on_device(source)
            and kv_same(
                source=source,
                slots=read - shift if shift else read,
                shadow=content[shift:],
                known=pool.known[shift:],
                backend=self._backend,
            )
            and not ((self.gather(stream, first) != content[first]).any(axis=1) & (pool.known[first] != 0)).any()
            for stream, (source, content) in enumerate(zip(self.sources, pool.content, strict=True))
        )

    def store_change(self, stream: int, slots: Int64Array, content: ByteArray) -> None:
        """Store the bytes of an accepted event's observed change."""
        self._tiers[TIER_POOL].content[stream][slots] = content

    def store_written(self, slots: Int64Array, content: list[ByteArray]) -> None:
        """Store an accepted forward's written slots, `content[stream]` `[n, capture_bytes]`; the last write wins."""
        pool = self._tiers[TIER_POOL]
        inside = (slots >= 0) & (slots < pool.known.size)
        if not inside.all():
            slots, content = slots[inside], [rows[inside] for rows in content]
        for known, rows in zip(pool.content, content, strict=False):
            known[slots] = rows
        pool.known[slots] = 1
        if pool.sampled is not pool.known:
            pool.sampled[slots] = 1

    def known_bytes(self, slots: Int64Array) -> tuple[Int64Array, list[ByteArray]]:
        """Return those of the pool's slots whose bytes are known, and of each stream `[n, capture_bytes]`."""
        pool = self._tiers[TIER_POOL]
        inside = slots[(slots >= 0) & (slots < pool.known.size)]
        known = inside[pool.known[inside] != 0]
        return known, [content[known] for content in pool.content]

    def store_copy(self, *, src_tier: int, src: Int64Array, dst_tier: int, dst: Int64Array) -> None:
        """Store an accepted copy of whole slots; everything is read before anything is written."""
        source, target = self._tiers[src_tier], self._tiers[dst_tier]
        inside = (src >= 0) & (src < source.known.size) & (dst >= 0) & (dst < target.known.size)
        src, dst = src[inside], dst[inside]
        for stream, rows in enumerate(source.content):
            target.content[stream][dst] = rows[src]
        target.known[dst] = source.known[src]
        if target.sampled is not target.known:
            target.sampled[dst] = 0  # of each slot other bytes are looked at
        if dst_tier != TIER_POOL:
            target.lost[dst] = False
        # What a replay does not know in the offload tier it does not know after the load-back either.
        if src_tier != TIER_POOL and source.lost[src].any():
            target.lost[dst] |= source.lost[src]
            self.any_lost = True

    def lose(self, slots: Int64Array, *, tier: int = TIER_POOL) -> None:
        """Mark slots that a dropped event wrote."""
        target = self._tiers[tier]
        inside = slots[(slots >= 0) & (slots < target.known.size)]
        target.lost[inside] = True
        target.known[inside] = target.sampled[inside] = 0
        self.any_lost |= tier == TIER_POOL and bool(inside.size)

    def forget_slots(self, slots: Int64Array) -> None:
        """Take the bytes of the pool's slots `[n]` for unknown."""
        pool = self._tiers[TIER_POOL]
        inside = slots[(slots >= 0) & (slots < pool.known.size)]
        pool.known[inside] = pool.sampled[inside] = 0

    def forget(self) -> None:
        """Take the bytes of all slots for unknown."""
        for tier in self._tiers:
            tier.known[:] = tier.sampled[:] = 0

    def lost_runs(self) -> tuple[Int64Array, Int64Array]:
        """Return the pool's lost slots as runs `(starts, counts)`."""
        return mask_to_runs(self._tiers[TIER_POOL].lost)

    def clear_lost(self) -> None:
        """Forget the pool's lost slots: a loss event that names them was accepted."""
        self._tiers[TIER_POOL].lost[:] = False
        self.any_lost = False


class _Tier:
    """The slots of one tier, 0 the pool, 1 the host; zeros are handed out lazily, so untouched slots cost nothing.

    `content[stream]` `[num_slots, capture_bytes] uint8`, `known` `[num_slots] uint8`, `sampled` the same for streams that sample
    layers, `lost` `[num_slots] bool`.
    """

    __slots__ = ("content", "known", "lost", "sampled")

    def __init__(self, streams: tuple[KvStream, ...], num_slots: int) -> None:
        self.content: list[ByteArray] = [np.zeros((num_slots, s.capture_bytes), np.uint8) for s in streams]
        self.known: ByteArray = np.zeros(num_slots, np.uint8)
        self.sampled = self.known.copy() if any(s.samples for s in streams) else self.known
        self.lost: BoolArray = np.zeros(num_slots, np.bool_)


def group_shadows(
    header: TraceHeader,
    kv_sources: Mapping[tuple[int, int], Source],
    *,
    backend: str = "cpu",
) -> list[GroupKvShadow]:
    """Return one shadow for each of the header's groups.

    Raises `ValueError` if a stream of the header has no source, a source has no stream, their sizes differ, a source does
    not hold its group's slots, or two of a group lie over the same bytes.
    """
    expected = {(g, s) for g, group in enumerate(header.groups) for s in range(len(group.streams))}
    if set(kv_sources) != expected:
        raise ValueError(
            f"kv_sources has (group, stream) keys {sorted(kv_sources)}, the header's groups have {sorted(expected)}"
        )
    for (g, s), source in kv_sources.items():
        _check_source(f"kv_sources[{g}, {s}]", source, header.groups[g], header.groups[g].streams[s])
    for (g, s), (h, t) in itertools.combinations(sorted(expected), 2):
        sampling = header.groups[g].streams[s].samples or header.groups[h].streams[t].samples
        if g == h and not sampling and _overlap(kv_sources[g, s], kv_sources[h, t]):
            raise ValueError(
                f"kv_sources[{g}, {s}] and kv_sources[{g}, {t}] lie over the same bytes; pass each layer's K and V once"
            )
    return [
        GroupKvShadow(
            group,
            [
                _stream_source(f"kv_sources[{g}, {s}]", kv_sources[g, s], group, stream, backend)
                for s, stream in enumerate(group.streams)
            ],
            backend=backend,
        )
        for g, group in enumerate(header.groups)
    ]


def _check_source(name: str, source: Source, group: PoolGroup, stream: KvStream) -> None:
    """Raise `ValueError` if a source is not made for its group's slots: what is beyond it nobody would watch."""
    expected = (len(stream.layers) if stream.samples else 1) * stream.bytes_per_token
    if _is_submitted(source, stream):
        expected = SAMPLE_BYTES
    if source.bytes_per_token != expected:
        raise ValueError(f"{name} has {source.bytes_per_token} bytes a token, the header says {expected}")
    num_slots = group.num_slots - group.slot_shift
    page_size = group.page_size if isinstance(source, KvTensor) else source.page_size
    if not num_slots <= source.num_slots < num_slots + page_size:
        raise ValueError(
            f"{name} holds {source.num_slots} slots, the group {group.name} has {num_slots}; pass exactly its slots, of one "
            'layer: of a pool that does not lie slot by slot a KvTensor, which names the axes ("head slot dim")'
        )
    if isinstance(source, KvTensor):
        return
    if source.read_bytes < stream.capture_bytes:
        raise ValueError(
            f"{name} reads {source.read_bytes} bytes of a slot, the header captures {stream.capture_bytes}; pass the same"
        )
    stride, width = source.strides[0], source.page_size * source.bytes_per_token
    if source.tensor.shape[0] > 1 and stride < width:
        raise ValueError(f"{name} has rows {stride} bytes apart that hold {width}: its slots overlap")


def _overlap(one: Source, other: Source) -> bool:
    """Say whether the bytes that two sources read of their slots lie over one another, as far as their geometry tells.

    K and V of a token may take turns: then they lie within each other's rows, and have no byte in common.
    """
    if isinstance(one, KvTensor) or isinstance(other, KvTensor):
        return isinstance(one, KvTensor) and isinstance(other, KvTensor) and one.same_memory(other)
    if str(getattr(one.tensor, "device", "cpu")) != str(getattr(other.tensor, "device", "cpu")):
        return False
    near, far = sorted((one, other), key=lambda source: source.address)
    offset, stride = far.address - near.address, near.strides[0]
    if (near.page_size, near.bytes_per_token, stride) != (far.page_size, far.bytes_per_token, far.strides[0]):
        return offset == 0
    if offset >= near.tensor.shape[0] * stride:
        return False
    within = offset % stride
    size, page_bytes = near.bytes_per_token, near.page_size * near.bytes_per_token
    if within >= page_bytes and within + page_bytes <= stride:
        return False
    within = within % size if within < page_bytes else (within - stride) % size
    return within < near.read_bytes or within + far.read_bytes > size


def _stream_source(name: str, source: Source, group: PoolGroup, stream: KvStream, backend: str) -> StreamSource:
    """Return what reads a stream's bytes from its source."""
    if stream.samples:
        if isinstance(source, KvSource) and _is_submitted(source, stream):
            return SubmittedLayers(_host_source(source), stream, slot_shift=group.slot_shift, backend=backend)
        if not isinstance(source, KvTensor):
            raise ValueError(f"{name} is a {type(source).__name__}, expected a KvTensor of the stream's layers")
        return KvLayers(source, stream, slot_shift=group.slot_shift, backend=backend)
    return _host_view(source)


def _is_submitted(source: Source, stream: KvStream) -> bool:
    """Say whether a source holds of each slot just what a stream looks at, as layers have handed it in."""
    return stream.samples and stream.origin == SUBMITTED and isinstance(source, KvSource)


def _host_view(source: Source) -> Source:
    """Return the source over a numpy view of the same memory, if that memory is the host's."""
    return source.as_source() if isinstance(source, KvTensor) else _host_source(source)


def _host_source(source: KvSource) -> KvSource:
    return dataclasses.replace(source, tensor=on_host(source.tensor))


def of_runner(groups: list[GroupKvShadow], runner: int) -> list[tuple[int, GroupKvShadow]]:
    """Return the runner's groups with their numbers, in header order."""
    return [(number, kv) for number, kv in enumerate(groups) if kv.group.runner == runner]


def watch(forward: CopiedForward, groups: list[GroupKvShadow], phase: int) -> None:
    """Add to the forward what changed of the bytes that it reads.

    Ring groups are compared before the forward, whose writes may land on what it reads, the others after it.
    """
    for number, kv in of_runner(groups, forward.runner):
        if kv.group.reads_before_write == (phase == PHASE_BEFORE):
            # What was just written has just been gathered as well: it cannot differ.
            written = forward.written[number] if phase == PHASE_AFTER else _NOTHING
            forward.kv_changes += compare(groups, forward.runner, number, forward.watched[number], written, phase)


def compare(
    groups: list[GroupKvShadow], runner: int, number: int, read: Int64Array, written: Int64Array, phase: int
) -> list[KvChange]:
    """Compare slots of one of the runner's groups with what a replay knows of their bytes, but for those just written."""
    mine = dict(of_runner(groups, runner))
    before = sum(len(kv.sources) for other, kv in mine.items() if other < number)
    return [
        KvChange(stream=before + stream, phase=phase, slots=slots, content=content)
        for stream, slots, content in mine[number].changes(read, written)
    ]


def store_changes(changes: list[KvChange], groups: list[GroupKvShadow], runner: int) -> None:
    """Store what an accepted event says of bytes that nobody wrote."""
    streams = [(kv, stream) for _, kv in of_runner(groups, runner) for stream in range(len(kv.sources))]
    for change in changes:
        kv, stream = streams[change.stream]
        kv.store_change(stream, change.slots, change.content)


def store_forward(forward: CopiedForward, groups: list[GroupKvShadow], gathered: Mapping[int, list[ByteArray]]) -> None:
    """Store an accepted forward's bytes, in a replay's order: seen before it, written by it, seen after it.

    `gathered[group][stream]` is `[T, capture_bytes] uint8`.
    """
    before = [change for change in forward.kv_changes if change.phase == PHASE_BEFORE]
    store_changes(before, groups, forward.runner)
    for number, kv in of_runner(groups, forward.runner):
        kv.store_written(forward.written[number], gathered[number])
    store_changes([change for change in forward.kv_changes if change.phase != PHASE_BEFORE], groups, forward.runner)
