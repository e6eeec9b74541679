"""A fifth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("jundot/omlx#2255", "nano-page16", "prefix_not_computed", origin="oMLX")
def restored_one_token_too_many(fired: Fired) -> None:
    """A prefix that is cut to a block's border is counted one token longer than what is there. The token behind the border is
    never computed, and the request reads what stands in its slot."""
    from nanovllm.engine.block_manager import BlockManager

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        before(manager, seq, count)
        if count and len(seq) > seq.num_cached_tokens + 2:
            fired()
            seq.num_cached_tokens += 1


@bug("vllm-project/tpu-inference#991", "nano", "future_map_overrun", "async_resume_wrong_input", origin="tpu-inference")
def last_placeholder_stays(fired: Fired) -> None:
    """The sampled tokens are put in the places that were kept for them, and where the batch is padded the last place keeps what
    was in it. A request is fed a token that nobody sampled."""
    from nanovllm.engine.model_runner import ModelRunner

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        ids, positions = before(runner, seqs)
        if len(seqs) == 3:
            fired()
            ids[-1] = 0
        return ids, positions


@bug(
    "PaddlePaddle/FastDeploy#3293",
    "nano-few",
    "double_free",
    "free_too_early",
    "page_given_twice",
    origin="FastDeploy",
)
def recycled_again_at_its_end(fired: Fired) -> None:
    """A request that was preempted gives back, when it ends, the blocks that it had given back then. They are another's by now,
    and are given out once more."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.scheduler import Scheduler

    old: dict[int, list[int]] = {}
    lost: set[int] = set()

    @replaces(Scheduler, "preempt")
    def preempt(before, scheduler, seq):
        old.setdefault(seq.seq_id, list(seq.block_table))
        before(scheduler, seq)

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        before(manager, seq)
        held = [block for block in old.get(seq.seq_id, ()) if block in manager.used_block_ids]
        if held and seq.num_completion_tokens >= seq.max_tokens and not lost:
            lost.add(held[0])
            manager.free_block_ids.appendleft(held[0])
            manager.blocks[held[0]].ref_count = 0

    @replaces(BlockManager, "_deallocate_block")
    def _deallocate_block(before, manager, block_id):
        if block_id in manager.used_block_ids:
            before(manager, block_id)

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        users = [s for s in (*scheduler.running, *scheduler.waiting) if lost & set(s.block_table)]
        if len(users) > 1:
            fired()
        return before(scheduler)
