"""Which events of a batch the kernels may step: those that are whole, sane, and change no more than a forward does.

Everything else is for the host, one event at a time, by the code that replays on the CPU. So whatever contradicts itself
is left to that code to say, and nothing here words an error. All of a batch is looked at in a few passes over its
columns.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ....kernels.ops.plan.reference import MAX_PLAN_ENTRIES
from ....recorder.capture.host_arrays import ragged_index
from ....recorder.state.events import read_known_event
from ....recorder.state.forward import MAX_PREFIX, UnusableEventError
from ....recorder.state.writes import KvChanges
from ....recorder.trace.batch import TraceBatch
from ....recorder.trace.header import TraceHeader

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Kinds that change what slots hold or that all state hangs on.
_HOST_KINDS: Final = frozenset({"kv_copy", "loss", "sweep", "transfer", "keyframe"})
_PER_REQUEST: Final = ("request_ids", "prefix_lens", "extend_lens")
_KV_CHANGES: Final = ("kv_change_stream", "kv_change_slot", "kv_change_phase", "kv_change_bytes")
_MAX_TOKENS: Final = 1 << 30
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Screening:
    """`for_device` `[events] bool`; `is_step` says which of those the kernels have something to do for, `[events] bool`.

    `kv_changes` holds the checked changes of the forwards that have any, by their place in the batch.
    """

    for_device: BoolArray
    is_step: BoolArray
    kv_changes: dict[int, KvChanges] = field(default_factory=dict)


def screen(batch: TraceBatch, header: TraceHeader, *, checks: bool) -> Screening:
    """Look through a batch; `checks` says whether history checks run, whose reading of an event may fail, too."""
    count = batch.num_events
    kinds = batch.kinds
    forwards = np.fromiter((kind == "forward" for kind in kinds), np.bool_, count)
    host = np.fromiter((kind in _HOST_KINDS for kind in kinds), np.bool_, count)
    changes = _lens(batch, "table_slots") + _lens(batch, "lut_slots") + _lens(batch, "truth_tokens")
    host |= ~_changes_fit(batch, header) | (_lens(batch, "kv_bytes") % 8 != 0)
    host |= forwards & ~_forwards_fit(batch, header, forwards & ~host)
    if checks:
        # A sample that does not fit its forward is found out by what was remembered of that forward.
        host |= np.fromiter((kind == "sample" for kind in kinds), np.bool_, count)
        host |= _unreadable(batch, header, ~forwards & ~host)
    found: dict[int, KvChanges] = {}
    changed = sum((_lens(batch, name) for name in _KV_CHANGES), np.zeros(count, np.int64))
    if any(
        group.window and group.lut < 0 for group in header.groups
    ):  # a chain may begin anew behind a token that is not stored
        host |= forwards & _of_events(batch, "out_cache_loc", batch.values("out_cache_loc") < 0)
    ring = any(group.reads_before_write for group in header.groups)
    for index in np.flatnonzero(forwards & ~host & (changed > 0)).tolist():
        try:
            found[index] = KvChanges(batch.event(index), header, int(batch.scalar_ints("runner")[index]))
        except UnusableEventError:
            host[index] = True
        if ring:  # what changed lands before and after what is read, and what is written between the two
            host[index] = True
    return Screening(for_device=~host, is_step=~host & (forwards | (changes > 0)), kv_changes=found)


def _lens(batch: TraceBatch, name: str) -> Int64Array:
    return np.diff(batch.offsets(name))


def _of_events(batch: TraceBatch, name: str, bad: BoolArray) -> BoolArray:
    """Say for each event, `[events] bool`, whether any of its values in a list column is `bad`."""
    offsets = batch.offsets(name)
    if not bad.any():
        return np.zeros(batch.num_events, np.bool_)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(bad)])
    return before[offsets[1:]] > before[offsets[:-1]]


def _sums(batch: TraceBatch, name: str, values: Int64Array) -> Int64Array:
    """Add up each event's values, `[events] int64`; `values` are small enough not to wrap."""
    offsets = batch.offsets(name)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    return before[offsets[1:]] - before[offsets[:-1]]


def _changes_fit(batch: TraceBatch, header: TraceHeader) -> BoolArray:
    fit = np.ones(batch.num_events, np.bool_)
    shapes = np.array([[table.rows, table.width] for table in header.tables] or [[0, 0]], np.int64)
    fit &= _runs_fit(batch, "table", "table_slots", shapes, ("index", "row", "start", "count"))
    luts = np.array([[1, length] for length in header.lut_lens] or [[0, 0]], np.int64)
    if header.lut_lens:
        fit &= _runs_fit(batch, "lut", "lut_slots", luts, ("index", "start", "count"))
    if header.truth_table is not None:
        truth = np.array([[header.truth_table.rows, header.truth_table.width]], np.int64)
        fit &= _runs_fit(batch, "truth", "truth_tokens", truth, ("row", "start", "count"))
    return fit


def _runs_fit(
    batch: TraceBatch, prefix: str, values_name: str, shapes: Int64Array, columns: tuple[str, ...]
) -> BoolArray:
    """Say which events' runs fit their values and tables, `[events] bool`; `shapes` `[tables, 2] int64`."""
    lens = [_lens(batch, f"{prefix}_{column}") for column in columns]
    fit = np.logical_and.reduce([one == lens[0] for one in lens])
    starts, counts = batch.values(f"{prefix}_start"), batch.values(f"{prefix}_count")
    values = batch.values(values_name)
    if not len(starts):
        return fit & (_lens(batch, values_name) == 0)
    if not fit.all():
        return fit & (lens[0] == 0) & (_lens(batch, values_name) == 0)  # hostile: none of the batch's runs is taken
    indices = batch.values(f"{prefix}_index") if "index" in columns else np.zeros_like(starts)
    rows = batch.values(f"{prefix}_row") if "row" in columns else np.zeros_like(starts)
    known = (indices >= 0) & (indices < len(shapes))
    shape = shapes[np.where(known, indices, 0)]
    bad = ~known | (rows < 0) | (rows >= shape[:, 0]) | (starts < 0) | (starts > shape[:, 1])
    bad |= (counts < 0) | (counts > shape[:, 1] - np.where(bad, 0, starts))
    fit &= ~_of_events(batch, f"{prefix}_start", bad)
    fit &= _sums(batch, f"{prefix}_start", np.where(bad, 0, counts)) == _lens(batch, values_name)
    if prefix != "lut":
        fit &= ~_of_events(batch, values_name, (values < _INT32.min) | (values > _INT32.max))
    return fit


def gathered(batch: TraceBatch, name: str, events: Int64Array) -> Int64Array:
    """Return a list column's values of some events, one after another; no copy where no other event has any."""
    values, offsets = batch.values(name), batch.offsets(name)
    begins, lens = offsets[events], offsets[events + 1] - offsets[events]
    if int(lens.sum()) == len(values):
        return values
    found: Int64Array = values[ragged_index(begins, lens)]
    return found


def _forwards_fit(batch: TraceBatch, header: TraceHeader, forwards: BoolArray) -> BoolArray:
    """Say which forwards `read_forward` would take, and have no request beyond the tables, `[events] bool`."""
    runners = batch.scalar_ints("runner")
    fit = forwards & (runners >= 0) & (runners < len(header.runners))
    bs, tokens = _lens(batch, "req_pool_indices"), _lens(batch, "input_ids")
    for name in _PER_REQUEST:
        fit &= _lens(batch, name) == bs
    fit &= (_lens(batch, "positions") == tokens) & (_lens(batch, "out_cache_loc") == tokens * len(header.tables))
    fit &= (tokens < _MAX_TOKENS) & ((bs > 0) | (tokens == 0))
    for name in ("attention_seq_lens", "attention_query_lens"):
        fit &= (_lens(batch, name) == 0) | (_lens(batch, name) == bs)
    fit &= (_lens(batch, "attention_slots") == 0) & (_lens(batch, "attention_group") == 0)
    truth, sampled = _lens(batch, "truth_lens"), _lens(batch, "sampled_lens")
    fit &= (truth == 0) | (truth == bs)
    fit &= (sampled == 0) | (sampled == bs)
    widths = np.array([sum(s.capture_bytes for _, s in header.streams(r)) for r in range(len(header.runners))])
    fit &= _lens(batch, "kv_bytes") == tokens * widths[np.where(fit, runners, 0)]
    chosen = np.flatnonzero(fit)
    fit[chosen] = _requests_fit(batch, header, chosen)
    return fit


def _requests_fit(batch: TraceBatch, header: TraceHeader, chosen: Int64Array) -> BoolArray:
    """Say the same of forwards whose columns fit one another, `[chosen] bool`."""
    runners, tokens = batch.scalar_ints("runner")[chosen], _lens(batch, "input_ids")[chosen]
    bs = _lens(batch, "req_pool_indices")[chosen]
    rows, prefix, extend = (
        gathered(batch, name, chosen) for name in ("req_pool_indices", "prefix_lens", "extend_lens")
    )
    extend = np.where(rows == 0, 0, np.maximum(extend, 0))
    of_forward = np.repeat(np.arange(len(chosen)), bs)
    bad = (extend > tokens[of_forward]) | (prefix > MAX_PREFIX) | (prefix < 0)
    extend = np.where(bad, 0, extend)
    fit: BoolArray = _added(extend, bs) <= tokens
    for number in range(len(header.runners)):
        of_runner = runners[of_forward] == number
        for group in (group for group in header.groups if group.runner == number):
            table = header.tables[group.table]
            beyond = (rows < 0) | (rows >= table.rows) | (prefix + extend > table.width)
            bad |= of_runner & (rows != 0) & beyond
            entries = np.where(bad | (rows == 0), 0, np.minimum(prefix, group.window or table.width))
            fit &= (runners != number) | (_added(entries, bs) <= MAX_PLAN_ENTRIES)
    if header.truth_table is not None:
        known = (_lens(batch, "truth_lens")[chosen] > 0)[of_forward]
        long = gathered(batch, "truth_lens", chosen) > header.truth_table.width
        bad[known] |= (rows[known] != 0) & ((rows[known] >= header.truth_table.rows) | long)
    sampled, room = gathered(batch, "sampled_lens", chosen), _lens(batch, "sampled_tokens")[chosen]
    samplers = _lens(batch, "sampled_lens")[chosen]
    wrong = (sampled < 0) | (sampled > np.repeat(room, samplers))
    fit &= _added(wrong.astype(np.int64), samplers) == 0
    fit &= _added(np.where(wrong, 0, sampled), samplers) == room
    return fit & (_added(bad.astype(np.int64), bs) == 0)


def _added(values: Int64Array, lens: Int64Array) -> Int64Array:
    """Add up runs of values, `[runs] int64`; `values` are small enough not to wrap."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    ends = np.cumsum(lens)
    return before[ends] - before[ends - lens]


def _unreadable(batch: TraceBatch, header: TraceHeader, asked: BoolArray) -> BoolArray:
    """Say which of the events `asked` for the history checks cannot read, `[events] bool`."""
    found = np.zeros(batch.num_events, np.bool_)
    for index in np.flatnonzero(asked).tolist():
        try:
            read_known_event(batch.event(index), header.groups)
        except UnusableEventError:
            found[index] = True
    return found
