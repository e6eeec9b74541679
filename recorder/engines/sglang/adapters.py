"""Which LoRA adapter SGLang's layers compute a request with: what lies in the place that they are given for it.

A batch's requests are given places of a pool of adapters when the batch is made; what lies in a place is looked at when the
batch runs. Whoever is computed with another adapter than its own is said so with the forward; of weights in a place, that they
are the adapter's, nothing is known.
"""

import copy
from typing import Any, Final
from weakref import ref

from ...capture.privacy import IdentityValue
from ..common.hooking import Finish, Hook
from .forward import mode_of
from .requests import KnownBatch

NOTHING: Final = -1  # in the stead of a place that adds nothing to what the model's own weights compute


class BatchAdapters:
    """Follows one runner's adapters; `hooks` go around what hands a batch's places to the layers."""

    def __init__(self, model_runner: Any) -> None:
        manager = getattr(model_runner, "lora_manager", None)
        self._pool: Any = getattr(manager, "memory_pool", None)
        self.backend: Any = getattr(manager, "lora_backend", None)
        self._given: tuple[ref[Any], list[int]] | None = None

    def hooks(self) -> dict[str, Hook]:
        """Return the hooks around the backend's functions, by their names; none without adapters."""
        known = hasattr(self._pool, "buffer_id_to_uid") and hasattr(self.backend, "prepare_lora_batch")
        return {"prepare_lora_batch": self.on_prepare} if known else {}

    def on_prepare(self, *args: Any, **kwargs: Any) -> Finish | None:
        """Take note of the places that a batch's requests are given; a place of no rank adds nothing."""
        told = dict(zip(("forward_batch", "weight_indices", "lora_ranks"), args, strict=False)) | kwargs
        ranks = told["lora_ranks"]
        self._given = ref(told["forward_batch"]), [at if ranks[at] else NOTHING for at in told["weight_indices"]]
        return None

    def of(self, batch: Any, known: KnownBatch) -> KnownBatch:
        """Return a batch's requests, with those that another's adapter computes, if there are any."""
        if self._given is None:
            return known
        given: Any = self._given[0]()
        places = self._given[1]
        if given is not batch or len(known.requests) > len(places):
            return known
        lens = getattr(batch, "extend_seq_lens_cpu", None) if mode_of(batch.forward_mode) != "decode" else None
        names, others = self._names(), []
        for place, (one, index) in enumerate(zip(known.requests, places, strict=False)):
            name = names.get(index, "an empty place")
            if name != (getattr(one.req, "lora_id", None) or ""):
                others.append(IdentityValue("adapter", name, place, 1 if lens is None else int(lens[place])))
        if not others:
            return known
        found = copy.copy(known)
        found.identity = others
        return found

    def _names(self) -> dict[int, str]:
        """Return which adapter lies in each place now, "" for the place of the model's own weights."""
        held = enumerate(self._pool.buffer_id_to_uid)
        return {NOTHING: ""} | {index: uid or "" for index, uid in held if uid is None or isinstance(uid, str)}
