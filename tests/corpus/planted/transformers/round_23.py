"""A twenty-third round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("flashinfer-ai/flashinfer#3130", "llama", "attention_table_overwritten", origin="FlashInfer")
def page_times_its_stride_wraps_around(fired: Fired) -> None:
    """The number of a page is multiplied by the size of one where K and V are read, in a type that does not hold the product of a large number. K and V are stored where they belong,
    and from the pages behind a certain one attention reads what lies that much in front of them."""
    from transformers.generation.continuous_batching import input_outputs

    wraps = 1 << 9

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        before(io, requests_in_batch, *args, **kwargs)
        stored = io.read_index_storage[0]
        read = stored[: io.true_read_sizes[0]]
        if bool((read >= wraps).any()):
            fired()
            read.copy_(read % wraps)


@bug("tenstorrent/tt-xla#5817", "page16", "attention_seq_len_wrong", origin="tt-xla")
def first_rows_prefix_is_that_of_all_rows(fired: Fired) -> None:
    """How long a prefix is that has been computed goes into attention once for a batch, and is taken from its first row. In a step of rows that have come differently far each chunk of a
    prompt reads as far as if it stood where the first row does: it leaves out its own end, or reads beyond it."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    instead: dict[tuple[int, int], int] = {}

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (allocator,) = io.cache.cache_allocators.values()
        instead.clear()
        shared = requests_in_batch[0].state.position_offset
        for future in requests_in_batch[1:]:
            past, count = future.state.position_offset, future.query_length
            room = len(allocator.block_table[future.state.request_id]) * allocator.tokens_per_page
            if past and count > 1 and min(shared + count, room) != past + count:
                instead[past, count] = min(shared + count, room)
        if instead:
            fired()
        before(io, requests_in_batch, *args, **kwargs)
        instead.clear()

    @replaces(full_attention.FullAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        return instead.get((past, count), before(allocator, past, count))

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, name, past, count):
        return before(allocator, name, instead.get((past, count), past + count) - count, count)
