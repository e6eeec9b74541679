"""Where the replays of a prefill and a decode trace meet: what one sent is handed to the one that received it.

The two go by room, pool group and first position. A receiver that comes first lets the senders' replays go on until
what it waits for has been sent, so that no more is held than is under way.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]
ParcelKey = tuple[int, str, int]  # room, name of the pool group, first position


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What a sender's slots held when the transfer began, `n` of them in order of position.

    `head`, `tail` map a half to `[n, 32] uint8` records; `kv` holds `[n, capture_bytes] uint8` a stream; `unknown`
    `[n] bool` slots that the sender's trace cannot vouch for; `damaged` `[n] bool` those whose bytes were not those
    written.
    """

    trace: str
    event: int
    slots: Int64Array
    head: dict[str, ByteArray]
    tail: dict[str, ByteArray]
    kv: list[ByteArray]
    unknown: npt.NDArray[np.bool_]
    damaged: npt.NDArray[np.bool_]


class Exchange:
    """Parcels on their way.

    `senders` make a sender's replay go on; they return False when there is nothing left to do. `wanted` says whether a
    receiver may still come: without one, parcels would pile up for nobody.
    """

    def __init__(self) -> None:
        self.senders: list[Callable[[], bool]] = []
        self.wanted: Callable[[], bool] = lambda: False
        self._parcels: dict[ParcelKey, Parcel] = {}

    def send(self, key: ParcelKey, parcel: Parcel) -> None:
        """Take in a parcel; one sent again replaces the one before."""
        if self.wanted():
            self._parcels[key] = parcel
        else:
            self._parcels.clear()

    def __len__(self) -> int:
        """How many parcels are on their way."""
        return len(self._parcels)

    def withdraw(self, key: ParcelKey) -> None:
        """Forget a parcel whose transfer failed."""
        self._parcels.pop(key, None)

    def receive(self, key: ParcelKey) -> Parcel | None:
        """Hand out a parcel, once; None where no sender has it."""
        waiting = list(self.senders)
        while key not in self._parcels and waiting:
            waiting = [sender for sender in waiting if key not in self._parcels and sender()]
        return self._parcels.pop(key, None)
