"""The engine: everything put together, stepped until the workload is through."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....kernels.arrays import BoolArray, Int32Array, Int64Array
from ...capture.privacy import IdentityValue
from ...capture.recorder import Recorder
from ...capture.recording import WRITER_STOPPED
from ...trace.schema import Mode
from .batch import Batch, BatchBuilder
from .config import BrokenEngineError, Counters, EngineConfig
from .eagle import Eagle
from .memory import KvMemory, SlotEvents, Sweeper
from .pools import KvPool, WordArray, make_layout
from .recurrent import RecurrentStates
from .requests import NEVER, NO_FUTURE, NO_ROOM, NO_ROW, Arrivals, Request, RequestSpec, seeded_word
from .runner import ForwardRunner, FutureMap, Launched, Model, Sampler
from .scheduler import Prefill, Scheduler

# Simulated time of a forward: enough to give arrivals a meaning.
FORWARD_SECONDS = 0.004
TOKEN_SECONDS = 0.00002


class SimulatedEngine:
    """An engine over one workload, recording into one trace; a context manager, which closes the trace. The parts are
    attributes: a fault stands in for a part's method, or for the part. `workload` is read as requests arrive;
    `recorder_options` go to `Recorder` and its writer. Raises `ValueError` for options that make no sense, `TraceError`
    if the trace cannot be created.
    """

    def __init__(
        self, config: EngineConfig, workload: Iterable[RequestSpec], path: str | Path, **recorder_options: Any
    ) -> None:
        self.config = config
        self.counters = Counters()
        self.clock_s = 0.0
        self._arrivals = Arrivals(workload)
        self._order = 0
        layout = make_layout(config)
        pools = [KvPool(group, index=index) for index, group in enumerate(layout.header.groups)]
        sources = {(pool.index, number): source for pool in pools for number, source in enumerate(pool.sources())}
        states = RecurrentStates(config) if config.recurrent else None
        bytes_of: dict[str, Any] = {} if states is None else {"state_sources": {0: [states.words]}}
        self.recorder = Recorder(path, layout.header, kv_sources=sources, **bytes_of, **recorder_options)
        self.history = SlotEvents(self.recorder, layout, page_size=config.page_size)
        self.memory = KvMemory(config, layout, pools=pools, history=self.history, counters=self.counters)
        if states is not None:
            self.memory.states, states.recorder = states, self.recorder
        self.sampler = Sampler(config)
        self.builder = BatchBuilder(config, self.memory.req_to_token)
        self.scheduler = Scheduler(config, self.memory, self.counters, drain=self.drain)
        self.runner = ForwardRunner(self.recorder, self.memory, Model(config, self.memory), self.counters)
        self.eagle = Eagle(self) if config.eagle else None
        self.sweeper = Sweeper(self.recorder, self.memory)
        # Two forwards' worth of tokens that wait on the device: the one in flight and the next.
        self.futures = FutureMap(2 * config.rows)
        self.in_flight: deque[Launched] = deque()  # oldest first; each of their requests counts them
        self._swept = 0

    def run(self, on_step: Callable[["SimulatedEngine"], None] = lambda _: None) -> Counters:
        """Step until every request has gone through."""
        while self.step():
            on_step(self)
        return self.counters

    def step(self) -> bool:
        """Do one scheduling round, one forward or a speculative handful of them; False when nothing is left to do."""
        for spec in self._arrivals.until(self.clock_s, self.has_room):
            if spec.fits(self.config.longest_request):
                self.scheduler.add(self.new_request(spec))
            else:
                self.counters.refused += 1
        self._aborts()
        picked = self.scheduler.next_prefill()
        if picked:
            self._prefill(picked)
        elif self.scheduler.decoding:
            self._decode()
        elif not self.drain():
            self._nothing_to_run()
        interval = self.config.sweep_interval
        if interval and self.counters.target_forwards >= self._swept + interval:
            self._swept = self.counters.target_forwards
            self.sweeper.sweep()
        return bool(self.scheduler.active or self.scheduler.waiting or self._arrivals.next)

    def has_room(self) -> bool:
        """Whether another request may wait."""
        return len(self.scheduler.waiting) < self.config.max_waiting

    def drain(self, keep: int = 0) -> bool:
        """Hear back from the forwards in flight, but for the newest `keep`; False if there was none to hear from."""
        if len(self.in_flight) <= keep:
            return False
        while len(self.in_flight) > keep:
            self._settle(self._hear_back().batch.requests)
        return True

    def new_request(
        self, spec: RequestSpec, labels: dict[str, object] | None = None, *, room: int = NO_ROOM
    ) -> Request:
        """Return a request with an id of its own, which is recorded."""
        word = seeded_word(self.config.seed, 1, self._order)
        request = Request(spec=spec, request_id=int(word >> np.uint64(1)), order=self._order, room=room)
        self._order += 1
        self.counters.requests += 1
        said: dict[str, Any] = {"prompt_len": request.prompt_len, "room": room, "labels": labels}
        others = (IdentityValue("salt", ""), IdentityValue("weights", "the only ones"), IdentityValue("media", ""))
        identity = (IdentityValue("adapter", spec.adapter), *others)
        self.recorder.request(request_id=request.request_id, name=request.name, **said, identity=identity)
        return request

    @property
    def unwritten(self) -> str:
        """Why the trace was not written to its end, as where the disk is full; empty if nothing stopped the writer."""
        off = self.recorder.off
        return off if off.startswith(WRITER_STOPPED) else ""

    def close(self) -> None:
        """Close the trace."""
        self.recorder.close()

    def __enter__(self) -> "SimulatedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _aborts(self) -> None:
        for request in [r for r in self.scheduler.waiting if r.spec.abort_at == 0]:
            self.scheduler.abort(request)
        for request in [r for r in self.scheduler.active if NEVER < r.spec.abort_at <= r.cached_len]:
            if request not in self.scheduler.parked:  # its KV is under way: whoever parked it waits for that
                self.scheduler.abort(request)

    def _prefill(self, picked: list[Prefill]) -> None:
        # Mixed in are the running requests that decode along: those that there is a slot for.
        mixed = self.scheduler.decoding if self.config.mixed else []
        decoding = [r for r in mixed if self.memory.extend(r, r.cached_len + 1)]
        requests = [request for request, _ in picked] + decoding
        prefix = [request.cached_len for request in requests]
        extend = [taken for _, taken in picked] + [1] * len(decoding)
        complete = [p + e >= r.num_tokens for r, p, e in zip(requests, prefix, extend, strict=True)]
        tokens = [r.tokens[p : p + e] for (r, e), p in zip(picked, prefix, strict=False)]
        tokens += [self.next_input(request) for request in decoding]
        mode: Mode = "mixed" if decoding else "extend"
        self._run(self.builder.build(mode, requests, prefix_lens=prefix, tokens=tokens), np.array(complete))
        self.counters.mixed_forwards += bool(decoding)
        self.counters.prefill_tokens += sum(taken for _, taken in picked)
        self.counters.prefill_chunks += len(complete) - sum(complete)
        if self.eagle is not None:
            self.eagle.draft_extend(requests, prefix, extend)
        for (request, _), ready in zip(picked, complete, strict=False):
            self.memory.cache.insert(request)
            if ready:
                self._prefilled(request)
        self._settle(requests)

    def _prefilled(self, request: Request) -> None:
        """A prompt is computed, its first token sampled: go on from there."""
        self.scheduler.running.append(request)
        for _ in range(request.copies_left):
            self._fork(request)
        request.copies_left = 0

    def _decode(self) -> None:
        self.scheduler.make_decode_room()
        requests = self.scheduler.decoding
        if not requests:  # making room put them all back, or heard that they have finished
            return
        if self.eagle is not None:
            self.eagle.decode(requests)
            self.clock_s += FORWARD_SECONDS
        else:
            batch = self.builder.build(
                "decode",
                requests,
                prefix_lens=[r.cached_len for r in requests],
                tokens=[self.next_input(request) for request in requests],
                padded=True,
            )
            self._run(batch, np.ones(len(requests), np.bool_))
        self._settle(requests)

    def next_input(self, request: Request) -> Int32Array:
        """Return the token that a running request goes on from, `[1] int32`: known to the host, or on the device only."""
        if request.cached_len < request.num_tokens:
            return request.tokens[request.cached_len : request.cached_len + 1]
        return self.futures.read(request.future)

    def _run(self, batch: Batch, samples: BoolArray) -> None:
        """Run a forward of the target in which the requests that `samples` names get a token; each has its tokens in
        the cache then. With overlap scheduling, the host hears of a decode's tokens only when the next forward is on its way.
        """
        sampled: list[Int64Array] = []
        last = batch.last_tokens[samples]
        forward = self.recorder.next_forward

        def pick(content: WordArray) -> tuple[Int64Array, Int64Array]:
            ids = np.array([r.sampling_id for r in batch.requests], np.int64)[samples]
            tokens = self.sampler.tokens(ids, batch.positions[last] + 1, content[last])
            sampled.append(tokens)
            if self.config.overlap:
                return tokens[:0], tokens[:0]
            return tokens, _sampled_lens(batch, samples)

        self.runner.run(batch, pick)
        places = iter(self.futures.store(sampled[0])) if self.config.overlap else iter(())
        for request, count, gets in zip(batch.requests, batch.extend_lens.tolist(), samples.tolist(), strict=False):
            request.cached_len += count
            request.in_flight += 1
            request.future = next(places) if gets and self.config.overlap else NO_FUTURE
        self.in_flight.append(Launched(forward=forward, batch=batch, samples=samples, tokens=sampled[0]))
        self.clock_s += FORWARD_SECONDS + TOKEN_SECONDS * batch.num_tokens
        if self.config.overlap:
            self.drain(keep=1)
        if not self.config.overlap or batch.mode != "decode":  # what follows needs to know what came of it
            self._hear_back()

    def _hear_back(self) -> Launched:
        """Give the oldest forward's tokens to its requests, and return it; one that had finished before gets none."""
        launched = self.in_flight.popleft()
        batch, samples = launched.batch, launched.samples
        if self.config.overlap:
            lens = _sampled_lens(batch, samples)
            self.recorder.sampled(forward=launched.forward, sampled_tokens=launched.tokens, sampled_lens=lens)
        tokens = iter(launched.tokens.tolist())
        for request, gets in zip(batch.requests, samples.tolist(), strict=True):
            request.in_flight -= 1
            token = next(tokens) if gets else None
            if token is not None and not request.done:
                request.append(token)
                self.counters.output_tokens += 1
        return launched

    def _fork(self, parent: Request) -> None:
        """Start another answer to a request whose prompt has just been computed. If there is no row or no page for it,
        it waits in the queue like any other request, and finds the prompt in the prefix cache.
        """
        spec = RequestSpec(
            arrival_s=self.clock_s,
            prompt=parent.tokens[: parent.prompt_len].copy(),
            max_new_tokens=parent.max_tokens - parent.prompt_len,
            priority=parent.spec.priority,
        )
        child = self.new_request(spec, labels={"forked_from": parent.name})
        # The draft's KV of the prompt's last token depends on the token sampled next, which the fork does not share.
        if self.eagle is not None or not self.scheduler.share_prompt(parent, child):
            self.scheduler.add(child)
            return
        ids = np.array([child.sampling_id], np.int64)
        pool = self.memory.pools[0]
        content = pool.content[self.memory.row_slots(pool, child.row, child.cached_len - 1, child.cached_len)]
        child.append(int(self.sampler.tokens(ids, np.array([child.cached_len], np.int64), content)[0]))
        self.counters.forks += 1
        self.counters.output_tokens += 1
        self.scheduler.running.append(child)

    def _settle(self, requests: Sequence[Request]) -> None:
        """After a forward was heard of: give back what has left the window, let the finished go."""
        for request in requests:
            if request.row == NO_ROW:
                continue
            if request.done and request in self.scheduler.running:
                self._let_go(request)
            else:
                self.memory.slide(request)
        for request in [r for r in self.scheduler.running if r.done]:  # a fork of a request that wanted one token
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Finish a request, once no forward in flight reads its row or its slots."""
        if request.in_flight:
            return
        if request.cached_len >= request.num_tokens:  # one forward too many, launched before its end was known
            request.cached_len = request.num_tokens - 1
            self.memory.trim(request, request.cached_len, note="overrun")
            self.counters.overruns += 1
        self.scheduler.finish(request)

    def _nothing_to_run(self) -> None:
        if self.scheduler.waiting:
            raise BrokenEngineError(f"nothing runs, and request {self.scheduler.waiting[0].name} is not admitted")
        if self._arrivals.next is not None:
            if self.config.idle_forwards:
                self._idle_forward()
            self.clock_s = max(self.clock_s, self._arrivals.next.arrival_s)

    def _idle_forward(self) -> None:
        self.runner.run(self.builder.build("idle", [], prefix_lens=[], tokens=[]))
        self.counters.idle_forwards += 1


def _sampled_lens(batch: Batch, samples: BoolArray) -> Int64Array:
    return np.append(samples.astype(np.int64), np.zeros(batch.rows.size - samples.size, np.int64))
