"""An eighth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("tenstorrent/vllm-tt-plugin#74", "nano-chunks", "slot_mapping", origin="vllm-tt-plugin")
def chunk_written_from_its_blocks_start(fired: Fired) -> None:
    """Where a chunk begins is divided by the size of a block and the rest is dropped. A chunk that begins inside a block is written
    from the block's first slot on, over the end of the chunk before it."""
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.utils.context import get_context

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        made = before(runner, seqs)
        slots, at, size = get_context().slot_mapping, 0, runner.block_size
        for seq in seqs:
            count, rest = seq.num_scheduled_tokens, seq.num_cached_tokens % size
            if rest:
                places = range(seq.num_cached_tokens - rest, seq.num_cached_tokens - rest + count)
                for number, place in enumerate(places, at):
                    slots[number] = seq.block_table[place // size] * size + place % size
                fired()
            at += count
        return made


@bug(
    "RBLN-SW/vllm-rbln#205",
    "nano-few",
    "stale_prefix_hit",
    "page_given_twice",
    "req_to_token",
    origin="vLLM RBLN",
)
def new_blocks_taken_before_the_hit(fired: Fired) -> None:
    """A request takes its new blocks before it takes what it has hit out of the free list. The blocks that it hit are among those
    that are free, and it is given one of them as new: the block is in its table twice."""
    from nanovllm.engine.block_manager import BlockManager

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        hit, digest = [], -1
        for place in range(count):
            digest = manager.compute_hash(seq.block(place), digest)
            hit.append(manager.hash_to_block_id[digest])
        new = [manager._allocate_block() for _ in range(count, seq.num_blocks)]
        for block_id in hit:
            block = manager.blocks[block_id]
            if block_id in manager.used_block_ids:
                block.ref_count += 1
            else:
                block.ref_count = 1
                manager.free_block_ids.remove(block_id)
                manager.used_block_ids.add(block_id)
        seq.block_table += hit + new
        seq.num_cached_tokens = count * manager.block_size
        if set(hit) & set(new):
            fired()
