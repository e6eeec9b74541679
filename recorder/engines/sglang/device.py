"""SGLang's `ForwardBatch` where its tensors lie on a GPU: nothing of them is read here, only passed on."""

from typing import Any

from ....kernels.constants import UNKNOWN_TOKEN
from ...capture.device.capture import DeviceCapture
from ...capture.device.forward import DeviceForward, Lens
from .batches import KnownBatch
from .forward import MODES, has_embeddings
from .inside import lens_of


class Telling:
    """Says what a forward is about to read and write, in the engine's own tensors; for the engine's thread."""

    def __init__(self, capture: DeviceCapture) -> None:
        self._before = capture.before
        self._where = capture.frames.device
        self._device: int = capture.frames.get_device()  # -1 for the CPU
        self._modes: dict[int, tuple[Any, str]] = {}  # by the id of an engine's mode, of which there are few
        self._engine_mode: Any = None  # the last one
        self._mode = ""
        self._by_position = False

    def tell(self, runner: int, batch: Any, known: KnownBatch, truth_lens: bytes) -> int:
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
        lens = Lens(positions, None, None, 1) if self._by_position else lens_of(batch, mode)
        for part in (rows, ids, loc, positions, *lens[:3]):
            if part is not None and part.get_device() != self._device:
                raise ValueError(f"a tensor of the batch is on {part.device}, the tables on {self._where}")
        return self._before(
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
        # EAGLE's draft leaves seq_lens as they were before the first of its steps.
        self._by_position = self._mode in ("decode", "idle")


def _present(rows: Any, ids: Any, positions: Any, loc: Any) -> tuple[Any, Any, Any]:
    """Return token ids, positions and slots, empty where the batch has none; token ids are unknown without any."""
    nothing = rows[:0]
    positions = nothing if positions is None else positions
    return (
        positions.new_full(positions.shape, UNKNOWN_TOKEN) if ids is None else ids,
        positions,
        nothing if loc is None else loc,
    )
