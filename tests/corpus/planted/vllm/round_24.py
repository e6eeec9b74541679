"""A twenty-fourth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import itertools

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("gittensor-ai-lab/sparkinfer#1071", "delta", "state_restored_for_other_prefix", origin="sparkinfer")
def later_part_of_a_prompt_begins_with_an_empty_state(fired: Fired) -> None:
    """The scan over a prompt's tokens begins with a state of noughts, wherever its first token stands. A prompt that comes in several parts, or behind a prefix that is there already, goes on in its attention and
    begins anew in its recurrent layers."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    @replaces(GDNAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        made = before(builder, *args, **kwargs)
        if made.num_prefills and made.has_initial_state is not None:
            prompts = made.has_initial_state[made.num_decodes :]
            if bool(prompts.any()):
                fired()
            made.has_initial_state = made.has_initial_state.clone()
            made.has_initial_state[made.num_decodes :] = False
            if made.prefill_has_initial_state is not None:
                made.prefill_has_initial_state = made.has_initial_state[made.num_decodes :]
        return made


@bug("flashinfer-ai/flashinfer#4059", "qwen-ngram", "attention_seq_len_wrong", origin="FlashInfer")
def queries_of_a_verification_lie_as_far_apart_as_a_tile(fired: Fired) -> None:
    """When all requests of a step have as many tokens, their queries are looked for at multiples of that number, and the kernel rounds it up to what fits in its tile. The queries lie close together: from the second
    request on they are looked for too far behind, and some are answered by the K and V of the request before."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    tile = 5  # tokens

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common_attn_metadata, *args, **kwargs):
        common = common_attn_metadata
        starts = common.query_start_loc
        counts = starts.diff()[: common.num_reqs].tolist()
        if common.num_reqs < 2 or counts[0] == 1 or counts[0] >= tile or len(set(counts)) > 1:
            return before(builder, common_prefix_len, common, *args, **kwargs)
        wrong = starts.clone()
        for row in range(common.num_reqs):
            wrong[row] = min(row * tile, int(starts[common.num_reqs]))
        fired()
        return before(builder, common_prefix_len, common.replace(query_start_loc=wrong), *args, **kwargs)


@bug("NVIDIA/TensorRT-LLM#12682", "llama-parts", "prefix_not_computed", origin="TensorRT-LLM")
def hit_shortens_a_part_of_a_prompt_and_moves_it_on_as_well(fired: Fired) -> None:
    """A part of a prompt begins behind what is hit: whoever counts tokens takes that for a part that is shorter, and whoever keeps the place moves the whole part on. Where more parts follow, the next one begins by the
    length of the hit behind the end of the first, and nobody computes what lies between."""
    from vllm.v1.core.sched.scheduler import Scheduler

    ahead: set[str] = set()

    @replaces(Scheduler, "_update_after_schedule")
    def _update_after_schedule(before, scheduler, output):
        before(scheduler, output)
        for new in output.scheduled_new_reqs:
            request = scheduler.requests[new.req_id]
            missing = request.num_tokens - 1 - request.num_computed_tokens
            if new.num_computed_tokens and missing > 0:
                request.num_computed_tokens += min(new.num_computed_tokens, missing)
                ahead.add(new.req_id)

    before_forward(lambda runner, output: ahead & set(output.scheduled_cached_reqs.req_ids) and fired())


@bug("vllm-project/vllm-ascend#6344", "llama", "slot_mapping", origin="vLLM Ascend")
def decodes_beside_a_prompt_take_their_slots_from_a_list_with_gaps(fired: Fired) -> None:
    """A decode is computed by two ranks and stored by one, and in the list of slots each decode has its slot and behind it a gap for the other rank. Beside a prompt the gaps are not taken out, and as many entries are
    taken from the front as there are decodes: the second stores nothing, and the third goes to the slot of the second."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, query_start_loc, positions):
        before(table, num_reqs, query_start_loc, positions)
        starts = query_start_loc[: num_reqs + 1].tolist()
        decodes = [first for first, end in itertools.pairwise(starts) if end - first == 1]
        if len(decodes) < 2 or len(decodes) == num_reqs:
            return
        slots = table.slot_mapping.gpu
        right = slots[decodes].tolist()
        for i, token in enumerate(decodes):
            slots[token] = -1 if i % 2 else right[i // 2]
        fired()


@bug(
    "NVIDIA/TensorRT-LLM#2983",
    "hybrid",
    "stale_prefix_hit",
    "shared_page_written",
    "page_given_twice",
    origin="TensorRT-LLM",
)
def window_goes_round_over_what_the_prefix_cache_has(fired: Fired) -> None:
    """A layer with a window writes in a circle: what comes next goes into the block that has just left the window. Whether a request has gone round, so that its blocks must not be found any more, is asked of the largest
    window of all layers, and those with a smaller one went round long ago: their first blocks stay in the prefix cache, and who begins like that request hits what it has written since."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    left: dict[tuple[int, str], list] = {}  # blocks of each group and request that are behind its window
    went: set[tuple[int, str]] = set()  # those that have gone round
    over: set[int] = set()  # the blocks that were taken once more, whose keys stay

    @replaces(SlidingWindowManager, "_remove_blocks_in_range")
    def remove(before, manager, name, first, last):
        blocks = manager.req_to_blocks.get(name, [])
        for i in range(first, min(last, len(blocks))):
            if not blocks[i].is_null:
                left.setdefault((id(manager), name), []).append(blocks[i])
                blocks[i] = manager._null_block

    @replaces(SlidingWindowManager, "allocate_new_blocks")
    def allocate_new_blocks(before, manager, name, num_tokens, *args, **kwargs):
        blocks, again, mine = manager.req_to_blocks[name], [], left.get((id(manager), name), [])
        while mine and len(blocks) * manager.block_size < num_tokens:
            block = mine.pop(0)
            blocks.append(block)
            again.append(block)
            went.add((id(manager), name))
            over.add(block.block_id)
        return [*again, *before(manager, name, num_tokens, *args, **kwargs)]

    @replaces(SlidingWindowManager, "cache_blocks")
    def cache_blocks(before, manager, request, *args, **kwargs):
        if (id(manager), request.request_id) not in went:
            before(manager, request, *args, **kwargs)

    @replaces(SlidingWindowManager, "pop_blocks_for_free")
    def pop_blocks_for_free(before, manager, name):
        return [*before(manager, name), *left.pop((id(manager), name), [])]

    @replaces(SlidingWindowManager, "add_local_computed_blocks")
    def add_local_computed_blocks(before, manager, name, blocks, num_computed, *args, **kwargs):
        reads_from = num_computed - manager.sliding_window + 1
        for i, block in enumerate(blocks):
            if block.block_id in over and i * manager.block_size >= reads_from:
                fired()
        before(manager, name, blocks, num_computed, *args, **kwargs)


@bug("vllm-project/vllm#27414", "hybrid", "not_of_the_model", "computed_with_other_weights", recorded=False)
def whole_batch_is_rotated_as_its_longest_request_is(fired: Fired) -> None:
    """A model has one set of rotations for short texts and another for long ones, and which of them a step takes is asked of its highest position. When one request comes over the border, K of all others is rotated by the
    other set from then on, and so is its own: what they have in the cache was rotated by the first."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    border = 96
    long: dict[int, object] = {}

    def rotate(before, rope, positions, *args, **kwargs):
        if int(positions.max()) < border or not positions.any():
            return before(rope, positions, *args, **kwargs)
        short = rope.cos_sin_cache
        if id(rope) not in long:
            base, rope.base = rope.base, rope.base * 16
            long[id(rope)] = rope._compute_cos_sin_cache().to(short)
            rope.base = base
        rope.cos_sin_cache = long[id(rope)]
        try:
            return before(rope, positions, *args, **kwargs)
        finally:
            rope.cos_sin_cache = short

    replaces(RotaryEmbedding, "forward_native")(rotate)
    replaces(RotaryEmbedding, "forward_cpu")(rotate)

    def look(runner, output):
        batch = runner.input_batch
        computed = [int(batch.num_computed_tokens_cpu[row]) for row in range(batch.num_reqs)]
        ends = [done + output.num_scheduled_tokens[name] for done, name in zip(computed, batch.req_ids, strict=True)]
        if max(ends) > border and any(computed):
            fired()

    before_forward(look)
