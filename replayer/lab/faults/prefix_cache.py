"""The prefix cache: pages freed under it, hits on what is not there, pages that go while somebody reads them."""

from typing import Any, Final

from ....recorder.engines.simulated.batch import Batch
from ....recorder.engines.simulated.radix import NO_PAGE
from ....recorder.engines.simulated.requests import Request
from ..fault import Bench, around, fault, unchecked_pools

_ALL: Final = ("mha", "mha_page1", "mha_page16", "mla", "mixed", "tight", "swa", "dsv4", "eagle")


@fault(reference="S#38319", configs=_ALL)
def radix_insert_then_free(bench: Bench) -> None:
    """Pages that the prefix cache holds are freed by a retraction or an abort."""
    scheduler, memory = bench.engine.scheduler, bench.engine.memory
    unchecked_pools(bench.engine)

    def own_nodes(request: Request) -> int:
        """Return how many of the request's last shared pages nobody else stands on."""
        count, node = 0, request.node
        while node is not None and node.lock == 1 and node.page != NO_PAGE and node.parent is not None:
            count, node = count + 1, node.parent
        return count

    @bench.between_steps(lambda: [request for request in scheduler.active if own_nodes(request)])
    def act(request: Request) -> None:
        request.shared_pages -= own_nodes(request)
        first = request.shared_pages * memory.page_size
        bench.inject(request=request, slot=int(memory.req_to_token[request.row, first]), position=first)
        (scheduler.retract if bench.random.random() < 0.7 else scheduler.abort)(request)


@fault(reference="V#38715", configs=("twins", "twins_swa"), warm_up=(4, 20))
def hit_before_written(bench: Bench) -> None:
    """A prefix hit in the very step that is still writing the content."""
    scheduler, memory = bench.engine.scheduler, bench.engine.memory
    early: set[int] = set()
    hits: list[Request] = []

    @around(scheduler)
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

    @around(scheduler)
    def next_prefill(original: Any) -> Any:
        early.clear()
        return original()


@fault(
    reference="V#49377", configs=("mha", "mha_page16", "mla", "mixed", "tight", "swa", "dsv4", "eagle"), warm_up=(4, 20)
)
def tokens_truncated_hash_kept(bench: Bench) -> None:
    """A cached page's key loses its last tokens, so that another prompt hits it."""
    size = bench.engine.config.page_size

    @around(bench.engine.memory.cache.tree)
    def key(original: Any, raw: bytes, index: int) -> bytes:
        found = bytes(original(raw, index))
        if not bench.started:
            return found
        bench.inject(position=index * size)
        return found[: 4 * (size // 2)]


@fault(reference="lab", configs=("adapters",), warm_up=(4, 20))
def adapter_not_in_key(bench: Bench) -> None:
    """The cache's keys leave out the LoRA adapter, so that a request hits what another adapter has computed."""
    memory = bench.engine.memory
    computed: dict[int, str] = {}  # page -> the adapter it was computed with, of pages that the cache holds

    @around(memory.cache)
    def space(original: Any, request: Request) -> str:
        return "" if bench.started else str(original(request))

    @around(memory.cache)
    def insert(original: Any, request: Request, **kwargs: Any) -> None:
        first, row, pages = request.shared_pages, request.row, request.cached_len // memory.page_size
        before = memory.row_pages(row, first, pages).tolist()
        original(request, **kwargs)
        after = memory.row_pages(row, first, pages).tolist()
        computed.update((page, request.spec.adapter) for page, kept in zip(before, after, strict=True) if page == kept)

    @around(memory.cache)
    def record_attached(original: Any, request: Request) -> None:
        original(request)
        pages = memory.row_pages(request.row, 0, request.shared_pages).tolist()
        others = [n for n, page in enumerate(pages) if computed.get(page, request.spec.adapter) != request.spec.adapter]
        if others and bench.started:
            place = {"position": others[0] * memory.page_size, "slot": pages[others[0]] * memory.page_size}
            bench.inject(request=request, **place)
            bench.probe.note("identity", **place, group=0, request=request)


@fault(reference="lab", configs=("recurrent",), warm_up=(4, 20))
def state_restored_for_other_prefix(bench: Bench) -> None:
    """A request that hits the prefix cache gets the checkpoint of another prefix's recurrent state."""
    states = bench.engine.memory.states
    if states is None:
        return
    wrong: dict[int, Request] = {}  # by row, who was given another's

    @around(bench.engine.memory.cache)
    def record_attached(original: Any, request: Request) -> None:
        original(request)  # which is sure by now that the request stays
        others = [node for node in states.checkpoints if node is not request.node]
        if request.shared_pages and others and bench.due:
            states.restore(request.row, bench.pick(others))
            bench.inject(request=request, position=request.cached_len - 1)
            wrong[request.row] = request

    @around(bench.engine.runner)
    def run(original: Any, batch: Batch, *args: Any) -> Any:
        for row in batch.rows.tolist():
            if row in wrong:
                request = wrong.pop(row)
                bench.probe.note("state", position=request.cached_len - 1, request=request)
        return original(batch, *args)


@fault(reference="lab", configs=_ALL)
def eviction_of_locked_page(bench: Bench) -> None:
    """The prefix cache evicts a page that a running request stands on."""
    engine, size = bench.engine, bench.engine.config.page_size
    unchecked_pools(engine)

    def on_a_leaf(request: Request) -> bool:
        node = request.node
        return node is not None and node.parent is not None and node.page != NO_PAGE and not node.children

    @bench.between_steps(lambda: [request for request in engine.scheduler.running if on_a_leaf(request)])
    def act(request: Any) -> None:
        node = request.node
        bench.inject(request=request, slot=node.page * size, position=(node.depth - 1) * size)
        engine.memory.cache.evict([node])


@fault(reference="lab", configs=("forks",), warm_up=(0, 20))
def fork_copy_missing(bench: Bench) -> None:
    """A fork gets slots of its own for the begun page, and nothing is copied there."""
    memory = bench.engine.memory

    @around(memory)
    def copy_tail(original: Any, parent: Request, child: Request, **kwargs: Any) -> None:
        first = child.shared_pages * memory.page_size
        if bench.due and first < parent.cached_len:
            bench.inject(request=child, slot=int(memory.req_to_token[child.row, first]), position=first)
            return
        original(parent, child, **kwargs)


@fault(reference="S#38140", configs=("twins", "twins_swa"), benign=True, warm_up=(0, 20))
def dedup_remap(bench: Bench) -> None:
    """No fault: equal pages are merged, a request moves to the tree's slots and frees its own."""
    engine = bench.engine

    @bench.between_steps()
    def act() -> bool:
        for request in list(engine.scheduler.running):
            before = engine.counters.deduplicated_pages
            engine.memory.cache.insert(request)
            if engine.counters.deduplicated_pages > before:
                bench.inject(request=request)
        return False
