"""Where a patch of SGLang looks: before a forward, and when a lost slot is read that another has written since."""

from collections.abc import Callable
from typing import Any

from bugs import Fired, replaces


def before_forward(look: Callable[[Any, Any, list[tuple[int, int, Any]]], Any]) -> None:
    """Call `look(runner, batch, rows)` before a forward; of each row the prefix's length, the whole, and the slots of its prefix."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        rows, ends = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        counts = [1] * len(rows) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
        table = runner.req_to_token_pool.req_to_token
        look(
            runner,
            batch,
            [(end - n, end, table[row, : end - n].tolist()) for row, end, n in zip(rows, ends, counts, strict=True)],
        )
        return before(runner, batch, *args, **kwargs)


def once_written_again(fired: Fired, lost: set[int]) -> None:
    """Say that the damage is read by the first forward with a slot of `lost` in a prefix, written since for another place."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    writer: dict[int, tuple[int, int]] = {}  # of each slot, row and position

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        rows, ends = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        counts = [1] * len(rows) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
        own = batch.out_cache_loc.split(counts)
        for row, end, slots in zip(rows, ends, own, strict=True):
            writer.update({s: (row, end - len(slots) + i) for i, s in enumerate(slots.tolist()) if s in lost})
        for row, end, count in zip(rows, ends, counts, strict=True):
            prefix = runner.req_to_token_pool.req_to_token[row, : end - count].tolist()
            if any(writer.get(slot, (row, place)) != (row, place) for place, slot in enumerate(prefix)):
                fired()
        return before(runner, batch, *args, **kwargs)
