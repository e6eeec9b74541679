"""A twenty-eighth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("PaddlePaddle/FastDeploy#3080", "nano-page5-few", "prefix_not_computed", "kv_write_lost", origin="FastDeploy")
def what_was_said_before_is_not_computed_again(fired: Fired) -> None:
    """A request that had to give way comes back, and its prompt is computed again, but not what it had answered until then. It counts as computed: the next token is fed behind it, and
    attends to slots in which nothing of it has been stored."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.scheduler import Scheduler

    back: set[int] = set()  # whose prompt is computed in this step
    holes: dict[int, int] = {}  # and up to where each has been computed

    @replaces(Scheduler, "preempt")
    def preempt(before, scheduler, seq):
        holes.pop(seq.seq_id, None)
        before(scheduler, seq)

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        seqs, is_prefill = before(scheduler)
        back.clear()
        for seq in seqs if is_prefill else ():
            prompt = seq.num_prompt_tokens - seq.num_cached_tokens
            if seq.num_completion_tokens and 0 < prompt < seq.num_scheduled_tokens:
                seq.num_scheduled_tokens = prompt
                back.add(seq.seq_id)
                holes[seq.seq_id] = seq.num_prompt_tokens
        return seqs, is_prefill

    @replaces(Scheduler, "postprocess")
    def postprocess(before, scheduler, seqs, token_ids, is_prefill):
        before(scheduler, seqs, token_ids, is_prefill)
        for seq in seqs:
            if seq.seq_id in back:
                seq.num_cached_tokens = len(seq) - 1

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        if any(holes.get(seq.seq_id, len(seq)) < len(seq) - 1 for seq in seqs):
            fired()
        return before(runner, seqs)


@bug("GeeeekExplorer/nano-vllm#240", "nano-page6", "slot_mapping", "commit_beyond_allocation")
def block_is_appended_when_the_last_one_is_full(fired: Fired) -> None:
    """A block is appended when the request's length is a multiple of a block's, and not when it is one more: the token that is fed has been counted by then. The one that fills a block goes to the new
    block, and behind a prompt that ends with a block the next one goes over the block's first."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    BlockManager.can_append = lambda manager, seq: len(manager.free_block_ids) >= (len(seq) % manager.block_size == 0)

    @replaces(BlockManager, "may_append")
    def may_append(before, manager, seq):
        if len(seq) % manager.block_size == 0:
            seq.block_table.append(manager._allocate_block())

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        if any(len(seq.block_table) != seq.num_blocks for seq in seqs):
            fired()
        return before(runner, seqs)


@bug(
    "NVIDIA/Megatron-LM#5822",
    "nano-page4-few",
    "eviction_of_locked_page",
    "page_given_twice",
    "stale_prefix_hit",
    origin="Megatron-LM",
)
def what_is_hit_is_held_after_the_rest_is_allocated(fired: Fired) -> None:
    """The blocks that a prompt hits get their user when its other blocks have been allocated. Until then nobody uses them, and those that have lain there longest are the first to be given out:
    a block is the request's prefix and its newest block, too, and the prefix is written over."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    robbed: set[int] = set()

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, num_cached_blocks):
        h, hit = -1, []
        for i in range(num_cached_blocks):
            h = manager.compute_hash(seq.block(i), h)
            hit.append(manager.hash_to_block_id[h])
        rest = [manager._allocate_block() for _ in range(num_cached_blocks, seq.num_blocks)]
        for block_id in hit:
            block = manager.blocks[block_id]
            block.ref_count += 1
            if block_id not in manager.used_block_ids:
                manager.free_block_ids.remove(block_id)
                manager.used_block_ids.add(block_id)
        seq.block_table.extend(hit + rest)
        seq.num_cached_tokens = num_cached_blocks * manager.block_size
        if set(hit) & set(rest):
            robbed.add(seq.seq_id)

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        if any(seq.seq_id in robbed for seq in seqs):
            fired()
        return before(runner, seqs)
