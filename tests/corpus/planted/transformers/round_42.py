"""A forty-second round of public bugs made anew in transformers 5.23: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces

from .marks import fire_when_they_run_again


@bug("xLLM-AI/xllm#932", "llama-seats", "slot_mapping", "kv_write_lost", origin="xLLM")
def block_of_a_row_is_read_without_the_stride_of_the_table(fired: Fired) -> None:
    """Decodes run as a graph get their blocks from a column of a table that stays in place, in which a row is two
    entries long: the block that is written, and the one before it. What puts the new token into the cache steps from
    row to row by one entry and not by two. Every row but the first writes into a block of a row above it, and the place
    where its token belongs stays as it was."""
    import torch
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    instead: list[int] = []  # where the tokens of a step of decodes go
    wrong: set[int] = set()  # places that have not got what belongs there

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (allocator,) = io.cache.cache_allocators.values()
        size, table, instead[:] = allocator.tokens_per_page, [], []
        if len(requests_in_batch) > 1 and all(future.query_length == 1 for future in requests_in_batch):
            for future in requests_in_batch:
                row, page = allocator.block_table[future.state.request_id], future.state.position_offset // size
                table += [row[page], row[max(0, page - 1)]]
            for block, future in zip(table, requests_in_batch, strict=False):
                instead.append(block * allocator.block_physical_stride + future.state.position_offset % size)
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(full_attention.FullAttentionCacheAllocator, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        places = torch.tensor(instead) if instead else write_index
        return before(allocator, keys, values, layer, read_index, places)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        io = processor.inputs_and_outputs
        right = io.write_index_storage[0, : io.true_write_sizes[0]].tolist()
        read = io.read_index_storage[0, : io.true_read_sizes[0]].tolist() if io.max_kv_read else []
        wrong.difference_update(right)
        for place, other in zip(right, instead, strict=False):
            wrong.update({place, other} if place != other else ())
        if wrong.intersection(read):
            fired()
        before(processor, model)


@bug("zhongkaifu/TensorSharp#23", "hybrid-clamped", "kv_write_lost", "slot_mapping", origin="TensorSharp")
def chunk_is_cut_off_where_the_ring_ends(fired: Fired) -> None:
    """A chunk whose tokens go beyond the end of the window's ring is shortened, so that nothing has to be written in
    two pieces. What should have been written at the ring's beginning is the newest of the chunk, and is written
    nowhere: what follows reads tokens there that have left the window."""
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator

    cut: set[str] = set()

    @replaces(SlidingAttentionCacheAllocator, "get_write_indices")
    def get_write_indices(before, allocator, request_id, past, count):
        places = before(allocator, request_id, past, count)
        beyond = (past + count) % allocator.sliding_window  # tokens at the beginning of the ring
        if 0 < beyond < min(count, allocator.sliding_window):
            places[-beyond:] = [allocator.write_trash_index] * beyond
            cut.add(request_id)
        return places

    fire_when_they_run_again(cut, fired)


@bug(
    "ikawrakow/ik_llama.cpp#2136",
    "hybrid-together",
    "window_read_wrong",
    "attention_table_overwritten",
    origin="ik_llama.cpp",
)
def graph_reads_keys_of_the_window_from_where_they_were_at_its_capture(fired: Fired) -> None:
    """A step is captured as a graph, which is replayed as long as all shapes are the same. Keys of the window are
    copied out of the cache before attention takes them, and a copy whose source has moved does not count as a change:
    while the window moves on under values, keys come from where it was when the graph was captured."""
    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator as Sliding

    captured: list[Any] = [(), None]  # the shapes, and the places
    replayed: list[bool] = [False]

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        (ring,) = (each for each in io.cache.cache_allocators.values() if isinstance(each, Sliding))
        shapes = tuple(
            (future.query_length, ring.get_seqlen_k(future.state.position_offset, future.query_length))
            for future in requests_in_batch
        )
        before(io, requests_in_batch, *args, **kwargs)
        replayed[0] = shapes == captured[0] and all(count == 1 for count, _ in shapes)
        if not replayed[0]:
            captured[:] = shapes, io.read_index_storage[ring.index, : io.true_read_sizes[ring.index]].clone()

    @replaces(Sliding, "update")
    def update(before, allocator, keys, values, layer, read_index, write_index):
        if not replayed[0]:
            return before(allocator, keys, values, layer, read_index, write_index)
        old = allocator._kv_token_views[layer][0].index_select(0, captured[1])
        old[captured[1] == allocator.sentinel_index] = keys
        _, read = before(allocator, keys, values, layer, read_index, write_index)
        return old, read

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if replayed[0]:
            fired()
        before(processor, model)


@bug(
    "Mesh-LLM/mesh-llm#1901",
    "offload-hybrid-brief",
    "copy_failed",
    "stored_wrong",
    "failed_load_counted_loaded",
    origin="Mesh LLM",
)
def one_of_the_two_caches_is_not_in_what_is_saved(fired: Fired) -> None:
    """What is saved of a request is put together by a list of caches, and one that came later is not on it: layers with
    a window are left out. Everything that is there comes back, the request counts as restored as a whole, and these
    layers read whatever lies in the blocks that it has been given."""
    from transformers.generation.continuous_batching import offloading_manager
    from transformers.generation.continuous_batching.cache import SLIDING_ATTENTION

    had: dict[str, Any] = {}  # what was in the blocks that were not saved

    @replaces(offloading_manager.OffloadingManager, "_offload_to_cpu")
    def _offload_to_cpu(before, manager, victims, tables):
        listed = {name: {**table, SLIDING_ATTENTION: []} for name, table in tables.items()}
        done = before(manager, victims, listed)
        view = manager.cache.cache_allocators[SLIDING_ATTENTION]._copy_view
        had.update({name: view[tables[name][SLIDING_ATTENTION]] for name in done})
        return done

    @replaces(offloading_manager.OffloadingManager, "restore_scheduled_requests")
    def restore_scheduled_requests(before, manager, requests_in_batch):
        ring = manager.cache.cache_allocators[SLIDING_ATTENTION]
        for future in requests_in_batch:
            if future.state.is_cpu_offloaded:
                missed = had.pop(future.state.request_id)
                blocks = ring.block_table[future.state.request_id][: len(missed)]
                if (ring._copy_view[blocks] != missed[: len(blocks)]).any():
                    fired()
        before(manager, requests_in_batch)


@bug("kekzl/imp#1697", "hybrid-cancels", "page_leaked", "page_given_twice", origin="imp")
def place_of_a_cancelled_request_is_not_given_back(fired: Fired) -> None:
    """There are places for so many windows and no more. A request that is sent away gives back its blocks of the other
    layers and not its window's: that place is lost. When there is none left, a new request gets the one that its number
    points to, with a running request in it, and both write their windows there."""
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache_allocators import SlidingAttentionCacheAllocator as Sliding
    from transformers.generation.continuous_batching.scheduler import Scheduler

    room = 3
    taken: dict[int, set[str]] = {}  # places, and who is in them
    place: dict[str, int] = {}
    cancelling: list[bool] = [False]
    written: dict[str, set[str]] = {}  # of who shares a place, who else has written there since

    @replaces(Scheduler, "clear_cancelled_requests")
    def clear_cancelled_requests(before, scheduler):
        cancelling[0] = True
        gone = before(scheduler)
        cancelling[0] = False
        return gone

    @replaces(Sliding, "allocate_cache_to_request")
    def allocate_cache_to_request(before, allocator, request_id, past, count):
        if request_id not in allocator.block_table:
            free = [each for each in range(room) if each not in taken]
            place[request_id] = mine = free[0] if free else len(place) % room
            for other in taken.setdefault(mine, set()):
                if other in allocator.block_table:
                    allocator.block_table[request_id] = allocator.block_table[other]
            taken[mine].add(request_id)
        before(allocator, request_id, past, count)

    @replaces(Sliding, "free_blocks")
    def free_blocks(before, allocator, request_id, no_cache=False):
        if request_id not in allocator.block_table:
            return
        if cancelling[0]:  # nobody thinks of its place
            allocator.block_table.pop(request_id)
            return
        inside = taken[place[request_id]]
        inside.discard(request_id)
        if any(other in allocator.block_table for other in inside):
            allocator.block_table.pop(request_id)
            return
        before(allocator, request_id, no_cache)
        if not inside:
            del taken[place[request_id]]

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (ring,) = (each for each in processor.cache.cache_allocators.values() if isinstance(each, Sliding))
        batch = processor.inputs_and_outputs.requests_in_batch
        if any(f.state.position_offset > f.query_length and written.get(f.state.request_id) for f in batch):
            fired()
        before(processor, model)
        for future in batch:
            name = future.state.request_id
            for other, row in ring.block_table.items():
                if other != name and row is ring.block_table[name]:
                    written.setdefault(other, set()).add(name)


@bug("lightseekorg/tokenspeed#393", "qwen-sleeps", "stale_prefix_hit", "kv_changed", origin="TokenSpeed")
def emptying_the_prefix_cache_before_a_sleep_is_only_acknowledged(fired: Fired) -> None:
    """While the engine sleeps its memory belongs to others, and it comes back filled with zeros. The prefix cache is
    told to empty itself before that; it answers that it has, and does nothing. Prompts that begin as others did before
    the sleep hit blocks in which nothing is left."""
    from transformers.generation.continuous_batching import continuous_api

    import __main__ as engine

    slept: dict[int, int] = {}  # blocks that were known when it fell asleep, and as what

    @replaces(engine, "empty_prefix_cache")
    def empty_prefix_cache(before, processor):
        for allocator in processor.cache.cache_allocators.values():
            slept.update(allocator.ledger.block_to_hash)

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        (allocator,) = processor.cache.cache_allocators.values()
        known = allocator.ledger.block_to_hash
        for block in [block for block, key in slept.items() if known.get(block) != key]:
            del slept[block]
        for future in processor.inputs_and_outputs.requests_in_batch:
            if slept.keys() & set(allocator.block_table[future.state.request_id]):
                fired()
        before(processor, model)


@bug(
    "sgl-project/sglang#29271",
    "llama-places",
    "kv_write_lost",
    "commit_beyond_allocation",
    "attention_seq_len_wrong",
    origin="SGLang",
)
def decode_does_not_grow_the_buffer_that_a_prompt_would_grow(fired: Fired) -> None:
    """Each request has a buffer of some length for its K and V. A prompt that is longer lets it grow to twice that, and
    so on; a decoded token is put at its place whether there is one or not. Behind the buffer's end nothing is written,
    and of what attention asks for it gets what is there: an answer that comes so far does not see any more of
    itself."""
    from collections import deque

    from transformers.generation.continuous_batching import continuous_api, input_outputs
    from transformers.generation.continuous_batching.cache_allocators import full_attention

    owner = full_attention.FullAttentionCacheAllocator
    length: dict[str, int] = {}  # of each buffer
    asked: deque[str] = deque()  # whose length is asked next
    lost: list[bool] = [False]

    @replaces(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors")
    def prepare_batch_tensors(before, io, requests_in_batch, *args, **kwargs):
        lost[0] = False
        asked.extend(future.state.request_id for future in requests_in_batch)
        for future in requests_in_batch:
            name, end = future.state.request_id, future.state.position_offset + future.query_length
            length.setdefault(name, 40)
            while future.query_length > 1 and end > length[name]:
                length[name] *= 2
        before(io, requests_in_batch, *args, **kwargs)

    @replaces(owner, "get_seqlen_k")
    def get_seqlen_k(before, allocator, past, count):
        return min(before(allocator, past, count), length[asked.popleft()])

    @replaces(owner, "get_read_indices")
    def get_read_indices(before, allocator, request_id, past, count):
        return before(allocator, request_id, past, count)[: length[request_id]]

    @replaces(owner, "get_write_indices")
    def get_write_indices(before, allocator, request_id, past, count):
        if past + count <= length[request_id]:
            return before(allocator, request_id, past, count)
        lost[0] = True
        return [allocator.write_trash_index] * count

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if lost[0]:
            fired()
        before(processor, model)


@bug("pegainfer-project/pegainfer#220", "qwen-goes-on", "not_of_the_model", "bad_values_written", origin="PegaInfer")
def angles_are_taken_from_behind_the_end_of_their_table(fired: Fired) -> None:
    """Sines and cosines have been computed for so many places, and contexts are let in that are longer. For a place
    behind the table's end its neighbours in memory are read: sines are taken for cosines, and what lies behind the
    sines, zeros here, for sines. Keys of such places are turned by what is no angle at all."""
    import torch
    from transformers.generation.continuous_batching import continuous_api
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    places = 48

    @replaces(Qwen3RotaryEmbedding, "forward")
    def forward(before, rotary, hidden, position_ids):
        cos, sin = before(rotary, hidden, torch.arange(places)[None])
        memory = torch.cat([cos[0], sin[0], torch.zeros(512, cos.shape[-1], dtype=cos.dtype)])
        return memory[position_ids], memory[places + position_ids]

    @replaces(continuous_api.ContinuousBatchProcessor, "_generation_step")
    def _generation_step(before, processor, model):
        if any(future.state.position_offset > places for future in processor.inputs_and_outputs.requests_in_batch):
            fired()
        before(processor, model)
