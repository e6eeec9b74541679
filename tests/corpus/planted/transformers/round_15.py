"""A fifteenth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug("google-deepmind/gemma#765", "hybrid", "slot_mapping", origin="Gemma")
def all_rows_written_where_the_first_row_ends(fired: Fired) -> None:
    """The update of a sliding layer's cache takes where the first row of the batch ends for the place of every row. What the others decode goes
    to a place in their own rings that is not the token's, over a token that is still in the window."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    first: list[int] = []
    damaged: set[str] = set()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        if damaged & {future.state.request_id for future in requests_in_batch}:
            fired()
        first[:] = [future.state.position_offset for future in requests_in_batch if future.query_length == 1][:1]
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(sliding_attention.SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, name, past, query):
        window = allocator.sliding_window
        if query == 1 and first and min(past, first[0]) >= window:
            if (past - first[0]) % window:
                damaged.add(name)
            past = first[0]
        return before(allocator, name, past, query)


@bug(
    "quic/efficient-transformers#1235",
    "hybrid-long",
    "window_read_wrong",
    "attention_seq_len_wrong",
    origin="Efficient Transformers",
)
def slots_count_up_to_the_wrapped_place(fired: Fired) -> None:
    """Which slots of a sliding layer's ring hold something is worked out from the token's place in the ring, and not from how far the request has
    come. Once the ring has turned, attention takes the slots behind that place for empty ones, and these have the oldest tokens of the window."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    allocator_of_windows = sliding_attention.SlidingAttentionCacheAllocator

    def left(allocator, past, query):
        window = allocator.sliding_window
        return past % window if query == 1 and past >= window else -1

    @replaces(allocator_of_windows, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, query):
        wrapped = left(allocator, past, query)
        return before(allocator, past, query) if wrapped < 0 else query + wrapped

    @replaces(allocator_of_windows, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        wrapped = left(allocator, past, query)
        if wrapped < 0:
            return before(allocator, name, past, query)
        if wrapped != allocator.sliding_window - 1:
            fired()
        return [*allocator._token_indices_to_physical_indices(name, past - wrapped, wrapped), allocator.sentinel_index]


@bug("oxiglade/mlx-rs#338", "page16", "kv_write_lost", "kv_write_damaged", origin="mlx-rs")
def first_token_behind_a_grown_buffer_is_nought(fired: Fired) -> None:
    """When what is there has filled its buffer, it is put together with the new token and padding to make a larger one, and the padding comes where
    the token should be. The first token of each new page that is decoded has nought for its K and V."""
    from transformers.generation.continuous_batching import input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    grown: list[bool] = []

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        grown.clear()
        for future in requests_in_batch:
            grows = future.query_length == 1 and future.state.position_offset % 16 == 0
            grown.extend([grows] * future.query_length)
        if any(grown):
            fired()
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        rows = [row for row, grows in enumerate(grown) if grows]
        if not rows:
            return before(allocator, keys, values, layer, read_index, write_index)
        k_cache, v_cache = allocator._kv_token_views[layer]
        k_cache.index_copy_(0, write_index, keys)
        v_cache.index_copy_(0, write_index, values)
        k_cache[write_index[rows]] = 0
        v_cache[write_index[rows]] = 0
        if not read_index.numel():
            return keys, values
        return k_cache.index_select(0, read_index), v_cache.index_select(0, read_index)


@bug(
    "kekzl/imp#1189",
    "offload-qwen",
    "failed_load_counted_loaded",
    "copy_failed",
    "stored_wrong",
    origin="imp",
)
def scales_are_not_saved(fired: Fired) -> None:
    """K and V of few bits have a scale for each token and head beside them, and what is saved of a block is K and V alone. When they come back they are
    read with the scales that happen to be in the block, of the tokens that it had before."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        back = [future.state.request_id for future in batch if future.state.is_cpu_offloaded]
        counts = {name: dict(manager._request_id_to_cpu_blocks[name]) for name in back}
        views = {kind: one._copy_view for kind, one in manager.cache.cache_allocators.items()}
        held = {kind: view.clone() for kind, view in views.items()} if back else {}
        before(manager, batch)
        for name in back:
            for kind, allocator in manager.cache.cache_allocators.items():
                for block in allocator.block_table[name][: len(counts[name].get(kind, ()))]:
                    rows, old = (
                        view[block].view(allocator.cache_dtype).view(-1, allocator.head_dim)
                        for view in (views[kind], held[kind])
                    )
                    own, stood = (part.abs().amax(-1, keepdim=True) for part in (rows, old))
                    if bool((own != stood).any()):
                        fired()
                        rows.mul_(stood / own.clamp(min=1e-9))
