"""Faults of recurrent state, put into a real SGLang before it starts."""

from typing import Any


def restore_another_checkpoint() -> None:
    """Let a request that hits the prefix cache go on from the checkpoint that was hit before it."""
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

    finish, hit = MambaComponent.finalize_match_result_in_cache, []

    def wrong(self: Any, params: Any, result: Any) -> Any:
        found = finish(self, params, result)
        kv = getattr(params.req, "kv", None)
        if kv is not None and kv.mamba_cow_src_index is not None:
            hit.append(kv.mamba_cow_src_index)
            kv.mamba_cow_src_index = hit[-2] if len(hit) > 1 else hit[-1]
        return found

    MambaComponent.finalize_match_result_in_cache = wrong


def free_states_early() -> None:
    """Free the slot of a request once its prompt is computed, and give it to whoever comes next."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    alloc, last = HybridReqToTokenPool.alloc, []

    def wrong(self: Any, reqs: Any) -> Any:
        rows = alloc(self, reqs)
        for req in reqs:
            if last and not req.kv.holds_mamba:
                continue
            if last and last[-1] is not req and last[-1].kv.mamba_pool_idx is not None:
                req.kv.mamba_pool_idx = last[-1].kv.mamba_pool_idx.clone()
                self.req_index_to_mamba_index_mapping[req.kv.req_pool_idx] = req.kv.mamba_pool_idx
            last[:] = [req]
        return rows

    HybridReqToTokenPool.alloc = wrong


def save_checkpoints_late() -> None:
    """Copy what the prefix cache is to keep of a running request after its next forward."""
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
    from sglang.srt.model_executor.model_runner import ModelRunner

    prepare, forward, late = MambaComponent.prepare_for_caching_req, ModelRunner.forward, []

    def put_off(self: Any, *args: Any, **kwargs: Any) -> Any:
        pool = self.cache.req_to_token_pool.mamba_pool
        copy = pool.copy_from
        pool.copy_from = lambda *slots: late.append((copy, slots))
        try:
            return prepare(self, *args, **kwargs)
        finally:
            pool.copy_from = copy

    def then(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        for copy, slots in late:
            copy(*slots)
        late.clear()
        return result

    MambaComponent.prepare_for_caching_req, ModelRunner.forward = put_off, then


def overwrite_a_checkpoint() -> None:
    """Zero the first checkpoint that is hit, behind everybody's back, before it is copied."""
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    deferred, done = ModelRunner._maybe_execute_deferred_mamba_cow_and_clear, []

    def wrong(self: Any, batch: Any) -> None:
        found = batch.mamba_cow_src_indices
        if found is not None and len(found) and not done:
            pool: MambaPool = self.req_to_token_pool.mamba_pool
            pool.mamba_cache.conv[0][:, found] = 0
            done.append(True)
        deferred(self, batch)

    ModelRunner._maybe_execute_deferred_mamba_cow_and_clear = wrong
