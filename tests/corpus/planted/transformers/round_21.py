"""A twenty-first round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("gittensor-ai-lab/sparkinfer#144", "llama", "attention_table_overwritten", "slot_mapping", origin="SparkInfer")
def rows_of_the_table_go_by_the_batch_and_not_by_slots(fired: Fired) -> None:
    """Each sequence has a row of the block table for as long as it lives, and a step of decodes takes the rows in the order of its batch. When one that came earlier has ended, those
    behind it store their tokens through the row of another and read what it names."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import cache_allocator

    slots: dict[str, int] = {}
    rows: dict[int, list[int]] = {}

    @replaces(cache_allocator.CacheAllocator, "free_blocks")
    def free_blocks(before, allocator, name, *args, **kwargs):
        before(allocator, name, *args, **kwargs)
        slots.pop(name, None)  # the row stays as it is

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (allocator,) = io.cache.cache_allocators.values()
        tables = allocator.block_table
        names = [future.state.request_id for future in requests_in_batch]
        for name in names:
            if name not in slots:
                slots[name] = next(n for n in range(len(slots) + 1) if n not in slots.values())
            rows[slots[name]] = list(tables[name])
        own = {name: tables[name] for name in names}
        if all(future.query_length == 1 for future in requests_in_batch):
            for place, (name, future) in enumerate(zip(names, requests_in_batch, strict=True)):
                needed = future.state.position_offset // allocator.tokens_per_page + 1
                row = rows.get(place, [])
                if row[:needed] != own[name][:needed]:
                    fired()
                    tables[name] = row + [0] * (needed - len(row))
        before(io, requests_in_batch, *args, **kwargs)
        tables.update(own)


@bug("pegainfer-project/pegainfer#291", "page16", "attention_seq_len_wrong", origin="pegainfer")
def page_that_was_taken_ahead_counts_as_read(fired: Fired) -> None:
    """The page for the next token is taken as soon as a decode fills the last one, and how far attention reads is counted from the pages that there are. At every border of a page it
    reads one page of nothing, or of what its last owner left."""
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    def ahead(allocator, past: int, count: int) -> bool:
        return count == 1 and past > 0 and (past + 1) % allocator.tokens_per_page == 0

    @replaces(full_attention.FullAttentionCacheAllocator, "_compute_blocks_needed")
    def blocks_needed(before, allocator, there, past, count):
        return before(allocator, there, past, count + ahead(allocator, past, count))

    @replaces(full_attention.FullAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        return before(allocator, past, count) + allocator.tokens_per_page * ahead(allocator, past, count)

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, count):
        if not ahead(allocator, past, count):
            return before(allocator, name, past, count)
        fired()
        return before(allocator, name, past, count + allocator.tokens_per_page)


@bug("gittensor-ai-lab/sparkinfer#41", "llama", "commit_beyond_allocation", "slot_mapping", origin="SparkInfer")
def append_goes_on_into_the_next_row(fired: Fired) -> None:
    """A row of the block table has room for so many blocks, and no more are given to a sequence. The append does not look whether a position is beyond that: it takes what comes next in
    memory, which is the first block of the next sequence, and writes over that one's first tokens."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    room = 9

    @replaces(full_attention.FullAttentionCacheAllocator, "_compute_blocks_needed")
    def blocks_needed(before, allocator, there, past, count):
        return min(before(allocator, there, past, count), max(0, room - there))

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (allocator,) = io.cache.cache_allocators.values()
        tables = allocator.block_table
        names = [future.state.request_id for future in requests_in_batch]
        own = {name: tables[name] for name in names}
        for future, name, after in zip(requests_in_batch, names, [*names[1:], ""], strict=True):
            end = future.state.position_offset + future.query_length
            if end > len(own[name]) * allocator.tokens_per_page:
                fired()
                tables[name] = own[name] + own.get(after, [0])
        before(io, requests_in_batch, *args, **kwargs)
        tables.update(own)
