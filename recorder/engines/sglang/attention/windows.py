"""What layers with a sliding window read, on the CPU: by what `torch_native` hands to its kernel.

A layer calls the kernel once for each request, with K and V of all that the request has and a mask for its window, or none.
Seen of each such layer: of how many tokens in front of a forward's first one the kernel is let see K and V, and whether what
it gets for the positions of the window and of the forward, of its first head, is what the request's own slots hold. What is
not is looked for in the pool: the kernel is told of no slots, it gets what somebody has gathered. If two slots hold the same, nobody can tell
which of them was read, and nothing comes of it.

A request's row names its slots by the numbers of the pool without a window. The backend gathers from the pool with the window
by these very numbers (0.5.23), also where the two pools number a token otherwise. So it takes for a request's own, too, what
lies there: whether that is the request's is not judged, as the header says.

Nothing is seen of a layer that is made with another window than its pool's. `intel_amx` looks up slots and makes its windows
inside its kernels: of these nothing is known.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from .....kernels.arrays import BoolArray, Int64Array
from ....capture.attention import row_read
from ....capture.forward_input import AttentionInput, TableRead
from ....capture.host_arrays import own_int64
from ...common.hooking import Finish, Hook
from ..forward import mode_of, prefix_and_extend
from ..layers import attention_parts
from ..layout import RunnerLayout, SglangLayout, own_slots
from ..submitted import is_plain

NATIVE: Final = "TorchNativeAttnBackend"
KERNEL: Final = "scaled_dot_product_attention"
_MODES: Final = ("extend", "decode", "mixed")  # in which a request's keys end with the tokens of the forward
_MOST_LIKELY: Final = 4096  # slots that are looked at whole for what was read


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingLayers:
    """The layers of a runner that have a window: their group, and by number which of the pool's buffers each reads."""

    backend: Any
    runner: RunnerLayout
    group: int
    buffers: dict[int, int]


@dataclass(slots=True, kw_only=True)
class WindowStep:
    """What is known of a forward's sliding layers, `[bs]` each: tokens in the cache, and new ones.

    `own`: for each request the slots that the positions from `first` on have, and what its row `numbers` them. `slots`:
    those that were read, and `ends`: of how many tokens, -1 for as many as there are; `counts`: how many of the prefix the
    first new token was let see.
    """

    prefix: Int64Array
    extend: Int64Array
    first: Int64Array
    own: list[Int64Array]
    numbers: list[Int64Array]
    slots: list[Int64Array]
    ends: Int64Array
    counts: Int64Array | None = None
    complete: bool = True  # whether all of its layers could be compared

    def add(self, counts: Int64Array, window: int) -> None:
        """Take what a layer was let see; of several that differ what is not the window's is kept."""
        whole = np.minimum(self.prefix, window)
        self.counts = counts if self.counts is None else np.where(self.counts == whole, counts, self.counts)


class _Running(NamedTuple):
    """The layer that runs: its step, its pool's K and V of the first head, and for each call so far how many tokens it was let see."""

    step: WindowStep
    halves: tuple[Any, Any]
    counts: list[int]


class WindowReads:
    """Sees, in each forward, what the layers of each sliding group read."""

    def __init__(self, model_runners: list[Any], layout: SglangLayout) -> None:
        self._layout = layout
        self._layers: list[SlidingLayers] = []
        self._made: dict[int, Any] = {}  # by number, the window that a layer had when it first ran
        for model_runner in model_runners:
            runner = layout.runners[id(model_runner)]
            group = runner.groups.get("swa")
            kept = getattr(model_runner.token_to_kv_pool, "layers_mapping", {})  # where each layer's K and V are kept
            buffers = {number: at for number, (at, sliding) in kept.items() if sliding}
            for part in attention_parts(model_runner):
                if group is not None and buffers and type(part).__name__ == NATIVE and is_plain(layout.pools[group]):
                    self._layers.append(SlidingLayers(backend=part, runner=runner, group=group, buffers=buffers))
        self._running: _Running | None = None
        self._steps: dict[int, WindowStep] = {}  # by group

    def sees(self, backend: Any) -> bool:
        """Say whether the sliding layers of a backend are looked at."""
        return any(layers.backend is backend for layers in self._layers)

    def hooks(self) -> Iterator[tuple[Any, str, Hook]]:
        """Yield whose method is to be hooked, its name, and the hook."""
        for layers in self._layers:
            yield layers.backend, "forward", self._hook(layers)
        for name in {type(layers.backend).__module__ for layers in self._layers}:
            yield sys.modules[name], KERNEL, self.on_window_kernel

    def take(self) -> dict[int, WindowStep]:
        """Return what was seen since the last call, by group."""
        found, self._steps = self._steps, {}
        return found

    def _hook(self, layers: SlidingLayers) -> Hook:
        group, window = layers.group, self._layout.groups[layers.group].window
        pool = self._layout.pools[group]

        def on_window_layer(_q: Any, _k: Any, _v: Any, layer: Any, batch: Any, *_: Any, **__: Any) -> Finish | None:
            at, mode = layers.buffers.get(layer.layer_id), mode_of(batch.forward_mode)
            if at is None or mode not in _MODES or getattr(batch, "encoder_lens", None) is not None:
                return None
            step = self._steps.get(group)
            if step is None:
                step = self._steps[group] = self._begun(layers, batch, mode)
            if self._made.setdefault(layer.layer_id, layer.sliding_window_size) != window:
                step.complete = False
                return None
            counts: list[int] = []
            self._running = _Running(step, (pool.k_buffer[at][:, 0], pool.v_buffer[at][:, 0]), counts)

            def done(_: Any, error: BaseException | None) -> None:
                self._running = None
                if error is None and len(counts) == len(step.own):
                    step.add(np.array(counts, np.int64), window)
                else:
                    step.complete = False

            return done

        return on_window_layer

    def _begun(self, layers: SlidingLayers, batch: Any, mode: str) -> WindowStep:
        """Return a step of which nothing has been seen; its slots are those in the rows of its requests."""
        group, table = self._layout.groups[layers.group], self._layout.tables[layers.runner.table]
        rows = own_int64(batch.req_pool_indices)
        prefix, extend = prefix_and_extend(batch, mode, rows.size, own_int64(batch.positions))
        first = np.maximum(prefix - group.window, 0)
        read = row_read(table, rows, prefix + extend, starts=first)
        bounds, numbers = np.cumsum(own_int64(read.counts))[:-1], own_int64(read.slots)
        own = np.split(own_slots(self._layout, layers.group, numbers), bounds) if rows.size else []
        return WindowStep(
            prefix=prefix,
            extend=extend,
            first=first,
            own=own,
            numbers=np.split(numbers, bounds) if rows.size else [],
            slots=[one.copy() for one in own],
            ends=np.full(rows.size, -1, np.int64),
        )

    def on_window_kernel(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        _dropout: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> None:
        """Look at what a request's layer gets: how much of it its first new token is let see, and whether it is its own."""
        running = self._running
        if running is None:
            return
        step, number = running.step, len(running.counts)
        known = number < len(step.own)
        new = int(step.extend[number]) if known else 0
        row, before = query.shape[-2] - new, key.shape[-2] - new  # of its first new token
        if new <= 0 or row < 0 or before < 0:
            seen = -1
        elif attn_mask is None:
            seen = min(before, row) if is_causal else before
        else:
            seen = int(attn_mask[..., row, :before].sum()) if str(attn_mask.dtype) == "torch.bool" else -1
        running.counts.append(seen)
        if known:
            _compare(step, number, (key[0, 0], value[0, 0]), running.halves)


def with_windows(attention: AttentionInput | None, seen: dict[int, WindowStep]) -> AttentionInput | None:
    """Return what attention got, with what the sliding layers of groups got; of lengths that differ it is theirs."""
    counted = {group: step.counts for group, step in seen.items() if step.counts is not None}
    if attention is None:
        return AttentionInput(prefix_counts=counted) if counted else None
    slots, seq_lens = [*attention.slots], own_int64(attention.seq_lens)
    for group in counted:
        step = seen[group]
        if step.complete and len(step.own) == seq_lens.size:
            counts = np.array([one.size for one in step.slots], np.int64)
            read = np.concatenate((np.empty(0, np.int64), *step.slots))
            slots[group] = TableRead(starts=step.first, counts=counts, slots=read)
            seq_lens = np.where(step.ends >= 0, step.ends, seq_lens)
    return replace(attention, seq_lens=seq_lens, slots=tuple(slots), prefix_counts=counted)


def _compare(step: WindowStep, number: int, given: tuple[Any, Any], halves: tuple[Any, Any]) -> None:
    """Hold K and V of a request, `[keys, values]`, against what its slots hold of a layer, `[slots, values]`."""
    import torch

    keys, pool = given[0].shape[0], halves[0].shape[0]
    own, first = step.own[number], int(step.first[number])
    if not own.size or not keys:
        return
    fit = all(got.shape[1:] == half.shape[1:] for got, half in zip(given, halves, strict=True))
    numbered = [one for one in (step.numbers[number], own) if one.min() >= 0 and one.max() < pool]
    if not fit or not numbered:
        step.complete = False
        return
    if len(numbered) > 1 and np.array_equal(numbered[0], own):
        numbered.pop()

    def alike(begin: int, end: int, behind: int) -> BoolArray:
        """Say of some positions whether the keys that lie so many places in front of them are those of their slots."""
        got, found = [part[begin - behind : end - behind] for part in given], np.zeros(end - begin, np.bool_)
        for slots in numbered:
            places = torch.from_numpy(slots[begin - first : end - first])
            held = [half.index_select(0, places).to(part.dtype) for half, part in zip(halves, got, strict=True)]
            if all(torch.equal(*pair) for pair in zip(held, got, strict=True)):
                return np.ones_like(found)
            found |= (_same(held[0], got[0]) & _same(held[1], got[1])).numpy()
        return found

    end = first + own.size
    behind = end - keys  # if they end with the request
    if behind and not alike(end - 1, end, behind).all():
        step.ends[number], behind = keys, 0  # if they begin with it
    begin, end = max(first, behind), min(end, keys + behind)
    if begin >= end:
        return
    other = begin - first + np.flatnonzero(~alike(begin, end, behind))
    other = other[step.slots[number][other] == own[other]]  # an earlier layer has not read others there
    if other.size:
        step.slots[number][other] = _slots_with([part[first + other - behind] for part in given], halves)


def _same(one: Any, other: Any) -> Any:
    """Return of which positions two tensors `[n, values]` hold the same, `[n]`."""
    return ((one == other) | (one.isnan() & other.isnan())).all(1)


def _slots_with(given: list[Any], halves: tuple[Any, Any]) -> Int64Array:
    """Return which slot of a layer's pool holds K and V of each position, `[n, values]` each; -1 if none is found."""
    import torch

    likely = torch.arange(halves[0].shape[0])
    for value in (0, -1):  # a value of each row tells most of them apart
        wanted, held = given[0][:, value].float(), halves[0][:, value].to(given[0].dtype).float()
        likely = likely[torch.isin(held[likely], wanted)]
    likely = likely[:_MOST_LIKELY]
    rows = [half[likely].to(got.dtype) for half, got in zip(halves, given, strict=True)]
    found = np.full(len(given[0]), -1, np.int64)
    for n in range(found.size):
        same = _same(rows[0], given[0][n : n + 1]) & _same(rows[1], given[1][n : n + 1])
        at = same.nonzero()[:, 0]
        if len(at):
            found[n] = int(likely[at[0]])
    return found
