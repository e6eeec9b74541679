"""A twenty-seventh round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("Wenyueh/MinivLLM#87", "nano-page4", "slot_mapping", origin="MinivLLM")
def last_block_that_is_full_counts_as_empty(fired: Fired) -> None:
    """How many tokens the last block has is what is left when the length is divided by a block's, which is nought where it is full. The token that fills a block is stored one slot in front of that block: in
    the last slot of the block that lies there, whoever has it, and its own slot keeps what was there."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.sequence import Sequence

    Sequence.last_block_num_tokens = property(lambda seq: seq.num_tokens % seq.block_size)

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        if any(len(seq) % seq.block_size == 0 for seq in seqs):
            fired()
        return before(runner, seqs)


@bug("GeeeekExplorer/nano-vllm#212", "nano-chunks13", "attention_seq_len_wrong")
def chunk_reads_as_far_as_the_whole_prompt(fired: Fired) -> None:
    """A prompt is computed in chunks, and attention is told the length of the whole prompt for each of them. All chunks but the last read slots that no token of theirs has been stored in yet."""
    import torch
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context, set_context

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        made = before(runner, seqs)
        if any(seq.num_cached_tokens + seq.num_scheduled_tokens < len(seq) for seq in seqs):
            fired()
            context, lens = get_context(), torch.tensor([0, *(len(seq) for seq in seqs)], dtype=torch.int32)
            ends = lens.cumsum(0, dtype=torch.int32)
            tables = runner.prepare_block_tables(seqs)
            set_context(
                True,
                context.cu_seqlens_q,
                ends,
                context.max_seqlen_q,
                int(lens.max()),
                context.slot_mapping,
                None,
                tables,
            )
        return made
