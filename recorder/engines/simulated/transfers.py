"""KV on its way from a prefill engine to a decode engine: the same positions, other slots, recorded on both sides."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ....kernels.arrays import Int64Array
from .pools import KvPool
from .requests import Request

if TYPE_CHECKING:
    from .engine import SimulatedEngine


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One request's KV under way; `steps_left` until it ends, well or, where `fails` says so, half way."""

    room: int
    sender: Request
    receiver: Request
    steps_left: int
    fails: bool = False
    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """What one pool group sends: positions from `start_position` on, `[n] int64` slots on either side, in their order."""

    group: int
    start_position: int
    src: Int64Array
    dst: Int64Array

    def first(self, count: int) -> "SentPart":
        """Return the first `count` positions of it."""
        return SentPart(
            group=self.group, start_position=self.start_position, src=self.src[:count], dst=self.dst[:count]
        )


class Link:
    """Moves KV from one engine's pools to the other's, and records it on both sides."""

    def __init__(self, prefill: "SimulatedEngine", decode: "SimulatedEngine") -> None:
        self.prefill = prefill
        self.decode = decode

    def parts(self, transfer: Transfer) -> list[SentPart]:
        """Return what is sent, group by group: the whole prompt, of a sliding window the pages that are still read."""
        return [self.part(pool, transfer) for pool in self.prefill.memory.pools]

    def part(self, pool: KvPool, transfer: Transfer) -> SentPart:
        """Return what one group sends."""
        memory = self.prefill.memory
        end, start = transfer.sender.cached_len, 0
        if memory.swa is not None and pool.index == memory.layout.swa_group:
            start = memory.swa.first_needed_page(end) * memory.page_size
        return SentPart(
            group=pool.index,
            start_position=start,
            src=self.slots(self.prefill, pool, transfer.sender, start, end),
            dst=self.slots(self.decode, pool, transfer.receiver, start, end),
        )

    def slots(self, engine: "SimulatedEngine", pool: KvPool, request: Request, start: int, end: int) -> Int64Array:
        """Return the slots of a request's positions in one engine's pool."""
        slots = engine.memory.req_to_token[request.row, start:end].astype(np.int64)
        return engine.memory.lut[slots] if pool.group.lut >= 0 else slots

    def start(self, transfer: Transfer) -> None:
        """Record that a transfer begins; the sender keeps its pages from here on until it ends."""
        for part in self.parts(transfer):
            self._record("start", transfer, part, num_bytes=0)

    def end(self, transfer: Transfer) -> None:
        """Let everything land, and record it."""
        for part in self.parts(transfer):
            self.land(part)
            self._record("end", transfer, part, num_bytes=self.num_bytes(part))

    def fail(self, transfer: Transfer) -> None:
        """Let half of it land, and record that the transfer failed."""
        for part in self.parts(transfer):
            half = part.first(part.src.size // 2)
            self.land(half)
            self._record("failed", transfer, part, num_bytes=self.num_bytes(half), note="connection lost")

    def land(self, part: SentPart) -> None:
        """Copy content and bytes from the sender's pool to the receiver's."""
        sender, receiver = self.prefill.memory.pools[part.group], self.decode.memory.pools[part.group]
        receiver.content[part.dst] = sender.content[part.src]
        for stream in range(len(sender.group.streams)):
            receiver.stream_bytes(stream)[part.dst] = sender.stream_bytes(stream)[part.src]

    def num_bytes(self, part: SentPart) -> int:
        """Return how many bytes a part has."""
        streams = self.prefill.memory.pools[part.group].group.streams
        return part.src.size * sum(stream.bytes_per_token for stream in streams)

    def _record(self, status: str, transfer: Transfer, part: SentPart, *, num_bytes: int, note: str = "") -> None:
        """Record on both sides, first the one that has to be ready: the receiver of what has landed, the sender of a start."""
        sides = [
            (self.prefill, "send", transfer.sender, part.src, "decode"),
            (self.decode, "receive", transfer.receiver, part.dst, "prefill"),
        ]
        for engine, direction, request, slots, peer in sides if status == "start" else reversed(sides):
            engine.recorder.transfer(
                status,
                direction=direction,
                room=transfer.room,
                group=part.group,
                slots=slots,
                start_position=part.start_position,
                request_id=request.request_id,
                row=request.row,
                peer=peer,
                num_bytes=num_bytes,
                note=note,
            )
