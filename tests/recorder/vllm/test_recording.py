"""An engine of vLLM's shape, recorded through the adapter's hooks: what stands in the trace, and that it is harmless."""

import logging
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvcanary.recorder.capture.host_arrays import gather_kv
from kvcanary.recorder.capture.recorder import Recorder
from kvcanary.recorder.engines.common.requests import request_id_of
from kvcanary.recorder.engines.vllm.hooks import GPU_WORKER, hook_module
from kvcanary.recorder.engines.vllm.kv import (
    PLAIN,
    TURNED,
    cache_scale,
    packed_views,
    row_source,
    stored_halves,
    turned_source,
)
from kvcanary.recorder.engines.vllm.layout import VllmLayout
from kvcanary.recorder.engines.vllm.results import StepLogprobs
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.header import StatePool
from kvcanary.recorder.trace.reader import read_trace
from kvcanary.recorder.trace.schema import ALLOC_CACHED, LET_GO, NOBODYS, STILL_USED

from ...support.one_trace import events, replayed, verdict
from .fake_engine import (
    BLOCK,
    DIM,
    HEADS,
    Attention,
    FullAttentionSpec,
    GPUModelRunner,
    MambaSpec,
    SlidingWindowSpec,
    hooked,
    serve,
    serve_session,
)
from .fake_scheduler import FullAttentionManager, Request, Scheduler

SHAPES = {
    "full": {},
    "no cache": {"caching": False},
    "few blocks": {"num_blocks": 14},
    "few blocks, no cache": {"num_blocks": 14, "caching": False},
    "async": {"use_async": True},
    "async, few blocks": {"use_async": True, "num_blocks": 14},
    "sliding": {"specs": [SlidingWindowSpec()]},
    "hybrid": {"specs": [FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec()], "num_blocks": 60},
    "hybrid, few blocks": {"specs": [SlidingWindowSpec(), FullAttentionSpec()], "num_blocks": 22},
}


pytestmark = pytest.mark.usefixtures("process_goes_on")


@pytest.mark.parametrize(
    ("shape", "scheduler"),
    [*((shape, True) for shape in SHAPES), *((shape, False) for shape in ("full", "async, few blocks", "hybrid"))],
)
def test_a_recorded_engine_replays_clean_and_generates_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, scheduler: bool
) -> None:
    expected = serve(**SHAPES[shape])
    hooked(monkeypatch, RecordingSettings(folder=tmp_path, sweep_every=3), scheduler=scheduler)
    assert serve(**SHAPES[shape]) == expected
    summary = verdict(tmp_path)
    assert (summary.verdict.value, summary.complete) == ("clean", True)
    assert summary.requests == 6
    header, told = events(tmp_path)
    assert header.slot_history == ("complete" if scheduler else "")
    kinds = Counter((event.kind, str(event.scalar("status"))) for event in told)
    assert kinds["status", "finished"] == 6
    if shape.endswith("few blocks"):
        assert kinds["status", "retracted"]
        assert kinds["status", "admitted"] == 6 + kinds["status", "retracted"]
    if "no cache" not in shape and scheduler:
        assert kinds["alloc", "shared"]
        assert kinds["alloc", "cached"]
        assert kinds["sweep", ""]


@pytest.mark.parametrize("reads", [None, 5, 6, 7])
def test_a_window_is_held_against_what_the_kernels_are_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: int | None
) -> None:
    monkeypatch.setattr(Attention, "sliding_window", None if reads is None else (reads, 0), raising=False)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve([SlidingWindowSpec()])
    _, told = events(tmp_path)
    watched = {event.scalar("window_watched") for event in told if event.kind == "forward"}
    assert watched == ({0} if reads is None else {1})
    found = Counter(kind for event in told for kind in event.ints("window_start").tolist())
    assert bool(found) == (reads in (5, 7))
    assert verdict(tmp_path).verdict.value == ("corrupt" if found else "clean")


def test_the_v2_runner_is_recorded_by_the_same_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"specs": [FullAttentionSpec(), SlidingWindowSpec()], "num_blocks": 26, "use_async": True, "v2": True}
    expected = serve(**shape)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path), v2=True)
    assert serve(**shape) == expected
    summary = verdict(tmp_path)
    assert (summary.verdict.value, summary.requests) == ("clean", 6)


def test_what_the_trace_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    output = serve([SlidingWindowSpec(), FullAttentionSpec()])
    header, told = events(tmp_path)
    assert (header.engine.name, header.model.name) == ("vllm", "tiny")
    assert (header.ranks.tp_rank, header.ranks.tp_size) == (1, 2)
    assert [(g.name, g.kind, g.window, g.num_slots, g.page_size) for g in header.groups] == [
        ("swa", "swa", 6, 40 * BLOCK, BLOCK),
        ("full", "full", 0, 40 * BLOCK, BLOCK),
    ]
    for group in header.groups:
        assert [(s.half, s.origin) for s in group.streams if not s.samples] == [("K", "submitted"), ("V", "stored")]
    assert any("taken on submission" in note for note in header.notes)
    names = {event.scalar("name"): event.scalar("request_id") for event in told if event.kind == "request"}
    assert names == {f"r{i}": request_id_of(f"r{i}") for i in range(6)}
    forwards = {event.scalar("forward"): event for event in told if event.kind == "forward"}
    sampled: dict[int, list[int]] = {}
    for event in told:
        if event.kind == "sample":
            ids = forwards[event.scalar("forward")].ints("request_ids").tolist()
            tokens = iter(event.ints("sampled_tokens").tolist())
            bits = event.ints("sampled_logprobs")
            assert ((bits & 0xFFFFFFFF).astype(np.uint32).view(np.float32) * -8 == event.ints("sampled_tokens")).all()
            assert set((bits >> 32).tolist()) == {1}
            for request_id, count in zip(ids, event.ints("sampled_lens").tolist(), strict=True):
                sampled.setdefault(request_id, []).extend(next(tokens) for _ in range(count))
    assert {name: sampled[request_id] for name, request_id in names.items()} == {
        name: tokens[-(5 + 2 * int(name[1])) :] for name, tokens in output.items()
    }
    allocated = sum(e.ints("slot_count").sum() for e in told if e.kind == "alloc" and not e.scalar("status"))
    assert allocated % BLOCK == 0
    assert allocated > 0


def test_whoever_leaves_a_block_to_the_prefix_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    _, told = events(tmp_path)
    left = [event for event in told if event.kind == "alloc" and event.scalar("note") == LET_GO]
    assert {str(event.scalar("status")) for event in left} == {ALLOC_CACHED}
    assert {event.scalar("request_id") for event in left} == {request_id_of(f"r{i}") for i in range(6)}


@pytest.mark.parametrize("when", ["as the request lets go", "before"])
def test_a_cached_block_that_stays_in_use_by_nobody_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    kept: list[Any] = []
    free = FullAttentionManager.free

    def hold(blocks: Any) -> None:
        kept.extend(block for block in blocks if not kept and block.block_hash is not None)
        for block in kept[:1]:
            block.ref_cnt += 1

    def let_go(manager: Any, request_id: str) -> None:
        if not kept and when != "before":
            hold(manager.req_to_blocks[request_id])
        free(manager, request_id)

    def look(_: GPUModelRunner, scheduler: Scheduler, __: Any) -> None:
        if not kept and when == "before":  # of the request that ends last
            hold(scheduler.managers[0].req_to_blocks.get("r5", ()))

    monkeypatch.setattr(FullAttentionManager, "free", let_go)
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(each_step=look)
    summary, _, told = replayed(tmp_path)
    used = [event for event in told if event.kind == "alloc" and event.scalar("note") == STILL_USED]
    assert kept[0].block_id * BLOCK in used[0].ints("slot_start")
    assert summary.findings_by_kind == {"slot_leaked": len(used)}


def test_what_a_request_that_is_over_has_not_given_back_is_found_when_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = FullAttentionManager.free
    monkeypatch.setattr(FullAttentionManager, "free", lambda manager, name: name != "r2" and free(manager, name))
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve()
    summary, _, told = replayed(tmp_path)
    used = [event for event in told if event.kind == "alloc" and event.scalar("note") == STILL_USED]
    assert {event.scalar("request_id") for event in used} == {request_id_of("r2")}
    assert set(summary.findings_by_kind) == {"slot_leaked"}


@pytest.mark.parametrize("specs", [None, [FullAttentionSpec(), SlidingWindowSpec()]], ids=["full", "hybrid"])
def test_a_block_that_is_taken_and_forgotten_is_found_when_no_request_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specs: list[Any] | None
) -> None:
    taken: list[Any] = []

    def take(_: GPUModelRunner, scheduler: Scheduler, __: Any) -> None:
        taken.extend(scheduler.pool.get_new_blocks(1) if not taken else ())

    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(specs, each_step=take)
    summary, _, told = replayed(tmp_path)
    (nobodys,) = (event for event in told if event.kind == "alloc" and event.scalar("note") == NOBODYS)
    assert nobodys.ints("slot_start").tolist() == [taken[0].block_id * BLOCK]
    assert summary.findings_by_kind == {"slot_leaked": 1}


@pytest.mark.parametrize("given", [list, iter])
@pytest.mark.parametrize("specs", [None, [FullAttentionSpec(), SlidingWindowSpec()]], ids=["full", "hybrid"])
def test_a_block_that_nobody_says_whose_it_was_is_told_as_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specs: list[Any] | None, given: Any
) -> None:
    given_back: list[int] = []

    def give_back(_: GPUModelRunner, scheduler: Scheduler, __: Any) -> None:
        used = [block for block in scheduler.pool.blocks if block.ref_cnt == 1 and block.block_hash is not None]
        if used and not given_back:
            scheduler.pool.free_blocks(given(used[:1]))
            given_back.append(used[0].block_id)
            scheduler.pool.touch(used[:1])  # and the engine goes on as before

    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve(specs, each_step=give_back)
    _, told = events(tmp_path)
    left = [
        event
        for event in told
        if event.kind == "alloc" and event.scalar("note") == LET_GO and event.scalar("request_id") < 0
    ]
    assert [event.ints("slot_start").tolist() for event in left] == [[block * BLOCK] for block in given_back]


def test_a_step_that_reads_what_it_writes_is_told_as_several_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))

    def look(runner: GPUModelRunner, scheduler: Any, output: Any) -> None:
        seen.append((len(attachment.recordings[runner].forwards), output))

    serve(each_step=look, budget=40)
    assert max(told for told, _ in seen) > 1, "no step had a hit on blocks of its own"
    assert verdict(tmp_path).verdict.value == "clean"


@pytest.mark.parametrize("scheduler", [True, False])
@pytest.mark.parametrize("use_async", [False, True])
def test_a_session_goes_on_from_another_token_than_was_sampled_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_async: bool, scheduler: bool
) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path), scheduler=scheduler)
    lens = serve_session(use_async=use_async)
    summary = verdict(tmp_path)
    assert (summary.verdict.value, summary.complete, summary.requests) == ("clean", True, 2)
    _, told = events(tmp_path)
    mine = [event for event in told if event.kind == "request" and event.scalar("name") == "session"]
    assert [event.scalar("prompt_len") for event in mine] == lens


def test_a_group_that_no_trace_can_hold_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    serve([FullAttentionSpec(), MambaSpec()])
    header, _ = events(tmp_path)
    assert [group.name for group in header.groups] == ["full"]
    assert any("MambaSpec" in note and "not recorded" in note for note in header.notes)
    assert verdict(tmp_path).verdict.value == "clean"


@pytest.mark.parametrize(
    ("mode", "of", "values", "begins", "said"),
    [
        ("processed_logprobs", [[5, 1], [6, 1], [7, 1], [9, 9]], [[-1, 0], [-2, 0], [-3, 0], [-9, 0]], [0, 1, 3], [-2, -3, np.nan]),
        ("raw_logprobs", [], -np.arange(24.0).reshape(3, 8) / 8, None, [-14 / 8, np.nan, -22 / 8]),
        ("raw_logprobs", "of another shape", 1, None, []),
        ("raw_logits", [[6, 1]], [[-2, 0]], None, []),
    ],
)  # fmt: skip
def test_log_probabilities_in_each_of_their_layouts(mode: str, of: Any, values: Any, begins: Any, said: Any) -> None:
    runner = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(logprobs_mode=mode)))
    lists = SimpleNamespace(logprob_token_ids=of, logprobs=values, cu_num_generated_tokens=begins)
    result = SimpleNamespace(req_ids=["a", "b", "c"], sampled_token_ids=[[], [6, 7], [6]], logprobs=lists)
    step = StepLogprobs(runner)
    found = step.of(["b", "c"], step.read(result))
    np.testing.assert_array_equal(found.get("sampled_logprobs", []), said)


def test_what_a_cache_of_8_bits_is_handed_is_in_the_dtype_of_the_model() -> None:
    spec = FullAttentionSpec()
    spec.head_size = spec.head_size_v = 16
    runner = GPUModelRunner([spec], 8)
    (layer,) = runner.layers.values()
    layer.kv_cache, layer.kv_cache_dtype = torch.zeros(8, HEADS, BLOCK, 32, dtype=torch.uint8), "fp8"
    streams = VllmLayout(runner, RecordingSettings(folder=Path())).kv.streams[0]
    assert [(s.half, s.origin, s.dtype) for s in streams] == [(half, "submitted", "float32") for half in "KVKV"]


def test_bytes_in_a_layout_that_is_not_known_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    spec = FullAttentionSpec()
    spec.head_size_v = 5
    serve([spec])
    header, _ = events(tmp_path)
    assert not header.groups[0].streams
    assert any("a layout that is not known" in note for note in header.notes)
    assert verdict(tmp_path).verdict.value == "clean"


def test_bytes_that_lie_head_by_head_are_not_read_as_tokens() -> None:
    """As in the cache of the CPU's attention before vLLM 0.25, with as many heads as a block has tokens."""
    own = type("CPUAttentionBackendImpl", (), {"__module__": "vllm.v1.attention.backends.cpu_attn"})
    runner = GPUModelRunner([FullAttentionSpec()], 8)
    (layer,) = runner.layers.values()
    layer.kv_cache = torch.zeros(2, 8, BLOCK, BLOCK, DIM)
    settings = RecordingSettings(folder=Path())
    assert VllmLayout(runner, settings).kv.streams  # of another backend the same shape is tokens first
    layer.impl = own()
    found = VllmLayout(runner, settings).kv
    assert not found.streams
    assert any("a layout that is not known" in note for note in found.notes)


def test_a_runner_that_gets_a_new_cache_gets_a_new_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    runner = GPUModelRunner([FullAttentionSpec()], 8)
    Scheduler(runner).add_request(Request("a", [5, 6], 3))
    first = attachment.recordings[runner]
    assert first is not None
    runner.initialize_kv_cache(runner.kv_cache_config, is_profiling=True)
    assert attachment.recordings[runner] is first
    runner.initialize_kv_cache(runner.kv_cache_config)
    assert first.recorder.stats().off == "closed"
    Scheduler(runner).add_request(Request("b", [5, 6], 3))
    runner.shutdown()
    told = [[event.scalar("name") for event in read_trace(path)] for path in tmp_path.glob("*.arrow")]
    assert sorted(told) == [["a"], ["b"]]


def test_what_runs_to_warm_up_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))

    class Worker:
        def compile_or_warm_up_model(self) -> int:
            serve()
            raise ValueError("too little memory")

    module = ModuleType(GPU_WORKER)
    module.Worker = Worker
    hook_module(module, attachment)
    with pytest.raises(ValueError, match="too little memory"):
        Worker().compile_or_warm_up_model()
    assert not list(tmp_path.iterdir())
    serve()
    summary = verdict(tmp_path)
    assert (summary.verdict.value, summary.requests) == ("clean", 6)
    header, _ = events(tmp_path)
    assert header.slot_history == "complete"


def test_an_engine_with_nothing_to_record_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = serve([MambaSpec()])
    hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    caplog.set_level(logging.ERROR, "kvcanary")
    assert serve([MambaSpec()]) == expected
    assert not list(tmp_path.iterdir())
    assert len([entry for entry in caplog.records if "not recording" in entry.getMessage()]) == 1


@pytest.mark.parametrize("settings", [{"capture_bytes": 0}, {"history": "off"}, {"kv_watch_every": 0}])
def test_settings_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    hooked(monkeypatch, RecordingSettings(folder=tmp_path, **settings))
    serve()
    header, told = events(tmp_path)
    assert bool(header.groups[0].streams) == ("capture_bytes" not in settings)
    assert bool({"alloc", "free"} & {event.kind for event in told}) == ("history" not in settings)
    assert verdict(tmp_path).verdict.value == "clean"


@pytest.mark.parametrize("told", [True, False])
def test_blocks_that_are_copied_for_a_hit_inside_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    done: list[int] = []
    states: list[tuple[str, int, list[int], list[int]]] = []

    def changed(_: Any, change: str, *, pool: int, slots: Any, sources: Any) -> None:
        states.append((change, pool, slots.tolist(), sources.tolist()))

    def copy_on_write(runner: GPUModelRunner, scheduler: Any, output: Any) -> None:
        if done or len(output.num_scheduled_tokens) < 3 or set(output.num_scheduled_tokens.values()) != {1}:
            return
        state, target = runner.requests[next(iter(output.num_scheduled_tokens))], len(scheduler.pool.blocks) - 1
        done.append(target)
        runner.kv[target] = runner.kv[state.blocks[0][0]]
        copy = SimpleNamespace(src_block_id=state.blocks[0][0], dst_block_id=target)
        output.kv_cache_block_copies = [copy] if told else None
        attachment.recordings[runner].layout.states.pools.append(StatePool(name="mamba", num_slots=target + 1))
        expected.append(("copy", 0, [target], [state.blocks[0][0]]))
        state.blocks[0][0] = target

    expected: list[tuple[str, int, list[int], list[int]]] = []
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path, history="off"))
    monkeypatch.setattr(Recorder, "state_changed", changed)
    serve(each_step=copy_on_write)
    assert done
    assert states == (expected if told else []), "the states in the blocks are copied, too"
    assert verdict(tmp_path).verdict.value == ("clean" if told else "corrupt")
    _, events_told = events(tmp_path)
    assert ("kv_copy" in {event.kind for event in events_told}) == told


@pytest.mark.parametrize(
    ("dtype", "others", "scales"),
    [
        ("fp8_e5m2", {}, (0.5, 0.25)),
        ("fp8", {"calculate_kv_scales": True}, (0.0, 0.0)),  # they come later
        ("auto", {}, (0.0, 0.0)),
        ("fp8_ds_mla", {}, (0.0, 0.0)),
        ("fp8", {"_k_scale_float": float("nan"), "_v_scale_float": None}, (0.0, 0.0)),
    ],
)
def test_scales_of_a_cache_of_8_bits_are_the_layer_s(dtype: str, others: dict[str, Any], scales: Any) -> None:
    layer = SimpleNamespace(kv_cache_dtype=dtype, **{"_k_scale_float": 0.5, "_v_scale_float": 0.25, **others})
    assert tuple(cache_scale(layer, half) for half in "KV") == scales


@pytest.mark.parametrize("wrong", [1.0, 1e-35, 1e-3, 300.0])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_values_are_read_from_the_pool_however_the_cpu_s_cache_lays_them_out(dtype: str, wrong: float) -> None:
    """vLLM's CPU build: V token by token, K value by value, each rounded towards zero; the scale may not be the layer's."""
    blocks, heads, tokens, dim = 3, 2, 8, 32

    def coded(given: Any, scale: float) -> Any:
        wide = given.float() / (scale * wrong)
        nearest = wide.to(getattr(torch, dtype))
        return nearest.view(torch.uint8) - (nearest.float().abs() > wide.abs()).to(torch.uint8)

    def update(of: Any, key: Any, value: Any, pool: Any, slots: Any) -> None:
        both = pool.view(-1, heads, 2 * tokens, dim)
        block, at = slots // tokens, slots % tokens
        both[:, :, :tokens].flatten(2).unflatten(2, (dim, tokens))[block, :, :, at] = coded(key, of._k_scale_float)
        both[block, :, tokens + at] = coded(value, of._v_scale_float)

    layer = SimpleNamespace(
        kv_cache_dtype="fp8_e5m2" if "5" in dtype else "fp8", _k_scale_float=0.03, _v_scale_float=0.7
    )
    layer.impl = SimpleNamespace(do_kv_cache_update=update)
    pool, spec = torch.zeros((blocks, heads, tokens, 2 * dim), dtype=torch.uint8), SimpleNamespace(head_size=dim)
    axes = stored_halves(layer, pool, spec)
    assert axes == {"K": TURNED, "V": PLAIN}

    key, value = torch.rand(2, blocks * tokens, heads, dim).add(0.1)
    slots = torch.randperm(blocks * tokens)
    update(layer, key, value, pool, slots)
    views = packed_views(pool, spec)
    found = turned_source(views["K"], 16).gather(slots.numpy(), 16)
    assert (found == coded(key, 0.03)[:, 0, :16].numpy()).all()
    source = row_source(views["V"], blocks * tokens, 16)
    assert (gather_kv(source, slots.numpy(), 16) == coded(value, 0.7)[:, 0, :16].numpy()).all()


@pytest.mark.parametrize("isa", ["amx", "vec", "vec16", "neon"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_update_that_changes_values_has_no_layout_of_its_own(isa: str, dtype: torch.dtype) -> None:
    """What is V there is packed as AMX has it in the second test: two tokens' values take turns."""
    blocks, heads, tokens, dim = 3, 2, 8, 32
    pool, spec = torch.zeros((blocks, heads, tokens, 2 * dim), dtype=dtype), SimpleNamespace(head_size=dim)

    def stored(change: Any, *, packed: bool = False) -> dict[str, str]:
        def update(_: Any, key: Any, value: Any, into: Any, slots: Any) -> None:
            both = into.view(-1, heads, 2 * tokens, dim)
            block, at = slots // tokens, slots % tokens
            both[:, :, :tokens].flatten(2).unflatten(2, (dim, tokens))[block, :, :, at] = change(key)
            rows = both[:, :, tokens:]
            if packed:
                pairs = rows.flatten(2).unflatten(2, (tokens // 2, dim, 2))
                pairs[block, :, at // 2, :, at % 2] = change(value)
            else:
                rows[block, :, at] = change(value)

        layer = SimpleNamespace(isa=isa, kv_cache_dtype="auto", impl=SimpleNamespace(do_kv_cache_update=update))
        return stored_halves(layer, pool, spec)

    other = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}.get(dtype, torch.int32)
    assert stored(lambda given: given) == {"V": PLAIN}
    assert stored(lambda given: given.to(other).view(dtype)) == ({"V": PLAIN} if isa != "neon" else {})
    assert stored(lambda given: given, packed=True) == {}
