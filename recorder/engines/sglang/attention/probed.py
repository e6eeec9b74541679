"""What comes out of attention on a GPU: a probe stands behind the layers that are known, in CUDA graphs too.

Left alone: what the CPU's are, layers of another form than the first, those whose slots go through a full-to-SWA table, and
drafts.
"""

import functools
from typing import Any, Final

from .....kernels.capture.attention_probe import PagedHalf, ProbedCall
from ....capture.device.attention_probe import AttentionProbe, ProbedLayer
from ....capture.device.recorder import DeviceRecorder
from ...common.hooking import put_in_place
from ...common.probing import ProbeTurns
from ..forward import mode_of
from ..layers import attention_parts
from ..layout import RunnerLayout
from .outputs import ATTENDING, is_plain, own_window

_BACKENDS: Final = frozenset({"TritonAttnBackend", "FlashAttentionBackend", "FlashInferAttnBackend"})
_MODES: Final = frozenset({"extend", "decode", "mixed"})
_LAYER: Final = "RadixAttention"
_ARGUMENTS: Final = ("q", "k", "v", "layer", "forward_batch")  # of a backend's forward, in order


class ProbedAttention:
    """Hooks the attention of the target's runner once it can run, before a graph is captured; nothing is looked at before `begin`."""

    def __init__(self) -> None:
        self._turns = ProbeTurns()
        self._windows: dict[int, int] = {}  # of each layer that is known, how far back it looks, 0: all
        self._begun_for: Any = None  # the runner
        self._waiting: tuple[DeviceRecorder, RunnerLayout, int] | None = None

    def before_model(self, runner: Any, *, capturing: bool) -> None:
        """Hook a runner's attention, the first time that its model runs."""
        if self._begun_for is None and not capturing and not getattr(runner, "is_draft_worker", False):
            self._begun_for = runner
            try:
                self._hook(runner)
            except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
                self._turns.fail(error)

    def begin(self, recorder: DeviceRecorder, runner: RunnerLayout, every: int) -> None:
        """Have a recorder look at the target's layers, in one of so many forwards."""
        group, self._waiting = runner.groups.get("full"), (recorder, runner, every)
        if group is not None:
            self._turns.begin(recorder, {number: (group, (window,)) for number, window in self._windows.items()}, every)

    def _hook(self, runner: Any) -> None:
        pool, parts = runner.token_to_kv_pool, attention_parts(runner)
        if any(type(part).__name__ not in _BACKENDS for part in parts) or not hasattr(pool, "get_key_buffer"):
            return
        sliding, found = getattr(pool, "layers_mapping", None) or {}, dict[int, ProbedLayer]()
        for layer in (one for one in runner.model.modules() if type(one).__name__ == _LAYER):
            if layer.layer_id not in found and not sliding.get(layer.layer_id, (0, False))[1]:
                one = _layer(layer, pool)
                if one is not None:
                    found[layer.layer_id], self._windows[layer.layer_id] = one, own_window(layer)
        if not found:
            return
        table = runner.req_to_token_pool.req_to_token
        probe = AttentionProbe(found, positions=int(table.shape[1]))
        for ints in ("int64", "int32"):
            probe.prepare(ints, rows="int64")
        self._turns.probe = probe
        for part in {id(part): part for part in parts}.values():
            for name in ATTENDING:
                put_in_place(part, name, functools.partial(self._forward, getattr(part, name), table))
        if self._waiting is not None:  # the recording has begun
            self.begin(*self._waiting)

    def _forward(self, original: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        number = getattr(given.get("layer"), "layer_id", -1)
        return self._turns.run(
            functools.partial(original, *args, **kwargs), number, functools.partial(_launch, table, given)
        )


def _launch(table: Any, given: dict[str, Any], probe: AttentionProbe, output: Any) -> None:
    query, _, _, layer, batch = (given.pop(name) for name in _ARGUMENTS)
    mode = mode_of(batch.forward_mode)
    if mode not in _MODES or not is_plain(layer, batch, given) or not hasattr(output, "data_ptr"):
        return
    shaped = output.reshape(-1, layer.tp_q_head_num, layer.v_head_dim)
    queries = query.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    lens, rows, starts = batch.seq_lens, batch.req_pool_indices, None
    if mode != "decode":
        starts = lens.new_zeros(lens.numel() + 1)
        starts[1:] = batch.extend_seq_lens.cumsum(0)
    if queries.data_ptr() != shaped.data_ptr() and probe.fits(queries, shaped):
        probe.behind(layer.layer_id, ProbedCall(queries, shaped, table, 1, lens, starts, rows))


def _layer(layer: Any, pool: Any) -> ProbedLayer | None:
    """Return where a layer's K and V lie and how it weighs them, None if it is not known."""
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    form = (layer.tp_k_head_num, layer.qk_head_dim), (layer.tp_k_head_num, layer.v_head_dim)
    as_given = keys.dim() == 3 and (tuple(keys.shape[1:]), tuple(values.shape[1:])) == form
    if not as_given or not keys.dtype.is_floating_point or keys.element_size() < 2 or keys.dtype != values.dtype:
        return None
    heads = int(layer.tp_q_head_num)
    if heads % keys.shape[1] or keys.stride(2) != 1 or values.stride(2) != 1:
        return None
    halves = PagedHalf(keys[:, None]), PagedHalf(values[:, None])
    return ProbedLayer(*halves, heads, float(layer.scaling), float(layer.logit_cap or 0))
