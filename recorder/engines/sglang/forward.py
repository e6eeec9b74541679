"""SGLang's `ForwardBatch` in the recorder's words, read at the last moment before the model runs."""

from typing import Any, Final

import numpy as np

from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.forward_input import ForwardInput, TableRead, TruthTokens
from ...capture.host_arrays import Int64Array, own_int64
from .layout import Layout, RunnerLayout

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
    layout: Layout,
    request_ids: Int64Array,
    truth: TruthTokens | None,
    forward_mode: Any = None,
) -> ForwardInput:
    """Return what a forward is about to read and write.

    Args:
        batch: the `ForwardBatch`.
        runner: the runner that it is for.
        layout: the engine's pools.
        request_ids: `[bs]`, -1 for padding.
        truth: the scheduler's tokens.
        forward_mode: the mode that the scheduler gave it, where its batch has another by now.

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
    """Return the slot of each token, -1 where the batch names none."""
    written = np.full(size, -1, np.int64)
    if batch.out_cache_loc is not None:
        slots = own_int64(batch.out_cache_loc)[:size]
        written[: slots.size] = slots
    return written
