"""A record batch as the compiled pass takes it: scalars as numbers, list columns as values and offsets, without a copy."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import Int64Array
from ....kernels.replay_pass.context import (
    ALLOC_CODES,
    ALLOC_EVENT,
    FORWARD_EVENT,
    KINDS,
    LISTS,
    MODES,
    SHARED_ALLOC,
    STATUS_CODES,
    STATUS_EVENT,
    UNUSUAL,
)
from ....recorder.capture.host_arrays import ragged_index
from ....recorder.state.events import SHARED_NOTES
from ....recorder.state.forward import ATTENTION_RUNS
from ....recorder.state.requests import RequestTable, declared_in
from ....recorder.trace.batch import TraceBatch
from ....recorder.trace.header import TraceHeader
from ....recorder.trace.schema import NOBODYS, STILL_USED

_MODE_COLUMN: Final = 2  # of `BatchColumns.events`
_KIND_OF: Final = {name: code for code, name in enumerate(KINDS)}
_MODE_OF: Final = {name: code for code, name in enumerate(MODES)}
_ALLOC_OF: Final = {name: code for code, name in enumerate(ALLOC_CODES)}
_STATUS_OF: Final = {name: code for code, name in enumerate(STATUS_CODES)}

# An event that has values in one of these is none for the pass.
_UNUSUAL_LISTS: Final = (
    "kv_change_stream",
    "kv_change_slot",
    "kv_change_phase",
    "kv_change_bytes",
    "kv_submitted_bytes",
    *ATTENTION_RUNS,
    "attention_slots",
    "window_group",
    "output_group",
    "value_request",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchColumns:
    """A batch's columns in the pass's order; `kind` `[events] int64` is -1 for what the pass must not take.

    `events` `[events, columns] int64` are the ints of `Event`, of which `kind` is the first.
    """

    batch: TraceBatch
    kind: Int64Array
    events: Int64Array
    lists: tuple[npt.NDArray[np.int64 | np.uint64], ...]
    offsets: tuple[Int64Array, ...]
    most_tokens: int
    most_requests: int


def batch_columns(batch: TraceBatch, header: TraceHeader) -> BatchColumns:
    """Return a batch's columns; `kind` says which events are of a kind that the pass takes."""
    kind = _codes(batch.kinds, _KIND_OF)
    for name in _UNUSUAL_LISTS:
        ends = batch.offsets(name)
        if ends[-1]:
            kind[np.diff(ends) > 0] = UNUSUAL
    kind[_attention_differs(batch)] = UNUSUAL
    kind[(np.diff(batch.offsets("identity_kind")) > 0) & (kind == FORWARD_EVENT)] = UNUSUAL
    kind[batch.failed] = UNUSUAL
    offsets = {name: batch.offsets(name) for name in LISTS}
    lists = {name: batch.values(name) for name in LISTS}
    kind[(np.diff(offsets["table_row"]) > 0) & (kind != FORWARD_EVENT)] = UNUSUAL  # cells told ahead of their forward
    kv_offsets, kv = offsets["kv_bytes"], lists["kv_bytes"]
    if len(kv) % 8 or bool((kv_offsets % 8).any()):
        kind[:] = UNUSUAL
        kv, kv_offsets = kv[:0], np.zeros_like(kv_offsets)
    words = kv.view(np.uint64)
    lists["kv_bytes"], offsets["kv_bytes"] = words if words.flags.aligned else words.copy(), kv_offsets // 8
    if header.truth_table is None:
        offsets["truth_lens"] = np.zeros_like(offsets["truth_lens"])
    if not all(_fit(offsets[name], len(lists[name])) for name in LISTS):
        kind[:] = UNUSUAL
    ints = {name: batch.scalar_ints(name) for name in ("runner", "forward", "request_id", "prompt_len", "room")}
    places = np.arange(len(kind))
    columns = (
        *(kind, _statuses(batch, kind), _codes(batch.strings("mode"), _MODE_OF), *ints.values()),
        *(places, places + batch.first_event + 1, *_of_runners(header, ints["runner"])),
    )
    return BatchColumns(
        batch=batch,
        kind=kind,
        events=np.stack(columns, axis=1),
        lists=tuple(lists[name] for name in LISTS),
        offsets=tuple(offsets[name] for name in LISTS),
        most_tokens=_most(offsets["input_ids"]),
        most_requests=_most(offsets["req_pool_indices"]),
    )


def leave_hits(columns: BatchColumns, table: RequestTable, *, decodes: bool) -> None:
    """Have the pass leave the forwards in which a request may hit another one's KV, if requests declare identities that differ.

    `decodes`: a decode may be a request's first forward.
    """
    batch, modes = columns.batch, columns.events[:, _MODE_COLUMN]
    if len(table.declared | declared_in(batch)) < 2:
        return
    ends = np.concatenate(([0], np.cumsum(batch.values("prefix_lens") > 0)))[batch.offsets("prefix_lens")]
    hits = (np.diff(ends) > 0) & (columns.kind == FORWARD_EVENT) & (decodes | (modes != _MODE_OF["decode"]))
    columns.kind[hits] = columns.events[hits, 0] = UNUSUAL


def _of_runners(header: TraceHeader, runners: Int64Array) -> Int64Array:
    """Return `[2, events]`: the token offset of each event's runner, -1 if that has no group, and its words of KV a token."""
    known = np.zeros((2, len(header.runners) + 1), np.int64)
    known[0] = -1
    for group in header.groups:
        known[0, group.runner] = header.runners[group.runner].token_offset
        known[1, group.runner] += sum(stream.capture_bytes // 8 for stream in group.streams)
    return known[:, np.where((runners >= 0) & (runners < len(header.runners)), runners, len(header.runners))]


def _fit(offsets: Int64Array, count: int) -> bool:
    """Whether offsets lead to values that there are: compiled code does not look again."""
    return bool(offsets[0] >= 0 and offsets[-1] <= count and (np.diff(offsets) >= 0).all())


def _attention_differs(batch: TraceBatch) -> npt.NDArray[np.bool_]:
    """Say in which events attention got other lengths than the batch's, or lengths that do not fit it, `[events] bool`."""
    found = np.zeros(batch.num_events, np.bool_)
    columns = [(batch.offsets(name), batch.values(name)) for name in ("req_pool_indices", "prefix_lens", "extend_lens")]
    for name in ("attention_seq_lens", "attention_query_lens"):
        offsets, got = batch.offsets(name), batch.values(name)
        lens = np.diff(offsets)
        if not lens.any():
            continue
        fits = np.logical_and.reduce([np.diff(others) == lens for others, _ in columns])
        found |= (lens > 0) & ~fits
        places = np.flatnonzero((lens > 0) & fits)  # other events have rows and no lengths
        counts = lens[places]
        rows, prefix, extend = (values[ragged_index(others[places], counts)] for others, values in columns)
        mine, extend = got[ragged_index(offsets[places], counts)], np.maximum(extend, 0)
        expected = prefix + extend if name == "attention_seq_lens" else extend
        found[np.repeat(places, counts)[(mine >= 0) & (mine != expected) & (rows != 0)]] = True
    return found


def _statuses(batch: TraceBatch, kind: Int64Array) -> Int64Array:
    """Return what an alloc or a status event says, as a number; -1 for what the pass must not take."""
    found = np.full(len(kind), -1, np.int64)
    status = batch.strings("status")
    allocs = np.flatnonzero(kind == ALLOC_EVENT).tolist()
    notes = batch.strings("note") if allocs else []
    for i in allocs:
        code = _ALLOC_OF.get(status[i], -1) if notes[i] not in (STILL_USED, NOBODYS) else -1
        found[i] = SHARED_ALLOC if code == 0 and notes[i] in SHARED_NOTES else code
    for i in np.flatnonzero(kind == STATUS_EVENT).tolist():
        found[i] = _STATUS_OF.get(status[i], -1)
    return found


def _codes(names: list[str], code_of: dict[str, int]) -> Int64Array:
    return np.array([code_of.get(name, -1) for name in names], np.int64)


def _most(offsets: Int64Array) -> int:
    return int(np.diff(offsets).max(initial=0))
