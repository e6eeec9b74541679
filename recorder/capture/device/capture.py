"""The engine thread's part: two kernel launches on the engine's own stream, and nothing that waits.

Each step of an engine comes here with cold caches, so what it touches is kept small: what forwards of one size and of
the same types have in common is looked up at once, and a launch is handed nothing but what is new.
"""

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

from ....kernels.capture.frame_ledger import Ledger
from ....kernels.capture.frames import NUM_COUNTERS, FrameLayout
from ...errors import error_text
from ...trace.schema import ATTENTION_LENS, ATTENTION_SLOTS
from .arena import Arena
from .forward import Flight, ForwardRequests, Lens
from .repeating import INT32_MAX, Repeating, find_driver
from .same_size import SameSize, Sizes
from .shadows import DeviceShadows

if TYPE_CHECKING:
    from ....kernels.capture.frame_driver import CudaDriver, Launch
    from ....kernels.capture.model_forward import ModelForward

MAX_FLIGHTS: Final = 1024
COUNTERS: Final = MAX_FLIGHTS + 1  # rows of them: each flight zeroes the next one's
REFUSED: Final = "cuLaunchKernelEx: CUDA error"
_OUTSIDE: Final = (-1, 0, 0)  # a flight's last fields where it was not taken down inside the model


# A tuple's own making: what a class of ours adds to it takes longer.
_flight: Final[Callable[[tuple[Any, ...]], Flight]] = functools.partial(tuple.__new__, Flight)


class DeviceCapture:
    """Takes forwards down into frames; for the engine's thread alone, but for `release`, `reset` and `catch_up`.

    Args:
        shadows: what the trace knows already.
        frame_bytes: room for frames in flight, on the device.
        watch_every: forwards between two looks at the prefix's bytes, 0 never.

    Attributes:
        deliver: gets each flight once all of it is launched.
        on_no_room: called after a forward that is lost, since too many are in flight.
        error_text: what may be told of an error.
        pending: a forward whose end is not yet told.
        ledger: what counts on from forward to forward, and whether all is off.
    """

    def __init__(self, shadows: DeviceShadows, *, frame_bytes: int, watch_every: int) -> None:
        import torch

        from ....kernels.capture.frame_launch import TILE, FrameKernels, programs_of

        device = shadows.runners[0].descriptor.device
        self.on_gpu = device.type == "cuda"
        self.frames = torch.zeros(max(frame_bytes // 8, 1), dtype=torch.int64, device=device)
        self.counters = torch.zeros((COUNTERS, NUM_COUNTERS), dtype=torch.int64, device=device)
        self.shadows = shadows
        self.ledger = ledger = Ledger()
        self._off = False
        self._arena = Arena(int(self.frames.shape[0]), ledger)
        self._watch_every = watch_every
        self._programs_of = programs_of
        self._sizes = Sizes(shadows, tile=TILE, watch_every=watch_every)
        self.deliver: Callable[[Flight], None] = lambda _: None
        self.on_no_room: Callable[[], None] = lambda: None
        self.error_text = error_text
        self.pending: Flight | None = None
        # What its end will be launched with.
        self._same: SameSize | None = None
        self._back: Launch | None = None
        self._inside: ModelForward | None = None  # of the pending forward
        # The kind of the last forward, where one like it is taken down by `again`.
        self._again: Callable[..., Any] | None = None
        self._again_of: tuple[str, int, FrameLayout] | None = None
        driver, self._stream = find_driver(device) if self.on_gpu else (None, lambda: 0)
        self.repeat(driver, device)
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

    def repeat(self, driver: "CudaDriver | None", device: Any) -> None:
        """Take forwards like the last one down by machine code that calls this driver, where that can be had."""
        self._repeating = Repeating(
            self.ledger, driver, device, flights=MAX_FLIGHTS, counters=COUNTERS, watch_every=self._watch_every
        )
        self._end = self._repeating.end

    @property
    def off(self) -> bool:
        """Nothing is taken down any more; any thread may say so."""
        return self._off

    @off.setter
    def off(self, off: bool) -> None:
        self._off = off  # to ask a ctypes structure takes several times as long
        self.ledger.off = int(off)

    @property
    def next_forward(self) -> int:
        """The next forward's number."""
        return int(self.ledger.number)

    @property
    def engine_thread(self) -> int:
        """Which thread told of the last forward."""
        return int(self.ledger.thread)

    def prepare(self) -> None:
        """Compile the kernels before the engine runs, for the dtypes that engines use; others at their first use."""
        import torch

        device = self.frames.device
        row = torch.zeros(1, dtype=torch.int64, device=device)  # row 0 is padding: no table, no slot is touched
        lens = row.to(torch.int32)
        for number, kernels in enumerate(self._kernels):
            layout = self._sizes.layout(number, 1, 0, False)
            for _ in range(2):  # the second is launched as all that follow
                for minus, extend in ((None, None), (None, lens), (lens, lens)):
                    prefix = row if extend is None or minus is not None else lens
                    kernels.take_down(layout, row, prefix, minus, extend, 0, row, row, row, 0, 0, 0)
                kernels.take_back(layout, 0, 0, 1, 0, True)
        self.counters.zero_()

    def reset(self) -> None:
        """Have the next forward tell everything anew; any thread may ask."""
        self.ledger.reset = 1

    def catch_up(self, *, still: bool) -> None:
        """Make room for many changes in the frames to come, as long as not all has been told; any thread may ask."""
        self.ledger.catching_up = int(still)

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
        ledger = self.ledger
        if ledger.off:
            return -1
        if self.pending is not None:
            self.after("the engine told of no end of this forward")
        ledger.thread = get_ident()
        ledger.back = 0
        self._again = None
        number: int = ledger.number
        ledger.number = number + 1
        fresh = bool(ledger.reset)
        key: tuple[Any, ...]
        if lens is None:
            many = fresh or bool(ledger.catching_up)
            key = (runner, bs, tokens, many, rows.dtype, input_ids.dtype, positions.dtype, out_cache_loc.dtype)
        else:
            lens.check(bs)
            many = fresh or bool(ledger.catching_up) or lens.extend is not None
            types = (rows.dtype, input_ids.dtype, positions.dtype, out_cache_loc.dtype, *lens.dtypes())
            key = (runner, bs, tokens, many, *types)
        same = self._sizes.find(key)
        taken: int = ledger.taken
        place = self._arena.take(same.words) if taken - ledger.given_back < MAX_FLIGHTS else None
        if place is None:
            ledger.reset = 1
            self.on_no_room()
            return number
        if fresh:  # only then put down again: another thread may ask at this very moment
            ledger.reset = 0
            self.shadows.reset()
        ledger.taken = taken + 1
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
            (
                *(told_ns, mode, runner, requests, truth_lens, number, same.layout),
                *(place, at, counters, watched, fresh, ""),
                *_OUTSIDE,
            )
        )
        if lens is None and not many:
            self._again = self._repeating.of(same, (rows, input_ids, positions, out_cache_loc))
            self._again_of = mode, runner, same.layout
        return number

    def again(
        self,
        rows: Any,
        input_ids: Any,
        positions: Any,
        out_cache_loc: Any,
        requests: ForwardRequests,
        truth_lens: Sequence[int] | bytes,
    ) -> int:
        """Take down a forward of the last one's mode, runner and number of requests; return its number.

        It is -1 where that cannot be done this way, and nothing has been done then. The arguments are as for `before`,
        without lens.
        """
        take = self._again
        if take is None or self.pending is not None:
            return -1
        ticket = take(rows, input_ids, positions, out_cache_loc)
        if ticket is None:
            return -1
        if type(ticket) is int:
            raise RuntimeError(f"{REFUSED} {ticket}")
        number: int
        number, place, at, counters, watched = ticket
        mode, runner, layout = self._again_of  # type: ignore[misc]  # set with `_again`
        told_ns = perf_counter_ns()
        self.pending = _flight(
            (
                *(told_ns, mode, runner, requests, truth_lens, number, layout),
                *(place, at, counters, watched, False, ""),
                *_OUTSIDE,
            )
        )
        return number

    def inside(
        self,
        forward: "ModelForward",
        mode: str,
        runner: int,
        bs: int,
        requests: ForwardRequests,
        truth_lens: Sequence[int] | bytes,
    ) -> Flight | None:
        """Have a run of a model taken down by launches that follow on the current stream, and return its flight.

        The launches are `forward`'s, of their own or in a CUDA graph that holds them; whoever has launched them delivers
        the flight. It is None where the forward is lost, as in `before`, or nothing is taken down any more.

        Args:
            forward: the run.
            mode: one of `forward_input.MODES`.
            runner: index into the header's runners.
            bs: requests that the engine tells of; more may run for padding.
            requests: whose forward it is.
            truth_lens: as `DeviceForward` has it.
        """
        ledger = self.ledger
        if ledger.off:
            return None
        if self.pending is not None:
            self.after("the engine told of no end of this forward")
        ledger.thread = get_ident()
        ledger.back = 0
        self._again = None
        number: int = ledger.number
        ledger.number = number + 1
        fresh = bool(ledger.reset)
        many = fresh or bool(ledger.catching_up) or forward.has_extend
        key = (runner, forward.bs, forward.tokens, many, forward.address, forward.programs)
        same = self._sizes.find(key, attention=forward.attention is not None)
        taken: int = ledger.taken
        place = self._arena.take(same.words) if taken - ledger.given_back < MAX_FLIGHTS else None
        if place is None:
            ledger.reset = 1
            self.on_no_room()
            return None
        if fresh:
            ledger.reset = 0
            self.shadows.reset()
        ledger.taken = taken + 1
        at, counters = place % self._arena.size, taken % COUNTERS
        watched = same.watchable and not number % self._watch_every
        numbers = (number % INT32_MAX + 1, at, counters, (taken + 1) % COUNTERS, int(watched))
        ready = same.down
        if ready is None:
            same.down = self._kernels[runner].write_ticket(same.layout, forward.ticket, forward.programs, numbers)
        else:
            ready.fill(forward.address, *numbers)
            error = ready.fire(self._stream())
            if error:
                raise RuntimeError(f"{REFUSED} {error}")
        told = (perf_counter_ns(), mode, runner, requests, truth_lens, number)
        lies = (same.layout, place, at, counters, watched, fresh, "")
        return _flight((*told, *lies, bs, forward.programs, self._attention_of(forward, runner)))

    def _attention_of(self, forward: "ModelForward", runner: int) -> int:
        """Return what of attention's input a forward takes down."""
        attention = forward.attention
        if attention is None:
            return 0
        windowed = any(group.window for group in self.shadows.runners[runner].on_device.groups)
        return ATTENTION_LENS if windowed and attention.window_indices is None else ATTENTION_LENS | ATTENTION_SLOTS

    def begin(self, forward: "ModelForward", flight: Flight) -> None:
        """Launch the first part of a run that is not in a graph; `after` launches the rest, and delivers the flight."""
        self.pending, self._inside = flight, forward
        forward.begin()

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
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.end()
        elif self.ledger.back:
            ended = self._end()
            if ended is None:  # switched off this very moment: what has no end never lands
                return
            if ended:
                raise RuntimeError(f"{REFUSED} {ended}")
        elif back is None:
            self._first_back(flight)
        else:
            error = back.fire(self._stream())
            if error:
                raise RuntimeError(f"{REFUSED} {error}")
        if note:
            flight = flight._replace(note=note)
        self.deliver(flight)

    def ended(self, _: Any, error: BaseException | None) -> None:
        """As `after`, of a model that has given something, or raised an error."""
        if error is None:
            refused = self._end()
            if refused == 0:
                flight, self.pending = self.pending, None
                self.deliver(flight)  # type: ignore[arg-type]  # what is to be ended has begun
                return
            if refused is not None:
                raise RuntimeError(f"{REFUSED} {refused}")
        self.after("" if error is None else f"the model raised {self.error_text(error)}")

    def _first_back(self, flight: Flight) -> None:
        following, stamp = (flight.counters + 1) % COUNTERS, flight.number % INT32_MAX + 1
        kernels = self._kernels[flight.runner]
        launch = kernels.take_back(flight.layout, flight.at, flight.counters, following, stamp, flight.watched)
        if self._same is not None:
            setattr(self._same, "back_watching" if flight.watched else "back", launch)
            self._same.again = None  # what has been made does not know this one

    def programs(self, flight: Flight) -> int:
        """Return how many programs take a flight down."""
        if flight.programs:
            return flight.programs
        streams = len(self.shadows.runners[flight.runner].stream_words)
        return sum(self._programs_of(flight.layout, streams=streams, watch=flight.watched))

    def release(self, flight: Flight) -> None:
        """Give a flight's frame back, in the order in which they were taken."""
        self._arena.give_back(flight.place, flight.layout.words)
        self.ledger.given_back += 1
