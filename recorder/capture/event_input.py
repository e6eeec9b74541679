"""What an adapter hands in between forwards, where it is more than an argument or two."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from ..trace import schema
from ..trace.schema import ALLOC_FRESH, LOGPROB_BITS, LOGPROB_KINDS, AllocStatus, SlotChange
from .host_arrays import one_of


class IdentityValue(NamedTuple):
    """What a request's KV depends on beside its tokens: a LoRA adapter, a cache salt, the weights' version, or media.

    `value` is kept as a hash; "" says that there is none. Of media `length` positions from `start` on have it; a value of
    "media" without positions says that there are no others.
    """

    kind: str  # of IDENTITY_KINDS
    value: str
    start: int = 0
    length: int = 0


def identity_columns(identity: Sequence[IdentityValue], hash_name: Callable[[str], str]) -> dict[str, Int64Array]:
    """Return a request's identity as columns; `hash_name` keeps texts private, if names are."""
    rows = []
    for kind, value, start, length in identity:
        one_of("identity kind", kind, schema.IDENTITY_KINDS)
        text = hash_name(str(value)).encode("utf-8", "surrogatepass")
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True) or 1
        rows.append((schema.IDENTITY_KINDS.index(kind), int(start), int(length), number if value else 0))
    columns = np.array(rows, np.int64).T.copy()
    return dict(zip(("identity_kind", "identity_start", "identity_count", "identity_hash"), columns, strict=True))


def logprob_column(values: Any, kind: str | Int64Array, count: int) -> Int64Array:
    """Return log-probabilities of `count` sampled tokens as the column `sampled_logprobs` has them; nothing for none.

    `values` `[count]` are floats, NaN or None for a token that has none; `kind` is of `LOGPROB_KINDS`, or `[count]` indices in it.
    """
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    found = np.array(values, np.float32).reshape(-1)
    if found.size not in (0, count):
        raise ValueError(
            f"sampled_logprobs holds {found.size} values, expected one for each of the {count} sampled tokens, or none"
        )
    if isinstance(kind, str):
        one_of("logprobs_kind", kind, LOGPROB_KINDS)
        kind = np.full(found.size, LOGPROB_KINDS.index(kind), np.int64)
    return (
        found[:0].astype(np.int64)
        if np.isnan(found).all()
        else found.view(np.uint32).astype(np.int64) | kind << LOGPROB_BITS
    )


class CopyEnds(NamedTuple):
    """What lay at both ends of the runs of a copy, `[n] int64` each, as `host_arrays.end_hashes` says; 0 if it was not read.

    `before` is what lay at the destination when the copy was asked for, `landed` the first slot of the page of the pool that
    got the bytes in the destination's stead, -1 if none did; the destination itself if that is not its request's.
    """

    src: Int64Array
    dst: Int64Array
    before: Int64Array
    landed: Int64Array


class SlotsChanged(NamedTuple):
    """Runs of `each` slots, from `starts` on in each of `groups`, that changed hands; the rest as `slots` has it."""

    kind: SlotChange
    groups: Sequence[int]
    starts: Sequence[int]
    each: int
    request_id: int = -1
    row: int = -1
    status: AllocStatus = ALLOC_FRESH
    note: str = ""
    time_ns: int = 0  # when, 0 for now
