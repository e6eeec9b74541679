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
