"""What came out of attention, on the CPU: held against what the slots of each request hold, layer by layer.

`torch_native` and `intel_amx` keep K and V of a token as they are handed in, `[slots, heads, dim]`. Left alone: layers that
attend to something else than the request's own past (cross-attention, encoders), that are given sinks or other weights, and
modes in which a request's keys do not end with the tokens of the forward.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from .....kernels.arrays import Int64Array
from ....capture.attention_output import AttentionCall, OutputChecks, RequestSlots, requests_of
from ....capture.forward_input import AttentionInput, OutputRead
from ....capture.host_arrays import own_int64, read_runs
from ...common.hooking import Finish, Hook
from ..forward import mode_of, prefix_and_extend
from ..layers import ROW_READERS, attention_parts
from ..layout import RunnerLayout, SglangLayout, own_slots

_MODES: Final = ("EXTEND", "DECODE", "MIXED")  # not a diffusion's, whose tokens see those behind them
# What a backend attends by: one that serves recurrent layers, too, calls its part for attention past `forward`.
ATTENDING: Final = ("forward_extend", "forward_decode")
_OWN: Final = "DECODER"  # the kind of attention that reads a request's own past


class AttentionOutputs:
    """Sees what each layer's attention gives in one of `every` forwards; `take` returns what is wrong of it."""

    def __init__(self, model_runners: list[Any], layout: SglangLayout, every: int = 1) -> None:
        self._layout = layout
        self._parts = [
            (part, layout.runners[id(model_runner)], getattr(model_runner.token_to_kv_pool, "layers_mapping", None))
            for model_runner in model_runners
            for part in attention_parts(model_runner)
            if type(part).__name__ in ROW_READERS
        ]
        self._checks = OutputChecks(every)
        self._slots: dict[int, list[list[RequestSlots]]] = {}  # by group, of the forward that runs

    def hooks(self) -> Iterator[tuple[Any, str, Hook]]:
        """Yield whose method is to be hooked, its name, and the hook."""
        for part, runner, sliding in self._parts:
            for name in ATTENDING:
                yield part, name, self._hook(part, runner, sliding)

    def take(self) -> tuple[list[OutputRead], int]:
        """Return what was read wrongly since the last call, and how many outputs were looked at."""
        self._slots.clear()
        return self._checks.take()

    def _hook(self, part: Any, runner: RunnerLayout, sliding: Any) -> Hook:
        import torch

        wide = (torch.float32, torch.float16, torch.bfloat16)  # of 8 bits the scales decide what is read

        def on_layer(query: Any, _k: Any, _v: Any, layer: Any, batch: Any, *_: Any, **more: Any) -> Finish | None:
            window = sliding is not None and sliding.get(layer.layer_id, (0, False))[1]
            group = runner.groups.get("swa" if window else "full")
            plain = batch.forward_mode.name in _MODES and is_plain(layer, batch, more)
            if group is None or not plain or not self._checks.wanted():
                return None
            pool: Any = getattr(part, "token_to_kv_pool", None) or getattr(batch, "token_to_kv_pool", None)
            if not hasattr(pool, "get_key_buffer"):
                return None
            keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            as_given = keys.dim() == 3 and tuple(keys.shape[1:]) == (layer.tp_k_head_num, layer.qk_head_dim)
            if not as_given or keys.dtype not in wide or values.shape[:2] != keys.shape[:2]:
                return None
            query = query.detach().reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).clone()

            def read(slots: Int64Array, head: int) -> tuple[Any, Any]:
                places = torch.from_numpy(slots.clip(0, keys.shape[0] - 1))
                return keys[:, head].index_select(0, places), values[:, head].index_select(0, places)

            def done(output: Any, error: BaseException | None) -> None:
                if error is None:
                    shaped = output.detach().reshape(-1, layer.tp_q_head_num, layer.v_head_dim)
                    call = AttentionCall(query, shaped, float(layer.scaling), float(layer.logit_cap or 0))
                    ways, window = self._requests(runner, group, batch), self._layout.groups[group].window
                    place = {"group": group, "layer": layer.layer_id}
                    self._checks.look(
                        call, ways, read, int(keys.shape[1]), windows=(window or own_window(layer),), **place
                    )

            return done

        return on_layer

    def _requests(self, runner: RunnerLayout, group: int, batch: Any) -> list[list[RequestSlots]]:
        """Return the slots of the requests' positions: as the group numbers them, or else as their rows do.

        `torch_native` (0.5.23) gathers K and V of layers with a window by the rows' numbers.
        """
        found = self._slots.get(group)
        if found is None:
            rows, mode = own_int64(batch.req_pool_indices), mode_of(batch.forward_mode)
            prefix, extend = prefix_and_extend(batch, mode, rows.size, own_int64(batch.positions))
            numbers = read_runs(self._layout.tables[runner.table], rows, np.zeros_like(rows), prefix + extend)
            ways = [own_slots(self._layout, group, numbers)]
            if self._layout.groups[group].lut >= 0 and not np.array_equal(ways[0], numbers):
                ways.append(numbers)
            found = self._slots[group] = [requests_of(one, prefix, extend) for one in ways]
        return found


def with_outputs(attention: AttentionInput | None, outputs: AttentionOutputs | None) -> AttentionInput | None:
    """Return what attention got, with what its outputs say; of lengths that differ it is theirs."""
    found, compared = ([], 0) if outputs is None else outputs.take()
    if not compared:
        return attention
    return replace(attention or AttentionInput(), outputs=found, outputs_compared=compared)


def own_window(layer: Any) -> int:
    """Return how many positions before its own a layer's token sees, 0 for all: of a pool that keeps all, the layer alone says it."""
    return max(int(getattr(layer, "sliding_window_size", None) or 0), 0)


def is_plain(layer: Any, batch: Any, more: dict[str, Any]) -> bool:
    """Say whether a layer attends to the past of each request, and weighs it by nothing but queries and keys."""
    kind = getattr(getattr(layer, "attn_type", None), "name", _OWN)
    other = {name for name, value in more.items() if value is not None and name != "save_kv_cache"}
    return (
        kind == _OWN
        and not getattr(layer, "is_cross_attention", False)
        and not other
        and getattr(batch, "encoder_lens", None) is None
        and getattr(layer, "xai_temperature_len", -1) in (-1, None)
    )
