"""A piece of a batch as one stretch of 64-bit words: its columns as they are, what follows from them, its descriptors."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ....kernels.gpu import step
from ....recorder.state.writes import KvChanges
from ....recorder.trace.batch import TraceBatch
from ....recorder.trace.header import TraceHeader
from .changed_cells import changed_cells, changed_luts
from .changed_kv import packed_changes
from .screening import gathered
from .state import DeviceState
from .words import Words, address_of

Int64Array = npt.NDArray[np.int64]

TILE: Final = 512  # prefix positions that a program judges at once
_COLUMNS: Final = (
    (step.STEP_ROWS, "req_pool_indices"),
    (step.STEP_REQUEST_IDS, "request_ids"),
    (step.STEP_PREFIX, "prefix_lens"),
    (step.STEP_EXTEND, "extend_lens"),
    (step.STEP_TRUTH_LENS, "truth_lens"),
    (step.STEP_INPUT_IDS, "input_ids"),
    (step.STEP_POSITIONS, "positions"),
    (step.STEP_LOC, "out_cache_loc"),
    (step.STEP_SAMPLED, "sampled_tokens"),
    (step.STEP_KV, "kv_bytes"),
)
_ADDRESSES: Final = [
    *(place for place, _ in _COLUMNS),
    step.STEP_EXPECTED,
    step.STEP_OFFSETS,
    step.STEP_SAMPLED_OFFSETS,
    step.STEP_CELLS,
    step.STEP_LUT_CELLS,
    *range(step.STEP_KV_CHANGES, step.STEP_KV_CHANGES + 2 * step.STEP_KV_WORDS, 2),
    *range(step.STEP_GROUPS, step.STEP_GROUPS + step.MAX_GROUPS * step.STEP_GROUP_WORDS, step.GROUP_DIVERGENCE),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A piece made ready: `words`, of which the first are the `block`, to be filled until they are written.

    `entries` `[steps, MAX_GROUPS] int64` counts the prefix entries that each step reads, `written` `[steps] int64` the
    tokens that are no padding; `write_rows` says how many rows
    the largest step's writes may leave, `most_tokens` and `most_requests` how much scratch it needs; `special` are the
    steps in which bytes changed without a write.
    """

    words: Words
    block: Int64Array
    descriptors_at: int
    steps: int
    entries: Int64Array
    written: Int64Array
    write_rows: int
    most_tokens: int
    most_requests: int
    special: list[int]


def pack(
    batch: TraceBatch,
    header: TraceHeader,
    state: DeviceState,
    *,
    first: int,
    end: int,
    events: Int64Array,
    kv_changes: dict[int, KvChanges],
    expected: tuple[Int64Array, npt.NDArray[np.bool_]] | None,
    unknown: list[bool],
    serial: int,
    tile: int,
) -> Packed:
    """Make the events `first` to `end` of a batch ready for the device.

    Args:
        batch, header, state: what they belong to.
        first, end: the piece's events, by their place in the batch.
        events: `[steps] int64`: those that the kernels have something to do for.
        kv_changes: checked changes of bytes, by place in the batch.
        expected: what the oracle foretells, `[input_ids of the piece] int64`, and of which events `[end - first] bool`.
        unknown: whether some slots of each group may be unknown.
        serial: a number above all that were given to steps before.
        tile: positions that a program judges at once.
    """
    words = Words()
    block = np.zeros(step.PIECE_WORDS, np.int64)
    words.add(block)
    out = np.zeros((len(events), step.STEP_WORDS), np.int64)
    at = words.add_addresses(out, _ADDRESSES)
    kinds = batch.kinds
    is_forward = np.fromiter((kinds[event] == "forward" for event in events.tolist()), np.bool_, len(events))
    forwards = events[is_forward]
    runners = np.where(is_forward, batch.scalar_ints("runner")[events], 0)
    out[:, step.STEP_MACHINE] = state.machines.data_ptr() + 8 * step.MACHINE_WORDS * runners
    out[:, step.STEP_SERIAL] = serial + np.arange(len(events))
    out[:, step.STEP_EVENT] = batch.scalar_ints("event")[events] + 1
    out[:, step.STEP_FORWARD] = batch.scalar_ints("forward")[events]
    flags = [[unknown[index] for index in state.groups_of(runner)] for runner in range(len(header.runners))]
    bits = np.array([sum(1 << number for number, one in enumerate(of) if one) for of in flags], np.int64)
    out[:, step.STEP_UNKNOWN] = bits[runners]
    for place, name in _COLUMNS:
        values, offsets = batch.values(name), batch.offsets(name)
        begin = int(offsets[first])
        where = words.add(values[begin : int(offsets[end])])
        size = 8 if name == "kv_bytes" else 1
        lens = (offsets[events + 1] - offsets[events]) * is_forward
        out[:, place] = np.where(lens > 0, address_of(where) + (offsets[events] - begin) * 8 // size, 0)
    bs = np.where(is_forward, np.diff(batch.offsets("req_pool_indices"))[events], 0)
    tokens = np.where(is_forward, np.diff(batch.offsets("input_ids"))[events], 0)
    out[:, step.STEP_REQUESTS], out[:, step.STEP_TOKENS] = bs, tokens
    out[:, step.STEP_SEARCH] = np.ceil(np.log2(bs + 1)).astype(np.int64) + 1
    entries = _add_requests(batch, header, state, words, out, is_forward, forwards, tile)
    if expected is not None:
        inputs, asked = expected
        begins = batch.offsets("input_ids")[events] - batch.offsets("input_ids")[first]
        out[:, step.STEP_EXPECTED] = np.where(asked[events - first], address_of(words.add(inputs)) + 8 * begins, 0)
    _add_cells(batch, state, words, out, events)
    special = [number for number, event in enumerate(events.tolist()) if event in kv_changes]
    for number in special:
        packed = packed_changes(batch.event(int(events[number])), header, int(runners[number]), words, state)
        out[number, step.STEP_KV_CHANGES : step.STEP_KV_CHANGES + 2 * step.STEP_KV_WORDS] = packed
    groups = np.array([len(of) for of in flags], np.int64)[runners]
    return Packed(
        words=words,
        block=block,
        descriptors_at=at,
        steps=len(events),
        entries=entries,
        written=out[:, step.STEP_WRITTEN].copy(),
        write_rows=int((2 * out[:, step.STEP_WRITTEN] * groups).max(initial=0)),
        most_tokens=int(tokens.max(initial=1)),
        most_requests=int(bs.max(initial=1)),
        special=special,
    )


def _add_requests(
    batch: TraceBatch,
    header: TraceHeader,
    state: DeviceState,
    words: Words,
    out: Int64Array,
    is_forward: npt.NDArray[np.bool_],
    forwards: Int64Array,
    tile: int,
) -> Int64Array:
    """Add the prefix sums over requests; return the entries that each step reads, `[steps, MAX_GROUPS] int64`."""
    bs = out[is_forward, step.STEP_REQUESTS]
    rows, prefix, extend = (
        gathered(batch, name, forwards) for name in ("req_pool_indices", "prefix_lens", "extend_lens")
    )
    runners = np.repeat(batch.scalar_ints("runner")[forwards], bs)
    begins = np.cumsum(bs) - bs
    real = rows != 0
    extend = np.where(real, np.maximum(extend, 0), 0)

    def add(values: Int64Array, place: int) -> Int64Array:
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
        where = words.add(sums)
        out[is_forward, place] = address_of(where) + 8 * begins
        out[is_forward, place + 1] = sums[begins]
        found: Int64Array = sums[begins + bs] - sums[begins]
        return found

    out[is_forward, step.STEP_WRITTEN] = add(extend, step.STEP_OFFSETS)
    sampled = np.zeros(len(rows), np.int64)
    samplers = np.diff(batch.offsets("sampled_lens"))[forwards] > 0
    sampled[np.repeat(samplers, bs)] = gathered(batch, "sampled_lens", forwards)
    add(np.where(real, sampled, 0), step.STEP_SAMPLED_OFFSETS)
    entries = np.zeros((len(out), step.MAX_GROUPS), np.int64)
    of_runner = [state.groups_of(runner) for runner in range(len(header.runners))]
    for number in range(max(map(len, of_runner), default=0)):
        reads, looked = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for runner, groups in enumerate(of_runner):
            if number >= len(groups):
                continue
            group = header.groups[groups[number]]
            mine = real & (runners == runner)
            reads[mine] = np.minimum(prefix[mine], group.window or prefix.max(initial=0))
            if group.lut >= 0:
                full = any(other.table == group.table and not other.window for other in header.groups)
                start = 0 if full else np.maximum(prefix[mine] - group.window - 1, 0)
                looked[mine] = prefix[mine] + extend[mine] - start
        place = step.STEP_GROUPS + number * step.STEP_GROUP_WORDS
        out[is_forward, place + step.GROUP_NUM_TILES] = add(-(-reads // tile), place + step.GROUP_TILES)
        place += step.GROUP_DIVERGENCE
        if looked.any():
            out[is_forward, place + step.GROUP_NUM_TILES] = add(-(-looked // tile), place)
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(reads)])
        entries[is_forward, number] = sums[begins + bs] - sums[begins]
    return entries


def _add_cells(batch: TraceBatch, state: DeviceState, words: Words, out: Int64Array, events: Int64Array) -> None:
    for place, (cells, offsets) in (
        (step.STEP_CELLS, changed_cells(batch, state, events)),
        (step.STEP_LUT_CELLS, changed_luts(batch, state, events)),
    ):
        counts = np.diff(offsets)
        out[:, place] = np.where(counts > 0, address_of(words.add(cells)) + 16 * offsets[:-1], 0)
        out[:, place + 1] = counts
