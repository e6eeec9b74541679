"""Adapter for Hugging Face transformers' continuous batching: `attach`, and every `generate_batch` is recorded.

    with attach("trace.arrow"):
        model.generate_batch(inputs, ...)

The engine's classes are wrapped, not changed: `detach` puts the original functions back. Known to work with
transformers 5.23; synchronous batching only, and the block-table fast path (GPU, flash attention) is untested.
"""

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from ...capture.recorder import Recorder, prepare_kernels
from ...errors import error_text
from ...process.environment import read_environment
from ...writing.trace_file import begin_new
from .session import Session

logger = logging.getLogger("kvcanary")

Finish = Callable[[Any, BaseException | None], None]
Hook = Callable[..., Finish | None]


class Attachment:
    """A recording of every batch processor that runs while it is attached; a context manager.

    The first processor's trace is `path`; for `trace.arrow` the next are `trace.1.arrow`, `trace.2.arrow`, ...
    Use `attach` to make one.
    """

    _attached: ClassVar["Attachment | None"] = None
    _lock: ClassVar = threading.Lock()

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path
        self._options = options
        self._active = False
        self._recorders: list[Recorder] = []
        # Sessions by the engine's objects that hooks meet: processor, cache, allocators, offloading manager, scheduler.
        self._sessions: weakref.WeakKeyDictionary[Any, Session | None] = weakref.WeakKeyDictionary()
        self._patches: list[tuple[type, str, Any, Any]] = []

    @property
    def recorder(self) -> Recorder | None:
        """The newest recorder, None before the first step of an engine."""
        return self._recorders[-1] if self._recorders else None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The traces written so far."""
        return tuple(recorder.path for recorder in self._recorders)

    def detach(self) -> None:
        """Put the engine's functions back and close the traces; a second call does nothing."""
        with Attachment._lock:
            if not self._active:
                return
            self._active = False
            Attachment._attached = None
            for owner, name, original, wrapper in reversed(self._patches):
                if owner.__dict__.get(name) is wrapper:
                    setattr(owner, name, original)
                else:  # wrapped by someone else since; our wrapper stays below and passes through
                    logger.warning("kvcanary: %s.%s was wrapped again and cannot be put back", owner.__name__, name)
        for recorder in self._recorders:
            recorder.close()
        self._sessions.clear()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _install(self, targets: list[tuple[type, str, Hook]]) -> None:
        missing = [f"{owner.__name__}.{name}" for owner, name, _ in targets if name not in owner.__dict__]
        if missing:
            raise ValueError(f"this transformers has no {', '.join(missing)}; the adapter knows version 5.23")
        with Attachment._lock:
            if Attachment._attached is not None:
                raise ValueError(f"already recording to {Attachment._attached.path}; detach that first")
            Attachment._attached = self
            self._active = True
            for owner, name, hook in targets:
                original = owner.__dict__[name]
                wrapper = self._wrap(original, hook)
                self._patches.append((owner, name, original, wrapper))
                setattr(owner, name, wrapper)

    def _wrap(self, original: Any, hook: Hook) -> Any:
        """Return `original` with `hook` around it; nothing that the hook raises gets past this function."""

        @functools.wraps(original)
        def wrapper(engine: Any, *args: Any, **kwargs: Any) -> Any:
            finish: Finish | None = None
            if self._active:
                with self._harmless(engine, hook):
                    finish = hook(engine, *args, **kwargs)
            try:
                result = original(engine, *args, **kwargs)
            except BaseException as error:
                if finish is not None:
                    with self._harmless(engine, hook):
                        finish(None, error)
                raise
            if finish is not None:
                with self._harmless(engine, hook):
                    finish(result, None)
            return result

        return wrapper

    @contextmanager
    def _harmless(self, engine: Any, hook: Hook) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            name = getattr(hook, "__name__", "hook")
            session = self._sessions.get(engine)
            if session is not None:
                session.recorder.switch_off(
                    f"transformers adapter, {name}: {session.recorder.error_text(error)}", error
                )
            else:
                logger.error("kvcanary: not recording: %s", error_text(error), exc_info=error)  # noqa: TRY400  # with exc_info

    # Hooks: called with the original's arguments before it runs; what they return is called after it.

    def _on_step(self, processor: Any, _model: Any) -> Finish | None:
        if processor not in self._sessions:
            self._sessions[processor] = None  # whatever happens next, it is tried and logged once
            self._open(processor)
        session = self._sessions[processor]
        if session is None:
            return None
        session.before_step(processor)
        return lambda _, error: session.after_step(processor, error)

    def _open(self, processor: Any) -> None:
        number = len(self._recorders)
        path = self.path if not number else self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")
        session = begin_new(path, lambda path: Session(path, processor, **self._options))
        self._recorders.append(session.recorder)
        cache = processor.cache
        engine_parts = (processor, cache, processor.offloading_manager, processor.scheduler)
        for part in (*engine_parts, *cache.cache_allocators.values()):
            self._sessions[part] = session

    def _on_stop(self, manager: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        session = self._sessions.get(manager.batch_processor) if manager.batch_processor is not None else None
        if session is None:
            return None

        def finish(_: Any, __: BaseException | None) -> None:
            if manager.batch_processor is None:  # not kept for another run of the loop
                session.recorder.close(timeout=5.0)
                self._forget(session)

        return finish

    def _forget(self, session: Session) -> None:
        """Let go of an engine's parts, whose memory would live on through the session's."""
        for part in [part for part, its in self._sessions.items() if its is session]:
            del self._sessions[part]

    def _on_free(self, allocator: Any, request_id: str, no_cache: bool = False) -> Finish | None:
        session = self._sessions.get(allocator)
        if session is not None:
            session.free_blocks(allocator, request_id, no_cache=no_cache)
        return None

    def _on_complete(self, allocator: Any, request_id: str, *_args: Any, **_kwargs: Any) -> Finish | None:
        session = self._sessions.get(allocator)
        if session is None:
            return None
        before = list(allocator.block_table.get(request_id, []))
        sole = [allocator.ledger.shared_ref_counts.get(block, 1) == 1 for block in before]
        return lambda _, __: session.replaced_blocks(allocator, request_id, before, sole)

    def _on_evict(self, cache: Any) -> Finish | None:
        session = self._sessions.get(cache)
        if session is None:
            return None
        cached = [list(allocator.ledger.cached_blocks) for allocator in cache.cache_allocators.values()]
        return lambda _, __: session.evicted_blocks(cached)

    def _on_update(
        self, cache: Any, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]
    ) -> Finish | None:
        session = self._sessions.get(cache)
        if session is not None and kwargs.get("block_table") is None:  # else attention itself stores K and V
            session.submits(cache, key_states, value_states, layer_idx)
        return None

    def _on_fork(self, cache: Any, src_state: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
        session = self._sessions.get(cache)
        return None if session is None else lambda forked, _: session.forked(src_state, list(forked or ()))

    def _on_copy(self, cache: Any, copy_src_and_dst: dict[str, tuple[list[int], list[int]]]) -> Finish | None:
        session = self._sessions.get(cache)
        return None if session is None else lambda _, __: session.copied_blocks(copy_src_and_dst)

    def _on_offload(self, manager: Any, victims: list[Any], tables: dict[str, dict[str, list[int]]]) -> Finish | None:
        session = self._sessions.get(manager)
        if session is None:
            return None

        def finish(names: set[str] | None, _: BaseException | None) -> None:
            for state in victims:
                if names and state.request_id in names:
                    host = manager._request_id_to_cpu_blocks[state.request_id]
                    session.offloaded(state.request_id, tables[state.request_id], host)

        return finish

    def _on_restore(self, manager: Any, requests_in_batch: list[Any]) -> Finish | None:
        session = self._sessions.get(manager)
        if session is None:
            return None
        states = [future.state for future in requests_in_batch if future.state.is_cpu_offloaded]
        allocators = manager.cache.cache_allocators
        copies = [
            (
                state.request_id,
                {
                    group: list(allocator.block_table.get(state.request_id, []))
                    for group, allocator in allocators.items()
                },
                dict(manager._request_id_to_cpu_blocks.get(state.request_id, {})),
            )
            for state in states
        ]

        def finish(_: Any, __: BaseException | None) -> None:
            for name, pool, host in copies:
                session.restored(name, pool, host)

        return finish

    def _because(self, reason: str) -> Hook:
        """Return a hook that gives blocks freed meanwhile another reason."""

        def hook(engine: Any, *_args: Any, **_kwargs: Any) -> Finish | None:
            session = self._sessions.get(engine)
            if session is None:
                return None
            session.reason, before = reason, session.reason

            def finish(_: Any, __: BaseException | None) -> None:
                session.reason = before

            return finish

        return hook


def attach_from_environment() -> Attachment | None:
    """Record from now on, where `KVCANARY_TRACE` or a file of settings asks for it; None where nothing does.

    The trace is `transformers-<UTC time>-<pid>.arrow` in the folder named. Of the settings, `sweep_every` and `history`
    have no meaning here.

    Raises:
        ValueError, ImportError: as `attach` does, or a setting is wrong.
        OSError: the folder cannot be made.
    """
    settings = read_environment()
    if settings is None:
        return None
    settings.folder.mkdir(parents=True, exist_ok=True)
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    options: dict[str, Any] = {"kv_watch_every": settings.kv_watch_every, "capture_bytes": settings.capture_bytes}
    return begin_new(
        settings.folder / f"transformers-{when}-{os.getpid()}.arrow",
        lambda path: attach(path, **options, **settings.writer_options()),
    )


def attach(
    path: str | Path,
    *,
    kv_watch_every: int = 1,
    capture_bytes: int = 16,
    layers: tuple[int, ...] | None = None,
    submitted: bool = True,
    **writer_options: Any,
) -> Attachment:
    """Record every batch processor that steps from now on, until `detach`.

    Args:
        path: the first processor's trace; further ones get a number before the suffix. Where somebody has taken a
            name by the first step, or one of segments is there, `-1` and so on follows.
        kv_watch_every: look for KV bytes that changed without a write every N forwards; 0 never.
        capture_bytes: leading bytes of each token's K and V to keep, a multiple of 16; 0 for none.
        layers: whose KV bytes to keep, at most 4 of a group; None for the first layer of each group.
        submitted: compare what those layers hand to the cache with what it holds after the forward; costs a copy of
            their K and V of each forward.
        writer_options: `compression`, `flush_bytes`, `flush_interval_ns`, `max_queued_bytes`, `overwrite`.

    Raises:
        ValueError: something is attached already, this transformers lacks what the adapter hooks, or an option is
            out of range.
        FileExistsError: the path exists and `overwrite` is not set.
        ImportError: transformers is not installed.
    """
    path = Path(path)
    if kv_watch_every < 0:
        raise ValueError(f"kv_watch_every is {kv_watch_every}, expected 0 (never) or a number of forwards")
    if capture_bytes < 0 or capture_bytes % 16:
        raise ValueError(f"capture_bytes is {capture_bytes}, expected a multiple of 16, or 0 for none")
    if path.exists() and not writer_options.get("overwrite", False):
        raise FileExistsError(f"{path} exists; pass overwrite=True to replace it")
    from transformers.generation.continuous_batching import cache, continuous_api, offloading_manager, scheduler
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    prepare_kernels()  # now, not at the engine's first step
    attachment = Attachment(
        path,
        {
            "layers": layers,
            "capture_bytes": capture_bytes,
            "kv_watch_every": kv_watch_every,
            "submitted": submitted,
            "writer_options": writer_options,
        },
    )
    processor, offloading = continuous_api.ContinuousBatchProcessor, offloading_manager.OffloadingManager
    attachment._install(
        [
            (processor, "_generation_step", attachment._on_step),
            (processor, "reset", attachment._because("reset")),
            (continuous_api.ContinuousBatchingManager, "stop", attachment._on_stop),
            (cache_allocator.CacheAllocator, "free_blocks", attachment._on_free),
            (cache_allocator.CacheAllocator, "mark_complete_blocks", attachment._on_complete),
            (cache.PagedAttentionCache, "evict_cached_blocks", attachment._on_evict),
            (cache.PagedAttentionCache, "update", attachment._on_update),
            (cache.PagedAttentionCache, "prepare_fork_request", attachment._on_fork),
            (cache.PagedAttentionCache, "perform_cache_copy", attachment._on_copy),
            (offloading, "offload_requests", attachment._because("offload")),
            (offloading, "_offload_to_cpu", attachment._on_offload),
            (offloading, "restore_scheduled_requests", attachment._on_restore),
            (scheduler.Scheduler, "clear_cancelled_requests", attachment._because("cancel")),
        ]
    )
    return attachment
