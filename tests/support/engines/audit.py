"""The engine's books, checked against one another: every page in exactly one hand, every lock with an owner."""

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from kvcanary.recorder.engines.simulated.radix import NO_PAGE, Node

if TYPE_CHECKING:
    from kvcanary.recorder.engines.simulated.engine import SimulatedEngine


def audit(engine: "SimulatedEngine") -> list[str]:
    """Return what does not add up between two steps of a clean engine, in words; nothing where all is well."""
    return _rows(engine) + _pages(engine) + _locks(engine) + _tables(engine)


def _rows(engine: "SimulatedEngine") -> list[str]:
    rows = engine.scheduler.free_rows + [request.row for request in engine.scheduler.active]
    if sorted(rows) != list(range(1, engine.config.rows)):
        return [f"rows free or held are {sorted(rows)}, expected each of 1 to {engine.config.rows - 1} once"]
    return []


def _pages(engine: "SimulatedEngine") -> list[str]:
    memory, found = engine.memory, []
    nodes = list(memory.cache.tree.walk())
    cached = [node.page for node in nodes if node.page != NO_PAGE]
    own = [memory.row_pages(r.row, r.shared_pages, memory.pages_for(r.allocated_len)) for r in engine.scheduler.active]
    held = np.sort(np.concatenate([np.array(cached, np.int64), *own]))
    if not np.array_equal(held, memory.allocator.held_pages()):
        found.append(f"pages of requests and tree are {held.tolist()}, held {memory.allocator.held_pages().tolist()}")
    if memory.allocator.free_pages + held.size != engine.config.num_pages:
        found.append(f"{memory.allocator.free_pages} pages are free, {held.size} held, of {engine.config.num_pages}")
    host = sorted(node.host_page for node in nodes if node.host_page != NO_PAGE)
    if host != memory.host.pages.held_pages().tolist():
        found.append(f"host pages of the tree are {host}, held {memory.host.pages.held_pages().tolist()}")
    if memory.swa is not None:
        paired = memory.swa.paired(held)
        if sorted(paired[paired > 0].tolist()) != memory.swa.pages.held_pages().tolist():
            found.append("the full-to-SWA table and the sliding-window pool disagree on the pages held")
        if int(np.count_nonzero(memory.lut)) != int(np.count_nonzero(paired)) * memory.page_size:
            found.append("the full-to-SWA table has entries for pages that nobody holds")
        if [n.page for n in nodes if n.windowed != bool(memory.swa.paired(np.array([n.page]))[0])]:
            found.append("a node says that its sliding-window half is there and it is not, or the other way round")
    return found


def _locks(engine: "SimulatedEngine") -> list[str]:
    locks: Counter[int] = Counter()
    windows: Counter[int] = Counter()
    live: Counter[int] = Counter()
    for request in engine.scheduler.active:
        node: Node | None = request.node
        while node is not None:
            locks[id(node)] += 1
            node = node.parent
        windows.update(id(node) for node in request.window_nodes)
    nodes = list(engine.memory.cache.tree.walk())
    live.update(id(node.parent) for node in nodes if node.page != NO_PAGE)
    wrong = [
        f"the node of page {node.page} has lock {node.lock}, window lock {node.window_lock}, {node.live_children} live "
        f"children, expected {locks[id(node)]}, {windows[id(node)]}, {live[id(node)]}"
        for node in nodes
        if (node.lock, node.window_lock, node.live_children) != (locks[id(node)], windows[id(node)], live[id(node)])
    ]
    tree = engine.memory.cache.tree
    wrong += [
        f"the node of page {node.page} may be evicted and is not queued for it"
        for node in nodes
        if (tree.evictable(node) and node not in tree.leaves)
        or (node.windowed and not node.window_lock and node not in tree.windows)
    ]
    return wrong + [f"page {n.page} is neither in the pool nor in the host tier, or in both" for n in nodes if _lost(n)]


def _lost(node: Node) -> bool:
    return (node.page == NO_PAGE) == (node.host_page == NO_PAGE)


def _tables(engine: "SimulatedEngine") -> list[str]:
    memory, found = engine.memory, []
    for request in engine.scheduler.active:
        path: list[int] = []
        node = request.node
        while node is not None and node.parent is not None:
            path.append(node.page)
            node = node.parent
        shared = memory.row_pages(request.row, 0, request.shared_pages).tolist()
        if shared != path[::-1]:
            found.append(f"row {request.row} begins with pages {shared}, the tree has {path[::-1]}")
        if memory.swa is not None and request.cached_len:
            first = max(0, request.cached_len - memory.swa.window)
            slots = memory.req_to_token[request.row, first : request.cached_len]
            if not memory.lut[slots].all():
                found.append(f"row {request.row} has no sliding-window half for a position in its window")
    return found
