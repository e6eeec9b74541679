"""A twenty-second round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("ggml-org/llama.cpp#23400", "nano-again", "position_off", "slot_mapping", origin="llama.cpp")
def last_token_of_a_saved_prompt_is_put_behind_itself(fired: Fired) -> None:
    """A saved prompt has K and V of all of its tokens, and the last one must go through the model again for its prediction. Where it belongs is taken from how many are there: it gets the place behind itself, and
    all that is said after it is one further on."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.utils.context import get_context

    put_behind: set[int] = set()  # the requests whose last token is there twice

    @replaces(BlockManager, "can_allocate")
    def can_allocate(before, manager, seq):
        count, key = before(manager, seq), -1
        if count * manager.block_size != len(seq) - manager.block_size or seq.num_completion_tokens:
            return count
        for i in range(seq.num_blocks):
            key = manager.compute_hash(seq.block(i), key)
        block = manager.blocks[manager.hash_to_block_id.get(key, 0)]
        whole = block.token_ids == seq.block(count) and len(manager.free_block_ids) > seq.num_blocks
        return count + whole

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        before(manager, seq, count)
        if count == seq.num_blocks:
            seq.block_table.append(manager._allocate_block())
            put_behind.add(seq.seq_id)

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        before(manager, seq)
        put_behind.discard(seq.seq_id)

    @replaces(BlockManager, "can_append")
    def can_append(before, manager, seq):
        if seq.seq_id not in put_behind:
            return before(manager, seq)
        return len(manager.free_block_ids) >= (len(seq) % manager.block_size == 0)

    @replaces(BlockManager, "may_append")
    def may_append(before, manager, seq):
        if seq.seq_id not in put_behind:
            before(manager, seq)
        elif len(seq) % manager.block_size == 0:
            seq.block_table.append(manager._allocate_block())

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        seqs, is_prefill = before(scheduler)
        for seq in seqs:
            if not seq.num_scheduled_tokens:  # all of it is there
                seq.num_cached_tokens, seq.num_scheduled_tokens = len(seq) - 1, 1
        return seqs, is_prefill

    def prepare(before, runner, seqs):
        input_ids, positions = before(runner, seqs)
        context, at = get_context(), 0
        for row, seq in enumerate(seqs):
            at += seq.num_scheduled_tokens
            if seq.seq_id in put_behind:
                fired()
                place = len(seq)
                positions[at - 1] = place
                size = runner.block_size
                context.slot_mapping[at - 1] = seq.block_table[place // size] * size + place % size
                if context.is_prefill:
                    context.cu_seqlens_k[row + 1 :] += 1
                else:
                    context.context_lens[row] += 1
        return input_ids, positions

    replaces(ModelRunner, "prepare_prefill")(prepare)
    replaces(ModelRunner, "prepare_decode")(prepare)
