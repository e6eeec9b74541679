"""What a request's KV depends on beside its tokens: the adapter and its weights, the cache salt, media, the model's weights."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from ...capture.privacy import IdentityValue, chosen_identity
from ..common.hooking import Finish, OnFault, wrap_method
from .step import StepForward, VllmRequest, VllmRequests

MAX_HASHED_VALUES: Final = 1 << 14  # of each of an adapter's tensors, the first ones
# Of a prompt of embeddings: how many tokens share a hash, at most, and how many values of each are hashed.
EMBEDDED_TOKENS: Final = 16
EMBEDDED_VALUES: Final = 16
Say = Callable[[VllmRequest], None]  # records a request anew


def identity_of(request: Any) -> list[IdentityValue]:
    """Return what the scheduler's request says, or what a worker is told of it; an adapter by its path, or its number."""
    found = []
    if hasattr(request, "lora_request"):
        lora = request.lora_request
        found.append(IdentityValue("adapter", "" if lora is None else _path_of(lora)))
    if hasattr(request, "cache_salt"):  # workers are not told
        found.append(IdentityValue("salt", request.cache_salt or ""))
    if hasattr(request, "mm_features"):
        found.append(IdentityValue("media", ""))
        for item in request.mm_features or ():
            place = item.mm_position
            found.append(IdentityValue("media", item.mm_hash or item.identifier, place.offset, place.length))
    return found


def embedded_in(request: Any, stretch: int) -> list[IdentityValue]:
    """Return what a prompt of embeddings holds, as media that fill each `stretch` of tokens; nothing for one of tokens.

    Of each token's embedding the first values are hashed, as floats.
    """
    embeds: Any = getattr(request, "prompt_embeds", None)
    if getattr(embeds, "ndim", 0) != 2:
        return []
    rows = embeds[:, :EMBEDDED_VALUES].float().cpu().numpy()
    parts = [(start, rows[start : start + stretch]) for start in range(0, len(rows), stretch)]
    hashes = (hashlib.blake2b(part.tobytes(), digest_size=16).hexdigest() for _, part in parts)
    values = (IdentityValue("media", of, start, len(part)) for of, (start, part) in zip(hashes, parts, strict=True))
    return [IdentityValue("media", ""), *values]


def hit_unit(runner: Any) -> int:
    """Return of how many tokens every prefix hit is a multiple, as far as it is known, `EMBEDDED_TOKENS` at most."""
    groups = getattr(getattr(runner, "kv_cache_config", None), "kv_cache_groups", None) or ()
    cache = getattr(runner, "cache_config", None)
    sizes = [getattr(group.kv_cache_spec, "block_size", 1) for group in groups]
    sizes += [getattr(cache, name, None) or 0 for name in ("prefix_match_unit", "hash_block_size")]
    return math.gcd(EMBEDDED_TOKENS, *map(int, sizes))


class Identities:
    """Knows which weights a runner's requests are computed with; what is loaded anew may be others under the same name."""

    def __init__(self, runner: Any, requests: VllmRequests, say: Say) -> None:
        self._runner = runner
        self._requests = requests
        self._say = say
        self._model = 0  # how often weights were loaded into the model since the recording began
        self._known = True  # whether the last time succeeded: else nobody knows what they are
        self._said = 0
        self._adapters: dict[int, str] = {}  # by an adapter's number, what it was loaded with last
        self._paths: dict[int, str] = {}  # and where it comes from
        self._given: tuple[int, ...] = ()  # the adapters' numbers that layers get in the next step, one a token
        self.looks = False  # whether there are adapters at all
        self.others: list[IdentityValue] = []  # of the step that has begun, as `ForwardInput` has them

    def attach(self, on_fault: OnFault) -> None:
        """Hook what loads weights into the model, and adapters."""
        model = getattr(self._runner, "get_model", lambda: None)()
        wrap_method(model, "load_weights", self.on_weights, on_fault)
        wrap_method(getattr(self._runner, "lora_manager", None), "_load_adapter", self.on_adapter, on_fault)
        if getattr(self._runner, "lora_manager", None) is not None:
            self.looks = wrap_method(self._runner, "_set_active_loras", self.on_given, on_fault)

    def begin(self, known: VllmRequest, request: Any) -> None:
        """Take over a new request's identity, and record it."""
        known.declared, lora = identity_of(request), getattr(request, "lora_request", None)
        known.declared += embedded_in(request, hit_unit(self._runner))
        known.adapter = int(lora.lora_int_id) if lora is not None else 0 if hasattr(request, "lora_request") else -1
        self._take(known)

    def begin_step(self) -> None:
        """Record the requests anew if the model has got other weights since the last step.

        Which adapters the layers get is said later in a step: of the V2 runner behind what a recorder on the host looks at.
        """
        self._given = ()
        if self._said != self._model:
            self._said = self._model
            self._take_all(self._requests.live())

    def on_given(self, _samples: Any, tokens: Any, loras: Any, *_args: Any, **_kwargs: Any) -> None:
        """Take note of which adapter each token of the next step is computed with."""
        self._given = tuple(tokens)
        self._paths |= {int(lora.lora_int_id): _path_of(lora) for lora in loras or ()}

    def look(self, requests: Sequence[VllmRequest], counts: Sequence[int]) -> bool:
        """Look which of a step's requests, of so many tokens each, are computed with others' adapters; whether that has changed."""
        if not self.looks:
            return False
        before, given, self._given = self.others, self._given, ()
        self.others, at = [], 0
        whole = len(given) >= sum(counts) and len(requests) == len(counts)
        if whole and (any(given) or any(known.adapter for known in requests)):
            for place, (known, count) in enumerate(zip(requests, counts, strict=True)):
                mine = given[at : at + count]
                at += count
                others = count - mine.count(known.adapter)
                if others and known.adapter >= 0:
                    first = int(next(number for number in mine if number != known.adapter))
                    path = self._valued(first, self._paths.get(first, "")) if first else ""
                    self.others.append(IdentityValue("adapter", path, place, others))
        return self.others != before

    def beside(self, forwards: list[StepForward]) -> list[StepForward]:
        """Return a step's forwards with those of their requests that others' adapters compute."""
        if not self.others:
            return forwards
        return [
            (replace(given, identity=chosen_identity(self.others, chosen.tolist())), names, chosen)
            for given, names, chosen in forwards
        ]

    def on_weights(self, *_args: Any, **_kwargs: Any) -> Finish:
        """Take note of weights that are loaded into the model: what is computed from now on is of others."""

        def loaded(names: Any, error: BaseException | None) -> None:
            if error is not None or not isinstance(names, set) or names:  # most models name what they have loaded
                self._model, self._known = self._model + 1, error is None

        return loaded

    def on_adapter(self, request: Any, *_args: Any, **_kwargs: Any) -> Finish:
        """Record the requests of an adapter anew, if it is loaded and was loaded with other weights before."""

        def loaded(lora: Any, error: BaseException | None) -> None:
            if error is None:
                number, held = int(request.lora_int_id), weights_hash(lora)
                before, self._adapters[number] = self._adapters.get(number), held
                if before != held:
                    self._take_all(known for known in self._requests.live() if known.adapter == number)

        return loaded

    def _take_all(self, requests: Iterable[VllmRequest]) -> None:
        for known in requests:
            self._take(known)

    def _take(self, known: VllmRequest) -> None:
        known.identity = [
            one._replace(value=self._valued(known.adapter, one.value)) if one.kind == "adapter" else one
            for one in known.declared
        ]
        if self._known:
            known.identity.append(IdentityValue("weights", str(self._model)))
        self._say(known)

    def _valued(self, number: int, path: str) -> str:
        held = self._adapters.get(number, "")
        return f"{path} with {held}" if held else path


def _path_of(lora: Any) -> str:
    return str(getattr(lora, "lora_path", "") or f"number {lora.lora_int_id}")


def weights_hash(lora: Any) -> str:
    """Return a hash of the first values of each of an adapter's tensors; "" if it has none that can be read."""
    found = hashlib.blake2b(digest_size=8)
    for name, layer in sorted(getattr(lora, "loras", {}).items()):
        found.update(name.encode())
        for part in ("lora_a", "lora_b"):
            tensors = getattr(layer, part, None)
            for tensor in tensors if isinstance(tensors, list | tuple) else (tensors,):
                if hasattr(tensor, "detach"):
                    found.update(_first_bytes(tensor))
    return found.hexdigest()


def _first_bytes(tensor: Any) -> bytes:
    import torch

    values = tensor.detach().reshape(-1)[:MAX_HASHED_VALUES].contiguous().cpu()
    return bytes(values.view(torch.uint8).numpy())
