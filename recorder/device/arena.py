"""Room for the frames of forwards in flight: stretches of one buffer, taken and given back in the same order."""


class Arena:
    """Hands out stretches of `size` words; one thread takes, another gives back, in order.

    Places are counted on and on: a place's remainder by `size` is where it lies. Stretches never wrap around the end, so
    what is left there is skipped.
    """

    __slots__ = ("_free_from", "_taken_to", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken_to = 0  # the taker's: the place behind the last stretch
        self._free_from = 0  # the giver's: the place behind the last stretch that was given back

    def take(self, words: int) -> int | None:
        """Return the place at which a stretch of `words` begins, None where there is no room."""
        size, place = self.size, self._taken_to
        offset = place % size
        if offset + words > size:
            place += size - offset
        # All is free where the last stretch is back, whatever has been skipped since.
        if words > size or (place + words - self._free_from > size and self._free_from != self._taken_to):
            return None
        self._taken_to = place + words
        return place

    def give_back(self, place: int, words: int) -> None:
        """Give back the oldest stretch."""
        self._free_from = place + words
