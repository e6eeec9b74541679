"""What came out of attention in a step, on the CPU: held against what the slots of each request hold, layer by layer.

The CPU's cache keeps K and V of a block in an order that its instruction set wants. Where each value goes is found out once,
by an update of scratch memory, so that the cache is read as it is. Left alone: layers that attend to something else than the
request's own past, that weigh it by sinks or distance, or keep 8-bit values; kernels on a GPU, which a graph may call.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .....kernels.arrays import Int64Array
from ....capture.attention import paged_read
from ....capture.attention_output import AttentionCall, OutputChecks, requests_of
from ....capture.forward_input import AttentionInput, OutputRead
from ....capture.host_arrays import own_int64
from ...common.hooking import Finish, OnFault, wrap_method
from ..kv import cache_of, is_of_cpu, layer_number
from ..layout import CPU_ATTENTION, VllmGroup, looks_back
from ..step import Step

_OWN: Final = "decoder"  # the kind of attention that reads a request's own past


class _Layer(NamedTuple):
    """A layer that is looked at: its group, its number, how far back it may look, and where its cache keeps K and V."""

    group: VllmGroup
    number: int
    windows: tuple[int, ...]
    places: tuple[Any, Any]


class OutputCalls:
    """Sees what the layers of each group give in one of `every` steps."""

    def __init__(self, groups: Sequence[VllmGroup], layers: dict[str, Any], every: int = 1) -> None:
        self._layers: list[tuple[Any, _Layer]] = []
        for group in groups:
            for name in group.layers:
                layer: Any = layers.get(name)
                found = None if layer is None else _places(layer, group)
                if found is not None:
                    made = looks_back(getattr(layer.impl, "sliding_window", None))
                    windows = tuple(dict.fromkeys((group.window, group.window if made is None else made)))
                    self._layers.append((layer, _Layer(group, layer_number(name), windows, found)))
        self._checks = OutputChecks(every)
        self._step: Step | None = None
        self._slots: dict[int, Any] = {}  # by group, of the step

    def attach(self, on_fault: OnFault) -> None:
        """Hook the layers' attention."""
        for layer, one in self._layers:
            wrap_method(layer.impl, "forward", functools.partial(self._on_layer, one), on_fault)

    def begin(self, step: Step | None) -> None:
        """Forget what was seen, and look at a step's layers from now on; None: at none."""
        self._step = step
        self._slots.clear()
        self._checks.take()

    def take(self) -> tuple[list[OutputRead], int]:
        """Return what was read wrongly in the step, and how many outputs were looked at."""
        return self._checks.take()

    def _on_layer(
        self,
        one: _Layer,
        layer: Any,
        query: Any,
        _key: Any,
        _value: Any,
        cache: Any,
        given: Any,
        output: Any,
        *_: Any,
        **__: Any,
    ) -> Finish | None:
        step = self._step
        tokens = 0 if step is None else int(step.extend.sum())
        plain = getattr(given, "causal", False) is True and getattr(given, "dynamic_causal", None) is None
        if (
            step is None
            or not plain
            or getattr(given, "num_logits_indices", None) is not None
            or query.shape[0] < tokens
        ):
            return None
        if not self._checks.wanted():
            return None
        query = query[:tokens].detach().clone()

        def read(slots: Int64Array, head: int) -> tuple[Any, Any]:
            return _read(cache, one, slots, head)

        def done(_: Any, error: BaseException | None) -> None:
            if error is None:
                impl = layer.impl
                call = AttentionCall(
                    query, output[:tokens].detach().view(query.shape), impl.scale, float(impl.logits_soft_cap or 0)
                )
                place = {"group": one.group.index, "layer": one.number}
                self._checks.look(
                    call, [self._requests(step, one.group)], read, int(cache.shape[1]), windows=one.windows, **place
                )

        return done

    def _requests(self, step: Step, group: VllmGroup) -> Any:
        if group.index not in self._slots:
            table, size = step.tables[group.index]
            slots = own_int64(paged_read(table, size, step.prefix + step.extend).slots)
            self._slots[group.index] = requests_of(slots, step.prefix, step.extend)
        return self._slots[group.index]


def chosen_outputs(found: Sequence[OutputRead], compared: int, chosen: Int64Array) -> AttentionInput:
    """Return what outputs say of some requests `[n]` of a step."""
    places = {int(r): n for n, r in enumerate(chosen.tolist())}
    mine = [one._replace(request=places[one.request]) for one in found if one.request in places]
    return AttentionInput(outputs=mine, outputs_compared=compared)


def _places(layer: Any, group: VllmGroup) -> tuple[Any, Any] | None:
    """Return where a layer's cache keeps K and V of a token in a head's part of a block, `[tokens, dim]` each; None if that is not known."""
    kv, impl = cache_of(layer), getattr(layer, "impl", None)
    if kv is None or not is_of_cpu(kv) or type(impl).__name__ != CPU_ATTENTION or not kv.dtype.is_floating_point:
        return None
    if not weighs_plainly(impl):
        return None
    if int(kv.shape[3]) != 2 * int(group.spec.head_size):
        return None
    try:
        return learnt_places(layer, kv)
    except Exception:  # noqa: BLE001  # another signature: then nothing is known
        return None


def weighs_plainly(impl: Any) -> bool:
    """Say whether a layer's attention weighs a request's own past by queries and keys alone, and keeps no 8-bit values."""
    weighs = any(getattr(impl, name, None) is not None for name in ("alibi_slopes", "sinks"))
    return not weighs and not getattr(impl, "is_fp8_kv_cache", False) and getattr(impl, "attn_type", _OWN) == _OWN


def learnt_places(layer: Any, kv: Any) -> tuple[Any, Any] | None:
    """Find out where an update puts K and V, by updates of one block of scratch memory that say the bits of each value's number.

    Returns `[tokens, dim]` places among the values of a head's part of a block, for K and for V; None if an update does not keep
    each value in a place of its own.
    """
    import torch

    _, heads, tokens, width = (int(n) for n in kv.shape)
    dim, order = width // 2, torch.arange(tokens)
    numbers = torch.arange(tokens * dim).reshape(tokens, 1, dim)
    learnt = torch.zeros((2, tokens * width), dtype=torch.int64)
    for half in (0, 1):
        for bit in range(max(1, int(tokens * dim - 1).bit_length())):
            scratch = torch.zeros((1, heads, tokens, width), dtype=kv.dtype)
            own = ((numbers >> bit & 1) + 1).to(kv.dtype).expand(tokens, heads, dim).contiguous()
            other = torch.zeros_like(own)
            layer.impl.do_kv_cache_update(layer, *((other, own) if half else (own, other)), scratch, order)
            found = scratch[0, 0].reshape(-1).float()
            if sorted(found.unique().tolist()) not in ([0.0, 1.0], [0.0, 1.0, 2.0]):
                return None
            learnt[half] += torch.where(
                found > 0, ((found - 1).long() << bit) + int(not bit), 0
            )  # 0: nothing comes to lie there
    places = []
    for half in (0, 1):
        filled = torch.nonzero(learnt[half]).reshape(-1)
        order = (learnt[half][filled] - 1).argsort()
        if filled.numel() != tokens * dim or not torch.equal(
            learnt[half][filled][order] - 1, torch.arange(tokens * dim)
        ):
            return None
        places.append(filled[order].reshape(tokens, dim))
    return places[0], places[1]


def _read(cache: Any, one: _Layer, slots: Int64Array, head: int) -> tuple[Any, Any]:
    """Return K and V of some slots `[n]` in a head, `[n, dim]` each."""
    import torch

    tokens = int(cache.shape[2])
    at = torch.from_numpy(np.clip(slots, 0, int(cache.shape[0]) * tokens - 1))
    own, offset = cache[at // tokens, head].reshape(len(at), -1), at % tokens
    return own.gather(1, one.places[0][offset]), own.gather(1, one.places[1][offset])
