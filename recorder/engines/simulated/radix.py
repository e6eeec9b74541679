"""The prefix cache's tree: one node a page of tokens, lock counts, least recently used leaves first out."""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ....kernels.arrays import Int32Array
from .config import BrokenEngineError

NO_PAGE = -1


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One page of a cached prefix; exactly one of `page` and `host_page` is set, except in the root."""

    key: bytes
    parent: "Node | None"
    page: int  # in the pool
    last_used: int
    depth: int
    children: dict[bytes, "Node"] = field(default_factory=dict)
    host_page: int = NO_PAGE  # in the host tier
    lock: int = 0  # requests that stand on this node or below it
    live_children: int = 0  # children with a page in the pool
    windowed: bool = False  # the page's sliding-window half is still there
    window_lock: int = 0  # requests that need that half


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserted:
    """What came of putting a prefix into the tree, page by page."""

    nodes: list[Node] = field(default_factory=list)  # the path below where it began
    new: list[Node] = field(default_factory=list)
    # (page index, the page brought along) if the tree had the prefix in another page.
    duplicates: list[tuple[int, int]] = field(default_factory=list)
    taken: list[Node] = field(default_factory=list)  # had a host page only, and took the one brought along


class UseQueue:
    """Nodes that may go, the one used longest ago first; what changed since one was queued shows when its turn comes."""

    def __init__(self, may_go: Callable[[Node], bool]) -> None:
        self._may_go = may_go
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._entries = itertools.count()

    def __contains__(self, node: Node) -> bool:
        return node in self._queued

    def offer(self, node: Node) -> None:
        """Queue a node if it may go now."""
        if node not in self._queued and self._may_go(node):
            self._queued.add(node)
            heapq.heappush(self._heap, (node.last_used, next(self._entries), node))

    def pop(self) -> Node | None:
        """Return the node used longest ago of those that may go, or None."""
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            self._queued.remove(node)
            if self._may_go(node):
                if used == node.last_used:
                    return node
                self.offer(node)  # used since it was queued
        return None


class RadixTree:
    """The tree itself: it knows pages as numbers and touches no pool. `leaves` are the nodes whose page may go,
    `windows` those whose sliding-window half may.
    """

    def __init__(self, *, page_size: int, lookahead: int) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.root = Node(key=b"", parent=None, page=0, last_used=0, depth=0)
        self.leaves = UseQueue(self.evictable)
        self.windows = UseQueue(lambda node: node.windowed and not node.window_lock and node.parent is not None)
        self._tick = 0

    def key(self, raw: bytes, index: int) -> bytes:
        """Return the key of page `index` of a token sequence's bytes (int32): its tokens, and the look-ahead."""
        size = 4 * self.page_size
        return raw[index * size : (index + 1) * size + 4 * self.lookahead]

    def whole_pages(self, num_tokens: int) -> int:
        """Return how many pages of a sequence of that many known tokens have a key."""
        return max(0, num_tokens - self.lookahead) // self.page_size

    def match(self, tokens: Int32Array, max_pages: int, space: str = "") -> list[Node]:
        """Return the path of the longest cached prefix of at most `max_pages` pages, and mark it as used.

        What was inserted in another `space` is not found.
        """
        self._tick += 1
        raw = tokens.tobytes()
        node, path = self.root, []
        for index in range(min(max_pages, self.whole_pages(len(tokens)))):
            child = node.children.get(self.key(raw, index) + _space(node, space))
            if child is None:
                break
            child.last_used = self._tick
            path.append(child)
            node = child
        return path

    def insert(self, tokens: Int32Array, pages: list[int], *, below: Node | None = None, space: str = "") -> Inserted:
        """Put a prefix into the tree, `pages[i]` holding its i-th page below the node `below` (None: from the root).
        What the tree has already stays. `below` must stand for the tokens before.
        """
        self._tick += 1
        done = Inserted()
        node = self.root if below is None else below
        first = node.depth
        raw = tokens[first * self.page_size :].tobytes()
        for index, page in enumerate(pages):
            key = self.key(raw, index) + _space(node, space)
            child = node.children.get(key)
            if child is None:
                child = Node(key=key, parent=node, page=page, last_used=self._tick, depth=node.depth + 1)
                node.children[key] = child
                node.live_children += 1
                done.new.append(child)
            elif child.page == NO_PAGE:
                child.page = page
                node.live_children += 1
                done.taken.append(child)
            elif child.page != page:
                done.duplicates.append((first + index, page))
            child.last_used = self._tick
            done.nodes.append(child)
            node = child
        self.leaves.offer(node)
        return done

    def lock(self, node: Node | None, *, below: Node | None = None) -> None:
        """Hold a node and all above it in place, down to `below`, which is held already."""
        while node is not None and node is not below:
            node.lock += 1
            node = node.parent

    def unlock(self, node: Node | None) -> None:
        """Let go of what `lock` held."""
        while node is not None:
            node.lock -= 1
            if node.lock < 0:
                raise BrokenEngineError(f"the prefix cache: page {node.page} is unlocked more often than locked")
            self.leaves.offer(node)
            node = node.parent

    def evictable(self, node: Node) -> bool:
        """Whether a node's page may go: nobody stands on it, nothing in the pool hangs below it."""
        return node.lock == 0 and node.live_children == 0 and node.page != NO_PAGE and node.parent is not None

    def drop(self, node: Node) -> None:
        """Take a node out of the tree."""
        self.leave_pool(node)
        parent = node.parent
        if parent is None or node.children:
            raise BrokenEngineError("the prefix cache: a node is dropped that is the root or has children")
        del parent.children[node.key]
        node.parent = None

    def leave_pool(self, node: Node) -> None:
        """Note that a node's page is no longer the node's."""
        if node.page != NO_PAGE and node.parent is not None:
            node.page = NO_PAGE
            node.parent.live_children -= 1
            self.leaves.offer(node.parent)

    def walk(self) -> Iterator[Node]:
        """Yield every node below the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _space(node: Node, space: str) -> bytes:
    """Return what tells the spaces apart in the keys of the first pages, below the root."""
    return b"" if node.depth else space.encode()


def window_prefix(nodes: list[Node], *, page_size: int, window: int) -> int:
    """Return how many of a path's nodes a sliding-window layer can go on from: those before the end are all there."""
    last_gap, usable = -1, 0
    for index, node in enumerate(nodes):
        if not node.windowed:
            last_gap = index
        if last_gap < max(0, (index + 1) * page_size - window) // page_size:
            usable = index + 1
    return usable
