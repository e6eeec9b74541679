"""What the scheduler believes each request's tokens to be, told as they grow."""

import weakref
from collections.abc import Sequence

import numpy as np

from ...trace.header import StateTable
from ..host_arrays import Int64Array
from .forward import TokenSource

_NOTHING = np.empty(0, np.int64)


class TruthBook:
    """What of each row's tokens the trace has: whose they are, and how many.

    A row that is another request's, or a request that has fewer tokens than before, is told from the beginning. No
    request is kept alive: its tokens may be many, and its row may stay unused for long.
    """

    def __init__(self, table: StateTable | None) -> None:
        self._table = table
        self._told: dict[int, tuple[weakref.ref[TokenSource], int]] = {}

    def changes(
        self, rows: Int64Array, truth: Sequence[TokenSource] | None, lens: Sequence[int]
    ) -> dict[str, Int64Array]:
        """Return a forward's truth columns, its tokens as they are; nothing where the engine cannot tell.

        Args:
            rows: `[bs]`; row 0 is padding.
            truth: the requests, at most `bs`.
            lens: how many tokens each had; one that has fewer by now is told with those.
        """
        if truth is None or self._table is None:
            return {}
        truth_lens = np.zeros(rows.size, np.int64)
        truth_lens[: len(lens)] = lens
        at, starts, counts, tokens = [], [], [], []
        for number, (row, source, had) in enumerate(zip(rows.tolist(), truth, lens, strict=False)):
            known, told = self._told.get(row, (None, 0))
            start = told if known is not None and known() is source and told <= had else 0
            stop, count = min(had, self._table.width), had
            if 0 < row < self._table.rows and start < stop:
                found = source.tokens(start, stop)
                if found.size < stop - start:
                    truth_lens[number] = count = start + found.size
                if found.size:
                    at.append(row)
                    starts.append(start)
                    counts.append(found.size)
                    tokens.append(found)
            self._told[row] = (weakref.ref(source), count)
        return {
            "truth_lens": truth_lens,
            "truth_row": np.array(at, np.int64),
            "truth_start": np.array(starts, np.int64),
            "truth_count": np.array(counts, np.int64),
            "truth_tokens": np.concatenate(tokens) if tokens else _NOTHING,
        }

    def forget(self) -> None:
        """Tell everything anew."""
        self._told.clear()
