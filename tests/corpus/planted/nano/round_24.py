"""A twenty-fourth round of public bugs made anew in nano-vllm: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


# That its blocks are new is not seen: they have a key again before the engine is asked what it has.
@bug("vllm-project/vllm#18957", "nano-waits", "prefix_not_computed", "tokens_truncated_hash_kept", origin="vLLM")
def hit_is_counted_when_it_is_tried_first(fired: Fired) -> None:
    """How many tokens of a request are in the prefix cache is counted when it is tried for the first time, and that count is not forgotten when it has to go on waiting. The blocks are looked up anew when there is room, and
    some are gone by then: what is missing gets new blocks, which count as computed."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner

    counted: dict[int, int] = {}
    short: set[int] = set()  # the requests that hit less than was counted

    def there(manager, seq) -> int:
        """Return how many blocks are in the cache."""
        key = -1
        for i in range(seq.num_blocks - 1):
            key = manager.compute_hash(seq.block(i), key)
            block = manager.hash_to_block_id.get(key, -1)
            if block == -1 or manager.blocks[block].token_ids != seq.block(i):
                return i
        return seq.num_blocks - 1

    @replaces(BlockManager, "can_allocate")
    def can_allocate(before, manager, seq):
        first = counted.setdefault(seq.seq_id, there(manager, seq))
        return first if before(manager, seq) != -1 else -1

    @replaces(BlockManager, "allocate")
    def allocate(before, manager, seq, count):
        found = min(there(manager, seq), count)
        before(manager, seq, found)
        counted.pop(seq.seq_id, None)
        if found < count:
            short.add(seq.seq_id)
            key = manager.blocks[seq.block_table[found - 1]].hash if found else -1
            for i in range(found, count):
                key = manager.compute_hash(seq.block(i), key)
                manager.blocks[seq.block_table[i]].update(key, seq.block(i))
                manager.hash_to_block_id[key] = seq.block_table[i]
        seq.num_cached_tokens = count * manager.block_size

    @replaces(ModelRunner, "prepare_prefill")
    def prepare_prefill(before, runner, seqs):
        if any(seq.seq_id in short for seq in seqs):
            fired()
        return before(runner, seqs)
