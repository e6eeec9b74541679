"""Behind which of an engine's layers a probe is launched on a GPU: in each CUDA graph behind one, and outside of graphs by turns."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...capture.device.attention_probe import AttentionProbe
from ...capture.device.recorder import DeviceRecorder
from ...errors import error_text

logger = logging.getLogger("kvcanary")


class ProbeTurns:
    """The turns of a probe's layers; after the first fault nothing is looked at, which the verdict says by itself."""

    def __init__(self) -> None:
        self.probe: AttentionProbe | None = None
        self._begun = False
        self._graphs = -1  # the number of the one that was captured last
        self._last, self._held = 1 << 62, False  # the last layer in it, and whether it has a launch

    def begin(self, recorder: DeviceRecorder, places: Mapping[int, tuple[int, tuple[int, ...]]], every: int) -> None:
        """Have a recorder look at layers, of which `places` has the group and the windows, in one of so many forwards."""
        if self.probe is not None:
            self._begun = True
            self.probe.begin(places, every)
            recorder.capture.probe = self.probe

    def run(self, original: Callable[[], Any], number: int, launch: Callable[[AttentionProbe, Any], None]) -> Any:
        """Return what a layer's attention returns, and have `launch` called with it if it is the layer's turn."""
        result = original()
        probe = self.probe
        if probe is not None and (probe.is_on or not self._begun):
            try:
                if self._is_turn(probe, number):
                    launch(probe, result)
            except Exception as error:  # noqa: BLE001  # the engine must go on whatever happens here
                self.fail(error)
        return result

    def fail(self, error: Exception) -> None:
        """Look at nothing any more."""
        self.probe = None
        logger.warning("kvcanary: what comes out of attention is not looked at: %s", error_text(error), exc_info=error)

    def _is_turn(self, probe: AttentionProbe, number: int) -> bool:
        """Say whether a layer that has run is the one to be looked at: in a graph that is captured, or in this forward."""
        import torch

        if number not in probe.layers:
            return False
        if not torch.cuda.is_current_stream_capturing():
            return probe.is_on and number == probe.layer
        if number <= self._last:
            self._graphs, self._held = self._graphs + 1, False
        self._last, numbers = number, [*probe.layers]
        if self._held or number != numbers[self._graphs % len(numbers)]:
            return False
        self._held = True
        return True
