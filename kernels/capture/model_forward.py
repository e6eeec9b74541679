"""What is launched around one run of a model so that it fills a frame: a ticket, then kernels before and after it."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from ..constants import ANY_NUMBER
from .frame_kernels import attention_kernel, begin_kernel, end_kernel, state_kernel, write_ticket_kernel
from .frames import (
    ALL_READ,
    MAX_CARRIED,
    NOT_SAID,
    AttentionLens,
    AttentionTensors,
    CarriedValues,
    FrameLayout,
    ModelInput,
    SavedStates,
    StateIndices,
)

PROGRAMS = 1024  # of each launch: enough to fill a device
TILE = 512


class _AnyPointer:
    """Stands for a tensor where a kernel is compiled: of its address nothing is known, not that it is a multiple of 16."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return an address that tells nothing."""
        return _ANY_ADDRESS


_ANY_ADDRESS: Final = 8


def _anything(value: Any) -> Any:
    """Return what stands for an argument where a kernel is compiled for all values and alignments."""
    if isinstance(value, tuple):
        return tuple(_anything(one) for one in value)
    return ANY_NUMBER if isinstance(value, int) else _AnyPointer(value.dtype)


def _words(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments as a compiled kernel takes them, tensors by their addresses."""
    return tuple(
        [
            one
            if type(one) is int
            else _words(one)
            if type(one) is tuple
            else one.data_ptr()  # one in three is a tuple
            for one in arguments
        ]
    )


def _dtypes(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for one in arguments:
        if type(one) is tuple:
            yield from _dtypes(one)
        elif type(one) is not int:
            yield one.dtype


class Launches:
    """Launches kernels that take tensors, numbers and tuples of them, then constants.

    Triton looks a kernel up by all that it is given, which takes longer than the launch. Here that is done once for each
    form of a kernel: its constants and its tensors' dtypes.
    """

    def __init__(self) -> None:
        self._ready: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def launch(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...] = (),
    ) -> Callable[..., Any] | None:
        """Launch a kernel on the current stream, and compile it if its form is new.

        Returns what launches this form again, given addresses, numbers and constants; None in Triton's interpreter.
        """
        key = (id(kernel), programs, constants, *_dtypes(arguments))
        ready = self._ready.get(key)
        if ready is None:
            compiled = kernel.warmup(*_anything(arguments), *constants, grid=(programs,))
            if compiled is None:
                kernel[(programs,)](*arguments, *constants)
                return None
            ready = self._ready.setdefault(key, compiled[(programs, 1, 1)])
        ready(*_words(arguments), *constants)
        return ready


_launches: Final[dict[int, Launches]] = {}  # by device: compiled code is loaded into one


def launches_on(tensor: Any) -> Launches:
    """Return what launches kernels on a tensor's device."""
    return _launches.setdefault(tensor.get_device(), Launches())


class TicketWriter:
    """Writes tickets for one runner's forwards; this is what each step of an engine waits for, so it does little.

    All frames lie in `frames` `[any] int64`; the first row of `counters` `[rows, NUM_COUNTERS] int64` holds zeros.
    """

    def __init__(self, frames: Any, counters: Any, descriptor: Any) -> None:
        self._tensors = (frames, counters, descriptor)
        self._addresses = tuple(tensor.data_ptr() for tensor in self._tensors)
        nothing = (frames,) * MAX_CARRIED
        self._nothing = CarriedValues(nothing, _words(nothing), (0,) * (2 * MAX_CARRIED))
        self._launches = launches_on(frames)
        self._ready: Callable[..., Any] | None = None

    def write(
        self,
        ticket: Any,
        address: int,
        numbers: tuple[int, ...],
        layout: FrameLayout,
        programs: int,
        carried: CarriedValues | None = None,
    ) -> None:
        """Have the next run of a model that reads a ticket, `[TICKET_WORDS] int64` at `address`, fill a frame.

        `numbers` are the forward's stamp, within int32; where its frame begins; its row of `counters`; the row that is zeroed
        for the next forward; and 1 if the prefix is compared with the shadow, else 0. The model's kernels have `programs`
        together. The values that are `carried` are copied into the frame; None for nothing.
        """
        tensors, addresses, places = self._nothing if carried is None else carried
        if self._ready is not None:
            self._ready(address, self._addresses, (*numbers, *layout.ticket, programs), addresses, places)
            return
        arguments = (ticket, self._tensors, (*numbers, *layout.ticket, programs), tensors, places)
        self._ready = self._launches.launch(write_ticket_kernel, 1, arguments)


class ModelForward:
    """One run of a model that fills a frame on the current stream, as its ticket says; in a graph, at each launch of that.

    The ticket, `[TICKET_WORDS] int64`, is zeros as long as nothing is to be captured; `attention` is None if it is not known
    what that is given; `lut_int64` says whether the runner's full-to-SWA tables are int64, else int32; `states` are the slots of
    each of the runner's pools of recurrent state, nothing if they are not known, and behind them, from the first pool on, those of
    states that are saved. `bs` requests run, padding included; `programs` fill the frame, of all launches together.
    """

    __slots__ = (
        "_given",
        "_launches",
        "_lut_int64",
        "_no_bools",
        "address",
        "attention",
        "bs",
        "kept",
        "programs",
        "states",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        ticket: Any,
        given: ModelInput,
        attention: AttentionTensors | AttentionLens | None,
        *,
        lut_int64: bool,
        states: tuple[StateIndices | SavedStates, ...] = (),
    ) -> None:
        self.ticket = ticket
        self.address = int(ticket.data_ptr())
        self.attention = attention
        self.bs = int(given.rows.numel())
        self.tokens = given.num_tokens
        self.states = states
        self.programs = PROGRAMS * ((3 if isinstance(attention, AttentionTensors) else 2) + 2 * len(states))
        self._given = given
        self._no_bools = given.rows[:0].bool() if states else None
        self._launches = launches_on(ticket)
        self._lut_int64 = lut_int64
        self.kept: Any = None  # for whoever has it fill frames: what is the same for each

    @property
    def has_extend(self) -> bool:
        """Whether each request adds a number of tokens of its own."""
        return self._given.extend is not None

    def begin(self) -> None:
        """Launch what belongs right before the model's first layer."""
        given, attention = self._given, self.attention
        minus, extend = given.minus, given.extend
        rows = given.rows
        requests = (rows, given.prefix, rows if minus is None else minus, rows if extend is None else extend)
        loc, copied = given.out_cache_loc, isinstance(attention, AttentionLens)
        own = (attention.seq_lens, attention.query_start_loc) if isinstance(attention, AttentionLens) else (loc, loc)
        self._launches.launch(
            begin_kernel,
            PROGRAMS,
            (
                *(self.ticket, requests, (given.input_ids, given.positions, loc), own),
                (
                    *(int(loc.shape[-1]), given.prefix.numel(), given.extend_each, self.bs, given.num_tokens),
                    int(loc.stride(0)) if loc.ndim > 1 else 0,
                ),
            ),
            (minus is not None, extend is not None, copied, self._lut_int64, TILE),
        )
        self._look_at_states(after=False)
        if not isinstance(attention, AttentionTensors):
            return
        window_indptr, window_indices = attention.window_indptr, attention.window_indices
        qo_indptr = attention.qo_indptr
        self._launches.launch(
            attention_kernel,
            PROGRAMS,
            (
                *(self.ticket, attention.kv_indptr, attention.kv_indices),
                attention.kv_indptr if window_indptr is None else window_indptr,
                attention.kv_indices if window_indices is None else window_indices,
                attention.kv_indptr if qo_indptr is None else qo_indptr,
                *(attention.kv_indices.numel(), 0 if window_indices is None else window_indices.numel()),
                self.bs,
            ),
            (qo_indptr is not None, window_indices is not None, TILE),
        )

    def end(self) -> None:
        """Launch what belongs right after its last layer."""
        self._look_at_states(after=True)
        self._launches.launch(end_kernel, PROGRAMS, (self.ticket, self.bs, self.tokens), (TILE,))

    def _who_reads(self, told: Any) -> tuple[Any, int]:
        """Return where it is said who begins with a state, and the stride there: always bools, for which kernels are compiled."""
        if told is None or told is True:
            return self._no_bools, NOT_SAID if told is None else ALL_READ
        return told, told.stride(0)

    def _look_at_states(self, *, after: bool) -> None:
        pools = sum(isinstance(one, StateIndices) for one in self.states)
        for place, one in enumerate(self.states):
            first, second = one[:2]
            other = first if second is None else second
            counts = min(first.numel(), self.bs), 0 if second is None else other.numel()
            reads, said = zip(*(self._who_reads(told) for told in one[2:] or (None, None)), strict=True)
            numbers = place, place % pools, self.bs, *counts, first.stride(0), other.stride(0), *said
            self._launches.launch(
                state_kernel,
                PROGRAMS,
                (self.ticket, first, other, *reads, numbers),
                (after, isinstance(one, SavedStates), TILE),
            )
