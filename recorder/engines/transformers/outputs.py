"""What came out of attention in a step, on the host: held against K and V as the cache gave them, layer by layer.

Whether these are what the requests' slots hold is for `returned.py`; here it is looked at which of them were read. Left alone:
layers that weigh what they read by more than queries and keys.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.attention_output import AttentionCall, OutputChecks, RequestSlots
from ...capture.forward_input import OutputRead
from ..common.hooking import Finish
from .layout import TransformersGroup
from .masks import StepKeys

_WEIGHS: Final = ("position_bias", "s_aux", "sinks")  # what adds to the scores, or to their sum


class OutputCalls:
    """Sees what layers give in one of `every` steps; `keys_of` returns the group of a layer and where the step's tokens find their keys."""

    def __init__(self, keys_of: Callable[[int], tuple[TransformersGroup, StepKeys] | None], every: int) -> None:
        self._keys_of = keys_of
        self._checks = OutputChecks(every)
        self._given: tuple[int, Any, Any] | None = None  # the layer that runs, and what the cache gave it

    def take(self) -> tuple[list[OutputRead], int]:
        """Return what was read wrongly since the last call, and how many outputs were looked at."""
        self._given = None
        return self._checks.take()

    def on_given(self, layer: int, states: Any) -> None:
        """Take K and V that the cache gives a layer, `[1, kv heads, keys, dim]` each."""
        self._given = layer, states[0], states[1]

    def on_attention(self, module: Any, query: Any, said: dict[str, Any]) -> Finish | None:
        """Look at what a layer's attention is about to give for `query` `[1, heads, at least T, dim]`."""
        self._given = None
        layer = int(getattr(module, "layer_idx", -1))
        found = self._keys_of(layer)
        weighs = any(said.get(name) is not None or getattr(module, name, None) is not None for name in _WEIGHS)
        if found is None or weighs or query.shape[0] != 1 or not self._checks.wanted():
            return None
        layout, keys = found
        requests = _requests(keys)
        own, scale = query[0].transpose(0, 1).detach().clone(), said.get("scaling")

        def done(result: Any, error: BaseException | None) -> None:
            given, self._given = self._given, None
            if (
                error is not None
                or given is None
                or given[0] != layer
                or given[1].shape[2] < keys.total
                or not requests
            ):
                return
            _, key, value = given

            def read(slots: Int64Array, head: int) -> tuple[Any, Any]:
                import torch

                at = torch.from_numpy(slots.clip(0, key.shape[2] - 1))
                return key[0, head].index_select(0, at), value[0, head].index_select(0, at)

            call = AttentionCall(
                own, result[0][0].detach(), float(scale or own.shape[-1] ** -0.5), float(said.get("softcap") or 0)
            )
            place = {"group": layout.index, "layer": layer}
            self._checks.look(call, [requests], read, int(key.shape[1]), windows=(layout.window,), **place)

        return done


def _requests(keys: StepKeys) -> list[RequestSlots]:
    """Return the requests of a step with the places of their keys, -1 of a position that is kept no more; none if they are not known."""
    if (keys.own < 0).any():
        return []
    found = []
    begins = np.flatnonzero(np.diff(keys.requests, prepend=-1))
    for first, end in zip(begins.tolist(), [*begins.tolist()[1:], keys.own.size], strict=True):
        prefix, low, last = int(keys.positions[first]), int(keys.first[first]), int(keys.own[end - 1])
        gone = np.full(max(0, prefix + end - first - (last + 1 - low)), -1, np.int64)
        found.append(RequestSlots(first, prefix, np.concatenate((gone, np.arange(low, last + 1)))))
    return found
