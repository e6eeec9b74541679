"""The transformers adapter on the real engine: outputs untouched, clean runs clean."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcanary.recorder.engines.transformers import attach, attach_from_environment, recording
from kvcanary.recorder.engines.transformers import attachment as module
from kvcanary.recorder.trace.reader import TraceReader, read_trace
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ..support.engines.documented_engine import contents, judged
from ..support.engines.tiny_models import PROMPTS, generate, model
from .hooked_engine import assert_clean, event_notes, hooked_methods

MODELS = ("llama", "gemma3_hybrid", "mistral_sliding")

pytestmark = pytest.mark.usefixtures("engine_left_as_it_was")


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_identical_and_the_trace_is_clean(tmp_path: Path, name: str) -> None:
    subject = model(name)
    expected = generate(subject, max_new_tokens=60, plain=True)
    before = hooked_methods()
    with attach(tmp_path / "trace.arrow") as attachment:
        assert all(now is not own for now, own in zip(hooked_methods(), before, strict=True))
        assert generate(subject, max_new_tokens=60, plain=True) == expected
    assert hooked_methods() == before
    assert attachment.recorder is not None
    assert attachment.recorder.stats().off == "closed"
    summary = assert_clean(tmp_path / "trace.arrow")
    assert summary.requests == len(PROMPTS)
    assert {"extend", "mixed", "decode"} >= set(summary.forwards_by_mode)
    shared = 24 if name == "llama" else 0  # at most three blocks of a prompt that another request had computed
    assert 0 <= sum(len(prompt) for prompt in PROMPTS) + 59 * len(PROMPTS) - summary.tokens <= shared
    # In a healthy engine the change lists hold what the forwards themselves did not say: prompts, nothing else.
    changes = [event for event in contents(tmp_path / "trace.arrow") if event["kv_change_slot"]]
    assert changes == []


@pytest.mark.parametrize("name", MODELS)
def test_recorded_bytes_are_those_of_the_layers_asked_for(tmp_path: Path, name: str) -> None:
    with attach(tmp_path / "trace.arrow", layers=(0, 1), capture_bytes=32, kv_watch_every=3):
        generate(model(name))
    with TraceReader(tmp_path / "trace.arrow") as reader:
        streams = {group.name: [(s.half, s.layer) for s in group.streams] for group in reader.header.groups}
    both = [("K", 0), ("V", 0), ("K", 1), ("V", 1)]
    only = "full_attention" if name == "llama" else "sliding_attention"
    assert streams == {"full_attention": [], only: both} if name == "gemma3_hybrid" else {only: both}
    assert_clean(tmp_path / "trace.arrow")


def test_no_bytes_where_none_are_wanted(tmp_path: Path) -> None:
    with attach(tmp_path / "trace.arrow", capture_bytes=0):
        generate(model("gemma3_hybrid"), return_logprobs=True)
    with TraceReader(tmp_path / "trace.arrow") as reader:
        assert [group.streams for group in reader.header.groups] == [(), ()]
        assert len(reader.header.notes) == 1
    for view in (view for view in read_trace(tmp_path / "trace.arrow") if view.kind == "forward"):
        logprobs = (view.ints("sampled_logprobs") & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
        assert len(logprobs) == len(view.ints("sampled_tokens"))
        assert (logprobs < 0).all() and set((view.ints("sampled_logprobs") >> 32).tolist()) <= {1}
    assert_clean(tmp_path / "trace.arrow")


def test_the_environment_attaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCANARY_TRACE", raising=False)
    assert attach_from_environment() is None
    monkeypatch.setenv("KVCANARY_TRACE", str(tmp_path / "traces"))
    monkeypatch.setenv("KVCANARY_CAPTURE_BYTES", "32")
    monkeypatch.setenv("KVCANARY_TOKENS", "hashed")
    attachment = attach_from_environment()
    assert attachment is not None
    with attachment:
        generate(model("llama"))
    (path,) = (tmp_path / "traces").glob("transformers-*.arrow")
    assert attachment.paths == (path,)
    with TraceReader(path) as reader:
        assert [stream.capture_bytes for stream in reader.header.groups[0].streams] == [32, 32, 16, 16]
        assert reader.header.tokens == "hashed"
    assert_clean(path)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("KVCANARY_CAPTURE_BYTES", "many", "KVCANARY_CAPTURE_BYTES is 'many', expected"),
        ("KVCANARY_CAPTRUE_BYTES", "16", "did you mean KVCANARY_CAPTURE_BYTES?"),
        ("KVCANARY_TRACE", "/dev/null/traces", "/dev/null"),
        ("KVCANARY_CONFIG", "/dev/null/no.toml", "the settings cannot be read"),
        ("KVCANARY_ORACLE", "no_such_module:sampler", "no_such_module"),
    ],
)
def test_a_wrong_setting_is_one_line_of_the_log_and_the_engine_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    text: str,
    said: str,
) -> None:
    monkeypatch.setenv("KVCANARY_TRACE", str(tmp_path / "traces"))
    monkeypatch.setenv(variable, text)
    attachment = attach_from_environment()
    if attachment is not None:  # an oracle is looked up when an engine begins to step
        with attachment:
            generate(model("llama"))
    (record,) = [one for one in caplog.records if one.name.startswith("kvcanary") and one.levelname == "ERROR"]
    assert said in record.getMessage() and "not recording" in record.getMessage()
    assert attachment is not None or record.exc_info is None


@pytest.mark.parametrize("options", [{}, {"segment_ns": 10**12}], ids=["one file", "segments"])
def test_a_name_that_is_taken_before_the_first_step(tmp_path: Path, options: dict[str, Any]) -> None:
    taken = tmp_path / ("t.000000.arrow" if options else "t.arrow")
    with attach(tmp_path / "t.arrow", **options) as attachment:
        taken.write_text("another container's")
        generate(model("llama"))
    assert taken.read_text() == "another container's"
    assert attachment.paths == (tmp_path / "t-1.arrow",)
    assert_clean(tmp_path / taken.name.replace("t.", "t-1."))


def test_header_says_what_the_engine_is(tmp_path: Path) -> None:
    with attach(tmp_path / "trace.arrow"):
        generate(model("gemma3_hybrid"))
    with TraceReader(tmp_path / "trace.arrow") as reader:
        header = reader.header
    assert header.engine.name == "transformers"
    sliding, full = header.groups
    assert (sliding.kind, sliding.window, sliding.reads_before_write, sliding.table) == ("swa", 31, True, 0)
    assert (full.kind, full.window, full.reads_before_write, full.table) == ("full", 0, False, 1)
    assert sliding.page_size == full.page_size == 8
    assert [stream.layer for stream in sliding.streams + full.streams if not stream.samples] == [0, 0, 2, 2]
    sampled = [len(stream.layers) for stream in sliding.streams if stream.samples]
    assert sampled == [sliding.num_layers] * 2
    assert {stream.dtype for stream in full.streams if stream.samples} == {header.model.dtype}


@pytest.mark.parametrize("name", MODELS)
def test_small_chunks_and_scarce_blocks(tmp_path: Path, name: str) -> None:
    subject = model(name)
    options = {"num_blocks": 20, "max_batch_tokens": 13, "safety_margin": 0.0, "max_new_tokens": 40}
    expected = generate(subject, **options)
    with attach(tmp_path / "trace.arrow"):
        assert generate(subject, **options) == expected
    assert_clean(tmp_path / "trace.arrow")


def test_what_is_put_into_a_graph_is_nothing_that_was_handed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's capture calls the cache once more behind the step itself, with values that nobody has computed."""
    captured: list[bool] = []
    monkeypatch.setattr(recording, "is_captured", lambda _: bool(captured))
    on_update = recording.TransformersRecording.on_update

    def twice(self: Any, cache: Any, **handed_in: Any) -> None:
        on_update(self, cache, **handed_in)
        captured.append(True)
        halves = ("key_states", "value_states")
        on_update(self, cache, **handed_in | {name: handed_in[name] * 0 + 7 for name in halves})
        captured.clear()

    monkeypatch.setattr(recording.TransformersRecording, "on_update", twice)
    with attach(tmp_path / "trace.arrow"):
        generate(model("llama"))
    assert_clean(tmp_path / "trace.arrow")
    forwards = [event for event in read_trace(tmp_path / "trace.arrow") if event.kind == "forward"]
    assert all(event.scalar("submitted_watched") == 2 for event in forwards)


@pytest.mark.parametrize("name", MODELS)
def test_forks(tmp_path: Path, name: str) -> None:
    subject = model(name)
    options = {"num_return_sequences": 3, "do_sample": True}
    expected = generate(subject, **options)
    with attach(tmp_path / "trace.arrow"):
        assert generate(subject, **options) == expected
    notes = event_notes(tmp_path / "trace.arrow")
    assert notes["kv_copy fork"] > 0
    assert assert_clean(tmp_path / "trace.arrow").requests == 3 * len(PROMPTS)
    labels = [event.scalar("labels") for event in read_trace(tmp_path / "trace.arrow") if event.kind == "request"]
    assert sum('"parent"' in label for label in labels) == 2 * len(PROMPTS)


def test_prefix_sharing_dedup_eviction_and_soft_resets(tmp_path: Path) -> None:
    subject = model("llama")
    twin = list(range(100, 140))
    prompts = [twin, twin, list(range(200, 250)), [*twin, 3], list(range(30, 75)), [*twin, 4, 5]]
    options = {"num_blocks": 20, "max_batch_tokens": 64, "safety_margin": 0.0, "max_new_tokens": 30}
    expected = generate(subject, prompts, **options)
    with attach(tmp_path / "trace.arrow"):
        assert generate(subject, prompts, **options) == expected
    notes = event_notes(tmp_path / "trace.arrow")
    for what in ("free dedup", "evict cache pressure", "free offload", "free finish", "alloc"):
        assert notes[what] > 0, (what, notes)
    assert_clean(tmp_path / "trace.arrow")


def test_blocks_in_the_place_of_others_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that decodes gets another table, which is as long as the one that it had."""
    step, given = continuous_api.ContinuousBatchProcessor._generation_step, list[int]()

    def replacing(processor: Any, engine_model: Any) -> None:
        (allocator,) = processor.cache.cache_allocators.values()
        for future in processor.inputs_and_outputs.requests_in_batch if not given else ():
            table = allocator.block_table[future.state.request_id]
            given.extend(reversed(table) if future.query_length == 1 and len(table) % 2 == 0 else ())
            table[:] = given or table
        step(processor, engine_model)

    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", replacing)
    with attach(tmp_path / "trace.arrow"):
        generate(model("llama"), PROMPTS[:1])
    told = [
        event.ints("slot_start").tolist() for event in read_trace(tmp_path / "trace.arrow") if event.kind == "alloc"
    ]
    had, has = ([slot for slots in some for slot in slots] for some in (told[:2], told[2:4]))
    assert given and sorted(has) == sorted(had)


def test_each_batch_processor_has_its_own_trace(tmp_path: Path) -> None:
    subject = model("llama")
    with attach(tmp_path / "trace.arrow") as attachment:
        for _ in range(3):
            generate(subject)
        assert [path.name for path in attachment.paths] == ["trace.arrow", "trace.1.arrow", "trace.2.arrow"]
        assert assert_clean(tmp_path / "trace.arrow").requests == len(PROMPTS)  # closed when its manager stopped
    for path in attachment.paths:
        assert_clean(path)


def test_two_engines_that_begin_at_the_same_time_take_two_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, begin_new = threading.Barrier(2), module.begin_new

    def together(path: Path, begin: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return begin_new(path, begin)

    monkeypatch.setattr(module, "begin_new", together)
    with attach(tmp_path / "trace.arrow", overwrite=True) as attachment, ThreadPoolExecutor() as threads:
        list(threads.map(generate, [model("llama"), model("llama")]))
    assert sorted(path.name for path in attachment.paths) == ["trace.1.arrow", "trace.arrow"]
    for path in attachment.paths:
        assert_clean(path)


def test_a_kept_manager_goes_on_in_one_trace(tmp_path: Path) -> None:
    subject = model("llama")
    with attach(tmp_path / "trace.arrow") as attachment:
        generate(subject, keep_manager=True)
        generate(subject, keep_manager=True)
        subject.destroy_cached_continuous_batching_manager()
        assert len(attachment.paths) == 1
    assert event_notes(tmp_path / "trace.arrow")["alloc shared prefix hit"] > 0
    assert assert_clean(tmp_path / "trace.arrow").requests == 2 * len(PROMPTS)


def test_attached_to_an_engine_that_already_ran(tmp_path: Path) -> None:
    subject = model("llama")
    generate(subject, keep_manager=True)
    with attach(tmp_path / "trace.arrow"):
        generate(subject, keep_manager=True)
        subject.destroy_cached_continuous_batching_manager()
    first = next(read_trace(tmp_path / "trace.arrow"))
    assert (first.kind, first.scalar("lost_events")) == ("loss", -1)
    summary = judged(tmp_path / "trace.arrow")
    assert (summary.violations, summary.findings) == (0, 0)
    assert summary.num_losses == 1


def test_a_cancelled_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    prepare = continuous_api.ContinuousBatchProcessor.prepare_next_batch

    def cancel_one(processor: Any) -> bool:
        steps.append(1)
        if len(steps) == 9 and len(processor.scheduler.active_requests) > 1:
            name = sorted(processor.scheduler.active_requests)[0]
            state = processor.scheduler.active_requests[name]
            processor.scheduler.set_request_cancellation(name)
            state.generated_tokens = state.generated_tokens[:]
            state._status = continuous_api.RequestStatus.FINISHED
            processor.output_router.deliver(state.to_generation_output())
        return bool(prepare(processor))

    monkeypatch.setattr(continuous_api.ContinuousBatchProcessor, "prepare_next_batch", cancel_one)
    with attach(tmp_path / "trace.arrow"):
        generate(model("llama"))
    assert event_notes(tmp_path / "trace.arrow")["free cancel"] > 0
    assert_clean(tmp_path / "trace.arrow")


def test_a_model_that_raises_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model("llama")
    calls: list[int] = []
    forward = type(subject).forward

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(subject), "forward", fail_once)
    with attach(tmp_path / "trace.arrow"), pytest.raises(AssertionError):
        generate(subject)
    last = [event for event in read_trace(tmp_path / "trace.arrow") if event.kind == "forward"][-1]
    assert (last.scalar("note"), last.scalar("status")) == ("the model raised RuntimeError: out of memory", "failed")
    assert judged(tmp_path / "trace.arrow").violations == 0


@pytest.mark.parametrize("name", MODELS)
def test_what_the_layers_hand_in_is_compared_with_what_the_cache_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(tmp_path / "clean.arrow", capture_bytes=32):
        generate(model(name))
    assert_clean(tmp_path / "clean.arrow")
    forwards = [event for event in read_trace(tmp_path / "clean.arrow") if event.kind == "forward"]
    with TraceReader(tmp_path / "clean.arrow") as reader:
        streams = sum(not stream.samples for _, stream in reader.header.streams(0))
        first = reader.header.streams(0)[0][1].layer
    assert {event.scalar("submitted_watched") for event in forwards} == {streams}
    assert not any(len(event.bytes("kv_submitted_bytes")) for event in forwards)

    update, calls = PagedAttentionCache.update, []

    def damaging(cache: Any, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store one token's V of the first layer otherwise than it was handed in."""
        calls.append(layer_idx)
        if layer_idx == first and calls.count(first) == 5:
            value_states = value_states.clone()
            value_states[0, 0, -1, 3] += 1
        return update(cache, key_states, value_states, layer_idx, *args, **kwargs)

    monkeypatch.setattr(PagedAttentionCache, "update", damaging)
    with attach(tmp_path / "trace.arrow", capture_bytes=32):
        generate(model(name))
    summary = judged(tmp_path / "trace.arrow")
    # Of llama the token comes again, and is seen to have other bytes, too.
    beside = {"token_bytes": 1} if name == "llama" else {}
    assert (summary.violations, dict(summary.findings_by_kind)) == (0, {"write_damaged": 1} | beside)


def test_a_layer_may_hand_in_its_indices_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in 5.18; later versions hand in one dictionary."""
    update, given = PagedAttentionCache.update, []

    def by_names(
        cache: Any, key_states: Any, value_states: Any, layer_idx: int, read_index: Any, write_index: Any
    ) -> Any:
        args, kwargs = given.pop()
        assert (read_index is None, write_index is None) == (False, False)
        return update(cache, key_states, value_states, layer_idx, *args, **kwargs)

    monkeypatch.setattr(PagedAttentionCache, "update", by_names)
    with attach(tmp_path / "trace.arrow", capture_bytes=32):
        hooked = PagedAttentionCache.update

        def layer(cache: Any, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            given.append((args, kwargs))
            of_step = args[0] if args else kwargs.get("kwargs", kwargs)
            indices = {name: of_step[name] for name in ("read_index", "write_index")}
            return hooked(cache, key_states, value_states, layer_idx=layer_idx, **indices)

        monkeypatch.setattr(PagedAttentionCache, "update", layer)
        generate(model("llama"))
        monkeypatch.setattr(PagedAttentionCache, "update", hooked)
    assert_clean(tmp_path / "trace.arrow")
    forwards = [event for event in read_trace(tmp_path / "trace.arrow") if event.kind == "forward"]
    assert all(event.scalar("submitted_watched") for event in forwards)
