"""The engine thread's part: two kernel launches on the engine's own stream, and nothing that waits.

Each step of an engine comes here with cold caches, so what it touches is kept small: what forwards of one size and of
the same types have in common is looked up at once, and a launch is handed nothing but what is new.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from ...kernels.frames import NUM_COUNTERS, FrameLayout
from .arena import Arena
from .forward import Flight, ForwardRequests, Lens
from .shadows import DeviceShadows

if TYPE_CHECKING:
    from ...kernels.gpu.frame_driver import Launch

logger = logging.getLogger("kvcanary")

MAX_FLIGHTS: Final = 1024
COUNTERS: Final = MAX_FLIGHTS + 1  # rows of them: each flight zeroes the next one's
# Entries of changes that fit a frame. A forward that admits requests may hit long prefixes, whose every cell is a
# change; so is every cell after a reset.
TABLE_TILES_FEW: Final = 256
TABLE_TILES: Final = 4_096
LUT_CHANGES: Final = 65_536
KV_CHANGES: Final = 4_096
MAX_SIZES: Final = 4_096  # of forwards, with the types of their tensors
INT32_MAX: Final = 2**31 - 1
REFUSED: Final = "cuLaunchKernelEx: CUDA error"


# A tuple's own making: what a class of ours adds to it takes longer.
_flight: Final[Callable[[tuple[Any, ...]], Flight]] = functools.partial(tuple.__new__, Flight)


class SameSize:
    """What forwards of one size and of the same types have in common: their frames' sections, and launches made ready.

    A launch is None as long as none has been made. `watchable`: a frame that has bytes of prefixes to compare.
    """

    __slots__ = ("back", "back_watching", "down", "layout", "watchable", "words")

    def __init__(self, layout: FrameLayout, *, watchable: bool) -> None:
        self.layout = layout
        self.words = layout.words
        self.watchable = watchable
        self.down: Launch | None = None
        self.back: Launch | None = None
        self.back_watching: Launch | None = None


class DeviceCapture:
    """Takes forwards down into frames; for the engine's thread alone, but for `release`, `reset` and `catch_up`.

    Args:
        shadows: what the trace knows already.
        frame_bytes: room for frames in flight, on the device.
        watch_every: forwards between two looks at the prefix's bytes, 0 never.

    Attributes:
        deliver: gets each flight once all of it is launched.
        on_no_room: called after a forward that is lost, since too many are in flight.
        off: nothing is taken down any more; any thread may say so.
        pending: a forward whose end is not yet told.
        engine_thread: which thread told of the last forward.
    """

    def __init__(self, shadows: DeviceShadows, *, frame_bytes: int, watch_every: int) -> None:
        import torch

        from ...kernels.gpu.frame_launch import TILE, FrameKernels, programs_of

        device = shadows.runners[0].descriptor.device
        self.on_gpu = device.type == "cuda"
        self.frames = torch.zeros(max(frame_bytes // 8, 1), dtype=torch.int64, device=device)
        self.counters = torch.zeros((COUNTERS, NUM_COUNTERS), dtype=torch.int64, device=device)
        self.shadows = shadows
        self.next_forward = 0
        self._arena = Arena(int(self.frames.shape[0]))
        self._watch_every = watch_every
        self._taken = 0  # flights; a forward for which there is no room is none
        self._given_back = 0
        self._reset = False
        self._catching_up = False
        self._tile = TILE
        self._programs_of = programs_of
        self._sizes: dict[tuple[Any, ...], SameSize] = {}
        self.deliver: Callable[[Flight], None] = lambda _: None
        self.on_no_room: Callable[[], None] = lambda: None
        self.off = False
        self.engine_thread = 0
        self.pending: Flight | None = None
        # What its end will be launched with.
        self._same: SameSize | None = None
        self._back: Launch | None = None
        driver, self._stream = _driver(device) if self.on_gpu else (None, lambda: 0)
        self._kernels = [
            FrameKernels(
                self.frames,
                self.counters,
                runner.descriptor,
                streams=len(runner.stream_words),
                lut_int64=runner.lut_int64,
                driver=driver,
                stream=self._stream,
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
            for _ in range(2):  # the second is launched as all that follow
                for minus, extend in ((None, None), (None, lens), (lens, lens)):
                    prefix = row if extend is None or minus is not None else lens
                    kernels.take_down(layout, row, prefix, minus, extend, 0, row, row, row, 0, 0, 0)
                kernels.take_back(layout, 0, 0, 1, 0, True)
        self.counters.zero_()

    def _same_size(self, key: tuple[Any, ...], runner: int, *, bs: int, tokens: int, many: bool) -> SameSize:
        if len(self._sizes) >= MAX_SIZES:
            self._sizes.clear()
        layout = self._layout(runner, bs=bs, tokens=tokens, many=many)
        watchable = self._watch_every > 0 and bool(layout.stream_words)
        found = self._sizes[key] = SameSize(layout, watchable=watchable)
        return found

    def _layout(self, runner: int, *, bs: int, tokens: int, many: bool) -> FrameLayout:
        on_device = self.shadows.runners[runner].on_device
        words, luts = self.shadows.runners[runner].stream_words, len(on_device.luts)
        width = int(on_device.table.shape[1])
        return FrameLayout(
            bs=bs,
            tokens=tokens,
            stream_words=words,
            table_capacity=min(bs * -(-width // self._tile), TABLE_TILES if many else TABLE_TILES_FEW),
            lut_capacity=min(luts * (bs * width + tokens), LUT_CHANGES),
            kv_capacity=min(len(words) * bs * width, KV_CHANGES),
            tile=self._tile,
        )

    def reset(self) -> None:
        """Have the next forward tell everything anew; any thread may ask."""
        self._reset = True

    def catch_up(self, *, still: bool) -> None:
        """Make room for many changes in the frames to come, as long as not all has been told; any thread may ask."""
        self._catching_up = still

    def before(
        self,
        mode: str,
        runner: int,
        bs: int,
        rows: Any,
        input_ids: Any,
        positions: Any,
        out_cache_loc: Any,
        tokens: int,
        lens: Lens | None,
        requests: ForwardRequests,
        truth_lens: Sequence[int] | bytes,
    ) -> int:
        """Take down what a forward of `bs` requests reads and writes, as `DeviceForward` has it; return its number.

        Without `lens` each request adds one token, and its position says how many are in the cache. Where there is no
        room the forward is lost, but numbered. The number is -1 where nothing is taken down any more.

        Raises:
            ValueError: fewer lengths than requests, which the kernels would read beyond.
        """
        if self.off:
            return -1
        if self.pending is not None:
            self.after("the engine told of no end of this forward")
        self.engine_thread = get_ident()
        number = self.next_forward
        self.next_forward = number + 1
        fresh = self._reset
        key: tuple[Any, ...]
        if lens is None:
            many = fresh or self._catching_up
            key = (runner, bs, tokens, many, rows.dtype, input_ids.dtype, positions.dtype, out_cache_loc.dtype)
        else:
            lens.check(bs)
            many = fresh or self._catching_up or lens.extend is not None
            types = (rows.dtype, input_ids.dtype, positions.dtype, out_cache_loc.dtype, *lens.dtypes())
            key = (runner, bs, tokens, many, *types)
        same = self._sizes.get(key)
        if same is None:
            same = self._same_size(key, runner, bs=bs, tokens=tokens, many=many)
        taken = self._taken
        place = self._arena.take(same.words) if taken - self._given_back < MAX_FLIGHTS else None
        if place is None:
            self._reset = True
            self.on_no_room()
            return number
        if fresh:  # only then put down again: another thread may ask at this very moment
            self._reset = False
            self.shadows.reset()
        self._taken = taken + 1
        at = place % self._arena.size
        # Each flight zeroes the counters of the one after it, so they go round by flights, not by forwards.
        counters = taken % COUNTERS
        watched = same.watchable and not number % self._watch_every
        stamp = number % INT32_MAX + 1
        down = same.down
        if lens is not None or down is None:
            told = lens or Lens(prefix=positions, minus=None, extend=None, extend_each=1)
            self._launch_down(same, runner, rows, told, (input_ids, positions, out_cache_loc), (at, counters, stamp))
        else:
            address, where = rows.data_ptr(), positions.data_ptr()
            down.fill(
                address,
                where,
                address,
                address,
                input_ids.data_ptr(),
                where,
                out_cache_loc.data_ptr(),
                at,
                counters,
                stamp,
                out_cache_loc.numel(),
                positions.numel(),
                1,
            )
            error = down.fire(self._stream())
            if error:
                raise RuntimeError(f"{REFUSED} {error}")
        back = same.back_watching if watched else same.back
        if back is not None:
            back.fill(at, counters, (taken + 1) % COUNTERS, stamp)
        self._same, self._back = same, back
        told_ns = perf_counter_ns()
        self.pending = _flight(
            (told_ns, mode, runner, requests, truth_lens, number, same.layout, place, at, counters, watched, fresh, "")
        )
        return number

    def _launch_down(
        self, same: SameSize, runner: int, rows: Any, lens: Lens, tensors: tuple[Any, ...], numbers: tuple[int, ...]
    ) -> None:
        """Launch for the first time, or with lengths; `tensors` are ids, positions and slots."""
        prefix, minus, extend, each = lens
        if same.down is None:
            told = (rows, prefix, minus, extend, each, *tensors)
            same.down = self._kernels[runner].take_down(same.layout, *told, *numbers)
            return
        told = (rows, prefix, rows if minus is None else minus, rows if extend is None else extend, *tensors)
        addresses = [tensor.data_ptr() for tensor in told]
        same.down.fill(*addresses, *numbers, tensors[-1].numel(), prefix.numel(), each)
        error = same.down.fire(self._stream())
        if error:
            raise RuntimeError(f"{REFUSED} {error}")

    def after(self, note: str) -> None:
        """Take down what the pending forward wrote, and deliver it; `note` says how it failed.

        It has landed once its programs have counted themselves as done.
        """
        flight = self.pending
        if flight is None or self.off:
            return
        self.pending = None
        back = self._back
        if back is None:
            self._first_back(flight)
        else:
            error = back.fire(self._stream())
            if error:
                raise RuntimeError(f"{REFUSED} {error}")
        if note:
            flight = flight._replace(note=note)
        self.deliver(flight)

    def _first_back(self, flight: Flight) -> None:
        following, stamp = (flight.counters + 1) % COUNTERS, flight.number % INT32_MAX + 1
        kernels = self._kernels[flight.runner]
        launch = kernels.take_back(flight.layout, flight.at, flight.counters, following, stamp, flight.watched)
        if self._same is not None:
            setattr(self._same, "back_watching" if flight.watched else "back", launch)

    def programs(self, flight: Flight) -> int:
        """Return how many programs take a flight down."""
        streams = len(self.shadows.runners[flight.runner].stream_words)
        return sum(self._programs_of(flight.layout, streams=streams, watch=flight.watched))

    def release(self, flight: Flight) -> None:
        """Give a flight's frame back, in the order in which they were taken."""
        self._arena.give_back(flight.place, flight.layout.words)
        self._given_back += 1


def _driver(device: Any) -> tuple[Any, Callable[[], int]]:
    """Return the CUDA driver for direct calls, None where it cannot be had, and what gives the current stream's address."""
    import torch

    from ...kernels.gpu.frame_driver import CudaDriver

    index = device.index if device.index is not None else torch.cuda.current_device()
    try:
        return CudaDriver(), functools.partial(torch._C._cuda_getCurrentRawStream, index)
    except (OSError, AttributeError) as error:
        logger.warning("kvcanary: launches go through Triton, which takes longer: %s", error)
        return None, lambda: 0
