"""Canary buffers as kernels take them: pointers side by side, layouts as constants, checked on the way."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import triton
import triton.language as tl

from ..arrays import record_stride, require_tensor
from .hash.triton_kv import Geometry, source_words
from .plan_verify.reference import CanaryBuffer
from .triton_launch import Prepared

_ENDS: Final = (
    *("rows", "entries", "capacities", "tags", "write_indexes"),
    *("failed", "slot_counters", "kernel_counters"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPointers:
    """One to four buffers, field by field: tuples as long as there are buffers.

    `kv` and `sources` hold all buffers' sources in a row; those of buffer b are `source_ends[b] .. source_ends[b + 1]`.
    """

    canaries: tuple[Any, ...]
    strides: tuple[int, ...]
    num_slots: int
    kv: tuple[Any, ...]
    kv_slots: tuple[int, ...]
    sources: tuple[Geometry, ...]
    source_ends: tuple[int, ...]
    rows: tuple[Any, ...]
    entries: tuple[Any, ...]
    capacities: tuple[int, ...]
    tags: tuple[int, ...]
    write_indexes: tuple[Any, ...]
    failed: tuple[Any, ...]
    slot_counters: tuple[Any, ...]
    kernel_counters: tuple[Any, ...]

    def __post_init__(self) -> None:
        """Have what is launched with prepared."""
        for name in ("canaries", "kv", "kv_slots", *_ENDS):
            object.__setattr__(self, name, Prepared(getattr(self, name)))

    @property
    def folds_rows(self) -> bool:
        """Whether as much of a slot is hashed as makes that the larger part of the work."""
        return any(geometry[3] >= 16 for geometry in self.sources)

    @property
    def pools(self) -> tuple[tuple[Any, ...], ...]:
        """Records and bytes, as kernels take them."""
        return self.canaries, self.kv, self.kv_slots

    @property
    def logs(self) -> tuple[tuple[Any, ...], ...]:
        """Where rows are put down: rows, entries, capacities and tags."""
        return self.rows, self.entries, self.capacities, self.tags

    @property
    def ends(self) -> tuple[tuple[Any, ...], ...]:
        """Where findings and counts go, in the order in which kernels that write take them."""
        return tuple(getattr(self, name) for name in _ENDS)

    @property
    def layout(self) -> dict[str, Any]:
        """What kernels take as constants: distances of records, sources, and where those of each buffer end."""
        return {"STRIDES": self.strides, "SOURCES": self.sources, "ENDS": self.source_ends}

    @classmethod
    def of(cls, buffers: Sequence[CanaryBuffer]) -> "BufferPointers":
        """Check the buffers' tensors; raise `TypeError` or `ValueError` for shapes and dtypes.

        A buffer is looked at once: it cannot be changed.
        """
        first = buffers[0]
        if len(buffers) == 1:
            return _known.get(first) or _pointers_to(first)
        rest, joined = _joined.get(first, ((), None))
        if joined is None or len(rest) != len(buffers) or any(a() is not b for a, b in zip(rest, buffers, strict=True)):
            joined = cls._join([_known.get(buffer) or _pointers_to(buffer) for buffer in buffers])
            _joined[first] = tuple(map(weakref.ref, buffers)), joined
        return joined

    @classmethod
    def _join(cls, one: "list[BufferPointers]") -> "BufferPointers":
        kv = sum((pointers.kv for pointers in one if pointers.sources), ())
        ends = [0]
        for pointers in one:
            ends.append(ends[-1] + len(pointers.sources))
        joined = {
            name: sum((getattr(pointers, name) for pointers in one), ())
            for name in cls.__slots__
            if name not in ("kv", "num_slots", "source_ends")
        }
        return cls(kv=kv or one[0].canaries, num_slots=one[0].num_slots, source_ends=tuple(ends), **joined)


_known: weakref.WeakKeyDictionary[CanaryBuffer, BufferPointers] = weakref.WeakKeyDictionary()
# What several buffers come to, by the first of them: the same ones are launched on again and again.
_joined: weakref.WeakKeyDictionary[CanaryBuffer, tuple[tuple[Any, ...], BufferPointers]] = weakref.WeakKeyDictionary()


def _pointers_to(buffer: CanaryBuffer) -> BufferPointers:
    stride = record_stride(buffer.canary)
    kv, sources, slots = source_words(buffer.sources, buffer.kv_hash_mode)
    log = buffer.violations
    require_tensor("slot_counter", buffer.slot_counter, "int64", 1, length=1)
    require_tensor("kernel_counter", buffer.kernel_counter, "int64", 1, length=1)
    require_tensor("violations.rows", log.rows, "int64", 2)
    canary = triton.reinterpret(buffer.canary, tl.int64)
    _known[buffer] = pointers = BufferPointers(
        canaries=(canary,),
        strides=(stride,),
        num_slots=int(buffer.canary.shape[0]),
        kv=kv or (canary,),
        kv_slots=(slots,),
        sources=sources,
        source_ends=(0, len(sources)),
        rows=(log.rows,),
        entries=(log.entries,),
        capacities=(len(log.entries),),
        tags=(int(buffer.tag),),
        write_indexes=(log.write_index,),
        failed=(log.out_of_range,),
        slot_counters=(buffer.slot_counter,),
        kernel_counters=(buffer.kernel_counter,),
    )
    return pointers
