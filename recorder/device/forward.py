"""What an integrator tells of a forward whose tensors lie on the device, and what is kept of it until it has landed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...kernels.frames import FrameLayout
from ..host_arrays import Int64Array


class TokenSource(Protocol):
    """A request whose tokens only ever grow at the end; one whose tokens become others is another object.

    Objects of it can be weakly referenced, and its tokens are asked for later, by another thread.
    """

    def tokens(self, start: int, stop: int) -> Int64Array:
        """Return its tokens from position `start` to before `stop`, fewer where it has no longer so many."""


@dataclass(slots=True, kw_only=True)  # not frozen: that costs a microsecond or two, on the engine's thread
class DeviceForward:
    """One forward, told before it runs; tensors are the engine's own, of any integer type, contiguous, read on its stream.

    Attributes:
        mode: one of `forward_input.MODES`.
        runner: index into the header's runners.
        rows: `[bs]` rows of the block table; row 0 is padding.
        prefix: `[any]` tokens in the cache before this forward; 0 past its end.
        minus: `[bs]` to be taken off `prefix`, or None.
        extend: `[bs]` tokens that this forward adds; None where it adds `extend_each` to all.
        extend_each: see `extend`.
        input_ids: `[tokens]`.
        positions: `[tokens]`.
        out_cache_loc: `[any]` slot of each token; past its end the tokens have none.
        num_tokens: how many of `input_ids` and `positions` count.
        request_ids: `[bs]` on the host.
        truth: each request's tokens, or None where the engine cannot tell; padding has none at the end.
        truth_lens: how many of each request's tokens the scheduler has at this moment, beside `known_lens`.
        known_lens: as many again for each: prompts, which do not grow.
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
    request_ids: Int64Array
    truth: Sequence[TokenSource] | None = None
    truth_lens: Sequence[int] = ()
    known_lens: Int64Array | None = None


@dataclass(slots=True, kw_only=True)
class Flight:
    """A forward on its way from the device: where its frame lies, and the event that says that it is complete.

    `fresh`: the shadows were reset right before it, so it tells everything anew.
    """

    told: DeviceForward
    number: int
    time_ns: int
    layout: FrameLayout
    at: int
    counters: int
    watched: bool
    fresh: bool
    note: str = ""
    done: Any = None
