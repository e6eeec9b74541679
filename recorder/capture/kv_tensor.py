"""Where K or V lies in a pool of any layout, by the names of the tensor's axes."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.capture.layers import NARROW
from ...kernels.constants import KV_ALIGN_BYTES
from ...kernels.ops.hash.kv_source import KvSource
from ..trace.header import KvStream
from .host_arrays import as_rows, picked


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTensor:
    """K or V of a layer, in `kv_sources` in place of a `KvSource`: any layout, type and strides, numpy's or torch's.

    Attributes:
        tensor: the pool, or a view of it; or a tuple of such, one a layer and alike: then one stream holds the leading bytes
            of each layer, one after another.
        axes: its dimensions by name: "slot", with "block" if slots are numbered block by block, and any names for those of
            a token: "block slot head dim", "slot head dim", "head slot dim", "block head dim slot lane". A token's bytes are
            taken in the order of its own axes.
        first_slot: the number of the slot at the beginning.

    Raises:
        ValueError: axes that do not name the tensor's dimensions, or layers that are not alike.
    """

    tensor: Any
    axes: str
    first_slot: int = 0

    def __post_init__(self) -> None:
        names, shapes = self.axes.split(), {tuple(tensor.shape) for tensor in self.tensors}
        if "slot" not in names or len(set(names)) != len(names):
            raise ValueError(f"axes is {self.axes!r}, expected each axis once and one named slot")
        if len(shapes) != 1 or len(next(iter(shapes))) != len(names):
            raise ValueError(f"axes is {self.axes!r}, the tensor has shape {' and '.join(map(str, map(list, shapes)))}")

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Each layer's tensor."""
        return self.tensor if isinstance(self.tensor, tuple) else (self.tensor,)

    @property
    def on_device(self) -> bool:
        """Whether it lies on a device."""
        return any(str(getattr(tensor, "device", "cpu")) != "cpu" for tensor in self.tensors)

    @property
    def num_slots(self) -> int:
        """How many slots there are, those before `first_slot` included."""
        sizes = dict(zip(self.axes.split(), self.tensors[0].shape, strict=True))
        return self.first_slot + int(sizes["slot"]) * int(sizes.get("block", 1))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all layers; a token of fewer than 16 bytes is filled up with zeros."""
        return len(self.tensors) * max(self._layer_bytes(), KV_ALIGN_BYTES)

    def stream(
        self, half: str, *, layers: tuple[int, ...] = (0,), capture_bytes: int = KV_ALIGN_BYTES, scale: float = 0.0
    ) -> KvStream:
        """Return the stream of this tensor for the header: `capture_bytes`, or as many as there are, of each of its layers.

        `scale` is what the values of the first layer are multiplied with, if they have 8 bits; 0 if nobody knows.
        """
        each = min(capture_bytes, max(self._layer_bytes(), KV_ALIGN_BYTES) // KV_ALIGN_BYTES * KV_ALIGN_BYTES)
        if len(layers) != len(self.tensors):
            raise ValueError(f"layers is {layers}, expected {len(self.tensors)}: one for each tensor")
        captured = each * len(layers)
        several = layers if len(layers) > 1 else ()
        return KvStream(
            half=half,
            layer=layers[0],
            layers=several,
            bytes_per_token=self.bytes_per_token,
            capture_bytes=captured,
            dtype=str(self.tensors[0].dtype).removeprefix("torch."),
            scale=scale,
        )

    def sampling_stream(
        self, half: str, *, layers: tuple[int, ...], seed: int, dtype: str = "", scale: float = 0.0
    ) -> KvStream:
        """Return a stream for the header that looks at 16 bytes of each slot, of another layer and place each; see `KvLayers`.

        `dtype` is what the bytes are, if the tensors do not say it; `scale` what 8-bit values of all these layers are multiplied with.
        """
        return KvStream(
            half=half,
            layer=layers[0],
            layers=layers,
            bytes_per_token=self._layer_bytes(),
            capture_bytes=KV_ALIGN_BYTES,
            seed=seed,
            dtype=dtype or str(self.tensors[0].dtype).removeprefix("torch."),
            scale=scale,
        )

    def same_memory(self, other: "KvTensor") -> bool:
        """Say whether both have a tensor that is the same piece of memory, looked at alike."""
        return bool({place_of(tensor) for tensor in self.tensors} & {place_of(tensor) for tensor in other.tensors})

    def gather(self, slots: Int64Array, capture_bytes: int) -> ByteArray:
        """Return the leading bytes of each slot, `[n, capture_bytes] uint8`; zeros for a slot that is not there."""
        each = capture_bytes // len(self.tensors)
        inside = (slots >= self.first_slot) & (slots < self.num_slots)
        out = np.zeros((slots.size, len(self.tensors), each), np.uint8)
        for layer, tensor in enumerate(self.tensors):
            rows = as_rows(self._tokens(tensor, slots[inside] - self.first_slot, each))[:, :each]
            out[inside, layer, : rows.shape[1]] = rows
        return out.reshape(slots.size, capture_bytes)

    def pieces(self, slots: Int64Array, layers: Int64Array, pieces: Int64Array) -> ByteArray:
        """Return of each slot 16 bytes of its token in one layer, by its place, `[n, 16] uint8`; zeros for a slot that is not there.

        The tensors are torch's; but for what is returned nothing is brought to the host.
        """
        import torch

        inside = np.flatnonzero((slots >= self.first_slot) & (slots < self.num_slots))
        order = inside[np.argsort(layers[inside], kind="stable")]
        out = np.zeros((slots.size, KV_ALIGN_BYTES), np.uint8)
        given = torch.from_numpy(np.stack((slots[order] - self.first_slot, pieces[order]))).to(self.tensors[0].device)
        ends, begin, found = (
            np.searchsorted(layers[order], range(len(self.tensors)), side="right").tolist(),
            0,
            list[Any](),
        )
        for tensor, end in zip(self.tensors, ends, strict=True):
            if begin < end:
                rows, piece = self._whole_pieces(tensor, given[0, begin:end]), given[1, begin:end]
                found.append(rows.gather(1, piece[:, None, None].expand(-1, 1, KV_ALIGN_BYTES)))
            begin = end
        if found:
            out[order] = torch.cat(found)[:, 0].cpu().numpy()
        return out

    def kinds_of_floats(self, slots: Int64Array, dtype: str) -> BoolArray:
        """Return of slots that are there whether their row in each layer has a NaN, an infinity, is all zeros, or saturated, `[n, kinds, layers]`.

        The tensors are torch's, of floats `dtype`. Bytes behind the last whole 16 are not looked at.
        """
        import torch

        given = torch.from_numpy(slots - self.first_slot).to(self.tensors[0].device)
        rows = torch.stack([self._whole_pieces(tensor, given).flatten(1) for tensor in self.tensors], 2)
        floats = rows.transpose(1, 2).contiguous().view(getattr(torch, dtype)).float()
        zeros = floats == 0
        empty, ends = zeros.all(2), zeros | (floats.abs() == torch.finfo(getattr(torch, dtype)).max)
        saturated = ends.all(2) & ~empty & (dtype in NARROW)
        found: BoolArray = (
            torch.stack((floats.isnan().any(2), floats.isinf().any(2), empty, saturated), 1).cpu().numpy()
        )
        return found

    def as_source(self) -> "KvSource | KvTensor":
        """Return a `KvSource` of the same memory, which is compared faster, if it lies on the host slot by slot; else itself."""
        tensor, names = self.tensors[0], self.axes.split()
        in_order = names[: names.index("slot") + 1] in (["slot"], ["block", "slot"])
        is_numpy = isinstance(tensor, np.ndarray)
        packed = tensor.flags.c_contiguous if is_numpy else tensor.is_contiguous() and tensor.device.type == "cpu"
        size = self.bytes_per_token
        if len(self.tensors) > 1 or self.first_slot or not in_order or not packed or size % KV_ALIGN_BYTES:
            return self
        page_size = int(tensor.shape[1]) if "block" in names else 1
        rows = as_rows(tensor)
        if rows.shape[1] != page_size * size:  # a token of fewer than 16 bytes
            return self
        return KvSource(tensor=rows, page_size=page_size, bytes_per_token=size, read_bytes=size)

    def _layer_bytes(self) -> int:
        tensor = self.tensors[0]
        return math.prod(tensor.shape) // max(self.num_slots - self.first_slot, 1) * int(tensor.dtype.itemsize)

    def _whole_pieces(self, tensor: Any, slots: Any) -> Any:
        """Return the slots' tokens in torch's tensor of one layer in pieces of 16 bytes, `[n, pieces, 16]`; slots lie there, too."""
        import torch

        rows = self._tokens(tensor, slots, self._layer_bytes()).flatten(1).contiguous().view(torch.uint8)
        whole = rows.shape[1] // KV_ALIGN_BYTES
        return rows[:, : whole * KV_ALIGN_BYTES].unflatten(1, (whole, KV_ALIGN_BYTES))

    def _tokens(self, tensor: Any, slots: Any, each: int) -> Any:
        """Return the slots' tokens, `[n, ...]`, no more than holds the first `each` bytes of their own axes."""
        names = self.axes.split()
        own = [axis for axis, name in enumerate(names) if name not in ("block", "slot")]
        placed = [names.index(name) for name in ("block", "slot") if name in names]
        is_numpy = isinstance(tensor, np.ndarray)
        moved = tensor.transpose(*placed, *own) if is_numpy else tensor.permute(*placed, *own)
        if own:
            inner = math.prod(moved.shape[len(placed) + 1 :]) * int(tensor.dtype.itemsize)
            moved = moved[(slice(None),) * len(placed) + (slice(-(-each // max(inner, 1))),)]
        page = int(moved.shape[1])
        return picked(moved, *((slots // page, slots % page) if len(placed) == 2 else (slots,)))


def place_of(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor's address, shape and strides."""
    is_numpy = isinstance(tensor, np.ndarray)
    address = tensor.ctypes.data if is_numpy else tensor.data_ptr()
    return int(address), tuple(tensor.shape), tuple(tensor.strides if is_numpy else tensor.stride())
