"""The event of a completed forward."""

from collections.abc import Mapping

import numpy as np

from ..trace.event import TraceEvent
from .forward_input import CopiedForward
from .host_arrays import ByteArray, Int64Array


def forward_event(
    forward: CopiedForward,
    sampled_tokens: Int64Array,
    sampled_lens: Int64Array,
    gathered: Mapping[int, list[ByteArray]],
) -> TraceEvent:
    """Return the event, its columns as `docs/reference/trace-format.md` describes them.

    Args:
        forward: what was told and found out about the forward.
        sampled_tokens: `[sum(sampled_lens)]`.
        sampled_lens: `[bs]`, or nothing.
        gathered: for each of the runner's groups, in header order, each stream's `[T, capture_bytes]` written bytes.
    """
    ints = {
        "req_pool_indices": forward.rows,
        "request_ids": forward.request_ids,
        "prefix_lens": forward.prefix_lens,
        "extend_lens": forward.extend_lens,
        "sampled_lens": sampled_lens,
        "input_ids": forward.input_ids,
        "positions": forward.positions,
        "sampled_tokens": sampled_tokens,
        **forward.changes,
        **forward.attention,
        **forward.windows,
    }
    if forward.out_cache_loc:
        ints["out_cache_loc"] = np.concatenate(forward.out_cache_loc)
    payload = {}
    content = [rows.reshape(-1) for streams in gathered.values() for rows in streams]
    if content:
        payload["kv_bytes"] = np.concatenate(content)
    if forward.kv_submitted is not None:
        payload["kv_submitted_bytes"] = forward.kv_submitted
    if forward.kv_changes:
        changes = forward.kv_changes
        ints["kv_change_stream"] = np.concatenate([np.full(c.slots.size, c.stream, np.int64) for c in changes])
        ints["kv_change_slot"] = np.concatenate([c.slots for c in changes])
        ints["kv_change_phase"] = np.concatenate([np.full(c.slots.size, c.phase, np.int64) for c in changes])
        payload["kv_change_bytes"] = np.concatenate([c.content.reshape(-1) for c in changes])
    scalars: dict[str, int | str] = {
        "forward": forward.number,
        "runner": forward.runner,
        "mode": forward.mode,
        "kv_watched": int(forward.kv_watched),
        "attention_watched": forward.attention_watched,
        "submitted_watched": forward.submitted_watched,
        "window_watched": forward.window_watched,
        "note": forward.note,
    }
    return TraceEvent(
        kind="forward",
        time_ns=forward.time_ns,
        scalars=scalars,
        ints={name: values for name, values in ints.items() if values.size},
        bytes={name: values for name, values in payload.items() if values.size},
    )
