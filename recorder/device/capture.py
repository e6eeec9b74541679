"""The engine thread's part: two kernel launches on the engine's own stream, and nothing that waits.

Each step of an engine comes here with cold caches, so what it touches is kept small: no object is made that the last
step has left behind, and nothing is looked up that a forward of the same size has found.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

from ...kernels.frames import NUM_COUNTERS, FrameLayout
from .arena import Arena
from .forward import Flight, ForwardRequests
from .shadows import DeviceShadows

logger = logging.getLogger("kvcanary")

MAX_FLIGHTS: Final = 1024
# Entries of changes that fit a frame. A forward that admits requests may hit long prefixes, whose every cell is a
# change; so is every cell after a reset.
TABLE_TILES_FEW: Final = 256
TABLE_TILES: Final = 4_096
LUT_CHANGES: Final = 65_536
KV_CHANGES: Final = 4_096
MAX_LAYOUTS: Final = 4_096
INT32_MAX: Final = 2**31 - 1


class DeviceCapture:
    """Takes forwards down into frames; for the engine's thread alone, but for `release` and `use_again`.

    Args:
        shadows: what the trace knows already.
        frame_bytes: room for frames in flight, on the device.
        watch_every: forwards between two looks at the prefix's bytes, 0 never.
    """

    def __init__(self, shadows: DeviceShadows, *, frame_bytes: int, watch_every: int) -> None:
        import torch

        from ...kernels.gpu.frame_launch import TILE, FrameKernels, programs_of

        device = shadows.runners[0].descriptor.device
        self.on_gpu = device.type == "cuda"
        self.frames = torch.zeros(max(frame_bytes // 8, 1), dtype=torch.int64, device=device)
        self.counters = torch.zeros((MAX_FLIGHTS + 1, NUM_COUNTERS), dtype=torch.int64, device=device)
        self.shadows = shadows
        self.next_forward = 0
        self._arena = Arena(int(self.frames.shape[0]))
        self._watch_every = watch_every
        self._taken = 0  # flights; a forward for which there is no room is none
        self._given_back = 0
        self._reset = False
        self._catching_up = False
        self._landed: list[Flight] = []  # to be used again
        self._tile = TILE
        self._programs_of = programs_of
        self._layouts: dict[tuple[int, int, int, bool], FrameLayout] = {}
        driver = _driver(device) if self.on_gpu else None
        self._kernels = [
            FrameKernels(
                self.frames,
                self.counters,
                runner.descriptor,
                streams=len(runner.stream_words),
                lut_int64=runner.lut_int64,
                driver=driver,
            )
            for runner in shadows.runners
        ]

    def prepare(self) -> None:
        """Compile the kernels before the engine runs, for the dtypes that engines use; others at their first use."""
        import torch

        device = self.frames.device
        row = torch.zeros(1, dtype=torch.int64, device=device)  # row 0 is padding: no table, no slot is touched
        lens = row.to(torch.int32)
        for number, kernels in enumerate(self._kernels):
            layout = self._layout(number, bs=1, tokens=0, many=False)
            for minus, extend in ((None, None), (None, lens), (lens, lens)):
                prefix = row if extend is None or minus is not None else lens
                for _ in range(2):  # the second is launched as all that follow
                    kernels.take_down(layout, row, prefix, minus, extend, 0, row, row, row, 0, 0, 0)
            for _ in range(2):
                kernels.take_back(layout, 0, 0, 1, 0, True)
        self.counters.zero_()

    def _layout(self, runner: int, *, bs: int, tokens: int, many: bool) -> FrameLayout:
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        on_device = self.shadows.runners[runner].on_device
        words, luts = self.shadows.runners[runner].stream_words, len(on_device.luts)
        width = int(on_device.table.shape[1])
        layout = self._layouts[runner, bs, tokens, many] = FrameLayout(
            bs=bs,
            tokens=tokens,
            stream_words=words,
            table_capacity=min(bs * -(-width // self._tile), TABLE_TILES if many else TABLE_TILES_FEW),
            lut_capacity=min(luts * (bs * width + tokens), LUT_CHANGES),
            kv_capacity=min(len(words) * bs * width, KV_CHANGES),
            tile=self._tile,
        )
        return layout

    def reset(self) -> None:
        """Have the next forward tell everything anew; any thread may ask."""
        self._reset = True

    def catch_up(self, *, still: bool) -> None:
        """Make room for many changes in the frames to come, as long as not all has been told; any thread may ask."""
        self._catching_up = still

    def before(
        self,
        launched_ns: int,
        mode: str,
        runner: int,
        rows: Any,
        prefix: Any,
        minus: Any | None,
        extend: Any | None,
        extend_each: int,
        input_ids: Any,
        positions: Any,
        out_cache_loc: Any,
        tokens: int,
        requests: ForwardRequests,
        truth_lens: Sequence[int],
    ) -> Flight | None:
        """Take down what a forward reads and writes, as `DeviceForward` has it; None where there is no room: it is lost.

        Numbers the forward in any case.

        Raises:
            ValueError: fewer lengths than requests, which the kernels would read beyond.
        """
        number = self.next_forward
        self.next_forward = number + 1
        bs = rows.numel()
        if extend is not None:
            _check_lens(extend, bs)
        if minus is not None:
            _check_lens(minus, bs)
        fresh = self._reset
        many = fresh or self._catching_up or extend is not None
        layout = self._layouts.get((runner, bs, tokens, many))
        if layout is None:
            layout = self._layout(runner, bs=bs, tokens=tokens, many=many)
        taken = self._taken
        place = self._arena.take(layout.words) if taken - self._given_back < MAX_FLIGHTS else None
        if place is None:
            self._reset = True
            return None
        if fresh:  # only then put down again: another thread may ask at this very moment
            self._reset = False
            self.shadows.reset()
        flight = self._landed.pop() if self._landed else Flight()
        flight.mode = mode
        flight.runner = runner
        flight.requests = requests
        flight.truth_lens = truth_lens
        flight.number = number
        flight.launched_ns = launched_ns
        flight.layout = layout
        flight.place = place
        flight.at = at = place % self._arena.size
        # Each flight zeroes the counters of the one after it, so they go round by flights, not by forwards.
        flight.counters = counters = taken % (MAX_FLIGHTS + 1)
        flight.watched = self._watch_every > 0 and number % self._watch_every == 0 and bool(layout.stream_words)
        flight.fresh = fresh
        self._taken = taken + 1
        self._kernels[runner].take_down(
            layout,
            rows,
            prefix,
            minus,
            extend,
            extend_each,
            input_ids,
            positions,
            out_cache_loc,
            at,
            counters,
            number % INT32_MAX + 1,
        )
        return flight

    def after(self, flight: Flight) -> None:
        """Take down what the forward wrote; the flight has landed once its programs have counted themselves as done."""
        counters = flight.counters
        self._kernels[flight.runner].take_back(
            flight.layout,
            flight.at,
            counters,
            (counters + 1) % (MAX_FLIGHTS + 1),
            flight.number % INT32_MAX + 1,
            flight.watched,
        )

    def programs(self, flight: Flight) -> int:
        """Return how many programs take a flight down."""
        streams = len(self.shadows.runners[flight.runner].stream_words)
        return sum(self._programs_of(flight.layout, streams=streams, watch=flight.watched))

    def release(self, flight: Flight) -> None:
        """Give a flight's frame back, in the order in which they were taken."""
        self._arena.give_back(flight.place, flight.layout.words)
        self._given_back += 1

    def use_again(self, flight: Flight) -> None:
        """Take a flight back that nobody looks at any more."""
        flight.requests, flight.truth_lens = None, ()
        self._landed.append(flight)


def _check_lens(lens: Any, bs: int) -> None:
    if lens.numel() < bs:
        raise ValueError(f"{lens.numel()} lengths for {bs} requests, expected one for each")


def _driver(device: Any) -> Any:
    """Return the CUDA driver for direct calls, None where it cannot be had: launches take longer then."""
    import torch

    from ...kernels.gpu.frame_driver import CudaDriver

    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        current = torch._C._cuda_getCurrentRawStream
        return CudaDriver(current, index)
    except (OSError, AttributeError) as error:
        logger.warning("kvcanary: launches go through Triton, which takes longer: %s", error)
        return None
