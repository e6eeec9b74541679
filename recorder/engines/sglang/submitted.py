"""What a model's first layers hand to their pools, on the CPU: held against what the pools hold behind the forward.

The decodes of `intel_amx` store K and V in attention's own kernel: of those nothing is known.
"""

from collections.abc import Iterator
from typing import Any, Final

from ..common.hooking import Hook
from .layout import SglangLayout, on_gpu

# Pools that store what they are given as it is, and the arguments of `set_kv_buffer` behind layer and places.
POOLS: Final = {"MHATokenToKVPool": ("K", "V")}


class SubmittedKv:
    """Keeps what was handed in since the last `take`: the leading bytes of each pool's first layer, and of what samples layers all."""

    def __init__(self, layout: SglangLayout) -> None:
        self._layout = layout
        # By group and stream, `[T, values]`, or such by layer.
        self._given: dict[tuple[int, int], Any] = {}

    def watches(self, runner: int) -> bool:
        """Say whether all pools of a runner are looked at."""
        mine = [
            pool for pool, group in zip(self._layout.pools, self._layout.groups, strict=True) if group.runner == runner
        ]
        return all(is_plain(pool) for pool in mine)

    def hooks(self) -> Iterator[tuple[Any, Hook]]:
        """Yield each pool that is looked at, and what is to be called before its `set_kv_buffer`."""
        for number, pool in enumerate(self._layout.pools):
            if is_plain(pool) and self._layout.groups[number].streams:
                yield pool, self._hook(number, pool)

    def take(self, tokens: int) -> dict[tuple[int, int], Any]:
        """Return what was handed in for a forward of so many tokens, as `Recorder.after_forward` takes it, and forget it."""
        given, self._given = self._given, {}
        found: dict[tuple[int, int], Any] = {}
        for key, rows in given.items():
            if isinstance(rows, dict):
                found[key] = {layer: own for layer, own in rows.items() if own.shape[0] == tokens}
            elif rows.shape[0] == tokens:
                found[key] = rows
        return found

    def _hook(self, group: int, pool: Any) -> Hook:
        halves = POOLS[type(pool).__name__]
        streams, sampled = {}, {}
        for place, stream in enumerate(self._layout.groups[group].streams):
            argument = halves.index(stream.half)
            if stream.samples:
                sampled[argument] = place, stream.layers
            else:
                streams[argument] = place, stream.capture_bytes // pool.dtype.itemsize
        first = int(getattr(pool, "start_layer", 0) or 0)

        def on_store(layer: Any, _: Any, *states: Any, layer_id_override: int | None = None, **__: Any) -> None:
            number = (layer.layer_id if layer_id_override is None else layer_id_override) - first
            for argument, rows in enumerate(states[: len(halves)]):
                if rows.dtype != pool.dtype:
                    continue
                flat = rows.reshape(rows.shape[0], -1)
                if number == 0 and argument in streams:
                    stream, values = streams[argument]
                    self._given[group, stream] = flat[:, :values].clone()
                stream, layers = sampled.get(argument, (-1, ()))
                if 0 <= number < len(layers):
                    self._given.setdefault((group, stream), {})[layers[number]] = flat.clone()

        return on_store


def is_plain(pool: Any) -> bool:
    """Say whether a pool lies on the host and stores what it is given as it is."""
    dtype = getattr(pool, "dtype", None)
    otherwise = getattr(pool, "is_quantized_kv_cache", False) or getattr(pool, "use_hnd", False)
    plain = type(pool).__name__ in POOLS and dtype is not None and dtype == getattr(pool, "store_dtype", None)
    return plain and not otherwise and not on_gpu(pool.k_buffer[0])
