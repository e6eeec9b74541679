"""An eighteenth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("GeeeekExplorer/nano-vllm#243", "nano-again", "page_given_twice", "eviction_of_locked_page", "free_too_early")
def merged_into_a_block_that_is_free(fired: Fired) -> None:
    """A block that has been filled is merged into one that has the same tokens, which is looked up by its hash alone. It was given back long ago and is in the queue of free
    blocks still: the next one that asks is given a block that is in use."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.scheduler import Scheduler

    merged: dict[int, int] = {}  # of a block, the request that reads it
    again: set[int] = set()

    @replaces(BlockManager, "hash_blocks")
    def hash_blocks(before, manager, seq):
        start = seq.num_cached_tokens // manager.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // manager.block_size
        there = dict(manager.hash_to_block_id)
        before(manager, seq)
        for i in range(start, end):
            own = seq.block_table[i]
            known = manager.blocks[there.get(manager.blocks[own].hash, own)]
            if known.block_id != own and known.token_ids == manager.blocks[own].token_ids:
                if known.block_id not in manager.used_block_ids:
                    merged[known.block_id] = seq.seq_id
                manager.hash_to_block_id[known.hash] = known.block_id
                known.ref_count += 1
                manager.used_block_ids.add(known.block_id)
                seq.block_table[i] = known.block_id
                manager.blocks[own].hash, manager.blocks[own].ref_count = -1, 0
                manager._deallocate_block(own)

    @replaces(BlockManager, "_allocate_block")
    def _allocate_block(before, manager):
        block = manager.blocks[manager.free_block_ids[0]]
        if block.ref_count:
            again.add(block.block_id)
            block.ref_count = 0
        return before(manager)

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        seqs, prefills = before(scheduler)
        names = {seq.seq_id for seq in seqs}
        if any(merged.get(block) in names for block in again):
            fired()
        return seqs, prefills


@bug(
    "GeeeekExplorer/nano-vllm#144",
    "nano-again",
    "tokens_truncated_hash_kept",
    "stale_prefix_hit",
)
def hash_of_the_last_block_is_taken_away(fired: Fired) -> None:
    """A prompt that ends with a block must not hit all of its blocks, and so its last block is left without a hash. The next block is hashed as if nothing came before it, and is
    hit by a prompt that begins with its tokens."""
    from nanovllm.engine.block_manager import BlockManager

    cut: set[int] = set()

    @replaces(BlockManager, "hash_blocks")
    def hash_blocks(before, manager, seq):
        start = seq.num_cached_tokens // manager.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // manager.block_size
        if 0 < start < end and manager.blocks[seq.block_table[start - 1]].hash == -1:
            cut.add(seq.block_table[start])
        before(manager, seq)
        last = seq.num_prompt_tokens // manager.block_size - 1
        if seq.num_prompt_tokens % manager.block_size == 0 and start <= last < end:
            block = manager.blocks[seq.block_table[last]]
            manager.hash_to_block_id.pop(block.hash, None)
            block.hash = -1

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, hits):
        before(manager, seq, hits)
        if hits and seq.block_table[0] in cut:
            fired()
