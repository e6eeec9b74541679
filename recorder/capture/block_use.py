"""Who has which blocks, as an engine shows it, and what has changed hands between two looks at that."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..trace.schema import ALLOC_CACHED, ALLOC_FRESH, ALLOC_SHARED, STILL_USED, AllocStatus, SlotChange

_CACHED: Final = object()  # in place of a request: what holds a block is the prefix cache,
_SHARED: Final = object()  # or several requests


class BlockUse(NamedTuple):
    """Who has which blocks now.

    `tables` has each request's blocks in order of position, the waiting ones included if they have any; a request is what
    `before_step` calls it: its name, or a number from 0 on. `cached` are the blocks that the prefix cache would lend, `free` is
    the free list, which may have cached ones on it; None if the engine has none: then a block that nobody has is free.
    `counts` says by how many users the engine counts a block as used, 0 for one that is not in it; None if it does not count.
    """

    tables: Mapping[Hashable, Sequence[int]]
    cached: Iterable[int] = ()
    free: Iterable[int] | None = None
    counts: Mapping[int, int] | None = None


class BlockChange(NamedTuple):
    """Blocks that changed hands alike, since the engine showed them last."""

    kind: SlotChange
    status: AllocStatus
    request: Hashable | None
    blocks: list[int]
    note: str = ""


class ShownBlocks:
    """Which request uses which block, as the engine showed it last; `padding` are blocks that are nobody's.

    A block is free if nobody uses it, the cache does not hold it and the free list, where one is shown, has it. What nobody
    has is left where it was: it has leaked. One of which several begin to use the same place of their tables, or which is
    cached, is shared; else it was given out twice.
    """

    def __init__(self, padding: Iterable[int] = ()) -> None:
        self._padding = frozenset(padding)
        self._tables: dict[Hashable, list[int]] = {}
        self._grown: set[tuple[Hashable, int]] = set()  # requests that had others before, and blocks behind these
        # Requests that had others before, and blocks in the place of one of these; what nobody gave is left in the end.
        self._replaced: dict[tuple[Hashable, int], int] = {}
        self._users: dict[int, dict[Hashable, int]] = {}  # of a block, each user's place for it
        self._holders: dict[int, Any] = {}  # of a block that is not free: a request, _CACHED or _SHARED
        self._cached: set[int] = set()
        self._free: set[int] = set()
        self._astray: set[int] = set()  # blocks that nobody has and that are not free

    def begin(self, cached: Iterable[int]) -> None:
        """Take over a prefix cache that was there before."""
        self._cached = set(cached)
        self._holders = dict.fromkeys(self._cached, _CACHED)

    def requests(self) -> set[Hashable]:
        """Return who uses blocks."""
        return set(self._tables)

    def move(self, blocks: Mapping[int, int]) -> None:
        """Call blocks by other numbers from now on; those whose places are taken by others get the places that are left."""
        left, taken = (
            sorted(a - b) for a, b in ((blocks.keys(), {*blocks.values()}), ({*blocks.values()}, blocks.keys()))
        )
        to = {**blocks, **dict(zip(taken, left, strict=True))}
        self._tables = {request: [to.get(block, block) for block in table] for request, table in self._tables.items()}
        self._grown = {(request, to.get(block, block)) for request, block in self._grown}
        self._users = {to.get(block, block): users for block, users in self._users.items()}
        self._holders = {to.get(block, block): holder for block, holder in self._holders.items()}
        self._cached, self._free, self._astray = (
            {to.get(block, block) for block in known} for known in (self._cached, self._free, self._astray)
        )

    def was_taken_from(self, request: Hashable, blocks: int, kept: int, now: BlockUse) -> bool:
        """Say whether a request has other blocks, or fewer, for the first `blocks` of its table, all of which it had filled.

        Not so if it goes on from `kept` blocks that the prefix cache does not lend: then it has them still.
        """
        before, shown = self._tables.get(request, [])[:blocks], [*now.tables.get(request, ())][:blocks]
        return before != shown and set(shown[:kept]) <= set(now.cached)

    def compare(
        self, now: BlockUse, written: Collection[int] = (), kept: Mapping[Hashable, int] | None = None
    ) -> list[BlockChange]:
        """Return what has changed hands since the last call, in the order in which it may be recorded.

        `written` are blocks that the forward writes: one that a running request has behind its others, and that is the prefix
        cache's, was lent to nobody who writes it. `kept` are how many of its blocks each request goes on from: others that it took
        from the free list were given out anew, whatever the cache still says of them.
        """
        joined, left = self._compare_tables(now.tables)
        self._grown = {(request, block) for request, block in self._grown if block in written}
        now_cached, now_free = set(now.cached), None if now.free is None else set(now.free)
        # Where it had something that nobody has now, and gets what others have or what is free, its table was written over.
        self._replaced = {
            (request, block): old
            for (request, block), old in self._replaced.items()
            if now_free is not None
            and (block in now_free or (self._holders.get(block) is not None and len(self._users[block]) > 1))
            and not (old in now_free or old in now_cached or self._users.get(old))
        }
        changed = joined.keys() | left.keys() | (now_cached ^ self._cached) | self._astray
        changed |= {block for block in self._cached & self._users.keys() if self._holders.get(block) is not _CACHED}
        changed |= now_free & self._users.keys() if now_free is not None else set()
        found: dict[tuple[int, SlotChange, AllocStatus, Hashable | None], list[int]] = {}
        roomy = bool(self._free & (now_free or set()))  # the allocator never ran dry meanwhile
        for block in sorted(changed):
            is_free = None if now_free is None else block in now_free
            begins = joined.get(block, [])
            if (
                is_free is False
                and block in self._free
                and block in now_cached
                and self._given_anew(block, begins, kept or {})
            ):
                found.setdefault((1, "evict", ALLOC_FRESH, None), []).append(block)
                del self._holders[block]
            filling = {one for one in begins if kept and one in kept and self._users[block][one] >= kept[one]}
            moves = self._moves(block, begins, left.get(block), block in now_cached, is_free, roomy, filling)
            for move in moves:
                found.setdefault(move, []).append(block)
        self._cached, self._free = now_cached, now_free or set()
        ordered = sorted(found.items(), key=lambda item: item[0][0])
        return [BlockChange(*move[1:], blocks) for move, blocks in ordered] + self._still_used(left, now.counts)

    def _still_used(self, left: Mapping[int, Hashable], counts: Mapping[int, int] | None) -> list[BlockChange]:
        """Return the cached blocks that somebody has left, and whose users the engine counts more of than there are."""
        if not counts:
            return []
        found: dict[Hashable, list[int]] = {}
        for block in sorted(left.keys() & self._cached):
            if counts.get(block, 0) > len(self._users.get(block, {})):
                found.setdefault(left[block], []).append(block)
        return [BlockChange("alloc", ALLOC_CACHED, one, blocks, STILL_USED) for one, blocks in found.items()]

    def _given_anew(self, block: int, joined: list[Hashable], kept: Mapping[Hashable, int]) -> bool:
        """Say whether a block that the cache held alone was given to be filled to who has it now, and not lent."""
        users, cached = self._users.get(block, {}), self._holders.get(block) is _CACHED
        if not joined or not cached or len(users) > len(joined):
            return False
        anew = all(request in kept and users[request] >= kept[request] for request in joined)
        self._grown -= {(request, block) for request in joined if anew}
        return anew

    def _compare_tables(
        self, tables: Mapping[Hashable, Sequence[int]]
    ) -> tuple[dict[int, list[Hashable]], dict[int, Hashable]]:
        """Take over the tables; return for blocks who has begun to use them, and who has stopped."""
        joined: dict[int, list[Hashable]] = {}
        left: dict[int, Hashable] = {}
        self._grown.clear()
        self._replaced.clear()
        for request in (*(gone for gone in self._tables if gone not in tables), *tables):
            before, now = self._tables.get(request, []), list(tables.get(request, ()))
            if now == before:
                continue
            places = {block: n for n, block in enumerate(now) if block >= 0 and block not in self._padding}
            for block in before:
                if block not in places and self._users.get(block, {}).pop(request, None) is not None:
                    left[block] = request
                    if not self._users[block]:
                        del self._users[block]
            for block, place in places.items():
                users = self._users.setdefault(block, {})
                if request not in users:
                    joined.setdefault(block, []).append(request)
                    if before and place >= len(before):
                        self._grown.add((request, block))
                    elif before:
                        self._replaced[request, block] = before[place]
                users[request] = place
            self._tables[request] = now
            if not now:
                del self._tables[request]
        return joined, left

    def _moves(
        self,
        block: int,
        joined: list[Hashable],
        left: Hashable | None,
        is_cached: bool,
        is_free: bool | None,
        roomy: bool,
        filling: Collection[Hashable],
    ) -> Iterator[tuple[int, SlotChange, AllocStatus, Hashable | None]]:
        """Yield what has become of a block, and move on its holder; the number first is when it may be recorded.

        `filling` are those of `joined` that have yet to compute what stands in the block.
        """
        users, holder = self._users.get(block, {}), self._holders.get(block)
        stayed = users.keys() - set(joined)
        owner = holder if holder is not _CACHED and holder is not _SHARED else left
        # An engine may count a block as cached before the forward that fills it: it is the cache's one showing later.
        if is_cached and holder is not None and holder is not _CACHED and (not stayed or block in self._cached):
            yield 0, "alloc", ALLOC_CACHED, owner
            holder = _CACHED
        elif is_cached and holder is None and not users and block not in self._cached:
            yield 0, "alloc", ALLOC_CACHED, None  # the cache names what is free
        evicted = holder is _CACHED and not is_cached
        places = {users[other] for other in stayed}
        elsewhere = any(request in filling or users[request] not in places for request in joined)
        if (evicted and stayed and elsewhere) or (holder is not None and users and is_free):
            # Given back, or given out anew for another place, and used all the same. Nobody evicts while there is room.
            yield 1, "evict" if evicted and not (is_free and roomy) else "free", ALLOC_FRESH, None
            holder = None
        elif holder is not None and not is_cached and not stayed and (users or is_free is not False):
            yield 1, "evict" if holder is _CACHED else "free", ALLOC_FRESH, None if holder is _CACHED else owner
            holder = None
        for request in joined:
            others = [place for other, place in users.items() if other != request]
            if (request, block) in self._replaced or (is_cached and (request, block) in self._grown):
                continue  # its table names it, and nobody gave it
            if holder is not None and (holder is _CACHED or is_cached or users[request] in others):
                yield 3, "alloc", ALLOC_SHARED, request
                holder = holder if holder is _CACHED else _SHARED
            else:
                yield 2, "alloc", ALLOC_FRESH, request
                holder = request
        if holder is None:
            self._holders.pop(block, None)
        else:
            self._holders[block] = holder
        (self._astray.discard if users or is_cached or holder is None else self._astray.add)(block)


def without(use: BlockUse, requests: Collection[Hashable]) -> BlockUse:
    """Return who has which blocks without some requests: what they alone have is free."""
    tables = {request: blocks for request, blocks in use.tables.items() if request not in requests}
    if use.free is None:
        return use._replace(tables=tables)
    others = {block for blocks in tables.values() for block in blocks} | set(use.cached)
    own = {block for request in requests for block in use.tables[request]} - others
    return use._replace(tables=tables, free=[*use.free, *own])
