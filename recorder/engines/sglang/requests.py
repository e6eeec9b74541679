"""What the adapter knows of SGLang's requests: ids, rows, and the tokens that the scheduler believes them to have."""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.forward_input import TruthTokens
from ...capture.host_arrays import Int64Array


def request_id_of(rid: str, *, exact: bool) -> int:
    """Return the 64-bit id of a request, the same in every rank and on both sides of a prefill and decode pair.

    With `exact`, SGLang's own (blake2b of the name, signed), which its token oracle samples by; else without the sign,
    because a negative id is nobody's to the history checks.
    """
    number = int.from_bytes(
        hashlib.blake2b(str(rid).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True
    )
    return number if exact else number & ((1 << 63) - 1)


def kv_field(req: Any, name: str) -> Any:
    """Return what a request says of its KV, None for nothing: newer versions keep it in `req.kv`, which older ones have too."""
    for holder in (getattr(req, "kv", None), req):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None


def row_of(req: Any) -> int:
    """Return a request's row of `req_to_token`, -1 for none."""
    row = kv_field(req, "req_pool_idx")
    return -1 if row is None else int(row)


def has_placeholders(req: Any) -> tuple[bool, bool]:
    """Say whether prompt and output of a request are placeholders: of embeddings, and of a beam search's tokens."""
    return getattr(req, "input_embeds", None) is not None, getattr(req, "beam_group", None) is not None


class TokenLists:
    """A request's prompt and output, the very lists that the scheduler had when it was looked at: it only appends.

    `placeholders` says which of the two hold none but placeholders, whose tokens are unknown.
    """

    __slots__ = ("__weakref__", "output", "placeholders", "prompt")

    def __init__(self, prompt: Any, output: Any, placeholders: tuple[bool, bool] = (False, False)) -> None:
        self.prompt = prompt
        self.output = output
        self.placeholders = placeholders

    def tokens(self, start: int, stop: int) -> Int64Array:
        """Return the tokens of positions `start` to before `stop`; fewer where the lists have become shorter."""
        split = len(self.prompt)
        prompt = np.array(self.prompt[start:stop] if start < split else (), np.int64)
        output = np.array(self.output[max(start - split, 0) : max(stop - split, 0)], np.int64)
        for tokens, unknown in zip((prompt, output), self.placeholders, strict=True):
            if unknown:
                tokens[:] = UNKNOWN_TOKEN
        return np.concatenate((prompt, output)) if prompt.size else output


class KnownRequest:
    """One request and its tokens so far; only what is new since the last look is converted."""

    __slots__ = ("_count", "_lists", "_prompt", "_tokens", "placeholders", "req", "request_id")

    def __init__(self, req: Any, request_id: int) -> None:
        self.req = req
        self.request_id = request_id
        self.placeholders = has_placeholders(req)
        self._prompt: Any = None
        self._tokens = np.empty(0, np.int64)
        self._count = 0
        self._lists: TokenLists | None = None

    def truth(self) -> Int64Array:
        """Return prompt and output so far, as the scheduler holds them now, `[n] int64`; valid until the next call."""
        prompt, output = self.req.origin_input_ids, self.req.output_ids
        total = len(prompt) + len(output)
        if True in self.placeholders:
            return self.lists(prompt, output).tokens(0, total)
        if self._prompt is not prompt or total < self._count:
            self._prompt = prompt
            self._tokens = np.array(prompt, np.int64)
            self._count = len(prompt)
        if total > self._tokens.size:
            longer = np.empty(max(total, 2 * self._tokens.size), np.int64)
            longer[: self._count] = self._tokens[: self._count]
            self._tokens = longer
        if total > self._count:
            self._tokens[self._count : total] = output[self._count - len(prompt) :]
            self._count = total
        return self._tokens[:total]

    def lists(self, prompt: Any, output: Any) -> TokenLists:
        """Return the lists that the scheduler keeps its tokens in; another object once it has put another in a place."""
        lists = self._lists
        if lists is None or lists.prompt is not prompt or lists.output is not output:
            lists = self._lists = TokenLists(prompt, output, self.placeholders)
        return lists


MAX_KNOWN: Final = 8192  # requests, more than an engine runs at once


class RequestBook:
    """The engine's requests by name; `version` grows with each one that comes or goes.

    Of a request that is aborted while it waits for another row nobody hears: where those without a row have become
    many, they are forgotten. One that does get a row is told of once more.
    """

    __slots__ = ("_by_rid", "_exact", "_most", "version")

    def __init__(self, *, exact_ids: bool) -> None:
        self._by_rid: dict[str, KnownRequest] = {}
        self._exact = exact_ids
        self._most = MAX_KNOWN
        self.version = 0

    def see(self, req: Any) -> tuple[KnownRequest, bool]:
        """Return a request of the engine's and whether it is new."""
        known = self._by_rid.get(req.rid)
        if known is not None and known.req is req:
            return known, False
        if len(self._by_rid) >= self._most:
            self._by_rid = {rid: known for rid, known in self._by_rid.items() if row_of(known.req) >= 0}
            self._most = max(MAX_KNOWN, 2 * len(self._by_rid))
        known = KnownRequest(req, request_id_of(req.rid, exact=self._exact))
        self._by_rid[req.rid] = known
        self.version += 1
        return known, True

    def get(self, rid: str) -> KnownRequest | None:
        """Return a known request."""
        return self._by_rid.get(rid)

    def id_of(self, req: Any) -> int:
        """Return the id of a request, also of one whose name another has by now."""
        return request_id_of(req.rid, exact=self._exact)

    def drop(self, req: Any) -> None:
        """Forget a request that is over."""
        known = self._by_rid.get(req.rid)
        if known is not None and known.req is req:
            del self._by_rid[req.rid]
            self.version += 1

    def ids(self, rids: Sequence[str], rows: int) -> Int64Array:
        """Return the ids of a batch's requests `[rows] int64`, -1 for padding."""
        ids = np.full(rows, -1, np.int64)
        for r, rid in enumerate(rids[:rows]):
            known = self._by_rid.get(rid)
            ids[r] = known.request_id if known is not None else request_id_of(rid, exact=self._exact)
        return ids

    def truth(self, rids: Sequence[str], rows: int) -> TruthTokens | None:
        """Return the scheduler's tokens of a batch's requests; None where one of them is not known."""
        known = [self._by_rid.get(rid) for rid in rids[:rows]]
        parts = [request.truth() for request in known if request is not None]
        if len(parts) != len(known):
            return None
        lens = np.zeros(rows, np.int64)
        lens[: len(parts)] = [part.size for part in parts]
        return TruthTokens(flat=np.concatenate(parts) if parts else np.empty(0, np.int64), lens=lens)
