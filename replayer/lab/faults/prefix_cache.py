"""The prefix cache: pages freed under it, hits on what is not there, pages that go while somebody reads them."""

from typing import Any, Final

from ....recorder.engines.simulated.radix import NO_PAGE
from ....recorder.engines.simulated.requests import Request
from ..fault import Bench, around, fault, unchecked_pools

_ALL: Final = ("mha", "mha_page1", "mha_page16", "mla", "mixed", "tight", "swa", "dsv4", "eagle")


@fault(reference="S#38319", configs=_ALL)
def radix_insert_then_free(bench: Bench) -> None:
    """Pages that the prefix cache holds are freed by a retraction or an abort."""
    scheduler = bench.engine.scheduler
    unchecked_pools(bench.engine)

    def own_nodes(request: Request) -> int:
        """Return how many of the request's last shared pages nobody else stands on."""
        count, node = 0, request.node
        while node is not None and node.lock == 1 and node.page != NO_PAGE and node.parent is not None:
            count, node = count + 1, node.parent
        return count

    def act() -> bool:
        found = [request for request in scheduler.active if own_nodes(request)]
        if not found:
            return False
        request = bench.pick(found)
        kept = request.shared_pages - own_nodes(request)
        size = bench.engine.config.page_size
        slot = int(bench.engine.memory.req_to_token[request.row, kept * size])
        bench.inject(request=request, slot=slot, position=kept * size)
        request.shared_pages = kept
        (scheduler.retract if bench.random.random() < 0.7 else scheduler.abort)(request)
        return True

    bench.between_steps(act)


@fault(reference="V#38715", configs=("twins", "twins_swa"), warm_up=(4, 20))
def hit_before_written(bench: Bench) -> None:
    """A prefix hit in the very step that is still writing the content."""
    engine, memory = bench.engine, bench.engine.memory
    early: set[int] = set()
    hits: list[Request] = []

    def admit(original: Any, request: Request, *args: Any) -> int:
        taken = int(original(request, *args))
        if not taken or not bench.started or hits:
            return taken
        if early.intersection(memory.row_pages(request.row, 0, request.shared_pages).tolist()):
            hits.append(request)
            return taken
        known, before = request.cached_len, request.shared_pages
        request.cached_len += taken
        memory.cache.insert(request)
        request.cached_len = known
        early.update(memory.row_pages(request.row, before, request.shared_pages).tolist())
        if request.shared_pages > before:
            bench.inject(request=request, position=known)
        return taken

    def next_prefill(original: Any) -> Any:
        early.clear()
        return original()

    around(engine.scheduler, "admit", admit)
    around(engine.scheduler, "next_prefill", next_prefill)


@fault(
    reference="V#49377", configs=("mha", "mha_page16", "mla", "mixed", "tight", "swa", "dsv4", "eagle"), warm_up=(4, 20)
)
def tokens_truncated_hash_kept(bench: Bench) -> None:
    """A cached page's key loses its last tokens, so that another prompt hits it."""
    tree, size = bench.engine.memory.cache.tree, bench.engine.config.page_size

    def key(original: Any, raw: bytes, index: int) -> bytes:
        found = bytes(original(raw, index))
        if not bench.started:
            return found
        bench.inject(position=index * size)
        return found[: 4 * (size // 2)]

    around(tree, "key", key)


@fault(reference="lab", configs=_ALL)
def eviction_of_locked_page(bench: Bench) -> None:
    """The prefix cache evicts a page that a running request stands on."""
    engine, cache = bench.engine, bench.engine.memory.cache
    unchecked_pools(engine)

    def act() -> bool:
        found = [
            request
            for request in engine.scheduler.running
            if request.node is not None
            and request.node.parent is not None
            and request.node.page != NO_PAGE
            and not request.node.children
        ]
        if not found:
            return False
        request = bench.pick(found)
        node, size = request.node, engine.config.page_size
        bench.inject(request=request, slot=node.page * size, position=(node.depth - 1) * size)
        cache.evict([node])
        return True

    bench.between_steps(act)


@fault(reference="lab", configs=("forks",), warm_up=(0, 20))
def fork_copy_missing(bench: Bench) -> None:
    """A fork gets slots of its own for the begun page, and nothing is copied there."""
    memory = bench.engine.memory

    def copy_tail(original: Any, parent: Request, child: Request, **kwargs: Any) -> None:
        first = child.shared_pages * memory.page_size
        if bench.due and first < parent.cached_len:
            bench.inject(request=child, slot=int(memory.req_to_token[child.row, first]), position=first)
            return
        original(parent, child, **kwargs)

    around(memory, "copy_tail", copy_tail)


@fault(reference="S#38140", configs=("twins", "twins_swa"), benign=True, warm_up=(0, 20))
def dedup_remap(bench: Bench) -> None:
    """No fault: equal pages are merged, a request moves to the tree's slots and frees its own."""
    engine = bench.engine

    def act() -> bool:
        for request in list(engine.scheduler.running):
            before = engine.counters.deduplicated_pages
            engine.memory.cache.insert(request)
            if engine.counters.deduplicated_pages > before:
                bench.inject(request=request)
        return False

    bench.between_steps(act)
