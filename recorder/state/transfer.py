"""A transfer between a prefill and a decode engine, as one event tells of it, checked."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..trace.reader import EventView
from ..trace.schema import SEND
from ..trace.slot_runs import runs_to_slots
from .forward import UnusableEventError
from .pools import GroupPool
from .slot_events import event_row, slot_runs, transfer_terms

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A transfer event, checked. `slots` `[n] int64` in order of position; `landed` `[n, capture_bytes]` a stream."""

    event: int
    forward: int
    time_ns: int
    status: str
    direction: str
    room: int
    request_id: int
    row: int
    start_position: int
    pool: GroupPool
    slots: Int64Array
    landed: list[ByteArray]

    def land(self) -> None:
        """Put a receiver's bytes into its slots, and say who brought them there; records are for others to fill."""
        for data, landed in zip(self.pool.pool.kv, self.landed, strict=True):
            data[self.slots] = landed
        self.pool.pool.writers[self.slots] = (self.event + 1, self.forward, self.request_id)


def read_transfer(view: EventView, pools: list[GroupPool]) -> Transfer | None:
    """Return a transfer event, None where it names no slot; raise `UnusableEventError` if it contradicts itself."""
    status, direction = transfer_terms(view)
    groups, starts, counts = slot_runs(view, [pool.group for pool in pools])
    if not len(groups):
        return None
    if bool((groups != groups[0]).any()):
        raise UnusableEventError("a transfer of several groups, expected an event for each")
    pool = pools[int(groups[0])]
    slots = runs_to_slots(starts, counts)
    first = view.ints("prefix_lens")
    return Transfer(
        event=int(view.scalar("event")),
        forward=int(view.scalar("forward")),
        time_ns=int(view.scalar("time_ns")),
        status=status,
        direction=direction,
        room=int(view.scalar("room")),
        request_id=int(view.scalar("request_id")),
        row=event_row(view),
        start_position=int(first[0]) if len(first) else 0,
        pool=pool,
        slots=slots,
        landed=_landed(view, pool, len(slots)) if status == "end" and direction != SEND else [],
    )


def _landed(view: EventView, pool: GroupPool, count: int) -> list[ByteArray]:
    data = view.bytes("kv_bytes")
    widths = [stream.capture_bytes for stream in pool.group.streams]
    if len(data) != count * sum(widths):
        raise UnusableEventError(f"kv_bytes has {len(data)} bytes, expected {count * sum(widths)}")
    ends = np.cumsum([count * width for width in widths]).tolist()
    parts = zip([0, *ends], ends, widths, strict=False)
    return [data[begin:end].reshape(count, width) for begin, end, width in parts]
