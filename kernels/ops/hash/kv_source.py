"""KV sources: which bytes of a pool belong to a slot, and the hash over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays import Int64Array, require
from ...constants import KV_ALIGN_BYTES, MAX_KV_SOURCES, KvHashMode
from ...dispatch import In64, InU64x2, Out64, has_device_form, select
from .reference import as_i64, as_u64, splitmix64


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """One piece of KV that a half's hash covers: `bytes_per_token` bytes a slot, the first `read_bytes` hashed.

    `tensor` `[rows, row_bytes] uint8`, a numpy array or a torch tensor: any row stride that 16 divides, bytes within
    a row contiguous. Slot s lies in row `s // page_size` at byte `(s % page_size) * bytes_per_token`; what a row holds
    beyond its pages is passed over. Raises `ValueError` where the numbers do not fit one another or are not multiples
    of 16, `TypeError` for another dtype.
    """

    tensor: Any
    page_size: int
    bytes_per_token: int
    read_bytes: int

    def __post_init__(self) -> None:
        """Check the geometry once, so that no fold has to."""
        if self.page_size < 1:
            raise ValueError(f"KV source: page_size is {self.page_size}, expected at least 1")
        if self.bytes_per_token <= 0 or self.bytes_per_token % KV_ALIGN_BYTES:
            raise ValueError(
                f"KV source: bytes_per_token is {self.bytes_per_token}, expected a positive multiple of 16"
            )
        if not 0 < self.read_bytes <= self.bytes_per_token or self.read_bytes % KV_ALIGN_BYTES:
            raise ValueError(
                f"KV source: read_bytes is {self.read_bytes}, expected a positive multiple of 16, at most "
                f"bytes_per_token ({self.bytes_per_token})"
            )
        if str(self.tensor.dtype) not in ("uint8", "torch.uint8"):
            raise TypeError(f"KV source: tensor has dtype {self.tensor.dtype}, expected uint8; view it as bytes")
        if len(self.tensor.shape) != 2:
            raise ValueError(f"KV source: tensor has shape {list(self.tensor.shape)}, expected [rows, row_bytes]")
        row_stride, byte_stride = _byte_strides(self.tensor)
        if row_stride <= 0 or row_stride % KV_ALIGN_BYTES:
            raise ValueError(f"KV source: rows are {row_stride} bytes apart, expected a positive multiple of 16")
        if byte_stride != 1:
            raise ValueError(f"KV source: bytes within a row are {byte_stride} apart, expected 1; pass packed rows")
        if self.tensor.shape[1] < self.page_size * self.bytes_per_token:
            raise ValueError(
                f"KV source: rows are {self.tensor.shape[1]} bytes wide, expected at least page_size x "
                f"bytes_per_token = {self.page_size * self.bytes_per_token}"
            )

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes between rows, and between a row's bytes."""
        return _byte_strides(self.tensor)

    @property
    def address(self) -> int:
        """Where the first byte lies."""
        tensor = self.tensor
        return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())

    @property
    def num_slots(self) -> int:
        """How many slots the rows hold."""
        return int(self.tensor.shape[0]) * self.page_size


def _byte_strides(tensor: Any) -> tuple[int, int]:
    """Return both strides of a uint8 array; torch has a method where numpy has a field."""
    strides = tensor.strides if isinstance(tensor, np.ndarray) else tensor.stride()
    return int(strides[0]), int(strides[1])


def fold_source_loops(
    words: InU64x2,
    page_size: int,
    page_shift: int,
    words_per_token: int,
    read_words: int,
    num_slots: int,
    slots: In64,
    out: Out64,
) -> None:
    """Fold one source into the running totals `out` [n] int64; slots that the sources do not all hold stay at 0.

    `words` [rows, page_size * words_per_token] uint64; `page_shift` is log2(page_size), -1 where that is no integer:
    a division would take longer than the hash.
    """
    for i in range(len(slots)):
        slot = int(slots[i])
        if slot < 0 or slot >= num_slots:
            continue
        row = slot >> page_shift if page_shift >= 0 else slot // page_size
        first = (slot - row * page_size) * words_per_token
        acc = as_u64(0)
        for w in range(read_words):
            acc = splitmix64(acc ^ as_u64(words[row, first + w]))
        out[i] = as_i64(splitmix64(as_u64(out[i]) ^ acc))


@has_device_form("hash.triton_kv")
def fold_kv(
    *, sources: Sequence[KvSource], mode: KvHashMode, slots: Int64Array, out: Int64Array, backend: str = "cpu"
) -> None:
    """Write the KV hash of each slot into `out`, sources in order; independent from slot to slot, and of the chain.

    `slots`, `out` [n] int64. Mode NONE, no source, a negative slot, or one beyond any source's rows gives 0. Raises
    `ValueError` for more than 4 sources.
    """
    if len(sources) > MAX_KV_SOURCES:
        raise ValueError(f"{len(sources)} KV sources, expected at most {MAX_KV_SOURCES}")
    require("slots", slots, np.int64, 1)
    require("out", out, np.int64, 1, length=len(slots), written=True)
    mode = KvHashMode(mode)
    out[:] = 0
    if mode == KvHashMode.NONE or not sources or not len(slots):
        return
    fold_source = select(fold_source_loops, backend)
    num_slots = min(source.num_slots for source in sources)
    for source in sources:
        read_bytes = KV_ALIGN_BYTES if mode == KvHashMode.PARTIAL else source.read_bytes
        require("KV source tensor", source.tensor, np.uint8, 2)
        words = source.tensor[:, : source.page_size * source.bytes_per_token].view(np.uint64)
        if not words.flags.aligned:
            raise ValueError("KV source: tensor does not start at a multiple of 8 bytes; pass an aligned copy")
        page_size, bytes_per_token = int(source.page_size), int(source.bytes_per_token)
        page_shift = -1 if page_size & (page_size - 1) else page_size.bit_length() - 1
        fold_source(words, page_size, page_shift, bytes_per_token // 8, int(read_bytes) // 8, num_slots, slots, out)
