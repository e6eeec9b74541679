"""What a KV connector copies between a runner's cache and a storage elsewhere: block by block, with what lies at both ends.

A connector that is known says which blocks it stores and loads, and by which key each lies elsewhere. A key that blocks are
stored under gets a page of the trace's host tier, so that what is loaded from there is known as far as what was stored is. Both
ends of all layers are hashed (`ends.py`). On a device a hash comes later: there all is recorded by the recorder's thread, in the
order in which it was seen.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .....kernels.arrays import Int64Array
from ....capture.device.recorder import DeviceRecorder
from ....capture.host_arrays import CopyEnds, runs_to_slots
from ....capture.recorder import Recorder
from ....trace.schema import SEEN, TIER_HOST, TIER_POOL
from ...common.copy_bounds import LATE_STEPS, MAX_LATE, MAX_SEARCHED_SLOTS, SEARCHES
from ...common.end_looks import Look, Sums
from ...common.hooking import EngineError, Hook, OnFault, while_true, wrap_method
from ...common.requests import request_id_of
from ..layout import VllmGroup, VllmLayout
from .ends import DeviceEnds, HostEnds, Page, Storage

MAX_ENDED: Final = 256  # loads that have ended and are not recorded yet: the slots of older ones stay unknown


class ExternalSlots(NamedTuple):
    """What is loaded for a request in one group: `slots` `[n] int64` from position `start` on.

    `own` is not set if the slots are the prefix cache's, and loaded anew in passing.
    """

    group: int
    start: int
    slots: Int64Array
    own: bool


class LoadJob(NamedTuple):
    """Blocks that are being loaded for a request ("" if it is not known for whom): what lay at both ends before."""

    name: str
    pages: list[Page]
    there: Look
    before: Look

    def of(self, kept: list[int]) -> "LoadJob":
        """Return the job of some of its blocks alone."""
        return LoadJob(self.name, [self.pages[i] for i in kept], self.there.of(kept), self.before.of(kept))


class EndedLoad(NamedTuple):
    """A load that has ended, to be recorded in its turn: what lies in its blocks now, and where it landed instead."""

    name: str
    pages: list[Page]
    there: Int64Array
    before: Int64Array
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
        recorder: Recorder | DeviceRecorder,
        pages: HostPages | None = None,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._recorder: Recorder
        self._ends: HostEnds | DeviceEnds
        self._later: Any = None
        if isinstance(recorder, DeviceRecorder):
            self._recorder, self._ends = recorder.recorder, DeviceEnds(storage, layout)
            # Behind what is queued; a fault there is not the recorder's thread's.
            self._later = functools.partial(recorder.later, self.guarded)
        else:
            self._recorder, self._ends = recorder, HostEnds(storage, layout)
        self._pages = HostPages(layout) if pages is None else pages
        self._landed: list[EndedLoad] = []
        self._waiting: set[str] = set()  # whose loads have ended, and who have not run since
        self._late: list[tuple[int, EndedLoad, int]] = []  # steps left, load, which of its pages
        self._searches = SEARCHES
        self.has_begun = False  # what a step loads before its forward
        self._asked: set[tuple[int, int]] = set()  # blocks of groups that the connector was asked to load
        self._unchanged: set[tuple[int, int]] = set()  # those that hold what they held, by the bytes of all layers
        self._right: dict[tuple[int, int], int] = {}  # what a load is to bring to a block of a group, or has brought
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

    def in_turn(self, act: Callable[..., None], *args: Any) -> None:
        """Do something now; on a device once all that was seen before is recorded."""
        if self._later is None:
            act(*args)
        else:
            self._later(act, *args)

    def store(self, pages: list[Page], *, landed: bool) -> None:
        """Record that blocks are stored, as their slots are now; `landed` says that they lie elsewhere already."""
        there = self._ends.there(pages) if landed else Sums(len(pages))
        self.in_turn(self._store, pages, self._ends.here(pages), there)

    def _store(self, pages: list[Page], here: Look, there: Look) -> None:
        hosts = [self._pages.give(self, page) for page in pages]
        self._record("offload", TIER_POOL, pages, hosts, TIER_HOST, here.read(), there.read())

    def stored(self, pages: list[Page]) -> None:
        """Record what lies elsewhere of blocks whose store has ended."""
        self.in_turn(self._stored, pages, self._ends.there(pages))

    def _stored(self, pages: list[Page], look: Look) -> None:
        hosts, there = [self._pages.find(self, page)[0] for page in pages], look.read()
        at = [i for i, host in enumerate(hosts) if host]
        if there[at].any():
            kept, found = [pages[i] for i in at], there[at]
            none = np.zeros_like(found)
            self._record("stored", TIER_HOST, kept, [hosts[i] for i in at], TIER_HOST, none, found, whole=False)

    def look(self, pages: list[Page]) -> Look:
        """Look at what lies in each block now."""
        return self._ends.here(pages)

    def hash_of_zeros(self, group: VllmGroup) -> int:
        """Return the hash of a block in which there is nothing."""
        return self._ends.zeros(group)

    def has(self, page: Page) -> bool:
        """Say whether a page of the host tier stands for a block's key."""
        return bool(self._pages.find(self, page)[0])

    def store_seen(self, pages: list[Page], hashes: list[int]) -> None:
        """Record that a page of the host tier stands for what was seen in each block, by its hash."""
        held = np.array(hashes, np.int64)
        hosts = [self._pages.give(self, page) for page in pages]
        self._record(SEEN, TIER_POOL, pages, hosts, TIER_HOST, held, held)

    def load_seen(
        self, note: str, name: str, pages: list[Page], there: list[int], here: list[int], before: list[int]
    ) -> None:
        """Record of a request's blocks that they hold what their pages do ("load-back"), or only hashes of the ends."""
        found = [self._pages.find(self, page)[0] for page in pages]
        whole = note == "load-back"
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
            request_id=request_id_of(name) if name else -1,  # which may not have run yet
        )

    def begin_load(self, name: str, pages: list[Page]) -> LoadJob:
        """Take note of a load that is asked for."""
        blocks = {(page.group.index, page.block) for page in pages}
        self._asked |= blocks
        self._unchanged -= blocks
        load = LoadJob(name, pages, self._ends.there(pages), self._ends.here(pages))
        if isinstance(self._ends, HostEnds):
            self._note_right(pages, load.there.read())
        return load

    def asked_for(self, load: ExternalSlots, *, is_over: bool) -> ExternalSlots:
        """Return those of the slots that the connector was asked to load; all if nobody knows what it was asked, or if it was
        asked for others as well, in the place of which these may be.

        What is not over may be asked for only when the step's loads begin.
        """
        if not (is_over or self.has_begun):
            return load
        blocks = load.slots // self._layout.groups[load.group].block_size
        asked = [block for block in np.unique(blocks).tolist() if (load.group, block) in self._asked]
        self._asked.difference_update((load.group, block) for block in asked)
        if self._failed or self._asked:
            return load
        at = np.flatnonzero(np.isin(blocks, asked))
        return load._replace(start=load.start + int(at[0]) if at.size else load.start, slots=load.slots[at])

    def changed(self, load: ExternalSlots) -> list[ExternalSlots]:
        """Return the parts of some slots of which a load may have changed a byte: in the others lies what lay there."""
        blocks = (load.slots // self._layout.groups[load.group].block_size).tolist()
        at = np.flatnonzero([self._failed or (load.group, block) not in self._unchanged for block in blocks])
        parts = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
        return [load._replace(start=load.start + int(part[0]), slots=load.slots[part]) for part in parts if part.size]

    def end_load(self, load: LoadJob) -> None:
        """Take note of a load that has ended, by the connector's word."""
        self._waiting.add(load.name)
        self.in_turn(self._end_load, load, self._ends.here(load.pages))

    def _end_load(self, load: LoadJob, look: Look) -> None:
        there, before, here = (of.read() for of in (load.there, load.before, look))
        one = EndedLoad(load.name, load.pages, there, before, here, np.full(len(load.pages), -1, np.int64))
        wrong = np.flatnonzero((here != there) & (here != 0) & (there != 0))
        if isinstance(self._ends, HostEnds):  # which looks at all bytes, and at once
            same = np.flatnonzero((here == before) & (here != 0) & (here != there)).tolist()
            self._unchanged |= {(load.pages[i].group.index, load.pages[i].block) for i in same}
        self._note_right(load.pages, here)
        for at in wrong.tolist() if isinstance(self._ends, HostEnds) else ():
            if here[at] == before[at]:
                one.landed[at] = self._search(one, at)
            if len(self._late) < MAX_LATE:
                self._late.append((LATE_STEPS, one, at))
        self._landed.append(one)
        del self._landed[:-MAX_ENDED]  # what is loaded for a request that has gone is asked for by nobody

    def _note_right(self, pages: list[Page], hashes: Int64Array) -> None:
        self._right |= {(page.group.index, page.block): n for page, n in zip(pages, hashes.tolist(), strict=True)}

    def before_model(self, names: Sequence[str], held: Callable[[], dict[str, list[set[int]]]]) -> None:
        """Record the loads for a step's requests that have ended, and those that land late; `held` are the requests' blocks."""

        def record() -> None:
            self._record_late()
            if not self._waiting.isdisjoint(["", *names]):
                self.in_turn(self._flush, ["", *names], held())
                self._waiting.difference_update(["", *names])

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
        for left, one, at in late:
            page, there = one.pages[at], one.there[at : at + 1]
            if (self.hash_here([page]) == there).all():
                self._record("landed late", TIER_HOST, [page], [0], TIER_POOL, there, there, whole=False)
            elif left > 1:
                self._late.append((left - 1, one, at))

    def flush(self, name: str, slots: Sequence[tuple[int, Int64Array]]) -> None:
        """Record the loads for a request that have ended, which were to go to slots of certain groups.

        What is unknown of these has been said before.
        """
        held = [set[int]() for _ in self._layout.groups]
        for index, loaded in slots:
            held[index].update((loaded // self._layout.groups[index].block_size).tolist())
        self._waiting.discard(name)
        self.guarded(self.in_turn, self._flush, [name], {name: held})

    def _flush(self, names: Sequence[str], held: dict[str, list[set[int]]]) -> None:
        """Record the loads for certain requests ("" for any) that have ended; `held` are their blocks in each group."""
        ended = [one for one in self._landed if one.name in names]
        self._landed = [one for one in self._landed if one.name not in names]
        for one in ended:
            parts: dict[tuple[str, bool], list[int]] = {}
            hosts = [self._pages.find(self, page)[0] for page in one.pages]
            for i, page in enumerate(one.pages):
                holds = (name for name, blocks in held.items() if page.block in blocks[page.group.index])
                holder = next(holds, "")
                if not holder or holder != (one.name or holder):  # it went where its request reads nothing
                    one.landed[i] = page.block * page.group.block_size
                # Nothing is known of what was stored before the recording, or too long ago.
                parts.setdefault((one.name or holder, bool(hosts[i])), []).append(i)
            for (name, known), at in parts.items():
                self._record(
                    "load-back",
                    TIER_HOST,
                    [one.pages[i] for i in at],
                    [hosts[i] for i in at],
                    TIER_POOL,
                    one.there[at],
                    one.here[at],
                    whole=known,
                    before=one.before[at],
                    landed=one.landed[at],
                    request_id=request_id_of(name) if name else -1,
                )

    def forget(self, name: str) -> None:
        """Forget the loads for a request that has given its slots back."""
        self._waiting.discard(name)
        self.in_turn(self._forget, name)

    def _forget(self, name: str) -> None:
        self._landed = [one for one in self._landed if one.name != name]

    def hash_here(self, pages: Sequence[Page]) -> Int64Array:
        """Return the hash of what lies in each block now, 0 if it was not read; of a device's never."""
        return self._ends.here(pages).read() if isinstance(self._ends, HostEnds) else np.zeros(len(pages), np.int64)

    def _search(self, one: EndedLoad, at: int) -> int:
        """Return the first slot of the block that has a load's bytes and should have others, -1 for none that is found."""
        group = one.pages[at].group
        if self._searches and group.num_slots <= MAX_SEARCHED_SLOTS:
            self._searches -= 1
            mine = [0, *(page.block for page in one.pages)]  # and where it came from, which may hold it still
            mine.append(self._pages.find(self, one.pages[at])[1])
            blocks = np.setdiff1d(self._recorder.kv[group.index].otherwise() // group.block_size, mine)
            # What another load has brought is not this one's.
            others = [b for b in blocks.tolist() if self._right.get((group.index, b)) != one.there[at]]
            found = self.hash_here([Page(group, block, "") for block in others]) == one.there[at]
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
