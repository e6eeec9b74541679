"""The engine thread's part: launches on the engine's own stream, and nothing that waits.

Each step of an engine comes here with cold caches, so little is touched: a forward's frame is looked up by its size, and
one launch says where it is to be put.
"""

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ....kernels.arrays import Int64Array
from ....kernels.capture.frames import (
    MAX_CARRIED,
    NUM_COUNTERS,
    AttentionLens,
    FrameLayout,
    ModelInput,
    SavedStates,
    StateIndices,
)
from ...errors import error_text
from ...trace.schema import ATTENTION_LENS, ATTENTION_SLOTS
from .forward import Carried, DeviceForward, ForwardPart, ForwardRequests, FrameInFlight, places_of
from .shadows import DeviceShadows

if TYPE_CHECKING:
    from ....kernels.capture.model_forward import ModelForward
    from .attention_probe import AttentionProbe

MAX_IN_FLIGHT: Final = 1024
COUNTERS: Final = MAX_IN_FLIGHT + 1  # rows of them: each frame in flight zeroes the next one's
MANY_IN_FLIGHT: Final = 32  # frames: whoever records them is behind
INT32_MAX: Final = 2**31 - 1
NO_END: Final = "the engine did not call after_forward()"

# Entries of changes that fit a frame. A forward that admits requests may hit long prefixes, whose every cell is a
# change; so is every cell after a reset.
TABLE_TILES_FEW: Final = 256
TABLE_TILES: Final = 4_096
LUT_CHANGES: Final = 65_536
KV_CHANGES: Final = 4_096
ATTENTION_CHANGES: Final = 1_024  # slots that differ from what they should be: in a healthy engine none
MAX_LAYOUTS: Final = 4_096
ONE_AFTER_ANOTHER: Final = (1,)  # the strides of a flat tensor
CARRYING_TOKENS: Final = 1_024  # one program copies what a frame carries: no more than a decode step gives out


class FrameBuffer:
    """Hands out stretches of `size` words; one thread takes, another gives back, in the same order.

    Places are counted on and on: a place's remainder by `size` is where it lies. Stretches never wrap around the end, so
    what is left there is skipped.
    """

    __slots__ = ("_free_from", "_taken_to", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken_to = 0  # the taker's: the place behind the last stretch
        self._free_from = 0  # the giver's: the place behind the last stretch that was given back

    def take(self, words: int) -> int | None:
        """Return the place at which a stretch of `words` begins, None if there is no room."""
        size, place, free_from = self.size, self._taken_to, self._free_from
        if place % size + words > size:
            place += size - place % size
        # All is free if the last stretch is back, whatever has been skipped since.
        room_to = place + size if free_from == self._taken_to else free_from + size
        if words > size or place + words > room_to:
            return None
        self._taken_to = place + words
        return place

    @property
    def half_full(self) -> bool:
        """Whether more than half of the room is taken; any thread may ask."""
        return 2 * (self._taken_to - self._free_from) > self.size

    def give_back(self, place: int, words: int) -> None:
        """Give back the oldest stretch."""
        self._free_from = place + words


class _OfModel(NamedTuple):
    """What each run of a model's, in a graph say, has alike."""

    mine: object  # of one `DeviceCapture`
    many: bool
    layout: FrameLayout
    attention: int  # as `FrameInFlight` has it


class CurrentStream:
    """Returns a device's current stream as torch has it; made anew only where it is another than before."""

    def __init__(self, device: Any) -> None:
        import torch

        self._index = torch.cuda.current_device() if device.index is None else int(device.index)
        self._make: Callable[[int], Any] = torch.cuda.current_stream
        self._raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._address = -1
        self._stream: Any = None

    def __call__(self) -> Any:
        """Return it."""
        address = -1 if self._raw is None else self._raw(self._index)
        if address != self._address or self._stream is None or self._raw is None:
            self._address, self._stream = address, self._make(self._index)
        return self._stream


class DeviceCapture:
    """Has forwards fill frames; for the engine's thread alone, but for `release`, `reset` and `catch_up`.

    `shadows` are what the trace has already, `frame_bytes` the room for frames in flight on the device, `watch_every` the
    forwards between two comparisons of the prefix's bytes, 0 never.
    """

    def __init__(self, shadows: DeviceShadows, *, frame_bytes: int, watch_every: int) -> None:
        import torch

        from ....kernels.capture.frame_kernels import TICKET_WORDS
        from ....kernels.capture.model_forward import TILE, TicketWriter

        device = shadows.descriptors[0].device
        self.on_gpu = device.type == "cuda"
        self.frames = torch.zeros(max(frame_bytes // 8, 1), dtype=torch.int64, device=device)
        self.counters = torch.zeros((COUNTERS, NUM_COUNTERS), dtype=torch.int64, device=device)
        self.shadows = shadows
        self.deliver: Callable[[FrameInFlight], None] = lambda _: None  # gets it once all that fills it is launched
        self.on_no_room: Callable[[], None] = lambda: (
            None
        )  # called after a forward that is lost: too many are in flight
        # What the next frame carries; called with what cannot wait for it, in order, and if somebody has written to it.
        self.waiting: list[Carried] = []
        self.on_not_carried: Callable[[Carried], None] = lambda _: None
        self.on_changed: Callable[[], None] = lambda: None
        self.carries = False  # whether frames have room for it
        self.probe: AttentionProbe | None = None  # what looks at the first runner's attention
        self._carried_dtype, self._device = torch.int64, self.frames.get_device()
        self._current_stream: Callable[[], Any] | None = CurrentStream(device) if self.on_gpu else None
        self.error_text = error_text  # what may be said of an error
        self.off = False  # nothing is captured any more; any thread may set it
        self.pending: FrameInFlight | None = None  # a forward that has begun and not ended
        self.next_forward = 0  # its number
        self.engine_thread = 0  # which thread began the last forward
        self._model: ModelForward | None = None  # the pending forward's
        self._mine = object()
        self._buffer = FrameBuffer(int(self.frames.shape[0]))
        self._tile = TILE
        self._layout = functools.lru_cache(MAX_LAYOUTS)(self._make_layout)  # an engine's thread asks in every step
        self._watch_every = watch_every
        self._reset = False
        self._catching_up = False
        self._taken = 0  # frames in flight: taken by the engine's thread, given back by another
        self._given_back = 0
        # A ticket for each runner's forwards that integrators begin and end.
        self._tickets = torch.zeros((len(shadows.runners), TICKET_WORDS), dtype=torch.int64, device=device).unbind()
        self._writers = [TicketWriter(self.frames, self.counters, descriptor) for descriptor in shadows.descriptors]
        self._watchable = [watch_every > 0 and bool(runner.stream_words) for runner in shadows.runners]
        self._lut_int64 = [runner.lut_int64 for runner in shadows.runners]
        windowed = [any(group.window for group in runner.groups) for runner in shadows.runners]
        self._read_without_window = [ATTENTION_LENS if one else ATTENTION_LENS | ATTENTION_SLOTS for one in windowed]

    def _make_layout(
        self, runner: int, bs: int, tokens: int, many: bool, attention: bool, states: int = 0
    ) -> FrameLayout:
        """Return a frame's sections, with room for many changes, and for what attention got, if asked for."""
        known = self.shadows.runners[runner]
        words, luts = known.stream_words, len(known.luts)
        width, tables = max(int(table.shadow.shape[1]) for table in known.tables), len(known.tables)
        return FrameLayout(
            bs=bs,
            tokens=tokens,
            stream_words=words,
            table_capacity=min(tables * bs * -(-width // self._tile), TABLE_TILES if many else TABLE_TILES_FEW),
            lut_capacity=min(luts * (bs * width + tokens), LUT_CHANGES),
            kv_capacity=min(len(words) * bs * width, KV_CHANGES),
            tile=self._tile,
            attention_capacity=ATTENTION_CHANGES if attention else 0,
            value_words=sum(known.value_words),
            tables=tables,
            carried=MAX_CARRIED * tokens if self.carries and tokens <= CARRYING_TOKENS else 0,
            states=states,
        )

    def prepare(self) -> None:
        """Compile the kernels before the engine runs, for the dtypes that engines use; others at their first use."""
        import torch

        row = torch.zeros(1, dtype=torch.int64, device=self.frames.device)  # row 0 is padding
        lens, nothing = row.to(torch.int32), {"input_ids": row, "positions": row, "out_cache_loc": row, "num_tokens": 0}
        for number, ticket in enumerate(self._tickets):
            layout = self._layout(number, 1, 0, False, False)
            for _ in range(2):  # the second is launched as all that follow; the stamp 0 has nothing captured
                self._writers[number].write(ticket, ticket.data_ptr(), (0, 0, 0, 0, 0), layout, 0)
                for prefix, minus, extend in ((row, None, None), (lens, None, lens), (row, lens, lens)):
                    given = ModelInput(rows=row, prefix=prefix, minus=minus, extend=extend, **nothing)
                    model = self._run_of(number, given)
                    model.begin()
                    model.end()
            pools = len(self.shadows.runners[number].states)
            self.shadows.prepare_states(number)
            for slots in (row, lens) if pools else ():
                model = self._run_of(number, given, states=(*[StateIndices(slots)] * pools, SavedStates(row, slots)))
                model.begin()
                model.end()

    def prepare_for(self, given: ModelInput, attention: AttentionLens | None) -> None:
        """Compile the kernels for the dtypes of these, of the first runner; nothing is captured."""
        model = self._run_of(0, given, attention)
        model.begin()
        model.end()

    def reset(self) -> None:
        """Have the next forward's frame hold everything anew; any thread may ask."""
        self._reset = True

    def catch_up(self, *, still: bool) -> None:
        """Make room for many changes in the frames to come, as long as some are missing; any thread may ask."""
        self._catching_up = still

    def before(self, forward: DeviceForward) -> int:
        """Begin to capture a forward that is about to run; return its number, -1 if nothing is captured any more.

        A forward for which there is no room is lost, but numbered.

        Raises:
            ValueError: fewer lengths than requests, which the kernels would read beyond.
        """
        if self.off:
            return -1
        forward.check()
        model = self._run_of(forward.runner, forward, forward.attention, forward.states)
        of = (forward.mode, forward.runner, model.bs, forward.requests, forward.truth_lens)
        frame = self.expect(model, *of, parts=forward.parts, new_rows=forward.new_rows)
        if frame is not None:
            self.begin(model, frame)
        return self.next_forward - max(len(forward.parts), 1)

    def _run_of(
        self,
        runner: int,
        given: ModelInput,
        attention: AttentionLens | None = None,
        states: tuple[StateIndices | SavedStates, ...] = (),
    ) -> "ModelForward":
        from ....kernels.capture.model_forward import ModelForward

        lut = self._lut_int64[runner]
        return ModelForward(self._tickets[runner], given, attention, lut_int64=lut, states=states)

    def expect(
        self,
        model: "ModelForward",
        mode: str,
        runner: int,
        bs: int,
        requests: ForwardRequests,
        truth_lens: Sequence[int] | bytes,
        *,
        parts: tuple[ForwardPart, ...] = (),
        new_rows: bool = True,
    ) -> FrameInFlight | None:
        """Have the next run of a model on the current stream fill a frame, and return that.

        The run's kernels are launched by whoever asks, by themselves or in a CUDA graph that holds them; then the frame
        is to be delivered. None if the forward is lost, as in `before`, or nothing is captured any more. The engine runs
        `bs` requests; more may run for padding. The rest is as `DeviceForward` has it.
        """
        if self.off:
            return None
        if self.pending is not None:
            self.after(NO_END)
        self.engine_thread = get_ident()
        number = self.next_forward
        self.next_forward = number + max(len(parts), 1)
        fresh = self._reset
        many = fresh or self._catching_up or (model.has_extend and new_rows)
        kept = model.kept
        if kept is None or kept.mine is not self._mine or kept.many is not many:
            kept = model.kept = self._of_model(model, runner, many)
        layout, taken = kept.layout, self._taken
        place = self._buffer.take(layout.words) if taken - self._given_back < MAX_IN_FLIGHT else None
        if place is None:
            self._reset = True
            self.on_no_room()
            return None
        if fresh:  # only then cleared: another thread may ask at this very moment
            self._reset = False
            self.shadows.reset()
        self._taken = taken + 1
        at, counters = place % self._buffer.size, taken % COUNTERS
        watched = self._watchable[runner] and not number % self._watch_every
        # Each frame in flight zeroes the counters of the one after it, so they go round by frames, not by forwards.
        numbers = (number % INT32_MAX + 1, at, counters, (taken + 1) % COUNTERS, int(watched))
        writer, carried = self._writers[runner], self._take_along(layout) if self.waiting else ()
        writer.write(model.ticket, model.address, numbers, layout, model.programs, places_of(carried, layout, at))
        return FrameInFlight(
            launched_ns=perf_counter_ns(),
            mode=mode,
            runner=runner,
            requests=requests,
            truth_lens=truth_lens,
            number=number,
            layout=layout,
            place=place,
            at=at,
            counters=counters,
            watched=watched,
            fresh=fresh,
            bs=bs,
            programs=model.programs,
            attention=kept.attention,
            parts=parts,
            carried=tuple([(one.record, one.length) for one in carried]),
            probed=0 if self.probe is None or runner else self.probe.want(number, mode, bs),
        )

    def _of_model(self, model: "ModelForward", runner: int, many: bool) -> "_OfModel":
        attention, read = model.attention, 0
        if isinstance(attention, AttentionLens):
            read = ATTENTION_LENS | ATTENTION_SLOTS if attention.tables else ATTENTION_LENS
        elif attention is not None:
            whole = attention.window_indices is not None
            read = ATTENTION_LENS | ATTENTION_SLOTS if whole else self._read_without_window[runner]
        compared = attention is not None and not isinstance(attention, AttentionLens)
        layout = self._layout(runner, model.bs, model.tokens, many, compared, len(model.states))
        return _OfModel(self._mine, many, layout, read)

    def carry(self, values: Any, record: Callable[[Int64Array], None]) -> bool:
        """Have the next frame carry integers on the device that nobody changes, and `record` called with them before its forward.

        It costs no launch and no copy of its own. Return False for what no frame can carry.
        """
        if len(self.waiting) == MAX_CARRIED:
            self.carry_no_longer()
        if not self.carries or values.dtype is not self._carried_dtype or values.stride() != ONE_AFTER_ANOTHER:
            return False
        if values.get_device() != self._device:
            return False
        try:
            version = values._version  # counts what torch writes, not what kernels of others do
        except RuntimeError:  # tensors of the inference mode count nothing
            return False
        self.waiting.append(Carried(values, values.data_ptr(), values.numel(), version, record))
        return True

    def carry_no_longer(self) -> None:
        """Have what waits for a frame recorded now: something else must come behind it."""
        for one in self._no_longer_waiting():
            self.on_not_carried(one)

    def _take_along(self, layout: FrameLayout) -> list[Carried]:
        """Return what waits, if it fits into a frame; else it is recorded by itself, right before."""
        if sum([one.length for one in self.waiting]) > layout.carried:
            self.carry_no_longer()
        return self._no_longer_waiting()

    def _no_longer_waiting(self) -> list[Carried]:
        """Return what has waited, to be copied on the current stream and let go; nothing if somebody has written to it."""
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            if one.values._version != one.version:
                self.carries = False
                self.on_changed()
                return []
        if self._current_stream is not None and waiting:
            # It may come from another stream, which would give its memory out anew before this one has come to the copy.
            stream = self._current_stream()
            for one in waiting:
                one.values.record_stream(stream)
        return waiting

    def begin(self, model: "ModelForward", frame: FrameInFlight) -> None:
        """Launch the first part of a run that is in no graph; `after` launches the rest, and delivers the frame."""
        self.pending, self._model = frame, model
        model.begin()

    def after(self, note: str) -> None:
        """Complete the pending forward and deliver its frame; `note` says how it failed."""
        frame, model = self.pending, self._model
        if frame is None or model is None or self.off:
            return
        self.pending = self._model = None
        model.end()
        self.hand_over(frame._replace(note=note) if note else frame)

    def hand_over(self, frame: FrameInFlight) -> None:
        """Deliver a frame: all that fills it is launched."""
        if frame.probed and self.probe is not None:
            self.probe.over()
        self.deliver(frame)

    def ended(self, _: Any, error: BaseException | None) -> None:
        """As `after`, of a model that has returned, or raised an error."""
        self.after("" if error is None else f"the model raised {self.error_text(error)}")

    @property
    def crowded(self) -> bool:
        """Whether so many frames are in flight that there may soon be no room for another; any thread may ask."""
        return self._taken - self._given_back > MANY_IN_FLIGHT or self._buffer.half_full

    def release(self, frame: FrameInFlight) -> None:
        """Give a frame's room back, in the order in which it was taken."""
        self._buffer.give_back(frame.place, frame.layout.words)
        self._given_back += 1
