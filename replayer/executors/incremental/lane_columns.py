"""A record batch as the lane takes it: scalars as numbers, list columns as values and offsets, without a copy."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ....kernels.replay_pass.layout import (
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
from ....recorder.trace.batch import TraceBatch

Int64Array = npt.NDArray[np.int64]

_KIND_OF: Final = {name: code for code, name in enumerate(KINDS)}
_MODE_OF: Final = {name: code for code, name in enumerate(MODES)}
_ALLOC_OF: Final = {name: code for code, name in enumerate(ALLOC_CODES)}
_STATUS_OF: Final = {name: code for code, name in enumerate(STATUS_CODES)}

# An event that has values in one of these is none for the lane.
_UNUSUAL_LISTS: Final = (
    "lut_index",
    "lut_start",
    "lut_count",
    "lut_slots",
    "kv_change_stream",
    "kv_change_slot",
    "kv_change_phase",
    "kv_change_bytes",
    "kv_submitted_bytes",
    *ATTENTION_RUNS,
    "attention_slots",
    "window_group",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneColumns:
    """A batch's columns in the lane's order; `kind` `[events] int64` is -1 for what the lane must not take."""

    batch: TraceBatch
    kind: Int64Array
    scalars: tuple[Int64Array, ...]
    lists: tuple[Int64Array, ...]
    offsets: tuple[Int64Array, ...]
    kv: npt.NDArray[np.uint64]
    kv_offsets: Int64Array
    most_tokens: int
    most_requests: int
    most_changes: int


def lane_columns(batch: TraceBatch) -> LaneColumns:
    """Return a batch's columns; `kind` says which events are of a kind that the lane takes."""
    kind = _codes(batch.kinds, _KIND_OF)
    for name in _UNUSUAL_LISTS:
        ends = batch.offsets(name)
        if ends[-1]:
            kind[np.diff(ends) > 0] = UNUSUAL
    kind[_attention_differs(batch)] = UNUSUAL
    offsets = {name: batch.offsets(name) for name in LISTS}
    kind[(np.diff(offsets["table_row"]) > 0) & (kind != FORWARD_EVENT)] = UNUSUAL  # cells told ahead of their forward
    kv_offsets, kv = batch.offsets("kv_bytes"), batch.values("kv_bytes")
    if len(kv) % 8 or bool((kv_offsets % 8).any()):
        kind[:] = UNUSUAL
        kv, kv_offsets = kv[:0], np.zeros_like(kv_offsets)
    words = kv.view(np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    ints = (batch.scalar_ints(name) for name in ("runner", "forward", "request_id", "prompt_len", "room"))
    return LaneColumns(
        batch=batch,
        kind=kind,
        scalars=(kind, _statuses(batch, kind), _codes(batch.strings("mode"), _MODE_OF), *ints),
        lists=tuple(batch.values(name) for name in LISTS),
        offsets=tuple(offsets.values()),
        kv=words,
        kv_offsets=kv_offsets // 8,
        most_tokens=_most(offsets["input_ids"]),
        most_requests=_most(offsets["req_pool_indices"]),
        most_changes=max(_most(offsets["table_slots"]), _most(offsets["truth_tokens"])),
    )


def _attention_differs(batch: TraceBatch) -> npt.NDArray[np.bool_]:
    """Say in which events attention got other lengths than the batch's, or lengths that do not fit it, `[events] bool`."""
    bs, last = batch.offsets("req_pool_indices"), batch.num_events
    found = np.zeros(last, np.bool_)
    prefix, extend = batch.values("prefix_lens"), batch.values("extend_lens")
    wholly = bool(np.array_equal(bs, batch.offsets("prefix_lens")) and np.array_equal(bs, batch.offsets("extend_lens")))
    for name, expected in (
        ("attention_seq_lens", prefix + extend if wholly else prefix),
        ("attention_query_lens", extend),
    ):
        offsets, got = batch.offsets(name), batch.values(name)
        if not len(got):
            continue
        lens = np.diff(offsets)
        found |= (lens > 0) & ((lens != np.diff(bs)) | (not wholly))
        if found.all():
            continue
        places = np.flatnonzero((lens > 0) & ~found)
        at = ragged_index(bs[places], lens[places])
        mine = got[ragged_index(offsets[places], lens[places])]
        wrong = (mine >= 0) & (mine != expected[at]) & (batch.values("req_pool_indices")[at] != 0)
        found[np.repeat(places, lens[places])[wrong]] = True
    return found


def _statuses(batch: TraceBatch, kind: Int64Array) -> Int64Array:
    """Return what an alloc or a status event says, as a number; -1 for what no recorder writes."""
    found = np.full(len(kind), -1, np.int64)
    status = batch.strings("status")
    allocs = np.flatnonzero(kind == ALLOC_EVENT).tolist()
    notes = batch.strings("note") if allocs else []
    for i in allocs:
        code = _ALLOC_OF.get(status[i], -1)
        found[i] = SHARED_ALLOC if code == 0 and notes[i] in SHARED_NOTES else code
    for i in np.flatnonzero(kind == STATUS_EVENT).tolist():
        found[i] = _STATUS_OF.get(status[i], -1)
    return found


def _codes(names: list[str], code_of: dict[str, int]) -> Int64Array:
    return np.array([code_of.get(name, -1) for name in names], np.int64)


def _most(offsets: Int64Array) -> int:
    return int(np.diff(offsets).max(initial=0))
