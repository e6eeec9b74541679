"""vLLM's recurrent state (Mamba, gated delta nets, linear attention, short convolutions), on the CPU and on GPUs.

A state lies in a block of its group: `mamba_cache_mode` "none" has one for each request, "align" one for each stretch of
`block_size` tokens, whose last state the prefix cache keeps; before a forward that begins another block the runner copies the
state there: the V1 runner says from where, the V2 runner's kernels decide on the device. The layers read and write the
blocks that their metadata name, those of decodes first.
"""

import sys
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ....kernels.arrays import BoolArray, Int64Array
from ....kernels.capture.frames import StateIndices
from ....kernels.ops.state_hash.reference import MAX_PARTS
from ...capture.device.shadows import bytes_of_slots, slots_as_bytes
from ...capture.forward_input import ForwardInput
from ...capture.host_arrays import own_int64
from ...capture.recurrent import StateAccess
from ...trace.header import NotWatched, StatePool, TraceHeader
from ..common.hooking import Finish, OnFault, wrap_function, wrap_method
from .kv import layer_number

SPEC: Final = "MambaSpec"
MODES: Final = ("none", "align")
# What metadata name blocks by: of most layers, of GDN (where drafts stand elsewhere), of linear attention.
BLOCKS: Final = (
    ("state_indices_tensor_d", "state_indices_tensor_p"),
    ("non_spec_state_indices_tensor",),
    ("state_indices_tensor",),
)
# What they say of who begins with a state: of prefills, in the order in which layers look, and of decodes, which all do else.
OF_PREFILLS: Final = ("has_initial_states_p", "prefill_has_initial_state")
OF_DECODES: Final = "has_initial_states_d"
MOST_BYTES: Final = 4096  # of each part of a block that are hashed: the last, where a window has its newest token
_StepForward = tuple[ForwardInput, tuple[str, ...], Int64Array]  # as `step.py` has it
UTILS: Final = "vllm.v1.worker.mamba_utils"


class VllmStates:
    """The groups of recurrent layers whose states a trace can hold; `parts[pool]` are the tensors of a pool's first layer."""

    def __init__(self, runner: Any) -> None:
        self.pools: list[StatePool] = []
        self.parts: dict[int, list[Any]] = {}
        self._gids: list[int] = []
        self._layers: list[str] = []
        self._config = runner.kv_cache_config
        self._vllm_config = runner.vllm_config
        self._device = getattr(getattr(runner, "device", None), "type", "")
        # Of the V2 runner, which has no `input_batch`: what its kernels copy by.
        self._kernels = getattr(getattr(runner, "model_state", None), "_mamba_ctx", None)
        self._tables = getattr(getattr(runner, "block_tables", None), "block_tables", ())
        self._copies_seen = hasattr(runner, "input_batch") or hasattr(self._kernels, "run_fused_precopy")
        self._copied: list[tuple[int, int, int]] = []  # pool, source, block: about to be
        self._failed = False

    def add(self, gid: int, group: Any, spec: Any, num_blocks: int) -> str:
        """Add a group, or say why it is not recorded."""
        config, name = self._vllm_config, group.layer_names[0]
        layer = config.compilation_config.static_forward_context.get(name)
        parts: Any = getattr(layer, "kv_cache", None)
        fits = isinstance(parts, list | tuple) and 0 < len(parts) <= MAX_PARTS
        fits = fits and all(hasattr(part, "stride") and len(part) == num_blocks for part in parts)
        fits = fits and (self._device == "cpu" or all(slots_as_bytes(part, MOST_BYTES) is not None for part in parts))
        reasons = {
            "states on such a device are not recorded": self._device not in ("cpu", "cuda"),
            "this version's kernels copy states in a way that is not known": (
                self._device == "cuda" and getattr(spec, "mamba_cache_mode", "") != "none" and not self._copies_seen
            ),
            "states in this mode of caching are not recorded": getattr(spec, "mamba_cache_mode", "") not in MODES,
            "states that drafts roll back are not recorded": getattr(config, "speculative_config", None) is not None,
            "states that come from elsewhere are not recorded": getattr(config, "kv_transfer_config", None) is not None,
            "checkpoints that a forward saves itself are not recorded": (
                bool(getattr(spec, "num_prefill_checkpoint_blocks", 0))
                or bool(getattr(getattr(config, "cache_config", None), "use_replayssm", False))
            ),
            "a state is laid out in a way that is not known": not fits,
        }
        why = next((reason for reason, holds in reasons.items() if holds), "")
        if not why:
            number = len(self.pools)
            sizes = {"num_slots": num_blocks, "num_layers": len(group.layer_names), "hashed_bytes": MOST_BYTES}
            self.pools.append(
                StatePool(
                    name=f"mamba{number or ''}",
                    layer=layer_number(name),
                    padding_slots=(0,),
                    from_end=True,
                    part_bytes=bytes_of_slots(parts),
                    **sizes,
                )
            )
            self.parts[number] = list(parts)
            self._gids.append(gid)
            self._layers.append(name)
        return why

    def beside(self, forwards: list[_StepForward], step: Any) -> list[_StepForward]:
        """Return a step's forwards with the blocks that their layers read and write, which the first is told before it."""
        found = tuple(self._access(step.given, layer, step.prefix) for layer in self._layers)
        return [
            (replace(given, states=tuple(one and one.of(chosen, ran=number > 0) for one in found)), names, chosen)
            for number, (given, names, chosen) in enumerate(forwards)
        ]

    def _access(self, metadata: Any, layer: str, prefix: Int64Array) -> StateAccess | None:
        mine = metadata.get(layer) if isinstance(metadata, dict) else None
        slots = np.concatenate([own_int64([]), *(own_int64(part.reshape(-1)) for part in _blocks(mine))])
        if self._failed or slots.size != prefix.size:
            return None
        return StateAccess(reads=np.where(_goes_on(mine, prefix), slots, -1), writes=slots)

    def on_device(self, given: Any, bs: int, nothing: Any) -> tuple[StateIndices, ...]:
        """Return the blocks that a step's layers read and write, on the device; `nothing` (empty) for a pool that is not known.

        `given` are the layers' metadata; whole graphs run more decodes than there are, which come last.
        """
        return tuple(self._there(given, layer, bs) or StateIndices(nothing) for layer in self._layers)

    def _there(self, given: Any, layer: str, bs: int) -> StateIndices | None:
        mine = given.get(layer) if isinstance(given, dict) else None
        parts = [part[:, 0] if part.ndim == 2 else part for part in _blocks(mine)]
        if self._failed or not parts or any(part.ndim != 1 for part in parts):
            return None
        counted = sum(map(len, parts))
        if counted != bs and not (len(parts) == 1 and counted >= bs):
            return None
        decodes, (of_decodes, of_prefills) = _decodes(mine), _said(mine)
        if len(parts) == 1 and decodes is not None and 0 <= decodes <= counted:
            parts = [parts[0][:decodes], parts[0][decodes:]]
        if len(parts) == 1 or len(parts[0]) != decodes:
            return StateIndices(*parts)
        first, second = parts
        whole = of_prefills is not None and len(of_prefills) >= len(second)
        return StateIndices(first, second, True if of_decodes is None else of_decodes, of_prefills if whole else None)

    def without(self, header: TraceHeader, reason: str) -> TraceHeader:
        """Return a header without these pools, which says why; nothing is recorded of them."""
        entries = tuple(NotWatched(what="pool", name=pool.name, reason=reason) for pool in self.pools)
        for known in (self.pools, self.parts, self._gids, self._layers):
            known.clear()
        return replace(header, states=(), not_watched=(*header.not_watched, *entries))

    def attach(self, recorder: Any, on_fault: OnFault) -> None:
        """Hook what copies states from block to block; `recorder` gets it."""
        utils = sys.modules.get(UTILS)
        if not self.pools or utils is None:
            return
        if self._kernels is not None:
            self._attach_kernels(recorder, on_fault)
            return

        def on_collect(*args: Any, **kwargs: Any) -> None:
            failed, self._failed = self._failed, True
            names = ("_", "config", "_", "gids", "source", "block", "bias", "request")
            given = dict(zip(names, args, strict=False)) | kwargs
            if given["config"] is self._config:
                for pool, gid in enumerate(self._gids):
                    blocks = given["request"].block_ids[gid]
                    self._copied.append((pool, blocks[given["source"]], blocks[given["block"]]))
                failed = failed or given["bias"] != 0  # of tokens that were accepted: no plain copy
            self._failed = failed

        def on_copy(*_args: Any, **_kwargs: Any) -> Finish:
            return done

        def done(_: Any, error: BaseException | None) -> None:
            self._failed = self._failed or error is not None
            for pool, source, block in self._copied:
                recorder.state_changed("copy", pool=pool, slots=[block], sources=[source])
            self._copied.clear()

        wrap_function(utils, "collect_mamba_copy_meta", on_collect, on_fault)
        wrap_function(utils, "do_mamba_copy_block", on_copy, on_fault)

    def _attach_kernels(self, recorder: Any, on_fault: OnFault) -> None:
        """Hook what launches the V2 runner's copies; where they go is looked up beside them."""
        from ....kernels.ops.state_hash.triton_moves import moved_blocks

        tables = [self._tables[gid].gpu for gid in self._gids]
        nothing = tables[0].new_zeros(1)
        moved_blocks(rows=nothing[:0], to=nothing, of=nothing, bias=nothing, table=tables[0])  # compiles it

        def on_copies(requests: int, to: Any, of: Any, bias: Any, rows: Any) -> None:
            for pool, table in enumerate(tables):
                moved = moved_blocks(rows=rows[:requests], to=to, of=of, bias=bias, table=table)
                recorder.states_hashed("copy", pool, moved)

        wrap_method(self._kernels, "run_fused_precopy", on_copies, on_fault)


def _goes_on(metadata: Any, prefix: Int64Array) -> BoolArray:
    """Say of each request, `[bs]`, whether its layers begin with the state that lies in its block.

    Where metadata do not say it, it is who has a prefix of tokens, `prefix` `[bs]`.
    """
    found: BoolArray = prefix > 0
    decodes, (of_decodes, of_prefills) = _decodes(metadata), _said(metadata)
    if decodes is None or not 0 <= decodes <= prefix.size:
        return found
    found[:decodes] = True if of_decodes is None else own_int64(of_decodes[:decodes]) != 0
    if of_prefills is not None and len(of_prefills) >= prefix.size - decodes:
        found[decodes:] = own_int64(of_prefills[: prefix.size - decodes]) != 0
    return found


def _decodes(metadata: Any) -> int | None:
    """Return how many of a batch's requests, the first ones, a layer takes for decodes; None if its metadata do not say it."""
    found = getattr(metadata, "num_decodes", None)
    return found if isinstance(found, int) else None


def _said(metadata: Any) -> tuple[Any, Any]:
    """Return what a layer's metadata say of who begins with a state: of decodes, which all do if it is None, and of prefills."""
    flags = (getattr(metadata, name, None) for name in OF_PREFILLS)
    return getattr(metadata, OF_DECODES, None), next((one for one in flags if one is not None), None)


def _blocks(metadata: Any) -> list[Any]:
    """Return what a layer's metadata name the blocks of a batch's requests by, in the batch's order: decodes, then prefills."""
    for names in BLOCKS:
        parts = [getattr(metadata, name, None) for name in names]
        if found := [part for part in parts if part is not None and len(part)]:
            return found
    return []
