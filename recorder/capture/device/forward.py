"""A forward whose tensors lie on the device: what an integrator says of it, and what is kept until its frame is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ....kernels.arrays import Int64Array
from ....kernels.capture.frames import FrameLayout


class TokenSource(Protocol):
    """A request whose tokens only ever grow at the end; one whose tokens become others is another object.

    Objects of it can be weakly referenced, and its tokens are asked for later, by another thread.
    """

    def tokens(self, start: int, stop: int) -> Int64Array:
        """Return its tokens from position `start` to before `stop`, fewer if it no longer has so many."""


class ForwardRequests(Protocol):
    """The requests of a forward; asked for later, by another thread. `BatchRequests` is the plain one.

    Attributes:
        ids: `[bs]` on the host, -1 for padding, which has none at the end.
        truth: each request's tokens, or None if the engine does not know them; as many as requests without padding.
        known_lens: tokens that each has beside `DeviceForward.truth_lens`: prompts, which do not grow; None for none.
    """

    @property
    def ids(self) -> Int64Array:
        """See the class."""

    @property
    def truth(self) -> Sequence[TokenSource] | None:
        """See the class."""

    @property
    def known_lens(self) -> Int64Array | None:
        """See the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequests:
    """The requests of a forward, as `ForwardRequests` has them."""

    ids: Int64Array
    truth: Sequence[TokenSource] | None = None
    known_lens: Int64Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForward:
    """One forward, before it runs; tensors are the engine's own, of any integer type, contiguous, read on its stream.

    Attributes:
        mode: one of `forward_input.MODES`.
        runner: index into the header's runners.
        rows: `[bs]` rows of the block table; row 0 is padding.
        prefix: `[any]` tokens in the cache before this forward; 0 past its end.
        minus: `[bs]` to be taken off `prefix`, or None.
        extend: `[bs]` tokens that this forward adds; None if it adds `extend_each` to all.
        extend_each: see `extend`.
        input_ids: `[tokens]`.
        positions: `[tokens]`.
        out_cache_loc: `[any]` slot of each token; past its end the tokens have none.
        num_tokens: how many of `input_ids` and `positions` count.
        requests: the forward's.
        truth_lens: how many of each request's tokens the scheduler has at this moment, beside `known_lens`.
    """

    mode: str
    runner: int
    rows: Any
    prefix: Any
    minus: Any | None = None
    extend: Any | None = None
    extend_each: int = 1
    input_ids: Any
    positions: Any
    out_cache_loc: Any
    num_tokens: int
    requests: ForwardRequests
    truth_lens: Sequence[int] | bytes = ()


class Lens(NamedTuple):
    """How much of each request is in the cache, and how much its forward adds, as `DeviceForward` has it."""

    prefix: Any
    minus: Any | None
    extend: Any | None
    extend_each: int

    def check(self, bs: int) -> None:
        """Raise a `ValueError` for fewer lengths than requests."""
        for lens in (self.minus, self.extend):
            if lens is not None and lens.numel() < bs:
                raise ValueError(f"{lens.numel()} lengths for {bs} requests, expected one for each")


class FrameInFlight(NamedTuple):
    """A forward whose frame is being filled: what the host knows of it, and where its frame lies.

    Attributes:
        launched_ns: when its capture was launched, on the monotonic clock.
        mode: one of `forward_input.MODES`.
        runner: index into the header's runners.
        requests: the forward's.
        truth_lens: as `DeviceForward` has it; bytes are int64 numbers.
        number: the forward's.
        layout: its frame's sections.
        place: of its frame, as the buffer counts.
        at: where its frame begins.
        counters: the row of its counters.
        watched: whether its prefix's bytes are compared.
        fresh: the shadows were reset right before it, so its frame holds everything anew.
        bs: requests that the engine runs, if more may have run for padding; else -1.
        programs: how many programs fill the frame.
        attention: what was read where attention takes it, as the column `attention_watched` has it.
        note: how the forward failed.
    """

    launched_ns: int
    mode: str
    runner: int
    requests: ForwardRequests | None
    truth_lens: Sequence[int] | bytes
    number: int
    layout: FrameLayout
    place: int
    at: int
    counters: int
    watched: bool
    fresh: bool
    bs: int
    programs: int
    attention: int
    note: str = ""
