"""The tokens that forwards of a batch wrote to a stream, with their bytes and where they stand."""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.constants import UNKNOWN_TOKEN
from ...recorder.capture.host_arrays import ragged_index
from ...recorder.trace.batch import TraceBatch
from ...recorder.trace.header import TraceHeader

# How much of a row's largest value rounding changes: equal tokens in other batches may differ by so much and be right. A float32's
# product may be one of tf32.
ROUNDING: Final = {"float32": 2.0**-8, "float16": 2.0**-8, "bfloat16": 2.0**-5}
NEEDED: Final = frozenset({"input_ids", "positions", "out_cache_loc", "request_ids", "extend_lens"})
TOKEN_BITS: Final = 40  # of a key, below the identity
# Columns of a place.
EVENT, FORWARD, TIME, REQUEST, ROW, POSITION, SLOT, BEFORE = range(8)


class WrittenTokens(NamedTuple):
    """`keys` `[n]` hold identity and token, `data` `[n, width]` the bytes, `places` `[n, 8]` where each stands."""

    keys: Int64Array
    data: ByteArray
    places: Int64Array


def written_tokens(
    batch: TraceBatch,
    header: TraceHeader,
    runner: int,
    stream: int,
    block_table: int,
    identity_of: Callable[[Int64Array, Int64Array], Int64Array],
) -> WrittenTokens | None:
    """Return the tokens that a runner's forwards wrote to one of its streams, None if there are none.

    `identity_of` gets request ids and events `[n]` and returns a number each; tokens of a negative one are left out, as are
    unknown tokens, slots without bytes, and forwards that failed.
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
    events = batch.scalar_ints("event")[of]
    identity = np.append(identity_of(ids, np.repeat(events, bs)), -1)[owner]
    token = _parts(batch, "input_ids", of)
    known = np.flatnonzero((identity >= 0) & (token != UNKNOWN_TOKEN) & (token >= 0) & (token < 1 << TOKEN_BITS))
    within, forward = (np.arange(len(owner)) - np.repeat(np.cumsum(tokens) - tokens, tokens))[known], forward[known]
    width, first = widths[stream], sum(widths[:stream])
    at = batch.offsets("kv_bytes")[of][forward] + first * tokens[forward] + within * width
    data: ByteArray = _rows(batch.values("kv_bytes"), at, width)
    slots = batch.offsets("out_cache_loc")[of][forward] + block_table * tokens[forward] + within
    filled = data.any(axis=1)  # zeros stand for a slot without bytes
    columns = [
        events[forward],
        batch.scalar_ints("forward")[of][forward],
        batch.scalar_ints("time_ns")[of][forward],
    ]
    columns += [ids[owner[known]], rows[owner[known]], _parts(batch, "positions", of)[known]]
    columns += [
        batch.values("out_cache_loc")[slots],
        _before(owner, ids, token, _parts(batch, "positions", of))[known],
    ]
    keys = (identity << TOKEN_BITS | token)[known]
    return WrittenTokens(keys[filled], data[filled], np.stack(columns, axis=1)[filled])


def float_values(rows: ByteArray, dtype: str) -> npt.NDArray[np.float32]:
    """Return rows of bytes as numbers, of a dtype of `ROUNDING`."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(rows).view("<u2").astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(rows).view("<f4" if dtype == "float32" else "<f2").astype(np.float32)


def _rows(data: ByteArray, at: Int64Array, width: int) -> ByteArray:
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
