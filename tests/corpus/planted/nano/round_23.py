"""A twenty-third round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("llm-d/llm-d-inference-sim#705", "nano-few", "prefix_not_computed", origin="llm-d-inference-sim")
def match_goes_on_behind_a_block_that_is_gone(fired: Fired) -> None:
    """All blocks of a request are given back at the same time, and the first of them may be the first that is taken for others. A later match does not end where one is gone: it counts to the last that is still
    there, and what is missing before that gets a new block, which nobody computes."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    holes: set[int] = set()  # the requests that have one

    def found(manager, seq) -> list[int]:
        """Return for each block but the last which one holds it, -1 if none does."""
        key, blocks = -1, []
        for i in range(seq.num_blocks - 1):
            key = manager.compute_hash(seq.block(i), key)
            block = manager.hash_to_block_id.get(key, -1)
            blocks.append(block if block != -1 and manager.blocks[block].token_ids == seq.block(i) else -1)
        return blocks

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        holes.discard(seq.seq_id)
        seq.block_table.reverse()  # the first goes first
        before(manager, seq)

    @replaces(BlockManager, "can_allocate")
    def can_allocate(before, manager, seq):
        blocks = found(manager, seq)
        used = sum(block in manager.used_block_ids for block in blocks)
        if len(manager.free_block_ids) < seq.num_blocks - used:
            return -1
        return max((i + 1 for i, block in enumerate(blocks) if block != -1), default=0)

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        blocks = found(manager, seq)[:count]
        if -1 not in blocks:
            before(manager, seq, count)
            return
        holes.add(seq.seq_id)
        for block in blocks:
            if block in manager.used_block_ids:
                manager.blocks[block].ref_count += 1
            elif block != -1:
                manager.blocks[block].ref_count = 1
                manager.free_block_ids.remove(block)
                manager.used_block_ids.add(block)
        table = [block if block != -1 else manager._allocate_block() for block in blocks]
        table += [manager._allocate_block() for _ in range(seq.num_blocks - count)]
        seq.block_table.extend(table)
        seq.num_cached_tokens = count * manager.block_size

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        if any(seq.seq_id in holes for seq in seqs):
            fired()
        return before(runner, seqs)
