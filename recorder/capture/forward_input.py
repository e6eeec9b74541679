"""What an integrator gives the recorder of one forward, and the recorder's own copy of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from ...kernels.arrays import ByteArray, Int64Array
from ...kernels.capture.changes import NO_RUNS, RowRuns
from ..trace.header import TraceHeader
from ..trace.schema import Mode
from .host_arrays import on_host, own_int64, ragged_index, read_blocks, read_runs, saturated, wrapped
from .privacy import IdentityValue
from .recurrent import StateAccess
from .slot_numbers import LentRows, SlotNumbers

_NOTHING = np.empty(0, np.int64)
_READ: Final = ("starts", "counts", "slots")

MODES: Final = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRead:
    """Which slots a forward reads, for an engine that has no req_to_token tensor to show.

    Request r reads the slots of positions `starts[r] .. starts[r] + counts[r] - 1`, one request after another in
    `slots`. `starts`, `counts` `[bs]`, `slots` `[sum(counts)]`, any integer type. A sliding window's read starts one
    position before the window where there is one: its slot is the predecessor in the chain. `window_observed` says whether
    `starts` are what attention was seen to read of a window, not what it ought to. Of a group without a window `last` says of
    how many positions attention was seen to read the last ones alone; 0 for all, or if nobody knows.
    """

    starts: Any
    counts: Any
    slots: Any
    window_observed: bool = True
    last: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """What a forward reads, of an engine whose attention gets blocks: row r is the batch's request r.

    `blocks` `[at least bs, max_blocks]`, any integer type, a negative block for none; position p of request r lies in slot
    `blocks[r, p // block_size] * block_size + p % block_size`. None if no request of the forward has a prefix.
    """

    blocks: Any
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthTokens:
    """What the scheduler believes each request's tokens to be: prompt and output so far, position 0 first.

    `flat` `[sum(lens)]`, `lens` `[bs]`, any integer type.
    """

    flat: Any
    lens: Any


def truth_tokens(parts: Sequence[Int64Array], rows: int | None = None) -> TruthTokens:
    """Return what each request is believed to have, `parts`, of a batch of `rows` rows, padding included."""
    lens = np.zeros(len(parts) if rows is None else rows, np.int64)
    lens[: len(parts)] = [part.size for part in parts]
    return TruthTokens(flat=np.concatenate(parts) if parts else _NOTHING, lens=lens)


def mode_by_lens(extend: Int64Array, prefix: Int64Array, prompt_lens: Int64Array | int) -> Mode:
    """Return the mode of a forward by its lengths `[bs]`, of an engine that does not name it."""
    decoding = (extend == 1) & (prefix >= prompt_lens)
    if decoding.all():
        return "decode" if decoding.size else "idle"
    return "mixed" if decoding.any() else "extend"


class OutputRead(NamedTuple):
    """What the output of one token shows: in a layer of `group` it read `length` positions of its request from `start` on.

    `request` is a number in the batch, `position` the token's place. `length` is negative if the output is the mean of no run of
    positions. `slots` `[length]` are where these positions lie if they are another request's, else None.
    """

    group: int
    layer: int
    request: int
    position: int
    start: int
    length: int
    slots: Int64Array | None = None


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
        prefix_counts: by group, at how many positions of its prefix each request's first token of this forward was seen to
            look, `[bs]`; negative where it was not observed. Of an engine whose `reads` do not say it.
        token_counts: by group, at how many positions before its own each token of this forward was seen to look, `[T]`;
            negative where it was not observed. Of an engine whose `reads` say the same of the first tokens alone.
        outputs: tokens whose output shows that attention read something else than it ought to (`OutputChecks`).
        outputs_compared: of how many tokens the output was held against what they were to read, over layers.
    """

    seq_lens: Any | None = None
    query_lens: Any | None = None
    slots: tuple[TableRead | None, ...] = ()
    prefix_counts: Mapping[int, Any] = field(default_factory=dict)
    token_counts: Mapping[int, Any] = field(default_factory=dict)
    outputs: Sequence[OutputRead] = ()
    outputs_compared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInput:
    """One forward, before it runs. Arrays are numpy or torch on any device, any integer type, copied at once.

    Attributes:
        mode: one of `MODES`.
        runner: index into the header's runners.
        req_pool_indices: `[bs]` rows; row 0 is padding. None if the engine has no rows: the recorder lends each request one.
        request_ids: `[bs]` the 64-bit ids that `Recorder.request` got; of padding, where there are no rows, negative.
        prefix_lens: `[bs]` tokens in the cache before this forward.
        extend_lens: `[bs]` tokens that this forward adds.
        input_ids: `[T]`, T at least sum(extend_lens); padding rows and padding tokens come last.
        positions: `[T]`.
        out_cache_loc: one `[T]` for each of the header's tables: the slot that each token is written to, negative
            for none.
        reads: one for each table: the `[rows, width]` req_to_token tensor itself, a `BlockTable` or a `TableRead`.
        luts: one full-to-SWA tensor `[length]` for each of the header's `lut_lens`.
        table_filled: whether the engine has put this forward's own slots into its tables already. Then those cells are
            read too, of every table in `reads` that is a tensor, and what is not `out_cache_loc` is recorded.
        truth: the scheduler's tokens, or None if the engine does not know them.
        attention: what attention gets, where that is known before the forward; else `Recorder.attention`.
        states: for each of the header's `states` which slots the forward reads and writes, None for none.
        identity: of requests some of whose tokens are computed with another adapter than their own, with which.
        part: of a step that is told as several forwards, how many of them were told before this one.
    """

    mode: Mode
    runner: int = 0
    req_pool_indices: Any = None
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
    states: tuple[StateAccess | None, ...] = ()
    identity: Sequence[IdentityValue] = ()
    part: int = 0


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
    out_cache_loc: tuple[Int64Array, ...] = ()
    reads: tuple[RowRuns, ...] = ()
    luts: tuple[Any, ...] = ()  # as they came, not copied: read before the forward only
    truth: RowRuns | None = None
    misplaced: tuple[RowRuns, ...] = ()  # of each table, cells of its own tokens that are not out_cache_loc
    written: tuple[Int64Array, ...] = ()  # of each group of the runner, its own slots (through its full-to-SWA table)
    watched: tuple[Int64Array, ...] = ()  # of each group of the runner, the slots of the prefix that this forward reads
    sampled_tokens: Int64Array = field(default_factory=lambda: _NOTHING)  # [sum(sampled_lens)]
    sampled_lens: Int64Array = field(default_factory=lambda: _NOTHING)  # [bs], or nothing
    sampled_logprobs: Int64Array = field(default_factory=lambda: _NOTHING)  # as the column
    changes: dict[str, Int64Array] = field(default_factory=dict)  # event columns: of tables and truth tokens
    kv_watched: bool = False
    kv_changes: list[KvChange] = field(default_factory=list)
    submitted_watched: int = 0  # streams whose submitted bytes were compared with the stored ones
    kv_submitted: ByteArray | None = None  # as the event's column; None where they were the same
    attention: dict[str, Int64Array] = field(default_factory=dict)  # event columns
    attention_watched: int = 0  # as in the trace
    attention_groups: set[int] = field(default_factory=set)  # groups of which the slots that attention gets were read
    windows: dict[str, Int64Array] = field(default_factory=dict)  # event columns: reads that are not the window's
    window_watched: int = 0  # sliding groups whose reads were compared with their window
    outputs: dict[str, Int64Array] = field(default_factory=dict)  # event columns: outputs that nothing explains
    outputs_watched: int = 0  # tokens, over layers, whose output was held against what they were to read
    recurrent: dict[str, Int64Array] = field(default_factory=dict)  # event columns
    # Of each of the runner's state pools what a device has found, `[3, bs]`: slots, hashes before and after.
    states: tuple[Int64Array, ...] = ()
    values: dict[str, Int64Array] = field(default_factory=dict)  # event columns: written, and no model's
    identity: dict[str, Int64Array] = field(default_factory=dict)  # event columns: what is not the requests' own
    note: str = ""
    failed: bool = False  # what it wrote is unknown
    part: int = 0  # of a step that was told as several forwards, those before it

    def ints(self, name: str) -> Int64Array:
        """Return a column of `changes`, none where it is not filled: what a replay's tables are brought up to date by."""
        return self.changes.get(name, _NOTHING)

    @property
    def req_pool_indices(self) -> Int64Array:
        """The rows, by the name that they have in a trace."""
        return self.rows

    @property
    def new_lens(self) -> Int64Array:
        """Tokens `[bs]` that the requests add; padding rows add none."""
        return np.where(self.rows == 0, 0, np.maximum(self.extend_lens, 0))


def copy_forward(
    given: ForwardInput,
    header: TraceHeader,
    *,
    number: int,
    time_ns: int,
    hash_tokens: Callable[[Int64Array], Int64Array],
    numbers: SlotNumbers,
    rows: LentRows,
) -> CopiedForward:
    """Copy a forward, at once; `hash_tokens` and `numbers` return tokens and slots as the trace may hold them.

    `rows` has those of an engine without rows of its own.

    Raises:
        ValueError: lengths that do not fit one another or the header; the message names the field.
    """
    if given.mode not in MODES:
        raise ValueError(f"mode is {given.mode!r}, expected one of {', '.join(MODES)}")
    if not 0 <= given.runner < len(header.runners):
        raise ValueError(f"runner is {given.runner}, the header has {len(header.runners)}")
    check_length("out_cache_loc", len(given.out_cache_loc), len(header.tables), "one array for each of the tables")
    check_length("reads", len(given.reads), len(header.tables), "one for each of the tables")
    check_length("luts", len(given.luts), len(header.lut_lens), "one for each of the header's lut_lens")
    request_ids = own_int64(given.request_ids, "request_ids")
    lent = given.req_pool_indices is None
    copied = CopiedForward(
        mode=given.mode,
        runner=given.runner,
        number=number,
        time_ns=time_ns,
        rows=rows.of(request_ids) if lent else own_int64(given.req_pool_indices, "req_pool_indices"),
        request_ids=request_ids,
        prefix_lens=own_int64(given.prefix_lens, "prefix_lens"),
        extend_lens=own_int64(given.extend_lens, "extend_lens"),
        input_ids=hash_tokens(own_int64(given.input_ids, "input_ids")),
        positions=own_int64(given.positions, "positions"),
        luts=given.luts,
        part=given.part,
    )
    for name in ("request_ids", "prefix_lens", "extend_lens"):
        check_length(name, getattr(copied, name).size, copied.rows.size, "one for each of req_pool_indices")
    tokens, most = int(copied.new_lens.sum()), copied.input_ids.size
    if most < tokens:
        raise ValueError(f"input_ids has length {most}, expected at least sum(extend_lens), {tokens}")
    written = [own_int64(loc, "out_cache_loc") for loc in given.out_cache_loc]
    for name, array in (("positions", copied.positions), *(("out_cache_loc", loc) for loc in written)):
        check_length(name, array.size, most, "one for each of input_ids")
    copied.out_cache_loc = tuple(numbers.of_table(table, loc) for table, loc in enumerate(written))
    copied.reads = tuple(
        _numbered(numbers, table, copy_read(read, copied.rows, copied.prefix_lens, _first_read(header, table, copied)))
        for table, read in enumerate(given.reads)
    )
    if given.truth is not None:
        lens = own_int64(given.truth.lens, "TruthTokens.lens")
        flat = hash_tokens(own_int64(given.truth.flat, "TruthTokens.flat"))
        check_length("TruthTokens.lens", lens.size, copied.rows.size, "one for each of req_pool_indices")
        counts = np.maximum(lens, 0)
        check_length("TruthTokens.flat", flat.size, int(counts.sum()), "sum(lens)")
        copied.truth = RowRuns(copied.rows, np.zeros_like(lens), counts, wrapped(flat))
    copied.windows, copied.window_watched = _other_windows(copied, given, header)
    if given.table_filled:
        copied.misplaced = tuple(
            _numbered(numbers, table, _misplaced(read, copied, written[table]))
            for table, read in enumerate(given.reads)
        )
    for group in header.groups:
        mine = group.runner == given.runner
        lut = given.luts[group.lut] if group.lut >= 0 else None
        copied.written += (translate(lut, copied.out_cache_loc[group.table]) if mine else _NOTHING,)
        read = copied.reads[group.table]
        copied.watched += (translate(lut, _window_slots(copied, read, group.window)) if mine else _NOTHING,)
    return copied


def translate(lut: Any, slots: Int64Array) -> Int64Array:
    """Return slots through a full-to-SWA tensor (None: as they are); -1 where it has no entry for one."""
    if lut is None:
        return slots
    table = on_host(lut).reshape(-1)
    if not isinstance(table, np.ndarray):
        return read_runs(table.reshape(1, -1), np.zeros_like(slots), slots, np.ones_like(slots))
    found = np.full_like(slots, -1) if not table.size else table.take(slots, mode="clip").astype(np.int64, copy=False)
    found[(slots < 0) | (slots >= table.size)] = -1
    return found


def _window_slots(forward: CopiedForward, read: RowRuns, window: int) -> Int64Array:
    """Return the slots of the prefix positions that a group with this window reads (0: all of them)."""
    low, counts = window_positions(forward, read, window)
    if np.array_equal(low, read.starts) and np.array_equal(counts, read.counts):
        return read.values
    return read.part(low, counts).values


def window_positions(forward: CopiedForward, read: RowRuns, window: int) -> tuple[Int64Array, Int64Array]:
    """Return `[bs]` the first prefix position that a group with this window reads, and `[bs]` how many of them."""
    first = np.maximum(forward.prefix_lens - window, 0) if window else np.zeros_like(forward.prefix_lens)
    low = np.maximum(read.starts, first)
    high = np.minimum(read.starts + read.counts, forward.prefix_lens)
    return low, np.maximum(high - low, 0)


def _other_windows(
    forward: CopiedForward, given: ForwardInput, header: TraceHeader
) -> tuple[dict[str, Int64Array], int]:
    """Return the reads of groups that are not those of their window, as the event has them, and how many were compared.

    Only of what came as a `TableRead`: if a request reads nothing, nobody said what it reads. Of groups that share
    a table the one with the longest window is compared, or the full one if that reads the table too.
    """
    found: list[tuple[int, int, int, int]] = []
    watched = 0
    for table, read in enumerate(given.reads):
        groups = [(g.window, n) for n, g in enumerate(header.groups) if (g.table, g.runner) == (table, given.runner)]
        if not groups or not isinstance(read, TableRead):
            continue
        window, number = min(groups)
        if not window:
            short = np.flatnonzero((forward.rows != 0) & (forward.prefix_lens > read.last)) if read.last else _NOTHING
            found += [(number, r, int(forward.prefix_lens[r]) - read.last, read.last) for r in short.tolist()]
        if not window or not read.window_observed:
            continue
        window, number = max(groups)
        starts, counts = forward.reads[table].starts, forward.reads[table].counts
        first = np.maximum(forward.prefix_lens - window, 0)
        less = (starts > first) | (starts + counts < forward.prefix_lens)
        long = starts < np.maximum(first - 1, 0)
        unsaid = (forward.rows != 0) & (counts == 0) & (forward.prefix_lens > 0)
        watched += 0 if unsaid.any() else sum(other == window for other, _ in groups)
        wrong = np.flatnonzero((forward.rows != 0) & (counts > 0) & (less | long)).tolist()
        found += [(number, r, int(starts[r]), int(counts[r])) for r in wrong]
    columns = np.array(found, np.int64).reshape(-1, 4).T
    return dict(zip(("window_group", "window_request", "window_start", "window_count"), columns, strict=True)), watched


def _first_read(header: TraceHeader, table: int, forward: CopiedForward) -> Int64Array:
    """Return the first position whose table cell some group of this table reads, the window's predecessor too."""
    windows = [group.window for group in header.groups if group.table == table]
    if not windows or 0 in windows:
        return np.zeros_like(forward.prefix_lens)
    return np.maximum(forward.prefix_lens - max(windows) - 1, 0)


def copy_read(read: Any, rows: Int64Array, prefix_lens: Int64Array, first: Int64Array) -> RowRuns:
    """Return the slots that requests on `rows` read from position `first` on, one of `ForwardInput.reads`; `[bs]` each."""
    if isinstance(read, TableRead):
        given = RowRuns(rows, *(own_int64(getattr(read, name), f"TableRead.{name}") for name in _READ))
        check_read("TableRead", given, rows.size)
        return given._replace(counts=np.maximum(given.counts, 0), values=saturated(given.values))
    if isinstance(read, BlockTable):
        counts = np.where(rows == 0, 0, np.maximum(prefix_lens - first, 0))
        return RowRuns(rows, first, counts, saturated(_copy_blocks(read, first, counts)))
    # Row 0 is padding whatever its prefix says, and a prefix beyond the table's width has no cell there.
    counts = np.where(rows == 0, 0, np.clip(np.minimum(prefix_lens, int(read.shape[1])) - first, 0, None))
    slots = read_runs(read, rows, first, counts)
    int32 = str(read.dtype).removeprefix("torch.") == "int32"  # holds nothing that a state table could not hold
    return RowRuns(rows, first, counts, slots if int32 else saturated(slots))


def _copy_blocks(read: BlockTable, first: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the slots of `counts[r]` positions from `first[r]` on, request by request."""
    if read.block_size < 1:
        raise ValueError(f"BlockTable.block_size is {read.block_size}, expected at least 1")
    if read.blocks is None:
        if counts.any():
            raise ValueError("BlockTable.blocks is None, expected [bs, max_blocks]: some of prefix_lens are not 0")
        return _NOTHING
    blocks = read.blocks if hasattr(read.blocks, "shape") else np.array(read.blocks, np.int64)
    if len(blocks.shape) != 2 or blocks.shape[0] < first.size:
        raise ValueError(f"BlockTable.blocks has shape {list(blocks.shape)}, expected [{first.size}, max_blocks]")
    return read_blocks(blocks, read.block_size, np.arange(first.size, dtype=np.int64), first, counts)


def _numbered(numbers: SlotNumbers, table: int, read: RowRuns) -> RowRuns:
    return read._replace(values=numbers.of_table(table, read.values))


def _misplaced(table: Any, forward: CopiedForward, slots: Int64Array) -> RowRuns:
    """Return the cells of a table tensor at the positions that a forward writes, where they hold another slot, one each."""
    if isinstance(table, TableRead | BlockTable):
        return NO_RUNS
    lens = forward.new_lens
    rows, positions = np.repeat(forward.rows, lens), ragged_index(forward.prefix_lens, lens)
    slots = slots[: positions.size]
    inside = (positions >= 0) & (positions < int(table.shape[1])) & (slots >= 0)
    rows, positions, one = rows[inside], positions[inside], np.ones(int(inside.sum()), np.int64)
    stands = read_runs(table, rows, positions, one)
    wrong = stands != slots[inside]
    return RowRuns(rows[wrong], positions[wrong], one[wrong], saturated(stands[wrong]))


def check_read(name: str, read: RowRuns, bs: int) -> None:
    """Raise `ValueError` for a `TableRead` whose arrays do not fit `bs` requests, or one another."""
    check_length(f"{name}.starts", read.starts.size, bs, "one for each of req_pool_indices")
    check_length(f"{name}.counts", read.counts.size, bs, "one for each of req_pool_indices")
    check_length(f"{name}.slots", read.values.size, int(np.maximum(read.counts, 0).sum()), "sum(counts)")


def check_length(name: str, came: int, expected: int, what: str) -> None:
    """Raise `ValueError` for an array of another length than expected; `what` says why so many."""
    if came != expected:
        raise ValueError(f"{name} has length {came}, expected {expected}: {what}")
