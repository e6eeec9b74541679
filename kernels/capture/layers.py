"""K or V of all layers of a pool: which bytes of a slot are looked at in turn, and values that no model should write.

A pool's layers may be tensors of their own. They are read as one flat array of 64-bit words, from the lowest to the highest,
of which only the words of slots are touched.
"""

from typing import Final, NamedTuple

import numpy as np

from ..arrays import BoolArray, ByteArray, Int64Array
from ..dispatch import In8, In64, InU64, InU64x2, Out64, Out64x2, OutU64x2, primitive, select
from ..ops.hash.reference import as_i64, as_u64, splitmix64

CHUNK_WORDS: Final = 2  # of a slot that are looked at: 16 bytes
VALUE_KINDS: Final = 4
NAN, INFINITE, ZEROS, SATURATED = range(VALUE_KINDS)

# By a type's name, its bits of a 64-bit word: exponent, the exponent's lowest, sign, mantissa, in the lowest lane, and the
# largest finite value, 0 for a type that is wide enough for what a model writes; and the lane's width. A lane whose exponent
# is all ones carries into its sign if the lowest bit is added. E4M3 of these names has no infinity, and its NaN has all bits
# set but the sign.
_LANES: Final = {
    "float32": (0x7F800000, 0x00800000, 0x80000000, 0x007FFFFF, 0, 32),
    "float16": (0x7C00, 0x0400, 0x8000, 0x03FF, 0, 16),
    "bfloat16": (0x7F80, 0x0080, 0x8000, 0x007F, 0, 16),
    "float8_e5m2": (0x7C, 0x04, 0x80, 0x03, 0x7B, 8),
    "float8_e4m3fn": (0x7F, 0x01, 0x80, 0x7F, 0x7E, 8),
}
FLOATS: Final = frozenset(_LANES)
NARROW: Final = frozenset(dtype for dtype, lanes in _LANES.items() if lanes[-1] == 8)  # a small value is stored as 0


class Layers(NamedTuple):
    """Where the bytes of a slot lie: word `layers[l] + slot // page_size * page_words + slot % page_size * token_words +
    chunks[c]` of `words` is the first of chunk c in layer l.
    """

    words: InU64
    layers: In64  # [num_layers]
    chunks: In64  # [num_chunks]
    shape: In64  # page_size, page_words, token_words, num_slots, and by how much the slots' numbers are higher here


def watched_bytes(slots: Int64Array, *, seed: int, num_layers: int, num_chunks: int, backend: str) -> Int64Array:
    """Return for each slot, `[n, 2] int64`, which layer of these and which 16 bytes of its token there are looked at."""
    out = np.empty((slots.size, 2), np.int64)
    select(_watched_bytes_loops, backend)(slots, seed, num_layers, num_chunks, out)
    return out


def gather(layers: Layers, seed: int, slots: Int64Array, *, backend: str) -> ByteArray:
    """Return the bytes that are looked at of each slot, `[n, 16] uint8`; zeros for a slot that is not there."""
    out = np.zeros((slots.size, CHUNK_WORDS), np.uint64)
    select(_gather_loops, backend)(*layers, seed, slots, out)
    return out.view(np.uint8)


def plainly_same(
    layers: Layers, seed: int, slots: Int64Array, shadow: ByteArray, known: ByteArray, *, backend: str
) -> bool:
    """Return whether the bytes that are looked at of slots `[n]` are those of the shadow, `[num_slots, 16] uint8`.

    Padding, slots beyond it and those whose `known` `[num_slots] uint8` is 0 are passed over.
    """
    differing = np.zeros(1, np.int64)
    select(_same_loops, backend)(*layers, seed, slots, shadow.view(np.uint64), known, differing)
    return not differing[0]


def find_values(
    layers: Layers,
    dtype: str,
    slots: Int64Array,
    judged: ByteArray,
    usual: BoolArray,
    rows: Int64Array,
    *,
    backend: str,
) -> tuple[Int64Array, Int64Array]:
    """Return of each slot `[n, VALUE_KINDS] int64` how many of its rows have a NaN, an infinity, are all zeros, or saturated.

    A row is saturated if each of its values of 8 bits is 0 or the largest there is, and some are that. Returned as well is the
    first such row's layer, -1 for none. `judged` `[n] uint8`: 0 if the slot is passed over, 2 if its rows of zeros count, in
    the layers `usual` `[num_layers] bool`. `rows` `[num_layers, 2] int64` takes how many rows of each layer are not all zeros, and are.
    """
    counts, first = np.zeros((slots.size, VALUE_KINDS), np.int64), np.full((slots.size, VALUE_KINDS), -1, np.int64)
    *words, width = lanes_of(dtype)
    lanes = np.array(words, np.int64).view(np.uint64)
    given = (slots, judged, usual.view(np.uint8), rows)
    select(_find_values_loops, backend)(*layers, lanes, width, *given, counts, first)
    return counts, first


def lanes_of(dtype: str) -> tuple[int, ...]:
    """Return a type's bits in each value of a 64-bit word, as int64: exponent, its lowest, sign, mantissa, largest; and a value's width."""
    *bits, width = _LANES[dtype]
    words = [word * sum(1 << at for at in range(0, 64, width)) for word in bits]
    return (*(as_i64(word) for word in words), width)


def words_on_device(dtype: str) -> tuple[int, ...]:
    """Return the first four of `lanes_of`, 1 + how far a carry out of the mantissa is from the sign, and the fifth."""
    *words, largest, width = lanes_of(dtype)
    return (*words, width - _LANES[dtype][3].bit_length(), largest)


def prepare(backend: str) -> None:
    """Compile what there is to compile now."""
    for loops in (_watched_bytes_loops, _gather_loops, _same_loops, _find_values_loops):
        select(loops, backend)


@primitive()
def watched_layer(slot: int, seed: int, num_layers: int) -> int:
    """Return which layer is looked at of a slot: another one of each that follow one another, in an order by `seed`."""
    turn = slot // num_layers
    return (slot - turn * num_layers + (as_i64(splitmix64(as_u64(turn) ^ as_u64(seed))) & 0xFFFFFF)) % num_layers


@primitive()
def watched_chunk(slot: int, seed: int, num_layers: int, num_chunks: int) -> int:
    """Return which 16 bytes are looked at of a slot: `num_layers * num_chunks` slots in a row have all of all layers."""
    turn = slot // num_layers
    shift = as_i64(splitmix64(as_u64(turn // num_chunks) ^ as_u64(seed + 1))) & 0xFFFFFF
    return (turn + shift) % num_chunks


@primitive()
def word_of(layers: In64, shape: In64, layer: int, slot: int) -> int:
    """Return the first word of a slot's token in a layer."""
    page = slot // shape[0]
    return int(layers[layer] + page * shape[1] + (slot - page * shape[0]) * shape[2])


def _watched_bytes_loops(slots: In64, seed: int, num_layers: int, num_chunks: int, out: Out64x2) -> None:
    for i in range(slots.shape[0]):
        out[i, 0] = watched_layer(slots[i], seed, num_layers)
        out[i, 1] = watched_chunk(slots[i], seed, num_layers, num_chunks)


def _gather_loops(words: InU64, layers: In64, chunks: In64, shape: In64, seed: int, slots: In64, out: OutU64x2) -> None:
    for i in range(slots.shape[0]):
        slot = slots[i]
        own = slot - shape[4]
        if own < 0 or own >= shape[3]:
            continue
        at = word_of(layers, shape, watched_layer(slot, seed, layers.shape[0]), own)
        at += chunks[watched_chunk(slot, seed, layers.shape[0], chunks.shape[0])]
        out[i, 0] = words[at]
        out[i, 1] = words[at + 1]


def _same_loops(
    words: InU64,
    layers: In64,
    chunks: In64,
    shape: In64,
    seed: int,
    slots: In64,
    shadow: InU64x2,
    known: In8,
    differing: Out64,
) -> None:
    for i in range(slots.shape[0]):
        slot = slots[i]
        own = slot - shape[4]
        if slot <= 0 or slot >= shadow.shape[0] or own < 0 or own >= shape[3] or known[slot] == 0:
            continue
        at = word_of(layers, shape, watched_layer(slot, seed, layers.shape[0]), own)
        at += chunks[watched_chunk(slot, seed, layers.shape[0], chunks.shape[0])]
        if words[at] != shadow[slot, 0] or words[at + 1] != shadow[slot, 1]:
            differing[0] += 1
            return


def _find_values_loops(
    words: InU64,
    layers: In64,
    chunks: In64,
    shape: In64,
    lanes: InU64,
    width: int,
    slots: In64,
    judged: In8,
    usual: In8,
    rows: Out64x2,
    counts: Out64x2,
    first: Out64x2,
) -> None:
    exponent, lowest, sign, mantissa = as_u64(lanes[0]), as_u64(lanes[1]), as_u64(lanes[2]), as_u64(lanes[3])
    largest, rest = as_u64(lanes[4]), as_u64(~sign)
    lane = as_u64((1 << width) - 1)
    nothing = as_u64(0)
    for i in range(slots.shape[0]):
        own = slots[i] - shape[4]
        if judged[i] == 0 or own < 0 or own >= shape[3]:
            continue
        for layer in range(layers.shape[0]):
            at = word_of(layers, shape, layer, own)
            held = nothing
            wrong = nothing
            between = nothing
            for c in range(chunks.shape[0]):
                for w in range(2):
                    word = as_u64(words[at + chunks[c] + w])
                    held |= word
                    wrong |= ((word & exponent) + lowest) & sign
                    if largest != nothing:
                        size = word & rest
                        between |= (size + rest) & ((size ^ largest) + rest) & sign
            if held & rest == nothing:
                rows[layer, 1] += 1
                if judged[i] == 2 and usual[layer] != 0:
                    counts[i, 2] += 1
                    first[i, 2] = layer if counts[i, 2] == 1 else first[i, 2]
                continue
            rows[layer, 0] += 1
            if largest != nothing and between == nothing:
                counts[i, 3] += 1
                first[i, 3] = layer if counts[i, 3] == 1 else first[i, 3]
            if wrong == nothing:
                continue
            nans = 0
            infinite = 0
            for c in range(chunks.shape[0]):
                for w in range(2):
                    word = as_u64(words[at + chunks[c] + w])
                    while word != nothing:
                        if ((word & exponent & lane) + (lowest & lane)) & sign & lane != nothing:
                            if word & mantissa & lane != nothing:
                                nans = 1
                            else:
                                infinite = 1
                        word = word >> as_u64(width)
            if nans == 1:
                counts[i, 0] += 1
                first[i, 0] = layer if counts[i, 0] == 1 else first[i, 0]
            if infinite == 1:
                counts[i, 1] += 1
                first[i, 1] = layer if counts[i, 1] == 1 else first[i, 1]
