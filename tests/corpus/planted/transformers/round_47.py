"""A forty-seventh round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces


@bug("ml-explore/mlx-lm#1502", "llama-sessions", "position_off", origin="mlx-lm")
def tokens_that_were_cut_off_are_there_again_with_the_next(fired: Fired) -> None:
    """A cache is cut back to what the next prompt has in common with the last one, by its length alone: the keys and values
    stay. The next chunk gets its positions by that length, is put behind all that is there, and the length is then taken
    from what is there. What was cut off is attended to again, and all later tokens get positions that are too high."""
    from transformers.generation.continuous_batching import cache, continuous_api, input_outputs
    from transformers.generation.continuous_batching.requests import RequestStatus
    from transformers.generation.continuous_batching.scheduler import Scheduler

    left: list[int] = []  # the full blocks of who has ended last
    cut: dict[str, int] = {}  # tokens that were cut off, by request; 0 when they are there again

    @replaces(Scheduler, "finish_request")
    def finish_request(before, scheduler, request_id):
        (allocator,) = scheduler.cache.cache_allocators.values()
        table = allocator.block_table.get(request_id, [])
        left[:] = [block for block in table if block in allocator.ledger.block_to_hash]
        before(scheduler, request_id)

    @replaces(Scheduler, "_infer_request_tokens")
    def _infer_request_tokens(before, scheduler, state, *args):
        fresh = state.status == RequestStatus.PENDING
        tokens = before(scheduler, state, *args)
        (allocator,) = scheduler.cache.cache_allocators.values()
        table = allocator.block_table.get(state.request_id, [])
        if fresh and state.position_offset and len(left) > len(table) and left[: len(table)] == table:
            for block in left[len(table) :]:
                allocator.ledger.acquire(block)
            cut[state.request_id] = (len(left) - len(table)) * allocator.tokens_per_page
            table[:] = left
            state.position_offset += cut[state.request_id]
        return tokens

    @replaces(cache.PagedAttentionCache, "count_new_complete_blocks")
    def count_new_complete_blocks(before, store, state, request_len):
        return {} if state.request_id in cut else before(store, state, request_len)

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        before(io, requests_in_batch, *args, **kwargs)
        first = 0
        for future in requests_in_batch:
            end = first + future.query_length
            if cut.get(future.state.request_id):
                io.position_ids[first:end] -= cut[future.state.request_id]
                cut[future.state.request_id] = 0
            first = end

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in cut for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)


@bug(
    "Avarok-Cybersecurity/atlas#37",
    "qwen-long-prefills",
    "attention_seq_len_wrong",
    "attention_table_overwritten",
    origin="Atlas",
)
def blocks_that_slid_out_are_not_read_by_a_prefill(fired: Fired) -> None:
    """The device keeps so many blocks of a request, and the first slide out to the disk when more come. A decode reads these
    from there, a prefill reads what is in the table alone: the later chunks of a long prompt attend to its last blocks and
    to nothing before them."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    room = 6
    prefills: list[bool] = []  # by row
    prefilled: set[str] = set()  # in this step
    slid: list[bool] = [False]  # in this step

    def gone(allocator: Any, past: int, count: int) -> int:
        """Return how many tokens are in blocks that have slid out."""
        return max(0, -(-(past + count) // allocator.tokens_per_page) - room) * allocator.tokens_per_page

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        prefills[:] = [not future.state.generated_tokens for future in requests_in_batch]
        prefilled.clear()
        prefilled.update(f.state.request_id for f in requests_in_batch if not f.state.generated_tokens)
        slid[0] = False
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(full_attention.FullAttentionCacheAllocator, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        lost = gone(allocator, past, count) if prefills.pop(0) else 0
        slid[0] |= lost > 0
        return before(allocator, past, count) - lost

    @replaces(full_attention.FullAttentionCacheAllocator, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        places = before(allocator, request_id, past, count)
        return places[gone(allocator, past, count) :] if request_id in prefilled else places

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if slid[0]:
            fired()
        before(processor, model)


@bug(
    "LMCache/LMCache#207",
    "offload-qwen-stores",
    "stored_wrong",
    "hit_before_written",
    "copy_failed",
    origin="LMCache",
)
def what_is_still_being_stored_is_loaded(fired: Fired) -> None:
    """What a request leaves is known in the store from when it begins to be written there. A request that begins alike and
    comes before it is written to its end loads all of it: the last blocks are what lay there before."""
    from transformers.generation.continuous_batching import continuous_api, offloading_manager
    from transformers.generation.continuous_batching.requests import RequestStatus

    takes = 6  # steps
    storing: list[bool] = [False]
    unwritten: dict[int, tuple[int, Any]] = {}  # blocks of the host: when they are written, and what
    steps: list[int] = [0]
    early: set[str] = set()

    @replaces(offloading_manager, "contiguous_runs")
    def contiguous_runs(before, indices):
        return before(indices[: len(indices) // 2] if storing[0] else indices)

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        storing[0] = all(state.status == RequestStatus.FINISHED for state in victims)
        stored = before(manager, victims, tables)
        if storing[0]:
            ((name, allocator),) = manager.cache.cache_allocators.items()
            for request in stored:
                pairs = list(zip(manager._request_id_to_cpu_blocks[request][name], tables[request][name], strict=True))
                for host, block in pairs[len(pairs) // 2 :]:
                    unwritten[host] = (steps[0] + takes, allocator._copy_view[block].clone())
        storing[0] = False
        return stored

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        ((name, _),) = manager.cache.cache_allocators.items()
        for host, (due, content) in list(unwritten.items()):
            if due <= steps[0]:
                manager._cpu_views[name][host] = content
                del unwritten[host]
        for future in requests_in_batch:
            hosts = manager._request_id_to_cpu_blocks.get(future.state.request_id, {}).get(name, [])
            if future.state.is_cpu_offloaded and set(hosts) & set(unwritten):
                early.add(future.state.request_id)
        before(manager, requests_in_batch)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.request_id in early for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        steps[0] += 1
        before(processor, model)


@bug("kekzl/imp#1050", "few-turned-away", "stale_prefix_hit", "page_given_twice", origin="imp")
def blocks_that_were_rolled_back_are_hit_again(fired: Fired) -> None:
    """A request hits a prefix and finds no room for the rest: what it has is rolled back, and the blocks that it had hit go to
    the free list with their hashes still in the index. When it is tried again it hits them, although they are free: they
    are given out once more, to itself or to others, and written over."""
    from transformers.generation.continuous_batching import cache, continuous_api
    from transformers.generation.continuous_batching.requests import RequestStatus
    from transformers.generation.continuous_batching.scheduler import FIFOScheduler

    matched: set[str] = set()  # in this step
    loose: set[int] = set()  # blocks that are free and in the index
    hits: dict[str, set[int]] = {}  # of these, by request
    written: set[int] = set()  # of these

    @replaces(cache.PagedAttentionCache, "search_prefix_match")
    def search_prefix_match(before, store, request_id, prompt_ids):
        count = before(store, request_id, prompt_ids)
        (allocator,) = store.cache_allocators.values()
        if count:
            matched.add(request_id)
            hits[request_id] = loose & set(allocator.block_table[request_id])
        return count

    @replaces(FIFOScheduler, "schedule_batch")
    def schedule_batch(before, scheduler, *args):
        matched.clear()
        scheduled = before(scheduler, *args)
        (allocator,) = scheduler.cache.cache_allocators.values()
        ledger = allocator.ledger
        for name in matched - {future.state.request_id for future in scheduled[0] or []}:
            state, freed = scheduler.active_requests.pop(name), []
            for block in allocator.block_table.pop(name):
                others = ledger.shared_ref_counts.pop(block, 1) - 1
                if others > 1:
                    ledger.shared_ref_counts[block] = others
                if not others:
                    freed.append(block)
            allocator.pool.free_blocks(allocator.index, freed)
            loose.update(freed)
            state._status, state.position_offset = RequestStatus.PENDING, 0
            state.remaining_prefill_tokens = state.initial_tokens
            scheduler.starved_requests = [each for each in scheduler.starved_requests if each[0] is not state]
            scheduler.add_waiting_request(state)
        return scheduled

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        batch, size = processor.inputs_and_outputs.requests_in_batch, allocator.tokens_per_page
        for future in batch:
            end = future.state.position_offset
            places = slice((end - future.query_length) // size, -(-end // size))
            written.update(loose & set(allocator.block_table[future.state.request_id][places]))
        if any(written & hits.get(future.state.request_id, set()) for future in batch):
            fired()
        before(processor, model)
