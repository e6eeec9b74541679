"""A twenty-first round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("inference-sim/inference-sim#196", "nano-chunks", "tokens_truncated_hash_kept", origin="inference-sim")
def block_of_a_later_chunk_has_the_key_of_the_prompts_front(fired: Fired) -> None:
    """What a block holds is counted from where its chunk begins, and the tokens for its key are taken from the prompt's front by that count. The first block that a later
    chunk fills is found under the key of the prompt's first, and whoever begins with these tokens hits it."""
    from nanovllm.engine.block_manager import BlockManager

    holds: dict[int, list[int]] = {}  # by block: all tokens up to its end

    @replaces(BlockManager, "hash_blocks")
    def hash_blocks(before, manager, seq):
        size, at = manager.block_size, seq.num_cached_tokens
        first, end = at // size, (at + seq.num_scheduled_tokens) // size
        holds.update({seq.block_table[i]: seq.token_ids[: (i + 1) * size] for i in range(first, end)})
        if not seq.is_prefill or not at:
            before(manager, seq)
            return
        key = -1
        for place in range(end - first):
            block = manager.blocks[seq.block_table[first + place]]
            key = manager.compute_hash(seq.block(place), key)
            block.update(key, seq.block(place))
            manager.hash_to_block_id[key] = block.block_id

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        before(manager, seq, count)
        size = manager.block_size
        if any(holds[seq.block_table[i]] != seq.token_ids[: (i + 1) * size] for i in range(count)):
            fired()


@bug(
    "gittensor-ai-lab/sparkinfer#110",
    "nano",
    "attention_table_overwritten",
    "req_to_token",
    origin="sparkinfer",
)
def growing_request_takes_all_its_blocks_again(fired: Fired) -> None:
    """A request that needs one more block is given as many as all of its tokens need, on top of those that it has, and only these are held against the width of a row. Its list is
    copied to the device whole, over the end of its row and over the front of the next one's."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    slots: dict[int, int] = {}
    width, rows = 6, 8
    device = [0] * (width * rows)

    def copy(seq):
        first = slots[seq.seq_id] * width
        table = seq.block_table[: len(device) - first]
        device[first : first + len(table)] = table

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        before(manager, seq, count)
        slots[seq.seq_id] = min(set(range(rows)) - set(slots.values()))
        copy(seq)

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        slots.pop(seq.seq_id, None)
        before(manager, seq)

    @replaces(BlockManager, "may_append")
    def may_append(before, manager, seq):
        if len(seq) % manager.block_size != 1:
            return
        need = seq.num_blocks
        if need > len(manager.free_block_ids) - 4:
            need = max(0, need - len(seq.block_table))
        seq.block_table.extend(manager._allocate_block() for _ in range(need))
        copy(seq)

    def through_the_device(before, runner, seqs):
        kept = [seq.block_table for seq in seqs]
        for seq in seqs:
            first = slots[seq.seq_id] * width
            table = device[first : first + seq.num_blocks]
            if table != seq.block_table[: seq.num_blocks]:
                fired()
            seq.block_table = table
        try:
            return before(runner, seqs)
        finally:
            for seq, table in zip(seqs, kept, strict=True):
                seq.block_table = table

    replaces(ModelRunner, "prepare_prefill")(through_the_device)
    replaces(ModelRunner, "prepare_decode")(through_the_device)
