"""Room for frames in flight: how long each is, and where in one buffer it lies."""

from typing import Any, Final

from ....kernels.capture.frames import FrameLayout
from .shadows import DeviceShadows

# Entries of changes that fit a frame. A forward that admits requests may hit long prefixes, whose every cell is a
# change; so is every cell after a reset.
TABLE_TILES_FEW: Final = 256
TABLE_TILES: Final = 4_096
LUT_CHANGES: Final = 65_536
KV_CHANGES: Final = 4_096
ATTENTION_SLOTS: Final = 1_024  # that differ from what they should be: in a healthy engine none
MAX_LAYOUTS: Final = 4_096


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

    def give_back(self, place: int, words: int) -> None:
        """Give back the oldest stretch."""
        self._free_from = place + words


class FrameLayouts:
    """The sections of each frame, made once for forwards of a size: an engine's thread asks in every step."""

    def __init__(self, shadows: DeviceShadows, *, tile: int) -> None:
        self._shadows = shadows
        self._tile = tile
        self._known: dict[tuple[Any, ...], FrameLayout] = {}

    def find(self, runner: int, bs: int, tokens: int, *, many: bool, attention: bool) -> FrameLayout:
        """Return a frame's sections.

        Args:
            runner: index into the header's runners.
            bs: requests.
            tokens: tokens.
            many: whether many changes are to be expected.
            attention: whether there is room for what attention got.
        """
        key = (runner, bs, tokens, many, attention)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_LAYOUTS:
                self._known.clear()
            found = self._known[key] = self._make(*key)
        return found

    def _make(self, runner: int, bs: int, tokens: int, many: bool, attention: bool) -> FrameLayout:
        known = self._shadows.runners[runner]
        words, luts, width = known.stream_words, len(known.luts), int(known.table.shape[1])
        return FrameLayout(
            bs=bs,
            tokens=tokens,
            stream_words=words,
            table_capacity=min(bs * -(-width // self._tile), TABLE_TILES if many else TABLE_TILES_FEW),
            lut_capacity=min(luts * (bs * width + tokens), LUT_CHANGES),
            kv_capacity=min(len(words) * bs * width, KV_CHANGES),
            tile=self._tile,
            attention_capacity=ATTENTION_SLOTS if attention else 0,
        )
