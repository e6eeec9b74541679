"""The event of a completed forward, with what the model handed to the cache if the pool holds something else after it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.capture.changes import RowRuns, joined
from ..state.writes import stays
from ..trace.event import TraceEvent
from .forward_input import CopiedForward, KvChange
from .host_arrays import as_rows
from .kv_shadow import GroupKvShadow, of_runner

Submitted = Mapping[tuple[int, int], Any]


def forward_event(forward: CopiedForward, gathered: Mapping[int, list[ByteArray]]) -> TraceEvent:
    """Return the event, its columns as `docs/reference/trace-format.md` describes them.

    `gathered` holds, for each of the runner's groups in header order, each stream's `[T, capture_bytes]` written bytes.
    """
    ints = {
        "req_pool_indices": forward.rows,
        "request_ids": forward.request_ids,
        "prefix_lens": forward.prefix_lens,
        "extend_lens": forward.extend_lens,
        "sampled_lens": forward.sampled_lens,
        "input_ids": forward.input_ids,
        "positions": forward.positions,
        "sampled_tokens": forward.sampled_tokens,
        **forward.changes,
        **forward.attention,
        **forward.windows,
        **forward.recurrent,
    }
    if forward.out_cache_loc:
        ints["out_cache_loc"] = np.concatenate(forward.out_cache_loc)
    payload = {}
    content = [rows.reshape(-1) for streams in gathered.values() for rows in streams]
    if content:
        payload["kv_bytes"] = np.concatenate(content)
    if forward.kv_submitted is not None:
        payload["kv_submitted_bytes"] = forward.kv_submitted
    event = TraceEvent(
        kind="forward",
        time_ns=forward.time_ns,
        scalars={
            "forward": forward.number,
            "runner": forward.runner,
            "mode": forward.mode,
            "kv_watched": int(forward.kv_watched),
            "attention_watched": forward.attention_watched,
            "submitted_watched": forward.submitted_watched,
            "window_watched": forward.window_watched,
            "note": forward.note,
        },
        ints={name: values for name, values in ints.items() if values.size},
        bytes={name: values for name, values in payload.items() if values.size},
    )
    add_kv_changes(event, forward.kv_changes)
    return event


def add_kv_changes(event: TraceEvent, changes: list[KvChange]) -> None:
    """Put observed changes of KV bytes into an event."""
    if changes:
        lens = [change.slots.size for change in changes]
        event.ints["kv_change_stream"] = np.repeat(np.array([change.stream for change in changes], np.int64), lens)
        event.ints["kv_change_slot"] = np.concatenate([change.slots for change in changes])
        event.ints["kv_change_phase"] = np.repeat(np.array([change.phase for change in changes], np.int64), lens)
        event.bytes["kv_change_bytes"] = np.concatenate([change.content.reshape(-1) for change in changes])


def table_columns(found: Sequence[RowRuns]) -> dict[str, Int64Array]:
    """Return the columns of what changed in each block table."""
    index = np.repeat(np.arange(len(found), dtype=np.int64), [runs.rows.size for runs in found])
    return {"table_index": index} | _named("table_row table_start table_count table_slots", joined(found))


def lut_columns(found: Sequence[RowRuns]) -> dict[str, Int64Array]:
    """Return the columns of what changed in full-to-SWA tables, whose numbers are the runs' rows."""
    return _named("lut_index lut_start lut_count lut_slots", joined(found))


def truth_columns(lens: Int64Array, runs: RowRuns) -> dict[str, Int64Array]:
    """Return the columns of the truth tokens: how many each request has, `[bs]`, and which of them are new."""
    return {"truth_lens": lens} | _named("truth_row truth_start truth_count truth_tokens", runs)


def attention_columns(groups: Int64Array, runs: RowRuns) -> dict[str, Int64Array]:
    """Return the columns of the slots that attention got other than it should; the runs' rows are the requests."""
    return {"attention_group": groups} | _named(
        "attention_request attention_start attention_count attention_slots", runs
    )


def _named(names: str, runs: RowRuns) -> dict[str, Int64Array]:
    return dict(zip(names.split(), runs, strict=True))


def add_submitted(
    forward: CopiedForward,
    submitted: Submitted,
    groups: list[GroupKvShadow],
    gathered: Mapping[int, list[ByteArray]],
) -> None:
    """Add to the forward's event what was submitted, the bytes only where the pool holds others than `gathered`.

    `submitted` has, for each `(group, stream)` that was observed, `[T, ...]` of any type, a token's bytes in the order in
    which the pool stores them. Raises `ValueError` for a stream that this runner does not have or that is captured on
    submission, or too few bytes.
    """
    mine = of_runner(groups, forward.runner)
    rows_of = {key: _rows(key, value, forward, groups) for key, value in submitted.items()}
    known = {(number, stream) for number, kv in mine for stream in range(len(kv.sources))}
    if not set(rows_of) <= known:
        raise ValueError(
            f"submitted has (group, stream) keys {sorted(rows_of)}, the runner's streams are {sorted(known)}"
        )
    tokens = int(forward.new_lens.sum())
    forward.submitted_watched = len(rows_of)
    kept = {number: stays(forward.written[number], kv.group)[:tokens] for number, kv in mine}
    if not any((rows[:tokens] != gathered[g][s][:tokens])[kept[g]].any() for (g, s), rows in rows_of.items()):
        return
    parts = [
        rows_of.get((g, s), stored).reshape(-1) for g, streams in gathered.items() for s, stored in enumerate(streams)
    ]
    forward.kv_submitted = np.concatenate(parts)


def _rows(key: tuple[int, int], value: Any, forward: CopiedForward, groups: list[GroupKvShadow]) -> ByteArray:
    """Return a stream's submitted bytes, `[T, capture_bytes] uint8`."""
    group, number = key
    streams = groups[group].group.streams if 0 <= group < len(groups) else ()
    if not 0 <= number < len(streams):
        raise ValueError(f"submitted has a key {key}, the header has no such (group, stream)")
    stream, tokens = streams[number], forward.input_ids.size
    if stream.origin == "submitted":
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
