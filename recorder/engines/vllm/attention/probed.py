"""What comes out of attention on a GPU: a probe stands behind the layers that are known, in CUDA graphs too.

Left alone: what the CPU's are, and layers of another form than the first.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from .....kernels.capture.attention_probe import PagedHalf, ProbedCall
from ....capture.device.attention_probe import AttentionProbe, ProbedLayer
from ....capture.device.recorder import DeviceRecorder
from ...common.hooking import Wraps
from ...common.probing import ProbeTurns
from ..device import block_tables
from ..kv import cache_of, layer_number, whole_half
from ..layout import VllmGroup, draft_layers, looks_back
from .given import FIELDS
from .outputs import weighs_plainly

_IMPLS: Final = frozenset({"FlashAttentionImpl", "TritonAttentionImpl"})
# Of an implementation's forward, in order.
_ARGUMENTS: Final = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_AXES: Final = {"block slot head dim": (0, 1, 2, 3), "block head slot dim": (0, 2, 1, 3)}


class _Group(NamedTuple):
    """A KV-cache group of vLLM's, before it is known how it is recorded."""

    gid: int
    spec: Any
    num_slots: int
    block_size: int


class ProbedAttention:
    """Hooks the attention of a runner's layers, before graphs are captured; nothing is looked at before `begin`."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._turns = runner, ProbeTurns()
        self._wraps = Wraps()
        self._impls: dict[int, tuple[Any, _Group]] = {}
        try:
            self._hook(runner)
        except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
            self._turns.fail(error)

    def begin(self, recorder: DeviceRecorder, groups: Sequence[VllmGroup], every: int) -> None:
        """Have a recorder look at the layers of its groups, in one of so many forwards."""
        by_gid, places = {group.gid: group for group in groups}, dict[int, tuple[int, tuple[int, ...]]]()
        for number, (impl, own) in self._impls.items():
            group = by_gid.get(own.gid)
            if group is not None:
                made = looks_back(getattr(impl, "sliding_window", None))
                windows = dict.fromkeys((group.window, group.window if made is None else made))
                places[number] = group.index, tuple(windows)
        self._turns.begin(recorder, places, every)

    def undo(self) -> None:
        """Take the hooks off."""
        self._wraps.undo()
        self._turns.probe = None

    def _hook(self, runner: Any) -> None:
        found, known = dict[int, ProbedLayer](), runner.vllm_config.compilation_config.static_forward_context
        drafts, config = draft_layers(runner), runner.kv_cache_config
        for gid, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            first = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
            own = _Group(gid, first, int(config.num_blocks) * int(spec.block_size), int(spec.block_size))
            for name in group.layer_names:
                layer: Any = known.get(name)
                one = None if layer is None or name in drafts else _layer(layer, own)
                if one is not None and layer_number(name) not in found:
                    found[layer_number(name)] = one
                    self._impls[layer_number(name)] = layer.impl, own
        if not found:
            return
        probe = AttentionProbe(found, positions=int(runner.vllm_config.model_config.max_model_len))
        probe.prepare("int32")
        self._turns.probe = probe
        for number in probe.layers:
            impl, own = self._impls[number]
            hook = functools.partial(self._forward, impl.forward, number, own)
            self._wraps.put(impl, "forward", functools.update_wrapper(hook, impl.forward))

    def _forward(self, original: Callable[..., Any], number: int, own: _Group, *args: Any, **kwargs: Any) -> Any:
        def launch(probe: AttentionProbe, _: Any) -> None:
            self._launch(probe, number, own, dict(zip(_ARGUMENTS, args, strict=False)) | kwargs)

        return self._turns.run(functools.partial(original, *args, **kwargs), number, launch)

    def _launch(self, probe: AttentionProbe, number: int, own: _Group, given: dict[str, Any]) -> None:
        metadata, output, query = given.get("attn_metadata"), given.get("output"), given.get("query")
        lens, starts, _ = (getattr(metadata, name, None) for name in FIELDS)
        if lens is None or starts is None or output is None or query is None or query.dim() != 3:
            return
        otherwise = (
            getattr(metadata, "causal", True) is not True or getattr(metadata, "mm_prefix_range", None) is not None
        )
        shaped = output.view(*query.shape[:2], -1)
        if not otherwise and query.data_ptr() != output.data_ptr() and probe.fits(query, shaped):
            (table,) = block_tables(self._runner, [own])
            probe.behind(number, ProbedCall(query, shaped, table.table, table.page_size, lens, starts))


def _layer(layer: Any, own: _Group) -> ProbedLayer | None:
    """Return where a layer's K and V lie and how it weighs them, None if it is not known."""
    kv, impl = cache_of(layer), vars(layer).get("impl")  # recurrent layers have none
    if kv is None or impl is None or type(impl).__name__ not in _IMPLS:
        return None
    if not kv.dtype.is_floating_point or not weighs_plainly(impl):
        return None
    (keys, axes), (values, _) = (whole_half(kv, own, half) for half in ("K", "V"))
    if axes not in _AXES or keys.stride(-1) != 1 or values.stride(-1) != 1:
        return None
    halves = PagedHalf(keys.permute(_AXES[axes])), PagedHalf(values.permute(_AXES[axes]))
    heads, shape = int(impl.num_heads), halves[0].shape
    if heads % shape[2] or shape[2] != int(impl.num_kv_heads):
        return None
    return ProbedLayer(*halves, heads, float(impl.scale), float(impl.logits_soft_cap or 0))
