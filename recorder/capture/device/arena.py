"""Room for the frames of forwards in flight: stretches of one buffer, taken and given back in the same order."""

from ....kernels.capture.frame_ledger import Ledger


class Arena:
    """Hands out stretches of `size` words; one thread takes, another gives back, in order.

    Places are counted on and on: a place's remainder by `size` is where it lies. Stretches never wrap around the end, so
    what is left there is skipped.

    The ledger has the taker's `taken_to`, the place behind the last stretch, and `room_to`: up to there was room the
    last time it looked, without a wrap. Whoever takes up to there may do so in the ledger alone.
    """

    __slots__ = ("_free_from", "_ledger", "size")

    def __init__(self, size: int, ledger: Ledger | None = None) -> None:
        self.size = size
        self._ledger = Ledger() if ledger is None else ledger
        self._ledger.size = size
        self._free_from = 0  # the giver's: the place behind the last stretch that was given back

    def take(self, words: int) -> int | None:
        """Return the place at which a stretch of `words` begins, None where there is no room."""
        place: int = self._ledger.taken_to
        if place + words > self._ledger.room_to:
            return self._look_for(words)
        self._ledger.taken_to = place + words
        return place

    def _look_for(self, words: int) -> int | None:
        size, place, free_from = self.size, self._ledger.taken_to, self._free_from
        offset = place % size
        if offset + words > size:
            place += size - offset
            offset = 0
        # All is free where the last stretch is back, whatever has been skipped since.
        room_to = place + size if free_from == self._ledger.taken_to else free_from + size
        if words > size or place + words > room_to:
            return None
        self._ledger.room_to = min(room_to, place - offset + size)
        self._ledger.taken_to = place + words
        return place

    def give_back(self, place: int, words: int) -> None:
        """Give back the oldest stretch."""
        self._free_from = place + words
