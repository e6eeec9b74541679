"""The adapter's parts on their own: hooks, ids, truth tokens, forward modes, layouts, allocators, walks, drafts."""

import functools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.host_arrays import own_int64
from kvcanary.recorder.engines.common import hooking
from kvcanary.recorder.engines.common.hooking import (
    PLACES,
    StepCost,
    Target,
    around,
    beside,
    harmless,
    wrap_method,
    wrap_often,
)
from kvcanary.recorder.engines.common.requests import request_id_of
from kvcanary.recorder.engines.sglang import hooks as sglang_hooks
from kvcanary.recorder.engines.sglang import requests as sglang_requests
from kvcanary.recorder.engines.sglang.attachment import SglangAttachment
from kvcanary.recorder.engines.sglang.forward import MODES, draft_steps, draft_tree, forward_input, prefix_and_extend
from kvcanary.recorder.engines.sglang.history import GroupHistory, RadixCacheWalk
from kvcanary.recorder.engines.sglang.hooks import TARGETS
from kvcanary.recorder.engines.sglang.layout import SglangLayout, ranks_of
from kvcanary.recorder.engines.sglang.requests import BatchLookup, SglangRequest, SglangRequests, row_of
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.header import NotWatched

from .fake_engine import SLOTS, MHATokenToKVPool, MLATokenToKVPool, ModelRunner, SWAKVPool, TokenToKVPoolAllocator


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


def settings(**values: Any) -> RecordingSettings:
    return RecordingSettings(folder=None, **values)  # type: ignore[arg-type]


# Hooks


def test_a_hook_sees_arguments_result_and_exception_and_changes_none() -> None:
    seen: list[Any] = []

    def hook(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return lambda result, error: seen.append((result, error))

    wrapper = harmless(hook, lambda name, error: seen.append(("fault", name)))
    assert wrapper(lambda a, b: a + b, 2, b=3) == 5
    error = KeyError("engine's own")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError, match="engine's own"):
        wrapper(fail)
    assert seen == [((2,), {"b": 3}), (5, None), ((), {}), (None, error)]


def test_what_is_lost_if_the_engine_s_function_raises_is_said_once() -> None:
    faults: list[tuple[str, str]] = []

    def hook(kind: Any, name: str) -> Any:
        def generator(*_: Any) -> Any:
            yield
            pytest.fail("goes on behind a function that raised")

        generator.__name__ = name
        return functools.partial(harmless(kind(generator), lambda name, error: faults.append((name, str(error)))))

    def fail() -> None:
        raise KeyError("engine's own")

    inner, outer, other = hook(around, "inner"), hook(around, "outer"), hook(beside, "other")
    with pytest.raises(KeyError, match="engine's own"):
        other(outer, inner, fail)
    assert faults == [("inner", "the engine's function raised KeyError")]
    with pytest.raises(KeyError):
        other(fail)
    assert len(faults) == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_raises_is_reported_and_the_engine_goes_on(late: bool) -> None:
    faults: list[tuple[str, str]] = []

    def on_thing(*_: Any) -> Any:
        def finish(*_: Any) -> None:
            raise ValueError("injected")

        if late:
            return finish
        raise ValueError("injected")

    assert harmless(on_thing, lambda name, error: faults.append((name, str(error))))(lambda: 7) == 7
    assert faults == [("on_thing", "injected")]


def test_what_steps_cost_by_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooking, "ENTRIES_KEPT", 14)
    cost = StepCost(("on_a", "on_b"))
    assert cost.summary() == {"steps": 0}
    decode, extend = SimpleNamespace(name="DECODE"), SimpleNamespace(name="EXTEND")
    on_b, on_c = cost.places("on_b")[1], cost.places("on_c")
    assert on_c[0] == on_c[1] != on_b

    def spend(nanoseconds: int) -> None:
        cost.spent(nanoseconds * PLACES + on_b)
        for place in on_c:
            cost.spent(PLACES + place)

    def steps(*told: tuple[int, Any]) -> None:
        for nanoseconds, mode in told:
            spend(nanoseconds)
            cost.next_step(mode, 8)

    steps((9_000, decode), (5, extend), (1, decode), (3, decode))
    spend(7)  # in a step that has not ended
    assert cost.summary() == {
        "steps": 3,
        "engine_thread_ns_p50": 5,
        "engine_thread_ns_p99": 7,
        "by_forward": {"DECODE 8": [2, 7, 7], "EXTEND 8": [1, 3, 3]},
        "by_hook": {
            "DECODE 8": {"on_a before": 0, "on_a after": 0, "on_b before": 0, "on_b after": 5, "others": 2},
            "EXTEND 8": {"on_a before": 0, "on_a after": 0, "on_b before": 0, "on_b after": 1, "others": 2},
        },
    }
    steps(*[(100 + n, extend if n % 2 else decode) for n in range(20)])
    assert cost.summary()["steps"] < 10, "only the latest are kept"
    steps(*[(1, decode)] * 100)
    assert cost.summary()["steps"] < 20, "of steps of one kind, too"


def test_hooks_that_are_called_without_a_recording_keep_nothing() -> None:
    attachment = SglangAttachment(settings())
    model = harmless(attachment.on_model, attachment.fault, attachment.cost)
    other = harmless(lambda: None, attachment.fault, attachment.cost)
    for _ in range(100):
        model(lambda *_: None, None, None)
        other(lambda: None)
    assert len(attachment.cost.log) < 5


def test_each_hook_adds_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10, 15, 100, 107, 1000, 1004))
    monkeypatch.setattr(hooking, "perf_counter_ns", lambda: next(clock))
    cost = StepCost(("on_a",))
    mode = SimpleNamespace(name="DECODE")

    def on_a() -> Any:
        return lambda *_: None

    def on_b() -> None: ...

    cost.next_step(mode, 1)
    harmless(on_a, lambda *_: None, cost)(lambda: None)
    harmless(on_b, lambda *_: None, cost)(lambda: None)
    cost.next_step(mode, 1)
    assert cost.summary()["by_hook"] == {"DECODE 1": {"on_a before": 5, "on_a after": 7, "others": 4}}


def test_what_is_called_often_is_looked_at_when_something_happened() -> None:
    told: list[Any] = []
    owner = SimpleNamespace(count=0, step=lambda grow, result: setattr(owner, "count", owner.count + grow) or result)
    assert wrap_often(owner, "step", lambda *_: owner.count, lambda *seen: told.append(seen), lambda *_: None)
    assert owner.step(0, None) is None
    assert told == []
    owner.step(2, None)
    assert owner.step(0, [7]) == [7]
    assert told == [(0, None, 2, None), (2, [7], 0, [7])]


def test_what_is_called_often_never_raises_its_own_and_says_what_the_engine_raised() -> None:
    faults: list[Any] = []

    def fail(*_: Any) -> None:
        raise KeyError("ours")

    def failing(*_: Any) -> None:
        raise ValueError("the engine's")

    owner = SimpleNamespace(good=lambda: [1], bad=failing)
    wrap_often(owner, "good", fail, fail, lambda name, error: faults.append((name, type(error).__name__)))
    wrap_often(owner, "bad", lambda: 0, fail, lambda name, error: faults.append((name, type(error).__name__)))
    assert owner.good() == [1]
    with pytest.raises(ValueError, match="the engine's"):
        owner.bad()
    assert faults == [("good", "KeyError"), ("good", "KeyError"), ("bad", "EngineError")]


def test_wrap_method_says_whether_there_is_one() -> None:
    owner = SimpleNamespace(go=lambda x: x + 1, absent=None)
    calls: list[int] = []
    assert wrap_method(owner, "go", lambda x: calls.append(x), lambda *_: None)
    assert not wrap_method(owner, "absent", lambda x: None, lambda *_: None)
    assert (owner.go(4), calls) == (5, [4])


def test_find_takes_the_first_path_that_this_version_has() -> None:
    paths = ("no.such.module:thing", "json.encoder:NoSuchClass.method", "json.encoder:JSONEncoder.encode")
    assert Target("x", "", paths).find() == paths[2]
    assert Target("x", "", paths[:2]).find() is None


def test_what_cannot_be_hooked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    registry = SimpleNamespace(register=lambda path, hook, kind: registered.append(path))
    module = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.plugins.hook_registry", module)
    attachment = SimpleNamespace(on_a=None, on_b=None, fault=None, cost=None)
    a = Target("a", "x", ("json:dumps",))
    b = Target("b", "sampled tokens are not recorded", ("json:no_such", "json:neither"))
    assert sglang_hooks.register([a, b], attachment) == [
        NotWatched(what="other", name="not hooked: json.no_such", reason="sampled tokens are not recorded")
    ]
    assert registered == ["json.dumps"]
    essential = Target("b", "", b.paths, essential=True)
    with pytest.raises(ValueError, match=r"this SGLang has no json\.no_such; the adapter knows versions"):
        sglang_hooks.register([a, essential], attachment)
    assert registered == ["json.dumps"], "nothing is hooked by half"


def test_target_names_are_distinct() -> None:
    names = [path for target in TARGETS for path in target.paths]
    assert len(names) == len(set(names))


# Requests


def test_ids_are_sglangs_own() -> None:
    # blake2b with a digest of 8 bytes, little-endian and signed, as its token oracle has it
    assert request_id_of("a", signed=True) == request_id_of("a", signed=False) == 3405396810240292928
    assert request_id_of("f", signed=True) == -2626098076463622610
    assert request_id_of("f", signed=False) == -2626098076463622610 + 2**63


def test_rows_of_all_versions() -> None:
    assert row_of(SimpleNamespace(req_pool_idx=3)) == 3
    assert row_of(SimpleNamespace(req_pool_idx=None)) == -1
    assert row_of(SimpleNamespace(req_pool_idx=3, kv=None)) == 3
    assert row_of(SimpleNamespace(req_pool_idx=3, kv=SimpleNamespace(committed=7))) == 3
    assert row_of(SimpleNamespace(kv=SimpleNamespace(req_pool_idx=4))) == 4
    assert row_of(SimpleNamespace(kv=SimpleNamespace(req_pool_idx=None))) == -1


def test_truth_follows_the_output_and_a_new_prompt() -> None:
    req = SimpleNamespace(rid="r", origin_input_ids=[5, 6, 7], output_ids=[])
    known = SglangRequest(req, 1)
    assert known.truth().tolist() == [5, 6, 7]
    for token in range(20):
        req.output_ids.append(token)
        assert known.truth().tolist() == [5, 6, 7, *range(token + 1)]
    del req.output_ids[4:]
    assert known.truth().tolist() == [5, 6, 7, 0, 1, 2, 3]
    req.origin_input_ids = [9, 9]
    assert known.truth().tolist() == [9, 9, 0, 1, 2, 3]


def test_a_book_knows_a_name_that_is_used_again_as_another_request() -> None:
    book = SglangRequests(exact_ids=False)
    first, second = (SimpleNamespace(rid="r", origin_input_ids=[i], output_ids=[]) for i in (1, 2))
    assert book.see(first)[1]
    assert not book.see(first)[1]
    assert book.see(second)[1]
    book.drop(first)  # the name is the second's by now
    truth = book.truth(["r"], 2)
    assert truth is not None
    assert (truth.flat.tolist(), truth.lens.tolist()) == ([2], [1, 0])
    assert book.ids(["r"], 2).tolist() == [request_id_of("r", signed=False), -1]
    assert book.truth(["r", "stranger"], 2) is None


def test_lengths_are_looked_up_once_a_moment() -> None:
    book = SglangRequests(exact_ids=False)
    reqs = [SimpleNamespace(rid=f"r{i}", origin_input_ids=[i] * 3, output_ids=[]) for i in range(2)]
    for req in reqs:
        book.see(req)
    batches = BatchLookup(book)
    known = batches.of(["r0", "r1"], 3)
    assert batches.of(["r0", "r1"], 3) is known
    before = known.output_lens(1)
    reqs[1].output_ids += [7, 8]
    assert known.output_lens(1) is before
    after = known.output_lens(2)
    assert [np.frombuffer(lens, np.int64).tolist() for lens in (before, after)] == [[0, 0], [0, 2]]
    tokens, lens = known.sampled(before, after)
    assert (tokens.tolist(), lens.tolist()) == ([7, 8], [0, 2])
    assert known.ids.tolist() == [request_id_of(r, signed=False) for r in ("r0", "r1")] + [-1]
    stranger = batches.of(["r0", "r9"], 2)
    assert (stranger.outputs, stranger.truth, stranger.output_lens(3)) == (None, None, b"")
    assert batches.of(None, 2).ids.tolist() == [-1, -1]


# Forwards


def batch(mode: str, **fields: Any) -> Any:
    values = {
        "forward_mode": SimpleNamespace(name=mode),
        "req_pool_indices": torch.tensor([2, 3]),
        "seq_lens": torch.tensor([10, 20]),
        "positions": torch.tensor([9, 19]),
        "input_ids": torch.tensor([70, 71]),
        "out_cache_loc": torch.tensor([30, 31]),
        "extend_seq_lens": torch.tensor([3, 4]),
        "extend_prefix_lens": torch.tensor([7, 16]),
        "spec_info": SimpleNamespace(draft_token_num=4),
    }
    return SimpleNamespace(**{**values, **fields})


@pytest.mark.parametrize(
    ("mode", "prefix", "extend"),
    [
        ("DECODE", [9, 19], [1, 1]),
        ("EXTEND", [7, 16], [3, 4]),
        ("MIXED", [7, 16], [3, 4]),
        ("TARGET_VERIFY", [10, 20], [4, 4]),
        ("DRAFT_EXTEND_V2", [7, 16], [3, 4]),
    ],
)
def test_prefix_and_extend_by_mode(mode: str, prefix: list[int], extend: list[int]) -> None:
    told = prefix_and_extend(batch(mode), MODES[mode], 2, np.array([9, 19]))
    assert [part.tolist() for part in told] == [prefix, extend]


def test_a_decode_goes_by_positions_and_its_padding_has_none() -> None:
    prefix, extend = prefix_and_extend(batch("DECODE"), "decode", 3, np.array([9, 19]))
    assert (prefix.tolist(), extend.tolist()) == ([9, 19, 0], [1, 1, 1])


def test_a_forward_of_one_table_says_nothing_of_another() -> None:
    tables = [torch.zeros((4, 8), dtype=torch.int32), torch.ones((4, 8), dtype=torch.int32)]
    layout: Any = SimpleNamespace(tables=tables, luts=[])
    runner: Any = SimpleNamespace(index=1, table=1)
    told = forward_input(
        batch("DECODE", out_cache_loc=torch.tensor([30])),
        runner=runner,
        layout=layout,
        request_ids=np.array([1, 2]),
        truth=None,
    )
    assert [loc.tolist() for loc in told.out_cache_loc] == [[-1, -1], [30, -1]]
    assert told.reads[0].counts.tolist() == [0, 0]
    assert told.reads[1] is tables[1]


def test_a_batch_of_an_unknown_mode_is_refused() -> None:
    layout: Any = SimpleNamespace(tables=[], luts=[])
    runner: Any = SimpleNamespace(index=0, table=0)
    with pytest.raises(ValueError, match="FUTURE"):
        forward_input(batch("FUTURE"), runner=runner, layout=layout, request_ids=np.array([1, 2]), truth=None)


# Layouts


def test_a_hybrid_pool_has_two_groups_and_a_draft_its_own() -> None:
    target, draft = ModelRunner(), ModelRunner()
    full, swa = target.token_to_kv_pool, draft.token_to_kv_pool
    lut = torch.zeros(97, dtype=torch.int64)
    target.token_to_kv_pool = SWAKVPool(full_kv_pool=full, swa_kv_pool=swa, full_to_swa_index_mapping=lut)
    target.sliding_window_size = 16
    draft.is_draft_worker = True
    draft.req_to_token_pool = target.req_to_token_pool
    layout = SglangLayout([target, draft], settings())
    shown = [(g.name, g.kind, g.window, g.runner, g.table, g.lut, len(g.streams)) for g in layout.groups]
    assert shown == [
        ("full", "full", 0, 0, 0, -1, 2),
        ("swa", "swa", 16, 0, 0, 0, 2),
        ("draft_full", "full", 0, 1, 0, -1, 2),
    ]
    assert [(r.name, r.token_offset) for r in layout.names] == [("target", 0), ("draft", 1)]
    assert (len(layout.tables), len(layout.luts), layout.not_watched) == (1, 1, [])
    assert [group.num_layers for group in layout.groups] == [1, 1, 1]


def test_bytes_that_are_no_aligned_rows_are_not_captured_and_that_is_said() -> None:
    runner = ModelRunner()
    runner.token_to_kv_pool = MLATokenToKVPool(kv_buffer=[torch.zeros(20, 1, 73, dtype=torch.float64)], page_size=1)
    layout = SglangLayout([runner], settings())
    assert (layout.groups[0].halves, layout.groups[0].streams, layout.sources) == (("K",), (), {})
    reason = "target full: bytes of K: a token is no row of aligned bytes"
    assert layout.not_watched == [NotWatched(what="bytes", name="MLATokenToKVPool", reason=reason)]
    runner.token_to_kv_pool = MLATokenToKVPool(kv_buffer=[torch.zeros(20, 1, 72, dtype=torch.float64)], page_size=1)
    layout = SglangLayout([runner], settings(capture_bytes=1024))
    assert [(s.half, s.bytes_per_token, s.capture_bytes) for s in layout.groups[0].streams] == [("K", 576, 576)]


def test_a_pool_of_an_unknown_class_is_named_and_not_guessed() -> None:
    class PageMajorMHATokenToKVPool(MHATokenToKVPool):
        """Derived from one that is known, and laid out otherwise."""

    for pool in (object(), PageMajorMHATokenToKVPool(**vars(ModelRunner().token_to_kv_pool))):
        runner = ModelRunner()
        runner.token_to_kv_pool = pool
        layout = SglangLayout([runner], settings())
        assert layout.groups == []
        assert [(entry.what, entry.name) for entry in layout.not_watched] == [("pool", type(pool).__name__)]


def test_of_a_hybrid_linear_pool_the_full_attention_is_recorded() -> None:
    class HybridLinearKVPool(SimpleNamespace):
        """Has no buffers of its own."""

    runner = ModelRunner()
    full = MHATokenToKVPool(**vars(runner.token_to_kv_pool), size=SLOTS - 4, model_layer_ids=(3, 7))
    full.page_size = 4
    runner.token_to_kv_pool = HybridLinearKVPool(size=SLOTS - 4, page_size=4, full_kv_pool=full)
    layout = SglangLayout([runner], settings())
    (group,) = layout.groups
    assert (group.num_slots, group.page_size, group.halves) == (SLOTS, 4, ("K", "V"))
    assert [stream.layer for stream in group.streams] == [3, 3]
    assert [(entry.what, entry.name) for entry in layout.not_watched] == [("pool", "MambaPool")]


def test_bytes_beside_a_pools_own_are_named() -> None:
    class DSATokenToKVPool(MLATokenToKVPool):
        """Has an index of its own beside the latent rows."""

    runner = ModelRunner()
    runner.token_to_kv_pool = DSATokenToKVPool(kv_buffer=[torch.zeros(20, 1, 72, dtype=torch.float64)], page_size=1)
    layout = SglangLayout([runner], settings())
    assert len(layout.groups) == 1
    assert [(entry.what, entry.name) for entry in layout.not_watched] == [("bytes", "DSATokenToKVPool")]


def test_ranks_are_found_wherever_a_version_keeps_them() -> None:
    class Raising:
        def __getattr__(self, name: str) -> int:
            raise RuntimeError("not published")

    target = SimpleNamespace(tp_rank=2, server_args=SimpleNamespace(tp_size=4, dp_size=2))
    ranks = ranks_of(SimpleNamespace(pp_rank=1, dp_rank=None, ps=Raising()), target)
    assert (ranks.tp_rank, ranks.tp_size, ranks.pp_rank, ranks.dp_rank, ranks.dp_size) == (2, 4, 1, 0, 2)


# Slots


def history(page_size: int, told: Told) -> tuple[TokenToKVPoolAllocator, GroupHistory]:
    allocator = TokenToKVPoolAllocator(24 - page_size, page_size)
    kept = GroupHistory(allocator, (0,), 24, told)  # type: ignore[arg-type]
    for name, hook in kept.hooks().items():
        assert wrap_method(allocator, name, hook, lambda name, error: pytest.fail(f"{name}: {error}"))
    return allocator, kept


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


def test_a_request_with_a_negative_id_holds_slots_as_one_of_several() -> None:
    told = Told()
    allocator, kept = history(1, told)
    allocator.alloc(1)
    write(kept, [1], [1], [1], [-5])
    assert told.calls == [("alloc", 0, [1], -5, 1, "shared", "")]


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

    monkeypatch.setattr(RadixCacheWalk, "walker", lambda self: found)
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


# Drafts


def test_the_steps_of_a_draft_graph_become_forwards() -> None:
    before = batch("DECODE", rids=["a", "b"], out_cache_loc=torch.tensor([30, 31, 32, 40, 41, 42]))
    steps_of = draft_steps(before, own_int64)
    before.positions += 100  # the engine goes on with its buffers
    steps = steps_of((None, None, torch.tensor([[1, 2, 3], [4, 5, 6]]), None))
    shown = [(s.input_ids.tolist(), s.positions.tolist(), s.out_cache_loc.tolist(), s.rids) for s in steps]
    assert shown == [([1, 4], [9, 19], [30, 40], ["a", "b"]), ([2, 5], [10, 20], [31, 41], ["a", "b"])]


def test_an_idle_draft_has_no_steps() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    names = ("req_pool_indices", "positions", "out_cache_loc", "seq_lens")
    steps_of = draft_steps(batch("IDLE", rids=[], **dict.fromkeys(names, nothing)), own_int64)
    assert steps_of((None, None, torch.empty(0, 3), None)) == []


@pytest.mark.parametrize(
    ("said", "tree"),
    [
        ({}, ""),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}, ""),
        ({"speculative_algorithm": None, "speculative_eagle_topk": 4}, ""),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "speculative_eagle_topk is 4"),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 10}, "max_bfs_breadth is 10"),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, ""),
    ],
)
def test_draft_trees_are_told_from_chains(said: dict[str, Any], tree: str) -> None:
    found = draft_tree(SimpleNamespace(**said))
    assert tree in found
    assert bool(found) == bool(tree)


def test_the_engines_thread_goes_on_while_what_it_cost_is_summed_up() -> None:
    """The trace ends in a thread of its own, which must not hold what the hooks append to."""
    cost = StepCost()
    mode = SimpleNamespace(name="DECODE")
    for _ in range(100_000):
        cost.spent(PLACES)
    cost.next_step(mode, 1)
    begun, over = threading.Event(), threading.Event()

    def sum_up() -> None:
        for _ in range(20):
            cost.summary()
            begun.set()
        over.set()

    summing = threading.Thread(target=sum_up)
    summing.start()
    begun.wait()
    while not over.is_set():
        cost.spent(PLACES)  # raised BufferError
    summing.join()


def test_requests_that_wait_without_a_row_and_never_end_are_forgotten_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_requests, "MAX_KNOWN", 10)
    book = SglangRequests(exact_ids=False)

    def request(name: str, row: int | None) -> Any:
        return SimpleNamespace(rid=name, req_pool_idx=row, origin_input_ids=[1], output_ids=[])

    running = [request(f"running{n}", n + 1) for n in range(7)]
    for req in running:
        book.see(req)
    aborted = [request(f"aborted{n}", None) for n in range(100)]
    for req in aborted:
        assert book.see(req)[1]
    assert all(not book.see(req)[1] for req in running)
    known = sum(book.get(req.rid) is not None for req in aborted)
    assert known <= 14
