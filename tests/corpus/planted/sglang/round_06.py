"""A sixth round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("ggml-org/llama.cpp#14130", "llama", "slot_mapping", origin="llama.cpp")
def slots_of_the_order_before(fired: Fired) -> None:
    """The tokens of a batch are put in another order when it is split into equal parts, and their cells are taken in the old one.
    The tokens of two requests go to one another's cells."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_decode() and batch.batch_size > 1:
            fired()
            batch.out_cache_loc[:2] = batch.out_cache_loc[:2].flip(0)
        return before(runner, batch, *args, **kwargs)


@bug(
    "1bit-MONSTER/1bit-MONSTER#686",
    "llama-small",
    "kv_write_lost",
    "kv_write_damaged",
    origin="1bit-MONSTER",
    late="the first slots held zeros, which nothing is judged by",
)
def only_the_first_token_is_written(fired: Fired) -> None:
    """The kernel that writes K and V leaves its count of tokens out of account. Of a prefill the first token is written, and the
    slots of the others keep what stood in them."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.model_runner import ModelRunner

    written: set[int] = set()

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        rows, ends = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        for row, end in zip(rows, ends, strict=True):
            if batch.forward_mode.is_decode() and written & set(
                runner.req_to_token_pool.req_to_token[row, :end].tolist()
            ):
                fired()
        return before(runner, batch, *args, **kwargs)

    @replaces(MHATokenToKVPool, "set_kv_buffer")
    def set_kv_buffer(before, pool, layer, info, cache_k, cache_v, *args, **kwargs):
        loc = getattr(info, "loc", info)
        at = layer.layer_id - pool.start_layer
        kept = [buffer[at][loc[1:]].clone() for buffer in (pool.k_buffer, pool.v_buffer)]
        done = before(pool, layer, info, cache_k, cache_v, *args, **kwargs)
        if loc.numel() > 4:
            written.update(loc[1:].tolist())
            for buffer, old in zip((pool.k_buffer, pool.v_buffer), kept, strict=True):
                buffer[at][loc[1:]] = old
        return done
