"""A twelfth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("GeeeekExplorer/nano-vllm#213", "nano-chunks", "attention_seq_len_wrong", origin="nano-vllm")
def chunk_reads_to_the_prompts_end(fired: Fired) -> None:
    """The length that attention gets for a chunk is that of the whole prompt, whichever part of it has been computed. A chunk that is not
    the last reads slots behind its end, which nobody has written for the request."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        made, context = before(runner, seqs), get_context()
        if all(seq.num_cached_tokens + seq.num_scheduled_tokens == len(seq) for seq in seqs):
            return made
        fired()
        lens = context.cu_seqlens_k.new_tensor([0, *(len(seq) for seq in seqs)])
        context.cu_seqlens_k = lens.cumsum(0).to(lens.dtype)
        context.max_seqlen_k = max(len(seq) for seq in seqs)
        context.block_tables = runner.prepare_block_tables(seqs)
        return made


@bug("pegainfer-project/pegainfer#291", "nano", "attention_seq_len_wrong", origin="pegainfer")
def pages_counted_with_the_next_one(fired: Fired) -> None:
    """A request gets its next block as soon as a token fills the last one, and attention works out its length from the blocks and from how
    full the last is. At each block's end it looks at a whole block behind the request's tokens."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    @replaces(BlockManager, "may_append")
    def may_append(before, manager, seq):
        if len(seq.block_table) < seq.num_blocks:
            before(manager, seq)
        if len(seq) % manager.block_size == 0 and manager.free_block_ids:
            seq.block_table.append(manager._allocate_block())

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        made, context, size = before(runner, seqs), get_context(), runner.block_size
        for row, seq in enumerate(seqs):
            if len(seq.block_table) > seq.num_blocks:
                fired()
                context.slot_mapping[row] = seq.block_table[-2] * size + seq.last_block_num_tokens - 1
                context.context_lens[row] = (len(seq.block_table) - 1) * size + seq.last_block_num_tokens
        return made


@bug("google/gemma.cpp#665", "nano", "position_off", "slot_mapping", origin="gemma.cpp")
def decode_begins_at_the_prompts_last_place(fired: Fired) -> None:
    """The count of what is in the cache is taken for the place to go on from, one too early. The first token that is sampled gets the place
    and the position of the prompt's last, writes over it, and all that follow are one behind."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        ids, positions = before(runner, seqs)
        context, size = get_context(), runner.block_size
        for row, seq in enumerate(seqs):
            fired()
            place = len(seq) - 2
            positions[row] = place
            context.slot_mapping[row] = seq.block_table[place // size] * size + place % size
            context.context_lens[row] = place + 1
        return ids, positions


@bug("lablup/mlxcel#1752", "nano-turns", "hit_before_written", "prefix_not_computed", origin="mlxcel")
def answers_last_token_is_cached(fired: Fired) -> None:
    """A request that ends gives the prefix cache all of its tokens, and the last one that was sampled has never been through the model. A
    prompt that goes on behind the answer hits a block whose last slot holds nothing of it."""
    from nanovllm.engine.block_manager import BlockManager

    given: set[int] = set()

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        if seq.is_finished and len(seq) % manager.block_size == 0 and len(seq.block_table) > 1:
            last, chain = manager.blocks[seq.block_table[-1]], manager.blocks[seq.block_table[-2]].hash
            tokens = seq.block(seq.num_blocks - 1)
            last.update(manager.compute_hash(tokens, chain), tokens)
            manager.hash_to_block_id[last.hash] = last.block_id
            given.add(last.block_id)
        before(manager, seq)

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        before(manager, seq, count)
        if given & set(seq.block_table[:count]):
            fired()
        given.difference_update(seq.block_table[count:])
