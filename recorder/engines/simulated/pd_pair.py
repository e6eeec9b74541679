"""A prefill engine and a decode engine, joined by rooms: prompts are computed on one side and go on on the other.

Each is an engine of its own, with pools, page numbers and a trace of its own.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ....kernels.ops.hash.reference import splitmix64_words
from .config import BrokenEngineError, EngineConfig
from .engine import SimulatedEngine
from .requests import NEVER, Request, RequestSpec
from .transfers import Link, Transfer


class _Half(SimulatedEngine):
    """An engine that is given its requests by the pair."""

    def _nothing_to_run(self) -> None:
        if self.scheduler.waiting and not self.scheduler.parked:
            super()._nothing_to_run()
        if self.config.idle_forwards:
            self._idle_forward()


class PrefillEngine(_Half):
    """Computes prompts and samples the first token; then its requests are parked until they have been sent.

    `ready` are those that wait for the other side, in the order in which they came to be.
    """

    ready: list[Request]

    def _prefilled(self, request: Request) -> None:
        self.scheduler.parked.append(request)
        self.ready.append(request)

    def _aborts(self) -> None:
        """The pair stops requests, on both sides."""


class DecodeEngine(_Half):
    """Takes requests over once their prompt's KV has landed.

    One that is retracted later on is computed anew on this side.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """How the two halves are joined.

    Attributes:
        min_steps: scheduling rounds that a transfer takes at least.
        max_steps: ... at most; several are under way at the same time.
        failure_rate: chance that a transfer fails half way.
        retries: how often a failed one is tried again before its request is aborted.
    """

    min_steps: int = 1
    max_steps: int = 5
    failure_rate: float = 0.0
    retries: int = 2

    def __post_init__(self) -> None:
        """Raise `ValueError` on numbers without a meaning."""
        if not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(
                f"transfers take {self.min_steps} to {self.max_steps} steps, expected 1 or more, ascending"
            )
        if not 0.0 <= self.failure_rate <= 1.0:
            raise ValueError(f"failure_rate is {self.failure_rate}, expected 0 to 1")
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}, expected 0 or more")


@dataclass(slots=True, kw_only=True)
class Room:
    """A request on both sides, until its KV has landed; `transfer` while it is under way."""

    number: int
    sender: Request
    receiver: Request
    transfer: Transfer | None = None


class PdPair:
    """Runs both halves in turn over one workload; a context manager, which closes both traces.

    Args:
        config: of both halves; the decode side has no prefix cache, and its pages come in another order.
        workload: requests in the order of their arrival. One that wants several answers becomes several requests.
        folder: where `prefill.arrow` and `decode.arrow` go; made if need be.
        settings: how the halves are joined.
        engine_options: passed to both engines: `kv_watch_every`, the recorder's and its writer's options.

    Raises:
        ValueError: options that make no sense.
        TraceError: a trace cannot be created.
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
        sides = replace(config, role="prefill"), decode_config(config)
        folder.mkdir(parents=True, exist_ok=True)
        self.prefill = PrefillEngine(sides[0], (), self.prefill_path, **engine_options)
        self.prefill.ready = []
        try:
            self.decode = DecodeEngine(sides[1], (), self.decode_path, **engine_options)
        except BaseException:
            self.prefill.close()
            raise
        self.link = self.make_link()
        self.rooms: dict[int, Room] = {}
        self.clock_s = 0.0
        self._workload: Iterator[RequestSpec] = iter(workload)
        self._upcoming: RequestSpec | None = next(self._workload, None)
        self._luck = np.random.default_rng([config.seed, 0x7D])
        self._longest = min(side.longest_request for side in sides)

    def make_link(self) -> Link:
        """Return what moves KV from one side to the other."""
        return Link(self.prefill, self.decode)

    def run(self, on_step: Callable[["PdPair"], None] = lambda _: None) -> None:
        """Step until every request has gone through."""
        while self.step():
            on_step(self)

    def step(self) -> bool:
        """Let each side do one scheduling round, and transfers go on; False when nothing is left to do."""
        self._arrivals()
        self._aborts()
        self.prefill.step()
        self._start_transfers()
        self._progress()
        self.decode.step()
        self.clock_s = max(self.clock_s, self.prefill.clock_s, self.decode.clock_s)
        if not self._busy() and self._upcoming is not None:
            self.clock_s = max(self.clock_s, self._upcoming.arrival_s)
        self.prefill.clock_s = self.decode.clock_s = self.clock_s
        return self._busy() or self._upcoming is not None

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

    def _busy(self) -> bool:
        schedulers = self.prefill.scheduler, self.decode.scheduler
        return bool(self.rooms) or any(scheduler.active or scheduler.waiting for scheduler in schedulers)

    def _arrivals(self) -> None:
        waiting = self.prefill.scheduler.waiting
        limit = self.prefill.config.max_waiting
        while self._upcoming is not None and self._upcoming.arrival_s <= self.clock_s and len(waiting) < limit:
            spec, self._upcoming = self._upcoming, next(self._workload, None)
            for _ in range(spec.copies):
                if len(spec.prompt) and len(spec.prompt) + spec.max_new_tokens <= self._longest:
                    self.submit(replace(spec, copies=1))
                else:
                    self.prefill.counters.refused += 1

    def submit(self, spec: RequestSpec) -> None:
        """Take in one request, on both sides."""
        seed = np.array([self.prefill.config.seed & 0xFFFFFFFF], np.uint64)
        word = splitmix64_words(splitmix64_words(seed + np.uint64(0x4007)) ^ np.uint64(self.prefill.counters.requests))
        number = int(word[0] >> np.uint64(2))
        room = Room(
            number=number,
            sender=self.prefill.new_request(spec, room=number),
            receiver=self.decode.new_request(spec, room=number),
        )
        self.rooms[number] = room
        self.prefill.scheduler.add(room.sender)

    def _aborts(self) -> None:
        for room in list(self.rooms.values()):
            if room.transfer is None and NEVER < room.sender.abort_at <= room.sender.cached_len:
                self.abort(room)

    def _start_transfers(self) -> None:
        """Let those that are ready go, in their order, as long as the other side has room."""
        ready = self.prefill.ready
        while ready:
            room = self.rooms[ready[0].room]
            if room.receiver.row < 0 and not self.decode.preallocate(room.receiver, room.sender.cached_len):
                return
            ready.pop(0)
            self._start(room, attempt=1)

    def _start(self, room: Room, *, attempt: int) -> None:
        steps = self._luck.integers(self.settings.min_steps, self.settings.max_steps + 1)
        room.transfer = Transfer(
            room=room.number,
            sender=room.sender,
            receiver=room.receiver,
            steps_left=int(steps),
            fails=bool(self._luck.random() < self.settings.failure_rate),
            attempt=attempt,
        )
        self.link.start(room.transfer)
        self.prefill.counters.transfers += 1

    def _progress(self) -> None:
        for room in list(self.rooms.values()):
            transfer = room.transfer
            if transfer is None:
                continue
            transfer.steps_left -= 1
            if transfer.steps_left > 0:
                continue
            if transfer.fails:
                self._failed(room, transfer)
            else:
                self._landed(room, transfer)

    def _failed(self, room: Room, transfer: Transfer) -> None:
        room.transfer = None
        self.link.fail(transfer)
        self.prefill.counters.failed_transfers += 1
        if transfer.attempt > self.settings.retries:
            self.abort(room)
        else:
            self._start(room, attempt=transfer.attempt + 1)

    def _landed(self, room: Room, transfer: Transfer) -> None:
        self.link.end(transfer)
        del self.rooms[room.number]
        sender = room.sender
        num_tokens, token = sender.cached_len, int(sender.tokens[sender.prompt_len])
        self.prefill.scheduler.finish(sender)
        self.decode.landed(room.receiver, num_tokens, token)


def decode_config(config: EngineConfig) -> EngineConfig:
    """Return the decode side's configuration: no prefix cache, ids and pages other than the prefill side's."""
    return replace(
        config,
        role="decode",
        seed=config.seed + 1,
        prefix_cache=False,
        sweep_interval=0,
        host_pages=0,
        free_order="shuffled",
    )
