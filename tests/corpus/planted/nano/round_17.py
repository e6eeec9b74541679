"""A seventeenth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("unslothai/unsloth#3803", "nano-turns", "position_off", origin="Unsloth")
def one_place_for_all_rows_of_the_cache(fired: Fired) -> None:
    """Where the cache stands is one number for the whole batch, which is the longest row's place, and it is taken for the position of every token that is decoded. Rows that
    are shorter are rotated too far, and their K and V stay so in the blocks that later requests hit."""
    from nanovllm.engine.model_runner import ModelRunner

    @replaces(ModelRunner, "prepare_decode")
    def prepare_decode(before, runner, seqs):
        ids, positions = before(runner, seqs)
        if bool((positions != positions.max()).any()):
            fired()
            positions.fill_(int(positions.max()))
        return ids, positions


@bug("sgl-project/sglang#33996", "nano-chunks", "page_leaked", "seq_len_backwards", origin="SGLang")
def chunk_leaves_no_note_of_its_blocks(fired: Fired) -> None:
    """What a chunk has computed is not written down for a request that is kept out of the prefix cache. The next chunk begins at the front and is given all blocks once more,
    and those of the first are in nobody's table."""
    from nanovllm.engine.scheduler import Scheduler

    done: list[int] = []

    @replaces(Scheduler, "postprocess")
    def postprocess(before, scheduler, seqs, tokens, prefill):
        before(scheduler, seqs, tokens, prefill)
        for seq in seqs:
            if prefill and not done and seq.num_cached_tokens < seq.num_tokens and seq in scheduler.waiting:
                done.append(seq.seq_id)
                fired()
                for block in (scheduler.block_manager.blocks[number] for number in seq.block_table):
                    scheduler.block_manager.hash_to_block_id.pop(block.hash, None)
                    block.hash = -1
                seq.block_table.clear()
                seq.num_cached_tokens = 0
