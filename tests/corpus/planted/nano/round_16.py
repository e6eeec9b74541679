"""A sixteenth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "ooples/AiDotNet.Tensors#801",
    "nano-few",
    "free_too_early",
    "double_free",
    "page_given_twice",
    origin="AiDotNet",
)
def prefix_is_shared_without_a_count(fired: Fired) -> None:
    """A request takes over another one's first blocks, and nothing counts that there are two. The first that ends gives them back under the second, and the second
    gives them back once more: two later requests own them."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    owner: dict[int, int] = {}  # of a block, who was given it last

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        before(manager, seq, count)
        for block in seq.block_table[:count]:
            manager.blocks[block].ref_count = 1
        owner.update(dict.fromkeys(seq.block_table[count:], seq.seq_id))

    @replaces(BlockManager, "may_append")
    def may_append(before, manager, seq):
        count = len(seq.block_table)
        before(manager, seq)
        owner.update(dict.fromkeys(seq.block_table[count:], seq.seq_id))

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        for block in reversed(seq.block_table):
            manager.blocks[block].ref_count = 0
            manager.used_block_ids.discard(block)
            manager.free_block_ids.append(block)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    @replaces(BlockManager, "_allocate_block")
    def _allocate_block(before, manager):
        manager.blocks[manager.free_block_ids[0]].ref_count = 0
        return before(manager)

    held: dict[int, dict[int, int]] = {}  # of a request, who its blocks belonged to when it got them

    @replaces(ModelRunner, "run")
    def run(before, runner, seqs, is_prefill):
        for seq in seqs:
            known = held.setdefault(seq.seq_id, {})
            for block in seq.block_table:
                if known.setdefault(block, owner.get(block, -1)) != owner.get(block, -1):
                    fired()
        return before(runner, seqs, is_prefill)


@bug("lablup/mlxcel#76", "nano-page16", "attention_seq_len_wrong", origin="mlxcel")
def mask_begins_at_the_offset_less_the_padding(fired: Fired) -> None:
    """The mask of a batch is made from the caches' offsets, which begin below nought for those that are padded, and not from how many tokens are there. Rows that are
    shorter than the longest do not see as many of their last tokens as they have padding."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        made = before(runner, seqs)
        lengths = get_context().context_lens
        seen = (lengths - (lengths.max() - lengths)).clamp(min=1)
        if bool((seen != lengths).any()):
            fired()
            lengths.copy_(seen)
        return made
