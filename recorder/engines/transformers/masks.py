"""What the masks of attention let each token of a step see, on the host: how far back it looks, and whether that is all there is.

Read where a layer calls its attention, of each mask that layers of a group are given in a step. A kernel that gets no mask but
a window, as flash attention does, is not looked at.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ....kernels.arrays import BoolArray, Int64Array
from ...capture.host_arrays import own_int64, ragged_index
from .layout import TransformersGroup

_EAGER: Final = "paged|eager"
_UNKNOWN: Final = -1


class StepKeys(NamedTuple):
    """Where the tokens of a step find the keys of their requests among all `total` that a group's layers get, `[T]` each.

    `first` is the first key of a token's request, `own` its own: -1 if its request has not as many keys as it ought to, of which
    something else speaks.
    """

    total: int
    requests: Int64Array
    positions: Int64Array
    first: Int64Array
    own: Int64Array


class Masks:
    """What the tokens of a step see; `begin` says which step, `on_attention` is called as each layer's attention is.

    `counts`: by group, at how many positions before its own each token looks, `[T]`. `off`: by how many keys that are not before
    a window a token of each request sees more or less, `[bs]`.
    """

    def __init__(self, layouts: Sequence[TransformersGroup]) -> None:
        self._layouts = [layout for layout in layouts if layout.allocator._copy_view.device.type == "cpu"]
        self._groups = {int(n): layout for layout in self._layouts for n in layout.allocator.layer_indices}
        self._keys: dict[int, StepKeys] = {}  # by group
        self._looked: set[tuple[Any, ...]] = set()
        self.counts: dict[int, Int64Array] = {}
        self.off = np.empty(0, np.int64)

    def begin(self, io: Any, prefix: Int64Array, extend: Int64Array) -> None:
        """Take the step that is about to run: `[bs]` tokens in the cache, and of the step."""
        self._looked.clear()
        self.counts.clear()
        self.off = np.zeros_like(prefix)
        layouts = [] if io.use_block_table else self._layouts  # which a kernel walks that gets no mask
        self._keys = {layout.index: _step_keys(layout, io, prefix, extend) for layout in layouts}

    def keys_of(self, layer: int) -> tuple[TransformersGroup, StepKeys] | None:
        """Return a layer's group and where the step's tokens find their keys, None if that is not known."""
        layout = self._groups.get(layer)
        keys = None if layout is None else self._keys.get(layout.index)
        return None if layout is None or keys is None else (layout, keys)

    def on_attention(self, kind: str, module: Any, mask: Any, is_causal: bool | None) -> None:
        """Look at the `mask` that a layer's attention gets, `[1, 1, at least T, keys]`, or at none."""
        found = self.keys_of(getattr(module, "layer_idx", _UNKNOWN))
        if found is None:
            return
        layout, keys = found
        causal = kind != _EAGER and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        which = (layout.index, causal) if mask is None else (layout.index, mask.data_ptr(), *mask.shape)
        if which in self._looked:
            return
        self._looked.add(which)
        visible = _unmasked(keys, causal) if mask is None else _visible(mask, keys)
        if visible is not None:
            self._add(layout, keys, visible)

    def _add(self, layout: TransformersGroup, keys: StepKeys, visible: BoolArray) -> None:
        """Add what the tokens see by one mask, `[T, keys]`; of several what is not as it ought to be is kept."""
        count = np.count_nonzero(visible, axis=1)
        low = visible.argmax(axis=1)
        high = visible.shape[1] - 1 - visible[:, ::-1].argmax(axis=1)
        known, nothing, others = keys.own >= 0, count == 0, low < keys.first
        looks = np.where(nothing, 0, np.maximum(keys.own - low, 0))
        looks[~known | (others & ~nothing)] = _UNKNOWN
        whole = np.minimum(keys.positions, layout.window) if layout.window else keys.positions
        before = self.counts.get(layout.index, whole)
        self.counts[layout.index] = np.where(before == whole, looks, before)
        less, more = count - (high - low + 1), high - keys.own
        off = np.where(nothing, -1, np.where(others, keys.first - low, np.where(more != 0, more, less)))
        wrong = np.flatnonzero(known & (off != 0))
        requests, at = np.unique(keys.requests[wrong], return_index=True)
        self.off[requests] = np.where(self.off[requests] == 0, off[wrong[at]], self.off[requests])


def _step_keys(layout: TransformersGroup, io: Any, prefix: Int64Array, extend: Int64Array) -> StepKeys:
    bounds = own_int64(io.cumulative_seqlens_k[layout.name][: prefix.size + 1])
    cached = np.diff(bounds) - extend
    right = cached == (np.minimum(prefix, layout.window) if layout.window else prefix)
    return StepKeys(
        total=int(bounds[-1]),
        requests=np.repeat(np.arange(prefix.size, dtype=np.int64), extend),
        positions=ragged_index(prefix, extend),
        first=np.repeat(bounds[:-1], extend),
        own=np.where(np.repeat(right, extend), ragged_index(bounds[:-1] + cached, extend), _UNKNOWN),
    )


def _visible(mask: Any, keys: StepKeys) -> BoolArray | None:
    """Return what a mask of booleans, or of what is added to scores, leaves, `[T, keys]`; None if it is no mask of this step."""
    import torch

    tokens = keys.own.size
    if mask.dim() != 4 or mask.shape[2] < tokens or mask.shape[3] < keys.total or mask.device.type != "cpu":
        return None
    own = mask[0, 0, :tokens].detach()
    if own.dtype != torch.bool:
        own = own > torch.finfo(own.dtype).min / 2
    left: BoolArray = own.numpy()
    return left


def _unmasked(keys: StepKeys, causal: bool) -> BoolArray:
    """Return what is left if there is no mask: all, or of a step of several tokens of the first keys those up to each token's number."""
    tokens = keys.own.size
    if causal and tokens > 1:
        return np.tri(tokens, max(keys.total, 1), dtype=np.bool_)
    return np.ones((tokens, max(keys.total, 1)), np.bool_)
