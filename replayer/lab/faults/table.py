"""Entries and rows of the block table that do not lead where they should."""

from dataclasses import replace
from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.batch import Batch
from ....recorder.engines.simulated.requests import Request
from ..fault import Bench, around, fault, unchecked_pools

_ALL: Final = ("mha", "mha_page1", "mha_page16", "mla", "mixed", "no_cache", "swa", "swa_page1", "dsv4", "eagle")


@fault(reference="canary", configs=_ALL)
def req_to_token(bench: Bench) -> None:
    """One entry of an active row points to another active slot."""
    memory = bench.engine.memory
    unchecked_pools(bench.engine)

    def active(request: Request) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Return the positions of a request that its next forward reads, in every group."""
        first = 0 if memory.swa is None else max(0, request.cached_len - memory.swa.window + 8)
        return np.arange(first, request.cached_len)

    def act() -> bool:
        running = [request for request in bench.engine.scheduler.running if active(request).size]
        if not running:
            return False
        victim, other = bench.pick(running), bench.pick(running)
        position, place = bench.pick(active(victim).tolist()), bench.pick(active(other).tolist())
        table = memory.req_to_token
        slot, target = int(table[victim.row, position]), int(table[other.row, place])
        if slot == target:
            return False
        bench.inject(request=victim, slot=target, position=position, instead_of=slot)
        table[victim.row, position] = target
        return True

    bench.between_steps(act)


@fault(reference="S#17850 S#18803", configs=("mha", "mha_page1", "mha_page16", "mla", "no_cache", "swa", "dsv4"))
def row_reassigned_in_flight(bench: Bench) -> None:
    """A request's row goes to another request while a launched forward still reads it."""
    engine, scheduler = bench.engine, bench.engine.scheduler

    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        if bench.due and batch.mode == "decode" and scheduler.waiting and scheduler.prefilling is None:
            victim = bench.pick(list(batch.requests))
            bench.inject(request=victim, position=victim.cached_len)
            scheduler.abort(victim)
            newcomer = scheduler.waiting[0]
            if scheduler.admit(newcomer, engine.config.chunk_tokens, 0):
                scheduler.waiting.remove(newcomer)
                scheduler.prefilling = newcomer
        original(batch, *args, **kwargs)

    around(engine.runner, "run", run)


@fault(reference="S#22862", configs=_ALL)
def resume_overwrites_tail(bench: Bench) -> None:
    """A resumed request overwrites its row's tail; the old slots leak."""
    memory, size = bench.engine.memory, bench.engine.config.page_size

    def act() -> bool:
        found = [r for r in bench.engine.scheduler.running if r.shared_pages * size < r.cached_len]
        if not found:
            return False
        request = bench.pick(found)
        last = memory.pages_for(request.allocated_len)
        first = max(request.shared_pages, memory.pages_for(request.cached_len) - 1 - int(bench.random.integers(2)))
        pages = memory.alloc(last - first, request)
        if pages is None:
            return False
        begin = first * size
        row = memory.req_to_token[request.row]
        bench.inject(request=request, slot=int(row[begin]), position=begin)
        row[begin : request.allocated_len] = memory.page_slots(pages)[: request.allocated_len - begin]
        return True

    bench.between_steps(act)


@fault(reference="lab", configs=("mha", "mha_page16", "mla"))
def slot_mapping(bench: Bench) -> None:
    """A token is written to the slot behind the one that its row names."""
    builder = bench.engine.builder

    def build(original: Any, mode: str, requests: Any, **kwargs: Any) -> Batch:
        batch: Batch = original(mode, requests, **kwargs)
        page = bench.engine.config.page_size
        at = 0
        for request, count in zip(batch.requests, batch.extend_lens.tolist(), strict=False):
            last = at + count - 1
            if bench.due and batch.runner == 0 and count and (batch.positions[last] + 1) % page:  # still in its page
                slots = batch.slots.copy()
                slots[last] += 1
                bench.inject(request=request, slot=int(slots[last]), position=int(batch.positions[last]))
                return replace(batch, slots=slots)
            at += count
        return batch

    around(builder, "build", build)
