"""A prefill engine and a decode engine, joined by rooms: prompts are computed on one side and go on on the other.

Each is an engine of its own, with pools, page numbers and a trace of its own. What is sent keeps its positions, lands in
other slots, and is recorded on both sides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ....kernels.arrays import Int64Array
from ...trace.header import Chance, Count, Positive, check_fields, expect
from ...trace.schema import TransferDirection, TransferStatus
from .config import BrokenEngineError, EngineConfig
from .engine import SimulatedEngine
from .pools import copy_slots
from .requests import NEVER, Arrivals, Request, RequestSpec, seeded_word


class _Half(SimulatedEngine):
    """An engine that is given its requests by the pair."""

    def _nothing_to_run(self) -> None:
        if self.scheduler.waiting and not self.scheduler.parked:
            super()._nothing_to_run()
        if self.config.idle_forwards:
            self._idle_forward()


class PrefillEngine(_Half):
    """Computes prompts and samples the first token; then its requests are parked until they have been sent. `ready` are
    those that wait for the other side, in the order in which they came to be.
    """

    ready: list[Request]

    def _prefilled(self, request: Request) -> None:
        self.scheduler.parked.append(request)
        self.ready.append(request)

    def _aborts(self) -> None:
        """The pair stops requests, on both sides."""


class DecodeEngine(_Half):
    """Takes requests over once their prompt's KV has landed; one that is retracted later is computed anew on this side."""

    def preallocate(self, request: Request, num_tokens: int) -> bool:
        """Give a request a row and slots for the KV to come; False if there is no room, or others wait for it."""
        scheduler, memory = self.scheduler, self.memory
        windowless = memory.swa.first_needed_page(num_tokens) if memory.swa is not None else 0
        if scheduler.waiting or not scheduler.has_row():
            return False
        if not memory.has_room(request, num_tokens, windowless=windowless):
            return False
        request.row = scheduler.free_rows.pop()
        scheduler.record_admitted(request)
        if not memory.extend(request, num_tokens, windowless=windowless):
            raise BrokenEngineError(f"request {request.name} was promised room for {num_tokens} tokens and gets none")
        request.window_start = windowless
        scheduler.parked.append(request)
        return True

    def landed(self, request: Request, num_tokens: int, token: int) -> None:
        """Go on from KV that has arrived, and from the token that the other side sampled."""
        request.cached_len = num_tokens
        request.append(token)
        self.scheduler.parked.remove(request)
        self.scheduler.running.append(request)
        self._settle([request])


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

    def __init__(self, prefill: SimulatedEngine, decode: SimulatedEngine) -> None:
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

    def _record(self, status: TransferStatus, room: Room, part: SentPart, landed: int, *, note: str = "") -> None:
        """Record on both sides, first the one that has to be ready: the receiver of what has landed, the sender of a start."""
        streams = self.prefill.memory.pools[part.group].group.streams
        sides: list[tuple[Any, TransferDirection, Any, Any, str]] = [
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """How the two halves are joined; raises `ValueError` on numbers without a meaning."""

    min_steps: Positive = 1  # scheduling rounds that a transfer takes at least
    max_steps: int = 5  # ... at most; several are under way at the same time
    failure_rate: Chance = 0.0  # chance that a transfer fails half way
    retries: Count = 2  # how often a failed one is tried again before its request is aborted

    def __post_init__(self) -> None:
        check_fields(self)
        fits, steps = self.min_steps <= self.max_steps, f"{self.min_steps} to {self.max_steps} steps"
        expect(fits, f"transfers take {steps}, expected 1 or more, ascending")


class PdPair:
    """Runs both halves in turn over one workload; a context manager, which closes both traces. `config` is of both
    halves; the decode side has no prefix cache, and its pages come in another order. A request that wants several
    answers becomes several. `prefill.arrow` and `decode.arrow` go to `folder`, which is made if need be. Raises
    `ValueError` for options that make no sense, `TraceError` if a trace cannot be created.
    """

    def __init__(
        self,
        config: EngineConfig,
        workload: Iterable[RequestSpec],
        folder: str | Path,
        *,
        settings: PairSettings | None = None,
        **engine_options: Any,
    ) -> None:
        folder = Path(folder)
        self.settings = settings or PairSettings()
        self.prefill_path, self.decode_path = folder / "prefill.arrow", folder / "decode.arrow"
        # The decode side has no prefix cache, and ids and pages other than the prefill side's.
        other: dict[str, Any] = {"seed": config.seed + 1, "prefix_cache": False, "sweep_interval": 0, "host_pages": 0}
        sides = replace(config, role="prefill"), replace(config, role="decode", free_order="shuffled", **other)
        folder.mkdir(parents=True, exist_ok=True)
        self.prefill = PrefillEngine(sides[0], (), self.prefill_path, **engine_options)
        self.prefill.ready = []
        try:
            self.decode = DecodeEngine(sides[1], (), self.decode_path, **engine_options)
        except BaseException:
            self.prefill.close()
            raise
        self.link = Link(self.prefill, self.decode)
        self.rooms: dict[int, Room] = {}
        self.clock_s = 0.0
        self._arrivals = Arrivals(workload)
        self._luck = np.random.default_rng([config.seed, 0x7D])
        self._longest = min(side.longest_request for side in sides)

    def run(self, on_step: Callable[["PdPair"], None] = lambda _: None) -> None:
        """Step until every request has gone through."""
        while self.step():
            on_step(self)

    def step(self) -> bool:
        """Let each side do one scheduling round, and transfers go on; False when nothing is left to do."""
        prefill, decode, coming = self.prefill, self.decode, self._arrivals
        for spec in coming.until(self.clock_s, prefill.has_room):
            for _ in range(spec.copies):
                if spec.fits(self._longest):
                    self.submit(replace(spec, copies=1))
                else:
                    prefill.counters.refused += 1
        for room in list(self.rooms.values()):
            if not room.steps_left and NEVER < room.sender.spec.abort_at <= room.sender.cached_len:
                self.abort(room)
        prefill.step()
        self._start_transfers()
        for room in [room for room in self.rooms.values() if room.steps_left]:
            room.steps_left -= 1
            if not room.steps_left:
                self._ended(room)
        decode.step()
        self.clock_s = max(self.clock_s, prefill.clock_s, decode.clock_s)
        schedulers = prefill.scheduler, decode.scheduler
        busy = bool(self.rooms) or any(scheduler.active or scheduler.waiting for scheduler in schedulers)
        if not busy and coming.next is not None:
            self.clock_s = max(self.clock_s, coming.next.arrival_s)
        prefill.clock_s = decode.clock_s = self.clock_s
        return busy or coming.next is not None

    def abort(self, room: Room) -> None:
        """Stop a request that has not landed yet, on both sides; not while its KV is under way."""
        del self.rooms[room.number]
        if room.sender in self.prefill.ready:
            self.prefill.ready.remove(room.sender)
        self.prefill.scheduler.abort(room.sender)
        self.decode.scheduler.abort(room.receiver)

    def close(self) -> None:
        """Close both traces."""
        self.prefill.close()
        self.decode.close()

    def __enter__(self) -> "PdPair":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, spec: RequestSpec) -> None:
        """Take in one request, on both sides."""
        word = seeded_word(self.prefill.config.seed, 0x4007, self.prefill.counters.requests)
        number = int(word >> np.uint64(2))
        sender, receiver = (side.new_request(spec, room=number) for side in (self.prefill, self.decode))
        self.rooms[number] = Room(number=number, sender=sender, receiver=receiver)
        self.prefill.scheduler.add(sender)

    def _start_transfers(self) -> None:
        """Let those that are ready go, in their order, as long as the other side has room."""
        ready = self.prefill.ready
        while ready:
            room = self.rooms[ready[0].room]
            if room.receiver.row < 0 and not self.decode.preallocate(room.receiver, room.sender.cached_len):
                return
            ready.pop(0)
            self._start(room)

    def _start(self, room: Room) -> None:
        room.attempt += 1
        room.steps_left = int(self._luck.integers(self.settings.min_steps, self.settings.max_steps + 1))
        room.fails = bool(self._luck.random() < self.settings.failure_rate)
        self.link.start(room)
        self.prefill.counters.transfers += 1

    def _ended(self, room: Room) -> None:
        if room.fails:
            self.link.fail(room)
            self.prefill.counters.failed_transfers += 1
            (self.abort if room.attempt > self.settings.retries else self._start)(room)
            return
        self.link.end(room)
        del self.rooms[room.number]
        sender = room.sender
        num_tokens, token = sender.cached_len, int(sender.tokens[sender.prompt_len])
        self.prefill.scheduler.finish(sender)
        self.decode.landed(room.receiver, num_tokens, token)
