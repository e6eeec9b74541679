"""Canary buffers as kernels take them: pointers side by side, layouts as constants, checked on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import triton
import triton.language as tl

from ..arrays import record_stride, require_tensor
from ..fused import CanaryBuffer
from .kv_source import Geometry, source_words


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

    @classmethod
    def of(cls, buffers: Sequence[CanaryBuffer]) -> Self:
        """Check the buffers' tensors; raise `TypeError` or `ValueError` for shapes and dtypes."""
        kv: list[Any] = []
        sources: list[Geometry] = []
        kv_slots, strides, ends = [], [], [0]
        for buffer in buffers:
            strides.append(record_stride(buffer.canary))
            pointers, geometry, slots = source_words(buffer.sources, buffer.kv_hash_mode)
            kv += pointers
            kv_slots.append(slots)
            sources += geometry
            ends.append(len(sources))
            require_tensor("slot_counter", buffer.slot_counter, "int64", 1, length=1)
            require_tensor("kernel_counter", buffer.kernel_counter, "int64", 1, length=1)
            require_tensor("violations.rows", buffer.violations.rows, "int64", 2)
        canaries = tuple(triton.reinterpret(buffer.canary, tl.int64) for buffer in buffers)
        logs = [buffer.violations for buffer in buffers]
        return cls(
            canaries=canaries,
            strides=tuple(strides),
            num_slots=int(buffers[0].canary.shape[0]),
            kv=tuple(kv) or canaries[:1],
            kv_slots=tuple(kv_slots),
            sources=tuple(sources),
            source_ends=tuple(ends),
            rows=tuple(log.rows for log in logs),
            entries=tuple(log.entries for log in logs),
            capacities=tuple(len(log.entries) for log in logs),
            tags=tuple(int(buffer.tag) for buffer in buffers),
            write_indexes=tuple(log.write_index for log in logs),
            failed=tuple(log.out_of_range for log in logs),
            slot_counters=tuple(buffer.slot_counter for buffer in buffers),
            kernel_counters=tuple(buffer.kernel_counter for buffer in buffers),
        )
