"""Hashes of what lay at the ends of copies when somebody looked: there at once, or once a device has added them up."""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from ....kernels.arrays import Int64Array
from ....kernels.ops.end_hash.reference import mixed
from ...capture.device.host_copy import HostCopy

_NO_PARTS: Final = np.empty(0, np.int64)


class Look(Protocol):
    """What lay in `n` pages when somebody looked."""

    def read(self) -> Int64Array:
        """Return their hashes, `[n]`, 0 for what was not read; of a device by the recorder's thread, which may wait for them."""

    def parts(self) -> list[Int64Array]:
        """Return of each page the hashes of its parts, layers say; of what was not read none."""

    def of(self, kept: Sequence[int]) -> "Look":
        """Return some of them."""


class Sums:
    """Hashes of `n` pages: `parts` are places among them, and their sums `[2, pages, parts]`, which a device may still add up."""

    def __init__(self, n: int, parts: Sequence[tuple[Sequence[int], Int64Array | HostCopy]] = ()) -> None:
        self._waiting = list(parts)
        self._values = np.zeros(n, np.int64)
        self._parts = [_NO_PARTS] * n

    def read(self) -> Int64Array:
        """Return them; waits until they are there."""
        waiting, self._waiting = self._waiting, []
        for at, sums in waiting:
            there = (sums.read() if isinstance(sums, HostCopy) else sums).reshape(2, len(at), -1)
            self._values[list(at)] = mixed(*there.sum(axis=2))
            for place, hashes in zip(at, mixed(*there), strict=True):
                self._parts[place] = hashes
        return self._values

    def parts(self) -> list[Int64Array]:
        """As `Look` says; waits until they are there."""
        self.read()
        return self._parts

    def of(self, kept: Sequence[int]) -> Look:
        """Return some of them."""
        return Some(self, tuple(kept))


class Some:
    """Some of the pages of a look."""

    def __init__(self, look: Look, kept: tuple[int, ...]) -> None:
        self._look, self._kept = look, kept

    def read(self) -> Int64Array:
        """Return their hashes."""
        return self._look.read()[list(self._kept)]

    def parts(self) -> list[Int64Array]:
        """Return those of their parts."""
        found = self._look.parts()
        return [found[i] for i in self._kept]

    def of(self, kept: Sequence[int]) -> Look:
        """Return some of them."""
        return Some(self._look, tuple(self._kept[i] for i in kept))
