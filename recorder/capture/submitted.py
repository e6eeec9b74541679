"""What the model handed to the cache in a forward, held against what the pool holds after it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..state.writes import stays
from .device_kv import as_rows
from .forward_input import CopiedForward
from .host_arrays import ByteArray
from .kv_shadow import GroupKvShadow
from .kv_watch import of_runner

Submitted = Mapping[tuple[int, int], Any]

ORIGIN_SUBMITTED = "submitted"


def take_submitted(
    forward: CopiedForward,
    submitted: Submitted,
    groups: list[GroupKvShadow],
    gathered: Mapping[int, list[ByteArray]],
) -> None:
    """Add to the forward's event what was submitted, the bytes only where the pool holds others.

    Args:
        forward: the forward that has run.
        submitted: for each `(group, stream)` that was observed `[T, ...]`, a token's bytes in the order in which the pool
            stores them: numpy or torch on any device, of any type, at least `capture_bytes` a token.
        groups: the recording's.
        gathered: for each of the runner's groups, each stream's `[T, capture_bytes]` bytes, as they are stored.

    Raises:
        ValueError: a stream that this runner does not have or that is captured on submission, or too few bytes.
    """
    mine = of_runner(groups, forward.runner)
    told = {key: _rows(key, value, forward, groups) for key, value in submitted.items()}
    known = {(number, stream) for number, kv in mine for stream in range(len(kv.sources))}
    if not set(told) <= known:
        raise ValueError(f"submitted has (group, stream) keys {sorted(told)}, the runner's streams are {sorted(known)}")
    tokens = int(np.where(forward.rows == 0, 0, np.maximum(forward.extend_lens, 0)).sum())
    forward.submitted_watched = len(told)
    kept = {number: stays(forward.written[number], kv.group)[:tokens] for number, kv in mine}
    if not any((rows[:tokens] != gathered[g][s][:tokens])[kept[g]].any() for (g, s), rows in told.items()):
        return
    parts = [
        told.get((g, s), stored).reshape(-1) for g, streams in gathered.items() for s, stored in enumerate(streams)
    ]
    forward.kv_submitted = np.concatenate(parts)


def _rows(key: tuple[int, int], value: Any, forward: CopiedForward, groups: list[GroupKvShadow]) -> ByteArray:
    """Return a stream's submitted bytes, `[T, capture_bytes] uint8`."""
    group, number = key
    streams = groups[group].group.streams if 0 <= group < len(groups) else ()
    if not 0 <= number < len(streams):
        raise ValueError(f"submitted has a key {key}, the header has no such (group, stream)")
    stream, tokens = streams[number], forward.input_ids.size
    if stream.origin == ORIGIN_SUBMITTED:
        raise ValueError(
            f"submitted[{group}, {number}]: the stream's origin is 'submitted', so there is nothing beside it"
        )
    rows = as_rows(value)
    if rows.shape[0] != tokens or rows.shape[1] < stream.capture_bytes:
        raise ValueError(
            f"submitted[{group}, {number}] holds {list(rows.shape)} bytes, expected [{tokens}, at least "
            f"{stream.capture_bytes}]: one row for each of input_ids, in the order in which the pool stores a token"
        )
    return rows[:, : stream.capture_bytes]
