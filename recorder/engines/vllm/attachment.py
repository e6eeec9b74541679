"""What the hooks around vLLM's functions do: collect its parts, start the recordings, and speak to their sessions."""

import logging
import multiprocessing.util
import weakref
from typing import Any, Final

from ...capture.recording import beginning
from ...errors import error_text
from ...process.settings import RecordingSettings
from ..common.hooking import Finish, wrap_method
from ..common.stop_signal import stop_on_sigterm
from ..common.stop_socket import serve_stop, stop_tree
from .session import Session, watch_result
from .step import read_v1, read_v2

logger = logging.getLogger("kvcanary")

# Hooks without which what is recorded would be judged wrongly.
ENDING: Final = ("on_execute", "on_forward", "on_prepared", "on_kv_update", "on_allocated", "on_finished")


class Attachment:
    """The recordings of one process; `on_*` are hooks, called with the arguments of the function that they are around.

    A process mostly has one runner, and the scheduler too where the engine has one worker. A hook that fails is logged
    once and what it feeds is switched off: the forwards' failure ends the recording, another's leaves a loss in the
    trace and the rest goes on.
    """

    def __init__(self, settings: RecordingSettings) -> None:
        self.notes: list[str] = []  # what could not be hooked
        self._settings = settings
        self._newest: Any = None  # the runner that got its KV cache last
        self._sessions: weakref.WeakKeyDictionary[Any, Session | None] = weakref.WeakKeyDictionary()
        self._schedulers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # runner -> scheduler
        self._runners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # scheduler -> runner
        self._started = 0
        self._warming = 0  # calls under way that warm an engine up, one inside another
        self._off: set[str] = set()

    def fault(self, hook: str, error: Exception) -> None:
        """Take note of a hook that failed."""
        if hook in self._off:
            return
        self._off.add(hook)
        live = [session for session in self._sessions.values() if session is not None]
        if not live:
            logger.error("kvcanary: not recording: %s: %s", hook, error_text(error), exc_info=error)
        for session in live:
            reason = f"vLLM adapter, {hook}: {session.recorder.error_text(error)}"
            if hook in ENDING:
                session.recorder.switch_off(reason, error)
            else:
                logger.error("kvcanary: %s is no longer told", reason, exc_info=error)
                session.recorder.lost(f"{reason}: no longer told")

    def _live(self, hook: str, runner: Any) -> Session | None:
        return None if hook in self._off else self._sessions.get(runner)

    # Hooks, by the names of vllm_hooks.TARGETS.

    def on_runner(self, runner: Any, *args: Any, **kwargs: Any) -> Finish | None:
        """Remember a runner when it has its KV cache; what ran before was warm-up."""
        profiling = bool(kwargs.get("is_profiling", args[1] if len(args) > 1 else False))

        def finish(_: Any, error: BaseException | None) -> None:
            if error is None:
                self._newest = runner
                before = self._sessions.pop(runner, None)
                if before is not None:  # a cache anew: what is told of the one before is over
                    before.recorder.close()

        return None if profiling else finish

    def on_warm_up(self, _worker: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Pass over what an engine runs to warm up; the V2 runner executes steps of requests of its own for that."""
        self._warming += 1

        def finish(_: Any, __: BaseException | None) -> None:
            self._warming -= 1

        return finish

    def on_scheduler(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Remember a scheduler of this process, which schedules for the runner made before it."""

        def finish(_: Any, error: BaseException | None) -> None:
            if error is None and self._newest is not None:
                self._schedulers[self._newest] = scheduler
                self._runners[scheduler] = self._newest

        return finish

    def _start(self, runner: Any) -> Session | None:
        """Return a runner's session; the first call starts it, but for one of a warm-up."""
        if self._warming:
            return None
        if runner in self._sessions:
            return self._sessions[runner]
        self._sessions[runner] = None  # whatever happens next, it is tried and logged once
        session = Session(
            runner, self._schedulers.get(runner), self._settings, tuple(dict.fromkeys(self.notes)), self._started
        )
        self._started += 1
        with beginning(session.recorder):
            session.attach(self.fault, lambda _, error: self.fault("history", error))
            wrap_method(getattr(runner, "model_state", None), "prepare_attn", self.on_attention(runner), self.fault)
        self._sessions[runner] = session
        # Neither runs in all the ways in which vLLM's processes end; the recorder's own goodbye is a third.
        multiprocessing.util.Finalize(None, session.recorder.close, exitpriority=100)
        if self._started == 1:
            serve_stop(self._close)
            stop_on_sigterm(self._close)
        return session

    def _close(self) -> None:
        for session in list(self._sessions.values()):
            if session is not None:
                session.recorder.close()

    def on_add_request(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Get to know a request before it is given blocks."""
        runner = self._runners.get(scheduler)
        session = self._start(runner) if runner is not None and "on_add_request" not in self._off else None
        if session is not None:
            session.see(request.request_id, int(getattr(request, "num_prompt_tokens", 0) or 0))
        return None

    def on_free_blocks(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell of a request that is over, once its blocks are given back."""
        session = self._of_scheduler("on_free_blocks", scheduler)
        if session is None:
            return None
        status = "aborted" if "ABORT" in str(getattr(request, "status", "")) else "finished"
        return lambda _, error: None if error else session.left(request.request_id, status)

    def on_preempt(self, scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell of a request that has to wait again, once its blocks are given back."""
        session = self._of_scheduler("on_preempt", scheduler)
        if session is None:
            return None
        return lambda _, error: None if error else session.left(request.request_id, "retracted")

    def _of_scheduler(self, hook: str, scheduler: Any) -> Session | None:
        runner = self._runners.get(scheduler)
        session = self._live(hook, runner) if runner is not None else None
        return session if session is not None and session.history is not None else None

    def on_execute(self, runner: Any, output: Any, *_args: Any, **kwargs: Any) -> Finish | None:
        """Follow a step from the scheduler's output to its result; a dummy run is none."""
        if "on_execute" in self._off or kwargs.get("dummy_run") or not hasattr(runner, "kv_cache_config"):
            return None
        session = self._start(runner)
        if session is None:
            return None
        session.begin_step(runner, output)

        def finish(result: Any, error: BaseException | None) -> None:
            session.after_model(error)  # the V2 runner's; the V1 runner's forward has ended by now
            session.output = None
            if error is None and result is not None:  # of a runner that samples at once
                self._take(session, result)

        return finish

    def on_forward(
        self, runner: Any, input_ids: Any = None, positions: Any = None, *_args: Any, **_kwargs: Any
    ) -> Finish | None:
        """Record a forward of the V1 runner: what goes in before it, what it wrote after it."""
        session = self._live("on_forward", runner)
        if session is None or session.output is None:
            return None
        session.before_model(
            read_v1(runner, session.output, session.layout.groups, input_ids, positions, session.attention)
        )
        return lambda _, error: session.after_model(error)

    def on_prepared(self, runner: Any, batch: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Record a forward of the V2 runner, which is prepared here and runs before `execute_model` returns."""
        session = self._live("on_prepared", runner)
        if session is None or session.output is None:
            return None

        def finish(prepared: Any, error: BaseException | None) -> None:
            if error is None:
                tables, slots = prepared
                session.before_model(read_v2(runner, session.output, session.layout.groups, batch, tables, slots))

        return finish

    def on_attention(self, runner: Any) -> Any:
        """Return a hook that records what the V2 runner's attention gets, around what makes its metadata."""

        def on_attention(*_args: Any, **_kwargs: Any) -> Finish | None:
            session = self._live("on_attention", runner)
            if session is None or session.output is None:
                return None
            return lambda metadata, error: None if error else session.on_attention(metadata)

        return on_attention

    def on_sample(self, runner: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Tell what a step sampled."""
        session = self._live("on_sample", runner)
        if session is None:
            return None

        def finish(result: Any, error: BaseException | None) -> None:
            session.after_drafts()
            if error is None:
                self._take(session, result)

        return finish

    def _take(self, session: Session, result: Any) -> None:
        finish = session.took_result(result)
        if finish is not None:
            watch_result(result, finish, self.fault)

    def on_shutdown(self, runner: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        """End a runner's trace with it."""
        session = self._sessions.pop(runner, None)
        if session is not None:
            session.recorder.close()
        return None

    def on_kill(self, pid: int, *_args: Any, **_kwargs: Any) -> Finish | None:
        """Let the processes that are about to be killed end their traces first: vLLM grants its own no time."""
        stop_tree(pid)
        return None
