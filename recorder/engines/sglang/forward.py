"""SGLang's `ForwardBatch` in the recorder's words, read at the last moment before the model runs, on host or device.

EAGLE's draft steps that run inside one CUDA graph come from what goes into the graph and out of it, if the recorder's
launches are not inside the graph themselves (`inside.py`): their tokens, positions and slots are worked out, and the header
names them as derived. Nothing that one step writes is overwritten by the next, so the bytes read after the graph are those
that each step wrote.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.device.capture import DeviceCapture
from ...capture.device.forward import DeviceForward, Lens
from ...capture.forward_input import ForwardInput, TableRead, TruthTokens
from ...capture.host_arrays import own_int64
from .layout import RunnerLayout, SglangLayout
from .requests import KnownBatch

# by the name of SGLang's ForwardMode
MODES: Final = {
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
) -> ForwardInput:
    """Return what a forward is about to read and write: `batch` is the `ForwardBatch`, `request_ids` `[bs]`, -1 for padding.

    `forward_mode` is the mode that the scheduler gave it, if its batch has another by now.

    Raises:
        ValueError: a mode that the adapter does not know.
    """
    mode = mode_of(batch.forward_mode if forward_mode is None else forward_mode)
    rows = own_int64(batch.req_pool_indices)
    positions = own_int64(batch.positions if batch.positions is not None else [])
    tokens = own_int64(batch.input_ids) if batch.input_ids is not None else np.full_like(positions, UNKNOWN_TOKEN)
    if has_embeddings(batch):
        tokens[:] = UNKNOWN_TOKEN
    prefix, extend = prefix_and_extend(batch, mode, rows.size, positions)
    size = min(tokens.size, positions.size)
    written = _written(batch, size)
    elsewhere = np.full(size, -1, np.int64)
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
    )


def has_embeddings(batch: Any) -> bool:
    """Say whether a batch is fed embeddings: its token ids, if there are any, are placeholders."""
    return getattr(batch, "input_embeds", None) is not None


def mode_of(forward_mode: Any) -> str:
    """Return a `ForwardMode` as the trace names it; raise a `ValueError` for one that the adapter does not know."""
    mode = MODES.get(forward_mode.name)
    if mode is None:
        raise ValueError(f"forward mode {forward_mode.name}, expected one of {', '.join(MODES)}")
    return mode


def prefix_and_extend(batch: Any, mode: str, bs: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return `[bs]` tokens in the cache before the forward, and `[bs]` tokens that it adds, by its mode.

    A decode goes by positions: EAGLE's draft leaves seq_lens as they were before the first of its steps.
    """
    if mode in ("decode", "idle"):
        prefix = np.zeros(bs, np.int64)
        count = min(bs, positions.size)
        prefix[:count] = positions[:count]
        return prefix, np.ones(bs, np.int64)
    if mode == "target_verify":
        return own_int64(batch.seq_lens[:bs]), np.full(bs, int(batch.spec_info.draft_token_num), np.int64)
    extend = own_int64(batch.extend_seq_lens[:bs])
    if mode == "draft_extend":
        return own_int64(batch.seq_lens[:bs]) - extend, extend
    return own_int64(batch.extend_prefix_lens[:bs]), extend


def _written(batch: Any, size: int) -> Int64Array:
    """Return the slot of each token, -1 if the batch names none."""
    written = np.full(size, -1, np.int64)
    if batch.out_cache_loc is not None:
        slots = own_int64(batch.out_cache_loc)[:size]
        written[: slots.size] = slots
    return written


def lens_of(batch: Any, mode: str, positions: Any) -> Lens:
    """Return how much of each request is in the cache and how much is added; as `prefix_and_extend`, on the device."""
    if mode in ("decode", "idle"):
        return Lens(positions, None, None, 1)
    if mode == "target_verify":
        return Lens(batch.seq_lens.contiguous(), None, None, int(batch.spec_info.draft_token_num))
    extend = batch.extend_seq_lens.contiguous()
    if mode == "draft_extend":
        return Lens(batch.seq_lens.contiguous(), extend, extend, 1)
    return Lens(batch.extend_prefix_lens.contiguous(), None, extend, 1)


class DeviceForwards:
    """Records what a forward is about to read and write, in the engine's own tensors, of which nothing is read here."""

    def __init__(self, capture: DeviceCapture) -> None:
        self.before = capture.before
        self._where = capture.frames.device
        self._device: int = capture.frames.get_device()  # -1 for the CPU
        self._modes: dict[int, tuple[Any, str]] = {}  # by the id of an engine's mode, of which there are few
        self._engine_mode: Any = None  # the last one
        self._mode = ""

    def record(self, runner: int, batch: Any, known: KnownBatch, truth_lens: bytes) -> int:
        """Have a forward captured and return its number.

        Raises:
            ValueError: a mode that the adapter does not know, or a batch on another device, whose addresses a kernel must
                not be given.
        """
        if batch.forward_mode is not self._engine_mode:
            self._look_up(batch.forward_mode)
        mode, rows, ids, positions = self._mode, batch.req_pool_indices, batch.input_ids, batch.positions
        loc = batch.out_cache_loc
        if ids is None or positions is None or loc is None or has_embeddings(batch):
            ids, positions, loc = _present(rows, None if has_embeddings(batch) else ids, positions, loc)
        if not (rows.is_contiguous() and ids.is_contiguous() and positions.is_contiguous() and loc.is_contiguous()):
            rows, ids, positions, loc = (part.contiguous() for part in (rows, ids, positions, loc))
        lens = lens_of(batch, mode, positions)
        for part in (rows, ids, loc, positions, *lens[:3]):
            if part is not None and part.get_device() != self._device:
                raise ValueError(f"a tensor of the batch is on {part.device}, the tables on {self._where}")
        return self.before(
            DeviceForward(
                mode=mode,
                runner=runner,
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

    def _look_up(self, mode: Any) -> None:
        known = self._modes.get(id(mode))
        if known is None or known[0] is not mode:
            found = MODES.get(mode.name)
            if found is None:
                raise ValueError(f"forward mode {mode.name}, expected one of {', '.join(MODES)}")
            if len(self._modes) > len(MODES):
                self._modes.clear()
            known = self._modes[id(mode)] = (mode, found)
        self._engine_mode, self._mode = known


def _present(rows: Any, ids: Any, positions: Any, loc: Any) -> tuple[Any, Any, Any]:
    """Return token ids, positions and slots, empty if the batch has none; token ids are unknown without any."""
    nothing = rows[:0]
    positions = nothing if positions is None else positions
    return (
        positions.new_full(positions.shape, UNKNOWN_TOKEN) if ids is None else ids,
        positions,
        nothing if loc is None else loc,
    )


@dataclass(slots=True, kw_only=True)
class DraftStep:
    """One step of a draft, with the fields of SGLang's `ForwardBatch` that the adapter looks at."""

    forward_mode: Any
    rids: Any
    req_pool_indices: Any
    seq_lens: Any
    spec_info: Any
    input_ids: Any
    positions: Any
    out_cache_loc: Any


def check_chain(graph_runner: Any) -> None:
    """Raise a `ValueError` for a draft tree (top-k above 1), whose steps are no chain."""
    topk = int(getattr(graph_runner, "topk", 1))
    if topk != 1:
        raise ValueError(f"EAGLE with top-k {topk} cannot be recorded, expected 1")


class DraftGraph:
    """What goes into a graph of several draft steps, copied before it runs; `own` copies a tensor, here or on the device.

    Raises:
        ValueError: a draft tree (top-k above 1), whose steps are no chain.
    """

    def __init__(self, graph_runner: Any, batch: Any, *, own: Callable[[Any], Any]) -> None:
        check_chain(graph_runner)
        self._own = own
        self._rows = own(batch.req_pool_indices)
        self._positions = own(batch.positions)
        bs = int(self._rows.shape[0])
        self._slots = own(batch.out_cache_loc).reshape((bs, -1) if bs else (0, 1))  # [bs, steps]
        self._seq_lens = own(batch.seq_lens)
        self._mode, self._rids, self._spec_info = batch.forward_mode, list(batch.rids or ()), batch.spec_info

    def steps(self, result: Any) -> list[DraftStep]:
        """Return the forwards that ran in the graph, from what came out of it: `draft_tokens` `[bs, steps]`."""
        bs = int(self._rows.shape[0])
        tokens = self._own(result[2]).reshape((bs, -1) if bs else (0, 1))
        return [
            DraftStep(
                forward_mode=self._mode,
                rids=self._rids,
                req_pool_indices=self._rows,
                seq_lens=self._seq_lens,
                spec_info=self._spec_info,
                input_ids=tokens[:, step],
                positions=self._positions + step,
                out_cache_loc=self._slots[:, step],
            )
            for step in range(self._slots.shape[1] - 1)
        ]
