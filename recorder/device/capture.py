"""The engine thread's part: two kernel launches and an event on the engine's own stream, and nothing that waits."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ...kernels.frames import NUM_COUNTERS, FrameLayout
from .arena import Arena
from .forward import DeviceForward, Flight
from .shadows import DeviceShadows

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
    """Takes forwards down into frames; for the engine's thread alone, but for `release`.

    Args:
        shadows: what the trace knows already.
        frame_bytes: room for frames in flight, on the device.
        watch_every: forwards between two looks at the prefix's bytes, 0 never.
        clock: gives nanoseconds.
    """

    def __init__(self, shadows: DeviceShadows, *, frame_bytes: int, watch_every: int, clock: Callable[[], int]) -> None:
        import torch

        from ...kernels.frames_triton import TILE, FrameKernels

        device = shadows.runners[0].descriptor.device
        self.on_gpu = device.type == "cuda"
        self.frames = torch.zeros(max(frame_bytes // 8, 1), dtype=torch.int64, device=device)
        self.counters = torch.zeros((MAX_FLIGHTS + 1, NUM_COUNTERS), dtype=torch.int64, device=device)
        self.shadows = shadows
        self.next_forward = 0
        self._arena = Arena(int(self.frames.shape[0]))
        self._watch_every = watch_every
        self._clock = clock
        self._taken = 0  # flights; a forward for which there is no room is none
        self._reset = False
        self._catching_up = False
        self._events: deque[Any] = deque()
        self._new_event = torch.cuda.Event
        self._tile = TILE
        self._layouts: dict[tuple[int, int, int, bool], FrameLayout] = {}
        self._kernels = [
            FrameKernels(
                self.frames,
                self.counters,
                runner.descriptor,
                streams=len(runner.stream_words),
                lut_int64=runner.lut_int64,
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
                kernels.take_down(
                    rows=row,
                    prefix=row if extend is None or minus is not None else lens,
                    minus=minus,
                    extend=extend,
                    extend_each=0,
                    input_ids=row,
                    positions=row,
                    out_cache_loc=row,
                    at=0,
                    flight=0,
                    layout=layout,
                    forward=0,
                )
            kernels.take_back(at=0, flight=0, next_flight=1, layout=layout, forward=0, watch=True)

    def _layout(self, runner: int, *, bs: int, tokens: int, many: bool) -> FrameLayout:
        key = (runner, bs, tokens, many)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            on_device = self.shadows.runners[runner].on_device
            words, luts = self.shadows.runners[runner].stream_words, len(on_device.luts)
            width = int(on_device.table.shape[1])
            layout = self._layouts[key] = FrameLayout(
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

    def before(self, told: DeviceForward) -> Flight | None:
        """Take down what a forward reads and writes; None where there is no room, and then it is lost.

        Numbers the forward in any case.

        Raises:
            ValueError: fewer lengths than requests, which the kernels would read beyond.
        """
        number = self.next_forward
        self.next_forward += 1
        bs = told.rows.shape[0]
        for lens in (told.minus, told.extend):
            if lens is not None and lens.shape[0] < bs:
                raise ValueError(f"{lens.shape[0]} lengths for {bs} requests, expected one for each")
        many = told.extend is not None or self._reset or self._catching_up
        layout = self._layout(told.runner, bs=bs, tokens=told.num_tokens, many=many)
        at = self._arena.take(layout.words or 1) if self._arena.in_use < MAX_FLIGHTS else None
        if at is None:
            self._reset = True
            return None
        fresh = self._reset
        if fresh:  # only then put down again: another thread may ask at this very moment
            self._reset = False
            self.shadows.reset()
        flight = Flight(
            told=told,
            number=number,
            time_ns=self._clock(),
            layout=layout,
            at=at,
            # Each flight zeroes the counters of the one after it, so they go round by flights, not by forwards.
            counters=self._taken % (MAX_FLIGHTS + 1),
            watched=self._watch_every > 0 and number % self._watch_every == 0 and bool(layout.stream_words),
            fresh=fresh,
        )
        self._taken += 1
        self._kernels[told.runner].take_down(
            rows=told.rows,
            prefix=told.prefix,
            minus=told.minus,
            extend=told.extend,
            extend_each=told.extend_each,
            input_ids=told.input_ids,
            positions=told.positions,
            out_cache_loc=told.out_cache_loc,
            at=at,
            flight=flight.counters,
            layout=layout,
            forward=number % INT32_MAX + 1,
        )
        return flight

    def after(self, flight: Flight) -> None:
        """Take down what the forward wrote; the flight has landed once its event has happened."""
        self._kernels[flight.told.runner].take_back(
            at=flight.at,
            flight=flight.counters,
            next_flight=(flight.counters + 1) % (MAX_FLIGHTS + 1),
            layout=flight.layout,
            forward=flight.number % INT32_MAX + 1,
            watch=flight.watched,
        )
        if self.on_gpu:
            # Events are used again, and put the waiting thread to sleep instead of keeping a core busy.
            flight.done = self._events.popleft() if self._events else self._new_event(blocking=True)
            flight.done.record()

    def release(self, flight: Flight) -> None:
        """Give a flight's frame back, in the order in which they were taken."""
        self._arena.give_back()
        if flight.done is not None:
            self._events.append(flight.done)
