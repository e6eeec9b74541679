"""What a KV connector copies between a runner's cache and a storage elsewhere: block by block, with what lies at both ends.

A connector that is known says which blocks it stores and loads, and by which key each lies elsewhere. A key that blocks are
stored under gets a page of the trace's host tier, so that what is loaded from there is known as far as what was stored is. Of
both ends all layers' bytes are hashed, if they lie in the host's memory; the block tables are read as the forward's own are.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .....kernels.arrays import Int64Array
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import CopyEnds, end_hashes, runs_to_slots
from ....capture.recorder import Recorder
from ....trace.schema import TIER_HOST, TIER_POOL
from ...common.hooking import EngineError, Hook, OnFault, while_true, wrap_method
from ..layout import VllmGroup, VllmLayout
from ..step import VllmRequests

Bytes = npt.NDArray[np.uint8]

MAX_HASHED_BYTES: Final = 64 << 20  # at one end of one job's blocks
LATE_STEPS: Final = 16  # in which a block is read again whose load ended and had not landed
MAX_LATE: Final = 64  # such blocks at a time
MAX_ENDED: Final = 256  # loads that have ended and are not recorded yet: the slots of older ones stay unknown
SEARCHES: Final = 16  # for where a load landed instead, in a recording
MAX_SEARCHED_SLOTS: Final = 1 << 20


def as_bytes(tensor: Any) -> Any:
    """Return a tensor of the host's memory as a numpy view of its elements' bits, None for one of a device's."""
    import torch

    if tensor.device.type != "cpu":
        return None
    return tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()


class ExternalSlots(NamedTuple):
    """What is loaded for a request in one group: `slots` `[n] int64` from position `start` on.

    `own` is not set if the slots are the prefix cache's, and loaded anew in passing.
    """

    group: int
    start: int
    slots: Int64Array
    own: bool


class Page(NamedTuple):
    """A block of a group, and the `key` under which its content lies elsewhere."""

    group: VllmGroup
    block: int
    key: Hashable


class Storage(Protocol):
    """What is known of a connector: `num_pages` is how many blocks of a group it can hold, 0 if that is not known."""

    num_pages: int

    def attach(self, copies: "ConnectorCopies") -> None:
        """Have the connector's saves and loads reported to `copies`."""

    def layers_here(self, group: VllmGroup) -> Sequence[Any]:
        """Return the group's layers as arrays `[num_blocks, ...]` with the bytes that are stored of each block; or nothing."""

    def there(self, page: Page) -> Sequence[Bytes] | None:
        """Return what lies elsewhere of a page, an array for each of `layers_here`; None if that cannot be read."""


class LoadJob(NamedTuple):
    """Blocks that are being loaded for a request ("" if it is not known for whom): what lay at both ends before."""

    name: str
    pages: list[Page]
    there: Int64Array
    before: Int64Array


class EndedLoad(NamedTuple):
    """A load that has ended, to be recorded in its turn: what lies in its blocks now, and where it landed instead."""

    load: LoadJob
    here: Int64Array
    landed: Int64Array


class HostPages:
    """The pages of the trace's host tier that stand for keys: of all connectors of an engine, which it knows by `owner`."""

    def __init__(self, layout: VllmLayout) -> None:
        # Of each group: key -> page of the host tier, block that was stored there.
        self._pages: list[OrderedDict[Hashable, tuple[int, int]]] = [OrderedDict() for _ in layout.groups]
        self._limits = [group.host_num_slots // group.block_size - 1 for group in layout.groups]

    def find(self, owner: object, page: Page) -> tuple[int, int]:
        """Return the page that stands for a block's key, and the block that was stored there; zeros for none."""
        return self._pages[page.group.index].get((owner, page.key), (0, 0))

    def give(self, owner: object, page: Page) -> int:
        """Return the page that is to stand for a block's key; the one stored longest ago makes room."""
        pages, key = self._pages[page.group.index], (owner, page.key)
        host, _ = pages.pop(key, (0, 0))
        if not host:
            host = len(pages) + 1 if len(pages) < self._limits[page.group.index] else pages.popitem(last=False)[1][0]
        pages[key] = host, page.block
        return host


class ConnectorCopies:
    """Records what a connector copies."""

    def __init__(
        self,
        storage: Storage,
        layout: VllmLayout,
        requests: VllmRequests,
        recorder: Recorder | DeviceRecorder,
        pages: HostPages | None = None,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._requests = requests
        self._recorder = recorder
        self._pages = HostPages(layout) if pages is None else pages
        self._landed: list[EndedLoad] = []
        self._late: list[tuple[int, LoadJob, int]] = []  # steps left, load, which of its pages
        self._searches = SEARCHES
        self._right: dict[tuple[int, int], int] = {}  # what lay in a block of a group when a load to it ended
        self._failed = False
        self._on_fault: OnFault = lambda _hook, _error: None

    def attach(self, on_fault: OnFault) -> None:
        """Hook the connector; once one hook has failed, nothing more is recorded of it, and what it loads is unknown."""
        self._on_fault = on_fault
        self._storage.attach(self)

    def wrap(self, owner: Any, name: str, hook: Hook) -> None:
        """Put a hook around a function of the connector's."""
        wrap_method(owner, name, while_true(lambda: not self._failed, hook), self._fault)

    def _fault(self, _: str, error: Exception) -> None:
        if not isinstance(error, EngineError):
            self._failed, self._landed, self._late = True, [], []
            self._on_fault("copies", error)

    def store(self, pages: list[Page], *, landed: bool) -> None:
        """Record that blocks are stored, as their slots are now; `landed` says that they lie elsewhere already."""
        here = self.hash_here(pages)
        there = self.hash_there(pages) if landed else np.zeros(len(pages), np.int64)
        hosts = [self._pages.give(self, page) for page in pages]
        self._record("offload", TIER_POOL, pages, hosts, TIER_HOST, here, there)

    def stored(self, pages: list[Page]) -> None:
        """Record what lies elsewhere of blocks whose store has ended."""
        kept = [page for page in pages if self._pages.find(self, page)[0]]
        there, hosts = self.hash_there(kept), [self._pages.find(self, page)[0] for page in kept]
        if there.any():
            self._record("stored", TIER_HOST, kept, hosts, TIER_HOST, np.zeros_like(there), there, whole=False)

    def has(self, page: Page) -> bool:
        """Say whether a page of the host tier stands for a block's key."""
        return bool(self._pages.find(self, page)[0])

    def store_seen(self, pages: list[Page], hashes: list[int]) -> None:
        """Record that a page of the host tier stands for what was seen in each block, by its hash."""
        held = np.array(hashes, np.int64)
        hosts = [self._pages.give(self, page) for page in pages]
        self._record("seen", TIER_POOL, pages, hosts, TIER_HOST, held, held)

    def load_seen(
        self, note: str, name: str, pages: list[Page], there: list[int], here: list[int], before: list[int]
    ) -> None:
        """Record of a request's blocks that they hold what their pages do ("load-back"), or only hashes of the ends."""
        found = [self._pages.find(self, page)[0] for page in pages]
        whole, known = note == "load-back", self._requests.get(name)
        at = [i for i, host in enumerate(found) if host or not whole]
        self._record(
            note,
            TIER_HOST,
            [pages[i] for i in at],
            [found[i] for i in at],
            TIER_POOL,
            np.array(there, np.int64)[at],
            np.array(here, np.int64)[at],
            whole=whole,
            before=np.array(before, np.int64)[at],
            request_id=-1 if known is None else known.request_id,
        )

    def begin_load(self, name: str, pages: list[Page]) -> LoadJob:
        """Take note of a load that is asked for."""
        return LoadJob(name, pages, self.hash_there(pages), self.hash_here(pages))

    def end_load(self, load: LoadJob) -> None:
        """Take note of a load that has ended, by the connector's word."""
        here = self.hash_here(load.pages)
        wrong = np.flatnonzero((here != load.there) & (here != 0) & (load.there != 0))
        self._right |= {(page.group.index, page.block): n for page, n in zip(load.pages, here.tolist(), strict=True)}
        elsewhere = np.full(len(load.pages), -1, np.int64)
        for at in wrong[here[wrong] == load.before[wrong]].tolist():
            elsewhere[at] = self._search(load, at)
            if len(self._late) < MAX_LATE:
                self._late.append((LATE_STEPS, load, at))
        self._landed.append(EndedLoad(load, here, elsewhere))
        del self._landed[:-MAX_ENDED]  # what is loaded for a request that has gone is asked for by nobody

    def before_model(self, names: Sequence[str], held: Callable[[], dict[str, list[set[int]]]]) -> None:
        """Record the loads for a step's requests that have ended, and those that land late; `held` are the requests' blocks."""

        def record() -> None:
            self._record_late()
            if self._landed:
                self._flush(["", *names], held())

        self.guarded(record)

    def guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Do something; once that or a hook has failed, nothing more is recorded of the connector."""
        try:
            if not self._failed:
                act(*args)
        except Exception as error:  # noqa: BLE001  # the forwards go on without it
            self._fault(act.__name__, error)

    def _record_late(self) -> None:
        """Record what has landed late."""
        late, self._late = self._late, []
        for left, load, at in late:
            page, there = load.pages[at], load.there[at : at + 1]
            if (self.hash_here([page]) == there).all():
                self._record("landed late", TIER_HOST, [page], [0], TIER_POOL, there, there, whole=False)
            elif left > 1:
                self._late.append((left - 1, load, at))

    def flush(self, name: str, slots: Sequence[tuple[int, Int64Array]]) -> None:
        """Record the loads for a request that have ended, which were to go to slots of certain groups.

        What is unknown of these has been said before.
        """
        held = [set[int]() for _ in self._layout.groups]
        for index, loaded in slots:
            held[index].update((loaded // self._layout.groups[index].block_size).tolist())
        self.guarded(self._flush, [name], {name: held})

    def _flush(self, names: Sequence[str], held: dict[str, list[set[int]]]) -> None:
        """Record the loads for certain requests ("" for any) that have ended; `held` are their blocks in each group."""
        ended = [one for one in self._landed if one.load.name in names]
        self._landed = [one for one in self._landed if one.load.name not in names]
        for one in ended:
            load = one.load
            parts: dict[tuple[str, bool], list[int]] = {}
            hosts = [self._pages.find(self, page)[0] for page in load.pages]
            for i, page in enumerate(load.pages):
                holds = (name for name, blocks in held.items() if page.block in blocks[page.group.index])
                holder = next(holds, "")
                if not holder or holder != (load.name or holder):  # it went where its request reads nothing
                    one.landed[i] = page.block * page.group.block_size
                # Nothing is known of what was stored before the recording, or too long ago.
                parts.setdefault((load.name or holder, bool(hosts[i])), []).append(i)
            for (name, known), at in parts.items():
                request = self._requests.get(name)
                self._record(
                    "load-back",
                    TIER_HOST,
                    [load.pages[i] for i in at],
                    [hosts[i] for i in at],
                    TIER_POOL,
                    load.there[at],
                    one.here[at],
                    whole=known,
                    before=load.before[at],
                    landed=one.landed[at],
                    request_id=-1 if request is None else request.request_id,
                )

    def forget(self, name: str) -> None:
        """Forget the loads for a request that has given its slots back."""
        self._landed = [one for one in self._landed if one.load.name != name]

    def hash_here(self, pages: Sequence[Page]) -> Int64Array:
        """Return the hash of what lies in each block now, 0 if it was not read."""

        def read(group: VllmGroup, mine: list[Page]) -> Sequence[Bytes] | None:
            layers, blocks = self._storage.layers_here(group), [page.block for page in mine]
            return [_rows(layer, blocks) for layer in layers] if layers else None

        return self._hashes(pages, read)

    def hash_there(self, pages: Sequence[Page]) -> Int64Array:
        """Return the same of what lies elsewhere."""

        def read(_: VllmGroup, mine: list[Page]) -> Sequence[Bytes] | None:
            found = [self._storage.there(page) for page in mine]
            whole = [one for one in found if one is not None]
            if len(whole) < len(found):
                return None
            return [np.stack(parts) for parts in zip(*whole, strict=True)]

        return self._hashes(pages, read)

    def _hashes(
        self, pages: Sequence[Page], read: Callable[[VllmGroup, list[Page]], Sequence[Bytes] | None]
    ) -> Int64Array:
        found = np.zeros(len(pages), np.int64)
        for group in self._layout.groups:
            at = [i for i, page in enumerate(pages) if page.group.index == group.index]
            layers = self._storage.layers_here(group) if at else ()
            size = sum(int(layer[0].nbytes) for layer in layers)
            if layers and size * len(at) <= MAX_HASHED_BYTES:
                parts = read(group, [pages[i] for i in at])
                if parts:
                    found[at] = end_hashes(parts)
        return found

    def _search(self, load: LoadJob, at: int) -> int:
        """Return the first slot of the block that has a load's bytes and should have others, -1 for none that is found."""
        group, recorder = load.pages[at].group, self._recorder
        if isinstance(recorder, DeviceRecorder):  # it would wait for the device
            return -1
        if self._searches and group.num_slots <= MAX_SEARCHED_SLOTS:
            self._searches -= 1
            kv = recorder.kv[group.index]
            mine = [0, *(page.block for page in load.pages)]  # and where it came from, which may hold it still
            mine.append(self._pages.find(self, load.pages[at])[1])
            blocks = np.setdiff1d(kv.otherwise() // group.block_size, mine)
            # What another load has brought is not this one's.
            others = [b for b in blocks.tolist() if self._right.get((group.index, b)) != load.there[at]]
            found = self.hash_here([Page(group, block, "") for block in others]) == load.there[at]
            if found.any():
                return int(others[int(found.argmax())]) * group.block_size
        return -1

    def _record(
        self,
        note: str,
        src_tier: int,
        pages: list[Page],
        hosts: list[int],
        dst_tier: int,
        src_hash: Int64Array,
        dst_hash: Int64Array,
        *,
        whole: bool = True,
        before: Int64Array | None = None,
        landed: Int64Array | None = None,
        request_id: int = -1,
    ) -> None:
        """Record copies of blocks, one run each; if not `whole`, only what lies at their ends."""
        for group in self._layout.groups:
            at = [i for i, page in enumerate(pages) if page.group.index == group.index]
            if not at:
                continue
            size = group.block_size
            pool = np.array([pages[i].block for i in at], np.int64) * size
            host = np.array([hosts[i] for i in at], np.int64) * size
            src, dst = (pool if tier == TIER_POOL else host for tier in (src_tier, dst_tier))
            count = np.full(len(at), size if whole else 0, np.int64)
            ends = CopyEnds(
                src=src_hash[at],
                dst=dst_hash[at],
                before=np.zeros(len(at), np.int64) if before is None else before[at],
                landed=np.full(len(at), -1, np.int64) if landed is None else landed[at],
            )
            self._recorder.kv_copy(
                group=group.index,
                src=src,
                dst=dst,
                count=count,
                src_tier=src_tier,
                dst_tier=dst_tier,
                request_id=request_id,
                note=note,
                ends=ends,
            )
            if whole:
                slots = runs_to_slots(src, count), runs_to_slots(dst, count)
                self._layout.kv.copied(group, *slots, src_tier=src_tier, dst_tier=dst_tier)


def _rows(layer: Any, blocks: list[int]) -> Bytes:
    rows = layer[blocks]
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(blocks), -1)
