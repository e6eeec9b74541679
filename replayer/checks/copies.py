"""Copies to a storage and back whose two ends do not hold the same: which hop lied."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from ...kernels.arrays import BoolArray, Int64Array
from ...kernels.replay_pass.ledger import CONTENT
from ...recorder.state.events import CopyEvent
from ...recorder.state.forward import UnusableEventError
from ...recorder.trace.reader import EventView
from ...recorder.trace.schema import TIER_HOST, TIER_POOL
from ..report.findings import Cause, Finding
from .check import Covered, HistoryCheck, register
from .history import History

MAX_HELD: Final = (
    1 << 20
)  # pages of storages whose stores are remembered: past that all are forgotten, and judged by nothing
_LOW: Final = 0xFFFFFFFF
_COLUMNS: Final = ("copy_src_hash", "copy_dst_hash", "copy_before_hash", "copy_landed")
_NOTHING_CAME: Final = "was loaded from a page that holds what it held before it was to come from a further storage"
_OTHER_ORDER: Final = "the same bytes in another order"


class _Stored(NamedTuple):
    """What was stored in a page of the host tier: `given` lay in the slots, `held` in the storage when it was looked at.

    `ended` says that the store is over, `why` is the cause of what a further storage gave back that is not what was given, "" if it is;
    `before` lay there until then.
    """

    given: int
    held: int
    event: int
    slot: int
    ended: bool
    why: str = ""
    before: int = 0


def _runs(view: EventView) -> list[Int64Array]:
    """Return group, tiers and slots of an event's copies with the hashes of their ends, nothing if it has none."""
    found = [view.ints(name) for name in _COLUMNS]
    if not any(len(values) for values in found):
        return []
    runs = [view.ints(f"copy_{name}") for name in ("group", "src_tier", "src", "dst_tier", "dst")] + found
    if len({len(values) for values in runs}) > 1:
        raise UnusableEventError("the hashes of a copy's ends are not as many as its runs")
    return runs


def _brought(view: EventView) -> set[tuple[int, int, int]]:
    """Return group, slot and hash of what loads brought between the same two forwards as an event's, as far as its batch goes."""
    kinds, first, end = view.batch.kinds, view.index, view.index + 1
    while first > 0 and kinds[first - 1] != "forward":
        first -= 1
    while end < len(kinds) and kinds[end] != "forward":
        end += 1
    found = set()
    for event in map(view.batch.event, range(first, end)):
        names = ("copy_group", "copy_dst", "copy_src_hash", "copy_dst_hash", "copy_src_tier", "copy_dst_tier")
        columns = [event.ints(name).tolist() for name in names]
        if len({len(values) for values in columns}) == 1:
            for group, slot, there, here, src_tier, dst_tier in zip(*columns, strict=True):
                if there == here and (src_tier, dst_tier) == (TIER_HOST, TIER_POOL):
                    found.add((group, slot, here))
    return found


@register
class CopyDiffers(HistoryCheck):
    """What lies at one end of a copy is not what lay at the other, by hashes of all layers' bytes.

    Judged are stores (slots against storage), what the storage holds at the load (against what was stored there), and loads
    (storage against slots); an end that was not read is judged by nothing. A load also lies whose page is as it was, if nothing has ever
    been there.
    """

    kind = "copy_differs"
    finds = "what lies at one end of a copy to a storage, or back, is not what lay at the other"
    covered = Covered.COMPILED
    events = frozenset({"kv_copy"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._stored: dict[tuple[int, int], _Stored] = {}

    def forget(self) -> None:
        super().forget()
        self._stored.clear()

    def event(self, view: EventView) -> Iterator[Finding]:
        known, runs = self.history.known, _runs(view)
        if not isinstance(known, CopyEvent):
            return
        if not runs:
            self._unseen(known)
            return
        group, src_tier, src, dst_tier, dst, *ends = runs
        moves = view.ints("copy_count") > 0
        src = np.where((src == 0) & ~moves, -1, src)  # what only tells of slots comes from no page of the storage
        for index in np.unique(group).tolist():
            mine = group == index
            stores = mine & (src_tier == TIER_POOL) & (dst_tier == TIER_HOST)
            stored = mine & (src_tier == TIER_HOST) & (dst_tier == TIER_HOST)
            loads = mine & (src_tier == TIER_HOST) & (dst_tier == TIER_POOL)
            yield from self._stores(known, index, stores, src, dst, ends)
            yield from self._seen(known, index, stored & ~moves, dst, ends)
            self._moved(index, stored & moves, src, dst, ends)
            if (loads & (ends[3] >= 0)).any():  # what another load has brought to a slot is not this one's
                brought = _brought(view)
                theirs = [
                    (index, to, lay) in brought for to, lay in zip(ends[3].tolist(), ends[0].tolist(), strict=True)
                ]
                ends[3] = np.where(loads & theirs & (ends[3] != dst), -1, ends[3])
            yield from self._loads(known, index, loads, src, dst, ends)
        if len(self._stored) > MAX_HELD:
            self._stored.clear()

    def _unseen(self, event: CopyEvent) -> None:
        """Take note of copies that nobody looked at: in the storage lies now what lay where they came from."""
        for copy in event.copies if self._stored else ():
            if copy.dst_tier == TIER_HOST:
                places = zip(copy.src.tolist(), copy.dst.tolist(), strict=True)
                from_host = copy.src_tier == TIER_HOST
                lies = {dst: self._stored.get((copy.group, src)) if from_host else None for src, dst in places}
                for dst, stored in lies.items():
                    self._stored.pop((copy.group, dst), None)
                    if stored is not None:
                        self._stored[copy.group, dst] = stored

    def _stores(
        self, event: CopyEvent, group: int, mine: BoolArray, src: Int64Array, dst: Int64Array, ends: list[Int64Array]
    ) -> Iterator[Finding]:
        given, held, *_ = ends
        twice, both = [], []
        for i in np.flatnonzero(mine).tolist():
            key, before = (group, int(dst[i])), self._stored.get((group, int(dst[i])))
            pending = before is not None and (not before.ended or before.event == event.event)
            if before is not None and pending and before.given and given[i] and before.given != given[i]:
                twice.append(int(src[i]))
                both.append(before.event)
            lay = 0 if before is None else before.held or before.given
            now = _Stored(int(given[i]), int(held[i]), event.event, int(src[i]), bool(held[i]), before=lay)
            self._stored[key] = now
        if twice:
            said = "is stored where another slot was just stored, whose store had not ended"
            yield self.of_slots(event, group, np.array(twice), said, events=both, cause=Cause("two_to_one"))
        wrong = mine & (given != 0) & (held != 0) & (given != held)
        places, times = np.unique(dst[mine], return_counts=True)
        wrong &= ~np.isin(dst, places[times > 1])  # the last one stands there
        yield from self._stored_wrong(event, group, src[wrong], given[wrong], held[wrong], [])

    def _seen(
        self, event: CopyEvent, group: int, mine: BoolArray, dst: Int64Array, ends: list[Int64Array]
    ) -> Iterator[Finding]:
        wrong: list[tuple[int, int, int]] = []
        events = set()
        for i in np.flatnonzero(mine).tolist():
            key, held = (group, int(dst[i])), int(ends[1][i])
            stored = self._stored.get(key)
            if stored is None:
                continue
            self._stored[key] = stored._replace(held=held or stored.held, ended=True)
            if held and stored.given and stored.given != held and stored.held != held:
                wrong.append((stored.slot, stored.given, held))
                events.add(stored.event)
        if wrong:
            slots, given, found = np.array(wrong, np.int64).T
            yield from self._stored_wrong(event, group, slots, given, found, sorted(events))

    def _moved(self, group: int, mine: BoolArray, src: Int64Array, dst: Int64Array, ends: list[Int64Array]) -> None:
        """Take note of pages that go from one place of the storage to another; who loads one that is not what it was is told."""
        for i in np.flatnonzero(mine).tolist():
            stored = self._stored.get((group, int(src[i])))
            before = self._stored.pop((group, int(dst[i])), None)
            if stored is None:
                continue
            lies, why = int(ends[1][i]) or int(ends[0][i]), stored.why
            if lies and lies not in (stored.given, stored.held):  # what was stored wrong is told of already
                stale = before is not None and lies in (before.given, before.held)
                another = any(lies in (one.given, one.held) for one in self._stored.values())
                why = why or ("nothing_landed" if stale else "loaded_another" if another else "changed_in_store")
            self._stored[group, int(dst[i])] = stored._replace(held=lies or stored.held, why=why)

    def _stored_wrong(
        self,
        event: CopyEvent,
        group: int,
        slots: Int64Array,
        given: Int64Array,
        held: Int64Array,
        events: list[int],
    ) -> Iterator[Finding]:
        other_order = (given & _LOW) == (held & _LOW)
        for cause, mine in (("other_order", other_order), ("stored_wrong", ~other_order)):
            if mine.any():
                what = _OTHER_ORDER if cause == "other_order" else "other bytes"
                said = f"was stored, and the storage holds {what}"
                yield self.of_slots(event, group, slots[mine], said, events=events, cause=Cause(cause))

    def _loads(
        self, event: CopyEvent, group: int, mine: BoolArray, src: Int64Array, dst: Int64Array, ends: list[Int64Array]
    ) -> Iterator[Finding]:
        there, here, before, landed = ends
        found: dict[tuple[str, str, int], list[int]] = {}

        def add(cause: str, slot: int, said: str = "", since: int = -1) -> None:
            found.setdefault((cause, said or LOADS[cause], since), []).append(slot)

        # Slots that hold what a page of the storage does, and what they held before or what another of the load was to get.
        either: list[tuple[int, int, tuple[str, int, str]]] = []
        known: dict[int, int] = {}

        def stored_at(held: int) -> int:
            """Return the event since which the storage holds that, by its hash, -1 for none; looked for if anything differs."""
            known.update({} if known else {h: p.event for p in self._stored.values() for h in (p.given, p.held) if h})
            return known.get(held, -1)

        meant = {int(lay): int(to) for lay, to in zip(there[mine], dst[mine], strict=True) if lay}
        for i in np.flatnonzero(mine).tolist():
            stored = self._stored.get((group, int(src[i])))
            slot, came, lay = int(dst[i]), int(here[i]), int(there[i])
            if came and not lay and stored is not None:  # a storage that cannot be read
                lay = stored.given
            # What lay there when it was asked for, and what has come is what was stored there since.
            meanwhile = stored is not None and lay == stored.before != 0 and came == stored.given != lay
            if stored is not None and meanwhile:
                add("stored_over", slot, "was loaded after another page was stored in place of its copy", stored.event)
                continue
            # It was read before the last store there, and is told behind it.
            earlier = stored is not None and lay == stored.before != 0 and came in (0, lay)
            if stored is not None and stored.given and lay and stored.given != lay and not earlier:
                if (stored.given ^ lay) & _LOW == 0:
                    add("other_order", slot, since=stored.event)
                elif stored.why:
                    add(stored.why, slot, _NOTHING_CAME if stored.why == "nothing_landed" else "", since=stored.event)
                elif stored.held == lay:
                    add("stored_wrong", slot, since=stored.event)
                elif stored_at(lay) >= 0:
                    add("stored_over", slot, since=stored_at(lay))
                else:
                    add("changed_in_store", slot, since=stored.event)
            if landed[i] == dst[i]:
                add("landed_elsewhere", slot, "was loaded, and its request does not hold it")
            elif came and lay and came != lay:
                if came == before[i] and landed[i] >= 0:
                    add("landed_elsewhere", slot)
                    add("landed_elsewhere", int(landed[i]), "was overwritten by a load for another slot")
                elif came == before[i]:
                    lies = stored is not None and stored.slot != slot and self._unchanged(group, stored)
                    either.append((slot, came, ("not_landed_here" if lies else "nothing_landed", slot, "")))
                elif (came ^ lay) & _LOW == 0:
                    add("other_order", slot)
                elif came in meant:
                    said = f"was loaded, and holds what slot {meant[came]} was to get"
                    either.append((slot, came, ("landed_elsewhere", slot, said)))
                elif stored_at(came) >= 0:
                    add("loaded_another", slot, since=stored_at(came))
                else:
                    add("loaded_wrong", slot)
            elif came and came == before[i] and not lay and self._never_filled(group, slot):
                add("nothing_landed", slot)
        # If others of the load got other pages of the storage, these have got theirs, too.
        another = any(cause == "loaded_another" for cause, *_ in found)
        for slot, came, other in either:
            if another and stored_at(came) >= 0:
                add("loaded_another", slot, since=stored_at(came))
            else:
                add(*other)
        for (cause, said, since), slots in found.items():
            events = [since] if since >= 0 else []
            yield self.of_slots(event, group, np.array(slots), said, events=events, cause=Cause(cause))

    def _never_filled(self, group: int, slot: int) -> bool:
        """Say whether nothing is known to have filled a page since the engine started."""
        rows, page = self.history.ledger.rows[group], max(1, self.history.header.groups[group].page_size)
        return not self.history.had_gap and 0 < slot < len(rows) and not rows[slot : slot + page, CONTENT].any()

    def _unchanged(self, group: int, stored: _Stored) -> bool:
        """Say whether nothing is known to have filled the slot that was stored since then: a load into it would not show."""
        rows = self.history.ledger.rows[group]
        return 0 <= stored.slot < len(rows) and int(rows[stored.slot, CONTENT]) <= stored.event + 1


LOADS: Final = {
    "stored_wrong": "was loaded from a copy that was stored wrong",
    "stored_over": "was loaded from a copy in whose place another page was stored",
    "changed_in_store": "was loaded from a copy that changed in the storage after it was stored",
    "other_order": f"was loaded, and holds {_OTHER_ORDER}",
    "loaded_wrong": "was loaded, and holds other bytes than the storage",
    "loaded_another": "was loaded, and holds what was stored in another page",
    "nothing_landed": "was to be loaded, and holds what it held before",
    "not_landed_here": "was to be loaded, and holds what it held before, while it lies where it was stored from still",
    "landed_elsewhere": "was to be loaded, and the bytes lie in another slot",
}


@register
class LoadLandedLate(HistoryCheck):
    """A load was taken for ended, its slots held what they held before or a part of what was loaded, and later all of it.

    Between the two a forward of its request has run.
    """

    kind = "load_landed_late"
    finds = "a load landed after the engine took it for ended"
    covered = Covered.COMPILED
    events = frozenset({"kv_copy"})

    def __init__(self, history: History) -> None:
        super().__init__(history)
        self._missing: dict[tuple[int, int], int] = {}  # slots whose load had not landed: since which event

    def forget(self) -> None:
        super().forget()
        self._missing.clear()

    def event(self, view: EventView) -> Iterator[Finding]:
        known, runs = self.history.known, _runs(view)
        if not isinstance(known, CopyEvent) or not runs:
            return
        group, src_tier, _, dst_tier, dst, there, here, _, _ = runs
        count = view.ints("copy_count")
        for i in np.flatnonzero(
            (src_tier == TIER_HOST) & (dst_tier == TIER_POOL) & (here != 0) & (there != 0)
        ).tolist():
            place = int(group[i]), int(dst[i])
            since = self._missing.pop(place, -1)
            if here[i] != there[i]:
                self._missing[place] = known.event
            elif here[i] == there[i] and since >= 0 and not count[i]:  # no load of its own
                detail = "was loaded later than the engine took it for loaded"
                yield self.of_slots(known, place[0], dst[i : i + 1], detail, events=[since])
