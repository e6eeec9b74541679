"""A recorder for an engine of blocks, which is shown what the engine has and works out the slots' history from it."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.constants import KV_ALIGN_BYTES
from ..trace.header import EngineInfo, ModelInfo, Oracle, PoolGroup, StateTable, TraceHeader
from ..trace.schema import ALLOC_CACHED, ALLOC_FRESH, ALLOC_SHARED, AllocStatus, Mode, SlotChange
from .attention import paged_read
from .forward_input import AttentionInput, BlockTable, ForwardInput, TableRead, mode_by_lens, truth_tokens
from .host_arrays import own_int64
from .kv_tensor import KvTensor
from .recorder import Recorder
from .recording import guarded
from .slot_numbers import request_id_of

Layers = Mapping[int, Any]  # a tensor for each layer that is watched
_CACHED: Final = object()  # in place of a request: what holds a block is the prefix cache,
_SHARED: Final = object()  # or several requests
MOST_KNOWN: Final = 1 << 16  # requests whose names have been recorded
DERIVED: Final = (
    "the slot history is derived: by comparing block tables, prefix cache and free list, as the engine shows them before each "
    "forward, with what it showed before"
)


class BlockUse(NamedTuple):
    """Who has which blocks now.

    `tables` has each request's blocks in order of position, the waiting ones included if they have any; a request is what
    `before_step` calls it: its name, or a number from 0 on. `cached` are the blocks that the prefix cache would lend, `free` is
    the free list, which may have cached ones on it; None if the engine has none: then a block that nobody has is free.
    """

    tables: Mapping[Hashable, Sequence[int]]
    cached: Iterable[int] = ()
    free: Iterable[int] | None = None


class BlockChange(NamedTuple):
    """Blocks that changed hands alike, since the engine showed them last."""

    kind: SlotChange
    status: AllocStatus
    request: Hashable | None
    blocks: list[int]


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

    def has_other(self, request: Hashable, place: int, now: BlockUse) -> bool:
        """Say whether the block at a place of a request's table is another one now, or none; it was some block before."""
        before, shown = self._tables.get(request, []), now.tables.get(request, ())
        return place < len(before) and before[place] not in shown[place : place + 1]

    def compare(self, now: BlockUse, written: Collection[int] = ()) -> list[BlockChange]:
        """Return what has changed hands since the last call, in the order in which it may be recorded.

        `written` are blocks that the forward writes: one that a running request has behind its others, and that is the prefix
        cache's, was lent to nobody who writes it.
        """
        joined, left = self._compare_tables(now.tables)
        self._grown = {(request, block) for request, block in self._grown if block in written}
        now_cached, now_free = set(now.cached), None if now.free is None else set(now.free)
        changed = joined.keys() | left.keys() | (now_cached ^ self._cached) | self._astray
        changed |= {block for block in self._cached & self._users.keys() if self._holders.get(block) is not _CACHED}
        changed |= now_free & self._users.keys() if now_free is not None else set()
        found: dict[tuple[int, SlotChange, AllocStatus, Hashable | None], list[int]] = {}
        roomy = bool(self._free & (now_free or set()))  # the allocator never ran dry meanwhile
        for block in sorted(changed):
            is_free = None if now_free is None else block in now_free
            moves = self._moves(block, joined.get(block, []), left.get(block), block in now_cached, is_free, roomy)
            for move in moves:
                found.setdefault(move, []).append(block)
        self._cached, self._free = now_cached, now_free or set()
        ordered = sorted(found.items(), key=lambda item: item[0][0])
        return [BlockChange(*move[1:], blocks) for move, blocks in ordered]

    def _compare_tables(
        self, tables: Mapping[Hashable, Sequence[int]]
    ) -> tuple[dict[int, list[Hashable]], dict[int, Hashable]]:
        """Take over the tables; return for blocks who has begun to use them, and who has stopped."""
        joined: dict[int, list[Hashable]] = {}
        left: dict[int, Hashable] = {}
        self._grown.clear()
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
    ) -> Iterator[tuple[int, SlotChange, AllocStatus, Hashable | None]]:
        """Yield what has become of a block, and move on its holder; the number first is when it may be recorded."""
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
        elsewhere = any(users[request] not in {users[other] for other in stayed} for request in joined)
        if (evicted and stayed and elsewhere) or (holder is not None and users and is_free):
            # Given back, or given out anew for another place, and used all the same. Nobody evicts while there is room.
            yield 1, "evict" if evicted and not (is_free and roomy) else "free", ALLOC_FRESH, None
            holder = None
        elif holder is not None and not is_cached and not stayed and (users or is_free is not False):
            yield 1, "evict" if holder is _CACHED else "free", ALLOC_FRESH, None if holder is _CACHED else owner
            holder = None
        for request in joined:
            others = [place for other, place in users.items() if other != request]
            if is_cached and (request, block) in self._grown:
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


class PagedRecorder(Recorder):
    """Records an engine with one pool of blocks; `before_step` and `after_forward` are called for each forward.

    Args:
        path: the trace to write.
        engine: which engine it is.
        keys: K of each layer that is watched: `{layer: tensor}`, all of one layout, type and size.
        values: V likewise; None if there is none (MLA).
        axes: the tensors' axes by name, as `KvTensor` has them: "block slot head dim".
        block_size: slots of a block.
        max_requests: the most requests of a forward.
        max_len: the most tokens of a request.
        num_layers: layers of the model, those not watched included; 0 if unknown.
        model: which model runs.
        capture_bytes: leading bytes of each token to keep, of each layer, a multiple of 16.
        padding_blocks: blocks that take writes which nobody reads, and are never given out.
        oracle: the token oracle that samples, if one does: see `oracle_tokens`.
        blocks: returns who has which blocks; it is called before each forward and once more by `close`, and by comparing what it
            shows the slots' history is worked out, which the header says. None: no history is recorded.
        options: those of `Recorder`: `strict`, `kv_watch_every`, `overwrite`, `privacy`, ...

    Raises:
        ValueError: tensors and sizes that do not fit one another.
        TraceError: the file cannot be created.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        engine: EngineInfo,
        keys: Layers,
        values: Layers | None,
        axes: str,
        block_size: int,
        max_requests: int,
        max_len: int,
        num_layers: int = 0,
        model: ModelInfo | None = None,
        capture_bytes: int = KV_ALIGN_BYTES,
        padding_blocks: Collection[int] = (),
        oracle: Oracle | None = None,
        blocks: Callable[[], BlockUse] | None = None,
        **options: Any,
    ) -> None:
        halves = {"K": keys} if values is None else {"K": keys, "V": values}
        sources = {half: KvTensor(tensor=tuple(layers.values()), axes=axes) for half, layers in halves.items()}
        layers = {half: tuple(watched) for half, watched in halves.items()}
        streams = [s.stream(half, layers=layers[half], capture_bytes=capture_bytes) for half, s in sources.items()]
        padding = [block * block_size + offset for block in padding_blocks for offset in range(block_size)]
        group = PoolGroup(
            name="full",
            num_slots=sources["K"].num_slots,
            page_size=block_size,
            halves=tuple(halves),
            streams=tuple(streams),
            padding_slots=tuple(padding),
            num_layers=num_layers,
        )
        notes = ("the engine has no rows: each request is lent one", *((DERIVED,) if blocks else ()))
        header = TraceHeader(
            engine=engine,
            model=model or ModelInfo(),
            groups=(group,),
            tables=(StateTable(rows=max_requests + 1, width=max_len),),
            truth_table=StateTable(name="truth", rows=max_requests + 1, width=max_len),
            slot_history="complete" if blocks else "",
            oracle=oracle,
            notes=notes,
        )
        self._block_size, self._ask = block_size, blocks
        self._blocks = ShownBlocks(padding_blocks)
        self._known: set[Hashable] = set()
        self._ended: set[Hashable] = set()  # that are said to be over, and had blocks when these were shown last
        self._preempted: set[Hashable] = set()  # likewise
        self._ends: dict[Hashable, int] = {}  # of those that have blocks, how far their last forward went
        super().__init__(path, header, kv_sources={(0, n): s for n, s in enumerate(sources.values())}, **options)

    @guarded
    def before_step(
        self,
        *,
        requests: Sequence[Hashable | None],
        prefix_lens: Any,
        extend_lens: Any,
        input_ids: Any,
        positions: Any,
        slots: Any,
        block_tables: Any = None,
        tokens: Sequence[Sequence[int]] | None = None,
        seq_lens: Any = None,
        query_lens: Any = None,
        mode: Mode | None = None,
    ) -> None:
        """Capture what a forward is about to read and write; `after_forward` completes it.

        Args:
            requests: `[bs]` their names; None for padding, which comes last.
            prefix_lens: `[bs]` tokens in the cache before this forward.
            extend_lens: `[bs]` tokens that this forward adds.
            input_ids: `[T]` as the model gets them, as are `positions`.
            positions: `[T]`.
            slots: `[T]` where each token is written, negative for nowhere.
            block_tables: `[bs, max_blocks]` what attention gets; None if no request has a prefix.
            tokens: each request's tokens so far, as the scheduler has them.
            seq_lens: `[bs]` what attention gets: all tokens of each request, None if that was not observed.
            query_lens: `[bs]` likewise: the tokens that are computed.
            mode: None: by the lengths.
        """
        numbers = [-1 if request is None else self._see(request) for request in requests]
        prefix, extend = own_int64(prefix_lens, "prefix_lens"), own_int64(extend_lens, "extend_lens")
        slots = own_int64(slots, "slots")
        if self._ask is not None:
            use = self._ask()
            begins = dict(zip(requests, prefix.tolist(), strict=False))
            self._preempted |= {request for request, begin in begins.items() if self._begins_anew(request, begin, use)}
            self._show(use, slots)
            ends = dict(zip(requests, (prefix + np.maximum(extend, 0)).tolist(), strict=False))
            self._ends = {request: end for request, end in (self._ends | ends).items() if request in use.tables}
        if not self._forwards and prefix.any():
            self.start_over("the engine had run before")
        attention = None
        if seq_lens is not None or query_lens is not None:
            read = None
            if block_tables is None:  # attention gets K and V themselves, and no slots
                read = TableRead(starts=np.zeros_like(prefix), counts=np.zeros_like(prefix), slots=prefix[:0])
            elif seq_lens is not None:
                read = paged_read(block_tables, self._block_size, seq_lens)
            attention = AttentionInput(seq_lens=seq_lens, query_lens=query_lens, slots=(read,))
        truth = None
        if tokens is not None:
            truth = truth_tokens([own_int64(part, "tokens") for part in tokens], len(numbers))
        self.before_forward(
            ForwardInput(
                mode=mode or mode_by_lens(extend, prefix, 1),
                request_ids=numbers,
                prefix_lens=prefix,
                extend_lens=extend,
                input_ids=input_ids,
                positions=positions,
                out_cache_loc=(slots,),
                reads=(BlockTable(blocks=block_tables, block_size=self._block_size),),
                truth=truth,
                attention=attention,
            )
        )

    @guarded
    def ended(self, request: Hashable) -> None:
        """Say that a request has finished or was aborted; whoever loses its blocks without it may have been preempted."""
        if self._ask is not None:  # else nobody asks, and it would be kept for good
            self._ended.add(request)

    @guarded
    def preempted(self, request: Hashable) -> None:
        """Say that a request's blocks were taken from it; needed only of one that has others by the next forward already."""
        if self._ask is not None:
            self._preempted.add(request)

    def oracle_tokens(self, requests: Sequence[Hashable], seq_lens: Any) -> Int64Array:
        """As `Recorder.oracle_tokens`, of requests by their names."""
        return super().oracle_tokens([_number(request) for request in requests], seq_lens)

    def close(self, timeout: float = 30.0) -> None:
        """As `Recorder.close`; what has changed hands since the last forward is recorded before."""
        if not self.off:
            self._last_look()
        super().close(timeout)

    @guarded
    def _last_look(self) -> None:
        ask, self._ask = self._ask, None
        if ask is None:
            return
        try:
            use = ask()
        except Exception:  # noqa: BLE001  # the engine may be half gone by now
            return
        self._show(use, np.empty(0, np.int64))

    def _show(self, use: BlockUse, slots: Int64Array) -> None:
        if not self._forwards and not self._blocks.requests() and (held := list(use.cached)):
            self.start_over("the engine had run before, its prefix cache is not empty")
            self._blocks.begin(held)
            use = use._replace(cached=held)
        written = set((slots[slots >= 0] // self._block_size).tolist())
        again = self._preempted & self._blocks.requests() & use.tables.keys()
        self._preempted.clear()
        if again:
            self._take_over(_without(use, again), written)
        self._take_over(use, written)

    def _take_over(self, use: BlockUse, written: Collection[int]) -> None:
        before = self._blocks.requests()
        changes = self._blocks.compare(use, written)
        now = self._blocks.requests()
        given = [change for change in changes if change.kind == "alloc" and change.status != ALLOC_CACHED]
        self._record_changes([change for change in changes if change not in given])
        for request in sorted(before - now, key=str):  # else it has ended or was preempted: it may come back
            ended = request in self._ended
            note = "" if ended else "it has no blocks any more"
            self.request_status(request_id=_number(request), status="finished" if ended else "retracted", note=note)
        self._ended &= now
        for request in sorted(now - before, key=str):
            self.request_status(request_id=self._see(request), status="admitted")
        self._record_changes(given)

    def _begins_anew(self, request: Hashable, begin: int, use: BlockUse) -> bool:
        """Say whether a request computes again what it has computed, in other blocks: those were taken from it meanwhile."""
        return begin < self._ends.get(request, 0) and self._blocks.has_other(request, begin // self._block_size, use)

    def _see(self, request: Hashable) -> int:
        """Return a request's number, and record its name when it is new."""
        number = _number(request)
        if request not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()  # a name that is recorded twice does no harm
            self._known.add(request)
            self.request(request_id=number, name=str(request))
        return number

    def _record_changes(self, changes: Sequence[BlockChange]) -> None:
        for change in changes:
            starts = np.array(change.blocks, np.int64) * self._block_size
            self.slots(
                change.kind,
                group=0,
                runs=(starts, np.full(starts.size, self._block_size)),
                request_id=-1 if change.request is None else _number(change.request),
                status=change.status,
            )


def _without(use: BlockUse, requests: Collection[Hashable]) -> BlockUse:
    """Return who has which blocks without some requests: what they alone have is free."""
    tables = {request: blocks for request, blocks in use.tables.items() if request not in requests}
    if use.free is None:
        return use._replace(tables=tables)
    others = {block for blocks in tables.values() for block in blocks} | set(use.cached)
    own = {block for request in requests for block in use.tables[request]} - others
    return use._replace(tables=tables, free=[*use.free, *own])


def _number(request: Hashable) -> int:
    return request if isinstance(request, int) and request >= 0 else request_id_of(str(request))
