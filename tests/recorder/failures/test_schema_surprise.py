"""A newer SGLang that has renamed what the adapter reads: the engine goes on, and nobody is told that all is well."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvcanary.recorder.engines.sglang import attachment as sglang_attachment
from kvcanary.recorder.engines.sglang.recording import SglangRecording
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.replayer.run.replay import ReplaySettings, replay

from ...support.subject import logged
from ..sglang import fake_engine
from ..sglang.fake_engine import ForwardBatch, ModelRunner, Request, RowPool, Scheduler, hooked, serve

Rename = Callable[[pytest.MonkeyPatch], None]


pytestmark = pytest.mark.usefixtures("process_goes_on")


def without_after_init(owner: Any, name: str) -> Rename:
    """The object gets the attribute under another name when it is made."""

    def rename(monkeypatch: pytest.MonkeyPatch) -> None:
        init = owner.__init__

        def renamed(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            setattr(self, f"new_{name}", self.__dict__.pop(name))

        monkeypatch.setattr(owner, "__init__", renamed)

    return rename


def without_in_batches(name: str) -> Rename:
    """The forward's batch, which the model need not look at, has the field under another name."""

    def rename(monkeypatch: pytest.MonkeyPatch) -> None:
        init_new = ForwardBatch.init_new.__func__  # type: ignore[attr-defined]

        def renamed(cls: Any, batch: Any, model_runner: Any) -> Any:
            made = init_new(cls, batch, model_runner)
            setattr(made, f"new_{name}", made.__dict__.pop(name))
            return made

        monkeypatch.setattr(ForwardBatch, "init_new", classmethod(renamed))

    return rename


def without_on_class(owner: Any, name: str) -> Rename:
    return lambda monkeypatch: monkeypatch.delattr(owner, name)


def other_shape(name: str, value: Any) -> Rename:
    """The forward's batch holds something else under the name."""

    def rename(monkeypatch: pytest.MonkeyPatch) -> None:
        init_new = ForwardBatch.init_new.__func__  # type: ignore[attr-defined]

        def renamed(cls: Any, batch: Any, model_runner: Any) -> Any:
            made = init_new(cls, batch, model_runner)
            setattr(made, name, value)
            return made

        monkeypatch.setattr(ForwardBatch, "init_new", classmethod(renamed))

    return rename


NOT_AT_ALL = {
    "model_config": without_after_init(ModelRunner, "model_config"),
    "server_args": without_after_init(ModelRunner, "server_args"),
    "is_draft_worker": without_on_class(ModelRunner, "is_draft_worker"),
    "token_to_kv_pool": without_after_init(ModelRunner, "token_to_kv_pool"),
    "tree_cache": without_after_init(Scheduler, "tree_cache"),
}
TO_A_POINT = {
    "forward_mode": without_in_batches("forward_mode"),
    "extend_seq_lens": without_in_batches("extend_seq_lens"),
    "req_pool_indices": without_in_batches("req_pool_indices"),
    "rids": without_in_batches("rids"),
    "rids of another kind": other_shape("rids", 5),
    "a mode of another kind": other_shape("forward_mode", "EXTEND"),
    "finished_reason": without_after_init(Request, "finished_reason"),
}


@pytest.fixture
def expected() -> list[list[int]]:
    """What the engine generates unrecorded, before anything is renamed."""
    return serve()[0]


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rename: Rename
) -> tuple[list[list[int]], sglang_attachment.SglangAttachment]:
    if rename is NOT_AT_ALL["token_to_kv_pool"]:  # which the model itself uses
        monkeypatch.setattr(ModelRunner, "_forward_raw", forward_with_new_pool)
    rename(monkeypatch)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    output, _ = serve()
    return output, attachment


def forward_with_new_pool(self: Any, batch: Any) -> Any:
    return fake_engine.torch.tensor([int(ids) * 7 % 97 for ids in batch.input_ids[batch.ends - 1]])


@pytest.mark.parametrize("name", NOT_AT_ALL)
def test_what_is_needed_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],
    name: str,
) -> None:
    output, attachment = run(tmp_path, monkeypatch, NOT_AT_ALL[name])
    assert output == expected
    assert attachment.recording is None
    (line,) = logged(caplog)
    assert line.startswith("kvcanary: not recording")
    assert list(tmp_path.glob("*.arrow")) == []


@pytest.mark.parametrize("name", TO_A_POINT)
def test_what_is_needed_on_the_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],
    name: str,
) -> None:
    output, attachment = run(tmp_path, monkeypatch, TO_A_POINT[name])
    assert output == expected
    messages = logged(caplog)
    assert 0 < len(messages) == len(set(messages))
    if attachment.recording is not None:
        attachment.recording.recorder.close()
    (path,) = tmp_path.glob("*.arrow")
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.verdict.value == "inconclusive"
    assert (summary.violations, summary.findings) == (0, 0)


def test_a_method_that_is_gone_is_named_and_the_rest_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, expected: list[list[int]]
) -> None:
    """The row pool's free: requests then have no end, and nothing else is missing."""
    free = RowPool.free
    monkeypatch.setattr(RowPool, "release", free, raising=False)
    monkeypatch.setattr(Scheduler, "process_batch_result", process_with("release"))
    monkeypatch.delattr(RowPool, "free")
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    output, _ = serve()
    assert output == expected
    assert attachment.recording is not None
    attachment.recording.recorder.close()
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "kvcanary: RowPool has no free: not recorded"
    ]
    (path,) = tmp_path.glob("*.arrow")
    assert replay(path, settings=ReplaySettings(), report=None).forwards == 12


def test_an_allocator_without_what_history_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, expected: list[list[int]]
) -> None:
    """The trace is there already when that is found out: it is ended, and says that something is missing."""

    def fail(*_: Any) -> None:
        raise AttributeError("no attribute 'page_size'")

    monkeypatch.setattr(SglangRecording, "keep_history", fail)
    attachment = hooked(monkeypatch, RecordingSettings(folder=tmp_path))
    output, _ = serve()
    assert output == expected
    assert attachment.recording is None
    (line,) = logged(caplog)
    assert line.startswith("kvcanary: not recording: on_scheduler")
    (path,) = tmp_path.glob("*.arrow")
    summary = replay(path, settings=ReplaySettings(), report=None)
    assert summary.complete
    assert summary.verdict.value == "inconclusive"
    assert summary.num_losses == 1


def process_with(method: str) -> Any:
    import inspect
    import textwrap

    source = textwrap.dedent(inspect.getsource(Scheduler.process_batch_result)).replace(
        "self.rows.free(", f"self.rows.{method}("
    )
    names = dict(vars(fake_engine))
    exec(source, names)
    return names["process_batch_result"]
