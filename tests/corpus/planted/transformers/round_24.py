"""A twenty-fourth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("huggingface/transformers#48918", "llama", "shared_page_written", "page_given_twice", "req_to_token")
def two_requests_of_one_name_have_one_table(fired: Fired) -> None:
    """A client may name its request, and what the engine keeps of a request it keeps by that name. Two requests that overlap have the same one: the second finds a table of blocks that
    is long enough, and writes its prompt into the blocks that the first is reading."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    def said(name: str) -> str:
        return "d" if name == "e" else name  # what its client calls it

    class ByName(dict):
        def __getitem__(self, name):
            return super().get(said(name), [])  # the other one may have ended

        def __setitem__(self, name, blocks):
            super().__setitem__(said(name), blocks)

        def __contains__(self, name):
            return super().__contains__(said(name))

        def get(self, name, default=None):
            return super().get(said(name), default)

        def pop(self, name, *default):
            return super().pop(said(name), *default)

    @replaces(cache_allocator.CacheAllocator, "_before_cache_tensor_init")
    def init(before, allocator, *args, **kwargs):
        before(allocator, *args, **kwargs)
        allocator.block_table = ByName()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if {"d", "e"} <= {future.state.request_id for future in requests_in_batch}:
            fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug("mstar-project/mstar#210", "few-middle", "tokens_truncated_hash_kept", origin="M*")
def parent_is_known_by_its_place(fired: Fired) -> None:
    """A cached block is found by its tokens and by the number of the block before it, and blocks are evicted one by one, the oldest first. When the one before it has gone, its place is
    given to other tokens: whoever has these, and goes on with the same tokens, takes the block that was computed behind the old ones."""
    from transformers.generation.continuous_batching import input_outputs, offloading_manager
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    past: dict[int, list[int]] = {}  # what a block was computed behind
    wrong: set[str] = set()

    @replaces(offloading_manager.OffloadingManager, "offload_requests")
    def offload_requests(before, manager):
        (allocator,) = manager.cache.cache_allocators.values()
        cached = allocator.ledger.cached_blocks
        others = list(cached)[1:]
        for block in others:  # only the oldest goes
            cached.pop(block)
        done = before(manager)
        cached.update(dict.fromkeys(others))
        return done

    @replaces(cache_allocator.CacheAllocator, "match_prefix_blocks")
    def match_prefix_blocks(before, allocator, prompt):
        found: list[int] = []
        size, known = allocator.tokens_per_page, allocator.ledger.hash_to_block
        for first in range(0, (len(prompt) - 1) // size * size, size):
            key = cache_allocator.compute_block_hash(found[-1] if found else None, prompt[first : first + size])
            if key not in known:
                break
            found.append(known[key])
        return found

    @replaces(cache_allocator.CacheAllocator, "mark_complete_blocks")
    def mark_complete_blocks(before, allocator, name, tokens, new):
        table, size, ledger = allocator.block_table[name], allocator.tokens_per_page, allocator.ledger
        for i, block in enumerate(table):
            own = tokens[i * size : (i + 1) * size]
            if block in ledger.block_to_hash:
                continue
            if not new or len(own) < size:
                break
            new -= 1
            key = cache_allocator.compute_block_hash(table[i - 1] if i else None, own)
            same = ledger.register_new_hash(block, key)
            if same is None:
                past[block] = tokens[: i * size]
                continue
            ledger.acquire(same)
            table[i] = same
            if ledger.release(block):
                allocator.pool.free_blocks(allocator.index, [block])
        if any(past.get(block, tokens[: i * size]) != tokens[: i * size] for i, block in enumerate(table)):
            wrong.add(name)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if any(future.state.request_id in wrong for future in requests_in_batch):
            fired()
        before(io, requests_in_batch, *args, **kwargs)
