"""What a vLLM engine does that no trace of it shows, and why its history of slots may be none."""

from collections.abc import Sequence
from typing import Any

from ...process.settings import RecordingSettings
from ...trace.header import NotWatched, Runner
from .attention.given import AttentionReader
from .blocks import why_no_history
from .connectors.external import not_watched as connector_not_watched
from .connectors.storages import Member
from .device import is_v1, on_gpu
from .layout import DRAFT_NAME, WRITES_ALONE, VllmLayout, steps_in_one_graph


def why_no_slots(layout: VllmLayout, scheduler: Any, settings: RecordingSettings) -> str:
    """Return why no slot history is recorded, nothing if it is."""
    if settings.history == "off":
        return "switched off"
    if scheduler is None:
        return "the scheduler runs in another process"
    return why_no_history(scheduler, layout.all_groups)


def not_watched(
    runner: Any, layout: VllmLayout, attention: AttentionReader, members: Sequence[Member]
) -> list[NotWatched]:
    """Name what this engine does that no forward of the trace will show."""
    config = runner.vllm_config
    entries = connector_not_watched(config, members, on_gpu=on_gpu(runner))
    speculative = getattr(config, "speculative_config", None)
    method = str(getattr(speculative, "method", ""))
    if speculative is not None and "ngram" not in method and layout.draft_offset is None:
        name = f"draft model ({method})" if layout.draft is None else DRAFT_NAME
        entries.append(NotWatched(what="runner", name=name, reason=f"{WRITES_ALONE} ({method})"))
    elif layout.draft_offset is not None and (is_v1(runner) or not layout.draft_offset):
        reason = "this vLLM feeds its draft the request's last token there, which is taken for unknown"
        entries.append(NotWatched(what="other", name="the draft's last token of a part of a prompt", reason=reason))
    if layout.draft_offset is not None and steps_in_one_graph(runner):
        reason = "they run in one CUDA graph, and what goes into each of them is nowhere to be seen"
        entries.append(NotWatched(what="other", name="the draft's forwards behind its first one", reason=reason))
    drafts = [layout.draft] if layout.draft is not None and layout.draft_offset is not None else []
    for name, groups in ((Runner().name, layout.groups), (DRAFT_NAME, drafts)):
        if not all(layout.kv.compares(group.index) for group in groups):
            reason = "what layers hand to the cache is not read, or stored as other values"
            entries.append(NotWatched(what="submitted", name=name, reason=reason))
    unseen = [group.name for group in layout.groups if group.window and not group.window_at_call]
    if unseen:
        reason = "only what its layers are made with is known"
        name = f"the window that kernels are called with in group {', '.join(unseen)}"
        entries.append(NotWatched(what="other", name=name, reason=reason))
    for group, backend in attention.not_read:
        reason = f"the metadata of {backend} are not known"
        entries.append(NotWatched(what="other", name=f"what attention gets in group {group}", reason=reason))
    if getattr(getattr(config, "cache_config", None), "kv_sharing_fast_prefill", False):
        reason = "of prompts they are run for the tokens alone that are sampled from"
        entries.append(NotWatched(what="other", name="what attention gets in layers that share KV", reason=reason))
    if getattr(getattr(config, "model_config", None), "is_multimodal_model", False):
        reason = "the positions that are fed embeddings are judged by their placeholder tokens"
        entries.append(NotWatched(what="other", name="multimodal embeddings", reason=reason))
    return entries
