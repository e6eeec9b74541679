"""A request as the workload gives it, and as the scheduler carries it along."""

from dataclasses import dataclass, field

import numpy as np

from ....kernels.arrays import Int32Array
from .radix import Node

NO_ROW = -1
NO_ROOM = -1
NO_FUTURE = -1
NEVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a client asks for.

    `arrival_s` is simulated time, `prompt` `[n] int32`. `copies` is the number of answers wanted (more than one:
    forks after the prefill). `abort_at` aborts the request once that many of its tokens are in the cache, 0 at once,
    -1 never.
    """

    arrival_s: float
    prompt: Int32Array
    max_new_tokens: int
    priority: int = 0
    copies: int = 1
    abort_at: int = NEVER


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request in the engine.

    `tokens[:num_tokens]` is prompt and output so far; `cached_len` of them have their KV in the cache (positions
    0 .. cached_len - 1 of `row`), `allocated_len` have a slot, the first `shared_pages` pages of which belong to the
    prefix cache, which `node` holds in place. `window_start` is the first page whose sliding-window half may still be held.
    `room` is what the two halves of a prefill/decode pair call it, -1 for none. `in_flight` counts the forwards with it
    that the host has not heard back from, and `future` is where the token sampled last lies on the device.
    """

    request_id: int
    room: int
    name: str
    order: int
    priority: int
    prompt_len: int
    max_tokens: int
    tokens: Int32Array
    num_tokens: int
    copies_left: int
    abort_at: int
    retracted: bool = False
    row: int = NO_ROW
    cached_len: int = 0
    allocated_len: int = 0
    shared_pages: int = 0
    node: Node | None = None
    window_nodes: list[Node] = field(default_factory=list)
    window_start: int = 0
    in_flight: int = 0
    future: int = NO_FUTURE

    @classmethod
    def of(cls, spec: RequestSpec, *, request_id: int, order: int, room: int = NO_ROOM) -> "Request":
        """Return a request that has just come in."""
        prompt_len = len(spec.prompt)
        max_tokens = prompt_len + spec.max_new_tokens
        # One more than a request can ever hold, so that a page key's look-ahead stays inside.
        tokens = np.zeros(max_tokens + 1, np.int32)
        tokens[:prompt_len] = spec.prompt
        return cls(
            request_id=request_id,
            room=room,
            name=f"{request_id & 0xFFFFFFFF:08x}",
            order=order,
            priority=spec.priority,
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            tokens=tokens,
            num_tokens=prompt_len,
            copies_left=spec.copies - 1,
            abort_at=spec.abort_at,
        )

    @property
    def sampling_id(self) -> int:
        """The id that a sampler goes by: the room where there is one, so that both halves of a pair sample alike."""
        return self.room if self.room >= 0 else self.request_id

    @property
    def known_tokens(self) -> Int32Array:
        """Prompt and output so far, a view."""
        return self.tokens[: self.num_tokens]

    @property
    def prefilled(self) -> bool:
        """Whether all that is left to compute is the token sampled last."""
        return self.cached_len >= self.num_tokens - 1 and self.num_tokens > self.prompt_len

    @property
    def done(self) -> bool:
        """Whether everything asked for has been sampled."""
        return self.num_tokens >= self.max_tokens

    def append(self, token: int) -> None:
        """Take a sampled token."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def leave_row(self) -> None:
        """Forget everything that was held in pools and tables."""
        self.row = NO_ROW
        self.cached_len = 0
        self.allocated_len = 0
        self.shared_pages = 0
        self.node = None
        self.window_nodes = []
        self.window_start = 0
