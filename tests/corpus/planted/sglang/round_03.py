"""A third round of public bugs made anew in SGLang 0.5.23 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "sgl-project/sglang-omni#1743",
    "llama-page4",
    "row_reassigned_in_flight",
    "req_to_token",
    origin="sglang-omni",
)
def rows_not_compacted(fired: Fired) -> None:
    """A request is taken out of the batch's list, and the tensors that go with the list keep its row. Those behind it are
    computed on the row of the one before them."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    done: list[int] = []

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        if batch.forward_mode.is_decode() and batch.batch_size > 2 and len(done) < 3 and int(batch.seq_lens[0]) > 12:
            done.append(1)
            kept = batch.req_pool_indices
            batch.req_pool_indices = kept.roll(1)
            fired()
            try:
                return before(runner, batch, *args, **kwargs)
            finally:
                batch.req_pool_indices = kept
        return before(runner, batch, *args, **kwargs)


@bug("lightseekorg/tokenspeed#969", "recurrent", "state_restored_for_other_prefix", origin="tokenspeed")
def padding_moves_a_state(fired: Fired) -> None:
    """A prefill is padded to the size of its graph, and the kernel of the recurrent layers takes padding rows for tokens. It
    moves on the state of a request that has none in this step."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    hurt: list[int] = []

    @replaces(ModelRunner, "forward")
    def forward(before, runner, batch, *args, **kwargs):
        pool = runner.req_to_token_pool
        rows = batch.req_pool_indices.tolist()
        if hurt and hurt[0] in rows:
            fired()
        done = before(runner, batch, *args, **kwargs)
        if batch.forward_mode.is_decode() and len(rows) > 1 and not hurt:
            hurt.append(-rows[0])
        if hurt and hurt[0] < 0 and batch.forward_mode.is_extend() and -hurt[0] not in rows:
            hurt[0] = -hurt[0]
            slot = pool.req_index_to_mamba_index_mapping[hurt[0]]
            pool.mamba_pool.mamba_cache.conv[0][:, slot] *= 1.5
        return done
