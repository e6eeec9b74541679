"""A forward whose tensors lie on the device: what an integrator says of it, and what is kept until its frame is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.capture.frames import (
    MAX_CARRIED,
    AttentionLens,
    CarriedValues,
    FrameLayout,
    ModelInput,
    SavedStates,
    StateIndices,
)
from ..privacy import IdentityValue

_NOTHING: Final = np.empty(0, np.int64)
_NO_MORE: Final = (0,) * (2 * (MAX_CARRIED - 1))


class TokenSource(Protocol):
    """A request whose tokens only ever grow at the end; one whose tokens become others is another object.

    If it has `token(position)` too, a single one is asked for so: it returns an int, None if it no longer has so many.

    Objects of it can be weakly referenced, and its tokens are asked for later, by another thread.
    """

    def tokens(self, start: int, stop: int) -> Int64Array:
        """Return its tokens from position `start` to before `stop`, fewer if it no longer has so many."""


def tokens_of(sources: Sequence[TokenSource], starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return tokens from `starts` to before `stops`, `[n]`, one request's after another, and how many of each, `[n]`."""
    if (stops == starts + 1).all():  # of most decodes
        ask: list[Any] = [getattr(source, "token", None) for source in sources]
        one = [] if None in ask else [token(start) for token, start in zip(ask, starts.tolist(), strict=True)]
        if one and None not in one:
            return np.array(one, np.int64), np.ones(len(one), np.int64)
    asked = zip(sources, starts.tolist(), stops.tolist(), strict=True)
    found = [source.tokens(start, stop) if start < stop else _NOTHING for source, start, stop in asked]
    return np.concatenate([_NOTHING, *found]), np.fromiter(map(len, found), np.int64, len(found))


class ForwardRequests(Protocol):
    """The requests of a forward; asked for later, by another thread. `BatchRequests` is the plain one.

    If it has `settle(forward, truth_lens)` too, that is called with the `CopiedForward` that the device has captured, tokens
    without a request at its end included, and `[bs]` tokens of each request, for what only the device has known: it returns
    `[bs]` how many of each request's first tokens the forward is recorded with, and its `truth_lens`. A request with none
    is left out; what the others did with their slots is recorded with a later forward, as far as tables go. If it has
    `identity`, that is as `ForwardInput` has it.

    Attributes:
        ids: `[bs]` on the host, -1 for padding, which has none at the end.
        truth: each request's tokens, or None if the engine does not know them; as many as requests without padding.
        known_lens: tokens that each has beside `DeviceForward.truth_lens`: prompts, which do not grow; None for none.
    """

    @property
    def ids(self) -> Int64Array: ...  # noqa: D102

    @property
    def truth(self) -> Sequence[TokenSource] | None: ...  # noqa: D102

    @property
    def known_lens(self) -> Int64Array | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequests:
    """The requests of a forward, as `ForwardRequests` has them."""

    ids: Int64Array
    truth: Sequence[TokenSource] | None = None
    known_lens: Int64Array | None = None
    identity: Sequence[IdentityValue] = ()


class ForwardPart(NamedTuple):
    """Some requests of a model's run, recorded as a forward of their own: an engine may let one read what another writes."""

    mode: str
    requests: Int64Array  # [n] places in the batch, ascending


@dataclass(slots=True, kw_only=True)
class DeviceForward(ModelInput):
    """One forward, before it runs: what its model is run with, as `ModelInput` has it, and whose it is.

    Attributes:
        mode: one of `forward_input.MODES`.
        runner: index into the header's runners.
        requests: the forward's.
        truth_lens: how many of each request's tokens the scheduler has at this moment, beside `known_lens`.
        parts: if it is recorded as several forwards, those in order.
        attention: the lengths that attention is given, if they are known.
        states: the slots of each of the runner's state pools, then of those that have states saved; nothing if they are not known.
        new_rows: whether some requests may have new rows, of which many entries are new.
    """

    mode: str
    runner: int
    requests: ForwardRequests
    truth_lens: Sequence[int] | bytes = ()
    parts: tuple[ForwardPart, ...] = ()
    attention: AttentionLens | None = None
    states: tuple[StateIndices | SavedStates, ...] = ()
    new_rows: bool = True


class Carried(NamedTuple):
    """Integers on the device that the next frame carries to the host, and what records them, right before its forward."""

    # [n] int64; let go once the copy is launched: it may be a view, and what it is a view of many times as large.
    values: Any
    address: int
    length: int
    version: int  # how often they had been written to
    record: Callable[[Int64Array], None]


def places_of(carried: Sequence[Carried], layout: FrameLayout, at: int) -> CarriedValues | None:
    """Return what a ticket's launch copies for a frame that begins `at`, one after another."""
    if not carried:
        return None
    place, first = at + layout.carried_at, carried[0]
    if len(carried) == 1:
        return CarriedValues(
            (first.values,) * MAX_CARRIED, (first.address,) * MAX_CARRIED, (place, first.length, *_NO_MORE)
        )
    values, addresses, places = list[Any](), list[int](), list[int]()
    for one in carried:
        values.append(one.values)
        addresses.append(one.address)
        places += (place, one.length)
        place += one.length
    return CarriedValues(tuple(values), tuple(addresses), tuple(places))


class FrameInFlight(NamedTuple):
    """A forward whose frame is being filled: what the host knows of it, and where its frame lies."""

    launched_ns: int  # when its capture was launched, on the monotonic clock
    mode: str
    runner: int
    requests: ForwardRequests | None
    truth_lens: Sequence[int] | bytes  # as `DeviceForward` has it; bytes are int64 numbers
    number: int
    layout: FrameLayout
    place: int  # of its frame, as the buffer counts
    at: int  # where its frame begins
    counters: int  # the row of its counters
    watched: bool  # its prefix's bytes are compared
    fresh: bool  # the shadows were reset right before it, so its frame holds everything anew
    bs: int  # requests that the engine runs, if more may have run for padding; else -1
    programs: int  # that fill the frame
    attention: int  # what was read where attention takes it, as the column `attention_watched` has it
    note: str = ""  # how the forward failed
    parts: tuple[ForwardPart, ...] = ()  # as `DeviceForward` has it; they are numbered from `number` on
    carried: tuple[tuple[Callable[[Int64Array], None], int], ...] = ()  # what records them, and how many, of each
    probed: int = 0  # by what a token is known whose attention is looked at, 0 for none

    @property
    def last(self) -> int:
        """The number of the last forward that it is recorded as."""
        return self.number + max(len(self.parts) - 1, 0)
