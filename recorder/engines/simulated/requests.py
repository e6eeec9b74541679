"""A request as the workload gives it, and as the scheduler carries it along."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ....kernels.arrays import Int32Array
from ....kernels.ops.hash.reference import splitmix64_words
from .radix import Node

NO_ROW = -1
NO_ROOM = -1
NO_FUTURE = -1
NEVER = -1


def seeded_word(seed: int, salt: int, number: int) -> np.uint64:
    """Return the word that a seed gives to the thing of that number, of the kind that `salt` stands for."""
    words = splitmix64_words(np.array([seed & 0xFFFFFFFF], np.uint64) + np.uint64(salt))
    word: np.uint64 = splitmix64_words(words ^ np.uint64(number))[0]
    return word


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a client asks for."""

    arrival_s: float  # simulated time
    prompt: Int32Array  # [n]
    max_new_tokens: int
    priority: int = 0
    copies: int = 1  # answers wanted; more than one: forks after the prefill
    abort_at: int = NEVER  # abort once that many of its tokens are in the cache, 0 at once
    adapter: str = ""  # the LoRA adapter that it asks for; nobody's KV but the same adapter's is its own

    def fits(self, longest: int) -> bool:
        """Whether it has a prompt, and prompt and answer are of at most `longest` tokens."""
        return 0 < len(self.prompt) <= longest - self.max_new_tokens


class Arrivals:
    """A workload's requests as they come, one read ahead."""

    def __init__(self, workload: Iterable[RequestSpec]) -> None:
        self._workload = iter(workload)
        self.next = next(self._workload, None)

    def until(self, now_s: float, has_room: Callable[[], bool]) -> Iterator[RequestSpec]:
        """Yield the requests that have come by `now_s`, as long as there is room for them."""
        while self.next is not None and self.next.arrival_s <= now_s and has_room():
            spec, self.next = self.next, next(self._workload, None)
            yield spec


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request in the engine; `tokens[:num_tokens]` is prompt and output so far."""

    spec: RequestSpec
    request_id: int
    order: int
    room: int = NO_ROOM  # what the two halves of a prefill/decode pair call it
    name: str = field(init=False)
    prompt_len: int = field(init=False)
    max_tokens: int = field(init=False)
    tokens: Int32Array = field(init=False)
    num_tokens: int = field(init=False)
    copies_left: int = field(init=False)
    retracted: bool = False
    row: int = NO_ROW
    cached_len: int = 0  # tokens whose KV is in the cache, at positions 0 .. cached_len - 1 of the row
    allocated_len: int = 0  # tokens that have a slot
    shared_pages: int = 0  # the first of its pages, which belong to the prefix cache
    node: Node | None = None  # holds them in place
    window_nodes: list[Node] = field(default_factory=list)
    window_start: int = 0  # the first page whose sliding-window half may still be held
    in_flight: int = 0  # forwards with it that the host has not heard back from
    future: int = NO_FUTURE  # where the token sampled last lies on the device

    def __post_init__(self) -> None:
        self.name = f"{self.request_id & 0xFFFFFFFF:08x}"
        self.prompt_len = self.num_tokens = len(self.spec.prompt)
        self.max_tokens = self.prompt_len + self.spec.max_new_tokens
        self.copies_left = self.spec.copies - 1
        # One more than a request can ever hold, so that a page key's look-ahead stays inside.
        self.tokens = np.zeros(self.max_tokens + 1, np.int32)
        self.tokens[: self.prompt_len] = self.spec.prompt

    @property
    def sampling_id(self) -> int:
        """The id that a sampler goes by: the room if there is one, so that both halves of a pair sample alike."""
        return self.room if self.room >= 0 else self.request_id

    @property
    def known_tokens(self) -> Int32Array:
        """Prompt and output so far, a view."""
        return self.tokens[: self.num_tokens]

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
        self.cached_len = self.allocated_len = self.shared_pages = self.window_start = 0
        self.node = None
        self.window_nodes = []
