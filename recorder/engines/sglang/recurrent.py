"""SGLang's recurrent state (Mamba, linear attention, short convolutions).

A request's state lies in a slot of `MambaPool`, which each forward reads and writes where the backend's metadata says. The
prefix cache keeps checkpoints in slots of the same pool: copied there when a request is cached, and copied into the slot of
a request that hits it right before its first forward; a request that finishes leaves its own slot to the cache. With extra
buffers, the default on GPUs, forwards save checkpoints themselves, in slots that the batch names. Who begins with the state
that lies in a slot the layers are told: on the CPU it is read where they are, of most attention with the slots.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ....kernels.arrays import BoolArray, Int64Array
from ....kernels.capture.frames import SavedStates, StateIndices
from ....kernels.ops.state_hash.reference import MAX_PARTS
from ...capture.device.recorder import DeviceRecorder
from ...capture.device.shadows import bytes_of_slots, slots_as_bytes
from ...capture.host_arrays import own_int64
from ...capture.recurrent import StateAccess, StateChange
from ...trace.header import NotWatched, StatePool, TraceHeader
from ..common.hooking import Finish, Hook

MOST_BYTES: Final = 4096  # of each part of a slot that are hashed: the last, where a window has its newest token
# The only layouts known, by their very classes.
_CLASSES: Final = {"HybridReqToTokenPool": "MambaPool"}
ASKED: Final = "conv_state_metadata"
# Whose layers save a state where the batch says, of whole chunks of what is computed; in a decode of all of it.
_SAVES: Final = ("GDNAttnBackend", "KDAAttnBackend", "LightningAttentionBackend", "Mamba2AttnBackend")


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
        layers = list(getattr(pool, "mamba_layer_ids", None) or rows.mamba_map)  # 0.5.16 has them beside the rows
        state = pool.mamba_cache
        parts = [part[0] for part in (*state.conv, state.temporal) if part[0].numel()]
        slots, first = int(parts[0].shape[0]), int(layers[0])
    except (AttributeError, IndexError, TypeError) as error:
        reason = f"this version keeps states otherwise: {type(error).__name__}"
        return NotWatched(what="pool", name=name, reason=reason)
    sizes = {"num_slots": slots, "layer": first, "num_layers": len(layers), "hashed_bytes": MOST_BYTES}
    free = getattr(pool, "free_slots", None)
    padding = (0,) if isinstance(free, list) and free == list(range(1, slots)) else ()  # before any is given out
    said = bytes_of_slots(parts)
    return StatePool(name=name, runner=index, padding_slots=padding, from_end=True, part_bytes=said, **sizes), parts


def prefills_not_seen(runner: Any) -> list[NotWatched]:
    """Return what is to be said of an engine whose prefills run in CUDA graphs, into which nobody looks."""
    captured = getattr(runner, "prefill_cuda_graph_runner", None)
    if captured is None or type(captured).__name__ == "EagerRunner":
        return []
    reason = "which states they read and write is not recorded; nothing is known of the pool behind one"
    return [NotWatched(what="graph", name="MambaPool: prefills in CUDA graphs", reason=reason)]


def _why_not(runner: Any, rows: Any, pool: Any) -> str:
    """Say why a pool's states are not recorded, "" if they are."""
    arguments = runner.server_args
    if _CLASSES.get(type(rows).__name__) != type(pool).__name__:
        return "the adapter does not know how this class keeps states"
    if getattr(pool.mamba_cache.temporal.device, "type", "cpu") not in ("cpu", "cuda"):
        return "states on such a device are not recorded"
    layers = getattr(getattr(runner, "attn_backend", None), "linear_attn_backend", None)
    if getattr(rows, "enable_mamba_extra_buffer", False) and (
        type(layers).__name__ not in _SAVES or not _chunk(runner)
    ):
        return "checkpoints that a forward saves itself are not recorded of this attention"
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
    parts = [part[0] for part in (*pool.mamba_cache.conv, pool.mamba_cache.temporal) if part[0].numel()]
    if len(parts) > MAX_PARTS or any(slots_as_bytes(part, MOST_BYTES) is None for part in parts):
        return "a state is laid out in a way that is not known"
    return "" if parts else "it is empty"


def backend_of_all() -> Any:
    """Return the attention backend of the forward that runs now, with its part for recurrent layers; None without one."""
    try:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        return get_attn_backend()
    except Exception:  # noqa: BLE001  # another version has it elsewhere, and raises outside of a forward
        return None


def _given(runner: Any, batch: Any, backend: Any, bs: int) -> tuple[Any, SavedStates | None] | None:
    """Return the slots that a forward's recurrent layers are given, `[at least bs]`, and where they save states, None if nowhere;
    None if nobody knows.
    """
    metadata = getattr(getattr(backend, "linear_attn_backend", None), "forward_metadata", None)
    indices = getattr(metadata, "mamba_cache_indices", None)
    if indices is None or indices.ndim != 1 or indices.numel() < bs:
        return None
    if getattr(batch, "mamba_track_mask", None) is None:
        return indices, None
    saved = _saved_states(runner, batch, backend, bs)
    return None if saved is None else (indices, saved)


def _saved_states(runner: Any, batch: Any, backend: Any, bs: int) -> SavedStates | None:
    """Return where a batch's forward saves states, and how many tokens each is behind; None if nobody knows.

    In a CUDA graph these are computed anew at each launch, from the tensors that the layers get.
    """
    import torch

    layers = backend.linear_attn_backend
    slots = getattr(layers.forward_metadata, "mamba_track_indices", None)
    if slots is None or slots.numel() < bs or type(layers).__name__ not in _SAVES:
        return None
    tokens = batch.seq_lens[:bs]
    if not batch.forward_mode.is_decode():
        upto, prefix, chunk = batch.mamba_track_seqlens, batch.extend_prefix_lens, _chunk(runner)
        if upto is None or prefix is None or not chunk:
            return None
        prefix = prefix[:bs]
        tokens = prefix + (upto[:bs] - prefix) // chunk * chunk
    return SavedStates(torch.where(batch.mamba_track_mask[:bs], slots[:bs], -1), tokens)


def state_indices(runner: Any, batch: Any, bs: int) -> tuple[StateIndices | SavedStates, ...]:
    """Return the slots that the layers of a model runner's forward are given on the device, and those in which they save states;
    nothing if nobody knows.
    """
    backend = backend_of_all() or getattr(batch, "attn_backend", None) or getattr(runner, "attn_backend", None)
    given = _given(runner, batch, backend, bs)
    if given is None or given[0].device != batch.req_pool_indices.device:
        return ()
    indices, saved = given
    return (StateIndices(indices),) if saved is None else (StateIndices(indices), saved)


def _chunk(runner: Any) -> int:
    """Return of how many tokens at a time an engine's layers can save states, 0 if nobody knows."""
    arguments = runner.server_args
    try:
        from sglang.srt.arg_groups.overrides import mamba_cache_chunk_size

        return int(mamba_cache_chunk_size(arguments))
    except Exception:  # noqa: BLE001  # another version says it itself
        return int(getattr(arguments, "mamba_cache_chunk_size", 0) or 0)


def without_states(header: TraceHeader, reason: str) -> tuple[TraceHeader, list[NotWatched]]:
    """Return a header without pools of recurrent state, and what is to be said of them."""
    unseen = [NotWatched(what="pool", name=pool.name, reason=reason) for pool in header.states]
    return dataclasses.replace(header, states=()), unseen


class StateHooks:
    """What is recorded of one runner's state pool, the header's `pool`; after a fault, that nobody knows what it holds."""

    def __init__(self, recorder: Any, pool: int, runner: Any) -> None:
        self._recorder = recorder
        self._pool = pool
        self._runner = runner
        self._failed = False
        self._waits: StateAccess | None = None  # of the forward that begins, until a layer is told more
        # On a device the recorder reads them there, behind the change: nobody waits for them here.
        on_device = isinstance(recorder, DeviceRecorder)
        self._own: Callable[[Any], Any] = (lambda slots: slots) if on_device else own_int64
        backend = None if on_device else getattr(runner, "attn_backend", None)
        # What each short convolution asks for its slots; None if there is nothing to see.
        self.asked: Any = getattr(backend, "linear_attn_backend", None)
        if not hasattr(self.asked, ASKED):
            self.asked = None

    def hooks(self) -> dict[str, Hook]:
        """Return a hook for each method of the pool by which slots change between forwards."""
        return {"copy_from": self._on_copy, "clear_slots": self._on_clear}

    def on_asked(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record what a forward's first short convolution is told of who begins with a state, and in which slots."""
        access, self._waits = self._waits, None
        if access is None:
            return None

        def told(given: Any, error: BaseException | None) -> None:
            slots, said = (getattr(given, name, None) for name in ("cache_indices", "has_initial_state"))
            bs = access.writes.size
            if error is None and said is not None and slots is not None and bs <= min(len(slots), len(said)):
                slots = own_int64(slots[:bs])
                reads = np.where(own_int64(said[:bs]) != 0, slots, -1)
                self._recorder.states_given((access._replace(reads=reads, writes=slots),))

        return told

    def _on_copy(self, src_indices: Any, dst_indices: Any) -> Finish:
        return self._changes("copy", dst_indices, src_indices)

    def _on_clear(self, indices: Any) -> Finish:
        return self._changes("clear", indices)

    def _changes(self, change: StateChange, to: Any, of: Any = ()) -> Finish:
        """Return what records a change once it is done."""
        failed, self._failed = self._failed, True
        slots, sources = self._own(to), self._own(of)
        self._failed = failed

        def done(_: Any, error: BaseException | None) -> None:
            if error is not None:
                self.fail()
            self._recorder.state_changed(change, pool=self._pool, slots=slots, sources=sources)

        return done

    def fail(self) -> None:
        """Take for unknown what the slots hold from now on: a change was not seen, or ended half-way."""
        self._failed = True
        self._recorder.give_up_states()

    def access(self, backend: Any, batch: Any, prefix_lens: Int64Array) -> StateAccess | None:
        """Return which slots a forward's layers read and write, by the metadata that they are given; None for unknown."""
        bs, self._waits = prefix_lens.size, None
        given = None if self._failed else _given(self._runner, batch, backend, bs)
        if given is None:
            return None
        slots, saved = own_int64(given[0][:bs]), given[1]
        reads = np.where(_goes_on(backend.linear_attn_backend.forward_metadata, prefix_lens), slots, -1)
        access = StateAccess(reads=reads, writes=slots)
        if saved is not None:
            access = access._replace(saves=saved.slots, saved_tokens=saved.tokens)
        self._waits = access
        return access


def _goes_on(metadata: Any, prefix_lens: Int64Array) -> BoolArray:
    """Say of each request, `[bs]`, whether its layers begin with the state that lies in its slot.

    Where metadata do not say it, as of decodes, it is who has a prefix of tokens.
    """
    found: BoolArray = prefix_lens > 0
    said = getattr(getattr(metadata, "mixed_metadata", None) or metadata, "has_initial_states", None)
    if said is not None:
        mine = own_int64(said[: found.size])
        found[: mine.size] = mine != 0
    return found
