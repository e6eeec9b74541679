"""SGLang's `ForwardBatch` where its tensors lie on a GPU: nothing of them is read here, only passed on."""

from typing import Any

from ..device.recorder import DeviceRecorder
from .sglang_batches import KnownBatch
from .sglang_forward import MODES
from .sglang_layout import RunnerLayout


class Telling:
    """Says what a forward is about to read and write, in the engine's own tensors."""

    def __init__(self, recorder: DeviceRecorder) -> None:
        self._recorder = recorder
        self._modes: dict[int, tuple[Any, str]] = {}  # by the id of an engine's mode, of which there are few

    def tell(self, batch: Any, *, runner: RunnerLayout, known: KnownBatch, truth_lens: list[int]) -> int:
        """Have a forward taken down and return its number.

        Raises:
            ValueError: a mode that the adapter does not know, or a batch without token ids.
        """
        told = self._modes.get(id(batch.forward_mode))
        mode = told[1] if told is not None and told[0] is batch.forward_mode else self._mode(batch.forward_mode)
        rows, ids, positions, loc = batch.req_pool_indices, batch.input_ids, batch.positions, batch.out_cache_loc
        if positions is None:
            positions = rows[:0]
        if ids is None:
            if positions.numel():
                raise ValueError("the batch has embeddings instead of token ids, which a trace cannot hold")
            ids = rows[:0]
        if loc is None:
            loc = rows[:0]
        positions = positions if positions.is_contiguous() else positions.contiguous()
        prefix, minus, extend, each = positions, None, None, 1
        # A decode goes by positions: EAGLE's draft leaves seq_lens as they were before the first of its steps.
        if mode == "target_verify":
            prefix, each = batch.seq_lens.contiguous(), int(batch.spec_info.draft_token_num)
        elif mode not in ("decode", "idle"):
            extend = batch.extend_seq_lens.contiguous()
            if mode == "draft_extend":
                prefix, minus = batch.seq_lens.contiguous(), extend
            else:
                prefix = batch.extend_prefix_lens.contiguous()
        return self._recorder.before(
            mode,
            runner.index,
            rows if rows.is_contiguous() else rows.contiguous(),
            prefix,
            minus,
            extend,
            each,
            ids if ids.is_contiguous() else ids.contiguous(),
            positions,
            loc if loc.is_contiguous() else loc.contiguous(),
            min(ids.numel(), positions.numel()),
            known,
            truth_lens,
        )

    def _mode(self, mode: Any) -> str:
        found = MODES.get(mode.name)
        if found is None:
            raise ValueError(f"forward mode {mode.name}, expected one of {', '.join(MODES)}")
        if len(self._modes) > len(MODES):
            self._modes.clear()
        self._modes[id(mode)] = (mode, found)
        return found
