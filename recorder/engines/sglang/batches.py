"""Which requests a forward is of, looked up where they are others than in the last one.

The engine's thread takes down objects alone; what they hold is read by the recorder's own thread, where there is one.
"""

from array import array
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np

from ...capture.host_arrays import Int64Array
from .requests import KnownRequest, RequestBook, TokenLists

_PROMPT: Final = attrgetter("req.origin_input_ids")
_OUTPUT: Final = attrgetter("req.output_ids")


class KnownBatch:
    """The requests of a batch of `rows` rows, padding included; a `ForwardRequests`.

    `outputs` are the lists to which the scheduler appends what it samples, None where a request is not known; `lens` is
    how many tokens each of them had at `moment`.
    """

    __slots__ = (
        "_ids",
        "_prompt_lens",
        "_prompts",
        "_requests",
        "_truth",
        "lens",
        "moment",
        "outputs",
        "rids",
        "rows",
        "version",
    )

    def __init__(self, rids: Sequence[str], rows: int, book: RequestBook) -> None:
        self.rids = list(rids)
        self.rows = rows
        self.version = book.version
        requests = list(map(book.get, self.rids[:rows]))
        known = None not in requests
        self._requests: list[KnownRequest] = requests if known else []  # type: ignore[assignment]  # no None in it
        self._prompts = list(map(_PROMPT, self._requests))
        self.outputs: list[Any] | None = list(map(_OUTPUT, self._requests)) if known else None
        self._ids: Int64Array | None = None if known else book.ids(self.rids, rows)
        self._truth: list[TokenLists] | None = None
        self._prompt_lens: Int64Array | None = None
        self.moment = -1
        self.lens = b""

    def output_lens(self, moment: int) -> bytes:
        """Return how many tokens each request has sampled by a moment, in which none is added, as int64.

        It is asked for thrice in a step, of which two are one moment. No loop of Python's own: this is the engine's
        thread.
        """
        if moment != self.moment:
            self.moment = moment
            self.lens = b"" if self.outputs is None else array("q", map(len, self.outputs)).tobytes()
        return self.lens

    @property
    def ids(self) -> Int64Array:
        """`[rows]`, -1 for padding."""
        if self._ids is None:
            self._ids = np.full(self.rows, -1, np.int64)
            self._ids[: len(self._requests)] = [request.request_id for request in self._requests]
        return self._ids

    @property
    def truth(self) -> list[TokenLists] | None:
        """The requests' tokens, in the lists that the scheduler had when the batch was looked up; None for unknown."""
        if self._truth is None and self.outputs is not None:
            self._truth = [request.lists(prompt, output) for request, prompt, output in self._parts()]
        return self._truth

    def _parts(self) -> Iterable[tuple[KnownRequest, Any, Any]]:
        return zip(self._requests, self._prompts, self.outputs or (), strict=True)

    @property
    def known_lens(self) -> Int64Array:
        """`[n]` tokens of each prompt."""
        if self._prompt_lens is None:
            self._prompt_lens = np.array(list(map(len, self._prompts)), np.int64)
        return self._prompt_lens

    def stale(self) -> bool:
        """Say whether the scheduler keeps tokens in other lists than it did."""
        if self.outputs is None:
            return False
        prompts, outputs = map(_PROMPT, self._requests), map(_OUTPUT, self._requests)
        kept = zip(prompts, self._prompts, outputs, self.outputs, strict=True)
        return any(prompt is not had or output is not grew for prompt, had, output, grew in kept)

    def sampled(self, before: bytes, after: bytes) -> tuple[Int64Array, Int64Array]:
        """Return what each request has got from length `before` to `after`, one after another, and how many each."""
        spans = [np.frombuffer(lens, np.int64).tolist() for lens in (before, after)]
        sources = [request.lists(prompt, output) for request, prompt, output in self._parts()]
        prompts = map(len, self._prompts)
        parts = zip(sources, prompts, *spans, strict=True)
        tokens = [source.tokens(prompt + first, prompt + last) for source, prompt, first, last in parts]
        lens = np.array(list(map(len, tokens)), np.int64)
        return np.concatenate((np.empty(0, np.int64), *tokens)), lens


class KnownBatches:
    """Looks a batch's requests up where they are others than the last time."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self.last = KnownBatch((), 0, book)

    def of(self, rids: Sequence[str] | None, rows: int) -> KnownBatch:
        """Return the requests of a batch of `rows` rows, padding included."""
        last = self.last
        if last.rids == rids and last.rows == rows and last.version == self._book.version:
            return last
        found = self.last = KnownBatch(rids or (), rows, self._book)
        return found

    def refresh(self) -> None:
        """Look again where the scheduler keeps tokens in other lists than before; any thread may ask."""
        if self.last.stale():
            self._book.version += 1
