"""Where the device is in the trace, and where the host is: pieces go out as far ahead as is known to be safe."""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ....recorder.state.requests import RequestTable
from ....recorder.trace.batch import EventView, TraceBatch
from ....recorder.trace.header import TraceHeader
from .foretelling import foretold
from .found import Found
from .packing import pack
from .pieces import AT_ONCE, Piece, Pieces
from .screening import Screening, screen
from .state import DeviceState

Int64Array = npt.NDArray[np.int64]


class RunAhead:
    """Sends what the kernels may step to the device, at most two pieces ahead of the host, and hands their results out.

    Args:
        header, state: the trace's, and its machine on the device.
        request_table: what is known of the requests at the event that the host is at.
        backend: what the host's loops run on.
        checks: whether history checks run.
        unknown: says of each group whether some of its slots may be unknown.
    """

    def __init__(
        self,
        header: TraceHeader,
        state: DeviceState,
        *,
        request_table: RequestTable,
        backend: str,
        checks: bool,
        unknown: Callable[[], list[bool]],
    ) -> None:
        self._header = header
        self._state = state
        self._request_table = request_table
        self._backend = backend
        self._checks = checks
        self._unknown = unknown
        self._pieces = Pieces(header, state)
        self._serial = 1
        self._way: deque[Piece] = deque()
        self._known = RequestTable()  # what the host will know at the next event to be sent
        self._batch: TraceBatch | None = None  # the batch that the next event to be sent lies in
        self._next = 0  # its place there
        self._coming: deque[TraceBatch | None] = deque()  # what comes behind it; None for something else than a batch
        self._screenings: list[tuple[TraceBatch, Screening]] = []
        self._at: tuple[TraceBatch, int] | None = None  # where the host is

    def foresee(self, batch: TraceBatch | None) -> None:
        """Tell of the batch that comes behind the one the host goes through next."""
        self._coming.append(batch)

    def begin(self, view: EventView) -> None:
        """Take note that the host is at this event; send on what may go."""
        self._at = (view.batch, view.index)
        if self._way and not self._holds(self._way[0], view):
            self._pass()
            self._advance()
        if self._way:
            return
        if any(batch is view.batch for batch in self._coming):
            while self._coming.popleft() is not view.batch:
                pass
        self._batch, self._next = view.batch, view.index
        if self._may_go(view.batch, view.index):
            self._advance()
        else:
            self._next = view.index + 1

    def is_hosts(self, view: EventView) -> bool:
        """Whether an event is carried out on the host."""
        return not (self._way and self._holds(self._way[0], view))

    def found(self, view: EventView) -> Found | None:
        """Return what was found in a forward, None where it is the host's."""
        while self._way and self._holds(self._way[0], view):
            piece = self._way[0]
            if not piece.drained:
                self._pieces.drain(piece)
            number = int(piece.steps[view.index - piece.first])
            if number < piece.done:
                return piece.found(number)
            # No later step was taken, and none of the pieces behind this one.
            self._pieces.stop()
            self._go_back(view)
            if piece.stuck == "host":
                self._next += 1
                return None
            self._advance()
        return None

    def drained(self, view: EventView) -> Piece | None:
        """Return the piece, drained, that an event lies in, None where it is the host's."""
        if not self._way or not self._holds(self._way[0], view):
            return None
        piece = self._way[0]
        if not piece.drained:
            self._pieces.drain(piece)
        return piece

    def settle(self) -> None:
        """Wait until the device is idle, before and after the host changes its state; nothing may have been sent ahead.

        Raises:
            RuntimeError: something was, so that an event which nobody foresaw changes what it was stepped on.
        """
        if self._way:
            piece = self._way[0]
            if len(self._way) > 1 or self._at is None or self._at != (piece.batch, piece.end - 1):
                raise RuntimeError("the device has gone past an event that changes its state; replay with --device cpu")
            self._pass()
        self._pieces.wait()

    def _go_back(self, view: EventView) -> None:
        """Forget what was sent from an event on, which is the next to be sent again."""
        beyond = [piece.batch for piece in self._way] + ([] if self._batch is None else [self._batch])
        for batch in reversed(list({id(one): one for one in beyond if one is not view.batch}.values())):
            self._coming.appendleft(batch)
        self._way.clear()
        self._batch, self._next = view.batch, view.index

    def _pass(self) -> None:
        piece = self._way.popleft()
        if not piece.drained:  # nothing in it was asked for
            self._pieces.drain(piece)

    def _holds(self, piece: Piece, view: EventView) -> bool:
        return piece.batch is view.batch and piece.first <= view.index < piece.end

    def _may_go(self, batch: TraceBatch, index: int) -> bool:
        return bool(self._screening(batch).for_device[index])

    def _screening(self, batch: TraceBatch) -> Screening:
        for screened, found in self._screenings:
            if screened is batch:
                return found
        found = screen(batch, self._header, checks=self._checks)
        alive = [self._batch, *self._coming]
        self._screenings = [one for one in self._screenings if any(one[0] is other for other in alive)]
        self._screenings.append((batch, found))
        return found

    def _advance(self) -> None:
        """Send pieces until two are under way or an event is the host's."""
        if not self._way:
            self._known.facts = dict(self._request_table.facts)
        while len(self._way) < AT_ONCE and self._batch is not None:
            if self._next >= len(self._batch):
                if not self._coming or self._coming[0] is None:
                    return
                self._batch, self._next = self._coming.popleft(), 0
                continue
            if not self._may_go(self._batch, self._next):
                return
            self._send(self._batch, self._next)

    def _send(self, batch: TraceBatch, first: int) -> None:
        behind = self._way[-1] if self._way else None
        if behind is not None and behind.batch.first_event + behind.end != batch.first_event + first:
            raise RuntimeError("the device was about to leave events out; replay with --device cpu")
        screening = self._screening(batch)
        stops = np.flatnonzero(~screening.for_device[first:])
        end = first + int(stops[0]) if len(stops) else len(batch)
        events = first + np.flatnonzero(screening.is_step[first:end])
        steps = np.full(end - first, -1, np.int64)
        steps[events - first] = np.arange(len(events))
        packed = pack(
            batch,
            self._header,
            self._state,
            first=first,
            end=end,
            events=events,
            kv_changes=screening.kv_changes,
            expected=self._foretold(batch, first, end),
            unknown=self._unknown(),
            serial=self._serial,
            tile=self._pieces.programs.tile,
        )
        self._serial += len(events)
        piece = Piece(batch=batch, first=first, end=end, steps=steps, reads=packed.entries, written=packed.written)
        self._pieces.submit(piece, packed)
        self._way.append(piece)
        self._next = end

    def _foretold(self, batch: TraceBatch, first: int, end: int) -> tuple[Int64Array, npt.NDArray[np.bool_]] | None:
        """Return what the oracle foretells of the inputs of events, None where the trace has none."""
        if self._header.oracle is None:
            return None
        return foretold(batch, self._header, self._known, first=first, end=end, backend=self._backend)
