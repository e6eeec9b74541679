"""What attention gets in a step, by the metadata of vLLM's layers: lengths, and the slots that a block table names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from .....kernels.arrays import Int64Array
from ....capture.attention import paged_read
from ....capture.forward_input import AttentionInput, TableRead
from ....capture.host_arrays import own_int64, ragged_index
from ..layout import VllmGroup

# Backends whose metadata hold a sequence length and a block table for each request, under these names.
FIELDS: Final = ("seq_lens", "query_start_loc", "block_table")
PLAIN_BACKENDS: Final = frozenset(
    {"CPU_ATTN", "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLEX_ATTENTION", "ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN",
     "TRITON_ATTN", "TRITON_ATTN_DIFFKV"}
)  # fmt: skip

_LayerInput = tuple[Int64Array, Int64Array, TableRead]  # sequence lengths, query lengths `[bs]`, slots


class AttentionReader:
    """Reads a runner's attention metadata; `Step.attention` is what `read` returns."""

    def __init__(self, runner: Any, groups: Sequence[VllmGroup], num_groups: int) -> None:
        self._groups = groups
        self._num_groups = num_groups
        # Tokens of a block of the tables that each layer's kernels get, if they differ from the runner's; 0 for blocks of
        # the kernel's that are no neighbours.
        self._block_sizes: dict[str, int] = {}
        self.not_read: list[tuple[str, str]] = []  # (group, backend)
        found: Sequence[Sequence[Any]] = getattr(runner, "attn_groups", None) or ()
        for group in groups:
            for attention in found[group.gid] if group.gid < len(found) else ():
                size = getattr(attention, "kernel_block_size", None)
                if size is not None:
                    own = int(size) if getattr(attention, "kernel_block_stride", None) is None else 0
                    self._block_sizes |= dict.fromkeys(attention.layer_names, own)
                name = str(attention.backend.get_name())
                if name not in PLAIN_BACKENDS:
                    self.not_read.append((group.name, name))

    def block_size(self, layer: str, default: int) -> int:
        """Return the tokens of a block of the table that a layer's kernels get, 0 if its blocks are no neighbours."""
        return self._block_sizes.get(layer, default)

    def read(
        self, metadata: Any, prefix: Int64Array, extend: Int64Array, block_sizes: Sequence[int]
    ) -> tuple[AttentionInput, ...]:
        """Return what the layers get, an entry for all groups and more if the layers of one differ.

        `metadata` are by layer; anything else holds nothing that is known. `prefix` are `[bs]` tokens in the cache,
        `extend` `[bs]` tokens of this step, `block_sizes` for each group the tokens of a block of the runner's table.
        """
        if not isinstance(metadata, dict):
            return ()
        found = [
            list(self._layers(metadata, group, prefix, block_size))
            for group, block_size in zip(self._groups, block_sizes, strict=True)
        ]
        return tuple(
            self._input([mine[place] if place < len(mine) else None for mine in found], prefix + extend, extend)
            for place in range(max(map(len, found), default=0))
        )

    def _layers(
        self, metadata: dict[str, Any], group: VllmGroup, prefix: Int64Array, block_size: int
    ) -> Iterator[_LayerInput]:
        """Yield what the layers of a group get by the tensors of their metadata, each tensor once."""
        seen = set()
        bs, first = prefix.size, np.maximum(prefix - group.window, 0) if group.window else None
        for layer in group.layers:
            if getattr(metadata.get(layer), "num_logits_indices", None) is not None:
                continue  # it shares another layer's K and V, and is run for the tokens alone that are sampled from
            tensors: list[Any] = [getattr(metadata.get(layer), name, None) for name in FIELDS]
            size = self._block_sizes.get(layer, block_size)
            if not size or not all(hasattr(tensor, "data_ptr") for tensor in tensors):
                continue
            key = tuple(int(tensor.data_ptr()) for tensor in tensors)
            if key not in seen:
                seen.add(key)
                seq_lens, starts, table = own_int64(tensors[0][:bs]), own_int64(tensors[1][: bs + 1]), tensors[2]
                read = paged_read(table, size, np.minimum(seq_lens, int(table.shape[1]) * size), starts=first)
                yield seq_lens, np.diff(starts), read

    def _input(self, found: Sequence[_LayerInput | None], ends: Int64Array, extend: Int64Array) -> AttentionInput:
        """Return one entry; of lengths that differ from group to group, one that is not the step's own is kept."""
        seq_lens, query_lens = np.full_like(ends, -1), np.full_like(ends, -1)
        for one in found:
            if one is not None:
                seq_lens = np.where((seq_lens < 0) | (one[0] != ends), one[0], seq_lens)
                query_lens = np.where((query_lens < 0) | (one[1] != extend), one[1], query_lens)
        reads = [None if one is None else one[2] for one in found]
        slots = (*reads, *[None] * (self._num_groups - len(reads)))
        return AttentionInput(seq_lens=seq_lens, query_lens=query_lens, slots=slots)


def same_attention(given: Sequence[AttentionInput], again: Sequence[AttentionInput]) -> bool:
    """Say whether two readings of the same metadata hold the same."""
    return len(given) == len(again) and all(
        np.array_equal(mine, other)
        for pair in zip(given, again, strict=True)
        for mine, other in zip(*map(_arrays, pair), strict=True)
    )


def _arrays(given: AttentionInput) -> Iterator[Any]:
    yield from (given.seq_lens, given.query_lens)
    for read in given.slots:
        yield from () if read is None else (read.starts, read.counts, read.slots)


def chosen_attention(given: AttentionInput, chosen: Int64Array) -> AttentionInput:
    """Return what some requests `[n]` of a step get."""
    slots = tuple(None if read is None else chosen_reads(read, chosen) for read in given.slots)
    seq_lens, query_lens = (own_int64(lens)[chosen] for lens in (given.seq_lens, given.query_lens))
    return AttentionInput(seq_lens=seq_lens, query_lens=query_lens, slots=slots)


def chosen_counts(counts: Mapping[int, Int64Array], chosen: Int64Array) -> AttentionInput:
    """Return at how much of their prefixes, by group `[bs]`, some requests `[n]` of a step look."""
    return AttentionInput(prefix_counts={group: mine[chosen] for group, mine in counts.items()})


def chosen_reads(read: TableRead, chosen: Int64Array) -> TableRead:
    """Return the part of a read that some requests `[n]` of it have."""
    counts = read.counts[chosen]
    offsets = (np.cumsum(read.counts) - read.counts)[chosen]
    slots = read.slots[ragged_index(offsets, counts)]
    return replace(read, starts=read.starts[chosen], counts=counts, slots=slots)
