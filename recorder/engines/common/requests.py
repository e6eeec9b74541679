"""The requests of an engine as a trace numbers them: ids, rows, and the tokens that the engine believes them to have."""

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.forward_input import mode_by_lens as mode_by_lens  # their callers find them here
from ...capture.forward_input import truth_tokens as truth_tokens
from ...capture.slot_numbers import request_id_of as request_id_of

logger = logging.getLogger("kvcanary")


def logprobs_or_none(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what an engine says of log-probabilities, nothing if it keeps them otherwise than is known: all else is recorded."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001  # whatever an engine's objects raise
        _warn_once(f"kvcanary: log-probabilities are not recorded: {type(error).__name__}: {error}"[:200])
        return {}


@functools.lru_cache(maxsize=16)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


class TokenList:
    """The tokens of one request so far, `count` of them; none is converted twice."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, np.int64)
        self.count = 0
        self._prompt: Any = None  # the engine's own list, for `follow`

    def __len__(self) -> int:
        return self.count

    def begin(self, tokens: Sequence[int] | Int64Array) -> Int64Array:
        """Start over from these tokens; return them as they are kept, to be changed in place."""
        self._tokens = np.array(tokens, np.int64)
        self.count = self._tokens.size
        return self._tokens

    def append(self, tokens: Sequence[int]) -> None:
        """Add what has been sampled."""
        count = self.count
        total = count + len(tokens)
        if total > self._tokens.size:
            longer = np.empty(max(total, 2 * self._tokens.size), np.int64)
            longer[:count] = self._tokens[:count]
            self._tokens = longer
        if total == count + 1:  # quicker
            self._tokens[count] = tokens[0]
        else:
            self._tokens[count:total] = tokens
        self.count = total

    def cut(self, count: int) -> None:
        """Forget the tokens from `count` on."""
        self.count = min(self.count, max(0, count))

    def all(self) -> Int64Array:
        """Return the tokens so far `[n] int64`; valid until the next change."""
        return self._tokens[: self.count]

    def tokens(self, start: int, stop: int) -> Int64Array:
        """Return the tokens from position `start` to before `stop`, fewer if there are not so many; from any thread."""
        return self._tokens[start : min(stop, self.count)].copy()

    def token(self, position: int) -> int | None:
        """Return one token, None if there are not so many; from any thread."""
        there = self._tokens  # its owner may put a longer or shorter one in its place meanwhile
        return int(there[position]) if position < min(self.count, len(there)) else None

    def follow(self, prompt: Any, output: Any) -> Int64Array:
        """Return prompt and output as the engine's lists have them now, `[n] int64`; valid until the next call."""
        total = len(prompt) + len(output)
        if self._prompt is not prompt or total < self.count:
            self._prompt = prompt  # another list: the request starts anew, perhaps from a longer prompt
            self.begin(prompt)
        if total > self.count:
            self.append(output[self.count - len(prompt) :])
        return self.all()


class KnownRequest:
    """One request: its name, its 64-bit id, its row (0: none now), and the tokens known of it."""

    def __init__(self, name: str, request_id: int) -> None:
        self.name = name
        self.request_id = request_id
        self.row = 0
        self.last_forward = -1
        self.tokens = TokenList()


R = TypeVar("R", bound=KnownRequest)


class RequestRows(Generic[R]):
    """An engine's live requests by name, for one without rows of its own; rows 1 and up are lent to those that run.

    If all are lent, the request that has not run for longest gives up its row, and gets another when it runs again.
    """

    def __init__(self, num_rows: int, make: Callable[[str], R]) -> None:
        self._make = make
        self._by_name: OrderedDict[str, R] = OrderedDict()
        self._free_rows = list(range(num_rows - 1, 0, -1))

    def get(self, name: str) -> R | None:
        """Return a known request."""
        return self._by_name.get(name)

    def known(self, names: Iterable[str]) -> list[R | None]:
        """Return requests as `get` does."""
        return list(map(self._by_name.get, names))

    def live(self) -> list[R]:
        """Return all that are known."""
        return list(self._by_name.values())

    def see(self, name: str) -> tuple[R, bool]:
        """Return a request and whether it is new."""
        known = self._by_name.get(name)
        if known is None:
            known = self._by_name[name] = self._make(name)
            return known, True
        return known, False

    def run(self, known: R, forward: int) -> bool:
        """Let a request take part in a forward; return whether it was given a row; raise a `ValueError` if there is none."""
        known.last_forward = forward
        self._by_name.move_to_end(known.name)
        if known.row:
            return False
        if not self._free_rows:
            idle = next((r for r in self._by_name.values() if r.row and r.last_forward != forward), None)
            if idle is None:
                raise ValueError(f"forward {forward} has more requests than the trace has rows")
            self.give_row_back(idle)
        known.row = self._free_rows.pop()
        return True

    def give_row_back(self, known: R) -> None:
        """Take a request's row; it gets another when it runs again."""
        if known.row:
            self._free_rows.insert(0, known.row)
            known.row = 0

    def drop(self, known: R) -> None:
        """Forget a request that is over; its row is free for another."""
        self.give_row_back(known)
        self._by_name.pop(known.name, None)
