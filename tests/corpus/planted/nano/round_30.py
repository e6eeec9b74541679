"""A thirtieth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("NVIDIA/Megatron-LM#4158", "nano-page7-alike", "tokens_truncated_hash_kept", origin="Megatron-LM")
def key_of_a_block_is_a_sum_that_others_have_too(fired: Fired) -> None:
    """A block's key is a sum of its tokens, each times a power of 31 by its place, and a hit goes by the key alone. A token that is 31 more and one less behind it give the same sum: a prompt hits the blocks of another
    that differs from it in these two."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    wrong: set[int] = set()  # requests

    def compute_hash(cls, token_ids, prefix=-1):
        return ((prefix + 1) * 31 ** len(token_ids) + sum(t * 31**i for i, t in enumerate(token_ids))) % (2**61 - 1)

    BlockManager.compute_hash = classmethod(compute_hash)

    @replaces(BlockManager, "can_allocate")
    def can_allocate(before, manager, seq):
        h, cached, new = -1, 0, seq.num_blocks
        for i in range(seq.num_blocks - 1):
            h = manager.compute_hash(seq.block(i), h)
            block_id = manager.hash_to_block_id.get(h, -1)
            if block_id == -1:
                break
            cached += 1
            new -= block_id in manager.used_block_ids
        return cached if len(manager.free_block_ids) >= new else -1

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, num_cached_blocks):
        before(manager, seq, num_cached_blocks)
        hit = enumerate(seq.block_table[:num_cached_blocks])
        if any(manager.blocks[block_id].token_ids != seq.block(i) for i, block_id in hit):
            wrong.add(seq.seq_id)

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        if any(seq.seq_id in wrong for seq in seqs):
            fired()
        return before(runner, seqs)
