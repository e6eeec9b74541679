"""One recorded forward, checked: what the replay steps through.

A trace is read from a file, so nothing in it is believed before its lengths fit one another.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..header import TraceHeader
from ..reader import EventView

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

MAX_PREFIX = 1 << 62


class UnusableEventError(Exception):
    """An event whose columns contradict one another or the header; `str()` says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward event's arrays; `bs` requests, `tokens` tokens.

    `out_cache_loc` holds one `[tokens] int64` per state table, `kv_bytes` one `[tokens, capture_bytes] uint8` per
    stream of the runner, `kv_submitted` the same of what the model handed to the cache, nothing where it is no other.
    `truth_lens` is None where the engine gave no truth tokens.
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
    if bool(((sampled_lens < 0) | (sampled_lens > len(sampled_tokens))).any()):
        raise UnusableEventError(
            f"a sampled length is negative or more than the {len(sampled_tokens)} tokens there are"
        )
    if int(sampled_lens.sum()) != len(sampled_tokens):
        raise UnusableEventError(
            f"sampled_tokens has {len(sampled_tokens)} entries, sampled_lens add up to another number"
        )
    submitted = view.bytes("kv_submitted_bytes")
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
        kv_submitted=_stream_bytes("kv_submitted_bytes", submitted, header, runner, tokens) if len(submitted) else (),
        **per_request,
    )


def _ints_of_length(view: EventView, name: str, length: int) -> Int64Array:
    values = view.ints(name)
    if len(values) != length:
        raise UnusableEventError(f"{name} has {len(values)} entries, expected {length}")
    return values


def _stream_bytes(name: str, data: ByteArray, header: TraceHeader, runner: int, tokens: int) -> tuple[ByteArray, ...]:
    widths = [stream.capture_bytes for _, stream in header.streams(runner)]
    if len(data) != tokens * sum(widths):
        raise UnusableEventError(f"{name} has {len(data)} bytes, expected {tokens * sum(widths)}")
    parts = []
    at = 0
    for width in widths:
        parts.append(data[at : at + tokens * width].reshape(tokens, width))
        at += tokens * width
    return tuple(parts)
