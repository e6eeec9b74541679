"""SGLang's recurrent state (Mamba, linear attention, short convolutions), of engines on the CPU.

A request's state lies in a slot of `MambaPool`, which each forward reads and writes where the backend's metadata says. The
prefix cache keeps checkpoints in slots of the same pool: copied there when a request is cached, and copied into the slot of
a request that hits it right before its first forward; a request that finishes leaves its own slot to the cache.
"""

from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.host_arrays import own_int64
from ...capture.recurrent import StateAccess, StateChange
from ...trace.header import NotWatched, StatePool
from ..common.hooking import Finish, Hook

MOST_BYTES: Final = 4096  # of each part of a slot that are hashed
# The only layouts known, by their very classes.
_CLASSES: Final = {"HybridReqToTokenPool": "MambaPool"}


def state_pool(runner: Any, index: int) -> tuple[StatePool, list[Any]] | NotWatched | None:
    """Return a runner's state pool and its first layer's parts, or why it is not watched; None if it has none."""
    rows = runner.req_to_token_pool
    pool = getattr(rows, "mamba_pool", None)
    if pool is None:
        known = type(runner.token_to_kv_pool).__name__ != "HybridLinearKVPool"
        return None if known else NotWatched(what="pool", name="MambaPool", reason="this version keeps it elsewhere")
    name = type(pool).__name__
    try:
        reason = _why_not(runner, rows, pool)
        if reason:
            return NotWatched(what="pool", name=name, reason=reason)
        state, layers = pool.mamba_cache, list(pool.mamba_layer_ids)
        parts = [part[0] for part in (*state.conv, state.temporal) if part[0].numel()]
        slots, first = int(parts[0].shape[0]), int(layers[0])
    except (AttributeError, IndexError, TypeError) as error:
        reason = f"this version keeps states otherwise: {type(error).__name__}"
        return NotWatched(what="pool", name=name, reason=reason)
    sizes = {"num_slots": slots, "layer": first, "num_layers": len(layers), "hashed_bytes": MOST_BYTES}
    return StatePool(name=name, runner=index, **sizes), parts


def _why_not(runner: Any, rows: Any, pool: Any) -> str:
    """Say why a pool's states are not recorded, "" if they are."""
    arguments = runner.server_args
    if _CLASSES.get(type(rows).__name__) != type(pool).__name__:
        return "the adapter does not know how this class keeps states"
    if getattr(pool.mamba_cache.temporal.device, "type", "cpu") != "cpu":
        return "states on a device are not recorded"
    if getattr(rows, "enable_mamba_extra_buffer", False):
        return "checkpoints that a forward saves itself are not recorded"
    if getattr(arguments, "speculative_algorithm", None):
        return "states that drafts roll back are not recorded"
    elsewhere = getattr(arguments, "enable_hierarchical_cache", False)
    elsewhere = elsewhere or getattr(arguments, "disaggregation_mode", "null") not in ("null", "", None)
    if elsewhere or getattr(rows, "mamba_ckpt_pool", None) is not None:
        return "states that come from another pool are not recorded"
    if not callable(getattr(pool, "copy_from", None)):
        return "its copies are not seen"
    if getattr(pool, "replayssm_write_pos", None) is not None:
        return "states that are completed later (ReplaySSM) are not recorded"
    return "" if any(part[0].numel() for part in (*pool.mamba_cache.conv, pool.mamba_cache.temporal)) else "it is empty"


def backend_of_all() -> Any:
    """Return the attention backend of the forward that runs now, with its part for recurrent layers; None without one."""
    try:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        return get_attn_backend()
    except Exception:  # noqa: BLE001  # another version has it elsewhere, and raises outside of a forward
        return None


class StateHooks:
    """What is recorded of one runner's state pool, the header's `pool`; after a fault, that nobody knows what it holds."""

    def __init__(self, recorder: Any, pool: int) -> None:
        self._recorder = recorder
        self._pool = pool
        self._failed = False

    def hooks(self) -> dict[str, Hook]:
        """Return a hook for each method of the pool by which slots change between forwards."""
        return {"copy_from": self._on_copy, "clear_slots": self._on_clear}

    def _on_copy(self, src_indices: Any, dst_indices: Any) -> Finish:
        return self._changes("copy", dst_indices, src_indices)

    def _on_clear(self, indices: Any) -> Finish:
        return self._changes("clear", indices)

    def _changes(self, change: StateChange, to: Any, of: Any = ()) -> Finish:
        """Return what records a change once it is done."""
        failed, self._failed = self._failed, True
        slots, sources = own_int64(to), own_int64(of)
        self._failed = failed

        def done(_: Any, error: BaseException | None) -> None:
            self._failed = self._failed or error is not None
            self._recorder.state_changed(change, pool=self._pool, slots=slots, sources=sources)

        return done

    def access(self, backend: Any, prefix_lens: Int64Array) -> StateAccess | None:
        """Return which slots a forward's layers read and write, by the metadata that they are given; None for unknown."""
        metadata = getattr(getattr(backend, "linear_attn_backend", None), "forward_metadata", None)
        indices = getattr(metadata, "mamba_cache_indices", None)
        if self._failed or indices is None or indices.numel() < prefix_lens.size:
            return None
        slots = own_int64(indices[: prefix_lens.size])
        return StateAccess(reads=np.where(prefix_lens > 0, slots, -1), writes=slots)
