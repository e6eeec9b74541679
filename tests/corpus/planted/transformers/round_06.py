"""A sixth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "sgl-project/sglang#36738",
    "offload-qwen",
    "kv_changed",
    "copy_failed",
    "failed_load_counted_loaded",
    origin="SGLang",
)
def late_write_into_a_restored_block(fired: Fired) -> None:
    """Blocks of a request that has left are loaded with another's K and V on a stream of their own, while the last forward of the
    first is still writing them. Its rows land on what was restored."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager

    late: list = []

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        views = {kind: a._copy_view for kind, a in manager.cache.cache_allocators.items()}
        stood = {kind: view.clone() for kind, view in views.items()}
        due = any(future.state.is_cpu_offloaded for future in batch)
        before(manager, batch)
        for kind, view in views.items():
            changed = (view != stood[kind]).any(dim=1).nonzero().flatten().tolist()
            if due and changed:
                late.append((view, changed[0], stood[kind][changed[0]]))

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        for view, block, old in late:
            fired()
            view[block] = old
        late.clear()
        before(processor, model)


@bug("ggml-org/llama.cpp#27941", "forks", "copy_failed", origin="llama.cpp")
def copied_without_its_keys(fired: Fired) -> None:
    """A sequence is copied for a second answer to the same prompt, and its keys are left out of the copy. The new sequence reads
    the keys that stood in its cells before."""
    from transformers.generation.continuous_batching import cache, continuous_api

    @replaces(cache.PagedAttentionCache, "perform_cache_copy")
    def perform_cache_copy(before, paged, copies):
        keys = [views[0] for a in paged.cache_allocators.values() for views in a._kv_token_views.values()]
        kept = [view.clone() for view in keys]
        before(paged, copies)
        for view, old in zip(keys, kept, strict=True):
            view.copy_(old)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any("__child" in future.state.request_id for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)
