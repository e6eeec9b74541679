"""The tokens that forwards of a batch wrote to a stream, with their bytes and where they stand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.constants import UNKNOWN_TOKEN
from ...recorder.capture.host_arrays import ragged_index
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import TraceHeader
from ...recorder.trace.schema import SUBMITTED

# How much of a row's largest value rounding changes: equal tokens in other batches may differ by so much and be right. A float32's
# product may be one of tf32.
ROUNDING: Final = {"float32": 2.0**-8, "float16": 2.0**-8, "bfloat16": 2.0**-5}
NEEDED: Final = frozenset({"input_ids", "positions", "out_cache_loc", "request_ids", "extend_lens"})
TOKEN_BITS: Final = 40  # of a key, below the identity
# Columns of a place. The furthest is the last position that the forward computes of the token's request.
EVENT, FORWARD, TIME, REQUEST, ROW, POSITION, SLOT, BEFORE, FURTHEST = range(9)


class WrittenTokens(NamedTuple):
    """`keys` `[n]` hold identity and token, `data` `[n, width]` the bytes, `places` `[n, 9]` where each stands."""

    keys: Int64Array
    data: ByteArray
    places: Int64Array


@dataclass(slots=True, eq=False)
class ForwardTokens:
    """The tokens that a runner's forwards of a batch were given, one after another: `keys` `[n]` hold identity and token,
    `positions` `[n]` are what the model was given. Where their bytes and slots are is worked out for those that are asked for.
    """

    batch: TraceBatch
    keys: Int64Array
    positions: Int64Array
    _of: Int64Array  # [m] the forwards' rows in the batch
    _tokens: Int64Array  # [m] how many they were given
    _forward: Int64Array  # [n] which of them
    _within: Int64Array  # [n] and where in it
    _owner: Int64Array  # [n] the request, of those in all forwards
    _requests: tuple[Int64Array, Int64Array]  # rows and ids of those
    _every: tuple[Int64Array, ...]  # owner, token, position of all, those left out too, and [n] which of them these are
    _places_of: tuple[Int64Array, Int64Array]  # in which forward each of all is, and where in it
    _beside: Int64Array | None = None  # [n, 2] the token in front, and the furthest position
    _stays: dict[int, BoolArray] = field(default_factory=dict)

    def begins(self, first_bytes: int, width: int) -> Int64Array:
        """Return at which of the batch's `kv_bytes` the `width` bytes of each token begin, in a stream that `first_bytes` bytes of a
        token precede, `[n]`.
        """
        starts = self.batch.offsets("kv_bytes")[self._of] + first_bytes * self._tokens
        return starts[self._forward] + self._within * width

    def stays(self, block_table: int) -> BoolArray:
        """Say of each token `[n]` whether no later one of its forward, padding's too, was sent to the same slot."""
        if block_table not in self._stays:
            forward, within = self._places_of
            begins = self.batch.offsets("out_cache_loc")[self._of] + block_table * self._tokens
            slots = self.batch.values("out_cache_loc")[begins[forward] + within]
            order = np.lexsort((slots, forward))  # stable: the last of equal ones is the last that was written
            last = np.ones(len(order), np.bool_)
            last[:-1] = (np.diff(forward[order]) != 0) | (np.diff(slots[order]) != 0)
            found = np.empty_like(last)
            found[order] = last
            self._stays[block_table] = found[self._every[3]]
        return self._stays[block_table]

    def places(self, which: Int64Array, block_table: int) -> Int64Array:
        """Return where some of the tokens stand, `[k, 9]`."""
        batch, forward, owner = self.batch, self._forward[which], self._owner[which]
        of, (rows, ids) = self._of[forward], self._requests
        slots = batch.offsets("out_cache_loc")[of] + block_table * self._tokens[forward] + self._within[which]
        if self._beside is None:
            owners, tokens, positions, known = self._every
            furthest = np.full(len(ids) + 1, -1, np.int64)  # the last is the padding's
            np.maximum.at(furthest, owners, positions)
            before = _before(owners, ids, tokens, positions)
            self._beside = np.stack([before[known], furthest[owners[known]]], axis=1)
        columns = [batch.scalar_ints(name)[of] for name in ("event", "forward", "time_ns")]
        columns += [ids[owner], rows[owner], self.positions[which], batch.values("out_cache_loc")[slots]]
        return np.concatenate([np.stack(columns, axis=1), self._beside[which]], axis=1)


def forward_tokens(
    batch: TraceBatch, header: TraceHeader, runner: int, identity_of: Callable[[Int64Array, Int64Array], Int64Array]
) -> ForwardTokens | None:
    """Return the tokens that a runner's forwards were given, None if there are none.

    `identity_of` gets request ids and events `[n]` and returns a number each; tokens of a negative one are left out, as are
    unknown tokens and forwards that failed.
    """
    widths = [one.capture_bytes for _, one in header.streams(runner)]
    of = np.flatnonzero((np.array(batch.kinds) == "forward") & (batch.scalar_ints("runner") == runner))
    names = ("input_ids", "req_pool_indices", "positions", "request_ids", "extend_lens", "out_cache_loc", "kv_bytes")
    tokens, bs, *others = (np.diff(batch.offsets(name))[of] for name in names)
    sizes = (tokens, bs, bs, tokens * len(header.tables), tokens * sum(widths))
    fits = np.all([got == size for got, size in zip(others, sizes, strict=True)], axis=0) & (tokens > 0) & (bs > 0)
    fits &= ~batch.failed[of]
    of, tokens, bs = of[fits], tokens[fits], bs[fits]
    if not len(of):
        return None
    rows, ids, extends = (_parts(batch, name, of) for name in ("req_pool_indices", "request_ids", "extend_lens"))
    counts = np.where(rows == 0, 0, np.maximum(extends, 0))
    bounds = np.cumsum(bs)
    left = tokens - np.add.reduceat(counts, bounds - bs)  # padding stands behind the requests' tokens
    if bool((counts > tokens.max()).any()) or bool((left < 0).any()):
        return None  # a forward contradicts itself: a replay says so
    owner = np.repeat(np.insert(np.arange(len(rows)), bounds, -1), np.insert(counts, bounds, left))
    forward = np.repeat(np.arange(len(of)), tokens)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    events = batch.scalar_ints("event")[of]
    identity = np.append(identity_of(ids, np.repeat(events, bs)), -1)[owner]
    token, positions = _parts(batch, "input_ids", of), _parts(batch, "positions", of)
    known = np.flatnonzero((identity >= 0) & (token != UNKNOWN_TOKEN) & (token >= 0) & (token < 1 << TOKEN_BITS))
    keys = (identity << TOKEN_BITS | token)[known]
    parts = forward[known], within[known], owner[known]
    every = owner, token, positions, known
    return ForwardTokens(batch, keys, positions[known], of, tokens, *parts, (rows, ids), every, (forward, within))


def written_tokens(
    given: ForwardTokens, header: TraceHeader, runner: int, stream: int, block_table: int
) -> WrittenTokens:
    """Return the tokens that a runner's forwards wrote to one of its streams, of which there are bytes that are theirs."""
    widths = [one.capture_bytes for _, one in header.streams(runner)]
    begins = given.begins(sum(widths[:stream]), widths[stream])
    data = rows_of_bytes(given.batch.values("kv_bytes"), begins, widths[stream])
    stored = header.streams(runner)[stream][1].origin != SUBMITTED  # else they are the token's, wherever it went
    # Zeros stand for a slot without bytes.
    filled = np.flatnonzero(data.any(axis=1) & (given.stays(block_table) if stored else True))
    return WrittenTokens(given.keys[filled], data[filled], given.places(filled, block_table))


def rows_of_bytes(data: ByteArray, at: Int64Array, width: int) -> ByteArray:
    """Return the `width` bytes that begin at each place, `[n, width]`; by words of eight if they lie so."""
    if width % 8 or bool((at % 8).any()):
        return data[at[:, None] + np.arange(width)]
    words = data[: len(data) // 8 * 8].view(np.uint64)
    return words[(at // 8)[:, None] + np.arange(width // 8)].view(np.uint8)


def _parts(batch: TraceBatch, name: str, of: Int64Array) -> Int64Array:
    """Return a list column's values of some events, one after another."""
    offsets = batch.offsets(name)
    found: Int64Array = batch.values(name)[ragged_index(offsets[of], offsets[of + 1] - offsets[of])]
    return found


def _before(owner: Int64Array, ids: Int64Array, tokens: Int64Array, positions: Int64Array) -> Int64Array:
    """Return the token in front of each, in its request, `[n]`; -1 where it is not the one that was written before it."""
    request = np.append(ids, -1)[owner]
    order = np.argsort(request, kind="stable")
    follows = (np.diff(request[order]) == 0) & (np.diff(positions[order]) == 1)
    found = np.full(len(tokens), UNKNOWN_TOKEN, np.int64)
    found[order[1:][follows]] = tokens[order[:-1][follows]]
    return found
