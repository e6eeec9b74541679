"""An engine of SGLang's shape, recorded through the adapter's hooks: what stands in the trace, and that it is harmless."""

import contextlib
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvcanary.recorder.engines.common.requests import request_id_of
from kvcanary.recorder.engines.sglang import recording as sglang_recording
from kvcanary.recorder.engines.sglang.attachment import SglangAttachment
from kvcanary.recorder.engines.sglang.recording import SglangRecording
from kvcanary.recorder.engines.sglang.requests import StepResults, identity_of
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.inspect import inspect_trace
from kvcanary.recorder.trace.reader import TraceReader
from kvcanary.recorder.trace.schema import IDENTITY_KINDS
from kvcanary.recorder.writing.sampling import Windows
from kvcanary.replayer.run.replay import replay
from kvcanary.replayer.run.settings import ReplaySettings

from ...support.one_trace import events, verdict
from . import fake_engine
from .fake_engine import SLOTS, ModelRunner, Request, Result, Scheduler, TokenToKVPoolAllocator, hooked, serve

pytestmark = pytest.mark.usefixtures("process_goes_on")


def record(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, close: bool = True, **settings: Any
) -> tuple[SglangAttachment, list[list[int]]]:
    attachment = hooked(monkeypatch, RecordingSettings(folder=folder, **settings))
    output, _ = serve()
    if close and attachment.recording is not None:
        attachment.recording.recorder.close()
    return attachment, output


def test_a_recorded_engine_replays_clean_and_generates_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = serve()
    _, output = record(monkeypatch, tmp_path)
    assert output == expected
    (path,) = tmp_path.glob("*.arrow")
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert (summary.verdict.value, summary.forwards, summary.tokens) == ("clean", 12, 4 * 4 + 2 + 4 + 6 + 8)


def test_what_the_trace_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, tmp_path)
    header, told = events(tmp_path)
    assert header.engine.name == "sglang"
    assert (header.ranks.tp_rank, header.ranks.tp_size) == (1, 2)
    assert [(g.name, g.num_slots, [s.half for s in g.streams]) for g in header.groups] == [("full", 96, ["K", "V"] * 2)]
    kinds = [event.kind for event in told]
    assert kinds.count("request") == 4
    names = {event.scalar("name"): event.scalar("request_id") for event in told if event.kind == "request"}
    assert names == {f"r{i}": request_id_of(f"r{i}", signed=False) for i in range(4)}
    statuses = [event.scalar("status") for event in told if event.kind == "status"]
    assert statuses.count("admitted") == statuses.count("finished") == 4
    allocated = sum(int(event.ints("slot_count").sum()) for event in told if event.kind == "alloc")
    freed = sum(int(event.ints("slot_count").sum()) for event in told if event.kind == "free")
    assert allocated == freed == 4 * 4 + 2 + 4 + 6 + 8
    samples = {
        event.scalar("forward"): event.ints("sampled_tokens").tolist() for event in told if event.kind == "sample"
    }
    assert sorted(samples) == list(range(12))
    assert all(event.ints("truth_lens").size for event in told if event.kind == "forward")


def test_no_history_where_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, tmp_path, history="off")
    header, told = events(tmp_path)
    assert not {"alloc", "free"} & {event.kind for event in told}
    assert "allocations and frees of slots are not recorded" in header.notes


@pytest.mark.parametrize(
    "name",
    [
        "before_model",
        "after_model",
        "see",
        "ran",
        "takes",
        "took",
        "got_row",
        "gave_row_back",
        "record_written",
    ],
)
def test_a_fault_in_a_hook_leaves_the_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    expected, _ = serve()
    before = set(threading.enumerate())

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("injected")

    owner = StepResults if name in ("ran", "takes", "took") else SglangRecording
    monkeypatch.setattr(owner, name, fail)
    caplog.set_level(logging.ERROR, "kvcanary")
    _, output = record(monkeypatch, tmp_path)
    assert output == expected
    logged = [entry.getMessage() for entry in caplog.records if entry.name == "kvcanary"]
    assert logged
    assert all("injected" in message for message in logged)
    assert len(logged) == len(set(logged)), "each failing hook is logged once"
    for thread in set(threading.enumerate()) - before:
        if thread.name == "kvcanary-writer":
            thread.join(60)  # a recording that is off has ended its trace by itself
    (path,) = tmp_path.glob("*.arrow")
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.complete
    ends_it = name in ("before_model", "after_model", "record_written")
    assert (summary.forwards < 12) == ends_it, "what a hook does not feed is recorded all the same"
    assert summary.verdict.value == "inconclusive", "what is missing is never called clean"


def test_an_engine_that_cannot_be_described_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = serve()
    blocked = tmp_path / "a file"
    blocked.write_text("")
    caplog.set_level(logging.ERROR, "kvcanary")
    attachment, output = record(monkeypatch, blocked)
    assert output == expected
    assert attachment.recording is None
    assert "not recording" in caplog.text


def test_what_the_model_raises_is_told_and_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    monkeypatch.setattr(ModelRunner, "fail_at", 6, raising=False)
    init = ModelRunner.__init__

    def failing(self: ModelRunner) -> None:
        init(self)
        self.fail_at = 6

    monkeypatch.setattr(ModelRunner, "__init__", failing)
    with pytest.raises(RuntimeError, match="the model failed"):
        serve()
    assert attachment.recording is not None
    attachment.recording.recorder.close()
    _, told = events(tmp_path)
    notes = [event.scalar("note") for event in told if event.kind == "forward"]
    assert notes == [""] * 5 + ["the model raised RuntimeError: the model failed"]
    assert [event.scalar("status") for event in told if event.kind == "forward"] == [""] * 5 + ["failed"]


def test_what_a_host_cache_loads_back_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = Scheduler.__init__

    def hierarchical(self: Scheduler, *args: Any) -> None:
        init(self, *args)
        self.enable_hierarchical_cache = True  # type: ignore[attr-defined]
        self.tree_cache.load_back = lambda node: node
        schedulers.append(self)

    schedulers: list[Scheduler] = []
    monkeypatch.setattr(Scheduler, "__init__", hierarchical)
    attachment, _ = record(monkeypatch, tmp_path, close=False)
    assert schedulers[0].tree_cache.load_back(3) == 3
    assert attachment.recording is not None
    attachment.recording.recorder.close()
    _, told = events(tmp_path)
    assert "loaded back from the host cache" in told[-1].scalar("note")
    assert told[-1].kind == "loss"


def _fails(*_: Any, **__: Any) -> None:
    raise ImportError("no walker")


def test_a_recording_that_cannot_begin_leaves_no_trace_that_looks_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = serve()
    monkeypatch.setattr(sglang_recording, "RadixCacheWalk", _fails)
    attachment, output = record(monkeypatch, tmp_path)
    assert output == expected
    assert attachment.recording is None
    assert [event.scalar("note") for event in events(tmp_path)[1]] == ["the recording could not begin"]


def test_a_trace_is_ended_though_its_cost_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment, _ = record(monkeypatch, tmp_path, close=False)
    monkeypatch.setattr(SglangRecording, "cost", _fails)
    attachment.close()
    (path,) = tmp_path.glob("*.arrow")
    assert replay(path, settings=ReplaySettings(), report=None).verdict.value == "clean"


def test_a_result_of_another_stage_tells_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline stage takes over results that it did not compute; one may lie where one of its own lay."""
    attachment, _ = record(monkeypatch, tmp_path, close=False)
    session = attachment.recording
    own, other, req = Result(None), Result(None), Request("r9", [1, 2], 3)
    session.see(req)
    target = session.results.last_target = (11, session.batches.of(["r9"], 1))
    session.results.ran(own, None)
    results = session.results.by_result
    results[id(other)] = results.pop(id(own))  # the address is used again
    assert not session.results.takes(other)
    session.results.took(other, None)
    session.results.ran(own, None)  # no forward since
    assert not session.results.takes(own)
    session.results.last_target = target
    session.results.ran(own, None)
    assert session.results.takes(own)
    req.output_ids.append(5)
    session.results.took(own, None)
    session.recorder.close()
    _, told = events(tmp_path)
    assert [event.ints("sampled_tokens").tolist() for event in told if event.kind == "sample"][12:] == [[5]]


def test_an_allocation_that_raises_is_a_loss_and_the_rest_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give, calls = TokenToKVPoolAllocator.alloc, iter(range(100))

    def alloc(self: TokenToKVPoolAllocator, need_size: int) -> Any:
        if next(calls) == 5:
            raise RuntimeError("no page left")
        return give(self, need_size)

    step = Scheduler.step

    def steadfast(self: Scheduler, reqs: list[Request]) -> None:
        with contextlib.suppress(RuntimeError):
            step(self, reqs)

    monkeypatch.setattr(TokenToKVPoolAllocator, "alloc", alloc)
    monkeypatch.setattr(Scheduler, "step", steadfast)
    attachment, _ = record(monkeypatch, tmp_path)
    assert not attachment.off
    _, told = events(tmp_path)
    kinds = [event.kind for event in told]
    assert [event.scalar("note") for event in told if event.kind == "loss"] == [
        "SGLang adapter, history: the engine's function raised RuntimeError"
    ]
    assert "alloc" in kinds[kinds.index("loss") :]


@pytest.mark.parametrize(
    ("first", "second", "updates", "finds"),
    [
        ({"lora_id": "a"}, {"lora_id": "a"}, 0, 0),
        ({"lora_id": "a"}, {"lora_id": "b"}, 0, 1),
        ({"extra_key": "ab"}, {"extra_key": "ab", "lora_id": "b"}, 0, 1),  # a salt "ab", and a salt "a" of adapter "b"
        ({"cache_salt": "a"}, {}, 0, 1),
        ({}, {}, 1, 1),
    ],
)
def test_a_hit_on_what_another_adapter_salt_or_weights_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: dict, second: dict, updates: int, finds: int
) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    runner = ModelRunner()
    scheduler = Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
    requests = [Request("first", [5, 6, 7, 8], 20), Request("second", [5, 6, 7, 8, 9], 3)]
    for request, said in zip(requests, (first, second), strict=True):
        vars(request).update(said)
    scheduler.step(requests[:1])
    for _ in range(updates):
        attachment.on_weights()((True, "updated"), None)
    scheduler.rows.alloc(requests[1:])
    requests[1].cached = 4
    table = runner.req_to_token_pool.req_to_token
    table[requests[1].req_pool_idx, :4] = table[requests[0].req_pool_idx, :4]
    scheduler.step(requests[1:])
    scheduler.step(requests[:1])  # which goes on with its own, also with other weights
    attachment.close()
    (path,) = tmp_path.glob("*.arrow")
    found = replay(path, settings=ReplaySettings(), report=None).findings_by_kind
    assert found == ({"identity": finds} if finds else {})


@pytest.mark.parametrize("end", [((False, "no such file"), None), (None, OSError("no such file"))])
def test_behind_weights_that_failed_to_load_none_are_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: tuple
) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    scheduler = Scheduler(ModelRunner(), TokenToKVPoolAllocator(SLOTS - 1, 1))
    scheduler.step([Request("first", [5, 6, 7, 8], 20)])
    attachment.on_weights()(*end)
    attachment.on_weights()((True, "updated"), None)
    attachment.close()
    said = [event.ints("identity_kind").tolist() for event in events(tmp_path)[1] if event.kind == "request"]
    weights = IDENTITY_KINDS.index("weights")
    assert [weights in kinds for kinds in said] == [True, False, True]


def test_a_request_that_was_put_back_is_computed_anew_with_the_weights_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    runner = ModelRunner()
    scheduler = Scheduler(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
    first, second = Request("first", [5, 6, 7, 8], 20), Request("second", [5, 6, 7, 8, 9], 3)
    scheduler.step([first])
    assert attachment.recording is not None
    attachment.recording.retracting = True
    scheduler.rows.free(first)
    attachment.recording.retracting = False
    first.origin_input_ids, first.output_ids, first.cached = first.origin_input_ids + first.output_ids, [], 0
    attachment.on_weights()((True, "updated"), None)
    scheduler.step([first])
    scheduler.rows.alloc([second])
    second.cached = 4
    table = runner.req_to_token_pool.req_to_token
    table[second.req_pool_idx, :4] = table[first.req_pool_idx, :4]
    scheduler.step([second])
    attachment.close()
    (path,) = tmp_path.glob("*.arrow")
    assert replay(path, settings=ReplaySettings(), report=None).findings_by_kind == {}


def test_media_are_told_with_their_positions() -> None:
    item = SimpleNamespace(hash=77, offsets=[(2, 4), (9, 9)])
    req = SimpleNamespace(multimodal_inputs=SimpleNamespace(mm_items=[item]))
    assert [tuple(one) for one in identity_of(req, 0)][3:] == [
        ("media", "", 0, 0),
        ("media", "77 0", 2, 3),
        ("media", "77 1", 9, 1),
    ]
    item.offsets = None
    assert [one.kind for one in identity_of(req, 0)] == ["adapter", "salt", "weights"]


def test_embeddings_of_the_caller_are_media_of_the_request_alone() -> None:
    """Its tokens are known, and their V is not: the caller's vectors stand in the place of some (`embed_overrides`)."""
    req = SimpleNamespace(rid="a", positional_embed_overrides=None)
    assert [one.kind for one in identity_of(req, 0)] == ["adapter", "salt", "weights", "media"]
    req.positional_embed_overrides = SimpleNamespace(positions=[3, 5])
    assert [tuple(one) for one in identity_of(req, 0)][3:] == [
        ("media", "", 0, 0),
        ("media", "embedding of a", 3, 1),
        ("media", "embedding of a", 5, 1),
    ]


def ended(folder: Path) -> bool:
    (path,) = folder.glob("*.arrow")
    with TraceReader(path) as reader:
        return reader.complete


def test_of_a_draft_tree_only_what_it_fills_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engine.drafts_in_trees(monkeypatch)
    record(monkeypatch, tmp_path)
    header, told = events(tmp_path)
    reason = "drafts are trees: speculative_ngram_max_bfs_breadth is 10, expected 1; nothing is known of what they fill"
    assert ("drafts", reason) in [(entry.name, entry.reason) for entry in header.not_watched]
    assert {event.scalar("mode") for event in told if event.kind == "forward"} == {"extend"}
    filled = [event for event in told if event.kind == "transfer" and event.scalar("note") == "a tree of drafts"]
    assert {event.scalar("status") for event in filled} == {"start", "end"}
    assert all(not event.scalar("note") for event in told if event.kind == "loss")
    summary = verdict(tmp_path)
    assert (summary.violations, summary.findings, summary.losses) == (0, 0, [])


def test_windows_begin_and_end_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = serve()
    monkeypatch.setattr(Windows, "start", lambda _: None)  # the test says when
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path, sample_windows=0.5))
    own: Any = Scheduler.step
    steps: list[set[str]] = []

    def step(scheduler: Any, reqs: list[Request]) -> None:
        attachment.windows.wanted = len(steps) // 2 % 2 == 1
        own(scheduler, reqs)
        steps.append({*vars(scheduler.token_to_kv_pool_allocator)})

    monkeypatch.setattr(Scheduler, "step", step)
    output, _ = serve()
    attachment.end_window()
    assert output == expected
    assert "alloc" not in steps[0] | steps[4]
    assert "alloc" in steps[2]
    found = sorted(tmp_path.glob("*.arrow"))
    assert len(found) == len(steps) // 4
    for path in found:
        while not inspect_trace(path).complete:  # closed in a thread
            time.sleep(0.01)
        summary = replay(path, settings=ReplaySettings(), report=None)
        assert (summary.violations, summary.findings, summary.num_losses, summary.forwards) == (0, 0, 0, 2)
