"""A fourteenth round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces


@bug(
    "sgl-project/sglang#32087",
    "hybrid",
    "window_read_wrong",
    "attention_seq_len_wrong",
    origin="SGLang",
)
def decode_leaves_out_the_windows_oldest(fired: Fired) -> None:
    """A window's size is kept as how far it looks back, and a decode takes it for how many tokens there are, its own among them. From when the window is
    full on, the oldest one that it should see is left out."""
    from transformers.generation.continuous_batching.cache_allocators import sliding_attention

    allocator_of_windows = sliding_attention.SlidingAttentionCacheAllocator

    @replaces(allocator_of_windows, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, query):
        return before(allocator, past, query) - (query == 1 and past >= allocator.sliding_window)

    @replaces(allocator_of_windows, "get_read_indices")
    def get_read_indices(before, allocator, name, past, query):
        places = before(allocator, name, past, query)
        if query == 1 and past >= allocator.sliding_window:
            fired()
            return places[1:]
        return places


@bug("ml-explore/mlx-swift-lm#584", "hybrid-long", "kv_changed", origin="mlx-swift-lm")
def ring_that_has_turned_is_cut_by_its_counters(fired: Fired) -> None:
    """Drafts that were rejected are taken back from a ring that has turned by counting back, as if it had not. They have gone over the oldest tokens of the
    window, which are in the window again and are not put back."""
    from transformers.generation.continuous_batching import input_outputs

    cut: set[str] = set()

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        for future in requests_in_batch:
            name, past = future.state.request_id, future.state.position_offset
            for allocator in io.cache.cache_allocators.values():
                window = getattr(allocator, "sliding_window", past + 1)
                if past > window and future.query_length == 1 and name not in cut:
                    cut.add(name)
                    drafts = allocator._token_indices_to_physical_indices(name, past + 1, 2)
                    last = allocator._token_indices_to_physical_indices(name, past - 1, 1)
                    for views in allocator._kv_token_views.values():
                        for view in views:
                            view[drafts] = view[last].roll(1, -1)
                    fired()
        before(io, requests_in_batch, *args, **kwargs)


@bug(
    "vllm-project/vllm-omni#1330",
    "offload",
    "load_landed_elsewhere",
    "failed_load_counted_loaded",
    origin="vLLM-Omni",
)
def restored_through_the_batchs_first_slots(fired: Fired) -> None:
    """The slots of a step are one list over all its requests, and what is restored for one of them goes to the list's first entries. It lands in the slots
    of the request that stands first, and the one that it was for reads what its own held before."""
    from transformers.generation.continuous_batching import offloading_manager

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, batch):
        first = batch[0].state.request_id
        back = [f.state.request_id for f in batch if f.state.is_cpu_offloaded and f.state.request_id != first]
        allocators = manager.cache.cache_allocators
        held = {kind: one._copy_view.clone() for kind, one in allocators.items()} if back else {}
        before(manager, batch)
        for name in back:
            for kind, allocator in allocators.items():
                own, others = allocator.block_table[name], allocator.block_table[first]
                for mine, other in zip(own, others, strict=False):
                    if bool((allocator._copy_view[mine] != held[kind][mine]).any()) and mine != other:
                        fired()
                        allocator._copy_view[other] = allocator._copy_view[mine]
                        allocator._copy_view[mine] = held[kind][mine]
