"""The hooks around vLLM's functions: they collect its parts, start the recordings, and pass on what happens."""

import functools
import multiprocessing.util
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ...capture.recording import beginning
from ...process.settings import RecordingSettings
from ...writing.sampling import sampled_header
from ..common.attachment import EngineAttachment
from ..common.hooking import Around, Finish, around, beside, while_true, wrap_method
from ..common.injecting import Injector, Undo, check_injector, injector_of, put_entry, undone
from ..common.requests import request_id_of
from ..common.stopping import stop_tree
from .attention.probed import ProbedAttention
from .device import on_gpu, step_v1, step_v2
from .layout import VllmGroup
from .oracle import VllmOracle
from .recording import VllmRecording
from .step import read_v1, read_v2


class VllmAttachment(EngineAttachment):
    """The recordings of one process: mostly of one runner, and of the scheduler too if the engine has one worker.

    What begins with `on_` is a hook, by the names of `hooks.TARGETS`.
    """

    engine = "vLLM"
    ending = frozenset(("on_execute", "on_forward", "on_prepared", "on_kv_update", "on_allocated", "on_finished"))

    def __init__(self, settings: RecordingSettings) -> None:
        super().__init__()
        self.notes: list[str] = []  # what could not be hooked
        self.recordings: WeakKeyDictionary[Any, VllmRecording | None] = WeakKeyDictionary()
        self.oracles: WeakKeyDictionary[Any, VllmOracle] = WeakKeyDictionary()
        self._settings = settings
        self._newest: Any = None  # the runner that got its KV cache last
        self._schedulers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # runner -> scheduler
        self._runners: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # scheduler -> runner
        self._probed: WeakKeyDictionary[Any, ProbedAttention] = WeakKeyDictionary()
        self._ran_before: WeakSet[Any] = WeakSet()  # runners that were given work and not recorded
        self._started = 0
        self._warming = 0  # calls under way that warm an engine up, one inside another

    def recorders(self) -> list[Any]:
        """Return the recorders of all runners."""
        return [recording.recorder for recording in self.recordings.values() if recording is not None]

    def _injector(self, recording: VllmRecording) -> Injector | None:
        """Return what injects a fault into this runner, None for nothing."""
        return injector_of(recording.recorder, self._settings.inject)

    def _live(self, hook: str, runner: Any) -> VllmRecording | None:
        """Return a runner's recording unless the hook has failed; for the forward's hooks, only while a step is under way."""
        recording = None if hook in self.off or runner is None else self.recordings.get(runner)
        of_forward = hook in ("on_forward", "on_prepared")
        return None if recording is None or (of_forward and recording.output is None) else recording

    def _start(self, runner: Any) -> VllmRecording | None:
        """Return a runner's recording; the first call starts it, but for one of a warm-up or outside of a window."""
        if self._warming:
            return None
        if not self._in_window:
            self._ran_before.add(runner)
            return None
        if runner in self.recordings:
            return self.recordings[runner]
        self.recordings[runner] = None  # whatever happens next, it is tried and logged once
        notes = tuple(dict.fromkeys(self.notes))
        late = runner in self._ran_before
        begins = functools.partial(sampled_header, settings=self._settings, windows=self.windows, late=late)
        recording = VllmRecording(runner, self._schedulers.get(runner), self._settings, notes, self._started, begins)
        self._started += 1
        probed = self._probed.get(runner)
        with beginning(recording.recorder), recording.wraps:
            if late:
                recording.recorder.begins_late()
            if probed is not None and recording.on_device is not None:
                probed.begin(recording.recorder, recording.layout.groups, self._settings.outputs_every)
            if self.windows is not None:
                self.windows.begun(recording.recorder)
            recording.attach(self.fault, lambda _, error: self.fault("history", error))
            on_attention = while_true(lambda: self._live("on_attention", runner), recording.on_attention)
            wrap_method(getattr(runner, "model_state", None), "prepare_attn", on_attention, self.fault)
            if recording.layout.positions.seen and recording.layout.positions.later:
                on_inputs = while_true(lambda: self._live("on_inputs", runner), recording.on_inputs)
                wrap_method(runner.model_state, "prepare_inputs", on_inputs, self.fault)
            if recording.recorder.header.sampler is not None:
                oracle = VllmOracle(recording.recorder.header.sampler, runner, recording.requests, recording.recorder)
                oracle.attach()
                oracle.injector = self._injector(recording)
                self.oracles[runner] = oracle
        self.recordings[runner] = recording
        check_injector(recording.recorder, self._settings.inject)
        # Neither runs in all the ways in which vLLM's processes end; the recorder's own goodbye is a third.
        multiprocessing.util.Finalize(None, recording.recorder.close, exitpriority=100)
        if self._started == 1:
            self.end_with_process()
        return recording

    def end_window(self) -> None:
        """End all traces before the step that is about to run."""
        for runner in [*self.recordings]:
            recording = self.recordings.pop(runner)
            self._ran_before.add(runner)
            if recording is not None:
                self.close_behind(recording.recorder)
                recording.wraps.undo()

    @beside
    def on_runner(self, runner: Any, *args: Any, **kwargs: Any) -> Around:
        """Remember a runner when it has its KV cache; what ran before was warm-up."""
        if kwargs.get("is_profiling", args[1] if len(args) > 1 else False):
            return
        yield
        self.sample(self._settings)
        self._newest = runner
        self.on_shutdown(runner)  # a cache anew: the trace of the one before is over
        if on_gpu(runner) and self._settings.outputs_every:  # graphs are captured behind this
            self._probed[runner] = ProbedAttention(runner)

    @beside
    def on_warm_up(self, _worker: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Pass over what an engine runs to warm up; the V2 runner executes steps of requests of its own for that."""
        self._warming += 1
        try:
            yield
        finally:
            self._warming -= 1

    @beside
    def on_scheduler(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Remember a scheduler of this process, which schedules for the runner made before it."""
        yield
        if self._newest is not None:
            self._schedulers[self._newest] = scheduler
            self._runners[scheduler] = self._newest

    def on_add_request(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
        """Get to know a request before it is given blocks."""
        runner = self._runners.get(scheduler)
        if runner is None or "on_add_request" in self.off:
            return
        if self.windows is not None and self.recordings.get(runner) is None:
            self._ran_before.add(runner)  # windows begin with a step, when blocks have been given out
            return
        recording = self._start(runner)
        if recording is not None:
            recording.see(request.request_id, int(getattr(request, "num_prompt_tokens", 0) or 0), request)

    @around
    def on_free_blocks(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record that a request is over, once its blocks are given back."""
        recording = self._live("on_free_blocks", self._runners.get(scheduler))
        if recording is not None and recording.history is not None:
            aborted = "ABORT" in str(getattr(request, "status", ""))
            yield
            if recording.history is not None:
                recording.history.still_held(request.request_id)
            recording.left(request.request_id, "aborted" if aborted else "finished")
            if recording.history is not None:
                recording.history.request_left()

    @around
    def on_preempt(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record that a request has to wait again, once its blocks are given back."""
        recording = self._live("on_preempt", self._runners.get(scheduler))
        if recording is not None and recording.history is not None:
            yield
            recording.left(request.request_id, "retracted")

    def on_execute(self, runner: Any, output: Any, *_args: Any, **kwargs: Any) -> Finish | None:
        """Follow a step from the scheduler's output to its result; a dummy run is none."""
        if "on_execute" in self.off or kwargs.get("dummy_run") or not hasattr(runner, "kv_cache_config"):
            return None
        self.next_step()
        if self.windows is not None:
            self.look_at_window()
        recording = self._start(runner)
        if recording is None:
            return None
        recording.begin_step(runner, output)
        if runner in self.oracles:
            self.oracles[runner].begin_step(output)
        injector = self._injector(recording)
        if injector is not None:
            injector.first_forward = recording.recorder.next_forward

        def finish(result: Any, error: BaseException | None) -> None:
            recording.after_model(error)  # the V2 runner's; the V1 runner's forward has ended by now
            recording.output = None
            if error is None and result is not None:  # of a runner that samples at once
                recording.took_result(result, self.fault)

        return finish

    def on_forward(
        self, runner: Any, input_ids: Any = None, positions: Any = None, *_args: Any, **_kwargs: Any
    ) -> Finish | None:
        """Record a forward of the V1 runner: what goes in before it, what it wrote after it."""
        recording = self._live("on_forward", runner)
        if recording is None:
            return None
        groups = recording.layout.groups
        injector = self._injector(recording)
        positions = recording.positions(runner, positions)
        with undone(None if injector is None else redirect(injector, runner, groups)) as put_back:
            if recording.on_device is not None:
                every = recording.layout.all_groups
                recording.capture(step_v1(runner, recording.output, every, input_ids, positions))
            else:
                recording.before_model(
                    read_v1(runner, recording.output, groups, input_ids, positions, recording.attention)
                )

        def finish(_: Any, error: BaseException | None) -> None:
            try:
                recording.after_model(error)
            finally:
                put_back()

        return finish

    @beside
    def on_prepared(self, runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record a forward of the V2 runner, which is prepared here and runs before `execute_model` returns."""
        recording = self._live("on_prepared", runner)
        if recording is not None:
            prepared = yield
            groups = recording.layout.groups
            if recording.on_device is not None:
                recording.prepared(step_v2(recording.output, recording.layout.all_groups, batch, prepared[1]))
            else:
                recording.before_model(read_v2(runner, recording.output, groups, batch, *prepared))

    @beside
    def on_sample(self, runner: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Record what a step sampled."""
        recording = self._live("on_sample", runner)
        if recording is not None:
            result = None
            try:
                result = yield
            finally:
                recording.after_drafts()
            recording.took_result(result, self.fault)

    def on_shutdown(self, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """End a runner's trace with it."""
        recording, probed = self.recordings.pop(runner, None), self._probed.pop(runner, None)
        self.oracles.pop(runner, None)
        if probed is not None:
            probed.undo()
        if recording is not None:
            recording.recorder.close()

    def on_kill(self, pid: int, *_args: Any, **_kwargs: Any) -> None:
        """Let the processes that are about to be killed end their traces first: vLLM grants its own no time."""
        stop_tree(pid)


def redirect(injector: Injector, runner: Any, groups: Sequence[VllmGroup]) -> Undo | None:
    """Let an entry of the block table point elsewhere for the V1 runner's forward, if it is time; return what puts it back, None if nothing was done."""
    if not injector.redirects():
        return None
    batch = runner.input_batch
    group = next((group for group in groups if not group.window), None)
    if group is None:
        return None
    names, table = list(batch.req_ids), batch.block_table[group.gid].block_table.gpu
    whole = [int(batch.num_computed_tokens_cpu[row]) // group.block_size for row in range(len(names))]
    blocks = [table[row, :count].tolist() for row, count in enumerate(whole)]
    cells = [(row, column, block) for row, of_row in enumerate(blocks) for column, block in enumerate(of_row)]
    ids = [request_id_of(name) for name in names]

    def point(row: int, column: int, block: int) -> Undo:
        return put_entry(table, (row, column), block)

    return injector.redirect(names, ids, cells, group.block_size, point, group.index)
