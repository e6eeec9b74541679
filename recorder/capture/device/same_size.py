"""What forwards of one size and of the same types have in common; looked up once a forward, made once."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ....kernels.capture.frames import FrameLayout
from .shadows import DeviceShadows

if TYPE_CHECKING:
    from ....kernels.capture.frame_driver import Launch

# Entries of changes that fit a frame. A forward that admits requests may hit long prefixes, whose every cell is a
# change; so is every cell after a reset.
TABLE_TILES_FEW: Final = 256
TABLE_TILES: Final = 4_096
LUT_CHANGES: Final = 65_536
KV_CHANGES: Final = 4_096
ATTENTION_SLOTS: Final = 1_024  # that differ from what they should be: in a healthy engine none
MAX_SIZES: Final = 4_096  # of forwards, with the types of their tensors


class SameSize:
    """What forwards of one size and of the same types have in common: their frames' sections, and launches made ready.

    A launch is None as long as none has been made. `watchable`: a frame that has bytes of prefixes to compare. `again`
    does all for another forward like the last one, where machine code can; `kept` is what it uses.
    """

    __slots__ = ("again", "back", "back_watching", "down", "kept", "layout", "watchable", "words")

    def __init__(self, layout: FrameLayout, *, watchable: bool) -> None:
        self.layout = layout
        self.words = layout.words
        self.watchable = watchable
        self.down: Launch | None = None
        self.back: Launch | None = None
        self.back_watching: Launch | None = None
        self.again: Callable[..., Any] | None = None
        self.kept: object = None

    @property
    def ends(self) -> bool:
        """Whether one has ended."""
        return self.back is not None or self.back_watching is not None


class Sizes:
    """Every size of forward that has been seen lately, with the types of its tensors."""

    def __init__(self, shadows: DeviceShadows, *, tile: int, watch_every: int) -> None:
        self._shadows = shadows
        self._tile = tile
        self._watch_every = watch_every
        self._known: dict[tuple[Any, ...], SameSize] = {}

    def find(self, key: tuple[Any, ...], *, attention: bool = False) -> SameSize:
        """Return what a runner's forwards of some requests and tokens have in common.

        Args:
            key: runner, requests, tokens, whether many changes are to be expected, and what else sets them apart: types
                of tensors, or the address of a ticket.
            attention: whether their frames have room for what attention got.
        """
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_SIZES:
                self._known.clear()
            layout = self.layout(*key[:4], attention=attention)
            watchable = self._watch_every > 0 and bool(layout.stream_words)
            found = self._known[key] = SameSize(layout, watchable=watchable)
        return found

    def layout(self, runner: int, bs: int, tokens: int, many: bool, *, attention: bool = False) -> FrameLayout:
        """Return a frame's sections."""
        on_device = self._shadows.runners[runner].on_device
        words, luts = self._shadows.runners[runner].stream_words, len(on_device.luts)
        width = int(on_device.table.shape[1])
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
