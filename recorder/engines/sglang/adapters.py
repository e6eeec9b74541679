"""Which LoRA adapter SGLang's layers compute a request with: what lies in the place that they are given for it.

A batch's requests are given places of a pool of adapters when the batch is made, and the layers get these for segments of the
batch's rows; what lies in a place is looked at when the batch runs. Where the segments are not on the host, as of most backends
on GPUs, each request's rows are taken to get its place. Whoever is computed with another adapter than its own is said so with
the forward; of weights in a place, that they are the adapter's, nothing is known.
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
        # The batch, and its places by request, and by row if they are known.
        self._given: tuple[ref[Any], list[int], list[int]] | None = None

    def hooks(self) -> dict[str, Hook]:
        """Return the hooks around the backend's functions, by their names; none without adapters."""
        known = hasattr(self._pool, "buffer_id_to_uid") and hasattr(self.backend, "prepare_lora_batch")
        return {"prepare_lora_batch": self.on_prepare} if known else {}

    def on_prepare(self, *args: Any, **kwargs: Any) -> Finish | None:
        """Take note of the places that a batch's requests and rows are given; a place of no rank adds nothing."""
        told = dict(zip(("forward_batch", "weight_indices", "lora_ranks"), args, strict=False)) | kwargs
        ranks = told["lora_ranks"]
        batch, places = ref(told["forward_batch"]), [at if ranks[at] else NOTHING for at in told["weight_indices"]]

        def finish(_: Any, error: BaseException | None) -> None:
            rows = () if error is not None else _by_row(getattr(self.backend, "batch_info", None))
            self._given = batch, places, [at if ranks[at] else NOTHING for at in rows]

        return finish

    def of(self, batch: Any, known: KnownBatch) -> KnownBatch:
        """Return a batch's requests, with those that another's adapter computes, if there are any."""
        if self._given is None:
            return known
        given: Any = self._given[0]()
        _, places, rows = self._given
        if given is not batch or len(known.requests) > len(places):
            return known
        told = getattr(batch, "extend_seq_lens_cpu", None) if mode_of(batch.forward_mode) != "decode" else None
        lens = [1] * len(known.requests) if told is None else [*map(int, told)]
        by_row, names, others, end = len(rows) >= sum(lens), self._names(), [], 0
        for place, (one, at, length) in enumerate(zip(known.requests, places, lens, strict=False)):
            own, mine, end = (
                getattr(one.req, "lora_id", None) or "",
                rows[end : end + length] if by_row else [at],
                end + length,
            )
            wrong = [name for index in mine if (name := names.get(index, "an empty place")) != own]
            if wrong:
                others.append(IdentityValue("adapter", wrong[0], place, len(wrong) if by_row else length))
        if not others:
            return known
        found = copy.copy(known)
        found.identity = others
        return found

    def _names(self) -> dict[int, str]:
        """Return which adapter lies in each place now, "" for the place of the model's own weights."""
        held = enumerate(self._pool.buffer_id_to_uid)
        return {NOTHING: ""} | {index: uid or "" for index, uid in held if uid is None or isinstance(uid, str)}


def _by_row(info: Any) -> list[int]:
    """Return the place that the layers get for each row of a batch, none where that is not on the host, or the rows are reordered."""
    lens, places = (getattr(info, f"{name}_cpu", getattr(info, name, None)) for name in ("seg_lens", "weight_indices"))
    if (
        lens is None
        or places is None
        or lens.is_cuda
        or places.is_cuda
        or getattr(info, "permutation", None) is not None
    ):
        return []
    count = int(info.num_segments)
    rows: list[int] = places[:count].repeat_interleave(lens[:count]).tolist()
    return rows
