"""Arrays laid out one after another in 64-bit words, for one copy to the device."""

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class Words:
    """Arrays that will lie one after another, each at its offset in words; `total` is how many words there are."""

    def __init__(self) -> None:
        self.total = 0
        self._parts: list[tuple[int, Int64Array]] = []
        self._addresses: list[Int64Array] = []

    def add(self, values: npt.NDArray[np.int64] | npt.NDArray[np.uint8]) -> int:
        """Add an array of int64, or of bytes in whole words; return its offset, a multiple of two words."""
        words: Int64Array = values.reshape(-1).view(np.int64)
        at = self.total
        self._parts.append((at, words))
        self.total += len(words) + len(words) % 2
        return at

    def add_addresses(self, values: Int64Array, columns: list[int]) -> int:
        """Add `[n, k] int64` of which some columns are addresses, as `address_of` has them; 0 stays none."""
        self._addresses += [values[:, column] for column in columns]
        return self.add(values)

    def write(self, out: Int64Array, base: int) -> None:
        """Put everything into `out` `[>= total] int64`, which is going to lie at address `base`; once."""
        for values in self._addresses:
            values[values != 0] += base
        for at, words in self._parts:
            out[at : at + len(words)] = words


def address_of(offset: int) -> int:
    """Return the address of a word, counted from where the piece will begin, which is none itself."""
    return 8 * offset
