"""SGLang's `ForwardBatch` in the recorder's words, read at the last moment before the model runs, on host or device.

EAGLE's draft steps that run inside one CUDA graph come from what goes into the graph and out of it, if the recorder's
launches are not inside the graph themselves (`inside.py`): their tokens, positions and slots are worked out, and the header
names them as derived. Nothing that one step writes is overwritten by the next, so the bytes read after the graph are those
that each step wrote.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.device.capture import DeviceCapture
from ...capture.device.forward import DeviceForward
from ...capture.forward_input import ForwardInput, TableRead, TruthTokens
from ...capture.host_arrays import own_int64
from ...trace.schema import Mode
from .layout import RunnerLayout, SglangLayout
from .recurrent import StateHooks, backend_of_all
from .requests import KnownBatch

# By the name of SGLang's ForwardMode.
MODES: Final[dict[str, Mode]] = {
    "EXTEND": "extend",
    "SPLIT_PREFILL": "extend",
    "DLLM_EXTEND": "extend",
    "DECODE": "decode",
    "MIXED": "mixed",
    "TARGET_VERIFY": "target_verify",
    "DRAFT_EXTEND": "draft_extend",
    "DRAFT_EXTEND_V2": "draft_extend",
    "IDLE": "idle",
}


def forward_input(
    batch: Any,
    *,
    runner: RunnerLayout,
    layout: SglangLayout,
    request_ids: Int64Array,
    truth: TruthTokens | None,
    forward_mode: Any = None,
    states: StateHooks | None = None,
) -> ForwardInput:
    """Return what a forward is about to read and write: `batch` is the `ForwardBatch`, `request_ids` `[bs]`, -1 for padding.

    `forward_mode` is the mode that the scheduler gave it, if its batch has another by now; a `ValueError` if it is unknown.
    `states` reads which slots of recurrent state it is given, None if it has no metadata yet.
    """
    mode = mode_of(batch.forward_mode if forward_mode is None else forward_mode)
    rows = own_int64(batch.req_pool_indices)
    positions = places = own_int64(batch.positions if batch.positions is not None else [])
    if runner.fed is not None and batch.positions is not None:
        positions = own_int64(runner.fed.of(batch, batch.positions))
    tokens = own_int64(batch.input_ids) if batch.input_ids is not None else np.full_like(positions, UNKNOWN_TOKEN)
    if has_embeddings(batch):
        tokens[:] = UNKNOWN_TOKEN
    prefix, extend = prefix_and_extend(batch, mode, rows.size, places)
    size = min(tokens.size, positions.size)
    written, elsewhere = _filled(size, batch.out_cache_loc, -1), np.full(size, -1, np.int64)
    nothing = np.zeros(rows.size, np.int64)
    unread = TableRead(starts=nothing, counts=nothing, slots=nothing[:0])
    mine = [table == runner.table for table in range(len(layout.tables))]
    return ForwardInput(
        mode=mode,
        runner=runner.index,
        req_pool_indices=rows,
        request_ids=request_ids,
        prefix_lens=prefix,
        extend_lens=extend,
        input_ids=tokens[:size],
        positions=positions[:size],
        out_cache_loc=tuple(written if own else elsewhere for own in mine),
        reads=tuple(table if own else unread for table, own in zip(layout.tables, mine, strict=True)),
        luts=tuple(layout.luts),
        table_filled=runner.index == 0 and mode in ("extend", "decode", "mixed"),  # drafts may fill them later
        truth=truth,
        states=() if states is None else (states.access(backend_of_all(), batch, prefix),),
    )


def has_embeddings(batch: Any) -> bool:
    """Say whether a batch is fed embeddings: its token ids, if there are any, are placeholders."""
    return getattr(batch, "input_embeds", None) is not None


def mode_of(forward_mode: Any) -> Mode:
    """Return a `ForwardMode` as the trace names it; raise a `ValueError` for one that the adapter does not know."""
    mode = MODES.get(forward_mode.name)
    if mode is None:
        raise ValueError(f"forward mode {forward_mode.name}, expected one of {', '.join(MODES)}")
    return mode


class Lens(NamedTuple):
    """How much of each request is in the cache, and how much its forward adds, as `ModelInput` has it."""

    prefix: Any
    minus: Any | None
    extend: Any | None
    extend_each: int


def lens_of(batch: Any, mode: str, positions: Any) -> Lens:
    """Return how much of each request is in the cache before the forward and how much that adds, by its mode.

    A decode goes by positions: EAGLE's draft leaves seq_lens as they were before the first of its steps.
    """
    if mode in ("decode", "idle"):
        return Lens(positions, None, None, 1)
    if mode == "target_verify":
        return Lens(batch.seq_lens.contiguous(), None, None, int(batch.spec_info.draft_token_num))
    extend = batch.extend_seq_lens.contiguous()
    if mode == "draft_extend":
        return Lens(batch.seq_lens.contiguous(), extend, extend, 1)
    return Lens(batch.extend_prefix_lens.contiguous(), None, extend, 1)


def prefix_and_extend(batch: Any, mode: str, bs: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the same as arrays of the host, `[bs]` each; a request without a position has nothing in the cache."""
    lens = lens_of(batch, mode, positions)
    prefix = _filled(bs, lens.prefix, 0)
    if lens.minus is not None:
        prefix -= own_int64(lens.minus[:bs])
    return prefix, np.full(bs, lens.extend_each) if lens.extend is None else own_int64(lens.extend[:bs])


def _filled(size: int, values: Any, otherwise: int) -> Int64Array:
    """Return `[size]` values, None for none, and something else past their end."""
    filled = np.full(size, otherwise, np.int64)
    if values is not None:
        given = own_int64(values[:size])
        filled[: given.size] = given
    return filled


class DeviceForwards:
    """Records what a forward is about to read and write, in the engine's own tensors, of which nothing is read here."""

    def __init__(self, capture: DeviceCapture) -> None:
        self.before = capture.before
        self._where = capture.frames.device
        self._device: int = capture.frames.get_device()  # -1 for the CPU
        self._engine_mode: Any = None  # the last one
        self._mode = ""

    def record(self, runner: RunnerLayout, batch: Any, known: KnownBatch, truth_lens: bytes) -> int:
        """Have a forward captured and return its number.

        Raises:
            ValueError: a mode that the adapter does not know, or a batch on another device, whose addresses a kernel must
                not be given.
        """
        if batch.forward_mode is not self._engine_mode:
            self._engine_mode, self._mode = batch.forward_mode, mode_of(batch.forward_mode)
        mode, rows, ids, positions = self._mode, batch.req_pool_indices, batch.input_ids, batch.positions
        loc = batch.out_cache_loc
        if ids is None or positions is None or loc is None or has_embeddings(batch):
            nothing = rows[:0]
            positions, loc = nothing if positions is None else positions, nothing if loc is None else loc
            if ids is None or has_embeddings(batch):
                ids = positions.new_full(positions.shape, UNKNOWN_TOKEN)
        if not (rows.is_contiguous() and ids.is_contiguous() and positions.is_contiguous() and loc.is_contiguous()):
            rows, ids, positions, loc = (part.contiguous() for part in (rows, ids, positions, loc))
        lens = lens_of(batch, mode, positions)
        if runner.fed is not None:
            positions = runner.fed.of(batch, positions).contiguous()
        for part in (rows, ids, loc, positions, *lens[:3]):
            if part is not None and part.get_device() != self._device:
                raise ValueError(f"a tensor of the batch is on {part.device}, the tables on {self._where}")
        return self.before(
            DeviceForward(
                mode=mode,
                runner=runner.index,
                rows=rows,
                prefix=lens.prefix,
                minus=lens.minus,
                extend=lens.extend,
                extend_each=lens.extend_each,
                input_ids=ids,
                positions=positions,
                out_cache_loc=loc,
                num_tokens=min(ids.numel(), positions.numel()),
                requests=known,
                truth_lens=truth_lens,
            )
        )


def draft_steps(batch: Any, own: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Copy what goes into a graph of several draft steps, before it runs; `own` copies a tensor, here or on the device.

    What is returned makes of what came out of the graph, `draft_tokens` `[bs, steps]`, the forwards that ran in it, with
    the fields of SGLang's `ForwardBatch` that the adapter looks at.
    """
    rows, positions, seq_lens = (own(part) for part in (batch.req_pool_indices, batch.positions, batch.seq_lens))
    bs = int(rows.shape[0])
    shape = (bs, -1) if bs else (0, 1)
    slots = own(batch.out_cache_loc).reshape(shape)  # [bs, steps]
    same = {"forward_mode": batch.forward_mode, "rids": list(batch.rids or ()), "spec_info": batch.spec_info}
    same |= {"req_pool_indices": rows, "seq_lens": seq_lens}

    def steps(result: Any) -> list[Any]:
        tokens = own(result[2]).reshape(shape)
        return [
            SimpleNamespace(**same, input_ids=tokens[:, step], positions=positions + step, out_cache_loc=slots[:, step])
            for step in range(slots.shape[1] - 1)
        ]

    return steps
