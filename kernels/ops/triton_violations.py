"""Violation rows on the device: in the reference's order, whatever programs find them, and no row but by its rank.

Two launches check: the first counts the rows of each unit of work, the second, which mostly finds nothing to do, sums the
counts before a unit and checks that unit again to put its rows down. Counts, not rows, meet in memory, so that a log that
overflows keeps the first rows and counts all.
"""

import triton
import triton.language as tl

from ..constants import VIOLATION_FIELDS

_FIELDS = tl.constexpr(VIOLATION_FIELDS)
_BLOCK = tl.constexpr(2048)


@triton.jit
def store_rows(log, at, found, entry, values, reason):
    """Put down one row for each lane that `found` one, at its place `at`, where the log has it.

    `log` are its rows, entries, capacity and tag; `values` slot, position, token, expected token, chain hash, expected aux.
    """
    rows, entries, capacity, tag = log
    slot, position, token, expected_token, chain_hash, expected_aux = values
    fits = found & (at >= 0) & (at < capacity)
    row = rows + tl.where(fits, at, 0) * _FIELDS
    tl.store(row, slot * 0 + tag, mask=fits)
    tl.store(row + 1, slot, mask=fits)
    tl.store(row + 2, position, mask=fits)
    tl.store(row + 3, token, mask=fits)
    tl.store(row + 4, expected_token, mask=fits)
    tl.store(row + 5, chain_hash, mask=fits)
    tl.store(row + 6, expected_aux, mask=fits)
    tl.store(row + 7, reason, mask=fits)
    tl.store(entries + tl.where(fits, at, 0), entry, mask=fits)


@triton.jit
def sum_before(counts, end):
    """The sum of the first `end` int32 counts, as int64."""
    total = tl.zeros([_BLOCK], tl.int64)
    for start in range(0, end, _BLOCK):
        i = start + tl.arange(0, _BLOCK)
        total += tl.load(counts + i, mask=i < end, other=0).to(tl.int64)
    return tl.sum(total)


@triton.jit
def add_where_any(counter, amount):
    """Add to a counter [1] int64, without touching it for nothing, nor waiting for what was stored before."""
    if amount != 0:
        tl.atomic_add(counter, amount, sem="relaxed")
