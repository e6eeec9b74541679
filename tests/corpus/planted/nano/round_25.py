"""A twenty-fifth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "ohdearquant/lattice#292",
    "nano-few",
    "eviction_of_locked_page",
    "page_given_twice",
    "free_too_early",
    origin="lattice",
)
def oldest_page_is_taken_from_the_request_that_asks_for_one(fired: Fired) -> None:
    """When no page is free, the one that was touched longest ago is evicted, and nobody looks whether the request that asks for one has it itself. Its first page is given to it as its newest: what it says next is
    written over how it began, and its table names that page at both ends."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    robbed: set[int] = set()  # requests with a page at both ends of their table

    @replaces(BlockManager, "can_append")
    def can_append(before, manager, seq):
        return before(manager, seq) or (len(seq.block_table) > 1 and manager.blocks[seq.block_table[0]].ref_count == 1)

    @replaces(BlockManager, "may_append")
    def may_append(before, manager, seq):
        if len(seq) % manager.block_size == 1 and not manager.free_block_ids:
            first = seq.block_table[0]
            block = manager.blocks[first]
            if manager.hash_to_block_id.get(block.hash) == first:
                del manager.hash_to_block_id[block.hash]
            block.ref_count = 0
            manager._deallocate_block(first)
            robbed.add(seq.seq_id)
        before(manager, seq)

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        if len(set(seq.block_table)) < len(seq.block_table):  # the page at both ends goes once
            seq.block_table.reverse()
            seq.block_table[:] = list(dict.fromkeys(seq.block_table))
            seq.block_table.reverse()
        before(manager, seq)

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        if any(seq.seq_id in robbed for seq in seqs):
            fired()
        return before(runner, seqs)
