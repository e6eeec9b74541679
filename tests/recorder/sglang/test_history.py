"""The allocator's slots and the prefix cache, as the recorder is told of them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.engines.common.hooking import (
    wrap_method,
)
from kvcanary.recorder.engines.common.outermost import OutermostCalls
from kvcanary.recorder.engines.sglang import history as module
from kvcanary.recorder.engines.sglang import idle
from kvcanary.recorder.engines.sglang.history import (
    GroupHistory,
    RadixCacheWalk,
    calls_as_hooked,
    promised,
    sweeps_promised,
)
from kvcanary.recorder.trace.header import TraceHeader

from .fake_engine import TokenToKVPoolAllocator


class Told:
    """Stands for a recorder: keeps what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def slots(self, kind: str, *, group: int, slots: Any, note: str) -> None:
        self.calls.append((kind, group, slots.tolist(), -1, -1, "", note))

    def allocations(self, groups: Any, slots: Any, requests: Any, *, request_ids: Any, rows: Any) -> None:
        for request in np.unique(requests).tolist():
            said = slots[requests == request].tolist(), int(request_ids[request]), int(rows[request])
            status = "" if said[1] >= 0 else "shared"
            self.calls += [("alloc", group, *said, status, "") for group in groups]

    def sweep(self, **entries: Any) -> None:
        self.calls.append(("sweep", entries))


def history(page_size: int, told: Told) -> tuple[TokenToKVPoolAllocator, GroupHistory]:
    allocator = TokenToKVPoolAllocator(24 - page_size, page_size)
    kept = GroupHistory(allocator, (0,), 24, told)  # type: ignore[arg-type]
    follow(allocator, kept, lambda name, error: pytest.fail(f"{name}: {error}"))
    return allocator, kept


def follow(allocator: Any, kept: GroupHistory, on_fault: Any, live: Any = lambda: True) -> None:
    for name, hook in kept.follow_calls(OutermostCalls(on_fault, live)).items():
        assert wrap_method(allocator, name, hook, on_fault)


def write(kept: GroupHistory, slots: Any, lens: list[int], rows: list[int], ids: list[int]) -> None:
    kept.written(np.array(slots), np.array(rows), np.array(ids), np.array(lens))


def test_slots_are_told_when_they_are_first_written_for_whom_they_are() -> None:
    told = Told()
    allocator, kept = history(1, told)
    allocator.alloc(5)  # 1..5
    assert told.calls == []
    write(kept, [1, 2, 4, 0], [2, 1, 1], [3, 2, 0], [77, 88, -1])
    write(kept, [1, 2, 4], [2, 1], [3, 2], [77, 88])  # told already
    assert told.calls == [("alloc", 0, [1, 2], 77, 3, "", ""), ("alloc", 0, [4], 88, 2, "", "")]


def test_a_page_is_told_whole_and_once() -> None:
    told = Told()
    allocator, kept = history(4, told)
    assert allocator.alloc(8).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    write(kept, [4], [1], [1], [7])
    write(kept, [5], [1], [1], [7])
    allocator.free(torch.tensor([4, 5]))
    allocator.free(torch.tensor([8]))  # never written
    assert told.calls == [
        ("alloc", 0, [4, 5, 6, 7], 7, 1, "", ""),
        ("free", 0, [4, 5, 6, 7], -1, -1, "", ""),
        ("alloc", 0, [8, 9, 10, 11], -1, -1, "", "never written"),
        ("free", 0, [8, 9, 10, 11], -1, -1, "", ""),
    ]


def test_a_page_that_is_given_out_twice_is_told_for_each_who_writes_it() -> None:
    told = Told()
    allocator, kept = history(4, told)
    allocator.free_pages = torch.tensor([1, 1, 1])
    assert allocator.alloc(8).tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    write(kept, [4, 4, 5], [1, 2], [1, 2], [7, 8])
    allocator.alloc(4)
    write(kept, [6, 6], [1, 1], [2, 1], [8, 7])
    assert [call[2:4] for call in told.calls] == [([4, 5, 6, 7], who) for who in (7, 8, 8)]


def test_a_slot_that_is_given_out_twice_and_never_written_is_told_twice_when_it_comes_back() -> None:
    told = Told()
    allocator, _ = history(1, told)
    allocator.free_pages = torch.tensor([3, 3])
    freed = allocator.alloc(2)
    allocator.free(freed[:1])
    assert [call[0] for call in told.calls] == ["alloc", "alloc", "free"]


@pytest.mark.parametrize("page_size", [1, 4])
def test_frees_that_the_engine_puts_off_are_told_once(page_size: int) -> None:
    told = Told()
    allocator, kept = history(page_size, told)
    slots = allocator.alloc(8)
    write(kept, slots.numpy(), [8], [1], [7])
    allocator.free_group_begin()
    allocator.free(slots)
    assert [call[0] for call in told.calls] == ["alloc", "free"]
    allocator.free_group_end()
    allocator.alloc(page_size)
    assert [call[0] for call in told.calls] == ["alloc", "free"]


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_comes_back_is_told_where_the_engine_puts_off_what_changes_until_then(page_size: int) -> None:
    told = Told()
    allocator, kept = history(page_size, told)
    slots = allocator.alloc(12)
    write(kept, slots.numpy(), [12], [1], [7])
    allocator.free_group_begin()
    allocator.free(slots[:4])
    assert allocator.free_group is not None
    allocator.free_group[0].copy_(slots[4:8])  # a part of a row that is another by the end
    allocator.free_group_end()
    assert [(call[0], call[2], call[-1]) for call in told.calls[1:]] == [
        ("free", slots[:4].tolist(), ""),
        ("free", slots[4:8].tolist(), "put off"),
    ]
    allocator.free_group_begin()
    allocator.free(slots[8:])
    allocator.free_group_end()
    assert [call[0] for call in told.calls[3:]] == ["free"]


def test_of_an_allocator_that_has_a_list_all_the_time_nothing_is_kept_but_what_is_put_off() -> None:
    told = Told()
    allocator, kept = history(1, told)
    slots = allocator.alloc(4)
    write(kept, slots.numpy(), [4], [1], [7])
    at_once: Any = allocator
    for at_once.is_not_in_free_group, asked in ((True, 0), (False, 1)):
        allocator.free_group = []
        allocator.free(slots[:2])
        assert len(kept._asked) == asked  # which would grow for ever


def test_an_eviction_and_a_flush_have_their_names() -> None:
    told = Told()
    allocator, kept = history(4, told)
    slots = allocator.alloc(8)
    write(kept, slots.numpy(), [8], [1], [7])
    kept.evicting = True
    allocator.free(slots[:4])
    kept.evicting = False
    allocator.clear()
    assert [call[0] for call in told.calls] == ["alloc", "evict", "evict"]
    assert told.calls[2][2:] == ([8, 9, 10, 11], -1, -1, "", "flush")


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_neither_free_nor_cached_in_an_idle_engine_is_nobodys(page_size: int) -> None:
    told = Told()
    allocator, kept = history(page_size, told)
    slots = allocator.alloc(16)
    write(kept, slots[:12].tolist(), [12], [1], [77])
    allocator.free(slots[:4])
    told.calls.clear()
    kept.nobodys(slots[4:8])
    kept.nobodys(slots[4:8])  # said already
    left = slots[8:].tolist()
    assert told.calls == [
        ("alloc", 0, left[4:], -1, -1, "", "never written"),
        ("alloc", 0, left, -1, -1, "", "nobody's"),
    ]


@pytest.mark.parametrize("lost", [0, 8])
def test_an_idle_engine_is_looked_at_once_if_its_counts_miss_slots(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(idle, "walker", lambda: lambda **_: SimpleNamespace(slot_indices="the cache's"))
    kept = SimpleNamespace(page_size=4, nobodys=looks.append)
    kept.allocator = SimpleNamespace(size=42, available_size=lambda: 40 - 12 - lost)  # and two slots that make no page
    tree = SimpleNamespace(session_records=dict, full_evictable_size=lambda: 8, full_protected_size=lambda: 4)
    recorder = SimpleNamespace(next_forward=3)
    scheduler = SimpleNamespace(
        tree_cache=tree, token_to_kv_pool_allocator=kept.allocator, is_fully_idle=lambda: recorder.next_forward != 4
    )
    looking = idle.IdleLooks(scheduler, [kept], recorder)  # type: ignore[list-item]
    for recorder.next_forward in (3, 3, 4, 5):
        looking.on_idle()
    assert looks == ["the cache's"] * bool(lost)


def test_a_request_with_a_negative_id_holds_slots_as_one_of_several() -> None:
    told = Told()
    allocator, kept = history(1, told)
    allocator.alloc(1)
    write(kept, [1], [1], [1], [-5])
    assert told.calls == [("alloc", 0, [1], -5, 1, "shared", "")]


class Nested(TokenToKVPoolAllocator):
    """Takes a page more than it gives out, by its own methods."""

    fails = False

    def alloc_extend(self, size: int) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("no more memory")
        spare, given = self.alloc(1), self.alloc(size)
        self.free(spare)
        return given


def test_what_an_allocator_takes_for_itself_and_gives_back_at_once_is_not_told() -> None:
    told = Told()
    allocator = Nested(23, 1)
    kept = GroupHistory(allocator, (0,), 24, told)  # type: ignore[arg-type]
    follow(allocator, kept, lambda name, error: pytest.fail(f"{name}: {error}"))
    assert allocator.alloc_extend(2).tolist() == [2, 3]
    write(kept, [1, 2, 3], [3], [1], [7])
    assert told.calls == [("alloc", 0, [2, 3], 7, 1, "", "")]


def test_an_allocation_that_fails_is_the_engines_error_and_said_once_while_it_is_recorded() -> None:
    faults: list[tuple[str, str]] = []
    live = [True]
    allocator = Nested(23, 1)
    allocator.fails = True
    kept = GroupHistory(allocator, (0,), 24, Told())  # type: ignore[arg-type]
    follow(allocator, kept, lambda name, error: faults.append((name, str(error))), lambda: live[0])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no more memory"):
            allocator.alloc_extend(2)
        live[0] = False
    assert faults == [("alloc_extend", "the engine's function raised RuntimeError")]
    allocator.fails = False
    allocator.alloc(1)
    assert not kept._pending.any()


# The prefix cache


def walk(told: Told, monkeypatch: pytest.MonkeyPatch, *, every: int, online: int = 0) -> tuple[Any, RadixCacheWalk]:
    lut = torch.arange(100) // 2
    groups = [SimpleNamespace(lut=-1), SimpleNamespace(lut=0)]
    target = SimpleNamespace(canary_manager=None)
    if online:
        target.canary_manager = SimpleNamespace(
            config=SimpleNamespace(sweep_interval=online), _sweep_orchestrator=SimpleNamespace(sweep_passes=0)
        )
    runner = SimpleNamespace(groups={"full": 0, "swa": 1}, index=0)
    layout: Any = SimpleNamespace(runners={id(target): runner}, groups=groups, luts=[lut])

    def found(radix_cache: str, unlocked_only: bool) -> Any:
        assert radix_cache == "tree"
        slots = [21] if unlocked_only else [20, 21]
        return SimpleNamespace(slot_indices=slots, positions=[0, 1], prev_slot_indices=[-1, 20])

    monkeypatch.setattr(module, "walker", lambda: found)
    return target, RadixCacheWalk(target, "tree", layout, every, told)  # type: ignore[arg-type]


def test_a_walk_tells_each_group_in_its_own_numbering(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    _, walker = walk(told, monkeypatch, every=3)
    for _ in range(4):
        walker.after_forward()
    assert [call[0] for call in told.calls] == ["sweep", "sweep"], "at forwards 0 and 3"
    entries = {name: np.asarray(value).tolist() for name, value in told.calls[0][1].items()}
    assert entries == {
        "groups": [0, 0, 1, 1],
        "slots": [20, 21, 10, 10],
        "positions": [0, 1, 0, 1],
        "prev_slots": [-1, 20, -1, 10],
        "locked": [1, 0, 1, 0],
        "runner": 0,
    }


def test_a_walk_follows_the_online_canarys_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    target, walker = walk(told, monkeypatch, every=9, online=5)
    for passes in (0, 1, 1, 2):
        target.canary_manager._sweep_orchestrator.sweep_passes = passes
        walker.after_forward()
    assert len(told.calls) == 2


def test_no_walk_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    _, walker = walk(told, monkeypatch, every=0)
    walker.after_forward()
    assert told.calls == []


def test_no_walk_where_no_pool_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SimpleNamespace(canary_manager=None)
    layout: Any = SimpleNamespace(runners={id(target): SimpleNamespace(groups={}, index=0)}, groups=[], luts=[])
    found = SimpleNamespace(slot_indices=[20], positions=[0], prev_slot_indices=[-1])
    monkeypatch.setattr(module, "walker", lambda: lambda **_: found)
    told = Told()
    RadixCacheWalk(target, "tree", layout, 3, told).after_forward()  # type: ignore[arg-type]
    assert told.calls == []


def test_a_prefix_cache_that_the_walker_does_not_know_is_promised_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def knows_trees(radix_cache: str, unlocked_only: bool) -> None:
        if radix_cache != "tree":
            raise NotImplementedError(f"does not support {radix_cache}")

    monkeypatch.setattr(module, "walker", lambda: knows_trees)
    header = TraceHeader(groups=(), tables=(), sweep_interval=9)
    assert sweeps_promised(header, "tree") == header
    without = sweeps_promised(header, "ChunkCache")
    assert without.sweep_interval == 0
    assert without.notes == (
        "no sweeps: the prefix cache cannot be walked (NotImplementedError: does not support ChunkCache)",
    )


def test_what_kept_an_allocators_method_calls_what_was_hooked_since() -> None:
    allocator = TokenToKVPoolAllocator(8, 1)
    part: Any = SimpleNamespace(_free_full=allocator.free)
    calls_as_hooked(SimpleNamespace(_components_tuple=(part, SimpleNamespace())))
    freed: list[list[int]] = []
    allocator.free = lambda slots: freed.append(slots.tolist())  # type: ignore[method-assign]
    part._free_full(torch.tensor([3, 4]))
    assert freed == [[3, 4]]
    calls_as_hooked(object())  # most caches have no such parts


class RestoringAllocator(TokenToKVPoolAllocator):
    def restore_state(self, state: torch.Tensor) -> None:
        self.free_pages = state


@pytest.mark.parametrize("drafts", [None, "EAGLE"])
def test_a_free_list_that_drafts_put_back_is_promised_to_nobody(drafts: str | None) -> None:
    header = TraceHeader(groups=(), tables=())
    allocator = TokenToKVPoolAllocator(8, 1)
    args = SimpleNamespace(speculative_algorithm=drafts)
    assert promised(header, allocator, args, followed=True).slot_history == "allocator"
    restoring = RestoringAllocator(8, 1)
    assert promised(header, restoring, args, followed=True).slot_history == ("" if drafts else "allocator")
    (note,) = promised(header, allocator, args, followed=False).notes
    assert note == "allocations and frees of slots are not recorded"
