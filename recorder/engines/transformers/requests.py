"""Which requests of the engine are known, with the ids and rows that the trace calls them by."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...capture.host_arrays import Int64Array


@dataclass(slots=True, kw_only=True)
class KnownRequest:
    """One request: its 64-bit id, its row (0: none now), and what was last seen of it.

    `blocks[g]` counts the blocks of group g's table that alloc events have told of.
    """

    name: str
    request_id: int
    row: int = 0
    last_forward: int = -1
    blocks: list[int] = field(default_factory=list)
    prompt: Any = None
    tokens: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    num_tokens: int = 0

    def truth(self, initial_tokens: list[int], generated_tokens: list[int]) -> Int64Array:
        """Return prompt and output so far; only what is new since the last call is converted."""
        total = len(initial_tokens) + len(generated_tokens)
        if self.prompt is not initial_tokens or total < self.num_tokens:
            self.prompt = initial_tokens  # another list: the request was reset and starts anew from a longer prompt
            self.tokens = np.array(initial_tokens, np.int64)
            self.num_tokens = len(initial_tokens)
        fresh = generated_tokens[self.num_tokens - len(initial_tokens) :]
        if total > self.tokens.size:
            longer = np.empty(max(total, 2 * self.tokens.size), np.int64)
            longer[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = longer
        self.tokens[self.num_tokens : total] = fresh
        self.num_tokens = total
        return self.tokens[:total]


class KnownRequests:
    """The engine's live requests by name; rows 1 and up are lent to those that run.

    A row goes back when its request retires. Where all are lent, the request that has not run for longest gives up
    its row, and gets another when it runs again: the table's changes then say all of it anew.
    """

    __slots__ = ("_by_name", "_free_rows", "_next_id", "_num_groups")

    def __init__(self, *, num_rows: int, num_groups: int) -> None:
        self._by_name: OrderedDict[str, KnownRequest] = OrderedDict()
        self._free_rows = list(range(num_rows - 1, 0, -1))
        self._next_id = 0
        self._num_groups = num_groups

    def get(self, name: str) -> KnownRequest | None:
        """Return a known request."""
        return self._by_name.get(name)

    def admit(self, name: str) -> KnownRequest:
        """Make a request known under a new id."""
        request = KnownRequest(name=name, request_id=self._next_id, blocks=[0] * self._num_groups)
        self._next_id += 1
        self._by_name[name] = request
        return request

    def run(self, request: KnownRequest, forward: int) -> int:
        """Return the row under which a request takes part in a forward.

        Raises:
            ValueError: the forward has more requests than there are rows.
        """
        request.last_forward = forward
        self._by_name.move_to_end(request.name)
        if not request.row:
            if not self._free_rows:
                idle = next((r for r in self._by_name.values() if r.row and r.last_forward != forward), None)
                if idle is None:
                    raise ValueError(f"forward {forward} has more requests than the trace has rows")
                self._free_rows.append(idle.row)
                idle.row = 0
            request.row = self._free_rows.pop()
        return request.row

    def retire(self, name: str) -> None:
        """Forget a request; its row is free for another."""
        request = self._by_name.pop(name, None)
        if request is not None and request.row:
            self._free_rows.insert(0, request.row)
