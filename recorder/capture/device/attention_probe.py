"""What comes out of attention on a device: of one forward in so many one token of a layer is laid aside there, and judged later.

The engine's thread says what is wanted, and that the forward is over; what lays it aside is launched behind the layer, by its
adapter. The recorder's thread copies it once the forward's frame is complete, and only then is the next one wanted.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ....kernels.capture.attention_probe import (
    BEGIN,
    FOUND,
    FOUND_WORDS,
    LAYER,
    LENGTH,
    REQUEST,
    TOKEN,
    WANTED_WORDS,
    PagedHalf,
    ProbedCall,
    ProbeMemory,
    launch_probe,
)
from ..attention_output import MAX_POSITIONS, AttentionCall, look_at_one
from ..forward_input import CopiedForward, OutputRead

FORWARDS: Final = 16  # of so many at most one is looked at: a probe takes some ten microseconds of the engine's thread
_TREES: Final = "target_verify"  # whose tokens may be a tree, and see others than those before them


class ProbedLayer(NamedTuple):
    """A layer that may be looked at: K and V of its pool, heads of its queries, what scores are multiplied with and capped at (0: not)."""

    keys: PagedHalf
    values: PagedHalf
    heads: int
    scale: float
    cap: float = 0.0

    @property
    def form(self) -> tuple[Any, ...]:
        """What a probe's layers have alike."""
        return self.keys.values.dtype, self.values.values.dtype, self.keys.shape[2:], self.values.shape[2:], self.heads


class AttentionProbe:
    """Looks at layers of one form, by their numbers; those of another than the first are left alone.

    Requests of more than `positions` are passed over. `is_on` says whether something is wanted of the forward that runs, of the
    layer `layer` if this is not in a graph.
    """

    def __init__(self, layers: Mapping[int, ProbedLayer], *, positions: int = MAX_POSITIONS) -> None:
        import torch

        first = next(iter(layers.values()))
        self.layers = {number: one for number, one in layers.items() if one.form == first.form}
        self.is_on, self.layer = False, next(iter(self.layers))
        device, width = first.keys.values.device, max(first.keys.shape[3], first.values.shape[3])
        rows = 2 + 2 * min(positions, MAX_POSITIONS)
        self._memory = ProbeMemory(
            torch.zeros(WANTED_WORDS, dtype=torch.int64, device=device),
            torch.zeros(FOUND_WORDS, dtype=torch.int64, device=device),
            torch.zeros((rows, width), dtype=first.keys.values.dtype, device=device),
        )
        self._here = torch.zeros(WANTED_WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._places: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._every, self._next, self._turn = 0, 0, 0
        self._is_back = True  # the recorder's thread has what was wanted last

    @property
    def bytes(self) -> int:
        """Device memory."""
        return sum(int(one.numel()) * one.element_size() for one in self._memory)

    def begin(self, places: Mapping[int, tuple[int, tuple[int, ...]]], every: int) -> None:
        """Look at some layers from now on, of which `places` has the pool group and how far back they may look (0: all)."""
        self._places, self._every, self._next = dict(places), every * FORWARDS, 0
        self._is_back = True
        self.over()

    def prepare(self, ints: str, *, rows: str = "") -> None:
        """Compile what is launched, with lengths of this integer type and rows of that, "" for none: before a graph is captured."""
        import torch

        number, one = next(iter(self.layers.items()))
        keys, values = (half.values.new_zeros((1, one.heads, half.shape[3])) for half in (one.keys, one.values))
        lens = keys.new_zeros(2, dtype=getattr(torch, ints))
        table = keys.new_zeros((1, 1), dtype=torch.int32)
        own = keys.new_zeros(1, dtype=getattr(torch, rows)) if rows else None
        for starts in (lens, None) if rows else (lens,):
            self.behind(number, ProbedCall(keys, values, table, 1, lens, starts, own))

    def fits(self, query: Any, output: Any) -> bool:
        """Say whether a call's tokens are of the layers' form: `[tokens, heads, dim]`, the values of a head side by side."""
        one = next(iter(self.layers.values()))
        for tokens, half in ((query, one.keys), (output, one.values)):
            if tuple(tokens.shape[1:]) != (one.heads, half.shape[3]) or tokens.stride(2) != 1:
                return False
        return bool(query.dtype == output.dtype == one.keys.values.dtype)

    # The engine's thread.

    def behind(self, layer: int, call: ProbedCall) -> None:
        """Launch what lays a token of a layer's call aside if one is wanted, now or whenever a graph that holds this is launched."""
        one = self.layers[layer]
        launch_probe(self._memory, call, one.keys, one.values, layer)

    def want(self, forward: int, mode: str, bs: int) -> int:
        """Say that a token of a forward of `bs` requests is wanted, if it is time; return by what it is known, 0 for nothing."""
        if not self._every or not self._is_back or forward < self._next or mode == _TREES or bs <= 0:
            return 0
        turn, one = self._turn, self.layers[self.layer]
        numbers = [*self.layers]
        self._next, self._turn, self._is_back = forward + self._every, turn + 1, False
        self.layer = numbers[turn % len(numbers)]
        kv_heads = one.keys.shape[2]
        each, kv_head = one.heads // kv_heads, turn % kv_heads
        head = kv_head * each + turn // kv_heads % each
        self._here[:] = self._here.new_tensor([self._turn, turn % bs, kv_head, head, int(turn % 3 == 2)])
        self._memory.wanted.copy_(self._here, non_blocking=True)
        self.is_on = True
        return self._turn

    def over(self) -> None:
        """Say that the forward has come to its end: what it did not lay aside, no other shall."""
        self.is_on = False
        self._memory.wanted.zero_()

    # The recorder's thread.

    def read(self, wanted: int, forward: CopiedForward, breathe: Callable[[], None]) -> list[OutputRead] | None:
        """Return what was wrong of what a forward that has ended laid aside, None if that is nothing which can be judged.

        `breathe` is called now and then.
        """
        try:
            return self._read(wanted, forward, breathe)
        finally:
            self._is_back = True

    def _read(self, wanted: int, forward: CopiedForward, breathe: Callable[[], None]) -> list[OutputRead] | None:
        found = self._memory.found.cpu().tolist()
        breathe()
        layer, request, length = found[LAYER], found[REQUEST], found[LENGTH]
        if found[FOUND] != wanted or layer not in self._places or request >= forward.rows.size:
            return None
        new, token = int(forward.new_lens[request]), found[TOKEN] - found[BEGIN]
        position = int(forward.prefix_lens[request]) + token
        told = found[BEGIN] == int(forward.new_lens[:request].sum()) and 0 <= token < new
        if not told or forward.rows[request] == 0 or not position < length <= self._memory.positions:
            return None  # what attention was told of the request is other than what the forward has, or it is too long
        one, rows = self.layers[layer], self._memory.rows
        k_dim, v_dim, values_at = one.keys.shape[3], one.values.shape[3], 2 + self._memory.positions
        keys, values = rows[2 : 2 + length].cpu(), rows[values_at : values_at + length].cpu()
        query, output = rows[:2].cpu()
        breathe()
        call = AttentionCall(query[None, None, :k_dim], output[None, None, :v_dim], one.scale, one.cap)
        group, windows = self._places[layer]
        place = {"group": group, "layer": layer, "request": request, "position": position}
        return look_at_one(call, keys[:, :k_dim], values[:, :v_dim], windows, place)
