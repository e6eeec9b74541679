"""Faults of layers behind the first, put into a real SGLang before it starts."""

from collections.abc import Callable
from typing import Any


def _at_last_layer(act: Callable[[Any, Any, Any], None], every: int) -> None:
    """Call `act(pool, slots, cache_v)` as often as the last layer's K and V are about to be stored."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    store, calls = MHATokenToKVPool.set_kv_buffer, [0]

    def wrong(self: Any, layer: Any, slots: Any, cache_k: Any, cache_v: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.layer_id == self.layer_num - 1:
            calls[0] += 1
            if calls[0] % every == 0:
                act(self, slots, cache_v)
        return store(self, layer, slots, cache_k, cache_v, *args, **kwargs)

    MHATokenToKVPool.set_kv_buffer = wrong


def change_a_late_layer() -> None:
    """Change V of the last layer in all slots, now and then."""

    def change(pool: Any, *_: Any) -> None:
        pool.v_buffer[-1].neg_()

    _at_last_layer(change, 15)


def write_nan() -> None:
    """Hand NaN to the cache, in V of the last layer, for a forward's last token."""

    def spoil(_: Any, __: Any, cache_v: Any) -> None:
        cache_v[-1, -1, 3] = float("nan")

    _at_last_layer(spoil, 12)
