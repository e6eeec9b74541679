"""What lies at both ends of what a KV connector copies: hashes of blocks, in the host's memory at once, on a device without waiting.

On the host all of a block's bytes are read. On a device, which reads the pinned memory that blocks are copied to as well, up to
4096 bytes of each layer, in pieces that lie evenly apart; a hash is there once the recorder's thread asks for it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .....kernels.ops.end_hash.reference import MOST_WORDS, PIECE_WORDS, end_hashes, end_sums, part_words
from ....capture.device.host_copy import HostCopy
from ...common.copy_bounds import MAX_HASHED_BYTES, MAX_LOOKED_AT, MAX_SEEN_BYTES
from ...common.end_looks import Look, Sums
from ..layout import VllmGroup, VllmLayout

if TYPE_CHECKING:
    from .copies import ConnectorCopies

Bytes = npt.NDArray[np.uint8]
Parts = tuple[list[int], Sequence[Bytes]]  # the places of pages that could be read, and of each layer what lies in them


class Page(NamedTuple):
    """A block of a group, and the `key` under which its content lies elsewhere."""

    group: VllmGroup
    block: int
    key: Hashable


class Storage(Protocol):
    """What is known of a connector: `num_pages` is how many blocks of a group it can hold, 0 if that is not known."""

    num_pages: int

    def attach(self, copies: "ConnectorCopies") -> None:
        """Have the connector's saves and loads reported to `copies`."""

    def layers_here(self, group: VllmGroup) -> Sequence[Any]:
        """Return the group's layers as arrays `[num_blocks, ...]` with the bytes that are stored of each block; or nothing."""

    def there(self, page: Page) -> Sequence[Bytes] | None:
        """Return what lies elsewhere of a page, an array for each of `layers_here`; None if that cannot be read."""


class RowStorage(Protocol):
    """A storage whose blocks are rows of tensors on the device, and parts of rows in pinned memory: `each` a row.

    It may have rows here alone.
    """

    each: int

    def rows_here(self, group: VllmGroup) -> Sequence[Any]:
        """Return the group's layers as tensors `[num_blocks, bytes]` with the bytes that are stored of each block; or nothing."""

    def rows_there(self, group: VllmGroup) -> Sequence[Any]:
        """Return what they are copied to, `[rows, bytes]`."""

    def row_there(self, page: Page) -> tuple[int, int]:
        """Return the row of a page there, and its place in it."""


class HostEnds:
    """Looks at blocks in the host's memory."""

    def __init__(self, storage: Storage, layout: VllmLayout) -> None:
        self._storage = storage
        self._layout = layout

    def here(self, pages: Sequence[Page]) -> Look:
        """Look at what lies in each block now."""

        def read(group: VllmGroup, mine: list[Page]) -> Parts:
            layers, blocks = self._storage.layers_here(group), [page.block for page in mine]
            return [*range(len(mine))], [_rows(layer, blocks) for layer in layers]

        return self._hashes(pages, read)

    def there(self, pages: Sequence[Page]) -> Look:
        """Look at what lies elsewhere now; a page of which nothing can be read says nothing of the others."""

        def read(_: VllmGroup, mine: list[Page]) -> Parts:
            found = [self._storage.there(page) for page in mine]
            whole = [one for one in found if one is not None]
            return [i for i, one in enumerate(found) if one is not None], [
                np.stack(parts) for parts in zip(*whole, strict=True)
            ]

        return self._hashes(pages, read)

    def zeros(self, group: VllmGroup) -> int:
        """Return the hash of a block in which there is nothing."""
        return int(
            end_hashes([np.zeros((1, layer[0].nbytes), np.uint8) for layer in self._storage.layers_here(group)])[0]
        )

    def _hashes(self, pages: Sequence[Page], read: Callable[[VllmGroup, list[Page]], Parts]) -> Look:
        found = []
        for group, at in by_group(pages, self._layout):
            layers = self._storage.layers_here(group)
            size = sum(int(layer[0].nbytes) for layer in layers)
            if layers and size * len(at) <= MAX_HASHED_BYTES:
                places, parts = read(group, [pages[i] for i in at])
                if parts:
                    found.append(([at[i] for i in places], end_sums(parts)))
        return Sums(len(pages), found)


class DeviceEnds:
    """Looks at blocks on a device, and at the rows of pinned memory that they are copied to."""

    def __init__(self, storage: Storage, layout: VllmLayout) -> None:
        self._storage: Any = storage
        self._layout = layout
        self._rows = hasattr(storage, "rows_here")
        self._both = hasattr(storage, "rows_there")
        # Of each end of a group, the words by which the device finds its parts, and their own words; None if it cannot read them.
        self._parts: dict[tuple[int, bool], tuple[Any, list[int]] | None] = {}

    def here(self, pages: Sequence[Page]) -> Look:
        """Look at what lies in each block when the current stream comes to this point."""
        return self._look(pages, here=True, rows=[(page.block, 0) for page in pages])

    def there(self, pages: Sequence[Page]) -> Look:
        """Look at what lies elsewhere then."""
        rows = [self._storage.row_there(page) if self._both else (0, 0) for page in pages]
        return self._look(pages, here=False, rows=rows)

    def zeros(self, group: VllmGroup) -> int:
        """Return the hash of a block in which there is nothing."""
        parts = self._parts_of(group, here=True)
        return int(end_hashes([np.zeros((1, 4 * words), np.uint8) for words in parts[1]])[0]) if parts else 0

    def _look(self, pages: Sequence[Page], *, here: bool, rows: list[tuple[int, int]]) -> Look:
        """Look at the first pages of each group, as many as may be looked at in one go."""
        import torch

        from .....kernels.ops.end_hash import triton

        found = []
        for group, places in by_group(pages, self._layout) if self._rows and (here or self._both) else ():
            parts = self._parts_of(group, here=here)
            if parts is None:
                continue
            words, at = parts[0], places[: MAX_LOOKED_AT // (4 * sum(parts[1]))]
            wanted = torch.tensor([rows[i] for i in at], dtype=torch.int64).T.contiguous()
            wanted = wanted.pin_memory() if words.device.type == "cuda" else wanted
            sums = triton.end_sums(words, wanted.to(words.device, non_blocking=True))
            found.append((at, HostCopy(sums.sum(2) if self._both else sums)))
        return Sums(len(pages), found)

    def _parts_of(self, group: VllmGroup, *, here: bool) -> tuple[Any, list[int]] | None:
        place = group.index, here
        if place not in self._parts:
            import torch

            rows, each, most = self._storage.rows_here(group), 1, MOST_WORDS
            device = rows[0].device if rows else None
            if self._both:
                there, each = self._storage.rows_there(group), self._storage.each
                rows = rows if [each * part.shape[1] for part in rows] == [part.shape[1] for part in there] else ()
                rows, each = (rows, 1) if here or not rows else (there, each)
            elif rows:
                most = min(MOST_WORDS, max(MAX_SEEN_BYTES // 4 // len(rows) // PIECE_WORDS, 1) * PIECE_WORDS)
            self._parts[place] = None
            if rows:
                try:
                    words = part_words(rows, each=each, most=most)
                    counts = [min(int(row.shape[1]) // each // 4, most) for row in rows]
                    self._parts[place] = torch.tensor(words, dtype=torch.int64).to(device), counts
                except ValueError:  # rows that are no words
                    pass
        return self._parts[place]


def by_group(pages: Sequence[Page], layout: VllmLayout) -> list[tuple[VllmGroup, list[int]]]:
    """Return the groups of pages, and the places of theirs."""
    places = [
        (group, [i for i, page in enumerate(pages) if page.group.index == group.index]) for group in layout.groups
    ]
    return [(group, at) for group, at in places if at]


def byte_rows(kv: Any, num_blocks: int) -> Sequence[Any]:
    """Return what lies in each block, `[num_blocks, bytes] uint8`, as one tensor, or as one each of K and V.

    Nothing if the bytes of a block do not lie side by side.
    """
    if num_blocks not in kv.shape[:2]:
        return ()
    halves = 1 - [*kv.shape[:2]].index(num_blocks)  # the dimension of K and V, or one of a block's own
    apart = [_rows_of(part) for part in kv.unbind(halves)] if kv.ndim > 2 and kv.shape[halves] == 2 else [None]
    whole = _rows_of(kv) if halves else None
    found = apart if all(row is not None for row in apart) else [whole]
    return [row for row in found if row is not None]


def _rows_of(part: Any) -> Any:
    """Return what lies in each of the first dimension's, `[n, bytes] uint8`; None if it does not lie side by side."""
    import torch

    size = 1
    for stride, count in sorted(zip(part.stride()[1:], part.shape[1:], strict=True)):
        if count > 1 and stride != size:
            return None
        size *= count
    return part.as_strided((part.shape[0], size), (part.stride(0), 1)).view(torch.uint8)


def as_bytes(tensor: Any) -> Any:
    """Return a tensor of the host's memory as a numpy view of its elements' bits, None for one of a device's."""
    import torch

    if tensor.device.type != "cpu":
        return None
    return tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()


def _rows(layer: Any, blocks: list[int]) -> Bytes:
    rows = layer[blocks]
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(blocks), -1)
