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

    def positions_read(request: Request) -> range:
        """Return the positions of a request that its next forward reads, in every group."""
        return range(
            0 if memory.swa is None else max(0, request.cached_len - memory.swa.window + 8), request.cached_len
        )

    @bench.between_steps()
    def act() -> bool:
        running = [request for request in bench.engine.scheduler.running if positions_read(request)]
        if not running:
            return False
        victim, other = bench.pick(running), bench.pick(running)
        position, place = bench.pick(positions_read(victim)), bench.pick(positions_read(other))
        table = memory.req_to_token
        slot, target = int(table[victim.row, position]), int(table[other.row, place])
        if slot == target:
            return False
        bench.inject(request=victim, slot=target, position=position, instead_of=slot)
        table[victim.row, position] = target
        return True


@fault(reference="S#17850 S#18803", configs=("mha", "mha_page1", "mha_page16", "mla", "no_cache", "swa", "dsv4"))
def row_reassigned_in_flight(bench: Bench) -> None:
    """A request's row goes to another request while a launched forward still reads it."""
    scheduler = bench.engine.scheduler

    @around(bench.engine.runner)
    def run(original: Any, batch: Batch, *args: Any, **kwargs: Any) -> None:
        if bench.due and batch.mode == "decode" and scheduler.waiting and scheduler.prefilling is None:
            victim = bench.pick(batch.requests)
            bench.inject(request=victim, position=victim.cached_len)
            scheduler.abort(victim)
            newcomer = scheduler.waiting[0]
            if scheduler.admit(newcomer, bench.engine.config.chunk_tokens, 0):
                scheduler.waiting.remove(newcomer)
                scheduler.prefilling = newcomer
        original(batch, *args, **kwargs)


@fault(reference="S#22862", configs=_ALL)
def resume_overwrites_tail(bench: Bench) -> None:
    """A resumed request overwrites its row's tail; the old slots leak."""
    memory, size = bench.engine.memory, bench.engine.config.page_size

    @bench.between_steps(lambda: [r for r in bench.engine.scheduler.running if r.shared_pages * size < r.cached_len])
    def act(request: Request) -> bool:
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


@fault(reference="lab", configs=("mha", "mha_page16", "mla"))
def slot_mapping(bench: Bench) -> None:
    """A token is written to the slot behind the one that its row names."""
    page = bench.engine.config.page_size

    @around(bench.engine.builder)
    def build(original: Any, mode: str, requests: Any, **kwargs: Any) -> Batch:
        batch: Batch = original(mode, requests, **kwargs)
        for request, last in zip(batch.requests, batch.last_tokens.tolist(), strict=True):
            position, slot = int(batch.positions[last]), int(batch.slots[last]) + 1
            if bench.due and batch.runner == 0 and (position + 1) % page:  # still in its page
                bench.inject(request=request, slot=slot, position=position)
                batch = replace(batch, slots=np.where(np.arange(batch.slots.size) == last, slot, batch.slots))
        return batch
