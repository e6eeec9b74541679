"""The violation log: where verify and write put their rows."""

from typing import Any, NamedTuple, Self

import numpy as np

from ..arrays import filled, require_either
from ..constants import (
    VIOLATION_EXPECTED_AUX,
    VIOLATION_EXPECTED_TOKEN,
    VIOLATION_FAIL_REASON,
    VIOLATION_FIELDS,
    VIOLATION_POSITION,
    VIOLATION_SLOT,
    VIOLATION_STORED_CHAIN_HASH,
    VIOLATION_STORED_TOKEN,
    VIOLATION_TAG,
)
from ..dispatch import Out64, Out64x2, primitive
from .hash.reference import bump


class LogArrays(NamedTuple):
    """The arrays of a `ViolationLog`, as loops fill them."""

    rows: Out64x2  # [capacity, 8]
    entries: Out64  # [capacity]: the plan entry (verify) or token (write) of each row
    write_index: Out64  # [1]
    out_of_range: Out64  # [1]: how many slots, predecessors, seeds or offsets could not be followed


class ViolationLog(LogArrays):
    """Rows in entry order, filled once: rows past the capacity are lost while `write_index` keeps counting.

    Torch tensors, or packed numpy arrays. Who must lose no row gives verify as many rows as entries and write twice as many.
    Raises `TypeError` and `ValueError` for other shapes and dtypes.
    """

    __slots__ = ()

    def __new__(cls, **arrays: Any) -> Self:
        """Check shapes and dtypes."""
        log = super().__new__(cls, **arrays)
        require_either("violations.rows", log.rows, np.int64, 2, written=True)
        if log.rows.shape[1] != VIOLATION_FIELDS:
            raise ValueError(f"violations.rows has {log.rows.shape[1]} fields, expected {VIOLATION_FIELDS}")
        for name, length in (("entries", len(log.rows)), ("write_index", 1), ("out_of_range", 1)):
            require_either(f"violations.{name}", getattr(log, name), np.int64, 1, length=length, written=True)
        return log

    @classmethod
    def allocate(cls, capacity: int, device: Any = None) -> Self:
        """Return an empty log for `capacity` rows, 0 only counts: numpy arrays, or torch tensors on `device`."""
        if capacity < 0:
            raise ValueError(f"violation capacity is {capacity}, expected at least 0")
        return cls(
            rows=filled((capacity, VIOLATION_FIELDS), np.int64, 0, device),
            entries=filled(capacity, np.int64, 0, device),
            write_index=filled(1, np.int64, 0, device),
            out_of_range=filled(1, np.int64, 0, device),
        )

    def clear(self) -> None:
        """Forget all rows; their memory is left as it is."""
        self.write_index[0] = 0
        self.out_of_range[0] = 0

    @property
    def num_rows(self) -> int:
        """How many rows are there to read."""
        return max(0, min(int(self.write_index[0]), len(self.rows)))


@primitive()
def append_violation(
    log: LogArrays,
    entry: int,
    tag: int,
    slot: int,
    position: int,
    stored_token: int,
    expected_token: int,
    stored_chain_hash: int,
    expected_aux: int,
    fail_reason: int,
) -> None:
    """Put one row down where there is room, and count it in any case."""
    at, rows = int(log.write_index[0]), log.rows
    if 0 <= at < len(rows):
        rows[at, VIOLATION_TAG] = tag
        rows[at, VIOLATION_SLOT] = slot
        rows[at, VIOLATION_POSITION] = position
        rows[at, VIOLATION_STORED_TOKEN] = stored_token
        rows[at, VIOLATION_EXPECTED_TOKEN] = expected_token
        rows[at, VIOLATION_STORED_CHAIN_HASH] = stored_chain_hash
        rows[at, VIOLATION_EXPECTED_AUX] = expected_aux
        rows[at, VIOLATION_FAIL_REASON] = fail_reason
        log.entries[at] = entry
    bump(log.write_index, 1)
