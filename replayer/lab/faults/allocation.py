"""Pages that are given or given back when they should not be."""

from typing import Any, Final

import numpy as np

from ....recorder.engines.simulated.requests import Request
from ..fault import Bench, around, fault, unchecked_pools, while_inside

_ALL: Final = ("mha", "mha_page1", "mha_page16", "mla", "mixed", "no_cache", "tight", "swa", "dsv4", "eagle")


@fault(reference="lab", configs=_ALL)
def double_free(bench: Bench) -> None:
    """A leaving request gives a page back twice; it is handed out twice."""
    memory = bench.engine.memory
    unchecked_pools(bench.engine)

    @around(memory)
    def release(original: Any, request: Request, **kwargs: Any) -> None:
        own = memory.row_pages(request.row, request.shared_pages, memory.pages_for(request.allocated_len))
        again = own[:1] if bench.due else own[:0]
        if again.size:
            bench.inject(request=request, slot=int(own[0]) * memory.page_size, position=_first_own(bench, request))
        original(request, **kwargs)
        memory.give_back(again, request, **kwargs)


@fault(reference="lab", configs=_ALL)
def free_too_early(bench: Bench) -> None:
    """A page is given back while its request goes on reading it."""
    memory = bench.engine.memory
    unchecked_pools(bench.engine)

    @bench.between_steps(lambda: _with_own_pages(bench))
    def act(request: Request) -> None:
        index = request.shared_pages
        if memory.swa is not None:  # of a page whose half has left the window nobody would read much
            index = max(index, memory.swa.first_needed_page(request.cached_len))
        page = memory.row_pages(request.row, index, index + 1)
        bench.inject(request=request, slot=int(page[0]) * memory.page_size, position=index * memory.page_size)
        memory.give_back(page, request, note="too early")


@fault(reference="lab", configs=_ALL)
def page_given_twice(bench: Bench) -> None:
    """The allocator gives out a page that a running request holds."""
    memory, allocator = bench.engine.memory, bench.engine.memory.allocator
    unchecked_pools(bench.engine)

    @around(allocator)
    def alloc(original: Any, count: int) -> Any:
        pages = original(count)
        if not bench.due or pages is None or not pages.size or not (found := _with_own_pages(bench)):
            return pages
        holder = bench.pick(found)
        page = int(memory.row_pages(holder.row, holder.shared_pages, holder.shared_pages + 1)[0])
        bench.inject(request=holder, slot=page * memory.page_size, position=_first_own(bench, holder))
        allocator.free(pages[-1:])
        return np.append(pages[:-1], page)


@fault(reference="lab", configs=_ALL)
def page_leaked(bench: Bench) -> None:
    """A leaving request forgets a page; nobody ever gives it back."""
    memory = bench.engine.memory
    leaving = while_inside(bench.engine.scheduler, "leave", lambda request, **_: request)

    @around(memory)
    def give_back(original: Any, pages: Any, request: Request | None, **kwargs: Any) -> None:
        if bench.due and request is not None and leaving and pages.size:
            slot = int(pages[-1]) * memory.page_size
            bench.inject(request=request, slot=slot)
            bench.probe.note("leak", request=request, slot=slot)  # which no forward can read
            pages = pages[:-1]
        original(pages, request, **kwargs)


@fault(reference="S#28754", configs=("mha", "mha_page1", "mla", "mixed", "no_cache", "tight", "swa", "dsv4", "eagle"))
def commit_beyond_allocation(bench: Bench) -> None:
    """More is committed than was allocated: the request's slots go on into another's page."""
    memory, size, scheduler = bench.engine.memory, bench.engine.config.page_size, bench.engine.scheduler
    unchecked_pools(bench.engine)

    def neighbour(request: Request, upto: int) -> int:
        """Return the page behind the request's last one if another active request reads it, else 0."""
        start = request.allocated_len
        if not bench.due or request not in scheduler.running or start % size or not start < upto <= start + size:
            return 0
        page = int(memory.req_to_token[request.row, start - 1]) // size + 1
        for other in scheduler.running:
            first = 0 if memory.swa is None else memory.swa.first_needed_page(other.cached_len + 4)
            if other is not request and page in memory.row_pages(other.row, first, other.cached_len // size):
                return page
        return 0

    @around(memory)
    def extend(original: Any, request: Request, upto: int) -> bool:
        page = neighbour(request, upto)
        if not page:
            return bool(original(request, upto))
        start = request.allocated_len
        bench.inject(request=request, slot=page * size, position=start)
        memory.req_to_token[request.row, start:upto] = page * size + np.arange(upto - start)
        request.allocated_len = upto
        return True


def _first_own(bench: Bench, request: Request) -> int:
    return request.shared_pages * bench.engine.config.page_size


def _with_own_pages(bench: Bench) -> list[Request]:
    return [r for r in bench.engine.scheduler.running if _first_own(bench, r) < r.cached_len]
