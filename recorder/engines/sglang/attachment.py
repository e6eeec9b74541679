"""What the hooks around SGLang's functions do: collect its parts, start the recording, and speak to the session."""

import logging
from typing import Any

from ...capture.recording import beginning
from ...errors import error_text
from ...process.settings import RecordingSettings
from ...trace.header import NotWatched
from ..common.hooking import Finish, Hook, wrap_method
from ..common.step_cost import StepCost
from ..common.stopping import serve_stop, stop_on_sigterm, stop_tree
from .drafts import DraftGraph, check_chain
from .history import ALLOCS, FREES, GroupHistory
from .hooks import not_applied, register_drafts
from .host_cache import HostCache, controller_of
from .inside import InsideModels
from .layers import ModelLayers
from .layout import RunnerLayout
from .requests import row_of
from .session import Session, knows_allocator, on_host
from .stages import StageResults, follow_stages
from .transfers import to_nobody

logger = logging.getLogger("kvcanary")

EVICTIONS = ("evict", "evict_for_alloc")
LOADS = ("init_load_back", "load_back")
# Without these nothing can be recorded; without those the model is looked at from outside, if they fail in time.
ENDING_HOOKS = (
    "on_model",
    "on_layers",
    "on_scheduler",
    "on_draft_graph",
    "on_draft_extend_graph",
    "on_replay",
    "on_inside",
)
INSIDE_HOOKS = ("on_load", "on_capture", "on_inside")


class Attachment:
    """The recording of one process; `on_*` are hooks, called with the arguments of the function that they are around.

    A hook that fails is logged once and what it feeds is switched off: the forwards' failure ends the recording,
    another's leaves a loss in the trace and the rest goes on.
    """

    def __init__(self, settings: RecordingSettings) -> None:
        self.notes: list[str] = []
        self.not_watched: list[NotWatched] = []  # what could not be hooked
        self._settings = settings
        self._runners: list[Any] = []
        self._session: Session | None = None
        # The runner that ran last, and what is known of it.
        self._runner: Any = None
        self._layout: RunnerLayout | None = None
        self._inside = InsideModels(self.fault)
        self.on_capture, self.on_replay = self._inside.on_capture, self._inside.on_replay
        self._off: set[str] = set()
        self.cost = StepCost(("on_model", "on_run", "on_result"))
        self._layers = ModelLayers(self.fault, self.cost)

    def fault(self, hook: str, error: Exception) -> None:
        """Take note of a hook that failed."""
        if hook in self._off:
            return
        self._off.add(hook)
        session = self._session
        if session is None and hook in INSIDE_HOOKS:
            self._inside.off = True
            where = "forwards are taken down before and after the model"
            self.not_watched.append(
                NotWatched(what="other", name=f"inside the model: {hook}", reason=f"{where}: {error_text(error)}")
            )
            logger.warning("kvcanary: %s: %s: %s", where, hook, error_text(error), exc_info=error)
        elif session is None:
            logger.error("kvcanary: not recording: %s: %s", hook, error_text(error), exc_info=error)
        elif hook in ENDING_HOOKS:
            session.recorder.switch_off(f"SGLang adapter, {hook}: {session.recorder.error_text(error)}", error)
            self._session = None
        else:
            logger.error("kvcanary: %s is no longer told: %s", hook, error_text(error), exc_info=error)
            session.recorder.lost(f"SGLang adapter, {hook} is no longer told: {session.recorder.error_text(error)}")

    def _close(self) -> None:
        """End the trace, with what the recording cost in it."""
        session = self._session
        if session is None:
            return
        try:
            session.recorder.mark("cost", {**self.cost.summary(), **session.cost()})
        except Exception:
            logger.exception("kvcanary: what the recording cost is not told")
        session.recorder.close()

    def _live(self, hook: str) -> Session | None:
        return None if hook in self._off else self._session

    # Hooks, by the names of sglang_hooks.TARGETS.

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

        def finish(_: Any, error: BaseException | None) -> None:
            if error is None and self._session is None:
                self._start(scheduler)

        return finish

    def _start(self, scheduler: Any) -> None:
        runners = [runner for runner in self._runners if getattr(runner, "token_to_kv_pool", None) is not None]
        runners.sort(key=lambda runner: bool(runner.is_draft_worker))
        allocator = scheduler.token_to_kv_pool_allocator
        wanted = self._settings.history
        history = knows_allocator(allocator) and (wanted == "on" or (wanted == "auto" and on_host(allocator)))
        if not history:
            kind = "" if knows_allocator(allocator) else f", {type(allocator).__name__} is not known"
            self.notes.append(f"allocations and frees of slots are not told{kind}")
        if any(runner.is_draft_worker for runner in runners):
            self.not_watched += register_drafts(self)
        settings, missing = self._settings, (*self.not_watched, *not_applied())
        session = Session(scheduler, runners, settings, tuple(self.notes), missing, self._inside, self._layers)
        with beginning(session.recorder):
            self._follow(scheduler, session, allocator if history else None)
        self._session = session
        serve_stop(self._close)
        stop_on_sigterm(self._close)

    def _follow(self, scheduler: Any, session: Session, allocator: Any) -> None:
        """Hook what the scheduler's parts do; with an allocator, which slots it gives out."""
        if session.sweep.walks:
            self._wrap(session.target, "forward", self.on_forward)
        self._wrap(session.target.req_to_token_pool, "alloc", self.on_rows)
        self._wrap(session.target.req_to_token_pool, "free", self.on_row_free)
        if allocator is not None:
            session.keep_history(allocator)
            for one in session.histories:
                self._wrap_allocator(one)
            for name in EVICTIONS:
                if hasattr(scheduler.tree_cache, name):
                    self._wrap(scheduler.tree_cache, name, self.on_evict)
        self._follow_host_cache(scheduler, session)
        self._follow_transfers(scheduler, session)
        if session.recorder.header.ranks.pp_size > 1:
            follow_stages(scheduler, StageResults(session), self._wrap)

    def _follow_host_cache(self, scheduler: Any, session: Session) -> None:
        """Hook what goes to a host's pool and comes back, each copy or, where they cannot be told, each load-back."""
        if not getattr(scheduler, "enable_hierarchical_cache", False):
            return
        if any(group.host_num_slots for group in session.recorder.header.groups):
            cache = HostCache(controller_of(scheduler), session.recorder, session.histories)
            hooks = (("write", cache.on_write, None), ("load", cache.on_load, self.on_load_back))
            if all(wrap_method(cache.controller, name, self._copies(*both), self.fault) for name, *both in hooks):
                return
        for name in LOADS:
            wrap_method(scheduler.tree_cache, name, self.on_load_back, self.fault)

    def _copies(self, hook: Hook, otherwise: Hook | None) -> Hook:
        """Return a hook around copies; once one could not be told, `otherwise` stands in its place."""

        def on_host_cache(*args: Any, **kwargs: Any) -> Finish | None:
            chosen = hook if self._live("on_host_cache") else otherwise
            return chosen(*args, **kwargs) if chosen else None

        return on_host_cache

    def _follow_transfers(self, scheduler: Any, session: Session) -> None:
        """Hook what a prefill engine sends and a decode engine receives."""
        session.transfers.on_fault = self.fault
        role = session.recorder.header.role
        if role == "prefill":
            self._wrap(scheduler, "send_kv_chunk", self.on_send)
        queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
        if role == "decode" and not wrap_method(queue, "_commit_transfer_to_req", self.on_receive, self.fault):
            raise ValueError("this SGLang does not say what a decode engine receives, so nothing can be judged")
        if role == "decode":  # not counted as cost: it is called in every round of an idle engine, too
            wrap_method(queue, "extend", self.on_expect, self.fault)

    def _wrap(self, owner: Any, name: str, hook: Hook) -> None:
        if not wrap_method(owner, name, hook, self.fault, self.cost):
            logger.warning("kvcanary: %s has no %s: not told", type(owner).__name__, name)

    def _wrap_allocator(self, history: GroupHistory) -> None:
        hooks = dict.fromkeys(ALLOCS, history.on_alloc) | dict.fromkeys(FREES, history.on_free)
        hooks |= {
            "free_page_ids": history.on_free_page_ids,
            "free_group_end": history.on_group_end,
            "clear": history.on_clear,
        }
        for name, hook in hooks.items():
            if hasattr(history.allocator, name):
                wrap_method(history.allocator, name, self._while_on(hook), self._history_fault, self.cost)

    def _while_on(self, hook: Hook) -> Hook:
        def guarded(*args: Any, **kwargs: Any) -> Finish | None:
            return hook(*args, **kwargs) if self._live("history") else None

        return guarded

    def _history_fault(self, _: str, error: Exception) -> None:
        if self._session is not None:
            self._session.histories.clear()
        self.fault("history", error)

    def on_model(self, runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a forward: what goes in before it, what it wrote after it."""
        session = self._session  # None once this hook has failed
        if session is None:
            self.cost.forget()  # the hooks are called all the same, and each adds to it
            return None
        layout = self._layout
        if runner is not self._runner:
            self._runner, layout = runner, session.layout.runners.get(id(runner))
            self._layout = layout
        if layout is None:
            return None
        bs = batch.req_pool_indices.numel()
        if layout.sampled:
            self.cost.next_step(batch.forward_mode, bs)
        session.before_model(layout, batch, bs)
        return session.after_model

    def on_draft_extend_graph(self, graph_runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a draft's extend that runs as a CUDA graph, past the draft runner's own forward."""
        return self.on_model(graph_runner.model_runner, batch)

    def on_draft_graph(self, graph_runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a draft's steps that run as one CUDA graph, each as it is taken down in the graph, else after it."""
        session = self._live("on_draft_graph")
        layout = None if session is None else session.layout.runners.get(id(graph_runner.model_runner))
        if session is None or layout is None:
            return None
        if session.looks_into(graph_runner):
            check_chain(graph_runner)
            session.before_model(layout, batch, batch.req_pool_indices.numel())
            return session.after_draft_graph
        graph = DraftGraph(graph_runner, batch, own=session.own)

        def finish(result: Any, error: BaseException | None) -> None:
            for step in [] if error else graph.steps(result):
                session.before_model(layout, step, step.req_pool_indices.numel())
                session.after_model(None, None)

        return finish

    def on_forward(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Walk the prefix cache at the end of a target's forward, where SGLang's canary sweeps."""
        session = self._live("on_forward")
        if session is None:
            return None
        return lambda _, error: None if error else session.sweep.after_forward()

    def on_run(self, _scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Get to know the requests of a batch that is about to run, and which forward its result belongs to."""
        session = self._session
        if session is None or "on_run" in self._off:
            return None
        if batch.reqs != session.reqs:
            session.runs(batch.reqs or [])
        if getattr(batch, "beam_tail", None) is not session.beam_tail:
            session.runs_beams(batch)
        return session.ran

    def on_result(self, _scheduler: Any, _batch: Any, result: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell what the scheduler took over from a result."""
        session = self._session
        if session is None or "on_result" in self._off:
            return None
        return session.took_result if session.takes_result(result) else None

    def on_retract(self, *_args: Any, offload_kv: bool = True, **_kwargs: Any) -> Finish | None:
        """Call a row that is given back meanwhile a retracted request's."""
        session = self._live("on_retract")
        if session is None:
            return None
        session.retracting, session.restores = True, offload_kv

        def finish(_: Any, __: BaseException | None) -> None:
            session.retracting = False

        return finish

    def on_rows(self, reqs: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell of requests that are given rows."""
        session = self._live("on_rows")
        if session is None:
            return None
        new = [req for req in reqs if row_of(req) < 0]

        def finish(_: Any, __: BaseException | None) -> None:
            for req in new:
                if row_of(req) >= 0:
                    session.got_row(req)

        return finish

    def on_row_free(self, req: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell of a request that gives its row back."""
        session = self._live("on_row_free")
        if session is None or not hasattr(req, "rid"):
            return None
        row = row_of(req)
        return lambda _, error: None if error else session.gave_row_back(req, row)

    def on_send(self, req: Any, *args: Any, **kwargs: Any) -> Finish | None:
        """Tell of a prompt whose last chunk is sent to a decode engine, and of the transfer's end."""
        session = self._live("on_send")
        if session is None or to_nobody(req.disagg_kv_sender):
            return None
        session.transfers.sending(req)
        last = bool(args[0]) if args else bool(kwargs.get("last_chunk", False))

        def finish(_: Any, error: BaseException | None) -> None:
            if error is None and last:
                session.transfers.sent_last(req, session.see(req))

        return finish

    def on_expect(self, decode_reqs: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell of prompts whose senders know where to write them."""
        session = self._live("on_expect") if decode_reqs else None
        if session is None:
            return None
        for decode_req in decode_reqs:
            if row_of(decode_req.req) >= 0:
                session.transfers.expected(decode_req.req, session.see(decode_req.req), decode_req.kv_receiver)
        return None

    def on_receive(self, decode_req: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell of a prompt that has landed."""
        session = self._live("on_receive")
        if session is None:
            return None
        req, receiver = decode_req.req, decode_req.kv_receiver
        if getattr(decode_req, "host_staged", False):
            session.recorder.lost("a prompt was received in the host's memory, which is not told")
            return None

        def finish(_: Any, error: BaseException | None) -> None:
            if error is None:
                session.transfers.received(req, session.see(req), receiver)

        return finish

    def on_load_back(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Say that slots may have got content from a host cache, which ones is not told."""
        session = self._live("on_load_back")
        if session is not None:
            session.recorder.lost("KV was loaded back from the host cache, which is not told")
        return None

    def on_evict(self, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Call slots that are given back meanwhile evicted."""
        session = self._live("history")
        if session is None:
            return None
        self._evicting(session, True)
        return lambda _, __: self._evicting(session, False)

    def _evicting(self, session: Session, evicting: bool) -> None:
        for history in session.histories:
            history.evicting = evicting

    def on_stop(self, *args: Any, **kwargs: Any) -> Finish | None:
        """Let the processes that are about to be killed end their traces first."""
        stop_tree(*args, **kwargs)
        return None
