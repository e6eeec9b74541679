"""KV on its way from a prefill engine to a decode engine: the same positions, other slots, recorded on both sides."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ....kernels.arrays import Int64Array
from .pools import copy_slots
from .requests import Request

if TYPE_CHECKING:
    from .engine import SimulatedEngine


@dataclass(slots=True, kw_only=True)
class Room:
    """A request on both sides, until its KV has landed."""

    number: int
    sender: Request
    receiver: Request
    attempt: int = 0  # how often its KV was sent
    steps_left: int = 0  # until the transfer under way ends, 0 if there is none
    fails: bool = False  # the transfer under way fails half way


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """What one pool group sends: positions from `start_position` on, `[n] int64` slots on either side, in their order."""

    group: int
    start_position: int
    src: Int64Array
    dst: Int64Array


class Link:
    """Moves KV from one engine's pools to the other's, and records it on both sides."""

    def __init__(self, prefill: "SimulatedEngine", decode: "SimulatedEngine") -> None:
        self.prefill = prefill
        self.decode = decode

    def parts(self, room: Room) -> list[SentPart]:
        """Return what is sent, group by group: the whole prompt, of a sliding window the pages that are still read."""
        here, there, found = self.prefill.memory, self.decode.memory, []
        for pool in here.pools:
            end, start = room.sender.cached_len, 0
            if here.swa is not None and pool.group.lut >= 0:
                start = here.swa.first_needed_page(end) * here.page_size
            src = here.row_slots(pool, room.sender.row, start, end)
            dst = there.row_slots(pool, room.receiver.row, start, end)
            found.append(SentPart(group=pool.index, start_position=start, src=src, dst=dst))
        return found

    def start(self, room: Room) -> None:
        """Record that a transfer begins; the sender keeps its pages from here on until it ends."""
        for part in self.parts(room):
            self._record("start", room, part, 0)

    def end(self, room: Room) -> None:
        """Let everything land, and record it."""
        for part in self.parts(room):
            self.land(part)
            self._record("end", room, part, part.src.size)

    def fail(self, room: Room) -> None:
        """Let half of it land, and record that the transfer failed."""
        for part in self.parts(room):
            count = part.src.size // 2
            self.land(replace(part, src=part.src[:count], dst=part.dst[:count]))
            self._record("failed", room, part, count, note="connection lost")

    def land(self, part: SentPart) -> None:
        """Copy content and bytes from the sender's pool to the receiver's."""
        sender, receiver = self.prefill.memory.pools[part.group], self.decode.memory.pools[part.group]
        copy_slots(sender.arrays, part.src, receiver.arrays, part.dst)

    def _record(self, status: str, room: Room, part: SentPart, landed: int, *, note: str = "") -> None:
        """Record on both sides, first the one that has to be ready: the receiver of what has landed, the sender of a start."""
        streams = self.prefill.memory.pools[part.group].group.streams
        sides = [
            (self.prefill, "send", room.sender, part.src, "decode"),
            (self.decode, "receive", room.receiver, part.dst, "prefill"),
        ]
        for engine, direction, request, slots, peer in sides if status == "start" else reversed(sides):
            engine.recorder.transfer(
                status,
                direction=direction,
                room=room.number,
                group=part.group,
                slots=slots,
                start_position=part.start_position,
                request_id=request.request_id,
                row=request.row,
                peer=peer,
                num_bytes=landed * sum(stream.bytes_per_token for stream in streams),
                note=note,
            )
