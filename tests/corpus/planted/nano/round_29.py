"""A twenty-ninth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


# Under which key a block was found is not recorded.
@bug("GeeeekExplorer/nano-vllm#163", "nano-page4-same", "stale_prefix_hit", "tokens_truncated_hash_kept")
def key_of_a_block_outlives_what_lay_in_it(fired: Fired) -> None:
    """A block that is given out again keeps its place in the table of keys, under the key of what lay in it before. It is found there by a prompt of which it had been a part, and has the same tokens by then, but
    behind another beginning."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    wrong: set[int] = set()  # requests

    @replaces(BlockManager, "_allocate_block")
    def _allocate_block(before, manager):
        kept = dict(manager.hash_to_block_id)
        block_id = before(manager)
        manager.hash_to_block_id.clear()
        manager.hash_to_block_id.update(kept)
        return block_id

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, num_cached_blocks):
        h = -1
        for i in range(num_cached_blocks):
            h = manager.compute_hash(seq.block(i), h)
            if manager.blocks[manager.hash_to_block_id[h]].hash != h:
                wrong.add(seq.seq_id)
        before(manager, seq, num_cached_blocks)

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        if any(seq.seq_id in wrong for seq in seqs):
            fired()
        return before(runner, seqs)


@bug(
    "Wenyueh/MinivLLM#84",
    "nano-page6-shared",
    "free_too_early",
    "page_given_twice",
    "page_leaked",
    origin="MinivLLM",
)
def who_takes_a_block_does_not_count_as_its_user(fired: Fired) -> None:
    """A block that is given out has no users on its books, and those that hit it later are counted. When the first one leaves, a block that it shares with another is given back, though the other still reads it, and
    a block that it has for itself has a user less than none and never comes back."""
    from nanovllm.engine.block_manager import Block, BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    tables: list = []  # of all that run
    robbed: set[int] = set()  # blocks

    @replaces(Block, "reset")
    def reset(before, block):
        before(block)
        block.ref_count = 0

    @replaces(BlockManager, "_allocate_block")
    def _allocate_block(before, manager):
        block_id = before(manager)
        if any(block_id in table for table in tables):
            robbed.add(block_id)
        return block_id

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, num_cached_blocks):
        before(manager, seq, num_cached_blocks)
        if not any(table is seq.block_table for table in tables):
            tables.append(seq.block_table)

    def look(before, runner, seqs):
        if any(robbed & set(seq.block_table) for seq in seqs):
            fired()
        return before(runner, seqs)

    replaces(ModelRunner, "prepare_prefill")(look)
    replaces(ModelRunner, "prepare_decode")(look)
