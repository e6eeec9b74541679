"""The hooks around SGLang's functions: they collect its parts, start the recording, and pass on what happens."""

import logging
from typing import Any

from ...capture.recording import beginning
from ...errors import error_text
from ...process.settings import RecordingSettings
from ...trace.header import NotWatched
from ..common.attachment import EngineAttachment
from ..common.hooking import Finish, Hook, then, while_true, wrap_method
from ..common.step_cost import StepCost
from ..common.stopping import stop_tree
from .forward import DraftGraph, check_chain
from .history import ALLOCS, FREES, GroupHistory, knows_allocator, on_host
from .hooks import not_applied, register_drafts
from .host_cache import HostCache
from .inside import InsideModels
from .layers import ModelLayers
from .layout import RunnerLayout, controller_of
from .recording import SglangRecording
from .requests import row_of
from .transfers import to_nobody

logger = logging.getLogger("kvcanary")

EVICTIONS = ("evict", "evict_for_alloc")
LOADS = ("init_load_back", "load_back")
# If these fail in time, the model is looked at from outside.
INSIDE_HOOKS = ("on_load", "on_capture", "on_inside")


class SglangAttachment(EngineAttachment):
    """The recording of one process."""

    engine = "SGLang"
    ending = frozenset(
        ("on_model", "on_layers", "on_scheduler", "on_draft_graph", "on_draft_extend_graph", "on_replay", "on_inside")
    )

    def __init__(self, settings: RecordingSettings) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.not_watched: list[NotWatched] = []  # what could not be hooked
        self.recording: SglangRecording | None = None
        self._settings = settings
        self._runners: list[Any] = []
        # The runner that ran last, and what is known of it.
        self._runner: Any = None
        self._layout: RunnerLayout | None = None
        self._inside = InsideModels(self.fault)
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
            self.not_watched.append(
                NotWatched(what="other", name=f"inside the model: {hook}", reason=f"{where}: {said}")
            )
            logger.warning("kvcanary: %s: %s: %s", where, hook, said, exc_info=error)
            return
        super().fault(hook, error)
        if hook in self.ending:
            self.recording = None

    def close(self) -> None:
        """End the trace, with what the recording cost in it."""
        recording = self.recording
        if recording is None:
            return
        try:
            recording.recorder.mark("cost", {**self.cost.summary(), **recording.cost()})
        except Exception:
            logger.exception("kvcanary: what the recording cost is not recorded")
        super().close()

    def _live(self, hook: str) -> SglangRecording | None:
        return None if hook in self.off else self.recording

    # Hooks, by the names of hooks.TARGETS.

    def on_runner(self, runner: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Remember every model runner of the process: target and drafts."""
        if not any(known is runner for known in self._runners):
            self._runners.append(runner)
        return None

    def on_load(self, runner: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Stand around a model as soon as there is one, before SGLang's canary does."""
        inside = self._inside.on_load(runner)

        def finish(result: Any, error: BaseException | None) -> None:
            if inside is not None:
                inside(result, error)
            if error is None:
                self._layers.wrap(runner)

        return finish

    def on_scheduler(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Start the recording when the scheduler stands; what ran before it was warm-up."""
        return then(lambda _: None if self.recording is not None else self._start(scheduler))

    def _start(self, scheduler: Any) -> None:
        runners = [runner for runner in self._runners if getattr(runner, "token_to_kv_pool", None) is not None]
        runners.sort(key=lambda runner: bool(runner.is_draft_worker))
        allocator = scheduler.token_to_kv_pool_allocator
        wanted = self._settings.history
        history = knows_allocator(allocator) and (wanted == "on" or (wanted == "auto" and on_host(allocator)))
        if not history:
            kind = "" if knows_allocator(allocator) else f", {type(allocator).__name__} is not known"
            self.notes.append(f"allocations and frees of slots are not recorded{kind}")
        if any(runner.is_draft_worker for runner in runners):
            self.not_watched += register_drafts(self)
        settings, missing = self._settings, (*self.not_watched, *not_applied())
        recording = SglangRecording(
            scheduler, runners, settings, tuple(self.notes), missing, self._inside, self._layers
        )
        with beginning(recording.recorder):
            self._follow(scheduler, recording, allocator if history else None)
        self.recording = recording
        self.end_with_process()

    def _follow(self, scheduler: Any, recording: SglangRecording, allocator: Any) -> None:
        """Hook what the scheduler's parts do; with an allocator, which slots it gives out."""
        if recording.sweep.walks:
            self._wrap(recording.target, "forward", self.on_forward)
        self._wrap(recording.target.req_to_token_pool, "alloc", self.on_rows)
        self._wrap(recording.target.req_to_token_pool, "free", self.on_row_free)
        if allocator is not None:
            recording.keep_history(allocator)
            for one in recording.histories:
                self._wrap_allocator(one)
            for name in EVICTIONS:
                if hasattr(scheduler.tree_cache, name):
                    self._wrap(scheduler.tree_cache, name, self.on_evict)
        self._follow_host_cache(scheduler, recording)
        self._follow_transfers(scheduler, recording)
        if recording.recorder.header.ranks.pp_size > 1:
            self._wrap(scheduler, "_pp_launch_batch", recording.results.on_launch)
            self._wrap(scheduler, "_pp_process_batch_result", recording.results.on_process)

    def _follow_host_cache(self, scheduler: Any, recording: SglangRecording) -> None:
        """Hook what goes to a host's pool and comes back, each copy or, if they cannot be recorded, each load-back."""
        if not getattr(scheduler, "enable_hierarchical_cache", False):
            return
        if any(group.host_num_slots for group in recording.recorder.header.groups):
            cache = HostCache(controller_of(scheduler), recording.recorder, recording.histories)
            hooks = (("write", cache.on_write, None), ("load", cache.on_load, self.on_load_back))
            if all(wrap_method(cache.controller, name, self._copies(*both), self.fault) for name, *both in hooks):
                return
        for name in LOADS:
            wrap_method(scheduler.tree_cache, name, self.on_load_back, self.fault)

    def _copies(self, hook: Hook, otherwise: Hook | None) -> Hook:
        """Return a hook around copies; once one could not be recorded, `otherwise` stands in its place."""

        def on_host_cache(*args: Any, **kwargs: Any) -> Finish | None:
            chosen = hook if self._live("on_host_cache") else otherwise
            return chosen(*args, **kwargs) if chosen else None

        return on_host_cache

    def _follow_transfers(self, scheduler: Any, recording: SglangRecording) -> None:
        """Hook what a prefill engine sends and a decode engine receives."""
        recording.transfers.on_fault = self.fault
        role = recording.recorder.header.role
        if role == "prefill":
            self._wrap(scheduler, "send_kv_chunk", self.on_send)
        queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
        if role == "decode" and not wrap_method(queue, "_commit_transfer_to_req", self.on_receive, self.fault):
            raise ValueError(
                "this SGLang has no _commit_transfer_to_req: what a decode engine receives cannot be recorded"
            )
        if role == "decode":  # not counted as cost: it is called in every round of an idle engine, too
            wrap_method(queue, "extend", self.on_expect, self.fault)

    def _wrap(self, owner: Any, name: str, hook: Hook) -> None:
        if not wrap_method(owner, name, hook, self.fault, self.cost):
            logger.warning("kvcanary: %s has no %s: not recorded", type(owner).__name__, name)

    def _wrap_allocator(self, history: GroupHistory) -> None:
        hooks = dict.fromkeys(ALLOCS, history.on_alloc) | dict.fromkeys(FREES, history.on_free)
        hooks |= {
            "free_page_ids": history.on_free_page_ids,
            "free_group_end": history.on_group_end,
            "clear": history.on_clear,
        }
        for name, hook in hooks.items():
            if hasattr(history.allocator, name):
                wrap_method(
                    history.allocator,
                    name,
                    while_true(lambda: self._live("history"), hook),
                    self._history_fault,
                    self.cost,
                )

    def _history_fault(self, _: str, error: Exception) -> None:
        if self.recording is not None:
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
        recording.before_model(layout, batch, bs)
        return recording.after_model

    def on_draft_extend_graph(self, graph_runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a draft's extend that runs as a CUDA graph, past the draft runner's own forward."""
        return self.on_model(graph_runner.model_runner, batch)

    def on_draft_graph(self, graph_runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a draft's steps that run as one CUDA graph, each as it is captured in the graph, else after it."""
        recording = self._live("on_draft_graph")
        layout = None if recording is None else recording.layout.runners.get(id(graph_runner.model_runner))
        if recording is None or layout is None:
            return None
        if recording.records_inside(graph_runner):
            check_chain(graph_runner)
            recording.before_model(layout, batch, batch.req_pool_indices.numel())
            return recording.after_draft_graph
        graph = DraftGraph(graph_runner, batch, own=recording.own)

        def record(result: Any) -> None:
            for step in graph.steps(result):
                recording.before_model(layout, step, step.req_pool_indices.numel())
                recording.after_model(None, None)

        return then(record)

    def on_forward(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Walk the prefix cache at the end of a target's forward, where SGLang's canary sweeps."""
        recording = self._live("on_forward")
        if recording is None:
            return None
        return then(lambda _: recording.sweep.after_forward())

    def on_run(self, _scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Get to know the requests of a batch that is about to run, and which forward its result belongs to."""
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

    def on_retract(self, *_args: Any, offload_kv: bool = True, **_kwargs: Any) -> Finish | None:
        """Call a row that is given back meanwhile a retracted request's."""
        recording = self._live("on_retract")
        if recording is None:
            return None
        recording.retracting, recording.restores = True, offload_kv

        def finish(_: Any, __: BaseException | None) -> None:
            recording.retracting = False

        return finish

    def on_rows(self, reqs: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record the requests that are given rows."""
        recording = self._live("on_rows")
        if recording is None:
            return None
        new = [req for req in reqs if row_of(req) < 0]

        def finish(_: Any, __: BaseException | None) -> None:
            for req in new:
                if row_of(req) >= 0:
                    recording.got_row(req)

        return finish

    def on_row_free(self, req: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a request that gives its row back."""
        recording = self._live("on_row_free")
        if recording is None or not hasattr(req, "rid"):
            return None
        row = row_of(req)
        return then(lambda _: recording.gave_row_back(req, row))

    def on_send(self, req: Any, *args: Any, **kwargs: Any) -> Finish | None:
        """Record a prompt whose last chunk is sent to a decode engine, and the transfer's end."""
        recording = self._live("on_send")
        if recording is None or to_nobody(req.disagg_kv_sender):
            return None
        recording.transfers.sending(req)
        last = bool(args[0]) if args else bool(kwargs.get("last_chunk", False))

        return then(lambda _: recording.transfers.sent_last(req, recording.see(req))) if last else None

    def on_expect(self, decode_reqs: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record prompts whose senders know where to write them."""
        recording = self._live("on_expect") if decode_reqs else None
        if recording is None:
            return None
        for decode_req in decode_reqs:
            if row_of(decode_req.req) >= 0:
                recording.transfers.expected(decode_req.req, recording.see(decode_req.req), decode_req.kv_receiver)
        return None

    def on_receive(self, decode_req: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a prompt that has landed."""
        recording = self._live("on_receive")
        if recording is None:
            return None
        req, receiver = decode_req.req, decode_req.kv_receiver
        if getattr(decode_req, "host_staged", False):
            recording.recorder.lost("a prompt was received in the host's memory, which is not recorded")
            return None

        return then(lambda _: recording.transfers.received(req, recording.see(req), receiver))

    def on_load_back(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record that slots may have got content from a host cache; which ones is unknown."""
        recording = self._live("on_load_back")
        if recording is not None:
            recording.recorder.lost("KV was loaded back from the host cache, which is not recorded")
        return None

    def on_evict(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Call slots that are given back meanwhile evicted."""
        recording = self._live("history")
        if recording is None:
            return None
        self._evicting(recording, True)
        return lambda _, __: self._evicting(recording, False)

    def _evicting(self, recording: SglangRecording, evicting: bool) -> None:
        for history in recording.histories:
            history.evicting = evicting

    def on_stop(self, *args: Any, **kwargs: Any) -> Finish | None:
        """Let the processes that are about to be killed end their traces first."""
        stop_tree(*args, **kwargs)
        return None
