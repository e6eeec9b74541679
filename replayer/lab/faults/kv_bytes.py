"""KV bytes that change, or do not, when they should not, or should."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ....recorder.engines.simulated.pools import TARGET, KvPool, copy_slots
from ....recorder.engines.simulated.radix import NO_PAGE
from ....recorder.engines.simulated.requests import Request
from ..fault import Bench, around, fault, while_inside

_ALL: Final = ("mha", "mha_page1", "mha_page16", "mla", "mixed", "no_cache", "swa", "swa_page1", "eagle", "eagle_swa")


@fault(reference="canary", configs=_ALL)
def kv_used(bench: Bench) -> None:
    """A byte of a slot that a running request reads is flipped."""

    @bench.between_steps(lambda: [r for r in bench.engine.scheduler.running if r.cached_len])
    def act(request: Request) -> None:
        pool = _pool_with_bytes(bench)
        first = max(0, request.cached_len - pool.group.window + 4) if pool.group.window else 0
        position = int(bench.random.integers(first, request.cached_len))
        _flip(bench, pool, _slot(bench, pool, request, position), request=request, position=position)


@fault(reference="canary", configs=("sweeps", "sweeps_swa", "sweeps_eagle"))
def kv_unused_cache(bench: Bench) -> None:
    """A byte of a slot that only the prefix cache holds is flipped."""
    memory = bench.engine.memory

    @bench.between_steps()
    def act() -> bool:
        pool = _pool_with_bytes(bench)
        nodes = [n for n in memory.cache.tree.walk() if not n.lock and n.page != NO_PAGE]
        if pool.group.lut >= 0:
            nodes = [n for n in nodes if n.windowed]
        if not nodes:
            return False
        node = bench.pick(nodes)
        offset = int(bench.random.integers(memory.page_size))
        slot = int(memory.pool_slots(pool, np.array([node.page * memory.page_size + offset]))[0])
        _flip(bench, pool, slot, position=(node.depth - 1) * memory.page_size + offset)
        return True


@fault(reference="canary", configs=(*_ALL, "pd", "pd_swa"))
def kv_post_forward(bench: Bench) -> None:
    """A byte of a slot is flipped right after its forward."""

    @around(bench.engine.runner)
    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        original(batch, *args, **kwargs)
        if not bench.due or batch.runner != TARGET or batch.mode == "target_verify" or not batch.num_tokens:
            return
        pool = bench.pick([p for p in bench.engine.memory.pools if p.group.runner == TARGET and p.group.streams])
        lasts = batch.last_tokens
        index = int(bench.random.integers(lasts.size))
        request, position = batch.requests[index], int(batch.positions[lasts[index]])
        _flip(bench, pool, _slot(bench, pool, request, position), request=request, position=position)


@fault(reference="lab", configs=("submitted",))
def kv_write_damaged(bench: Bench) -> None:
    """A byte of a slot is flipped within the forward that writes it."""
    _one_write(bench, lambda pool, slot, position: _flip(bench, pool, slot, position=position))


@fault(reference="lab", configs=_ALL)
def kv_write_lost(bench: Bench) -> None:
    """The KV of one token is not written; its slot keeps what another token left there.

    The slot must have been written before: into one that never was, the recorder has nothing to compare with.
    """
    running = while_inside(bench.engine.runner, "run", lambda batch, *_: batch)
    last_tokens: dict[tuple[int, int], int] = {}

    def write(pool: KvPool, original: Any, slots: Any, content: Any, noise: Any) -> None:
        batch = running[0]
        written = [
            ((pool.index, slot), token) for slot, token in zip(slots.tolist(), batch.input_ids.tolist(), strict=True)
        ]
        found = [
            index
            for index, (place, token) in enumerate(written[: batch.num_tokens])
            if place[1] and last_tokens.get(place, token) != token
        ]
        kept = np.ones(slots.size, np.bool_)
        if bench.due and found:
            lost = bench.pick(found)
            bench.inject(slot=int(slots[lost]), position=int(batch.positions[lost]), group=pool.index)
            kept[lost] = False
        original(slots[kept], content[kept], None if noise is None else noise[kept])
        last_tokens.update(written)

    for pool in bench.engine.memory.pools:
        if pool.group.streams:
            around(pool, "write")(partial(write, pool))


@fault(reference="lab", configs=("layers",))
def late_layer_overwritten(bench: Bench) -> None:
    """A layer behind the first is overwritten in all slots of a running request's prefix."""
    size = bench.engine.config.page_size

    @bench.between_steps(lambda: [r for r in bench.engine.scheduler.running if r.cached_len >= size])
    def act(request: Request) -> None:
        pool = bench.pick([p for p in bench.engine.memory.pools if p.group.streams])
        slots = bench.engine.memory.row_slots(pool, request.row, 0, request.cached_len)
        bench.inject(request=request, slot=int(slots[0]), position=0, group=pool.index)
        _late_layer(bench, pool)[slots] ^= np.uint64(0x0001000100010001)


@fault(reference="lab", configs=("layers",))
def nan_written(bench: Bench) -> None:
    """A forward writes NaN to K or V of a layer behind the first, for one of its tokens."""

    def write(pool: KvPool, slot: int, position: int) -> None:
        bench.inject(slot=slot, position=position, group=pool.index)
        _late_layer(bench, pool)[slot, 0] = np.uint64(0x7FC0)

    _one_write(bench, write)


@fault(reference="V#41657", configs=("swa", "eagle", "eagle_swa"))
def groups_alias(bench: Bench) -> None:
    """Two pool groups map to overlapping bytes."""
    memory, size = bench.engine.memory, bench.engine.config.page_size
    below, above = memory.pools[0], memory.pools[-1]

    @bench.between_steps()
    def act() -> bool:
        running = [r for r in bench.engine.scheduler.running if r.cached_len > size]
        if not running:
            return False
        writer, reader = bench.pick(running), bench.pick(running)
        begin = _slot(bench, above, writer, writer.cached_len - 1) // size * size
        page = bench.pick(memory.row_pages(reader.row, 0, reader.cached_len // size).tolist())
        bench.inject(request=reader, slot=page * size, group=0, of_group=above.index, of_slot=begin)

        @around(above)
        def write(original: Any, slots: Any, content: Any, noise: Any) -> None:
            original(slots, content, noise)
            inside = slots[(slots >= begin) & (slots < begin + size)]
            copy_slots(above.arrays, inside, below.arrays, inside - begin + page * size)

        return True


@fault(reference="V#39146", configs=("twins", "twins_swa", "mha", "no_cache", "swa", "overlap"), benign=True)
def duplicate_prompt_numerics(bench: Bench) -> None:
    """No fault: the same prompt in another batch has other KV bits."""
    engine, scheduler = bench.engine, bench.engine.scheduler

    @bench.between_steps(lambda: [r for r in scheduler.running if r.cached_len > 1 and len(scheduler.active) > 1])
    def act(request: Request) -> None:
        bench.inject(request=request)
        scheduler.retract(request, hold=False)
        engine.memory.cache.make_room(int(bench.random.integers(engine.config.num_pages)))


def _one_write(bench: Bench, damage: Callable[[KvPool, int, int], None]) -> None:
    """Have `damage(pool, slot, position)` follow the write of one token, within its forward."""
    running = while_inside(bench.engine.runner, "run", lambda batch, *_: batch)

    def write(pool: KvPool, original: Any, slots: Any, *args: Any) -> None:
        original(slots, *args)
        found = np.flatnonzero(slots[: running[0].num_tokens])
        if bench.due and found.size:
            token = int(bench.pick(found.tolist()))
            damage(pool, int(slots[token]), int(running[0].positions[token]))

    for pool in bench.engine.memory.pools:
        around(pool, "write")(partial(write, pool))


def _pool_with_bytes(bench: Bench) -> KvPool:
    found: KvPool = bench.pick([pool for pool in bench.engine.memory.pools if pool.group.streams])
    return found


def _late_layer(bench: Bench, pool: KvPool) -> Any:
    """Return K or V of a layer behind the first, `[num_slots, words] uint64`."""
    number = bench.pick([n for n, stream in enumerate(pool.group.streams) if stream.samples])
    layers = pool.arrays[1 + number].reshape(pool.group.num_slots, bench.engine.config.sampled_layers, -1)
    return layers[:, int(bench.random.integers(1, layers.shape[1]))]


def _slot(bench: Bench, pool: KvPool, request: Request, position: int) -> int:
    return int(bench.engine.memory.row_slots(pool, request.row, position, position + 1)[0])


def _flip(bench: Bench, pool: KvPool, slot: int, *, position: int, request: Request | None = None) -> None:
    bench.inject(request=request, slot=slot, position=position, group=pool.index)
    stream = int(bench.random.integers(len(pool.group.streams)))
    pool.stream_bytes(stream)[slot, 0] ^= 0xFF
