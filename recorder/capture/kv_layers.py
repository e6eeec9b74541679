"""All layers of a pool's half, of which a trace has some bytes of each slot: where they lie, and what they hold that no model writes."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.capture import layers
from ...kernels.capture.changes import kv_same
from ...kernels.constants import KV_ALIGN_BYTES
from ...kernels.ops.hash.kv_source import KvSource
from ..trace.header import KvStream
from .host_arrays import gather_kv
from .kv_tensor import KvTensor, place_of

SEARCHED_BYTES = 64 << 20  # that are searched at once where they lie on a device
USUAL_ROWS = 32  # of a layer that were not all zeros, before one of zeros says anything


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
        looked = self._looked_at(slots)
        return self.source.pieces(slots - self._shift, looked[:, 0], looked[:, 1])

    def handed_in(self, slots: Int64Array, rows: Mapping[int, ByteArray], stored: ByteArray) -> ByteArray:
        """Return the bytes that are looked at of each slot `[n, 16] uint8` as they were handed in, or as `stored` in other layers.

        `rows` are what some layers were given for these slots, `[n, bytes_per_token]`, by the layer's number.
        """
        looked = self._looked_at(slots)
        found = stored.copy()
        for layer, given in rows.items():
            mine = np.flatnonzero(looked[:, 0] == self.stream.layers.index(layer))
            at = looked[mine, 1] * KV_ALIGN_BYTES
            found[mine] = given[mine[:, None], at[:, None] + np.arange(KV_ALIGN_BYTES)]
        return found

    def _looked_at(self, slots: Int64Array) -> Int64Array:
        """Return which layer of the stream's, and which 16 bytes of a token there, each slot's bytes are, `[n, 2]`."""
        return layers.watched_bytes(
            slots,
            seed=self.stream.seed,
            num_layers=len(self.stream.layers),
            num_chunks=self.stream.num_chunks,
            backend=self._backend,
        )

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
            own = slots - self._shift
            inside = (own >= self.source.first_slot) & (own < self.source.num_slots)
            judged = np.where(inside, judged, 0).astype(np.uint8)
            return self.values_found(self._held(own, judged), judged)
        return self._search(self._layers, slots, judged)

    def _search(self, places: layers.Layers, slots: Int64Array, judged: ByteArray) -> "Values":
        usual, dtype = self._usual(), self.stream.dtype
        counts, first = layers.find_values(places, dtype, slots, judged, usual, self._rows, backend=self._backend)
        empty = np.zeros(slots.size, np.bool_)
        if counts[:, layers.ZEROS].any():
            lowest, rows = places._replace(layers=places.layers[:1]), np.zeros((1, 2), np.int64)
            every, only = np.where(judged > 0, 2, 0).astype(np.uint8), np.ones(1, np.bool_)
            found, _ = layers.find_values(lowest, dtype, slots, every, only, rows, backend=self._backend)
            empty = found[:, layers.ZEROS] > 0
        return Values(counts, self._numbers(first), empty)

    def values_found(self, held: BoolArray | None, judged: ByteArray) -> "Values":
        """As `values`, of what a device has found: whether each token's row in each layer is of a kind.

        `held` is `[n, VALUE_KINDS, num_layers]`, None if no row does; `judged` is 0 where no slot of the pool is written.
        """
        usual, seen = self._usual(), np.count_nonzero(judged)
        if held is None:
            self._rows[:, 0] += seen
            nothing = np.zeros((judged.size, layers.VALUE_KINDS), np.int64)
            return Values(nothing, nothing - 1, np.zeros(judged.size, np.bool_))
        held = held & (judged > 0)[:, None, None]
        zeros = held[:, layers.ZEROS]
        self._rows[:, 1] += zeros.sum(axis=0)
        self._rows[:, 0] += seen - zeros.sum(axis=0)
        empty = zeros[:, 0].copy()
        zeros &= (judged == 2)[:, None] & usual
        return Values(held.sum(axis=2), self._numbers(np.where(held.any(axis=2), held.argmax(axis=2), -1)), empty)

    def _held(self, slots: Int64Array, judged: ByteArray) -> BoolArray:
        """Return of which kinds the rows of slots that are judged are, `[n, VALUE_KINDS, num_layers]`."""
        found = np.zeros((slots.size, layers.VALUE_KINDS, len(self.stream.layers)), np.bool_)
        mine = np.flatnonzero(judged)
        at_once = max(1, SEARCHED_BYTES // (self.stream.bytes_per_token * len(self.stream.layers)))
        for part in np.split(mine, range(at_once, mine.size, at_once)):
            found[part] = self.source.kinds_of_floats(slots[part], self.stream.dtype)
        return found

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


class SubmittedLayers(KvLayers):
    """The same of what layers hand in, where the pool keeps it otherwise: `held` has what is looked at of each slot, 16 bytes.

    The rows that are searched for values are those that came with the forward, `given` by the layer's number; of none that has
    not all layers' anything is said.
    """

    def __init__(self, held: KvSource, stream: KvStream, *, slot_shift: int, backend: str) -> None:
        self.stream, self.held = stream, held
        self.given: Mapping[int, ByteArray] = {}
        self._backend, self._shift = backend, slot_shift
        self._rows = np.zeros((len(stream.layers), 2), np.int64)

    def gather(self, slots: Int64Array) -> ByteArray:
        """Return the bytes that are looked at of each slot, as they were handed in last."""
        return gather_kv(self.held, slots - self._shift, KV_ALIGN_BYTES)

    def plainly_same(self, slots: Int64Array, shadow: ByteArray, known: ByteArray) -> bool:
        """As of those that lie in a pool."""
        plain = not self._shift
        return plain and kv_same(source=self.held, slots=slots, shadow=shadow, known=known, backend=self._backend)

    def values(self, slots: Int64Array, judged: ByteArray) -> "Values":
        """Return what the rows that were given hold that no model should write, and forget them."""
        given, self.given = self.given, {}
        if given.keys() != set(self.stream.layers) or not slots.size:
            return self.values_found(None, np.zeros_like(judged))
        rows = KvTensor(tensor=tuple(given[layer] for layer in self.stream.layers), axes="slot dim")
        return self._search(LayerPlaces.of(rows).on_host(0), np.arange(slots.size), judged)


class Values(NamedTuple):
    """Of each token that is written how many of its rows have a NaN, an infinity, are all zeros, or saturated, and the first's
    layer, -1 for none; and whether that in the first layer is all zeros.
    """

    counts: Int64Array  # [n, VALUE_KINDS]
    first: Int64Array  # [n, VALUE_KINDS]
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
        alike = {place_of(tensor)[2] for tensor in source.tensors}
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
        addresses = np.array([place_of(tensor)[0] for tensor in source.tensors], np.int64)
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
