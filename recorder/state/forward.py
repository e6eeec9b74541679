"""One recorded forward, checked: nothing in a trace is believed before its lengths fit one another."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ..trace.header import TraceHeader
from ..trace.reader import EventView

MAX_PREFIX = 1 << 62
_MAX_POSITION = 1 << 40
ATTENTION_RUNS: Final = ("attention_group", "attention_request", "attention_start", "attention_count")


class UnusableEventError(Exception):
    """An event whose columns contradict one another or the header; `str()` says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What was read where the attention kernels take it; -1 and empty if it was not.

    `seq_lens`, `query_lens` `[bs]`, or `[0]` for none; `groups`, `requests`, `positions`, `slots` `[n]`: of each slot that
    is another than the block table's, its pool group, its request in the batch, the position and the slot that came.
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
    `truth_lens` is None if the engine gave no truth tokens, `attention` where nobody read what attention got.
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

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, padding included."""
        return len(self.input_ids)


def read_forward(view: EventView, header: TraceHeader) -> Forward:
    """Return a forward event's arrays; raise `UnusableEventError` if they do not fit one another."""
    runner = int(view.scalar("runner"))
    if not 0 <= runner < len(header.runners):
        raise UnusableEventError(f"runner {runner}, the header names {len(header.runners)}")
    rows = view.ints("req_pool_indices")
    bs = len(rows)
    per_request = {name: _ints_of_length(view, name, bs) for name in ("request_ids", "prefix_lens", "extend_lens")}
    input_ids = view.ints("input_ids")
    tokens = len(input_ids)
    positions = _ints_of_length(view, "positions", tokens)
    slots = _ints_of_length(view, "out_cache_loc", tokens * len(header.tables)).reshape(len(header.tables), tokens)
    extend = np.where(rows == 0, 0, np.maximum(per_request["extend_lens"], 0))
    # Each length on its own first: sums of hostile lengths wrap around.
    if bool((extend > tokens).any()) or bool((np.abs(per_request["prefix_lens"]) > MAX_PREFIX).any()):
        raise UnusableEventError(f"a request extends by more than the {tokens} tokens there are, or a prefix is absurd")
    written = int(extend.sum())
    if written > tokens:
        raise UnusableEventError(f"extend_lens add up to {written} tokens, input_ids has {tokens}")
    truth_lens = view.ints("truth_lens")
    if len(truth_lens) not in (0, bs):
        raise UnusableEventError(f"truth_lens has {len(truth_lens)} entries for {bs} requests")
    sampled_lens = view.ints("sampled_lens")
    sampled_tokens = view.ints("sampled_tokens")
    if len(sampled_lens) not in (0, bs):
        raise UnusableEventError(f"sampled_lens has {len(sampled_lens)} entries for {bs} requests")
    count = len(sampled_tokens)
    if bool(((sampled_lens < 0) | (sampled_lens > count)).any()):
        raise UnusableEventError(f"a sampled length is negative or more than the {count} tokens there are")
    if int(sampled_lens.sum()) != count:
        raise UnusableEventError(f"sampled_tokens has {count} entries, sampled_lens add up to another number")
    submitted = view.bytes("kv_submitted_bytes")
    windows = [view.ints(f"window_{column}") for column in ("group", "request", "start", "count")]
    if len({len(column) for column in windows}) > 1:
        raise UnusableEventError("the columns window_* differ in length")
    known = (windows[0] >= 0) & (windows[0] < len(header.groups)) & (windows[1] >= 0) & (windows[1] < bs)
    if not known.all():
        raise UnusableEventError("window_* name a group or a request that there is not")
    return Forward(
        event=int(view.scalar("event")),
        forward=int(view.scalar("forward")),
        time_ns=int(view.scalar("time_ns")),
        runner=runner,
        mode=str(view.scalar("mode")),
        kv_watched=bool(view.scalar("kv_watched")),
        req_pool_indices=rows,
        truth_lens=truth_lens if header.truth_table is not None and len(truth_lens) == bs and bs else None,
        sampled_lens=sampled_lens,
        sampled_tokens=sampled_tokens,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=tuple(slots),
        kv_bytes=_stream_bytes("kv_bytes", view.bytes("kv_bytes"), header, runner, tokens),
        windows=np.stack(windows, axis=1),
        kv_submitted=_stream_bytes("kv_submitted_bytes", submitted, header, runner, tokens) if len(submitted) else (),
        attention=_attention(view, header, bs),
        **per_request,
    )


def _ints_of_length(view: EventView, name: str, length: int) -> Int64Array:
    values = view.ints(name)
    if len(values) != length:
        raise UnusableEventError(f"{name} has {len(values)} entries, expected {length}")
    return values


def _attention(view: EventView, header: TraceHeader, bs: int) -> Attention | None:
    """Return what a forward of `bs` requests says of attention, None for nothing; raise `UnusableEventError` as above."""
    seq_lens, query_lens = view.ints("attention_seq_lens"), view.ints("attention_query_lens")
    runs = tuple(view.ints(name) for name in ATTENTION_RUNS)
    slots = view.ints("attention_slots")
    if not len(seq_lens) and not len(query_lens) and not len(slots) and not len(runs[0]):
        return None
    for name, lens in (("attention_seq_lens", seq_lens), ("attention_query_lens", query_lens)):
        if len(lens) not in (0, bs):
            raise UnusableEventError(f"{name} has {len(lens)} entries for {bs} requests")
    if len({len(column) for column in runs}) > 1:
        raise UnusableEventError("the attention_* columns of runs differ in length")
    groups, requests, starts, counts = runs
    runner = int(view.scalar("runner"))
    known = {number for number, group in enumerate(header.groups) if group.runner == runner}
    if not set(np.unique(groups).tolist()) <= known:
        raise UnusableEventError("attention_group names a group that the forward's runner does not have")
    if bool(((requests < 0) | (requests >= bs)).any()):
        raise UnusableEventError(f"attention_request names a request that is none of the {bs}")
    if bool(((starts < 0) | (starts > _MAX_POSITION) | (counts < 0) | (counts > len(slots))).any()):
        raise UnusableEventError("a run of attention_slots begins or ends nowhere")
    if int(counts.sum()) != len(slots):
        raise UnusableEventError("the runs in attention_count do not add up to the values in attention_slots")
    inside = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Attention(
        seq_lens=seq_lens,
        query_lens=query_lens,
        groups=np.repeat(groups, counts),
        requests=np.repeat(requests, counts),
        positions=np.repeat(starts, counts) + inside,
        slots=slots,
    )


def _stream_bytes(name: str, data: ByteArray, header: TraceHeader, runner: int, tokens: int) -> tuple[ByteArray, ...]:
    widths = [stream.capture_bytes for _, stream in header.streams(runner)]
    if len(data) != tokens * sum(widths):
        raise UnusableEventError(f"{name} has {len(data)} bytes, expected {tokens * sum(widths)}")
    parts = np.split(data, np.cumsum([tokens * width for width in widths[:-1]], dtype=np.int64)) if widths else []
    return tuple(part.reshape(tokens, width) for part, width in zip(parts, widths, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """A forward's tokens without its padding: `request` `[n] int64` index into the batch, `position` `[n] int64`.

    Token i of the batch is entry i here; padding comes last in a batch and is left out.
    """

    request: Int64Array
    position: Int64Array


def batch_tokens(forward: Forward) -> BatchTokens:
    """Lay a forward's tokens out by request and position, counting positions from the prefix."""
    lens = np.where(forward.req_pool_indices == 0, 0, np.maximum(forward.extend_lens, 0))
    request = np.repeat(np.arange(len(lens)), lens)
    within = np.arange(len(request)) - np.repeat(np.cumsum(lens) - lens, lens)
    return BatchTokens(request=request, position=forward.prefix_lens[request] + within)
