"""A thirty-sixth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug("vllm-project/vllm#49449", "llama-streaming-turns", "tokens_truncated_hash_kept")
def keys_of_a_token_that_was_taken_back_are_kept(fired: Fired) -> None:
    """When further input comes to a session, the last token of its answer is taken back, and the input's first one stands in its place. If it had been the last of a block, the block has its key already, and keeps it: who asks with
    the token that was taken back hits a block that was computed of another."""
    from vllm.v1.core.sched.scheduler import Scheduler

    stale: dict[str, int] = {}  # of a session, the place of the block
    wrong: set[int] = set()

    @replaces(Scheduler, "_update_request_as_session")
    def _update_request_as_session(before, scheduler, session, update):
        kept, whole = list(session.block_hashes), session.num_computed_tokens // scheduler.hash_block_size
        before(scheduler, session, update)
        if len(kept) > whole:
            session.block_hashes[:] = kept
            session.update_block_hashes()
            stale[session.request_id] = whole

    def look(request, hit, table):
        place = stale.get(request.request_id)
        if place is not None and place < len(table):
            wrong.add(table[place].block_id)
        if request.request_id not in stale and wrong.intersection(hit):
            fired()

    when_allocated(look)


@bug(
    "vllm-project/vllm#29387", "delta-together", "hit_before_written", "state_restored_for_other_prefix",
    late="a state that is filled in the very step is seen behind it",
)  # fmt: skip
def state_of_the_same_step_is_hit(fired: Fired) -> None:
    """Blocks are in the prefix cache when a step is planned. Attention may hit one in the step that writes it; a recurrent state cannot be: it is fetched before anything of the step is computed. A request that begins as
    another one of its step goes on from what was in the block before."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    fresh: set = set()
    early: set[str] = set()

    @replaces(MambaManager, "cache_blocks")
    def cache_blocks(before, manager, *args, **kwargs):
        before(manager, *args, **kwargs)
        fresh.update(manager.cached_blocks_this_step)
        manager.cached_blocks_this_step.clear()

    @replaces(MambaManager, "new_step_starts")
    def new_step_starts(before, manager):
        before(manager)
        fresh.clear()

    @replaces(MambaManager, "get_num_blocks_to_allocate")
    def get_num_blocks_to_allocate(before, manager, request_id, num_tokens, new_computed_blocks, *args, **kwargs):
        if new_computed_blocks and new_computed_blocks[-1].block_hash in fresh:
            early.add(request_id)
        return before(manager, request_id, num_tokens, new_computed_blocks, *args, **kwargs)

    before_forward(lambda runner, output: early & set(output.num_scheduled_tokens) and fired())


@bug(
    "NVIDIA/TensorRT-LLM#6507", "sliding-loads-heads", "layout_misread", "load_landed_elsewhere", origin="TensorRT-LLM"
)
def what_is_received_is_taken_to_lie_head_by_head(fired: Fired) -> None:
    """What comes in is put together by a kernel for pages in which all tokens of a head lie side by side, and the pages are of the kind in which all heads of a token do. All bytes arrive: each token has parts of several tokens'
    heads."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        for gid, block, key in job.blocks:
            for name, rows in connector._blocks_of(gid, block):
                sent = connector._store[name, key]
                taken = sent.contiguous().view(sent.shape[1], sent.shape[0], *sent.shape[2:]).transpose(0, 1)
                if not taken.equal(sent):
                    fired()
                rows.copy_(taken)


@bug("xLLM-AI/xllm#1898", "qwen-clamps", "commit_beyond_allocation", "slot_mapping", origin="xLLM")
def what_is_hit_counts_as_room_for_what_is_computed(fired: Fired) -> None:
    """How many blocks a step needs is worked out before the prefix is looked up, for the step's tokens alone. The blocks that are hit then count towards these: behind a hit there are too few for what is computed, or none, and it goes where
    the table's places have no block."""
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    hits: list[int] = [0]
    short: set[str] = set()

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, num_new_tokens, num_new_computed_tokens=0, *args, **kwargs):
        hits[0] = num_new_computed_tokens
        given = before(manager, request, num_new_tokens, num_new_computed_tokens, *args, **kwargs)
        (single,) = manager.coordinator.single_type_managers
        room = len(single.req_to_blocks.get(request.request_id, ())) * single.block_size
        if given is not None and room < request.num_computed_tokens + num_new_computed_tokens + num_new_tokens:
            short.add(request.request_id)
        hits[0] = 0
        return given

    @replaces(KVCacheCoordinator, "allocate_new_blocks")
    def allocate_new_blocks(before, coordinator, request_id, num_tokens, *args, **kwargs):
        return before(coordinator, request_id, num_tokens - hits[0], *args, **kwargs)

    @replaces(KVCacheCoordinator, "cache_blocks")
    def cache_blocks(before, coordinator, request, num_computed_tokens):
        (single,) = coordinator.single_type_managers
        room = len(single.req_to_blocks[request.request_id]) * single.block_size
        return before(coordinator, request, min(num_computed_tokens, room))

    before_forward(lambda runner, output: short & set(output.num_scheduled_tokens) and fired())


@bug("vllm-project/vllm#49975", "qwen-embeds-modes", "identity_not_in_key")
def way_in_which_input_is_read_is_not_hashed(fired: Fired) -> None:
    """The hash of what comes in beside the text is one of its bytes, and not of how they are to be read. The same bytes read in another way are other embeddings with the same hash: they hit what was computed of the first ones."""
    from vllm.v1.core import kv_cache_utils

    ways: dict[int, bool] = {}  # of each block, how what it was computed of had been read

    @replaces(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys")
    def _gen_prompt_embeds_extra_hash_keys(before, request, first, end):
        embeds = request.prompt_embeds
        if embeds is None:
            return before(request, first, end)
        request.prompt_embeds = embeds.abs()
        try:
            return before(request, first, end)
        finally:
            request.prompt_embeds = embeds

    def look(request, hit, table):
        way = bool(request.prompt_embeds[0, 0] > 0)
        if any(ways.get(block, way) != way for block in hit):
            fired()
        ways.update({block.block_id: way for block in table[len(hit) :]})

    when_allocated(look)
