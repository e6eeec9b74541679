"""What an integrator gives the recorder of one forward, and the recorder's own copy of it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ...kernels.capture.gather import look_up
from ..trace.header import TraceHeader
from .host_arrays import (
    ByteArray,
    Int64Array,
    host_table,
    own_int64,
    ragged_index,
    read_cells,
    read_runs,
    saturated,
    wrapped,
)
from .slot_numbers import SlotNumbers

_NOTHING = np.empty(0, np.int64)

MODES: Final = ("extend", "decode", "mixed", "target_verify", "draft_extend", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRead:
    """Which slots a forward reads, for an engine that has no req_to_token tensor to show.

    Request r reads the slots of positions `starts[r] .. starts[r] + counts[r] - 1`, one request after another in
    `slots`. `starts`, `counts` `[bs]`, `slots` `[sum(counts)]`, any integer type. A sliding window's read starts one
    position before the window where there is one: its slot is the predecessor in the chain.
    """

    starts: Any
    counts: Any
    slots: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthTokens:
    """What the scheduler believes each request's tokens to be: prompt and output so far, position 0 first.

    `flat` `[sum(lens)]`, `lens` `[bs]`, any integer type.
    """

    flat: Any
    lens: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInput:
    """What attention got in one forward, read where its kernels take it. Arrays as `ForwardInput` has them.

    Attributes:
        seq_lens: `[bs]` tokens of KV that attention reads for each request, those that this forward writes included:
            prefix + extend in a healthy engine. Negative where it was not observed; None: nowhere.
        query_lens: `[bs]` query tokens of each request: its extend. Negative and None as in `seq_lens`.
        slots: for each of the header's groups the slots that attention got, in the group's own numbering; None where
            they were not observed, empty where none were. Positions that the forward neither reads nor writes, as
            `ForwardInput.reads` and `extend_lens` have it, are passed over.
    """

    seq_lens: Any | None = None
    query_lens: Any | None = None
    slots: tuple[TableRead | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """One forward, before it runs. Arrays are numpy or torch on any device, any integer type, copied at once.

    Attributes:
        mode: one of `MODES`.
        runner: index into the header's runners.
        req_pool_indices: `[bs]` rows; row 0 is padding.
        request_ids: `[bs]` the 64-bit ids that `Recorder.request` got.
        prefix_lens: `[bs]` tokens in the cache before this forward.
        extend_lens: `[bs]` tokens that this forward adds.
        input_ids: `[T]`, T at least sum(extend_lens); padding rows and padding tokens come last.
        positions: `[T]`.
        out_cache_loc: one `[T]` for each of the header's tables: the slot that each token is written to, negative
            for none.
        reads: one for each table: the `[rows, width]` req_to_token tensor itself, or a `TableRead`.
        luts: one full-to-SWA tensor `[length]` for each of the header's `lut_lens`.
        table_filled: whether the engine has put this forward's own slots into its tables already. Then those cells are
            read too, of every table in `reads` that is a tensor, and what is not `out_cache_loc` is recorded.
        truth: the scheduler's tokens, or None if the engine does not know them.
        attention: what attention gets, where that is known before the forward; else `Recorder.attention`.
    """

    mode: str
    runner: int = 0
    req_pool_indices: Any
    request_ids: Any
    prefix_lens: Any
    extend_lens: Any
    input_ids: Any
    positions: Any
    out_cache_loc: tuple[Any, ...]
    reads: tuple[Any, ...]
    luts: tuple[Any, ...] = ()
    table_filled: bool = False
    truth: TruthTokens | None = None
    attention: AttentionInput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValues:
    """Values along rows of a state table: row `rows[r]` holds its share of `values` from position `starts[r]`.

    `rows`, `starts`, `counts` `[bs] int64`, `values` `[sum(counts)] int64` within int32's range.
    """

    rows: Int64Array
    starts: Int64Array
    counts: Int64Array
    values: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChange:
    """Bytes that changed without a write, of one of the runner's streams.

    `slots` `[n] int64`, `content` `[n, capture_bytes] uint8`; `phase` is `PHASE_BEFORE` or `PHASE_AFTER` the forward.
    """

    stream: int
    phase: int
    slots: Int64Array
    content: ByteArray


@dataclass(slots=True, kw_only=True)
class CopiedForward:
    """A forward in the recorder's own arrays (int64, host), and what the recorder finds out about it on the way."""

    mode: str
    runner: int
    number: int
    time_ns: int
    rows: Int64Array
    request_ids: Int64Array
    prefix_lens: Int64Array
    extend_lens: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    out_cache_loc: tuple[Int64Array, ...]
    reads: tuple[RowValues, ...]
    luts: tuple[Any, ...]  # as they came, not copied: read before the forward only
    truth: RowValues | None
    misplaced: tuple[RowValues, ...] = ()  # of each table, cells of its own tokens that are not out_cache_loc
    written: tuple[Int64Array, ...] = ()  # of each group of the runner, its own slots (through its full-to-SWA table)
    watched: tuple[Int64Array, ...] = ()  # of each group of the runner, the slots of the prefix that this forward reads
    changes: dict[str, Int64Array] = field(default_factory=dict)
    kv_watched: bool = False
    kv_changes: list[KvChange] = field(default_factory=list)
    submitted_watched: int = 0  # streams whose submitted bytes were compared with the stored ones
    kv_submitted: ByteArray | None = None  # as the event's column; None where they were the same
    attention: dict[str, Int64Array] = field(default_factory=dict)  # event columns
    attention_watched: int = 0  # as in the trace
    attention_groups: set[int] = field(default_factory=set)  # groups of which the slots that attention gets were read
    windows: dict[str, Int64Array] = field(default_factory=dict)  # event columns: reads that are not the window's
    window_watched: int = 0  # sliding groups whose reads were compared with their window
    note: str = ""


def copy_forward(
    given: ForwardInput,
    header: TraceHeader,
    *,
    number: int,
    time_ns: int,
    hash_tokens: Callable[[Int64Array], Int64Array],
    numbers: SlotNumbers | None = None,
) -> CopiedForward:
    """Copy a forward, at once; `hash_tokens` and `numbers` return tokens and slots as the trace may hold them.

    Raises:
        ValueError: lengths that do not fit one another or the header; the message names the field.
    """
    if given.mode not in MODES:
        raise ValueError(f"mode is {given.mode!r}, expected one of {', '.join(MODES)}")
    if not 0 <= given.runner < len(header.runners):
        raise ValueError(f"runner is {given.runner}, the header has {len(header.runners)}")
    _check_length("out_cache_loc", len(given.out_cache_loc), len(header.tables), "one array for each of the tables")
    _check_length("reads", len(given.reads), len(header.tables), "one for each of the tables")
    _check_length("luts", len(given.luts), len(header.lut_lens), "one for each of the header's lut_lens")
    rows = own_int64(given.req_pool_indices)
    bs = rows.size
    prefix_lens = own_int64(given.prefix_lens)
    extend_lens = own_int64(given.extend_lens)
    request_ids = own_int64(given.request_ids)
    for name, array in (("request_ids", request_ids), ("prefix_lens", prefix_lens), ("extend_lens", extend_lens)):
        _check_length(name, array.size, bs, "one for each of req_pool_indices")
    tokens = int(np.where(rows == 0, 0, np.maximum(extend_lens, 0)).sum())
    input_ids = hash_tokens(own_int64(given.input_ids))
    if input_ids.size < tokens:
        raise ValueError(f"input_ids has length {input_ids.size}, expected at least sum(extend_lens), {tokens}")
    positions = own_int64(given.positions)
    out_cache_loc = tuple(own_int64(loc) for loc in given.out_cache_loc)
    for name, array in (("positions", positions), *(("out_cache_loc", loc) for loc in out_cache_loc)):
        _check_length(name, array.size, input_ids.size, "one for each of input_ids")
    numbers = SlotNumbers(header) if numbers is None else numbers
    copied = CopiedForward(
        mode=given.mode,
        runner=given.runner,
        number=number,
        time_ns=time_ns,
        rows=rows,
        request_ids=request_ids,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=tuple(numbers.of_table(table, loc) for table, loc in enumerate(out_cache_loc)),
        reads=tuple(
            _numbered(numbers, table, _copy_read(read, rows, prefix_lens, _first_read(header, table, prefix_lens)))
            for table, read in enumerate(given.reads)
        ),
        luts=given.luts,
        truth=None if given.truth is None else _copy_truth(given.truth, rows, hash_tokens),
    )
    copied.windows, copied.window_watched = _other_windows(copied, given, header)
    if given.table_filled:
        copied.misplaced = tuple(
            _numbered(numbers, table, _misplaced(read, rows, prefix_lens, extend_lens, slots))
            for table, (read, slots) in enumerate(zip(given.reads, out_cache_loc, strict=True))
        )
    for group in header.groups:
        if group.runner != given.runner:
            copied.written += (_NOTHING,)
            copied.watched += (_NOTHING,)
            continue
        lut = given.luts[group.lut] if group.lut >= 0 else None
        copied.written += (translate(lut, copied.out_cache_loc[group.table]),)
        copied.watched += (translate(lut, _window_slots(copied, copied.reads[group.table], group.window)),)
    return copied


def translate(lut: Any, slots: Int64Array) -> Int64Array:
    """Return slots through a full-to-SWA tensor (None: as they are); -1 where it has no entry for one."""
    if lut is None:
        return slots
    table = host_table(lut)
    if table is not None and table.dtype == np.int64:
        translated = np.empty(slots.shape, np.int64)
        look_up(table=table.reshape(-1), places=slots, out=translated)
        return translated
    inside = (slots >= 0) & (slots < int(lut.shape[0]))
    translated = np.full(slots.shape, -1, np.int64)
    translated[inside] = read_cells(lut.reshape(1, -1), np.zeros(1, np.int64), slots[inside])
    return translated


def _window_slots(forward: CopiedForward, read: RowValues, window: int) -> Int64Array:
    """Return the slots of the prefix positions that a group with this window reads (0: all of them)."""
    low, counts = window_positions(forward, read, window)
    if np.array_equal(low, read.starts) and np.array_equal(counts, read.counts):
        return read.values
    offsets = np.cumsum(read.counts) - read.counts
    return read.values[ragged_index(offsets + low - read.starts, counts)]


def window_positions(forward: CopiedForward, read: RowValues, window: int) -> tuple[Int64Array, Int64Array]:
    """Return `[bs]` the first prefix position that a group with this window reads, and `[bs]` how many of them."""
    first = np.maximum(forward.prefix_lens - window, 0) if window else np.zeros_like(forward.prefix_lens)
    low = np.maximum(read.starts, first)
    high = np.minimum(read.starts + read.counts, forward.prefix_lens)
    return low, np.maximum(high - low, 0)


def _other_windows(
    forward: CopiedForward, given: ForwardInput, header: TraceHeader
) -> tuple[dict[str, Int64Array], int]:
    """Return the reads of sliding groups that are not those of their window, as the event has them, and of how many groups.

    Only of what came as a `TableRead`: if a request reads nothing, nobody said what it reads. Of groups that share
    a table the one with the longest window is compared, unless a full group reads the table too.
    """
    found: list[tuple[int, int, int, int]] = []
    watched = 0
    for table, read in enumerate(given.reads):
        groups = [(g.window, n) for n, g in enumerate(header.groups) if (g.table, g.runner) == (table, given.runner)]
        if not isinstance(read, TableRead) or not groups or min(groups)[0] == 0:
            continue
        window, number = max(groups)
        starts, counts = forward.reads[table].starts, forward.reads[table].counts
        first = np.maximum(forward.prefix_lens - window, 0)
        short = (starts > first) | (starts + counts < forward.prefix_lens)
        long = starts < np.maximum(first - 1, 0)
        unsaid = (forward.rows != 0) & (counts == 0) & (forward.prefix_lens > 0)
        watched += 0 if unsaid.any() else sum(other == window for other, _ in groups)
        wrong = np.flatnonzero((forward.rows != 0) & (counts > 0) & (short | long)).tolist()
        found += [(number, r, int(starts[r]), int(counts[r])) for r in wrong]
    columns = np.array(found, np.int64).reshape(-1, 4).T
    return dict(zip(("window_group", "window_request", "window_start", "window_count"), columns, strict=True)), watched


def _first_read(header: TraceHeader, table: int, prefix_lens: Int64Array) -> Int64Array:
    """Return the first position whose table cell some group of this table reads, the window's predecessor too."""
    windows = [group.window for group in header.groups if group.table == table]
    if not windows or 0 in windows:
        return np.zeros_like(prefix_lens)
    return np.maximum(prefix_lens - max(windows) - 1, 0)


def _copy_read(read: Any, rows: Int64Array, prefix_lens: Int64Array, first: Int64Array) -> RowValues:
    if isinstance(read, TableRead):
        starts, counts, slots = own_int64(read.starts), own_int64(read.counts), own_int64(read.slots)
        _check_length("TableRead.starts", starts.size, rows.size, "one for each of req_pool_indices")
        _check_length("TableRead.counts", counts.size, rows.size, "one for each of req_pool_indices")
        _check_length("TableRead.slots", slots.size, int(np.maximum(counts, 0).sum()), "sum(counts)")
    else:
        starts = first
        # Row 0 is padding whatever its prefix says, and a prefix beyond the table's width has no cell there.
        counts = np.where(rows == 0, 0, np.clip(np.minimum(prefix_lens, int(read.shape[1])) - first, 0, None))
        slots = read_runs(read, rows, starts, counts)
        if _is_int32(read):
            return RowValues(rows=rows, starts=starts, counts=counts, values=slots)
    return RowValues(rows=rows, starts=starts, counts=np.maximum(counts, 0), values=saturated(slots))


def _numbered(numbers: SlotNumbers, table: int, read: RowValues) -> RowValues:
    return dataclasses.replace(read, values=numbers.of_table(table, read.values)) if numbers.differ else read


def _misplaced(
    read: Any, rows: Int64Array, prefix_lens: Int64Array, extend_lens: Int64Array, slots: Int64Array
) -> RowValues:
    """Return the cells of a table tensor at the positions that a forward writes, where they hold another slot, one each."""
    if isinstance(read, TableRead):
        return RowValues(rows=_NOTHING, starts=_NOTHING, counts=_NOTHING, values=_NOTHING)
    lens = np.where(rows == 0, 0, np.maximum(extend_lens, 0))
    of_token, positions = np.repeat(rows, lens), ragged_index(prefix_lens, lens)
    inside = (positions >= 0) & (positions < int(read.shape[1])) & (slots[: positions.size] >= 0)
    of_token, positions = of_token[inside], positions[inside]
    one = np.ones_like(positions)
    stands = read_runs(read, of_token, positions, one)
    wrong = stands != slots[: inside.size][inside]
    return RowValues(rows=of_token[wrong], starts=positions[wrong], counts=one[wrong], values=saturated(stands[wrong]))


def _copy_truth(truth: TruthTokens, rows: Int64Array, hash_tokens: Callable[[Int64Array], Int64Array]) -> RowValues:
    lens = own_int64(truth.lens)
    flat = hash_tokens(own_int64(truth.flat))
    _check_length("TruthTokens.lens", lens.size, rows.size, "one for each of req_pool_indices")
    _check_length("TruthTokens.flat", flat.size, int(np.maximum(lens, 0).sum()), "sum(lens)")
    return RowValues(rows=rows, starts=np.zeros_like(lens), counts=np.maximum(lens, 0), values=wrapped(flat))


def _is_int32(given: Any) -> bool:
    """Whether an array, numpy's or torch's, holds nothing that a state table could not hold."""
    return str(getattr(given, "dtype", "")).removeprefix("torch.") == "int32"


def _check_length(name: str, came: int, expected: int, what: str) -> None:
    if came != expected:
        raise ValueError(f"{name} has length {came}, expected {expected}: {what}")
