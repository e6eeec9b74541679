"""A pipeline stage of SGLang's shape: results come round as new objects, micro-batch by micro-batch, a round late."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcanary.recorder.process.settings import RecordingSettings
from kvcanary.recorder.trace.reader import read_trace

from .fake_engine import SLOTS, Batch, ModelRunner, Request, Result, Scheduler, TokenToKVPoolAllocator, hooked

pytestmark = pytest.mark.usefixtures("process_goes_on")


class Stage(Scheduler):
    """One stage of two: it launches a micro-batch, and takes its result over when the next ones have been launched."""

    def __init__(self, runner: ModelRunner, allocator: TokenToKVPoolAllocator) -> None:
        self.pp_rank, self.pp_size = 0, 2
        self.waiting: list[tuple[Batch, torch.Tensor]] = []
        self.late = True
        super().__init__(runner, allocator)

    def _pp_launch_batch(self, mb_id: int, batch: Batch, *_: Any) -> tuple[Result, None]:
        return self.run_batch(batch), None

    def _pp_process_batch_result(self, batch: Batch, result: Result) -> None:
        self.process_batch_result(batch, result)

    def launch(self, batch: Batch) -> None:
        result, _ = self._pp_launch_batch(len(self.waiting), batch)
        self.waiting.append((batch, result.next_token_ids))

    def take_over(self) -> None:
        batch, tokens = self.waiting.pop(0)
        self._pp_process_batch_result(batch, Result(tokens.clone()))

    def batch_of(self, reqs: list[Request]) -> Batch:
        """Return the batch that `step` would run, and run nothing."""
        made: list[Batch] = []
        self.run_batch, self.process_batch_result = made.append, lambda *_: None  # type: ignore[assignment,method-assign]
        try:
            self.step(reqs)
        finally:
            del self.run_batch, self.process_batch_result
        return made[0]


def stage(patch: pytest.MonkeyPatch, folder: Path, kind: type[Stage] = Stage) -> tuple[Any, Stage]:
    attachment = hooked(patch, RecordingSettings(folder=folder))
    runner = ModelRunner()
    runner.server_args.pp_size = 2
    scheduler = kind(runner, TokenToKVPoolAllocator(SLOTS - 1, 1))
    assert attachment.recording is not None
    return attachment.recording.recorder, scheduler


def samples(path: Path) -> list[tuple[int, list[int]]]:
    return [
        (event.scalar("forward"), event.ints("sampled_tokens").tolist())
        for event in read_trace(path)
        if event.kind == "sample"
    ]


def test_each_micro_batch_is_told_what_its_own_forward_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, scheduler = stage(monkeypatch, tmp_path)
    first, second = Request("a", [3, 4], new_tokens=4), Request("b", [5, 6, 7], new_tokens=4)
    for _ in range(3):
        scheduler.launch(scheduler.batch_of([first]))
        scheduler.launch(scheduler.batch_of([second]))
        scheduler.take_over()
        scheduler.take_over()
    recorder.close()
    expected = [token for pair in zip(first.output_ids, second.output_ids, strict=True) for token in pair]
    assert samples(recorder.path) == [(forward, [token]) for forward, token in enumerate(expected)]
    assert first.output_ids != second.output_ids


def test_nothing_is_told_of_a_batch_that_ran_twice_before_a_result_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, scheduler = stage(monkeypatch, tmp_path)
    request = Request("a", [3, 4], new_tokens=9)
    batch = scheduler.batch_of([request])
    scheduler.launch(batch)
    scheduler.launch(batch)
    scheduler.take_over()
    scheduler.take_over()
    scheduler.launch(batch)
    scheduler.take_over()
    recorder.close()
    assert samples(recorder.path) == [(2, request.output_ids[2:])]


class SpeculativeStage(Stage):
    """It keeps a copy of each batch as it was launched, and takes the result over for that, as 0.5.23 does."""

    def __init__(self, runner: ModelRunner, allocator: TokenToKVPoolAllocator) -> None:
        self.metadata: list[Any] = [None, None]
        super().__init__(runner, allocator)

    def _pp_launch_batch(self, mb_id: int, batch: Batch, _proxy: Any = None, mb_metadata: Any = None, *_: Any) -> Any:
        result = self.run_batch(batch)
        mb_metadata[mb_id] = SimpleNamespace(fwd_batch=Batch(list(batch.reqs), batch.fields))
        return result, None

    def launch(self, batch: Batch) -> None:
        mb_id = len(self.waiting)
        result, _ = self._pp_launch_batch(mb_id, batch, None, self.metadata, [])
        self.waiting.append((self.metadata[mb_id].fwd_batch, result.next_token_ids))


def test_a_result_that_comes_for_a_copy_of_the_batch_is_told_too_and_no_batch_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, scheduler = stage(monkeypatch, tmp_path, SpeculativeStage)
    first, second = Request("a", [3, 4], new_tokens=4), Request("b", [5, 6, 7], new_tokens=4)
    launched = []
    for _ in range(3):
        for request in (first, second):
            batch = scheduler.batch_of([request])
            scheduler.launch(batch)
            launched.append(weakref.ref(batch))
        del batch
        scheduler.take_over()
        scheduler.take_over()
    recorder.close()
    expected = [token for pair in zip(first.output_ids, second.output_ids, strict=True) for token in pair]
    assert samples(recorder.path) == [(forward, [token]) for forward, token in enumerate(expected)]
    assert [batch() for batch in launched] == [None] * 6
