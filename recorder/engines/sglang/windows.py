"""How far back layers with a sliding window look, on the CPU: by what `torch_native` hands to its kernel.

A layer calls the kernel once for each request, with K and V of all that the request has and a mask for its window, or none.
Seen of the first such layer of a model: of how many tokens in front of a forward's first one the kernel is let see K and V.
Which slots these are is not seen, and nothing of a layer that is made with another window than its pool's. `intel_amx` makes
its windows inside its kernels: of these nothing is known.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ..common.hooking import Finish, Hook
from .forward import mode_of
from .layers import attention_parts, queries_of
from .layout import SglangLayout

NATIVE: Final = "TorchNativeAttnBackend"
KERNEL: Final = "scaled_dot_product_attention"
_MODES: Final = ("extend", "decode", "mixed")  # in which a request's keys end with the tokens of the forward


class WindowReads:
    """Counts, in each forward, the tokens of the prefix that the first layer of each sliding group is let see."""

    def __init__(self, model_runners: list[Any], layout: SglangLayout) -> None:
        self._groups = layout.groups
        self._layers: list[tuple[Any, int, int]] = []  # backend, number of a layer, group
        self._made: dict[int, Any] = {}  # by group, the window that its layer had when it first ran
        for model_runner in model_runners:
            group = layout.runners[id(model_runner)].groups.get("swa")
            kept = getattr(model_runner.token_to_kv_pool, "layers_mapping", {})  # where each layer's K and V are kept
            layers = [number for number, (_, sliding) in kept.items() if sliding]
            for part in attention_parts(model_runner):
                if group is not None and layers and type(part).__name__ == NATIVE:
                    self._layers.append((part, min(layers), group))
        self._lens: list[int] = []  # new tokens of the requests of the layer that runs
        self._counts: list[int] | None = None  # of its calls so far, None if no such layer runs
        self._found: dict[int, Int64Array] = {}

    def hooks(self) -> Iterator[tuple[Any, str, Hook]]:
        """Yield whose method is to be hooked, its name, and the hook."""
        for backend, layer, group in self._layers:
            yield backend, "forward", self._hook(layer, group)
        for name in {type(backend).__module__ for backend, _, _ in self._layers}:
            yield sys.modules[name], KERNEL, self.on_window_kernel

    def take(self) -> dict[int, Int64Array]:
        """Return what was seen since the last call, `[bs]` by group."""
        found, self._found = self._found, {}
        return found

    def _hook(self, number: int, group: int) -> Hook:
        window = self._groups[group].window

        def on_window_layer(_q: Any, _k: Any, _v: Any, layer: Any, batch: Any, *_: Any, **__: Any) -> Finish | None:
            mode = mode_of(batch.forward_mode)
            lens = queries_of(batch, mode) if layer.layer_id == number and mode in _MODES else None
            if lens is None or self._made.setdefault(group, layer.sliding_window_size) != window:
                return None
            if group in self._found or getattr(batch, "encoder_lens", None) is not None:
                return None
            counts: list[int] = []
            self._lens, self._counts = lens.tolist(), counts

            def done(_: Any, error: BaseException | None) -> None:
                self._counts = None
                if error is None and len(counts) == len(self._lens) == batch.req_pool_indices.numel():
                    self._found[group] = np.array(counts, np.int64)

            return done

        return on_window_layer

    def on_window_kernel(
        self,
        query: Any,
        key: Any,
        _value: Any,
        attn_mask: Any = None,
        _dropout: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> None:
        """Count what a request's first new token is let see: behind the mask, or of all that a kernel gets."""
        counts = self._counts
        if counts is None:
            return
        new = self._lens[len(counts)] if len(counts) < len(self._lens) else 0
        row, before = query.shape[-2] - new, key.shape[-2] - new  # of its first new token
        if new <= 0 or row < 0 or before < 0:
            seen = -1
        elif attn_mask is None:
            seen = min(before, row) if is_causal else before
        else:
            seen = int(attn_mask[..., row, :before].sum()) if str(attn_mask.dtype) == "torch.bool" else -1
        counts.append(seen)
