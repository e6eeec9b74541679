"""Which slots SGLang's allocators give out and take back, in the trace's words; and what the prefix cache holds of them.

An allocator does not know for whom it allocates, and the versions differ in who asks it. So a slot that was given out
is recorded when a forward first writes it, for the request that writes it, with the rest of its page: as often as it was
given out, each time for another request. A free is recorded when it is asked for, even if the engine puts it off to the end
of its step; where other slots come back then than were asked for, that is recorded, too.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ....kernels.arrays import BoolArray, Int64Array
from ...capture.device.recorder import DeviceRecorder
from ...capture.host_arrays import own_int64
from ...capture.recorder import Recorder
from ...trace.header import TraceHeader
from ...trace.schema import NOBODYS, SlotChange
from ..common.hooking import Around, Finish, Hook, beside
from ..common.outermost import OutermostCalls
from .layout import RunnerLayout, SglangLayout, online_sweep_interval, own_slots

# Of those, what is given out and taken back is known. What is derived from them may number something else.
ALLOCATORS: Final = frozenset(
    {
        "TokenToKVPoolAllocator",
        "PagedTokenToKVPoolAllocator",
        "SWATokenToKVPoolAllocator",
        "PureSWATokenToKVPoolAllocator",
    }
)


class GroupHistory:
    """One allocator and the groups (target's, drafts') whose slots it gives out; slot 0 is nobody's.

    Allocators call their own methods: only the outermost call counts.
    """

    def __init__(
        self, allocator: Any, groups: tuple[int, ...], num_slots: int, recorder: Recorder | DeviceRecorder
    ) -> None:
        self.allocator = allocator
        self.groups = groups
        self.page_size = max(1, int(getattr(allocator, "page_size", 1) or 1))
        self.evicting = False
        device = recorder if isinstance(recorder, DeviceRecorder) else None
        self._recorder: Recorder = recorder.recorder if isinstance(recorder, DeviceRecorder) else recorder
        # On a device the engine's thread has slots copied, and the recorder's reads and records them, in the same order.
        self._with_slots: Callable[..., None] = _read_now if device is None else device.later_with
        self._with_given: Callable[..., None] = _read_now if device is None else device.with_next_forward
        # Bound once: each step would make them anew otherwise.
        self._note_given = self._given
        # How often each slot was given out, and is not recorded yet.
        self._pending: npt.NDArray[np.uint8] = np.zeros(num_slots, np.uint8)
        self._free: list[Int64Array] = []  # pages that are free where the engine flushes its cache, or is idle
        self._nobodys: BoolArray = np.zeros(num_slots, np.bool_)  # slots that are known to be nobody's
        self._calls: OutermostCalls | None = None
        self._put_off = False  # whether a free was, in this step
        self._ending = False  # whether what was put off is being freed
        # Slots of frees that were put off, and of those that have come to an end.
        self._asked: list[Int64Array] = []
        self._came: list[Int64Array] = []

    def follow_calls(self, calls: OutermostCalls) -> dict[str, Hook]:
        """Put around the allocator's methods what is called in every step; return the hooks around others, by their names."""
        self._calls = calls
        for name in ("alloc", "alloc_extend", "alloc_decode"):
            calls.wrap(self.allocator, name, self._on_given)
        hooks: dict[str, Hook] = {"free": self._on_free, "free_segment": self._on_free, "clear": self._on_clear}
        hooks |= {
            "free_page_ids": functools.partial(self._on_free, scale=self.page_size),
            "free_group_end": self._on_end,
        }
        return {name: hook for name, hook in hooks.items() if hasattr(self.allocator, name)}

    @property
    def _inside(self) -> bool:
        """Whether a call of the allocator's is part of another."""
        return self._calls is not None and self._calls.under_way

    def _count_call(self) -> Finish:
        calls = self._calls
        if calls is not None:
            calls.begin()

        def leave(_: Any, __: BaseException | None) -> None:
            if calls is not None:
                calls.end()

        return leave

    def _on_given(self, given: Any) -> None:
        """Note what an allocation gives out."""
        self._with_given(self._note_given, given)

    def _given(self, slots: Int64Array) -> None:
        if self.page_size > 1:  # further tokens of a page were given out with its first
            slots = (slots[slots % self.page_size == 0][:, None] + np.arange(self.page_size)).reshape(-1)
        np.add.at(self._pending, self._of_pool(slots), 1)

    def _on_free(self, freed: Any, *_args: Any, scale: int = 1, **_kwargs: Any) -> Finish:
        if self._ending:
            self._with_slots(self._at_last, freed, scale)
        elif not self._inside and len(freed):
            put_off = self._puts_off()
            self._put_off |= put_off
            self._with_slots(self._freed, freed, scale, "evict" if self.evicting else "free", "", put_off)
        return self._count_call()

    def _puts_off(self) -> bool:
        """Whether the allocator keeps what is given back until the end of its group."""
        at_once = getattr(self.allocator, "is_not_in_free_group", None)  # versions that have a list all the time
        return not at_once if isinstance(at_once, bool) else getattr(self.allocator, "free_group", None) is not None

    def _on_end(self, *_args: Any, **_kwargs: Any) -> Finish:
        """Have what was put off looked at when it is freed: it was recorded when it was asked for."""
        put_off, self._put_off = self._put_off and not self._inside, False
        leave = self._count_call()
        if not put_off:
            return leave
        self._ending = True

        def done(result: Any, error: BaseException | None) -> None:
            self._ending = False
            leave(result, error)
            self._with_slots(self._settle, [])

        return done

    def _at_last(self, freed: Int64Array, scale: int) -> None:
        self._came.append(self._of_pool(self._whole_pages(freed * scale)))

    def _settle(self, _: Int64Array) -> None:
        """Record what came back in the end and was not asked for; what was asked for and did not is seen when the engine is idle."""
        asked, came = (np.unique(np.concatenate([own_int64([]), *slots])) for slots in (self._asked, self._came))
        self._asked.clear()
        self._came.clear()
        self._freed(np.setdiff1d(came, asked), 1, "free", "put off")

    def _on_clear(self, *_args: Any, **_kwargs: Any) -> Finish:
        """Record as evicted everything that is not free: the engine flushes its cache."""
        if not self._inside:
            self._note_free()
            self._with_slots(self._flushed, [int(getattr(self.allocator, "size", self._pending.size - 1))])
        return self._count_call()

    def _flushed(self, size: Int64Array) -> None:
        self._freed(np.flatnonzero(self._not_free(int(size[0]))), 1, "evict", "flush")

    def nobodys(self, cached: Any) -> None:
        """Record what is neither free nor among `cached`, the slots of the prefix cache, in an engine that has no request."""
        self._note_free()
        self._with_slots(self._left_over, cached, int(self.allocator.size) // self.page_size * self.page_size)

    def _left_over(self, cached: Int64Array, size: int) -> None:
        held = self._not_free(size)
        held[self._of_pool(self._whole_pages(cached))] = False
        slots = np.flatnonzero(held & ~self._nobodys)
        self._nobodys = held
        self.given_out(slots, "never written")
        for group in self.groups if slots.size else ():
            self._recorder.slots("alloc", group=group, slots=slots, note=NOBODYS)

    def _note_free(self) -> None:
        """Note the pages that are free now."""
        for name in ("free_pages", "release_pages", "staged_pages"):
            found = getattr(self.allocator, name, None)
            for pages in found if isinstance(found, list) else [[] if found is None else found]:
                self._with_slots(self._free.append, pages)

    def _not_free(self, size: int) -> BoolArray:
        """Return which slots were not free when that was noted, `[num_slots] bool`."""
        held = np.zeros(self._pending.size, np.bool_)
        held[self.page_size : size + self.page_size] = True  # what there is at all: the first page is padding
        for pages in self._free:
            held[self._of_pool(self._whole_pages(pages * self.page_size))] = False
        self._free.clear()
        return held

    def _whole_pages(self, slots: Int64Array) -> Int64Array:
        """Return all slots of the pages in which these lie, each once, ascending."""
        pages = np.unique(slots // self.page_size)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def _of_pool(self, slots: Int64Array) -> Int64Array:
        return slots[(slots > 0) & (slots < self._pending.size)]

    def _freed(self, freed: Int64Array, scale: int, kind: SlotChange, note: str = "", put_off: bool = False) -> None:
        """Record that slots go back to the pool."""
        slots = self._of_pool(self._whole_pages(freed * scale))
        self._asked += [slots] if put_off else []
        self.given_out(slots, "never written")
        for group in self.groups if slots.size else ():
            self._recorder.slots(kind, group=group, slots=slots, note=note)

    def written(self, slots: Int64Array, rows: Int64Array, request_ids: Int64Array, extend: Int64Array) -> None:
        """Record the slots among those that a forward writes that were given out and not recorded yet.

        `slots` are `[T]` in this allocator's numbering, what lies outside is passed over; the others `[bs]`, `extend` the
        tokens of each request, of which padding rows have none.
        """
        inside = np.where((slots > 0) & (slots < self._pending.size), slots, 0)
        if not self._pending[inside].any():
            return
        requests = np.repeat(np.arange(rows.size), np.where(rows == 0, 0, extend))[: inside.size]
        inside = inside[: requests.size]
        mine = self._pending[inside] > 0
        pages, owners, place = _writers(inside[mine] // self.page_size, requests[mine])
        given = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        owners, place = np.repeat(owners, self.page_size), np.repeat(place, self.page_size)
        fresh = place < self._pending[given]
        given, owners = given[fresh], owners[fresh]
        np.subtract.at(self._pending, given, 1)
        order = np.argsort(owners, kind="stable")
        self._recorder.allocations(self.groups, given[order], owners[order], request_ids=request_ids, rows=rows)

    def filled(self, slots: Any) -> None:
        """Record slots that got their content otherwise than by a forward; the cache holds them, no request."""
        self._with_slots(self._filled, slots)

    def _filled(self, slots: Int64Array) -> None:
        self.given_out(self._of_pool(self._whole_pages(slots)), "load-back")

    def given_out(self, slots: Int64Array, note: str) -> None:
        """Record those of the pool's slots that were given out and not recorded yet: nobody's."""
        while (fresh := slots[self._pending[slots] > 0]).size:
            self._pending[fresh] -= 1
            for group in self.groups:
                self._recorder.slots("alloc", group=group, slots=fresh, note=note)


def _writers(pages: Int64Array, requests: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return each pair of page and request once, and how many requests have written that page before: all `[n] int64`.

    `pages` and `requests` are those of tokens `[T]`, the requests ascending.
    """
    order = np.argsort(pages, kind="stable")
    pages, requests = pages[order], requests[order]
    begins = np.ones(pages.size, np.bool_)
    begins[1:] = pages[1:] != pages[:-1]
    new = begins.copy()
    new[1:] |= requests[1:] != requests[:-1]
    pages, requests, begins = pages[new], requests[new], begins[new]
    at = np.arange(pages.size)
    return pages, requests, at - np.maximum.accumulate(np.where(begins, at, 0))


def _read_now(record: Callable[..., None], slots: Any, *args: Any) -> None:
    record(own_int64(slots), *args)


def allocators_of(allocator: Any) -> list[tuple[str, Any]]:
    """Return `(kind, allocator)` of each pool behind an allocator."""
    swa = getattr(allocator, "swa_attn_allocator", None)
    if swa is None:
        return [("full", allocator)]
    full = allocator.full_attn_allocator
    return [("swa", swa)] if full is swa else [("full", full), ("swa", swa)]


def knows_allocator(allocator: Any) -> bool:
    """Say whether what an allocator, and those that it is made of, give out are slots of tokens: by their very classes."""
    return {type(part).__name__ for part in (allocator, *(part for _, part in allocators_of(allocator)))} <= ALLOCATORS


def calls_as_hooked(tree_cache: Any) -> None:
    """Have parts of a prefix cache that keep an allocator's method of when they were made (0.5.16) call what stands there now."""
    for component in getattr(tree_cache, "_components_tuple", ()):
        free = getattr(component, "_free_full", None)
        if (allocator := getattr(free, "__self__", None)) is not None:
            component._free_full = lambda slots, allocator=allocator: allocator.free(slots)


def promised(header: TraceHeader, allocator: Any, server_args: Any, *, followed: bool) -> TraceHeader:
    """Return a header that says what is recorded of an allocator's slots; `followed`: whether they are at all.

    Of some versions (0.5.11 does, 0.5.14 does not) drafts take slots and put the free list back: these frees nobody sees.
    """
    if not followed:
        kind = "" if knows_allocator(allocator) else f", {type(allocator).__name__} is not known"
        return replace(header, notes=(*header.notes, f"allocations and frees of slots are not recorded{kind}"))
    restored = hasattr(allocator, "restore_state") and getattr(server_args, "speculative_algorithm", None)
    return header if restored else replace(header, slot_history="allocator")


def sweeps_promised(header: TraceHeader, tree_cache: Any) -> TraceHeader:
    """Return a header without sweeps, and a note that says so, if SGLang has no walker for this type of prefix cache."""
    if not header.sweep_interval:
        return header
    try:
        walker()(radix_cache=tree_cache, unlocked_only=True)
    except Exception as error:  # noqa: BLE001  # some versions have no walker, none knows all caches: all else is recorded
        said = f"no sweeps: the prefix cache cannot be walked ({type(error).__name__}: {error})"
        return replace(header, sweep_interval=0, notes=(*header.notes, said))
    return header


def walker() -> Any:
    """Return what SGLang's own canary walks the prefix cache with."""
    from sglang.srt.kv_canary.radix_cache_walker import walk_radix_cache_for_canary

    return walk_radix_cache_for_canary


class RadixCacheWalk:
    """Walks the prefix cache every so many target forwards; if the engine's own canary sweeps, right after it."""

    def __init__(
        self, target: Any, tree_cache: Any, layout: SglangLayout, every: int, recorder: Recorder | DeviceRecorder
    ) -> None:
        self._target = target
        self._tree_cache = tree_cache
        self._layout = layout
        self._runner: RunnerLayout = layout.runners[id(target)]
        self._recorder = recorder
        self._online = online_sweep_interval(target) > 0
        self._every = every
        self._forwards = 0
        self._passes = self._online_passes()
        # Of a target whose pools are of no known class no slots are recorded, and there is nothing to walk.
        self.walks = bool(every) and bool(self._runner.groups)
        self._walk: Any = walker() if self.walks else None

    def _online_passes(self) -> int:
        sweeps = getattr(getattr(self._target, "canary_manager", None), "_sweep_orchestrator", None)
        return int(getattr(sweeps, "sweep_passes", 0))

    @beside
    def on_forward(self, *_args: Any, **_kwargs: Any) -> Around:
        """Walk at the end of a target's forward, where SGLang's canary sweeps."""
        yield
        self.after_forward()

    def after_forward(self) -> None:
        """Walk if it is time; called after each forward of the target, at its very end."""
        if not self.walks:
            return
        if self._online:
            passes = self._online_passes()
            due, self._passes = passes != self._passes, passes
        else:
            due = self._forwards % self._every == 0
        self._forwards += 1
        if due:
            self._record(self._walk(radix_cache=self._tree_cache, unlocked_only=False))

    def _record(self, found: Any) -> None:
        slots = own_int64(found.slot_indices)
        positions, prev = own_int64(found.positions), own_int64(found.prev_slot_indices)
        unlocked = self._walk(radix_cache=self._tree_cache, unlocked_only=True)
        locked = (~np.isin(slots, own_int64(unlocked.slot_indices))).astype(np.int64)
        parts = []
        for number in self._runner.groups.values():
            own = np.full(slots.size, number, np.int64), own_slots(self._layout, number, slots), positions
            parts.append((*own, np.where(prev < 0, prev, own_slots(self._layout, number, prev)), locked))
        names = ("groups", "slots", "positions", "prev_slots", "locked")
        columns: Any = map(np.concatenate, zip(*parts, strict=True))
        self._recorder.sweep(runner=self._runner.index, **dict(zip(names, columns, strict=True)))
