"""Breaks a running simulated engine: in its state between steps, or in what a batch is fed. Deterministic by seed."""

import numpy as np
from kvcanary.recorder.engines.simulated.batch import BatchBuilder
from kvcanary.recorder.engines.simulated.engine import SimulatedEngine
from kvcanary.recorder.engines.simulated.pools import PageAllocator

FAULTS = (
    "kv_flip",
    "table_entry",
    "lut_entry",
    "input_token",
    "position",
    "early_free",
    "truth_token",
    "written_elsewhere",
    "rows_swapped",
    "cached_kv_flip",
    "host_kv_flip",
    "prefix_short",
    "next_token_swap",
)


class UncheckedAllocator(PageAllocator):
    """Takes back whatever it is given, as a real allocator does."""

    def check_free(self, pages):
        pass


class Injector:
    """Call it between steps; `injected` counts what it did.

    Args:
        engine: to be broken.
        fault: one of `FAULTS`.
        seed: of where and when.
        rate: chance of a fault in each step, or in each batch, once there is something to break.
    """

    def __init__(self, engine: SimulatedEngine, fault: str, *, seed: int, rate: float = 0.3) -> None:
        self.injected = 0
        self.rate = rate
        self.random = np.random.default_rng([seed, 0xFA17])
        self._engine = engine
        self._act = getattr(self, f"act_{fault}", None)
        self._undo: list[tuple[np.ndarray, tuple[int, ...] | int, int]] = []
        memory = engine.memory
        for allocator in (memory.allocator, memory.host.pages, *([memory.swa.pages] if memory.swa else [])):
            allocator.__class__ = UncheckedAllocator
        if fault == "next_token_swap":
            self._break_sampler(engine)
        elif self._act is None:
            engine.builder.__class__ = _BrokenBuilder
            engine.builder.injector, engine.builder.fault = self, fault

    def fires(self) -> bool:
        """Whether a fault happens now."""
        fired = bool(self.random.random() < self.rate)
        self.injected += fired
        return fired

    def choose(self, values) -> int:
        """Return one of `values`."""
        return int(values[int(self.random.integers(len(values)))])

    def __call__(self, engine: SimulatedEngine) -> None:
        for array, place, value in self._undo:
            array[place] = value
        self._undo = []
        if self._act is not None and self._readers() and self.fires():
            self._act()

    def _break_sampler(self, engine: SimulatedEngine) -> None:
        """Two requests get one another's next token, and everybody believes it."""
        right = engine.sampler.tokens

        def swapped(request_ids, positions, content):
            tokens = right(request_ids, positions, content)
            if tokens.size > 1 and self.fires():
                one, other = self.random.choice(tokens.size, 2, replace=False)
                tokens[[one, other]] = tokens[[other, one]]
            return tokens

        engine.sampler.tokens = swapped

    def _readers(self):
        return [request for request in self._engine.scheduler.active if request.cached_len > 0]

    def _reader(self):
        readers = self._readers()
        return readers[self.choose(range(len(readers)))]

    def _position(self, request) -> int:
        """A position that the request's next forward reads; in a sliding engine one that a window reads."""
        first = 0
        if self._engine.config.sliding and self.random.random() < 0.8:
            first = max(0, request.cached_len - self._engine.config.window)
        return first + self.choose(range(request.cached_len - first))

    def _slot(self, request) -> int:
        return int(self._engine.memory.req_to_token[request.row, self._position(request)])

    def some_slots(self) -> np.ndarray:
        """Slots that a row points to, or has pointed to."""
        table = self._engine.memory.req_to_token
        return table[table > 0]

    def _set(self, array: np.ndarray, place, value: int) -> None:
        """Change an entry of a table; every other time only until the next step."""
        if self.random.random() < 0.5:
            self._undo.append((array, place, int(array[place])))
        array[place] = value

    def _flip(self, slots) -> None:
        """Flip a byte that the recorder captures, in one of the pools that has bytes."""
        memory = self._engine.memory
        pools = [pool for pool in memory.pools if pool.group.streams]
        if not pools:
            return
        pool = pools[self.choose(range(len(pools)))]
        slot = self.choose(slots)
        slot = int(memory.lut[slot]) if pool.group.kind == "swa" else slot
        stream = self.choose(range(len(pool.group.streams)))
        pool.stream_bytes(stream)[slot, self.choose(range(16))] ^= 1 << self.choose(range(8))

    def act_kv_flip(self) -> None:
        self._flip([self._slot(self._reader())])

    def act_cached_kv_flip(self) -> None:
        pages = [node.page for node in self._engine.memory.cache.tree.walk() if node.page > 0 and not node.lock]
        size = self._engine.config.page_size
        self._flip([self.choose(pages) * size + self.choose(range(size))] if pages else [self._slot(self._reader())])

    def act_host_kv_flip(self) -> None:
        memory = self._engine.memory
        pages = memory.host.pages.held_pages()
        pool = memory.pools[0]
        if not pages.size or not pool.group.streams:
            self.act_kv_flip()
            return
        size = self._engine.config.page_size
        pool.host_arrays[1].view(np.uint8)[self.choose(pages) * size + self.choose(range(size)), 0] ^= 0xFF

    def act_table_entry(self) -> None:
        request = self._reader()
        place = (request.row, self._position(request))
        self._set(self._engine.memory.req_to_token, place, self.choose(self.some_slots()))

    def act_rows_swapped(self) -> None:
        table, (one, other) = self._engine.memory.req_to_token, (self._reader(), self._reader())
        table[[one.row, other.row]] = table[[other.row, one.row]]

    def act_lut_entry(self) -> None:
        memory = self._engine.memory
        if memory.swa is None:
            self.act_table_entry()
            return
        live = memory.lut[memory.lut > 0]
        value = 0 if self.random.random() < 0.2 else self.choose(live)
        self._set(memory.lut, self._slot(self._reader()), value)

    def act_early_free(self) -> None:
        memory, request = self._engine.memory, self._reader()
        pages = memory.row_pages(request.row, 0, memory.pages_for(request.cached_len))
        memory.give_back(pages[[self.choose(range(pages.size))]], request, note="too early")

    def act_truth_token(self) -> None:
        request = self._reader()
        request.tokens[self._position(request)] += 1


class _BrokenBuilder(BatchBuilder):
    """Feeds a batch something wrong, now and then."""

    injector: Injector
    fault: str

    def _fires(self, fault: str, count: int) -> bool:
        return self.fault == fault and count > 0 and self.injector.fires()

    def build(self, mode, requests, *, prefix_lens, tokens, runner=0, padded=False):
        tokens, prefix_lens = list(tokens), list(prefix_lens)
        if self._fires("input_token", len(tokens)):
            wrong = self.injector.choose(range(len(tokens)))
            tokens[wrong] = tokens[wrong].copy()
            tokens[wrong][self.injector.choose(range(tokens[wrong].size))] += 1
        long = [r for r, prefix in enumerate(prefix_lens) if prefix > 0]
        if self._fires("prefix_short", len(long)):
            prefix_lens[self.injector.choose(long)] -= 1
        return super().build(mode, requests, prefix_lens=prefix_lens, tokens=tokens, runner=runner, padded=padded)

    def positions(self, prefix_lens, extend_lens):
        positions = super().positions(prefix_lens, extend_lens)
        if self._fires("position", positions.size):
            wrong = slice(
                self.injector.choose(range(positions.size)), None if self.injector.random.random() < 0.5 else 1
            )
            positions[wrong] += 1 if self.injector.random.random() < 0.7 else -1
        return positions

    def out_cache_loc(self, rows, prefix_lens, extend_lens):
        slots = super().out_cache_loc(rows, prefix_lens, extend_lens)
        if self._fires("written_elsewhere", slots.size):
            # A negative slot is none at all. Behind a full-to-SWA table the published canary would wrap it around.
            sliding = self.injector._engine.config.sliding
            live = self.injector.some_slots()
            lost = not sliding and self.injector.random.random() < 0.2
            slots[self.injector.choose(range(slots.size))] = -1 if lost else self.injector.choose(live)
        return slots
