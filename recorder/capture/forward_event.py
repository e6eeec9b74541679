"""The event of a completed forward: where the engine's tables are not what a replay knows of them, and what the model handed to
the cache if the pool holds something else after it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...kernels.arrays import BoolArray, ByteArray, Int64Array
from ...kernels.capture.changes import RowRuns, cell_changes, cells_to_runs, joined, row_changes
from ...kernels.capture.layers import FLOATS, NARROW, ZEROS
from ...kernels.constants import KV_ALIGN_BYTES
from ..state.forward import UnusableEventError
from ..state.tables import StateTables
from ..state.writes import stays
from ..trace.event import TraceEvent
from ..trace.header import TraceHeader
from ..trace.schema import FAILED, LOGPROB_BITS, LOGPROB_KINDS, PART, SUBMITTED
from .forward_input import CopiedForward, KvChange, translate
from .host_arrays import as_rows, on_host, one_of
from .kv_layers import KvLayers, SubmittedLayers, Values
from .kv_shadow import GroupKvShadow, of_runner

Submitted = Mapping[tuple[int, int], Any]
# Columns of the event that a `CopiedForward` has under the same names.
_INTS: Final = (
    *("req_pool_indices", "request_ids", "prefix_lens", "extend_lens", "sampled_lens"),
    *("input_ids", "positions", "sampled_tokens", "sampled_logprobs"),
)
_VALUES: Final = tuple(f"value_{name}" for name in ("request", "stream", "kind", "layer", "token", "rows"))
_SCALARS: Final = (
    *("runner", "mode", "attention_watched", "submitted_watched", "window_watched", "outputs_watched", "note"),
)


def forward_event(forward: CopiedForward, gathered: Mapping[int, list[ByteArray]]) -> TraceEvent:
    """Return the event, its columns as `docs/reference/trace-format.md` describes them.

    `gathered` holds, for each of the runner's groups in header order, each stream's `[T, capture_bytes]` written bytes.
    """
    ints: dict[str, Int64Array] = {name: getattr(forward, name) for name in _INTS}
    ints |= forward.changes | forward.attention | forward.windows | forward.identity
    ints |= forward.recurrent | forward.values | forward.outputs
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
        scalars={"forward": forward.number, "kv_watched": int(forward.kv_watched)}
        | {name: getattr(forward, name) for name in _SCALARS}
        | {"status": FAILED if forward.failed else f"{PART}{forward.part}" if forward.part > 0 else ""},
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


class StateShadow:
    """The state tables as a replay of the accepted events would hold them; the event carries only where the engine disagrees.

    `commit` is called only once the writer took the event, so that what a dropped event said is said again by the next.
    """

    __slots__ = ("_backend", "tables")

    def __init__(self, header: TraceHeader, *, backend: str = "cpu") -> None:
        self.tables = StateTables(header, backend=backend)
        self._backend = backend

    def changes(self, forward: CopiedForward) -> dict[str, Int64Array]:
        """Return the event columns that bring a replay's tables to what this forward reads."""
        tables, truth = self.tables.req_to_token, self.tables.truth
        found = [row_changes(*one, backend=self._backend) for one in zip(forward.reads, tables, strict=True)]
        if forward.misplaced:
            found = [joined(both) for both in zip(found, forward.misplaced, strict=True)]
        columns = table_columns(found)
        if self.tables.luts:
            used = np.concatenate([*(read.values for read in forward.reads), *forward.out_cache_loc])
            columns |= lut_columns([self._lut_changes(n, table, used) for n, table in enumerate(forward.luts)])
        if forward.truth is not None and truth is not None:
            columns |= truth_columns(forward.truth.counts, row_changes(forward.truth, truth, backend=self._backend))
        return columns

    def commit(self, forward: CopiedForward) -> None:
        """Take over an accepted event: its changes, the slots it wrote, the tokens it sampled."""
        try:
            self.tables.apply_changes(forward)
        except UnusableEventError:  # a replay leaves the event out, and takes all that came before for unknown
            self.tables.forget()
            return
        self.tables.apply_forward(forward)

    def _lut_changes(self, number: int, table: Any, used: Int64Array) -> RowRuns:
        """Return the used cells at which a full-to-SWA table differs from its shadow, and what they hold."""
        shadow, held = self.tables.luts[number], on_host(table)
        if isinstance(held, np.ndarray) and held.dtype == np.int64:
            held = held.reshape(-1)
            cells = cell_changes(used, held, shadow, backend=self._backend)
            values = held[cells]
        else:
            cells = np.unique(used)
            cells = cells[(cells >= 0) & (cells < min(shadow.size, int(table.shape[0])))]
            values = translate(table, cells)
            differs = values != shadow[cells]
            cells, values = cells[differs], values[differs]
        return cells_to_runs(np.full(cells.size, number, np.int64), cells, values)


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
    which the pool stores them; for a stream that samples layers, the same of each layer that was observed, by its number. Of
    one that is taken on submission such rows are kept to be searched for values, and there is nothing to compare.
    Raises `ValueError` for a stream that this runner does not have or that is captured on submission, or too few bytes.
    """
    mine = of_runner(groups, forward.runner)
    rows_of = {
        key: _sampled_rows(key, value, forward, groups, gathered)
        if isinstance(value, Mapping)
        else _rows(key, value, forward, groups)
        for key, value in submitted.items()
    }
    known = {(number, stream) for number, kv in mine for stream in range(len(kv.sources))}
    if not set(rows_of) <= known:
        raise ValueError(
            f"submitted has (group, stream) keys {sorted(rows_of)}, the runner's streams are {sorted(known)}"
        )
    tokens = int(forward.new_lens.sum())
    forward.submitted_watched = sum(not isinstance(value, Mapping) for value in submitted.values())
    kept = {number: stays(forward.written[number], kv.group)[:tokens] for number, kv in mine}
    if not any((rows[:tokens] != gathered[g][s][:tokens])[kept[g]].any() for (g, s), rows in rows_of.items()):
        return
    parts = [
        rows_of.get((g, s), stored).reshape(-1) for g, streams in gathered.items() for s, stored in enumerate(streams)
    ]
    forward.kv_submitted = np.concatenate(parts)


# What has a `Values` of a stream, by its number among the runner's: called with what reads it, the slots that are written `[n]`
# and whether each is judged, as `KvLayers.values` has it.
Search = Callable[[int, KvLayers, Int64Array, ByteArray], Values]


def search_host(_stream: int, source: KvLayers, slots: Int64Array, judged: ByteArray) -> Values:
    """Search the rows of slots that lie on the host."""
    return source.values(slots, judged)


def written_values(
    forward: CopiedForward, groups: list[GroupKvShadow], search: Search = search_host
) -> dict[str, Int64Array]:
    """Return the columns of the values that the forward's requests wrote and that no model writes.

    Of each request, stream and kind where the first one is: in the lowest layer, at its first token there.
    """
    found: list[tuple[int, ...]] = []
    lens, number = forward.new_lens, -1
    request = np.repeat(np.arange(lens.size), lens)
    inner = forward.positions[: request.size] > 0
    for group, kv in of_runner(groups, forward.runner):
        slots = forward.written[group][: request.size]
        judged = np.where(stays(slots, kv.group), np.where(inner, 2, 1), 0).astype(np.uint8)
        for source in kv.sources:
            number += 1
            if not isinstance(source, KvLayers) or source.stream.dtype not in FLOATS:
                continue
            counts, layers, empty = search(number, source, slots, judged)
            if counts[:, ZEROS].any():
                small = source.stream.dtype in NARROW  # all of a token may be, as of a model without its adapter
                counts[empty if small else _begin_with_nothing(empty, forward, request), ZEROS] = 0
            for kind in np.flatnonzero(counts.any(axis=0)).tolist():
                for r in np.unique(request[counts[:, kind] > 0]).tolist():
                    mine = np.flatnonzero((request == r) & (counts[:, kind] > 0))
                    token = int(mine[np.argmin(layers[mine, kind])])
                    layer, rows = int(layers[token, kind]), int(counts[mine, kind].sum())
                    found.append((r, number, kind, layer, token, rows))
    return dict(zip(_VALUES, np.array(found, np.int64).reshape(-1, len(_VALUES)).T.copy(), strict=True))


def _begin_with_nothing(empty: BoolArray, forward: CopiedForward, request: Int64Array) -> BoolArray:
    """Say which tokens repeat a request's first one, and have nothing in a first layer from there on, `[n]`.

    An embedding of zeros, as of padding, finds nothing to attend to but the same before it: all its layers are zeros.
    """
    first = (np.cumsum(forward.new_lens) - forward.new_lens)[request]
    tokens, number = forward.input_ids[: request.size], np.arange(request.size)
    ends = ~empty | (tokens != tokens[first]) | (forward.positions[first] > 0)
    last = np.maximum.accumulate(np.where(ends, number, -1))
    found: BoolArray = last < first
    return found


def _rows(key: tuple[int, int], value: Any, forward: CopiedForward, groups: list[GroupKvShadow]) -> ByteArray:
    """Return a stream's submitted bytes, `[T, capture_bytes] uint8`."""
    group, number = key
    streams = groups[group].group.streams if 0 <= group < len(groups) else ()
    if not 0 <= number < len(streams):
        raise ValueError(f"submitted has a key {key}, the header has no such (group, stream)")
    stream, tokens = streams[number], forward.input_ids.size
    if stream.origin == SUBMITTED or stream.samples:
        raise ValueError(
            f"submitted[{group}, {number}]: the stream is taken on submission, or samples layers, so there is nothing beside it"
        )
    rows = as_rows(value)
    if rows.shape[0] != tokens or rows.shape[1] < stream.capture_bytes:
        raise ValueError(
            f"submitted[{group}, {number}] holds {list(rows.shape)} bytes, expected [{tokens}, at least "
            f"{stream.capture_bytes}]: one row for each of input_ids, in the order in which the pool stores a token"
        )
    return rows[:, : stream.capture_bytes]


def _sampled_rows(
    key: tuple[int, int],
    given: Mapping[int, Any],
    forward: CopiedForward,
    groups: list[GroupKvShadow],
    gathered: Mapping[int, list[ByteArray]],
) -> ByteArray:
    """Return what a stream that samples layers would hold of what these were handed, `[T, 16] uint8`."""
    group, number = key
    sources = groups[group].sources if 0 <= group < len(groups) else []
    source = sources[number] if 0 <= number < len(sources) else None
    if not isinstance(source, KvLayers) or group not in gathered:
        raise ValueError(
            f"submitted has a key {key} with layers, the runner has no such (group, stream) that samples them"
        )
    rows, tokens = {layer: as_rows(value) for layer, value in given.items()}, forward.input_ids.size
    for layer, own in rows.items():
        least = source.stream.num_chunks * KV_ALIGN_BYTES
        if layer not in source.stream.layers or own.shape[0] != tokens or own.shape[1] < least:
            raise ValueError(
                f"submitted[{group}, {number}] holds {list(own.shape)} bytes of layer {layer}, expected [{tokens}, at least "
                f"{least}] of one of {list(source.stream.layers)}"
            )
    if isinstance(source, SubmittedLayers):
        source.given = rows
        return gathered[group][number]
    return source.handed_in(forward.written[group], rows, gathered[group][number])


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
