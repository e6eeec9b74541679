"""SGLang's requests: ids, rows, the tokens that the scheduler believes them to have, which a batch has, and its results.

The engine's thread keeps references alone; what they hold is read by the recorder's own thread, if there is one.

A stage of a pipeline runs a micro-batch, and later takes over a result that is made anew from what the last stage sent: for the
very batch that it ran, before that runs again; or, if it is speculative, for the copy that newer versions make as it is launched.
"""

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from struct import Struct
from typing import Any, Final
from weakref import ref

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.device.forward import tokens_of
from ...capture.device.recorder import DeviceRecorder
from ...capture.forward_input import TruthTokens
from ...capture.privacy import IdentityValue
from ...capture.recorder import Recorder
from ...trace.schema import LOGPROB_KINDS
from ..common.hooking import Around, beside
from ..common.requests import TokenList, logprobs_or_none, request_id_of, truth_tokens


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


def identity_of(req: Any, weights: int | None) -> list[IdentityValue]:
    """Return what a request's KV depends on beside its tokens; `weights` counts how often they have been changed, None for unknown.

    What SGLang's own key of its prefix cache says, with the LoRA adapter by itself, and the hashes of media. What the caller
    puts in the place of some tokens' embeddings is media of this request alone: SGLang neither shares nor caches what it computes.
    """
    adapter, media = getattr(req, "lora_id", None) or "", getattr(req, "multimodal_inputs", None)
    salt = (getattr(req, "extra_key", None) or "").removesuffix(adapter), getattr(req, "cache_salt", None) or ""
    values = [("adapter", adapter), ("salt", str(salt) if any(salt) else "")]
    values += [] if weights is None else [("weights", str(weights))]
    found = [IdentityValue(kind, value) for kind, value in values]
    items = [item for item in getattr(media, "mm_items", None) or () if item is not None]
    places = [(item, getattr(item, "hash", None), getattr(item, "offsets", None)) for item in items]
    if all(number is not None and offsets for _, number, offsets in places):  # else nobody knows what is where
        found.append(IdentityValue("media", ""))
        for item, number, offsets in places:
            text = str(getattr(item, "identity", None) or number)
            for part, (first, last) in enumerate(offsets or ()):
                found.append(IdentityValue("media", f"{text} {part}", int(first), int(last) - int(first) + 1))
    replaced = getattr(getattr(req, "positional_embed_overrides", None), "positions", None) or ()
    return found + [IdentityValue("media", f"embedding of {req.rid}", int(position), 1) for position in replaced]


class TokenLists:
    """A request's prompt and output, the very lists that the scheduler had when it was looked at: it only appends.

    `placeholders` says which of the two hold none but placeholders, whose tokens are unknown.
    """

    def __init__(self, prompt: Any, output: Any, placeholders: tuple[bool, ...] = (False, False)) -> None:
        self.prompt = prompt
        self.output = output
        self.placeholders = placeholders

    def token(self, position: int) -> int | None:
        """Return one token, None where the lists have become shorter."""
        split = len(self.prompt)
        part, place = (self.prompt, position) if position < split else (self.output, position - split)
        try:
            token = int(part[place])
        except IndexError:  # not asked for its length first: the engine's thread may take tokens back at any moment
            return None
        return UNKNOWN_TOKEN if self.placeholders[part is self.output] else token

    def tokens(self, start: int, stop: int) -> Int64Array:
        """Return the tokens of positions `start` to before `stop`; fewer where the lists have become shorter."""
        split = len(self.prompt)
        prompt = np.array(self.prompt[start:stop] if start < split else (), np.int64)
        output = np.array(self.output[max(start - split, 0) : max(stop - split, 0)], np.int64)
        for tokens, unknown in zip((prompt, output), self.placeholders, strict=True):
            if unknown:
                tokens[:] = UNKNOWN_TOKEN
        return np.concatenate((prompt, output)) if prompt.size else output


# Sampling parameters of a request, and the values with which what it is sampled from is what the model gives; greedy ones have a
# temperature of 1. `top_p` and the like leave the logits as they are on some backends; which one runs is not looked into, so they
# count as a change.
_CHANGE_NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("temperature", "repetition_penalty", "top_p"), (1, None)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_new_tokens"), (0, None)),
    **dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "watermark"), (None,)),
    "top_k": (1, -1, 1 << 30, None),
}


class SglangRequest:
    """One request of the engine's, and its tokens so far."""

    def __init__(self, req: Any, request_id: int) -> None:
        self.req = req
        self.request_id = request_id
        self.weights = 0  # how often the model's had been changed when it was recorded last
        # Of embeddings, and of a beam search's tokens.
        self.placeholders = tuple(getattr(req, name, None) is not None for name in ("input_embeds", "beam_group"))
        self._tokens = TokenList()
        self._lists: TokenLists | None = None

    @cached_property
    def logprobs_kind(self) -> int:
        """What its log-probabilities are of, as an index of `LOGPROB_KINDS`: SGLang computes them of what it samples from."""
        params = getattr(self.req, "sampling_params", None)
        plain = params is not None and getattr(self.req, "custom_logit_processor", None) is None
        plain = plain and all(getattr(params, name, None) in values for name, values in _CHANGE_NOTHING.items())
        return LOGPROB_KINDS.index("raw" if plain else "processed")

    def truth(self) -> Int64Array:
        """Return prompt and output so far, as the scheduler holds them now, `[n] int64`; valid until the next call."""
        prompt, output = self.req.origin_input_ids, self.req.output_ids
        if True in self.placeholders:
            return self.lists(prompt, output).tokens(0, len(prompt) + len(output))
        return self._tokens.follow(prompt, output)

    def lists(self, prompt: Any, output: Any) -> TokenLists:
        """Return the lists that the scheduler keeps its tokens in; another object once it has put another in a place."""
        lists = self._lists
        if lists is None or lists.prompt is not prompt or lists.output is not output:
            lists = self._lists = TokenLists(prompt, output, self.placeholders)
        return lists


MAX_KNOWN: Final = 8192  # requests, more than an engine runs at once


class SglangRequests:
    """The engine's requests by name; `version` grows with each one that comes or goes.

    Nothing is called for a request that is aborted while it waits for another row: many without one are forgotten.
    """

    def __init__(self, *, exact_ids: bool) -> None:
        self._by_rid: dict[str, SglangRequest] = {}
        self._exact = exact_ids
        self._most = MAX_KNOWN
        self.version = 0

    def see(self, req: Any) -> tuple[SglangRequest, bool]:
        """Return a request of the engine's and whether it is new."""
        known = self._by_rid.get(req.rid)
        if known is not None and known.req is req:
            return known, False
        if len(self._by_rid) >= self._most:
            self._by_rid = {rid: known for rid, known in self._by_rid.items() if row_of(known.req) >= 0}
            self._most = max(MAX_KNOWN, 2 * len(self._by_rid))
        known = SglangRequest(req, request_id_of(req.rid, signed=self._exact))
        self._by_rid[req.rid] = known
        self.version += 1
        return known, True

    def get(self, rid: str) -> SglangRequest | None:
        """Return a known request."""
        return self._by_rid.get(rid)

    def running(self) -> list[SglangRequest]:
        """Return the requests that have a row."""
        return [known for known in self._by_rid.values() if row_of(known.req) >= 0]

    def id_of(self, req: Any) -> int:
        """Return the id of a request, also of one whose name another has by now."""
        return request_id_of(req.rid, signed=self._exact)

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
            ids[r] = request_id_of(rid, signed=self._exact)
        return ids

    def truth(self, rids: Sequence[str], rows: int) -> TruthTokens | None:
        """Return the scheduler's tokens of a batch's requests; None where one of them is not known."""
        known = [self._by_rid.get(rid) for rid in rids[:rows]]
        parts = [request.truth() for request in known if request is not None]
        return truth_tokens(parts, rows) if len(parts) == len(known) else None


_PROMPT: Final = attrgetter("req.origin_input_ids")
_OUTPUT: Final = attrgetter("req.output_ids")


class KnownBatch:
    """The requests of a batch of `rows` rows, padding included; a `ForwardRequests`.

    `outputs` are the lists to which the scheduler appends what it samples, None if a request is not known; `lens` is
    how many tokens each of them had at `moment`. `identity` names those that another's adapter computes, as `ForwardInput` does.
    """

    identity: Sequence[IdentityValue] = ()

    def __init__(self, rids: Sequence[str], rows: int, requests: SglangRequests) -> None:
        self.rids = list(rids)
        self.rows = rows
        self.version = requests.version
        found = list(map(requests.get, self.rids[:rows]))
        known = None not in found
        self.requests: list[SglangRequest] = found if known else []  # type: ignore[assignment]  # no None in it
        self._prompts = list(map(_PROMPT, self.requests))
        self.outputs: list[Any] | None = list(map(_OUTPUT, self.requests)) if known else None
        if not known:  # now: by the time it is asked for, it may be
            self.ids = requests.ids(self.rids, rows)
        self.moment = -1
        self.lens = b""
        self._as_int64 = Struct(f"={len(self.requests)}q").pack  # half of what an array made of a map takes

    def output_lens(self, moment: int) -> bytes:
        """Return how many tokens each request has sampled by a moment, as int64; no loop of Python's on the engine's thread."""
        if moment != self.moment:
            self.moment = moment
            self.lens = b"" if self.outputs is None else self._as_int64(*map(len, self.outputs))
        return self.lens

    @cached_property
    def ids(self) -> Int64Array:
        """`[rows]`, -1 for padding."""
        ids = np.full(self.rows, -1, np.int64)
        ids[: len(self.requests)] = [request.request_id for request in self.requests]
        return ids

    @cached_property
    def truth(self) -> list[TokenLists] | None:
        """The requests' tokens, in the lists that the scheduler had when the batch was looked up; None for unknown."""
        return None if self.outputs is None else self._lists()

    def _lists(self) -> list[TokenLists]:
        parts = zip(self.requests, self._prompts, self.outputs or (), strict=True)
        return [request.lists(prompt, output) for request, prompt, output in parts]

    @cached_property
    def known_lens(self) -> Int64Array:
        """`[n]` tokens of each prompt."""
        return np.array(list(map(len, self._prompts)), np.int64)

    def stale(self) -> bool:
        """Say whether the scheduler keeps tokens in other lists than it did."""
        kept = zip(self.requests, self._prompts, self.outputs or (), strict=True)
        return any(_PROMPT(one) is not prompt or _OUTPUT(one) is not output for one, prompt, output in kept)

    def sampled(self, before: bytes, after: bytes) -> tuple[Int64Array, Int64Array]:
        """Return what each request has got from length `before` to `after`, one after another, and how many each."""
        prompts = np.fromiter(map(len, self._prompts), np.int64, len(self._prompts))
        starts, stops = (prompts + np.frombuffer(lens, np.int64) for lens in (before, after))
        return tokens_of(self._lists(), starts, stops)

    @cached_property
    def with_logprobs(self) -> list[tuple[int, SglangRequest]]:
        """Those that ask for log-probabilities, with their place in the batch."""
        return [(r, one) for r, one in enumerate(self.requests) if getattr(one.req, "return_logprob", False)]

    def logprobs(self, before: bytes, tokens: Int64Array, lens: Int64Array) -> dict[str, Any]:
        """Return the log-probabilities of what `sampled` returned, as `Recorder.sampled` takes them."""
        values, kinds = np.full(tokens.size, np.nan, np.float32), np.zeros(tokens.size, np.int64)
        first, begins = np.frombuffer(before, np.int64), np.cumsum(lens) - lens
        for r, one in self.with_logprobs:
            holder, mine = getattr(one.req, "logprob", one.req), slice(first[r], first[r] + lens[r])
            said = np.array((holder.output_token_logprobs_val or ())[mine], np.float32)
            of = np.array((holder.output_token_logprobs_idx or ())[mine], np.int64)
            place = slice(begins[r], begins[r] + of.size)
            values[place] = np.where(of == tokens[place], said, np.nan)
            kinds[place] = one.logprobs_kind
        return {"sampled_logprobs": values, "logprobs_kind": kinds}


class BatchLookup:
    """Looks a batch's requests up if they are others than the last time."""

    def __init__(self, requests: SglangRequests) -> None:
        self._known_requests = requests
        self.last = KnownBatch((), 0, requests)

    def of(self, rids: Sequence[str] | None, rows: int) -> KnownBatch:
        """Return the requests of a batch of `rows` rows, padding included."""
        last = self.last
        if last.rids == rids and last.rows == rows and last.version == self._known_requests.version:
            return last
        found = self.last = KnownBatch(rids or (), rows, self._known_requests)
        return found

    def refresh(self) -> None:
        """Look again where the scheduler keeps tokens in other lists than before; any thread may ask."""
        if self.last.stale():
            self._known_requests.version += 1


# Forwards whose samples may still be outstanding: overlap scheduling is one behind, pipelines a few.
MAX_OUTSTANDING: Final = 64
# Micro-batches whose results may still be outstanding; a pipeline has a few.
MAX_LAUNCHED: Final = 64

RunForward = tuple[int, KnownBatch]  # a forward's number and its requests


class StepResults:
    """Records the tokens that the scheduler takes over from each step's result."""

    def __init__(self, recorder: Recorder | DeviceRecorder, batches: BatchLookup) -> None:
        self._recorder = recorder
        self._batches = batches
        device = recorder if isinstance(recorder, DeviceRecorder) else None
        # Bound once: each step would make them anew otherwise, and leave them to the collector of garbage.
        self._later: Any = None if device is None else device.later
        self._record_sampled: Any = None if device is None else device.record_sampled
        self._read_sampled = self._sampled
        # An oracle's tokens take the place of those of which the log-probabilities are.
        self._sampled_by_engine = recorder.header.sampler is None and recorder.header.oracle is None
        self.last_target: RunForward | None = None
        # The result that is being taken over: its forward's number and requests, and how many tokens each had.
        self._taken: tuple[int, KnownBatch, bytes] | None = None
        # By id of the result, oldest first. The weak reference tells a result from a later one at the same address, and
        # keeps no tensor alive.
        self.by_result: dict[int, tuple[ref[Any], RunForward]] = {}
        self.moment = 0  # between two, the scheduler appends no token to any request's
        # Micro-batches without a result yet, by id of the batch, which is held, so that ids stay its own.
        self._launched: dict[int, tuple[Any, RunForward | None]] = {}

    def ran(self, result: Any, _: BaseException | None) -> None:
        """Note which forward a scheduler step's result belongs to."""
        last, self.last_target = self.last_target, None
        if last is None or result is None:
            return
        results = self.by_result
        results[id(result)] = (ref(result), last)
        if len(results) > MAX_OUTSTANDING:
            del results[next(iter(results))]

    def takes(self, result: Any) -> bool:
        """Note how many tokens each request has before the scheduler takes over a result; return whether it is one of ours."""
        ran = self.by_result.pop(id(result), None)
        moment = self.moment
        self.moment = moment + 1
        if ran is None or ran[0]() is not result:
            self._taken = None
            return False
        forward, known = ran[1]
        self._taken = (forward, known, known.lens if known.moment == moment else known.output_lens(moment))
        return True

    def took(self, _: Any, error: BaseException | None) -> None:
        """Record which tokens the scheduler took over from a result."""
        if self._taken is None or error is not None:
            return
        forward, known, before = self._taken
        after = known.output_lens(self.moment)
        if after == before:
            return
        if self._later is not None:
            self._later(self._record_sampled, forward, self._read_sampled, known, before, after)
            return
        self._recorder.sampled(forward=forward, **self._sampled(known, before, after))

    def _sampled(self, known: KnownBatch, before: bytes, after: bytes) -> dict[str, Any]:
        self._batches.refresh()
        tokens, lens = known.sampled(before, after)
        asked = self._sampled_by_engine and known.with_logprobs
        said = logprobs_or_none(lambda: known.logprobs(before, tokens, lens)) if asked else {}
        return {"sampled_tokens": tokens, "sampled_lens": lens, **said}

    @beside
    def on_launch(
        self, mb_id: Any, batch: Any, _proxy: Any = None, mb_metadata: Any = None, *_args: Any, **_kwargs: Any
    ) -> Around:
        """Note which forward a micro-batch of a pipeline's stage ran."""
        returned = yield
        ran = self.by_result.pop(id(returned[0]), None)
        if ran is None or ran[0]() is not returned[0]:
            return
        copied = None if mb_metadata is None else getattr(mb_metadata[mb_id], "fwd_batch", None)
        key = batch if copied is None else copied
        again = id(key) in self._launched  # without a result in between: whose the next one is, nobody knows
        self._launched[id(key)] = (key, None if again else ran[1])
        if len(self._launched) > MAX_LAUNCHED:
            del self._launched[next(iter(self._launched))]

    def on_process(self, batch: Any, result: Any, *_args: Any, **_kwargs: Any) -> None:
        """Note that a result is the one of the forward that this batch of a pipeline's stage ran."""
        _, ran = self._launched.pop(id(batch), (None, None))
        if ran is not None and result is not None:
            self.by_result[id(result)] = (ref(result), ran)
