"""What the transformers adapter hooks into, and what its tests ask of every run."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvcanary.recorder.engines.transformers import TransformersAttachment
from kvcanary.recorder.engines.transformers.layout import MASKED
from kvcanary.recorder.trace.reader import read_trace
from transformers.generation.continuous_batching import cache, continuous_api, offloading_manager, scheduler
from transformers.generation.continuous_batching.cache_allocators import cache_allocator
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..support.engines.documented_engine import judged

HOOKED = [
    (continuous_api.ContinuousBatchProcessor, "_generation_step"),
    (continuous_api.ContinuousBatchProcessor, "reset"),
    (continuous_api.ContinuousBatchingManager, "stop"),
    (cache_allocator.CacheAllocator, "free_blocks"),
    (cache_allocator.CacheAllocator, "mark_complete_blocks"),
    (cache.PagedAttentionCache, "evict_cached_blocks"),
    (cache.PagedAttentionCache, "prepare_fork_request"),
    (cache.PagedAttentionCache, "perform_cache_copy"),
    (offloading_manager.OffloadingManager, "offload_requests"),
    (offloading_manager.OffloadingManager, "_offload_to_cpu"),
    (offloading_manager.OffloadingManager, "restore_scheduled_requests"),
    (scheduler.Scheduler, "clear_cancelled_requests"),
]


def hooked_methods() -> list[Any]:
    """The methods as they are now, the engine's own or the adapter's, and so the kinds of attention."""
    kinds = [ALL_ATTENTION_FUNCTIONS[kind] for kind in MASKED if kind in ALL_ATTENTION_FUNCTIONS]
    return [*(owner.__dict__[name] for owner, name in HOOKED), *kinds]


@contextmanager
def left_as_it_was() -> Iterator[None]:
    """Whatever a test does, the engine's methods are its own again afterwards."""
    before = hooked_methods()
    yield
    attached = TransformersAttachment.current
    if attached is not None:
        attached.detach()
    assert hooked_methods() == before


def event_notes(path: Path) -> Counter[str]:
    """A trace's events by kind, status and note."""
    words = ((event.kind, event.scalar("status"), event.scalar("note")) for event in read_trace(path))
    return Counter(" ".join(word for word in of_event if word) for of_event in words)


def assert_clean(path: Path) -> Any:
    """The replay of a whole trace finds nothing, and has looked at something."""
    summary = judged(path)
    assert summary.complete
    assert (summary.violations, summary.findings, summary.gaps, summary.losses) == (0, 0, [], [])
    assert summary.verified > 0
    return summary
