"""One recorded forward, checked: nothing in a trace is believed before its lengths fit one another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ..capture.host_arrays import ragged_index
from ..trace.header import KvStream, TraceHeader
from ..trace.reader import EventView
from ..trace.schema import FAILED, PART, RECURRENT_OPS, WRITTEN_VALUES

MAX_PREFIX = 1 << 62
_MAX_POSITION = 1 << 40
ATTENTION_RUNS: Final = ("attention_group", "attention_request", "attention_start", "attention_count")


class UnusableEventError(Exception):
    """An event whose columns contradict one another or the header; `str()` says which."""


class EventColumns(Protocol):
    """An event's integer columns, by name; those that it does not carry are empty. `EventView` is one."""

    def ints(self, name: str, /) -> Int64Array:
        """Return a column's values `[n] int64`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What was read where the attention kernels take it; -1 and empty if it was not. `seq_lens`, `query_lens` `[bs]`,
    or `[0]` for none; `groups`, `requests`, `positions`, `slots` `[n]`: of each slot that is another than the block
    table's, its pool group, its request in the batch, the position and the slot that came.
    """

    seq_lens: Int64Array
    query_lens: Int64Array
    groups: Int64Array
    requests: Int64Array
    positions: Int64Array
    slots: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward event's arrays; `bs` requests, `tokens` tokens.

    `out_cache_loc` holds one `[tokens] int64` per state table, `kv_bytes` one `[tokens, capture_bytes] uint8` per
    stream of the runner, `kv_submitted` the same of what the model handed to the cache, nothing if it is no other.
    `windows` `[n, 4] int64` are the reads that are not those of a sliding group's window: group, request, start, count.
    `outputs` `[n, 4] int64` are tokens whose attention gave what nothing explains: group, request, position, layer.
    `recurrent` `[n, 7] int64` is what happened to slots of recurrent state, by the columns of `recurrent_*`.
    `values` `[n, 6] int64` are values that were written and that no model writes, by the columns of `value_*`.
    `identity` `[n, 4] int64` is what some tokens were computed with that is not their request's: a kind, a request, how many, a
    hash. `truth_lens` is None if the engine gave no truth tokens, `attention` where nobody read what attention got. `failed`: what
    it wrote is unknown.
    """

    event: int
    forward: int
    time_ns: int
    runner: int
    mode: str
    kv_watched: bool
    req_pool_indices: Int64Array
    request_ids: Int64Array
    prefix_lens: Int64Array
    extend_lens: Int64Array
    truth_lens: Int64Array | None
    sampled_lens: Int64Array
    sampled_tokens: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    out_cache_loc: tuple[Int64Array, ...]
    kv_bytes: tuple[ByteArray, ...]
    kv_submitted: tuple[ByteArray, ...] = ()
    attention: Attention | None = None
    windows: Int64Array | None = None
    outputs: Int64Array | None = None
    recurrent: Int64Array | None = None
    values: Int64Array | None = None
    identity: Int64Array | None = None
    failed: bool = False
    part: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, padding included."""
        return len(self.input_ids)


def columns(event: EventColumns, table: str, names: Sequence[str]) -> list[Int64Array]:
    """Return columns of runs, `table_name` for each name; raise `UnusableEventError` if they differ in length."""
    found = [event.ints(f"{table}_{name}") for name in names]
    if len({len(column) for column in found}) > 1:
        raise UnusableEventError(f"the columns {table}_* differ in length")
    return found


def stream_bytes(view: EventView, name: str, streams: Sequence[KvStream], count: int) -> tuple[ByteArray, ...]:
    """Return a column's bytes stream by stream, `[count, capture_bytes] uint8` each; raise `UnusableEventError`."""
    data, widths = view.bytes(name), [stream.capture_bytes for stream in streams]
    if len(data) != count * sum(widths):
        raise UnusableEventError(f"{name} has {len(data)} bytes, expected {count * sum(widths)}")
    ends = count * np.cumsum(widths, dtype=np.int64)
    parts = np.split(data, ends[:-1]) if widths else []
    return tuple(part.reshape(count, width) for part, width in zip(parts, widths, strict=True))


def add_up(lens: Int64Array, total: int) -> bool:
    """Whether lengths are none negative, and add up; each is looked at first, since sums of hostile lengths wrap around."""
    return not bool(((lens < 0) | (lens > total)).any()) and int(lens.sum()) == total


def runner_of(view: EventView, header: TraceHeader) -> int:
    """Return an event's runner; raise `UnusableEventError` if there is no such one."""
    runner = int(view.scalar("runner"))
    if not 0 <= runner < len(header.runners):
        raise UnusableEventError(f"runner {runner}, the header names {len(header.runners)}")
    return runner


def read_forward(view: EventView, header: TraceHeader) -> Forward:
    """Return a forward event's arrays; raise `UnusableEventError` if they do not fit one another."""
    runner, rows, input_ids = runner_of(view, header), view.ints("req_pool_indices"), view.ints("input_ids")
    bs, tokens, tables = len(rows), len(input_ids), len(header.tables)
    per_request = {name: _ints_of_length(view, name, bs) for name in ("request_ids", "prefix_lens", "extend_lens")}
    extend = np.where(rows == 0, 0, np.maximum(per_request["extend_lens"], 0))
    # Each length on its own first: sums of hostile lengths wrap around.
    if bool((extend > tokens).any()) or bool((np.abs(per_request["prefix_lens"]) > MAX_PREFIX).any()):
        raise UnusableEventError(f"a request extends by more than the {tokens} tokens there are, or a prefix is absurd")
    if int(extend.sum()) > tokens:
        raise UnusableEventError(f"extend_lens add up to {int(extend.sum())} tokens, input_ids has {tokens}")
    truth_lens = _ints_of_length(view, "truth_lens", bs, or_none=True)
    sampled_lens, sampled_tokens = _ints_of_length(view, "sampled_lens", bs, or_none=True), view.ints("sampled_tokens")
    if not add_up(sampled_lens, len(sampled_tokens)):
        raise UnusableEventError(f"sampled_lens do not add up to the {len(sampled_tokens)} sampled tokens")
    places = {"window": ("group", "request", "start", "count"), "output": ("group", "request", "position", "layer")}
    of_groups = {name: np.stack(columns(view, name, names), axis=1) for name, names in places.items()}
    for name, found in of_groups.items():
        if not ((found[:, :2] >= 0) & (found[:, :2] < (len(header.groups), bs))).all():
            raise UnusableEventError(f"{name}_* name a group or a request that there is not")
    streams = [stream for _, stream in header.streams(runner)]
    submitted = streams if len(view.bytes("kv_submitted_bytes")) else []
    return Forward(
        event=int(view.scalar("event")),
        forward=int(view.scalar("forward")),
        time_ns=int(view.scalar("time_ns")),
        runner=runner,
        mode=str(view.scalar("mode")),
        kv_watched=bool(view.scalar("kv_watched")),
        failed=view.scalar("status") == FAILED,
        part=_part(view),
        req_pool_indices=rows,
        truth_lens=truth_lens if header.truth_table is not None and len(truth_lens) == bs and bs else None,
        sampled_lens=sampled_lens,
        sampled_tokens=sampled_tokens,
        input_ids=input_ids,
        positions=_ints_of_length(view, "positions", tokens),
        out_cache_loc=tuple(_ints_of_length(view, "out_cache_loc", tokens * tables).reshape(tables, tokens)),
        kv_bytes=stream_bytes(view, "kv_bytes", streams, tokens),
        windows=of_groups["window"],
        outputs=of_groups["output"],
        kv_submitted=stream_bytes(view, "kv_submitted_bytes", submitted, tokens) if submitted else (),
        attention=_attention(view, header, bs),
        recurrent=_recurrent(view, header, bs) if header.states else None,
        values=_values(view, (bs, len(streams), len(WRITTEN_VALUES), MAX_PREFIX, tokens, MAX_PREFIX)),
        identity=_identity(view, bs),
        **per_request,
    )


def _part(view: EventView) -> int:
    """Return how many forwards before this one belong to its step; 0 for what says nothing that is a number."""
    number = str(view.scalar("status")).removeprefix(PART)
    return int(number) if number.isascii() and number.isdigit() and len(number) <= 9 else 0


def _ints_of_length(view: EventView, name: str, length: int, *, or_none: bool = False) -> Int64Array:
    values = view.ints(name)
    if len(values) != length and (len(values) or not or_none):
        raise UnusableEventError(f"{name} has {len(values)} entries, expected {length}")
    return values


def _attention(view: EventView, header: TraceHeader, bs: int) -> Attention | None:
    """Return what a forward of `bs` requests says of attention, None for nothing."""
    seq_lens, query_lens, slots = (view.ints(f"attention_{name}") for name in ("seq_lens", "query_lens", "slots"))
    if not (len(seq_lens) or len(query_lens) or len(slots) or len(view.ints(ATTENTION_RUNS[0]))):
        return None
    for name in ("attention_seq_lens", "attention_query_lens"):
        _ints_of_length(view, name, bs, or_none=True)
    groups, requests, starts, counts = columns(view, "attention", ("group", "request", "start", "count"))
    runner = int(view.scalar("runner"))
    known = {number for number, group in enumerate(header.groups) if group.runner == runner}
    if not set(np.unique(groups).tolist()) <= known:
        raise UnusableEventError("attention_group names a group that the forward's runner does not have")
    if bool(((requests < 0) | (requests >= bs)).any()):
        raise UnusableEventError(f"attention_request names a request that is none of the {bs}")
    if bool(((starts < 0) | (starts > _MAX_POSITION)).any()) or not add_up(counts, len(slots)):
        raise UnusableEventError("a run of attention_slots begins nowhere, or the runs do not add up to its values")
    return Attention(
        seq_lens=seq_lens,
        query_lens=query_lens,
        groups=np.repeat(groups, counts),
        requests=np.repeat(requests, counts),
        positions=ragged_index(starts, counts),
        slots=slots,
    )


def _recurrent(view: EventView, header: TraceHeader, bs: int) -> Int64Array:
    """Return what happened to slots of recurrent state, `[n, 7] int64`."""
    found = columns(view, "recurrent", ("pool", "op", "request", "source", "slot", "before", "after"))
    pools, ops, requests, sources, slots = found[:5]
    sizes = np.array([pool.num_slots for pool in header.states], np.int64)
    fits = (pools >= 0) & (pools < len(sizes)) & (ops >= 0) & (ops < len(RECURRENT_OPS))
    copies, steps, saves = (ops == RECURRENT_OPS.index(name) for name in ("copy", "step", "save"))
    fits &= ~(steps | saves) | ((requests >= 0) & (requests < bs))
    most = sizes[np.where(fits, pools, 0)]
    fits &= (slots >= 0) & (slots < most) & (saves | (sources < most)) & (sources >= np.where(copies, 0, -1))
    if not fits.all():
        raise UnusableEventError("recurrent_* name a pool, a slot, a request or an op that there is not")
    return np.stack(found, axis=1)


def _identity(view: EventView, bs: int) -> Int64Array | None:
    """Return what some tokens were computed with that is not their request's, `[n, 4] int64`; None for nothing."""
    found = columns(view, "identity", ("kind", "start", "count", "hash"))
    if not len(found[0]):
        return None
    if bool(((found[1] < 0) | (found[1] >= bs)).any()):
        raise UnusableEventError("identity_start names a request that there is not")
    return np.stack(found, axis=1)


def _values(view: EventView, limits: tuple[int, ...]) -> Int64Array | None:
    """Return the values that no model writes, `[n, 6] int64`, each column below its limit; None for none."""
    found = columns(view, "value", ("request", "stream", "kind", "layer", "token", "rows"))
    if not len(found[0]):
        return None
    values = np.stack(found, axis=1)
    if bool(((values < 0) | (values >= np.array(limits))).any()):
        raise UnusableEventError("value_* name a request, a stream, a kind or a token that there is not")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """A forward's tokens without its padding: `request` `[n] int64` index into the batch, `position` `[n] int64`. Token
    i of the batch is entry i here; padding comes last in a batch and is left out.
    """

    request: Int64Array
    position: Int64Array


def batch_tokens(forward: Forward) -> BatchTokens:
    """Lay a forward's tokens out by request and position, counting positions from the prefix."""
    lens = np.where(forward.req_pool_indices == 0, 0, np.maximum(forward.extend_lens, 0))
    request = np.repeat(np.arange(len(lens)), lens)
    return BatchTokens(request=request, position=ragged_index(forward.prefix_lens, lens))
