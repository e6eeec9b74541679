"""Where K or V lies in a pool of any layout, by the names of the tensor's axes."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.capture import layers
from ...kernels.constants import KV_ALIGN_BYTES
from ...kernels.ops.hash.kv_source import KvSource
from ..trace.header import KvStream
from .host_arrays import as_rows, picked

USUAL_ROWS = 32  # of a layer that were not all zeros, before one of zeros says anything


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
        return bool({_place(tensor) for tensor in self.tensors} & {_place(tensor) for tensor in other.tensors})

    def gather(self, slots: Int64Array, capture_bytes: int) -> ByteArray:
        """Return the leading bytes of each slot, `[n, capture_bytes] uint8`; zeros for a slot that is not there."""
        each = capture_bytes // len(self.tensors)
        inside = (slots >= self.first_slot) & (slots < self.num_slots)
        out = np.zeros((slots.size, len(self.tensors), each), np.uint8)
        for layer, tensor in enumerate(self.tensors):
            rows = as_rows(self._tokens(tensor, slots[inside] - self.first_slot, each))[:, :each]
            out[inside, layer, : rows.shape[1]] = rows
        return out.reshape(slots.size, capture_bytes)

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

    def _tokens(self, tensor: Any, slots: Int64Array, each: int) -> Any:
        """Return the slots' tokens, `[n, ...]`, no more than holds the first `each` bytes of their own axes."""
        names = self.axes.split()
        own = [axis for axis, name in enumerate(names) if name not in ("block", "slot")]
        placed = [names.index(name) for name in ("block", "slot") if name in names]
        is_numpy = isinstance(tensor, np.ndarray)
        moved = tensor.transpose(*placed, *own) if is_numpy else tensor.permute(*placed, *own)
        if own:
            inner = math.prod(moved.shape[len(placed) + 1 :]) * int(tensor.dtype.itemsize)
            moved = moved[(slice(None),) * len(placed) + (slice(-(-each // max(inner, 1))),)]
        return picked(moved, *(np.divmod(slots, moved.shape[1]) if len(placed) == 2 else (slots,)))


class KvLayers:
    """All layers of a pool's half, of which a sampling stream holds 16 bytes of each slot.

    Raises `ValueError` if a token's bytes do not lie in pieces of 16, at multiples of 8.
    """

    def __init__(self, source: KvTensor, stream: KvStream, *, slot_shift: int, backend: str) -> None:
        if len(source.tensors) != len(stream.layers):
            raise ValueError(f"a source of {len(source.tensors)} layers, the stream has {len(stream.layers)}")
        self.source = source  # whose memory it is
        self.stream = stream
        self._backend = backend
        self._shift = slot_shift
        places = LayerPlaces.of(source)
        self._layers = None if source.on_device else places.on_host(slot_shift + source.first_slot)
        self._rows = np.zeros((len(stream.layers), 2), np.int64)

    def gather(self, slots: Int64Array) -> ByteArray:
        """Return the bytes that are looked at of each slot, by its number in the trace, `[n, 16] uint8`."""
        if self._layers is not None:
            return layers.gather(self._layers, self.stream.seed, slots, backend=self._backend)
        looked = layers.watched_bytes(
            slots,
            seed=self.stream.seed,
            num_layers=len(self.stream.layers),
            num_chunks=self.stream.num_chunks,
            backend=self._backend,
        )
        out = np.zeros((slots.size, KV_ALIGN_BYTES), np.uint8)
        for layer in np.unique(looked[:, 0]).tolist():  # each is a tensor of its own
            mine = np.flatnonzero(looked[:, 0] == layer)
            one, end = replace(self.source, tensor=self.source.tensors[layer]), self.stream.num_chunks * KV_ALIGN_BYTES
            rows = one.gather(slots[mine] - self._shift, end).reshape(mine.size, -1, KV_ALIGN_BYTES)
            out[mine] = rows[np.arange(mine.size), looked[mine, 1]]
        return out

    def plainly_same(self, slots: Int64Array, shadow: ByteArray, known: ByteArray) -> bool:
        """Say whether none of the slots whose bytes are known holds other ones, if that can be told plainly."""
        if self._layers is None:
            return False
        return layers.plainly_same(self._layers, self.stream.seed, slots, shadow, known, backend=self._backend)

    def values(self, slots: Int64Array, judged: ByteArray) -> "Values":
        """Return what the slots' rows hold that no model should write.

        `judged` `[n] uint8`: 0 if a slot is passed over, 2 if its rows of zeros count. They do in no first
        layer, and only if a good many rows of the layer before this forward were none: a zeroed embedding, weights that are
        all zeros and layers that are never written are nobody's fault.
        """
        if self._layers is None:
            raise ValueError("what lies on a device is searched there")
        usual, dtype = self._usual(), self.stream.dtype
        counts, first = layers.find_values(self._layers, dtype, slots, judged, usual, self._rows, backend=self._backend)
        empty = np.zeros(slots.size, np.bool_)
        if counts[:, layers.ZEROS].any():
            lowest, rows = self._layers._replace(layers=self._layers.layers[:1]), np.zeros((1, 2), np.int64)
            every, only = np.where(judged > 0, 2, 0).astype(np.uint8), np.ones(1, np.bool_)
            found, _ = layers.find_values(lowest, dtype, slots, every, only, rows, backend=self._backend)
            empty = found[:, layers.ZEROS] > 0
        return Values(counts, self._numbers(first), empty)

    def values_found(self, held: BoolArray | None, judged: ByteArray) -> "Values":
        """As `values`, of what a device has found: whether each token's row in each layer has a NaN, an infinity, or is all zeros.

        `held` is `[n, 3, num_layers]`, None if no row does; `judged` is 0 where no slot of the pool is written.
        """
        usual, seen = self._usual(), np.count_nonzero(judged)
        if held is None:
            self._rows[:, 0] += seen
            nothing = np.zeros((judged.size, 3), np.int64)
            return Values(nothing, nothing - 1, np.zeros(judged.size, np.bool_))
        held = held & (judged > 0)[:, None, None]
        zeros = held[:, layers.ZEROS]
        self._rows[:, 1] += zeros.sum(axis=0)
        self._rows[:, 0] += seen - zeros.sum(axis=0)
        empty = zeros[:, 0].copy()
        zeros &= (judged == 2)[:, None] & usual
        return Values(held.sum(axis=2), self._numbers(np.where(held.any(axis=2), held.argmax(axis=2), -1)), empty)

    @property
    def knows_usual(self) -> bool:
        """Whether enough rows of each layer have been seen: more of those that hold what they should change nothing."""
        return bool((self._rows[:, 0] >= USUAL_ROWS).all())

    def _usual(self) -> BoolArray:
        usual = (self._rows[:, 0] >= USUAL_ROWS) & (self._rows[:, 1] == 0)
        usual[0] = False
        return usual

    def _numbers(self, places: Int64Array) -> Int64Array:
        return np.array([*self.stream.layers, -1], np.int64)[places]


class Values(NamedTuple):
    """Of each token that is written how many of its rows have a NaN, an infinity, or are all zeros, and the first's layer, -1 for
    none; and whether that in the first layer is all zeros.
    """

    counts: Int64Array  # [n, 3]
    first: Int64Array  # [n, 3]
    empty: BoolArray  # [n]; not looked at if no row of zeros counts


class LayerPlaces(NamedTuple):
    """Where all layers of a pool's half lie, in 64-bit words from `address` on, as `layers.Layers` has them."""

    address: int
    begins: Int64Array  # of each layer
    chunks: Int64Array
    page_size: int
    page_words: int
    token_words: int
    num_slots: int

    @classmethod
    def of(cls, source: KvTensor) -> "LayerPlaces":
        """Find them; raise a `ValueError` if a token's bytes do not lie in pieces of 16, at multiples of 8."""
        first, names = source.tensors[0], source.axes.split()
        item, is_numpy = int(first.dtype.itemsize), isinstance(first, np.ndarray)
        strides = [int(n) for n in (first.strides if is_numpy else (step * item for step in first.stride()))]
        alike = {_place(tensor)[2] for tensor in source.tensors}
        if len(alike) != 1:
            raise ValueError("layers that do not lie alike cannot be looked at in turn")
        own = [axis for axis, name in enumerate(names) if name not in ("block", "slot")]
        offsets = np.zeros(1, np.int64)
        for axis in own:
            offsets = (offsets[:, None] + np.arange(int(first.shape[axis])) * strides[axis]).reshape(-1)
        whole = offsets.size * item // KV_ALIGN_BYTES * KV_ALIGN_BYTES // item
        pieces = offsets[:whole].reshape(-1, KV_ALIGN_BYTES // item)
        size = dict(zip(names, zip(first.shape, strides, strict=True), strict=True))
        page_size, token = (int(size["slot"][0]), size["slot"][1]) if "block" in size else (1, 0)
        page = size["block" if "block" in size else "slot"][1]
        addresses = np.array([_place(tensor)[0] for tensor in source.tensors], np.int64)
        base, begins = int(addresses.min()), pieces[:, 0]
        steps = np.concatenate((addresses - base, begins, [page, token, base]))
        if not pieces.size or (np.diff(pieces, axis=1) != item).any() or (steps % 8).any() or min(page, token) < 0:
            raise ValueError(
                "a token's bytes do not lie in pieces of 16 at multiples of 8: its layers cannot be looked at in turn"
            )
        num_slots = (source.num_slots - source.first_slot) // page_size * page_size
        return cls(base, (addresses - base) // 8, begins // 8, page_size, page // 8, token // 8, num_slots)

    def on_host(self, shift: int) -> layers.Layers:
        """Return the same for what runs on the host; the slots' numbers are higher there by `shift`."""
        pages = self.num_slots // self.page_size
        last = (pages - 1) * self.page_words + (self.page_size - 1) * self.token_words
        end = int(self.begins.max()) + last + int(self.chunks.max()) + layers.CHUNK_WORDS
        shape = (self.page_size, self.page_words, self.token_words, self.num_slots, shift)
        words = np.asarray(_Memory(self.address, end))
        return layers.Layers(words, self.begins, self.chunks, np.array(shape, np.int64))


class _Memory:
    """Memory from `address` on as numpy takes it."""

    def __init__(self, address: int, num_words: int) -> None:
        self.__array_interface__ = {"shape": (num_words,), "typestr": "<u8", "data": (address, True), "version": 3}


def _place(tensor: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    is_numpy = isinstance(tensor, np.ndarray)
    address = tensor.ctypes.data if is_numpy else tensor.data_ptr()
    return int(address), tuple(tensor.shape), tuple(tensor.strides if is_numpy else tensor.stride())
