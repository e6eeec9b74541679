"""A recorder for an engine of blocks, which is shown what the engine has and works out the slots' history from it."""

import secrets
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...kernels.arrays import Int64Array
from ...kernels.constants import KV_ALIGN_BYTES
from ..trace.header import EngineInfo, KvStream, ModelInfo, NotWatched, Oracle, PoolGroup, StateTable, TraceHeader
from ..trace.schema import ALLOC_CACHED, MOVED, REWOUND, TIER_POOL, Mode
from .attention import paged_read
from .block_use import BlockChange, BlockUse, ShownBlocks, without
from .forward_input import AttentionInput, BlockTable, ForwardInput, TableRead, mode_by_lens, truth_tokens
from .host_arrays import own_int64
from .kv_layers import LayerPlaces
from .kv_tensor import KvTensor
from .privacy import IdentityValue
from .recorder import Recorder
from .recording import guarded
from .slot_numbers import request_id_of

Layers = Mapping[int, Any]  # a tensor for each layer
MOST_KNOWN: Final = 1 << 16  # requests of which it is known that their names have been recorded
DERIVED: Final = (
    "the slot history is derived: by comparing block tables, prefix cache and free list, as the engine shows them before each "
    "forward, with what it showed before"
)


class PagedRecorder(Recorder):
    """Records an engine with one pool of blocks; `before_step` and `after_forward` are called for each forward.

    Args:
        path: the trace to write.
        engine: which engine it is.
        keys: K of each layer that is looked at: `{layer: tensor}`, all of one layout, type and size.
        values: V likewise; None if there is none (MLA).
        watched: layers of these of which each token's leading bytes are kept; None: all.
        all_layers: whether 16 bytes of one of all the layers are kept of each slot besides, and what is written is searched for
            NaN, infinity and rows of zeros; None: if the layers lie on the host.
        axes: the tensors' axes by name, as `KvTensor` has them: "block slot head dim".
        block_size: slots of a block.
        max_requests: the most requests of a forward.
        max_len: the most tokens of a request.
        num_layers: layers of the model, those not watched included; 0 if unknown.
        model: which model runs.
        capture_bytes: leading bytes of each token to keep, of each layer, a multiple of 16.
        host_blocks: blocks of a tier on the host, which `kv_copy` names.
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
        watched: Collection[int] | None = None,
        all_layers: bool | None = None,
        max_requests: int,
        max_len: int,
        num_layers: int = 0,
        model: ModelInfo | None = None,
        capture_bytes: int = KV_ALIGN_BYTES,
        padding_blocks: Collection[int] = (),
        host_blocks: int = 0,
        oracle: Oracle | None = None,
        blocks: Callable[[], BlockUse] | None = None,
        **options: Any,
    ) -> None:
        halves = {"K": keys} if values is None else {"K": keys, "V": values}
        kept = list(keys) if watched is None else [layer for layer in keys if layer in watched]
        if not kept or len(kept) < len(watched or ()):
            raise ValueError(f"watched is {watched}, expected some of the layers of keys: {list(keys)}")
        sources = [KvTensor(tensor=tuple(of[layer] for layer in kept), axes=axes) for of in halves.values()]
        streams = [
            source.stream(half, layers=tuple(kept), capture_bytes=capture_bytes)
            for half, source in zip(halves, sources, strict=True)
        ]
        sizes = dict(zip(axes.split(), sources[0].tensors[0].shape, strict=True))
        if "block" in sizes and int(sizes["slot"]) != block_size:
            raise ValueError(
                f"block_size is {block_size}, expected {sizes['slot']}: slots of a block by the axes {axes!r}"
            )
        unseen = ""
        if all_layers or (all_layers is None and not sources[0].on_device):
            try:
                sampled = _samples(halves, axes)
            except ValueError as error:
                unseen = str(error)
            else:
                streams += [stream for stream, _ in sampled]
                sources += [source for _, source in sampled]
        padding = [block * block_size + offset for block in padding_blocks for offset in range(block_size)]
        group = PoolGroup(
            name="full",
            num_slots=sources[0].num_slots,
            page_size=block_size,
            halves=tuple(halves),
            streams=tuple(streams),
            padding_slots=tuple(padding),
            num_layers=num_layers,
            host_num_slots=host_blocks * block_size,
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
            not_watched=(NotWatched(what="bytes", name="all layers", reason=unseen),) if unseen else (),
        )
        self._block_size, self._max_len, self._ask = block_size, max_len, blocks
        self._blocks = ShownBlocks(padding_blocks)
        self._known: dict[Hashable, None] = {}  # requests whose names have been recorded, the first first
        self._ended: set[Hashable] = set()  # that are said to be over, and had blocks when these were shown last
        self._preempted: set[Hashable] = set()  # likewise
        self._ends: dict[Hashable, int] = {}  # of those that have blocks, how far their last forward went
        super().__init__(path, header, kv_sources={(0, n): s for n, s in enumerate(sources)}, **options)

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
        part: int = 0,
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
            part: of a step that is told as several forwards, how many of them were told before this one.
        """
        named: Sequence[Any] = requests
        if odd := [request for request in named if not isinstance(request, Hashable)]:
            raise TypeError(f"requests has {odd[0]!r}, expected names or numbers")
        numbers = [-1 if request is None else self._see(request) for request in requests]
        prefix, extend = own_int64(prefix_lens, "prefix_lens"), own_int64(extend_lens, "extend_lens")
        if prefix.min(initial=0) < 0:
            raise ValueError(f"prefix_lens has {prefix.min()}, expected how many tokens are in the cache")
        longest = int((prefix + extend).max(initial=0)) if prefix.size == extend.size else 0
        if longest > self._max_len:
            raise ValueError(f"a request has {longest} tokens, expected at most max_len, {self._max_len}")
        slots = own_int64(slots, "slots")
        if self._ask is not None:
            use = self._ask()
            if not isinstance(use, BlockUse):
                raise TypeError(f"blocks returned a {type(use).__name__}, expected a BlockUse")
            begins = dict(zip(requests, prefix.tolist(), strict=False))
            self._preempted |= {request for request, begin in begins.items() if self._begins_anew(request, begin, use)}
            kept = {request: -(-begin // self._block_size) for request, begin in begins.items()}
            self._show(use, slots, kept)
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
                part=part,
            )
        )

    @guarded
    def kv_copy(self, /, **copy: Any) -> None:
        """As `Recorder.kv_copy`; of one into the pool it is recorded first what has been given out by now."""
        if self._ask is not None and copy.get("dst_tier", TIER_POOL) == TIER_POOL:
            self._show(self._ask(), np.empty(0, np.int64))
        super().kv_copy(**copy)

    @guarded
    def moved(self, blocks: Mapping[int, int]) -> None:
        """Say that blocks were moved, all at once: what was in each is in the one that it leads to, and whoever had it has that.

        To be called when the engine has moved and renumbered them, before the next step. Where a block that is not moved
        stood, another may stand now; what was there is lost.
        """
        there = {int(src): int(dst) for src, dst in blocks.items() if src != dst}
        if len({*there.values()}) < len(there):
            raise ValueError(f"blocks moves several blocks to one: {there}")
        self._blocks.move(there)
        starts = np.array([*there.items()], np.int64).reshape(-1, 2).T * self._block_size
        counts = np.full(len(there), self._block_size)
        if len(there):
            super().kv_copy(group=0, src=starts[0], dst=starts[1], count=counts, note=MOVED)

    @guarded
    def declare(self, request: Hashable, identity: Sequence[IdentityValue]) -> None:
        """Say what a request's KV depends on beside its tokens, before its first step, and anew whenever that changes.

        Each kind of `IdentityValue` that the engine has should be among them, with "" where this request has none: what is not
        declared is judged by nothing, and the verdict says so.
        """
        self._known.pop(request, None)
        self._see(request, tuple(identity))

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

    @guarded
    def rewound(self, request: Hashable) -> None:
        """Say that a running request goes on from fewer tokens than it had, in the blocks that it has: some were taken back.

        To be called behind `sampled` of the step whose tokens are the last that were taken back, before the next step.
        """
        if self._ends.pop(request, None) is not None or self._ask is None:
            self.request_status(request_id=_number(request), status="admitted", note=REWOUND)

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

    def _show(self, use: BlockUse, slots: Int64Array, kept: Mapping[Hashable, int] | None = None) -> None:
        if not self._forwards and not self._blocks.requests() and (held := list(use.cached)):
            self.start_over("the engine had run before, its prefix cache is not empty")
            self._blocks.begin(held)
            use = use._replace(cached=held)
        written = set((slots[slots >= 0] // self._block_size).tolist())
        again = self._preempted & self._blocks.requests() & use.tables.keys()
        self._preempted.clear()
        if again:
            self._take_over(without(use, again), written, kept)
        self._take_over(use, written, kept)

    def _take_over(self, use: BlockUse, written: Collection[int], kept: Mapping[Hashable, int] | None) -> None:
        before = self._blocks.requests()
        changes = self._blocks.compare(use, written, kept)
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
        """Say whether a request computes again what it has computed: its blocks were taken from it meanwhile, and others given."""
        end, size = self._ends.get(request, 0), self._block_size
        return begin < end and self._blocks.was_taken_from(request, -(-end // size), -(-begin // size), use)

    def _see(self, request: Hashable, identity: Sequence[IdentityValue] = ()) -> int:
        """Return a request's number, and record its name, with what it declares, when it is new."""
        number = _number(request)
        if request not in self._known:
            if len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]  # of the first; a name that is recorded twice does no harm
            self._known[request] = None
            self.request(request_id=number, name=str(request), identity=identity)
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
                note=change.note,
            )


def _samples(halves: Mapping[str, Layers], axes: str) -> list[tuple[KvStream, KvTensor]]:
    """Return what samples all layers of each half, with where they lie; raise a `ValueError` if they do not lie alike."""
    found, seed = [], secrets.randbits(32)
    for half, layers in halves.items():
        source = KvTensor(tensor=tuple(layers.values()), axes=axes)
        LayerPlaces.of(source)
        found.append((source.sampling_stream(half, layers=tuple(layers), seed=seed), source))
    return found


def _number(request: Hashable) -> int:
    return request if isinstance(request, int) and request >= 0 else request_id_of(str(request))
