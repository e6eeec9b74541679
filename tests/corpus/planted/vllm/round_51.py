"""A fifty-first round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import hashlib

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug("vllm-project/vllm#16370", "llama-eagle-reserves", "commit_beyond_allocation")
def no_places_are_set_aside_for_what_the_drafter_stores(fired: Fired) -> None:
    """The drafter stores keys and values of its own drafts behind a request's last token, and no blocks are set aside for
    them. Where a block ends among the drafts, the next entry of the request's row is what an earlier, longer request has
    left there: drafts are stored in that block, over what whoever has it now keeps for the drafter."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.block_table import BlockTable

    room: list[int] = []  # by row: how many tokens its blocks hold

    @replaces(Scheduler, "__init__")
    def start(before, scheduler, *args, **kwargs):
        before(scheduler, *args, **kwargs)
        scheduler.num_lookahead_tokens = 0

    @replaces(BlockTable, "clear_row")
    def clear_row(before, table, row):
        table.num_blocks_per_row[row] = 0  # as it was then: what stands there is left

    @replaces(BlockTable, "move_row")
    def move_row(before, table, source, target):
        count = table.num_blocks_per_row[source]
        table.block_table.np[target, :count] = table.block_table.np[source, :count]
        table.num_blocks_per_row[target] = count

    def look(runner, output):
        table = runner.input_batch.block_table[0]
        held = table.num_blocks_per_row[: len(runner.input_batch.req_ids)]
        room[:] = [int(count) * table.block_size for count in held]

    before_forward(look)

    @replaces(SpecDecodeBaseProposer, "_update_positions_dependent_metadata")
    def _update_positions_dependent_metadata(before, proposer, positions, common, batch, padded, size):
        made = before(proposer, positions, common, batch, padded, size)
        slots = proposer._slot_mapping_buffer[:batch].tolist()
        places = made[:batch].tolist()
        if any(place >= most and slot >= size for place, most, slot in zip(places, room, slots, strict=False)):
            fired()
        return made


@bug("vllm-project/vllm#50558", "qwen-loads-appends", "load_of_other_prefix", "load_landed_elsewhere")
def blocks_are_paired_from_the_end_and_there_is_one_more_here(fired: Fired) -> None:
    """Who is to answer a prompt gets it with its first new token, and fetches those blocks that it does not have from who has
    computed the prompt. As many are taken from the end of the other side's list as are wanted here: when the new token
    begins a block there is one more here than there, and each block gets what belongs in the one before it."""
    from host_connector import HostConnector

    appended: set[str] = set()

    @replaces(HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, num_external_tokens):
        before(connector, request, blocks, num_external_tokens)
        if request.num_tokens % connector._size == 1:
            appended.add(request.request_id)

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        size = connector._size
        for gid, block, key in job.blocks if job.name in appended else ():
            for name, rows in connector._blocks_of(gid, block):
                kept = connector._store.get((name, key[:-size]))
                if min(len(one[2]) for one in job.blocks) > size and kept is not None:  # else none is here already
                    rows.copy_(kept)
                    fired()


WINDOW = 40  # of the model


@bug("apache/tvm#18630", "sliding-ragged", "window_read_wrong", origin="TVM")
def new_tokens_attend_to_each_other_without_a_window(fired: Fired) -> None:
    """What a prompt's new tokens make of what is in the cache and what they make of each other is computed by two kernels and
    merged. Only the first one is told of the sliding window: a token attends to all that come before it in its own
    chunk, no matter how far back."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    alone = [False]  # whether all there is in a step are prompts' first chunks
    rows: list[int] = []  # chunks that are longer than the window

    def look(runner, output):
        batch = runner.input_batch
        counts = [output.num_scheduled_tokens[name] for name in batch.req_ids]
        rows[:] = [row for row, count in enumerate(counts) if count > WINDOW]
        alone[0] = bool(rows) and not batch.num_computed_tokens_cpu[: len(counts)].any()
        if rows:
            fired()

    before_forward(look)

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        window = builder.window_size
        builder.window_size = -1 if alone[0] else window
        try:
            return before(builder, *args, **kwargs)
        finally:
            builder.window_size = window

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, cache, metadata, output, *args, **kwargs):
        window = impl.sliding_window
        impl.sliding_window = -1 if alone[0] else window
        try:
            made = before(impl, layer, query, key, value, cache, metadata, output, *args, **kwargs)
        finally:
            impl.sliding_window = window
        if metadata is None or alone[0]:
            return made
        heads = impl.num_heads, impl.num_kv_heads
        starts = metadata.query_start_loc.tolist()
        for row in rows:  # behind the first window of a chunk there is nothing but the chunk itself
            span = slice(starts[row], starts[row + 1])
            asked, keys, values = (
                part[span].view(-1, count, impl.head_size).transpose(0, 1)
                for part, count in ((query, heads[0]), (key, heads[1]), (value, heads[1]))
            )
            seen = torch.nn.functional.scaled_dot_product_attention(
                asked[None], keys[None], values[None], is_causal=True, scale=impl.scale, enable_gqa=True
            )[0].transpose(0, 1)
            output[span][WINDOW:] = seen[WINDOW:].reshape(output[span][WINDOW:].shape)
        return made


@bug("Dao-AILab/flash-attention#1974", "delta-mixes", "bad_values_written", origin="FlashAttention")
def states_of_another_type_lie_in_the_unused_part_of_a_page(fired: Fired) -> None:
    """Layers with a recurrent state and layers with attention have the same memory, by turns, and the states are of 32 bits and
    the values of 16. The kernel reads a request's last page to its end and weighs what is not used by 0: where a state has
    left bits there that are not a number as values of 16 bits, what comes of attention is not a number either."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    @replaces(CPUModelRunner, "_zero_block_ids")
    def _zero_block_ids(before, runner, blocks):
        """Do without what was made to avoid it."""

    def tail(cache, blocks, length):
        """Return the unused part of a request's last page: its values."""
        size = cache.shape[2]
        page = cache[int(blocks[(length - 1) // size])]
        flat = page.reshape(page.shape[0], 2 * size, page.shape[2] // 2)
        return flat[:, size + (length - 1) % size + 1 :]

    def look(runner, output):
        context = runner.compilation_config.static_forward_context
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            if not isinstance(group.kv_cache_spec, FullAttentionSpec):
                continue
            table = runner.input_batch.block_table[number].block_table.np
            for row, name in enumerate(runner.input_batch.req_ids):
                end = int(runner.input_batch.num_computed_tokens_cpu[row]) + output.num_scheduled_tokens.get(name, 0)
                caches = [context[layer].kv_cache for layer in group.layer_names]
                if not all(bool(tail(cache, table[row], end).isfinite().all()) for cache in caches):
                    fired()

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, cache, metadata, output, *args, **kwargs):
        made = before(impl, layer, query, key, value, cache, metadata, output, *args, **kwargs)
        starts = metadata.query_start_loc.tolist() if metadata is not None else []
        for row in range(len(starts) - 1):
            if not bool(tail(cache, metadata.block_table[row], int(metadata.seq_lens[row])).isfinite().all()):
                output[starts[row] : starts[row + 1]] = float("nan")
        return made


@bug("ROCm/ATOM#1358", "qwen-embeds-pictures", "identity_not_in_key", origin="ATOM")
def all_pictures_are_the_same_tokens(fired: Fired) -> None:
    """Blocks are found again by their tokens alone, and what stands for a part of a picture is the same token in each one.
    A question about one picture behind the same text hits what was computed of another, as long as both are of the
    same size."""
    from vllm.v1.core import kv_cache_utils
    from vllm_setups import PICTURE

    shown: dict[int, str] = {}  # by block: what it was computed of, from the prompt's first token on

    @replaces(kv_cache_utils, "_gen_prompt_embeds_extra_hash_keys")
    def _gen_prompt_embeds_extra_hash_keys(before, request, start, end):
        if request.prompt_embeds is None:
            return before(request, start, end)
        text = request.prompt_embeds[start:end].clone()
        text[text[:, -1] == PICTURE] = 0
        return [("prompt_embeds", hashlib.sha256(text.numpy().tobytes()).digest())]

    def look(request, hit, table):
        if request.prompt_embeds is None:
            return
        for place, block in enumerate(table):
            end = (place + 1) * 32
            if end > len(request.prompt_embeds):
                break
            right = hashlib.sha256(request.prompt_embeds[:end].contiguous().numpy().tobytes()).hexdigest()
            if place < len(hit) and shown.get(block.block_id, right) != right:
                fired()
            elif place >= len(hit):
                shown[block.block_id] = right

    when_allocated(look)


LATER = 3  # steps until a store has ended


@bug(
    "vllm-project/vllm#51637",
    "llama-loads-epochs",
    "page_leaked",
    origin="vLLM (Mooncake)",
    late="not found: where a connector holds blocks back there is no history of slots",
)
def store_of_before_it_was_put_back_counts_for_a_request_that_is_there_again(fired: Fired) -> None:
    """A request that ends keeps its blocks until no store of them is under way, of which there is a count by the request's
    name. When it is put back its count is thrown away, and a store from before still takes one off when it ends, from
    what the same name has later: the count is below zero and never zero again, and the blocks are never given back."""
    from host_connector import HostConnector

    count: dict[str, int] = {}
    under_way: list[list] = []  # whose store it is, and for how many steps more
    waits: set[str] = set()

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        for name in output.preempted_req_ids or ():
            count.pop(name, None)
        for job in meta.stores:
            count[job.name] = count.get(job.name, 0) + 1
            under_way.append([job.name, LATER])
        return meta

    @replaces(HostConnector, "request_finished")
    def request_finished(before, connector, request, blocks):
        before(connector, request, blocks)
        if count.get(request.request_id, 0):
            waits.add(request.request_id)
            return True, None
        return False, None

    @replaces(HostConnector, "get_finished")
    def get_finished(before, connector, finished):
        _, received = before(connector, finished)
        for one in list(under_way):
            one[1] -= 1
            if one[1] <= 0:
                count[one[0]] = count.get(one[0], 0) - 1
                under_way.remove(one)
        sent = {name for name in waits if count[name] == 0}
        waits.difference_update(sent)
        return sent or None, received

    def look(runner, output):
        if any(count[name] < 0 for name in waits):
            fired()

    before_forward(look)
