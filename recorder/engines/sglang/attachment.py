"""The hooks around SGLang's functions: they collect its parts, start the recording, and pass on what happens."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from ...capture.host_arrays import own_int64
from ...capture.recording import beginning
from ...errors import error_text
from ...process.settings import RecordingSettings
from ...trace.header import NotWatched
from ...trace.schema import COST
from ...writing.sampling import sampled_header
from ..common.attachment import EngineAttachment
from ..common.hooking import (
    Around,
    EngineError,
    Finish,
    Hook,
    OnFault,
    StepCost,
    Wraps,
    beside,
    while_true,
    wrap_method,
)
from ..common.injecting import Injector, Undo, check_injector, injector_of, put_entry, undone
from ..common.outermost import OutermostCalls
from ..common.stopping import stop_tree
from .attention.probed import ProbedAttention
from .connectors.host_cache import HostCache
from .forward import mode_of, prefix_and_extend
from .history import calls_as_hooked
from .hooks import not_applied, register_drafts
from .idle import IdleLooks, can_be_looked_at
from .inside import InsideModels
from .layers import ModelLayers
from .layout import RunnerLayout, controller_of
from .oracle import SglangOracle
from .recording import SglangRecording
from .recurrent import ASKED

logger = logging.getLogger("kvcanary")

# If these fail in time, the model is looked at from outside.
INSIDE_HOOKS = ("on_load", "on_capture", "on_inside")


class SglangAttachment(EngineAttachment):
    """The recording of one process; what begins with `on_` is a hook, by the names of `hooks.TARGETS`."""

    engine = "SGLang"
    ending = frozenset(
        ("on_model", "on_layers", "on_scheduler", "on_draft_graph", "on_draft_extend_graph", "on_replay", "on_inside")
    )

    def __init__(self, settings: RecordingSettings) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.not_watched: list[NotWatched] = []  # what could not be hooked
        self.recording: SglangRecording | None = None
        self.oracle: SglangOracle | None = None
        self._settings = settings
        self._scheduler: Any = None
        self._drafts_hooked = False
        self._wraps = Wraps()  # of the scheduler's parts
        self._runners: list[Any] = []
        # The runner that ran last, and what is known of it.
        self._runner: Any = None
        self._layout: RunnerLayout | None = None
        self._inside = InsideModels(self.fault, ProbedAttention() if settings.outputs_every else None)
        self.on_capture, self.on_replay = self._inside.on_capture, self._inside.on_replay
        self.cost = StepCost(("on_model", "on_run", "on_result"))
        self._layers = ModelLayers(self.fault, self.cost)

    def recorders(self) -> list[Any]:
        """Return the recorder, once there is one."""
        return [] if self.recording is None else [self.recording.recorder]

    def fault(self, hook: str, error: Exception) -> None:
        """Switch off a hook that failed; without those inside the model, forwards are recorded from outside."""
        if self.recording is None and hook in INSIDE_HOOKS and hook not in self.off:
            self.off.add(hook)
            self._inside.off = True
            where, said = "forwards are recorded before and after the model", error_text(error)
            name = f"inside the model: {hook}"
            self.not_watched.append(NotWatched(what="other", name=name, reason=f"{where}: {said}"))
            logger.warning("kvcanary: %s: %s: %s", where, hook, said, exc_info=error)
            return
        super().fault(hook, error)
        if hook in self.off & self.ending:
            self.recording = None

    def close(self) -> None:
        """End the trace, with what the recording cost in it."""
        if self.recording is not None:
            self._mark_cost(self.recording)
            super().close()

    def _mark_cost(self, recording: SglangRecording) -> None:
        try:
            recording.recorder.mark(COST, {**self.cost.summary(), **recording.cost()})
        except Exception:
            logger.exception("kvcanary: what the recording cost is not recorded")

    def on_runner(self, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """Remember every model runner of the process: target and drafts."""
        if not any(known is runner for known in self._runners):
            self._runners.append(runner)

    @beside
    def on_load(self, runner: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Stand around a model as soon as there is one, before SGLang's canary does."""
        yield
        self._inside.wrap(runner)
        self._layers.wrap(runner)

    @beside
    def on_scheduler(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Start the recording when the scheduler stands; what ran before it was warm-up."""
        yield
        if self._scheduler is None:
            self._scheduler = scheduler
            self.end_with_process()
            if self.sample(self._settings):
                self._start(scheduler, late=False)

    def begin_window(self) -> None:
        """Record from the step on that is about to run."""
        self._start(self._scheduler, late=True)

    def end_window(self) -> None:
        """End the trace before the step that is about to run."""
        if self.recording is not None:
            self._mark_cost(self.recording)
            self.close_behind(self.recording.recorder)
        self.recording = self._runner = self._layout = self._layers.expected = None
        self._wraps.undo()
        self.cost.forget()

    def _start(self, scheduler: Any, *, late: bool) -> None:
        runners = [runner for runner in self._runners if getattr(runner, "token_to_kv_pool", None) is not None]
        runners.sort(key=lambda runner: bool(runner.is_draft_worker))
        if any(runner.is_draft_worker for runner in runners) and not self._drafts_hooked:
            self._drafts_hooked = True
            self.not_watched += register_drafts(self)
        settings, missing = self._settings, (*self.not_watched, *not_applied())
        looked_at = self._inside, self._layers
        begins = functools.partial(sampled_header, settings=settings, windows=self.windows, late=late)
        recording = SglangRecording(scheduler, runners, settings, tuple(self.notes), missing, *looked_at, begins)
        with beginning(recording.recorder), self._wraps:
            if late:
                recording.recorder.begins_late()
            if self.windows is not None:
                self.windows.begun(recording.recorder)
            self._follow(scheduler, recording)
            if recording.recorder.header.sampler is not None:
                sampler = recording.recorder.header.sampler
                self.oracle = SglangOracle(sampler, recording.target, recording.requests, recording.recorder)
                self.oracle.injector = injector_of(recording.recorder, self._settings.inject)
        self.recording = recording
        check_injector(recording.recorder, self._settings.inject)

    def _follow(self, scheduler: Any, recording: SglangRecording) -> None:
        """Hook what the scheduler's parts do."""
        if recording.sweep.walks:
            self._wrap(recording.target, "forward", recording.sweep.on_forward)
        self._wrap(recording.target.req_to_token_pool, "alloc", recording.on_rows)
        self._wrap(recording.target.req_to_token_pool, "free", recording.on_row_free)
        for name, hook in (recording.states.hooks() if recording.states is not None else {}).items():
            self._wrap(recording.target.req_to_token_pool.mamba_pool, name, hook, "states")
        if recording.states is not None and recording.states.asked is not None:
            self._wrap(recording.states.asked, ASKED, recording.states.on_asked)
        for owner, name, hook in recording.windows.hooks() if recording.windows is not None else ():
            self._wrap(owner, name, hook)
        for owner, name, hook in recording.outputs.hooks() if recording.outputs is not None else ():
            self._wrap(owner, name, hook)
        for pool, hook in recording.submitted.hooks() if recording.submitted is not None else ():
            self._wrap(pool, "set_kv_buffer", hook, "submitted")
        for name, hook in recording.adapters.hooks().items():
            self._wrap(recording.adapters.backend, name, hook, "adapters")
        if recording.follows_slots:
            recording.keep_history(scheduler.token_to_kv_pool_allocator)
            for history in recording.histories:
                live = self._is_live("history")
                calls = OutermostCalls(self._history_fault, live, self.cost)
                for name, hook in history.follow_calls(calls).items():
                    self._wrap(history.allocator, name, hook, "history", self._history_fault)
            calls_as_hooked(scheduler.tree_cache)
            if recording.recorder.header.slot_history and can_be_looked_at(scheduler):
                looks = IdleLooks(scheduler, recording.histories, recording.recorder)
                self._wrap(scheduler, "on_idle", looks.on_idle, "history", self._history_fault)
            for name in ("evict", "evict_for_alloc"):
                if hasattr(scheduler.tree_cache, name):
                    self._wrap(scheduler.tree_cache, name, recording.on_evict, "history")
        if getattr(scheduler, "enable_hierarchical_cache", False):
            self._follow_host_cache(scheduler, recording)
        self._follow_transfers(scheduler, recording)
        if recording.recorder.header.ranks.pp_size > 1:
            self._wrap(scheduler, "_pp_launch_batch", recording.results.on_launch)
            self._wrap(scheduler, "_pp_process_batch_result", recording.results.on_process)

    def _follow_host_cache(self, scheduler: Any, recording: SglangRecording) -> None:
        """Hook what goes to a host's pool and comes back, each copy or, if they cannot be recorded, each load-back."""
        cache = HostCache(controller_of(scheduler), recording.recorder, recording.histories)
        load_back = self._live(cache.on_load_back)

        def copies(hook: Hook, otherwise: Hook | None) -> Hook:
            """Return a hook around copies; once one could not be recorded, `otherwise` stands in its place."""

            def on_host_cache(*args: Any, **kwargs: Any) -> Finish | None:
                chosen = hook if self.recording is not None and "on_host_cache" not in self.off else otherwise
                return chosen(*args, **kwargs) if chosen else None

            return on_host_cache

        if any(group.host_num_slots for group in recording.recorder.header.groups):
            hooks = {name: copies(hook, load_back if name == "load" else None) for name, hook in cache.hooks().items()}
            if all(wrap_method(cache.controller, name, hook, self.fault) for name, hook in hooks.items()):
                if cache.reads_bytes:
                    wrap_method(recording.target, "forward", copies(cache.on_forward, None), self.fault, self.cost)
                return
        for name in ("init_load_back", "load_back"):
            wrap_method(scheduler.tree_cache, name, load_back, self.fault)

    def _follow_transfers(self, scheduler: Any, recording: SglangRecording) -> None:
        """Hook what a prefill engine sends and a decode engine receives."""
        transfers, role = recording.transfers, recording.recorder.header.role
        transfers.on_fault = self.fault
        if role == "prefill":
            self._wrap(scheduler, "send_kv_chunk", transfers.on_send)
        if role == "decode":
            queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
            if not wrap_method(queue, "_commit_transfer_to_req", self._live(transfers.on_receive), self.fault):
                raise ValueError(
                    "this SGLang has no _commit_transfer_to_req: what a decode engine receives cannot be recorded"
                )
            # Not counted as cost: it is called in every round of an idle engine, too.
            wrap_method(queue, "extend", self._live(transfers.on_expect), self.fault)

    def _live(self, hook: Hook, name: str = "") -> Hook:
        """Return a hook of the recording's that does nothing once it, or what is called `name`, has failed."""
        return while_true(self._is_live(name or getattr(hook, "__name__", "hook")), hook)

    def _is_live(self, name: str) -> Callable[[], bool]:
        return lambda: self.recording is not None and name not in self.off

    def _wrap(self, owner: Any, method: str, hook: Hook, name: str = "", on_fault: OnFault | None = None) -> None:
        if not wrap_method(owner, method, self._live(hook, name), on_fault or self.fault, self.cost):
            logger.warning("kvcanary: %s has no %s: not recorded", type(owner).__name__, method)

    def _history_fault(self, _: str, error: Exception) -> None:
        if self.recording is not None and not isinstance(error, EngineError):
            self.recording.histories.clear()
        self.fault("history", error)

    def on_model(self, runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a forward: what goes in before it, what it wrote after it."""
        recording = self.recording  # None once this hook has failed
        if recording is None:
            self.cost.forget()  # the hooks are called all the same, and each adds to it
            return None
        layout = self._layout
        if runner is not self._runner:
            self._runner, layout = runner, recording.layout.runners.get(id(runner))
            self._layout = layout
        if layout is None:
            return None
        bs = batch.req_pool_indices.numel()
        if layout.sampled:
            self.cost.next_step(batch.forward_mode, bs)
        injector = injector_of(recording.recorder, self._settings.inject)
        if injector is None:
            recording.before_model(layout, batch, bs)
            return recording.after_model
        with undone(redirect(injector, recording, layout, batch)) as put_back:
            recording.before_model(layout, batch, bs)

        def finish(result: Any, error: BaseException | None) -> None:
            try:
                recording.after_model(result, error)
            finally:
                put_back()

        return finish

    def on_draft_extend_graph(self, graph_runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a draft's extend that runs as a CUDA graph, past the draft runner's own forward."""
        return self.on_model(graph_runner.model_runner, batch)

    def on_draft_graph(self, graph_runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a draft's steps that run as one CUDA graph."""
        recording = self.recording
        if recording is None or id(graph_runner.model_runner) not in recording.layout.runners:
            return None
        return recording.draft_graph(graph_runner, batch)

    def on_run(self, _scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Get to know the requests of a batch that is about to run, and which forward its result belongs to."""
        self.next_step()
        if self.windows is not None:
            self.look_at_window()
        recording = self.recording
        if recording is None or "on_run" in self.off:
            return None
        if batch.reqs != recording.reqs:
            recording.runs(batch.reqs or [])
        if getattr(batch, "beam_tail", None) is not recording.beam_tail:
            recording.runs_beams(batch)
        return recording.results.ran

    def on_result(self, _scheduler: Any, _batch: Any, result: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record what the scheduler took over from a result."""
        recording = self.recording
        if recording is None or "on_result" in self.off:
            return None
        return recording.results.took if recording.results.takes(result) else None

    @beside
    def on_retract(self, *_args: Any, offload_kv: bool = True, **_kwargs: Any) -> Around:
        """Call a row that is given back meanwhile a retracted request's."""
        recording = self.recording
        if recording is not None and "on_retract" not in self.off:
            recording.retracting, recording.restores = True, offload_kv
            try:
                yield
            finally:
                recording.retracting = False

    @beside
    def on_weights(self, *_args: Any, **_kwargs: Any) -> Around:
        """Record that what is computed from now on is of other weights, or of nobody knows which."""
        done: Any = (False,)
        try:
            done = yield
        finally:
            if self.recording is not None:
                self.recording.new_weights(succeeded=bool(done[0]))

    def around_sample(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Let the oracle sample, if one was asked for and can; it may raise, since nobody else knows the tokens then."""
        if self.oracle is None:
            return original(runner, *args, **kwargs)
        return self.oracle.around_sample(original, runner, *args, **kwargs)

    def on_stop(self, *args: Any, **kwargs: Any) -> None:
        """Let the processes that are about to be killed end their traces first."""
        stop_tree(*args, **kwargs)


def redirect(injector: Injector, recording: SglangRecording, layout: RunnerLayout, batch: Any) -> Undo | None:
    """Let an entry of `req_to_token` point elsewhere for a forward of the target, if it is time; return what puts it back, None if nothing was done."""
    if not injector.redirects():
        return None
    mode, bs = mode_of(batch.forward_mode), int(batch.req_pool_indices.numel())
    if layout.index or mode not in ("extend", "decode", "mixed") or not batch.rids:
        return None
    known, rows = recording.batches.of(batch.rids, bs), batch.req_pool_indices.tolist()
    prefix, _ = prefix_and_extend(batch, mode, bs, own_int64(batch.positions))
    table: Any = recording.layout.tables[layout.table]
    slots = [table[row, : int(prefix[r])].tolist() if row else [] for r, row in enumerate(rows)]
    cells = [(r, position, slot) for r, of_row in enumerate(slots) for position, slot in enumerate(of_row)]

    def point(r: int, position: int, slot: int) -> Undo:
        return put_entry(table, (rows[r], position), slot)

    return injector.redirect(batch.rids, known.ids.tolist(), cells, 1, point)
