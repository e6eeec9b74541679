"""What attention got in a forward: where it differs from what the forward reads and writes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.capture.changes import RowRuns, run_differences
from ..trace.header import PoolGroup, TraceHeader
from ..trace.schema import ATTENTION_LENS, ATTENTION_SLOTS, OUTPUT_COLUMNS
from .forward_event import attention_columns
from .forward_input import (
    AttentionInput,
    CopiedForward,
    OutputRead,
    TableRead,
    check_length,
    check_read,
    window_positions,
)
from .host_arrays import own_int64, ragged_index, read_blocks, read_runs, saturated
from .slot_numbers import SlotNumbers


def paged_read(block_tables: Any, block_size: int, ends: Any, *, starts: Any | None = None) -> TableRead:
    """Return the slots that attention reads through a block table, `[at least bs, max_blocks]` of any integer type.

    Request r reads the positions from `starts[r]` (None: 0) to before `ends[r]`, its seq_len, in the slots that `read_blocks`
    says. The table is numpy's or torch's on any device; only the cells that are read are brought to the host.
    """
    first, counts = _reach(ends, starts)
    slots = read_blocks(block_tables, block_size, np.arange(first.size, dtype=np.int64), first, counts)
    return TableRead(starts=first, counts=counts, slots=slots)


def row_read(table: Any, rows: Any, ends: Any, *, starts: Any | None = None) -> TableRead:
    """Return the slots that attention reads in rows `[bs]` of a req_to_token table; the rest as in `paged_read`."""
    first, counts = _reach(ends, starts)
    return TableRead(starts=first, counts=counts, slots=read_runs(table, own_int64(rows), first, counts))


def indexed_read(indptr: Any, indices: Any, *, starts: Any | None = None) -> TableRead:
    """Return the slots that attention reads through page indices of one token each.

    Request r reads `indices[indptr[r] : indptr[r + 1]]`, whose first is the slot of position `starts[r]` (None: 0).
    """
    bounds = own_int64(indptr)
    counts = np.diff(bounds)
    begin, end = (int(bounds[0]), int(bounds[-1])) if bounds.size else (0, 0)
    return TableRead(
        starts=np.zeros_like(counts) if starts is None else starts, counts=counts, slots=indices[begin:end]
    )


def _reach(ends: Any, starts: Any | None) -> tuple[Int64Array, Int64Array]:
    """Return `[bs]` the first position of each request, none negative, and `[bs]` how many it reads from there."""
    last = own_int64(ends)
    first = np.zeros_like(last) if starts is None else np.maximum(own_int64(starts), 0)
    return first, np.maximum(last - first, 0)


def add_attention(forward: CopiedForward, given: AttentionInput, header: TraceHeader, numbers: SlotNumbers) -> None:
    """Add to the forward's event what attention got; `numbers` gives its slots as the trace has them.

    Raises:
        ValueError: lengths that do not fit the forward or the header; the message names the field.
    """
    bs = forward.rows.size
    if given.seq_lens is not None or given.query_lens is not None:
        for name, lens in (("seq_lens", given.seq_lens), ("query_lens", given.query_lens)):
            own = np.full(bs, -1, np.int64) if lens is None else np.maximum(own_int64(lens), -1)
            check_length(f"AttentionInput.{name}", own.size, bs, "one for each of req_pool_indices")
            forward.attention[f"attention_{name}"] = own
        forward.attention_watched |= ATTENTION_LENS
    for number, counts in given.prefix_counts.items():
        if header.groups[number].runner == forward.runner:
            check_length(f"AttentionInput.prefix_counts[{number}]", len(counts), bs, "one for each of req_pool_indices")
            own, first = own_int64(counts), np.arange(bs, dtype=np.int64)
            _add_window(forward, header.groups[number], number, LooksBack(first, forward.prefix_lens, own))
            live = forward.rows != 0
            forward.window_watched += bool(header.groups[number].window) and not (live & (own < 0)).any()
    for number, counts in given.token_counts.items():
        if header.groups[number].runner == forward.runner:
            requests = np.repeat(np.arange(bs, dtype=np.int64), forward.new_lens)
            name = f"AttentionInput.token_counts[{number}]"
            check_length(name, len(counts), requests.size, "one for each new token")
            positions = ragged_index(forward.prefix_lens, forward.new_lens)
            _add_window(forward, header.groups[number], number, LooksBack(requests, positions, own_int64(counts)))
    _add_outputs(forward, given, header, numbers)
    if not given.slots:
        return
    check_length("AttentionInput.slots", len(given.slots), len(header.groups), "one for each of the header's groups")
    for number, got in enumerate(given.slots):
        if got is None or header.groups[number].runner != forward.runner:
            continue
        slots = saturated(numbers.of_group(number, own_int64(got.slots)))
        read = RowRuns(np.arange(bs, dtype=np.int64), own_int64(got.starts), own_int64(got.counts), slots)
        check_read(f"AttentionInput.slots[{number}]", read, bs)
        for found in _differing(forward, header.groups[number], number, read):
            _add_slots(forward, number, found)
    forward.attention_groups.update(group for group, read in enumerate(given.slots) if read is not None)
    if forward.attention_groups >= {g for g, group in enumerate(header.groups) if group.runner == forward.runner}:
        forward.attention_watched |= ATTENTION_SLOTS


def _add_slots(forward: CopiedForward, group: int, found: RowRuns) -> None:
    for name, values in attention_columns(np.full(found.rows.size, group, np.int64), found).items():
        forward.attention[name] = np.concatenate((forward.attention.get(name, values[:0]), values))


def _add_outputs(forward: CopiedForward, given: AttentionInput, header: TraceHeader, numbers: SlotNumbers) -> None:
    """Add what outputs show to have been read otherwise than it was to be, once for each request and group.

    What else was seen of what attention reads stands before it, and a read that is explained before one that is not.
    """
    forward.outputs_watched += given.outputs_compared
    bs, ends = forward.rows.size, forward.prefix_lens + forward.new_lens
    lens = forward.attention.get("attention_seq_lens", np.full(bs, -1, np.int64))
    off = np.flatnonzero((lens >= 0) & (lens != ends)).tolist()
    told = {(group, r) for r in off for group in range(len(header.groups))}
    told |= {*zip(*(forward.windows.get(f"window_{name}", ()) for name in ("group", "request")), strict=True)}
    for one in sorted(given.outputs, key=lambda one: one.length < 0):
        known = 0 <= one.request < bs and 0 <= one.group < len(header.groups)
        if not known or header.groups[one.group].runner != forward.runner:
            raise ValueError(
                f"AttentionInput.outputs name request {one.request} and group {one.group}, not of this forward"
            )
        if (one.group, one.request) not in told:
            told.add((one.group, one.request))
            _add_output(forward, one, header.groups[one.group], numbers)


def _add_output(forward: CopiedForward, one: OutputRead, group: PoolGroup, numbers: SlotNumbers) -> None:
    request, position, start, length = (np.array([n], np.int64) for n in one[2:6])
    if one.length < 0:
        for name, value in zip(OUTPUT_COLUMNS, (one.group, one.request, one.position, one.layer), strict=True):
            forward.outputs[name] = np.append(forward.outputs.get(name, request[:0]), value)
    elif one.slots is not None:
        slots = saturated(numbers.of_group(one.group, own_int64(one.slots)))
        _add_slots(forward, one.group, RowRuns(request, start, length, slots))
    else:
        later = one.start + one.length - one.position - 1
        if later:  # as if the request ended so much later or earlier
            end = forward.prefix_lens + forward.new_lens + later
            lens = forward.attention.get("attention_seq_lens", np.full_like(end, -1))
            forward.attention["attention_seq_lens"] = np.where(
                np.arange(end.size) == one.request, np.maximum(end, 0), lens
            )
        _add_window(forward, group, one.group, LooksBack(request, position, np.maximum(position - start, 0)))


class LooksBack(NamedTuple):
    """At how many positions before its own each of some tokens looks, `[n]` each.

    `requests` ascend, as they are numbered in the forward; `counts` are negative where it was not observed.
    """

    requests: Int64Array
    positions: Int64Array
    counts: Int64Array


def _add_window(forward: CopiedForward, group: PoolGroup, number: int, told: LooksBack) -> None:
    """Add where tokens look at more or less before them than a group's window has, of each request the first such token."""
    requests, positions, counts = told
    whole = np.minimum(positions, group.window) if group.window else positions
    wrong = np.flatnonzero((forward.rows[requests] != 0) & (counts >= 0) & (counts != whole))
    wrong = wrong[np.unique(requests[wrong], return_index=True)[1]]
    columns = np.full(wrong.size, number, np.int64), requests[wrong], (positions - counts)[wrong], counts[wrong]
    for name, values in zip(("group", "request", "start", "count"), columns, strict=True):
        before = forward.windows.get(f"window_{name}", values[:0])
        forward.windows[f"window_{name}"] = np.concatenate((before, values))


def _differing(forward: CopiedForward, group: PoolGroup, number: int, read: RowRuns) -> Iterator[RowRuns]:
    """Yield where attention got other slots of a group than the block table's, then other than those written."""
    low, prefix_counts = window_positions(forward, forward.reads[group.table], group.window)
    for starts, counts, held in (
        (low, prefix_counts, forward.watched[number]),
        (forward.prefix_lens, forward.new_lens, forward.written[number]),
    ):
        # Padding holds nothing; its tokens come last.
        yield run_differences(read, RowRuns(read.rows, np.where(forward.rows == 0, -1, starts), counts, held))
