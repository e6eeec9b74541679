"""Launching the frame kernels for one runner: two launches a forward, a few microseconds of the engine's thread each."""

from collections.abc import Callable
from typing import Any

from .frame_driver import CudaDriver, Launch
from .frame_inside import write_ticket_kernel
from .frames import FrameLayout
from .triton_frames import take_back_kernel, take_down_kernel

TILE = 512
PREFIX_PROGRAMS = 1024  # enough to fill a device, however few requests share them

# The kernels' parameters, as of `struct`; the same order as `frames` has them in.
_DOWN_STEP, _DOWN_FIXED = "7Q6i", "3Q8i"
_BACK_STEP, _BACK_FIXED = "4i", "3Q8i"
_TICKET_STEP, _TICKET_FIXED = "Q5i", "3Q11i"


def splits_of(bs: int) -> int:
    """Return how many programs share a request's prefix."""
    return PREFIX_PROGRAMS // bs or 1 if bs else 1


def programs_of(layout: FrameLayout, *, streams: int, watch: bool) -> tuple[int, int]:
    """Return how many programs `take_down` and `take_back` launch for a forward."""
    bs, tokens, tile = layout.bs, layout.tokens, layout.tile
    prefix = bs * splits_of(bs)
    before = -(-max(tokens, bs) // tile) + prefix
    return before, max(streams * (-(-tokens // tile) + (prefix if watch else 0)), 1)


class FrameKernels:
    """Launches the two kernels for one runner.

    The first launch with tensors of other dtypes compiles. Each launch here returns what launches the same kernel for
    the same layout and dtypes again, with other addresses and numbers, in a fraction of the time.

    Args:
        frames: `[any] int64`, in which all frames lie.
        counters: `[flights, NUM_COUNTERS] int64`, zeros for the first flight.
        descriptor: the runner's, `[DESCRIPTOR_WORDS] int64`.
        streams: how many streams the runner has.
        lut_int64: whether its full-to-SWA tables are int64, else int32.
        driver: None where there is none, or the kernels run in Triton's interpreter.
        stream: gives the address of the stream that is current on the engine's thread.
    """

    def __init__(
        self,
        frames: Any,
        counters: Any,
        descriptor: Any,
        *,
        streams: int,
        lut_int64: bool,
        driver: CudaDriver | None,
        stream: Callable[[], int],
    ) -> None:
        self._fixed = (frames, counters, descriptor)
        self._addresses = tuple(tensor.data_ptr() for tensor in self._fixed)
        self._streams = streams
        self._lut_int64 = lut_int64
        self._driver = driver
        self._stream = stream
        self._compiled: dict[Any, Any] = {}  # by kernel and dtypes, of which there are few

    def take_down(
        self,
        layout: FrameLayout,
        rows: Any,
        prefix: Any,
        minus: Any | None,
        extend: Any | None,
        extend_each: int,
        input_ids: Any,
        positions: Any,
        out_cache_loc: Any,
        at: int,
        flight: int,
        forward: int,
    ) -> Launch | None:
        """Take down what a forward reads and writes, before it runs, and which table entries the trace does not know.

        Returns what launches it again: `fill` gets the addresses of rows, prefix, minus, extend (of rows, where they
        are None), input_ids, positions and out_cache_loc, then at, flight, forward, the lengths of out_cache_loc and of
        prefix, and extend_each. None where there is nothing to launch, or nothing quicker than this.

        Args:
            layout: the frame's sections.
            rows: `[bs]` of any integer type, contiguous, as all of the engine's tensors.
            prefix: `[any]` tokens in the cache before the forward, 0 past its end.
            minus: `[bs]` to be taken off the prefix, or None.
            extend: `[bs]` tokens that the forward adds; None for `extend_each`.
            extend_each: where `extend` is None.
            input_ids: `[at least tokens]`.
            positions: `[at least tokens]`.
            out_cache_loc: `[any]`, -1 past its end.
            at: where the frame begins.
            flight: its row of `counters`, zeros.
            forward: stamped on every slot that the forward writes, within int32.
        """
        bs, tokens = layout.bs, layout.tokens
        splits, token_programs = splits_of(bs), -(-max(tokens, bs) // layout.tile)
        programs, _ = programs_of(layout, streams=self._streams, watch=False)
        if not programs:
            return None
        told = (rows, prefix, rows if minus is None else minus, rows if extend is None else extend)
        return self._launch(
            take_down_kernel,
            programs,
            (*told, input_ids, positions, out_cache_loc),
            (at, flight, forward, out_cache_loc.numel(), prefix.numel(), extend_each),
            (bs, tokens, layout.table_at, layout.table_capacity, layout.lut_at, layout.lut_capacity, token_programs, splits),
            (minus is not None, extend is not None, self._lut_int64, layout.tile),
            (_DOWN_STEP, _DOWN_FIXED),
        )  # fmt: skip

    def take_back(
        self, layout: FrameLayout, at: int, flight: int, next_flight: int, forward: int, watch: bool
    ) -> Launch | None:
        """Take down the bytes that a forward wrote and, with `watch`, those of its prefix that changed without a write.

        Returns what launches it again: `fill` gets at, flight, next_flight and forward.

        Args:
            layout: the frame's sections.
            at: where the frame begins, as `take_down` filled it.
            flight: its row of `counters`.
            next_flight: the row that is zeroed for the next forward.
            forward: as in `take_down`.
            watch: whether the prefix is compared with the shadow.
        """
        bs, tokens = layout.bs, layout.tokens
        splits, token_programs = splits_of(bs), -(-tokens // layout.tile)
        watch_programs = self._streams * bs * splits if watch else 0
        return self._launch(
            take_back_kernel,
            programs_of(layout, streams=self._streams, watch=watch)[1],
            (),
            (at, flight, next_flight, forward),
            (bs, tokens, layout.kv_at, layout.kv_capacity, layout.kv_entry, token_programs, watch_programs, splits),
            (layout.tile,),
            (_BACK_STEP, _BACK_FIXED),
        )

    def write_ticket(self, layout: FrameLayout, ticket: Any, programs: int, numbers: tuple[int, ...]) -> Launch | None:
        """Have a forward taken down where its model begins and ends, by kernels that are launched after this.

        Returns what launches it again: `fill` gets the ticket's address and the numbers.

        Args:
            layout: the frame's sections.
            ticket: `[TICKET_WORDS] int64`.
            programs: how many the kernels have together.
            numbers: the forward's stamp, where its frame begins, its row of `counters`, the row that is zeroed for the
                next forward, and whether the prefix is compared with the shadow.
        """
        sizes = (
            *(layout.table_at, layout.table_capacity, layout.lut_at, layout.lut_capacity),
            *(layout.kv_at, layout.kv_capacity, layout.kv_entry),
            *(layout.lens_at, layout.attention_at, layout.attention_capacity, programs),
        )
        return self._launch(write_ticket_kernel, 1, (ticket,), numbers, sizes, (), (_TICKET_STEP, _TICKET_FIXED))

    def _launch(
        self,
        kernel: Any,
        programs: int,
        tensors: tuple[Any, ...],
        numbers: tuple[int, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        parameters: tuple[str, str],
    ) -> Launch | None:
        """Launch a kernel, by Triton where it is not compiled yet, and return what launches it again."""
        key = (parameters, constants, *[tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(key)
        first = compiled is None
        if first:
            compiled = kernel[(programs,)](*tensors, *numbers, *self._fixed, *sizes, *constants)
            if compiled is None:  # the interpreter has nothing compiled to give
                return None
            self._compiled[key] = compiled
        fixed = (*self._addresses, *sizes)
        launch = None
        if self._driver is not None:
            launch = self._driver.launch_of(compiled, programs, step=parameters[0], fixed=parameters[1], values=fixed)
        if launch is None:
            launch = _by_triton(compiled, programs, (*fixed, *constants))
        if not first:
            launch.fill(*[tensor.data_ptr() for tensor in tensors], *numbers)
            error = launch.fire(self._stream())
            if error:
                raise RuntimeError(f"cuLaunchKernelEx: CUDA error {error}")
        return launch


def _by_triton(compiled: Any, programs: int, rest: tuple[Any, ...]) -> Launch:
    """Return what launches a kernel in Triton's own way, where the driver cannot be asked directly."""
    grid: Callable[..., Any] = compiled[(programs, 1, 1)]
    filled: tuple[int, ...] = ()

    def fill(*numbers: int) -> None:
        nonlocal filled
        filled = numbers

    def fire(_: int) -> int:  # Triton takes the current stream by itself
        grid(*filled, *rest)
        return 0

    return Launch(fill=fill, fire=fire)
