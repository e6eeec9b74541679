"""The hooks around vLLM's functions: they collect its parts, start the recordings, and pass on what happens."""

import multiprocessing.util
import weakref
from typing import Any

from ...capture.recording import beginning
from ...process.settings import RecordingSettings
from ..common.attachment import EngineAttachment
from ..common.hooking import Finish, then, wrap_method
from ..common.stopping import stop_tree
from .recording import VllmRecording
from .step import read_v1, read_v2


class VllmAttachment(EngineAttachment):
    """The recordings of one process: mostly of one runner, and of the scheduler too if the engine has one worker."""

    engine = "vLLM"
    ending = frozenset(("on_execute", "on_forward", "on_prepared", "on_kv_update", "on_allocated", "on_finished"))

    def __init__(self, settings: RecordingSettings) -> None:
        super().__init__()
        self.notes: list[str] = []  # what could not be hooked
        self.recordings: weakref.WeakKeyDictionary[Any, VllmRecording | None] = weakref.WeakKeyDictionary()
        self._settings = settings
        self._newest: Any = None  # the runner that got its KV cache last
        self._schedulers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # runner -> scheduler
        self._runners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # scheduler -> runner
        self._started = 0
        self._warming = 0  # calls under way that warm an engine up, one inside another

    def recorders(self) -> list[Any]:
        """Return the recorders of all runners."""
        return [recording.recorder for recording in self.recordings.values() if recording is not None]

    def _live(self, hook: str, runner: Any) -> VllmRecording | None:
        return None if hook in self.off else self.recordings.get(runner)

    def _of_scheduler(self, hook: str, scheduler: Any) -> VllmRecording | None:
        runner = self._runners.get(scheduler)
        recording = self._live(hook, runner) if runner is not None else None
        return recording if recording is not None and recording.history is not None else None

    def _start(self, runner: Any) -> VllmRecording | None:
        """Return a runner's recording; the first call starts it, but for one of a warm-up."""
        if self._warming:
            return None
        if runner in self.recordings:
            return self.recordings[runner]
        self.recordings[runner] = None  # whatever happens next, it is tried and logged once
        notes = tuple(dict.fromkeys(self.notes))
        recording = VllmRecording(runner, self._schedulers.get(runner), self._settings, notes, self._started)
        self._started += 1
        with beginning(recording.recorder):
            recording.attach(self.fault, lambda _, error: self.fault("history", error))
            wrap_method(getattr(runner, "model_state", None), "prepare_attn", self._attention_hook(runner), self.fault)
        self.recordings[runner] = recording
        # Neither runs in all the ways in which vLLM's processes end; the recorder's own goodbye is a third.
        multiprocessing.util.Finalize(None, recording.recorder.close, exitpriority=100)
        if self._started == 1:
            self.end_with_process()
        return recording

    # Hooks, by the names of hooks.TARGETS.

    def on_runner(self, runner: Any, *args: Any, **kwargs: Any) -> Finish | None:
        """Remember a runner when it has its KV cache; what ran before was warm-up."""

        def remember(_: Any) -> None:
            self._newest = runner
            before = self.recordings.pop(runner, None)
            if before is not None:  # a cache anew: the trace of the one before is over
                before.recorder.close()

        profiling = bool(kwargs.get("is_profiling", args[1] if len(args) > 1 else False))
        return None if profiling else then(remember)

    def on_warm_up(self, _worker: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Pass over what an engine runs to warm up; the V2 runner executes steps of requests of its own for that."""
        self._warming += 1

        def finish(_: Any, __: BaseException | None) -> None:
            self._warming -= 1

        return finish

    def on_scheduler(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Remember a scheduler of this process, which schedules for the runner made before it."""

        def remember(_: Any) -> None:
            if self._newest is not None:
                self._schedulers[self._newest] = scheduler
                self._runners[scheduler] = self._newest

        return then(remember)

    def on_add_request(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Get to know a request before it is given blocks."""
        runner = self._runners.get(scheduler)
        recording = self._start(runner) if runner is not None and "on_add_request" not in self.off else None
        if recording is not None:
            recording.see(request.request_id, int(getattr(request, "num_prompt_tokens", 0) or 0))
        return None

    def on_free_blocks(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record that a request is over, once its blocks are given back."""
        recording = self._of_scheduler("on_free_blocks", scheduler)
        if recording is None:
            return None
        status = "aborted" if "ABORT" in str(getattr(request, "status", "")) else "finished"
        return then(lambda _: recording.left(request.request_id, status))

    def on_preempt(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record that a request has to wait again, once its blocks are given back."""
        recording = self._of_scheduler("on_preempt", scheduler)
        return None if recording is None else then(lambda _: recording.left(request.request_id, "retracted"))

    def on_execute(self, runner: Any, output: Any, *_args: Any, **kwargs: Any) -> Finish | None:
        """Follow a step from the scheduler's output to its result; a dummy run is none."""
        if "on_execute" in self.off or kwargs.get("dummy_run") or not hasattr(runner, "kv_cache_config"):
            return None
        recording = self._start(runner)
        if recording is None:
            return None
        recording.begin_step(runner, output)

        def finish(result: Any, error: BaseException | None) -> None:
            recording.after_model(error)  # the V2 runner's; the V1 runner's forward has ended by now
            recording.output = None
            if error is None and result is not None:  # of a runner that samples at once
                self._take(recording, result)

        return finish

    def on_forward(
        self, runner: Any, input_ids: Any = None, positions: Any = None, *_args: Any, **_kwargs: Any
    ) -> Finish | None:
        """Record a forward of the V1 runner: what goes in before it, what it wrote after it."""
        recording = self._live("on_forward", runner)
        if recording is None or recording.output is None:
            return None
        groups = recording.layout.groups
        recording.before_model(read_v1(runner, recording.output, groups, input_ids, positions, recording.attention))
        return lambda _, error: recording.after_model(error)

    def on_prepared(self, runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a forward of the V2 runner, which is prepared here and runs before `execute_model` returns."""
        recording = self._live("on_prepared", runner)
        if recording is None or recording.output is None:
            return None
        return then(
            lambda prepared: recording.before_model(
                read_v2(runner, recording.output, recording.layout.groups, batch, *prepared)
            )
        )

    def _attention_hook(self, runner: Any) -> Any:
        """Return a hook that records what the V2 runner's attention gets, around what makes its metadata."""

        def on_attention(*_args: Any, **_kwargs: Any) -> Finish | None:
            recording = self._live("on_attention", runner)
            return None if recording is None or recording.output is None else then(recording.on_attention)

        return on_attention

    def on_sample(self, runner: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record what a step sampled."""
        recording = self._live("on_sample", runner)
        if recording is None:
            return None

        def finish(result: Any, error: BaseException | None) -> None:
            recording.after_drafts()
            if error is None:
                self._take(recording, result)

        return finish

    def _take(self, recording: VllmRecording, result: Any) -> None:
        """Record a result, now or when the engine fetches it."""
        finish = recording.took_result(result)

        def on_output(*_args: Any, **_kwargs: Any) -> Finish | None:
            return finish

        if finish is not None:
            wrap_method(result, "get_output", on_output, self.fault)

    def on_shutdown(self, runner: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """End a runner's trace with it."""
        recording = self.recordings.pop(runner, None)
        if recording is not None:
            recording.recorder.close()
        return None

    def on_kill(self, pid: int, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Let the processes that are about to be killed end their traces first: vLLM grants its own no time."""
        stop_tree(pid)
        return None
