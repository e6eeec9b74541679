"""Public bugs made anew in nano-vllm: its block manager and scheduler; recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "huggingface/text-generation-inference#2489",
    "nano",
    "hit_before_written",
    "prefix_not_computed",
    origin="text-generation-inference",
)
def cached_without_a_prefill(fired: Fired) -> None:
    """A request gets its blocks, they join the prefix cache, and it is put back before its prefill since the batch is too
    small. When it is scheduled again it hits its own blocks, which nobody has computed."""
    from nanovllm.engine.scheduler import Scheduler

    put_back: list = []

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        manager = scheduler.block_manager
        for seq in list(scheduler.waiting)[:1]:
            if (
                scheduler.running
                and not put_back
                and not seq.block_table
                and seq.num_blocks > 2
                and manager.can_allocate(seq) >= 0
            ):
                manager.allocate(seq, manager.can_allocate(seq))
                seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
                manager.hash_blocks(seq)
                manager.deallocate(seq)
                put_back.append(seq)
                if manager.can_allocate(seq) > 0:
                    fired()
        return before(scheduler)


@bug("Avarok-Cybersecurity/atlas#1193", "nano", "shared_page_written", "page_given_twice", origin="Atlas")
def half_filled_block_shared(fired: Fired) -> None:
    """The prefix cache gives out the last block of a running request, which is filled in part, and there is no copy on write.
    Both requests go on writing their own tokens into it."""
    from nanovllm.engine.scheduler import Scheduler

    pairs: list = []

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        manager, size = scheduler.block_manager, scheduler.block_size
        for seq in list(scheduler.waiting)[:1]:
            for other in scheduler.running:
                shared = other.num_prompt_tokens
                same = seq.token_ids[:shared] == other.token_ids[:shared] and seq.num_tokens > shared
                found = manager.can_allocate(seq) if same and shared % size and not seq.block_table else -1
                if found == shared // size and not pairs:
                    manager.allocate(seq, found)
                    fresh, taken = seq.block_table[found], other.block_table[found]
                    manager.blocks[fresh].ref_count = 0
                    manager._deallocate_block(fresh)
                    manager.blocks[taken].ref_count += 1
                    seq.block_table[found] = taken
                    seq.num_cached_tokens = shared
                    pairs.append(other)
        seqs, prefills = before(scheduler)
        if any(other in seqs for other in pairs):
            fired()
        return seqs, prefills


@bug("PaddlePaddle/FastDeploy#3710", "nano-few", "double_free", "page_given_twice", origin="FastDeploy")
def block_recycled_twice(fired: Fired) -> None:
    """Two paths of a scheduler give back the blocks of one request. A block is in the free list twice, and two requests are
    given it."""
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.scheduler import Scheduler

    twice: list[int] = []
    holders: list = []

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        last = seq.block_table[-1]
        before(manager, seq)
        if not twice and last in manager.free_block_ids and manager.blocks[last].hash == -1:
            twice.append(last)
            manager.free_block_ids.appendleft(last)

    @replaces(BlockManager, "_allocate_block")
    def _allocate_block(before, manager):
        block = manager.blocks[manager.free_block_ids[0]]
        if twice == [block.block_id]:
            block.ref_count = 0
        return before(manager)

    @replaces(BlockManager, "_deallocate_block")
    def _deallocate_block(before, manager, block_id):
        if block_id in manager.used_block_ids:
            before(manager, block_id)

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler):
        if any(len(seq) % scheduler.block_size != 1 for seq in holders):
            fired()
        seqs, prefills = before(scheduler)
        users = [seq for seq in (*scheduler.running, *scheduler.waiting) if twice and twice[0] in seq.block_table]
        holders[:] = users if len(users) > 1 else []
        return seqs, prefills


@bug("local-inference-lab/vllm#480", "nano-few", "stale_prefix_hit", origin="vLLM")
def phantom_hit_after_eviction(fired: Fired) -> None:
    """A block that left the prefix cache when it was given out anew is still found under its old key, and what it holds is
    not compared. The old prompt hits the new owner's tokens."""
    from nanovllm.engine.block_manager import BlockManager

    listed: dict[int, int] = {}

    @replaces(BlockManager, "_allocate_block")
    def _allocate_block(before, manager):
        key = manager.blocks[manager.free_block_ids[0]].hash
        given = before(manager)
        if key != -1:
            listed[key] = given
        return given

    @replaces(BlockManager, "can_allocate")
    def can_allocate(before, manager, seq):
        key = -1
        for place in range(seq.num_blocks - 1):
            key = manager.compute_hash(seq.block(place), key)
            found = manager.hash_to_block_id.get(key)
            if found is None and key in listed:
                found = manager.hash_to_block_id[key] = listed[key]
            if found is None:
                break
            if manager.blocks[found].token_ids != seq.block(place):
                fired()
                manager.blocks[found].token_ids = seq.block(place)
        return before(manager, seq)


@bug("kekzl/imp#1115", "nano-page16", "page_leaked", origin="imp")
def one_block_a_request(fired: Fired) -> None:
    """A request's last block has a user more than it should when the request ends. One block of each request is never given
    back to the pool."""
    from nanovllm.engine.block_manager import BlockManager

    @replaces(BlockManager, "deallocate")
    def deallocate(before, manager, seq):
        if len(seq) % manager.block_size:
            manager.blocks[seq.block_table[-1]].ref_count += 1
            fired()
        before(manager, seq)
