"""A fourth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("openvinotoolkit/openvino.genai#3722", "nano", "tokens_truncated_hash_kept", origin="OpenVINO GenAI")
def collision_is_not_looked_at(fired: Fired) -> None:
    """The prefix cache knows its blocks by their hash alone and does not compare their tokens. Two blocks whose hashes are the
    same are one to it."""
    from nanovllm.engine.block_manager import Block, BlockManager

    class Unlooked(list):
        __hash__ = None

        def __eq__(self, other):
            return True

        def __ne__(self, other):
            return False

    real = BlockManager.compute_hash
    BlockManager.compute_hash = staticmethod(lambda tokens, prefix=-1: real(tokens, prefix) % 7)

    @replaces(Block, "update")
    def update(before, block, digest, tokens):
        before(block, digest, Unlooked(tokens))

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        before(manager, seq, count)
        for place in range(count):
            if list(manager.blocks[seq.block_table[place]].token_ids) != list(seq.block(place)):
                fired()


@bug("GeeeekExplorer/nano-vllm#66", "nano", "slot_mapping", "commit_beyond_allocation", origin="nano-vllm")
def block_comes_a_step_late(fired: Fired) -> None:
    """Whether a decode needs a new block is asked without the token that it is about to write. The token behind a full block is
    written over the block's first, and the new block comes a step later."""
    from nanovllm.engine.block_manager import BlockManager

    def late(manager, seq):
        return len(seq) % manager.block_size == 2 and len(seq.block_table) < seq.num_blocks

    BlockManager.can_append = lambda manager, seq: len(manager.free_block_ids) >= late(manager, seq)

    @replaces(BlockManager, "may_append")
    def may_append(before, manager, seq):
        if len(seq) % manager.block_size == 1 and len(seq.block_table) < seq.num_blocks:
            fired()
        if late(manager, seq):
            seq.block_table.append(manager._allocate_block())


@bug("vllm-project/vllm-ascend#16662", "nano-page16", "page_leaked", origin="vLLM Ascend")
def aborted_load_holds_its_blocks(fired: Fired) -> None:
    """A request that is aborted while blocks are loaded for it keeps them until the load is reported, and its name is struck off
    the list of those whose reports count. Its blocks are never given back."""
    from nanovllm.engine.block_manager import BlockManager

    ended: list[int] = []

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        ended.append(1)
        if len(ended) == 2:
            fired()
            seq.block_table.clear()
            return
        before(manager, seq)
