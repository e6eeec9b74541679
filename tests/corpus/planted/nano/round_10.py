"""A tenth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("ROCm/ATOM#702", "nano", "attention_table_overwritten", origin="ATOM")
def block_numbers_cut_to_their_low_bits(fired: Fired) -> None:
    """The attention kernel keeps the low bits alone of the block numbers that it loads from the table. Where a number is higher than
    these can say, it reads another block."""
    from nanovllm.engine.model_runner import ModelRunner

    @replaces(ModelRunner, "prepare_block_tables")
    def prepare_block_tables(before, runner, seqs):
        rows = before(runner, seqs)
        if bool((rows > 15).any()):
            fired()
        return rows.where(rows < 0, rows % 16)


# A position is computed twice, harmlessly, long before a token goes astray.
@bug("GeeeekExplorer/nano-vllm#217", "nano-few", "slot_mapping", "seq_len_backwards", origin="nano-vllm")
def asks_for_a_block_that_it_has(fired: Fired) -> None:
    """A request that was put back and computed anew is not given the token that was sampled then. If the last of its blocks holds one
    token, its next decode asks for the block that it has, and writes its tokens a block further on than it reads them."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.scheduler import Scheduler

    @replaces(Scheduler, "postprocess")
    def postprocess(before, scheduler, seqs, token_ids, is_prefill):
        others = []
        for seq, token in zip(seqs, token_ids, strict=True):
            whole = seq.num_cached_tokens + seq.num_scheduled_tokens >= seq.num_tokens
            if is_prefill and whole and seq.num_completion_tokens:
                scheduler.block_manager.hash_blocks(seq)
                seq.num_cached_tokens, seq.num_scheduled_tokens = seq.num_tokens - 1, 0
            else:
                others.append((seq, token))
        before(scheduler, [seq for seq, _ in others], [token for _, token in others], is_prefill)

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        if any(len(seq.block_table) > seq.num_blocks and seq.last_block_num_tokens > 1 for seq in seqs):
            fired()
        return before(runner, seqs)
