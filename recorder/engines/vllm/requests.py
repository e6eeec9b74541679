"""What the adapter knows of vLLM's requests: ids, rows, and the tokens that the engine has committed to."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...capture.forward_input import TruthTokens
from ...capture.host_arrays import Int64Array

UNKNOWN_TOKEN: Final = -1  # of a position that was fed an embedding


def request_id_of(name: str) -> int:
    """Return the 64-bit id of a request, the same in every rank; none is negative, which would be nobody's."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") & (
        (1 << 63) - 1
    )


def prompt_of(request: Any) -> tuple[Int64Array, Int64Array]:
    """Return a prompt's tokens `[n] int64` and the positions, ascending, that are fed an embedding in place of one."""
    tokens, embeds = getattr(request, "prompt_token_ids", None), getattr(request, "prompt_embeds", None)
    if tokens is None:
        count = 0 if embeds is None else int(embeds.shape[0])
        return np.full(count, UNKNOWN_TOKEN, np.int64), np.arange(count, dtype=np.int64)
    mask = getattr(request, "prompt_is_token_ids", None)
    unknown = np.flatnonzero(~np.array(mask, np.bool_)) if mask is not None else np.empty(0, np.int64)
    return np.array(tokens, np.int64), unknown


class KnownRequest:
    """One request: `row` 0 while it has none; its tokens are the prompt's and those that steps have sampled."""

    __slots__ = ("_count", "_tokens", "fresh", "last_step", "name", "prompt_len", "request_id", "row", "unknown")

    def __init__(self, name: str) -> None:
        self.name = name
        self.request_id = request_id_of(name)
        self.row = 0
        self.last_step = -1
        self.prompt_len = 0
        self.unknown: Int64Array = np.empty(0, np.int64)  # positions of the prompt that have no token
        self.fresh = True  # has not run since it was admitted
        self._tokens = np.empty(0, np.int64)
        self._count = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens are known."""
        return self._count

    def begin(self, tokens: Sequence[int] | Int64Array) -> None:
        """Start over from these tokens; what the engine keeps in the place of an embedding is none."""
        self._tokens = np.array(tokens, np.int64)
        self._tokens[self.unknown[self.unknown < self._tokens.size]] = UNKNOWN_TOKEN
        self._count = self._tokens.size

    def append(self, tokens: Sequence[int]) -> None:
        """Add what a step has sampled."""
        total = self._count + len(tokens)
        if total > self._tokens.size:
            longer = np.empty(max(total, 2 * self._tokens.size), np.int64)
            longer[: self._count] = self._tokens[: self._count]
            self._tokens = longer
        self._tokens[self._count : total] = tokens
        self._count = total

    def cut(self, count: int) -> None:
        """Forget the tokens from `count` on."""
        self._count = min(self._count, max(0, count))

    def truth(self) -> Int64Array:
        """Return the tokens so far `[n] int64`; valid until the next change."""
        return self._tokens[: self._count]


class RequestBook:
    """The engine's live requests by name; rows 1 and up are lent to those that run.

    `lock` is to be held where tokens change: results may arrive in a thread of the engine's.
    """

    __slots__ = ("_by_name", "_free_rows", "lock")

    def __init__(self, num_rows: int) -> None:
        self._by_name: OrderedDict[str, KnownRequest] = OrderedDict()
        self._free_rows = list(range(num_rows - 1, 0, -1))
        self.lock = threading.Lock()

    def get(self, name: str) -> KnownRequest | None:
        """Return a known request."""
        return self._by_name.get(name)

    def see(self, name: str) -> tuple[KnownRequest, bool]:
        """Return a request and whether it is new."""
        known = self._by_name.get(name)
        if known is not None:
            return known, False
        known = self._by_name[name] = KnownRequest(name)
        return known, True

    def run(self, known: KnownRequest, step: int) -> bool:
        """Let a request take part in a step; return whether it was given a row for that.

        Raises:
            ValueError: the step has more requests than there are rows.
        """
        known.last_step = step
        self._by_name.move_to_end(known.name)
        if known.row:
            return False
        if not self._free_rows:
            idle = next((r for r in self._by_name.values() if r.row and r.last_step != step), None)
            if idle is None:
                raise ValueError(f"step {step} has more requests than the trace has rows")
            self.give_row_back(idle)
        known.row = self._free_rows.pop()
        known.fresh = True
        return True

    def give_row_back(self, known: KnownRequest) -> None:
        """Take a request's row; it gets another when it runs again."""
        if known.row:
            self._free_rows.insert(0, known.row)
            known.row = 0

    def drop(self, known: KnownRequest) -> None:
        """Forget a request that is over."""
        self.give_row_back(known)
        self._by_name.pop(known.name, None)

    def truth(self, requests: Sequence[KnownRequest]) -> TruthTokens:
        """Return the tokens of a forward's requests."""
        with self.lock:
            parts = [known.truth().copy() for known in requests]
        lens = np.array([part.size for part in parts], np.int64)
        return TruthTokens(flat=np.concatenate(parts) if parts else np.empty(0, np.int64), lens=lens)
