"""KV bytes that change, or do not, when they should not, or should."""

from functools import partial
from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ....recorder.engines.simulated.pools import KvPool
from ....recorder.engines.simulated.radix import NO_PAGE
from ....recorder.engines.simulated.requests import Request
from ..fault import Bench, around, fault

_ALL: Final = ("mha", "mha_page1", "mha_page16", "mla", "mixed", "no_cache", "swa", "swa_page1", "eagle", "eagle_swa")


@fault(reference="canary", configs=_ALL)
def kv_used(bench: Bench) -> None:
    """A byte of a slot that a running request reads is flipped."""

    def act() -> bool:
        found = [request for request in bench.engine.scheduler.running if request.cached_len]
        if not found:
            return False
        request, pool = bench.pick(found), _pool(bench)
        first = max(0, request.cached_len - pool.group.window + 4) if pool.group.window else 0
        position = int(bench.random.integers(first, request.cached_len))
        slot = _slot(bench, pool, request, position)
        bench.inject(request=request, slot=slot, position=position, group=pool.index)
        _flip(bench, pool, slot)
        return True

    bench.between_steps(act)


@fault(reference="canary", configs=("sweeps", "sweeps_swa", "sweeps_eagle"))
def kv_unused_cache(bench: Bench) -> None:
    """A byte of a slot that only the prefix cache holds is flipped."""
    memory = bench.engine.memory

    def act() -> bool:
        pool = _pool(bench)
        nodes = [n for n in memory.cache.tree.walk() if not n.lock and n.page != NO_PAGE]
        if pool.group.lut >= 0:
            nodes = [n for n in nodes if n.windowed]
        if not nodes:
            return False
        node = bench.pick(nodes)
        offset = int(bench.random.integers(memory.page_size))
        slot = node.page * memory.page_size + offset
        if pool.group.lut >= 0:
            slot = int(memory.lut[slot])
        bench.inject(slot=slot, position=(node.depth - 1) * memory.page_size + offset, group=pool.index)
        _flip(bench, pool, slot)
        return True

    bench.between_steps(act)


@fault(reference="canary", configs=(*_ALL, "pd", "pd_swa"))
def kv_post_forward(bench: Bench) -> None:
    """A byte of a slot is flipped right after its forward."""

    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        original(batch, *args, **kwargs)
        if not bench.due or batch.runner != 0 or batch.mode == "target_verify" or not batch.num_tokens:
            return
        pool = bench.pick([p for p in bench.engine.memory.pools if p.group.runner == 0 and p.group.streams])
        lasts = batch.last_tokens
        index = int(bench.random.integers(lasts.size))
        request, position = batch.requests[index], int(batch.positions[lasts[index]])
        slot = _slot(bench, pool, request, position)
        bench.inject(request=request, slot=slot, position=position, group=pool.index)
        _flip(bench, pool, slot)

    around(bench.engine.runner, "run", run)


@fault(reference="lab", configs=("submitted",))
def kv_write_damaged(bench: Bench) -> None:
    """A byte of a slot is flipped within the forward that writes it."""
    running: list[Batch] = []

    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        running[:] = [batch]
        original(batch, *args, **kwargs)

    def write(pool: KvPool, original: Any, slots: Any, *args: Any) -> None:
        original(slots, *args)
        batch = running[0]
        found = np.flatnonzero(slots[: batch.num_tokens])
        if bench.due and found.size:
            token = int(bench.pick(found.tolist()))
            bench.inject(slot=int(slots[token]), position=int(batch.positions[token]), group=pool.index)
            _flip(bench, pool, int(slots[token]))

    around(bench.engine.runner, "run", run)
    for pool in bench.engine.memory.pools:
        around(pool, "write", partial(write, pool))


@fault(reference="lab", configs=_ALL)
def kv_write_lost(bench: Bench) -> None:
    """The KV of one token is not written; its slot keeps what another token left there.

    The slot must have been written before: into one that never was, the recorder has nothing to compare with.
    """
    running: list[Batch] = []
    last_tokens: dict[tuple[int, int], int] = {}

    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        running[:] = [batch]
        original(batch, *args, **kwargs)

    def write(pool: KvPool, original: Any, slots: Any, content: Any, noise: Any) -> None:
        batch = running[0]
        places = [(pool.index, slot) for slot in slots.tolist()]
        tokens = batch.input_ids.tolist()
        found = [
            i
            for i, (place, token) in enumerate(zip(places[: batch.num_tokens], tokens, strict=False))
            if place[1] and last_tokens.get(place, token) != token
        ]
        kept = np.ones(slots.size, np.bool_)
        if bench.due and found:
            lost = bench.pick(found)
            bench.inject(slot=int(slots[lost]), position=int(batch.positions[lost]), group=pool.index)
            kept[lost] = False
        original(slots[kept], content[kept], None if noise is None else noise[kept])
        last_tokens.update(zip(places, tokens, strict=True))

    around(bench.engine.runner, "run", run)
    for pool in bench.engine.memory.pools:
        if pool.group.streams:
            around(pool, "write", partial(write, pool))


@fault(reference="V#41657", configs=("swa", "eagle", "eagle_swa"))
def groups_alias(bench: Bench) -> None:
    """Two pool groups map to overlapping bytes."""
    memory, size = bench.engine.memory, bench.engine.config.page_size
    span = np.arange(size, dtype=np.int64)

    def full_pages(request: Request) -> list[int]:
        """Return the pages of a running request that are written to their end."""
        return memory.row_pages(request.row, 0, request.cached_len // size).tolist()

    def act() -> bool:
        running = [r for r in bench.engine.scheduler.running if r.cached_len > size]
        if not running:
            return False
        writer, reader = bench.pick(running), bench.pick(running)
        below, above = memory.pools[0], memory.pools[-1]
        begin = _slot(bench, above, writer, writer.cached_len - 1) // size * size
        page = bench.pick(full_pages(reader))
        bench.inject(request=reader, slot=page * size, group=0, of_group=above.index, of_slot=begin)
        shared = {begin + i: page * size + i for i in span.tolist()}

        def write(original: Any, slots: Any, content: Any, noise: Any) -> None:
            original(slots, content, noise)
            inside = np.array([int(slot) in shared for slot in slots], np.bool_)
            for slot in slots[inside].tolist():
                below.content[shared[slot]] = above.content[slot]
                for stream in range(len(below.group.streams)):
                    below.stream_bytes(stream)[shared[slot]] = above.stream_bytes(stream)[slot]

        around(above, "write", write)
        return True

    bench.between_steps(act)


@fault(reference="V#39146", configs=("twins", "twins_swa", "mha", "no_cache", "swa", "overlap"), benign=True)
def duplicate_prompt_numerics(bench: Bench) -> None:
    """No fault: the same prompt in another batch has other KV bits."""
    engine = bench.engine

    def act() -> bool:
        found = [r for r in engine.scheduler.running if r.cached_len > 1]
        if len(engine.scheduler.active) < 2 or not found:
            return False
        request = bench.pick(found)
        bench.inject(request=request)
        engine.scheduler.retract(request, hold=False)
        engine.memory.cache.make_room(int(bench.random.integers(engine.config.num_pages)))
        return True

    bench.between_steps(act)


def _pool(bench: Bench) -> KvPool:
    found: KvPool = bench.pick([pool for pool in bench.engine.memory.pools if pool.group.streams])
    return found


def _slot(bench: Bench, pool: KvPool, request: Request, position: int) -> int:
    """Return the pool's slot of a request's position."""
    slot = int(bench.engine.memory.req_to_token[request.row, position])
    return int(bench.engine.memory.lut[slot]) if pool.group.lut >= 0 else slot


def _flip(bench: Bench, pool: KvPool, slot: int) -> None:
    stream = int(bench.random.integers(len(pool.group.streams)))
    pool.stream_bytes(stream)[slot, 0] ^= 0xFF
