"""A second round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("FlashML-org/FreeToken#287", "recurrent", "state_restored_for_other_prefix", origin="FreeToken")
def checkpoint_written_after_it_was_given(fired: Fired) -> None:
    """A request gives its slot of recurrent state to the prefix cache and keeps a name for it. A late write through that name
    changes the checkpoint, and the next hit goes on from it."""
    from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent
    from sglang.srt.model_executor.model_runner import ModelRunner

    kept: list = []

    @replaces(MambaComponent, "prepare_for_caching_req")
    def prepare_for_caching_req(before, component, *args, **kwargs):
        pool = component.cache.req_to_token_pool.mamba_pool
        copy = pool.copy_from

        def noting(source, destination):
            copy(source, destination)
            kept.append((pool, source.clone(), destination.clone()))

        pool.copy_from = noting
        try:
            return before(component, *args, **kwargs)
        finally:
            pool.copy_from = copy

    @replaces(MambaComponent, "finalize_match_result_in_cache")
    def finalize_match_result_in_cache(before, component, params, result):
        found = before(component, params, result)
        kv = getattr(params.req, "kv", None)
        if kv is not None and kv.mamba_cow_src_index is not None:
            fired()
        return found

    @replaces(ModelRunner, "forward")
    def forward(before, runner, *args, **kwargs):
        done = before(runner, *args, **kwargs)
        for pool, source, destination in kept:
            pool.copy_from(source, destination)
        kept.clear()
        return done


@bug("mlx-node/mlx-node#33", "llama-page4", "position_off", origin="mlx-node")
def chunk_offset_counted_twice(fired: Fired) -> None:
    """The offset of a later chunk is added to a cache index that has moved on by it already. The chunk's tokens are rotated
    for positions that are one chunk further on."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_extend() and batch.extend_prefix_lens is not None:
            at = 0
            for prefix, count in zip(batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist(), strict=True):
                if prefix and count > 2:
                    fired()
                    batch.positions[at : at + count] += prefix
                at += count
        return before(runner, batch, *args, **kwargs)


@bug(
    "mudler/vllm.cpp#2672",
    "llama-page16",
    "kv_write_lost",
    "kv_write_damaged",
    origin="vllm.cpp",
    late="the first slots held zeros, which nothing is judged by",
)
def short_chunk_keeps_its_last_row(fired: Fired) -> None:
    """The tokens of a chunk that is shorter than a page are written to it as if each were a request of its own. Each write
    reads the page, changes its row and puts it back, so that the last one alone is kept."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    short: list[int] = []
    hurt: set[int] = set()

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        for row, end in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            if hurt & set(runner.req_to_token_pool.req_to_token[row, : end - 1].tolist()):
                fired()
        extends = batch.forward_mode.is_extend() and batch.extend_seq_lens is not None
        one = extends and len(batch.extend_seq_lens) == 1 and 2 < int(batch.extend_seq_lens[0]) < 16
        short[:] = [1] if one else []
        if one:
            hurt.update(batch.out_cache_loc[:-1].tolist())
        return before(runner, batch, *args, **kwargs)

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, info, cache_k, cache_v, *args, **kwargs):
        loc = getattr(info, "loc", info)
        if not short or not hasattr(loc, "numel"):
            return before(pool, layer, info, cache_k, cache_v, *args, **kwargs)
        buffers = pool.k_buffer[layer.layer_id - pool.start_layer], pool.v_buffer[layer.layer_id - pool.start_layer]
        kept = [buffer[loc[:-1]].clone() for buffer in buffers]
        done = before(pool, layer, info, cache_k, cache_v, *args, **kwargs)
        for buffer, rows in zip(buffers, kept, strict=True):
            buffer[loc[:-1]] = rows
        return done
