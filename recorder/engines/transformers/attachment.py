"""transformers' continuous batching, hooked: the engine's classes are wrapped, not changed, until `detach`."""

import functools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...capture.recorder import Recorder, prepare_kernels
from ...errors import error_text
from ...process.injection import Injection
from ...process.settings import RecordingSettings
from ...writing.sampling import sampled_header
from ...writing.trace_file import begin_new
from ..common.attachment import EngineAttachment, not_recording, settings_here
from ..common.hooking import Around, Finish, beside, harmless
from .layout import MASKED
from .recording import TransformersRecording

logger = logging.getLogger("kvcanary")

OLDEST = 5, 18  # before it a cache has no allocators with memory of their own
VERSIONS = "5.18 to 5.24"  # the adapter's tests pass on each


class TransformersAttachment(EngineAttachment):
    """A recording of every batch processor that runs while it is attached; a context manager.

    The first processor's trace is `path`; for `trace.arrow` the next are `trace.1.arrow`, `trace.2.arrow`, ...
    Use `attach` to make one; `current` is the one that is attached. A hook that fails ends its processor's recording.
    """

    engine = "transformers"
    current: ClassVar["TransformersAttachment | None"] = None
    _lock: ClassVar = threading.Lock()

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        super().__init__()
        self.path = path
        self.settings: RecordingSettings | None = None  # of an operator, who may want windows
        self._options = options
        self._active = False
        self._opening = threading.Lock()  # two engines of one process may begin at once, each by its own thread
        self._changing = threading.Lock()  # held for a moment: which recordings there are, and whether a window ends
        self._window = 0  # counts those that ended
        self._recorders: list[Recorder] = []
        # By the engine's objects that hooks meet: processor, cache, allocators, offloading manager, scheduler.
        self._recordings: weakref.WeakKeyDictionary[Any, TransformersRecording | None] = weakref.WeakKeyDictionary()
        self._patches: list[tuple[type, str, Any, Any]] = []
        self._kinds: list[tuple[Any, str, Any, Any]] = []  # of attention, as `_patches`

    @property
    def recorder(self) -> Recorder | None:
        """The newest recorder, None before the first step of an engine."""
        return self._recorders[-1] if self._recorders else None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The traces written so far."""
        return tuple(recorder.path for recorder in self._recorders)

    def recorders(self) -> list[Recorder]:
        """Return the recorders so far."""
        return self._recorders

    def install(self, targets: Sequence[tuple[type, str, str]]) -> None:
        """Put hooks around functions of classes: `(class, function, hook)`.

        A hook is a method of this class, else of the recording that the function's `self` belongs to, which gets that
        `self` and the function's arguments; or "because REASON" for what frees blocks for a reason.

        Raises:
            ValueError: a function is not there, or something is attached already.
        """
        missing = [f"{owner.__name__}.{name}" for owner, name, _ in targets if name not in owner.__dict__]
        if missing:
            raise ValueError(f"this transformers has no {', '.join(missing)}; the adapter knows versions {VERSIONS}")
        with TransformersAttachment._lock:
            attached = TransformersAttachment.current
            if attached is not None:
                raise ValueError(f"already recording to {attached.path}; detach that first")
            TransformersAttachment.current = self
            self._active = True
            for owner, name, hook in targets:
                original = owner.__dict__[name]
                wrapper = self._wrapped(original, hook)
                self._patches.append((owner, name, original, wrapper))
                setattr(owner, name, wrapper)

    def watch_attention(self, functions: Any) -> None:
        """Put a hook around the kinds of attention that get a mask, of those that models look up in `functions` as they run."""
        for kind in MASKED:
            if kind in functions:
                own = vars(functions).get("_local_mapping", {}).get(kind)
                wrapper = self._watched(functions, kind, own)
                self._kinds.append((functions, kind, own, wrapper))
                functions[kind] = wrapper

    def _watched(self, functions: Any, kind: str, own: Any) -> Any:
        import torch

        def on_attention(*args: Any, **kwargs: Any) -> Finish | None:
            recording = self._recordings.get(kwargs["cache"])
            return None if recording is None else recording.on_attention(kind, *args, **kwargs)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            original = own or type(functions)._global_mapping[kind]  # somebody may have put another one there since
            cache = kwargs.get("cache")
            if cache is None or not self._active or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return harmless(on_attention, functools.partial(self._fault, cache))(original, *args, **kwargs)

        return wrapper

    def detach(self) -> None:
        """Put the engine's functions back and close the traces; a second call does nothing."""
        with TransformersAttachment._lock:
            if not self._active:
                return
            self._active = False
            TransformersAttachment.current = None
            for owner, name, original, wrapper in reversed(self._patches):
                if owner.__dict__.get(name) is wrapper:
                    setattr(owner, name, original)
                else:  # wrapped by someone else since; our wrapper stays below and passes through
                    logger.warning("kvcanary: %s.%s was wrapped again and cannot be put back", owner.__name__, name)
            for functions, kind, own, wrapper in reversed(self._kinds):
                if functions[kind] is not wrapper:
                    logger.warning("kvcanary: attention %s was wrapped again and cannot be put back", kind)
                elif own is None:
                    del functions[kind]
                else:
                    functions[kind] = own
            self._kinds.clear()
        self.close()
        self._recordings.clear()

    def __enter__(self) -> "TransformersAttachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _wrapped(self, original: Any, name: str) -> Any:
        method, _, reason = name.partition(" ")

        def hook(engine: Any, *args: Any, **kwargs: Any) -> Finish | None:
            owner: Any = self if hasattr(self, method) else self._recordings.get(engine)
            if owner is None:
                return None
            finish: Finish | None = getattr(owner, method)(*((reason,) if reason else (engine, *args)), **kwargs)
            return finish

        hook.__name__ = method

        @functools.wraps(original)
        def wrapper(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return original(engine, *args, **kwargs)
            return harmless(hook, functools.partial(self._fault, engine))(original, engine, *args, **kwargs)

        return wrapper

    def _fault(self, engine: Any, hook: str, error: Exception) -> None:
        recording = self._recordings.get(engine)
        if recording is None:
            logger.error("kvcanary: not recording: %s", error_text(error), exc_info=error)
        else:
            self.fail(recording.recorder, hook, error, ends=True)
            with self._changing:
                if not recording.in_step and recording.window != self._window:  # it failed before a step could end it
                    self._end(recording)

    def on_step(self, processor: Any, model: Any) -> Finish | None:
        """Record a step, a processor's first into a trace of its own."""
        with self._changing:
            if self.windows is not None:
                self.look_at_window()
                if not self._in_window:
                    return None
            window, known = self._window, processor in self._recordings
            if not known:
                self._recordings[processor] = None  # whatever happens next, it is tried and logged once
        if not known:
            with self._opening:
                self._open(processor, window)
        with self._changing:
            recording = self._recordings.get(processor)  # another engine of the process may have ended the window
            if recording is None:
                return None
            recording.in_step = True
        try:
            recording.before_step(processor, model)
        except BaseException:
            recording.in_step = False
            raise
        return lambda _, error: self._stepped_by(recording, processor, error)

    def _stepped_by(self, recording: TransformersRecording, processor: Any, error: BaseException | None) -> None:
        """Complete a step; if another engine of the process ended the window meanwhile, the trace ends behind it."""
        try:
            recording.after_step(processor, error)
        finally:
            with self._changing:
                recording.in_step = False
                if recording.window != self._window:
                    self._end(recording)

    def _open(self, processor: Any, window: int) -> None:
        number = len(self._recorders)
        path = self.path if not number else self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")
        if self.windows is not None and self.settings is not None:
            path = trace_path(self.settings.folder)  # a name for each window: there is no end of them
        begins = None
        if self.settings is not None and (self.windows is not None or self.settings.sample_servers < 1):
            begins = functools.partial(sampled_header, settings=self.settings, windows=self.windows)
        recording = begin_new(path, lambda path: TransformersRecording(path, processor, begins=begins, **self._options))
        recording.window = window
        if self.windows is not None:
            self.windows.begun(recording.recorder)
        cache = processor.cache
        engine_parts = (processor, cache, processor.offloading_manager, processor.scheduler, processor.model_runner)
        with self._changing:
            self._recorders.append(recording.recorder)
            if window != self._window:  # it ended meanwhile; steps until the next one would be missing in the trace
                self._end(recording)
                return
            for part in (*engine_parts, *cache.cache_allocators.values()):
                self._recordings[part] = recording

    def end_window(self) -> None:
        """End all traces before the step that is about to run; the trace of an engine that is in a step, behind that."""
        self._window += 1
        for recording in {id(its): its for its in self._recordings.values() if its is not None}.values():
            if not recording.in_step:
                self._end(recording)
        for part in [part for part, its in self._recordings.items() if its is None]:
            del self._recordings[part]

    def _end(self, recording: TransformersRecording) -> None:
        """End a trace, and let go of its engine's parts; `_changing` is held."""
        self._let_go(recording)
        if recording.recorder in self._recorders:
            self._recorders.remove(recording.recorder)
            self.close_behind(recording.recorder)

    def _let_go(self, recording: TransformersRecording) -> None:
        for part in [part for part, its in self._recordings.items() if its is recording]:
            del self._recordings[part]

    @beside
    def on_stop(self, manager: Any, *_args: Any, **_kwargs: Any) -> Around:
        """Close the trace of a processor that is given up; let go of its parts, whose memory would live on through it."""
        recording = self._recordings.get(manager.batch_processor) if manager.batch_processor is not None else None
        if recording is None:
            return
        try:
            yield
        finally:
            if manager.batch_processor is None:  # not kept for another run of the loop
                recording.recorder.close(timeout=5.0)
                with self._changing:  # of windows there is no end, and each recorder holds memory
                    (self._let_go if self.windows is None else self._end)(recording)


def trace_path(folder: Path) -> Path:
    """Return what a trace that begins now is called."""
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return folder / f"transformers-{when}-{os.getpid()}.arrow"


def attach_from_environment() -> TransformersAttachment | None:
    """Record from now on, if `KVCANARY_TRACE` or a file of settings asks for it; None if nothing does.

    The trace is `transformers-<UTC time>-<pid>.arrow` in the folder named. Of the settings, `sweep_every` and `history`
    have no meaning here. Never raises: what is wrong with a setting, or with the folder, the log says, and the engine runs
    unrecorded.
    """
    try:
        return _attached_as_set()
    except Exception as error:  # noqa: BLE001  # the engine comes first
        not_recording("transformers", error)
        return None


def _attached_as_set() -> TransformersAttachment | None:
    settings = settings_here()
    if settings is None:
        return None
    settings.folder.mkdir(parents=True, exist_ok=True)
    names = ("kv_watch_every", "outputs_every", "capture_bytes", "oracle", "inject")
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    options["all_layers"] = settings.all_layers == "on"
    attachment = begin_new(
        trace_path(settings.folder),
        lambda path: attach(path, **options, **settings.writer_options()),
    )
    attachment.settings = settings
    attachment.sample(settings)
    return attachment


def attach(
    path: str | Path,
    *,
    kv_watch_every: int = 1,
    capture_bytes: int = 16,
    layers: tuple[int, ...] | None = None,
    all_layers: bool = True,
    outputs_every: int = 1,
    submitted: bool = True,
    oracle: str = "",
    inject: Injection | None = None,
    **writer_options: Any,
) -> TransformersAttachment:
    """Record every batch processor that steps from now on, until `detach`.

    Args:
        path: the first processor's trace; further ones get a number before the suffix. If somebody has taken a name by
            the first step, or one of segments is there, `-1` and so on follows.
        kv_watch_every: look for KV bytes that changed without a write every N forwards; 0 never.
        capture_bytes: leading bytes of each token's K and V to keep, a multiple of 16; 0 for none.
        layers: whose KV bytes to keep, at most 4 of a group; None for the first layer of each group.
        all_layers: sample all layers, 16 bytes of one of them in each slot, and look for NaN, infinity and rows of zeros in
            all that is written; of a cache on the CPU, and unless `layers` are named.
        outputs_every: hold what comes out of attention against the slots in one of so many steps; 0 never. On the CPU alone, and
            only where steps do not overlap and `submitted` is on.
        submitted: compare what those layers hand to the cache with what it holds after the forward; costs a copy of
            their K and V of each forward.
        oracle: what samples every token in the place of the model, "hash" or "module:name"; "" the model does.
        inject: a fault to be put into the engine on purpose, as `kvcanary inject` asks for it.
        writer_options: `compression`, `flush_bytes`, `flush_interval_ns`, `max_queued_bytes`, `overwrite`.

    Raises:
        ValueError: something is attached already, this transformers is older than 5.18 or lacks what the adapter hooks, or
            an option is out of range.
        FileExistsError: the path exists and `overwrite` is not set.
        ImportError: transformers is not installed.
    """
    path = Path(path)
    if kv_watch_every < 0:
        raise ValueError(f"kv_watch_every is {kv_watch_every}, expected 0 (never) or a number of forwards")
    if capture_bytes < 0 or capture_bytes % 16:
        raise ValueError(f"capture_bytes is {capture_bytes}, expected a multiple of 16, or 0 for none")
    if inject is not None and inject.fault == "kv_unused_cache":
        raise ValueError("kv_unused_cache needs a sweep of the prefix cache, which transformers' recording has not")
    if path.exists() and not writer_options.get("overwrite", False):
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ValueError(
            f"this transformers is {transformers.__version__}; recording it needs 5.18 or later (tested: {VERSIONS})"
        )
    from transformers.generation.continuous_batching import (
        cache,
        continuous_api,
        model_runner,
        offloading_manager,
        scheduler,
    )
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    prepare_kernels()  # now, not at the engine's first step
    options: dict[str, Any] = {"layers": layers, "capture_bytes": capture_bytes, "kv_watch_every": kv_watch_every}
    options |= {"seed": secrets.randbits(32) if all_layers else None, "outputs_every": outputs_every}
    options |= {"submitted": submitted, "oracle": oracle, "inject": inject, "writer_options": writer_options}
    attachment = TransformersAttachment(path, options)
    processor, offloading = continuous_api.ContinuousBatchProcessor, offloading_manager.OffloadingManager
    allocator, paged = cache_allocator.CacheAllocator, cache.PagedAttentionCache
    attachment.install(
        [
            (processor, "_generation_step", "on_step"),
            (model_runner.ModelRunner, "compute_batch", "on_compute"),
            (processor, "reset", "because reset"),
            (continuous_api.ContinuousBatchingManager, "stop", "on_stop"),
            (allocator, "free_blocks", "on_free"),
            (allocator, "mark_complete_blocks", "on_complete"),
            (paged, "evict_cached_blocks", "on_evict"),
            (paged, "update", "on_update"),
            (paged, "prepare_fork_request", "on_fork"),
            (paged, "perform_cache_copy", "on_copy"),
            (offloading, "offload_requests", "because offload"),
            (offloading, "_offload_to_cpu", "on_offload"),
            (offloading, "restore_scheduled_requests", "on_restore"),
            (scheduler.Scheduler, "clear_cancelled_requests", "because cancel"),
        ]
    )
    attachment.watch_attention(ALL_ATTENTION_FUNCTIONS)
    return attachment
