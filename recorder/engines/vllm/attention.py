"""What attention is given in a step, read from the metadata that its kernels take, for each KV-cache group."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from ...capture.forward_input import AttentionInput, TableRead
from ...capture.host_arrays import Int64Array, own_int64, ragged_index, read_runs
from .layout import GroupLayout

# Backends whose metadata hold a sequence length and a block table for each request, under these names.
FIELDS: Final = ("seq_lens", "query_start_loc", "block_table")
PLAIN_BACKENDS: Final = frozenset(
    {"CPU_ATTN", "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLEX_ATTENTION", "ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN",
     "TRITON_ATTN", "TRITON_ATTN_DIFFKV"}
)  # fmt: skip


def forward_context() -> Any:
    """Return what vLLM's layers are about to be given, None where there is nothing."""
    module = sys.modules.get("vllm.forward_context")
    if module is None or not module.is_forward_context_available():
        return None
    return module.get_forward_context()


class AttentionReader:
    """Reads a runner's attention metadata; `Step.attention` is what `read` returns."""

    def __init__(self, runner: Any, groups: Sequence[GroupLayout], num_groups: int) -> None:
        self._groups = groups
        self._num_groups = num_groups
        # Tokens of a block of the tables that each layer's kernels get, where they differ from the runner's.
        self._block_sizes: dict[str, int] = {}
        self.not_read: list[tuple[str, str]] = []  # (group, backend)
        self._last: list[Int64Array] = []  # lengths, starts and blocks, as `read` found them
        for group in groups:
            for attention in _attention_groups(runner, group.gid):
                stride = getattr(attention, "kernel_block_stride", None)
                size = getattr(attention, "kernel_block_size", None)
                for layer in attention.layer_names:
                    if stride is not None and size is not None:
                        self._block_sizes[layer] = 0  # blocks of the kernel's that are no neighbours
                    elif size is not None:
                        self._block_sizes[layer] = int(size)
                name = str(attention.backend.get_name())
                if name not in PLAIN_BACKENDS:
                    self.not_read.append((group.name, name))

    def read(
        self, metadata: Any, prefix: Int64Array, extend: Int64Array, block_sizes: Sequence[int]
    ) -> list[AttentionInput]:
        """Return what the layers get, an entry for all groups and more where the layers of one differ.

        Args:
            metadata: by layer; anything else holds nothing that is known.
            prefix: `[bs]` tokens in the cache.
            extend: `[bs]` tokens of this step.
            block_sizes: for each group the tokens of a block of the runner's table.
        """
        self._last = []
        if not isinstance(metadata, dict):
            return []
        found: list[list[tuple[Int64Array, Int64Array, TableRead]]] = []
        for group, block_size in zip(self._groups, block_sizes, strict=True):
            mine = []
            for tensors, size in self._tensors(metadata, group, block_size):
                raw = _raw(tensors, group, prefix, size)
                self._last += raw
                mine.append(_slots(raw, group, prefix, size))
            found.append(mine)
        return [
            self._input([mine[place] if place < len(mine) else None for mine in found], prefix + extend, extend)
            for place in range(max(map(len, found), default=0))
        ]

    def changed(self, metadata: Any, prefix: Int64Array, block_sizes: Sequence[int]) -> bool:
        """Say whether the metadata that were read last hold something else by now."""
        now: list[Int64Array] = []
        for group, block_size in zip(self._groups, block_sizes, strict=True):
            for tensors, size in self._tensors(metadata, group, block_size):
                now += _raw(tensors, group, prefix, size)
        return len(now) != len(self._last) or not all(map(np.array_equal, now, self._last))

    def _tensors(
        self, metadata: dict[str, Any], group: GroupLayout, block_size: int
    ) -> Iterator[tuple[list[Any], int]]:
        """Yield what the layers of a group get, each once, with the tokens of a block of its table."""
        seen = set()
        for layer in group.layers:
            tensors: list[Any] = [getattr(metadata.get(layer), name, None) for name in FIELDS]
            size = self._block_sizes.get(layer, block_size)
            if size and all(hasattr(tensor, "data_ptr") for tensor in tensors):
                key = tuple(int(tensor.data_ptr()) for tensor in tensors)
                if key not in seen:
                    seen.add(key)
                    yield tensors, size

    def _input(
        self, found: Sequence[tuple[Int64Array, Int64Array, TableRead] | None], ends: Int64Array, extend: Int64Array
    ) -> AttentionInput:
        """Return one entry; of lengths that differ from group to group, one that is not the step's own is kept."""
        seq_lens, query_lens = np.full_like(ends, -1), np.full_like(ends, -1)
        for one in found:
            if one is not None:
                seq_lens = np.where((seq_lens < 0) | (one[0] != ends), one[0], seq_lens)
                query_lens = np.where((query_lens < 0) | (one[1] != extend), one[1], query_lens)
        reads = [None if one is None else one[2] for one in found]
        return AttentionInput(
            seq_lens=seq_lens,
            query_lens=query_lens,
            slots=(*reads, *[None] * (self._num_groups - len(reads))),
        )


def _attention_groups(runner: Any, gid: int) -> Sequence[Any]:
    groups: Sequence[Sequence[Any]] = getattr(runner, "attn_groups", None) or ()
    return groups[gid] if gid < len(groups) else ()


def _raw(tensors: Sequence[Any], group: GroupLayout, prefix: Int64Array, block_size: int) -> list[Int64Array]:
    """Return sequence lengths `[bs]`, query starts `[bs + 1]` and the blocks that a group's layers get."""
    seq_lens, starts, table = own_int64(tensors[0][: prefix.size]), own_int64(tensors[1][: prefix.size + 1]), tensors[2]
    first, counts = _span(seq_lens, group, prefix, int(table.shape[1]) * block_size)
    low = first // block_size
    blocks = np.where(counts > 0, -(-(first + counts) // block_size) - low, 0)
    return [seq_lens, starts, read_runs(table, np.arange(prefix.size, dtype=np.int64), low, blocks), counts]


def _span(seq_lens: Int64Array, group: GroupLayout, prefix: Int64Array, width: int) -> tuple[Int64Array, Int64Array]:
    """Return the first position that each request reads, and how many it reads from there on."""
    first = np.maximum(prefix - group.window, 0) if group.window else np.zeros_like(prefix)
    return first, np.maximum(np.minimum(seq_lens, width) - first, 0)


def _slots(
    raw: Sequence[Int64Array], group: GroupLayout, prefix: Int64Array, block_size: int
) -> tuple[Int64Array, Int64Array, TableRead]:
    """Return sequence lengths, query lengths `[bs]` and the slots that a group's layers get."""
    seq_lens, starts, cells, counts = raw
    first, _ = _span(seq_lens, group, prefix, 0)
    low = first // block_size
    blocks = np.where(counts > 0, -(-(first + counts) // block_size) - low, 0)
    positions = ragged_index(first, counts)
    held = cells[positions // block_size + np.repeat(np.cumsum(blocks) - blocks - low, counts)]
    slots = np.where(held >= 0, held * block_size + positions % block_size, -1)
    return seq_lens, np.diff(starts), TableRead(starts=first, counts=counts, slots=slots)


def chosen_attention(told: AttentionInput, chosen: Int64Array) -> AttentionInput:
    """Return what some requests `[n]` of a step get."""
    return AttentionInput(
        seq_lens=own_int64(told.seq_lens)[chosen],
        query_lens=own_int64(told.query_lens)[chosen],
        slots=tuple(None if read is None else chosen_reads(read, chosen) for read in told.slots),
    )


def chosen_reads(read: TableRead, chosen: Int64Array) -> TableRead:
    """Return the part of a read that some requests `[n]` of it have."""
    counts = read.counts[chosen]
    offsets = (np.cumsum(read.counts) - read.counts)[chosen]
    return TableRead(starts=read.starts[chosen], counts=counts, slots=read.slots[ragged_index(offsets, counts)])
