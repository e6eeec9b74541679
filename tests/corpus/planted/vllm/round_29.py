"""A twenty-ninth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, reads


@bug("novitalabs/pegaflow#395", "llama-loads-restart", "stored_wrong", origin="PegaFlow (vLLM)")
def count_of_what_can_be_stored_goes_on_over_a_preemption(fired: Fired) -> None:
    """A connector counts for itself how many tokens of a request have been scheduled, and stores the blocks that are full by this count. A request that is put back in the middle of its prompt begins anew and the count
    goes on where it was: blocks are stored when a part of them has not been computed, under the keys of all their tokens."""
    import host_connector

    counted: dict[str, int] = {}
    torn: set = set()  # keys

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        done = {name: connector._requests[name].num_computed_tokens for name in output.num_scheduled_tokens}
        for name, count in output.num_scheduled_tokens.items():
            request = connector._requests[name]
            counted[name] = counted.get(name, request.num_computed_tokens) + count
            request.num_computed_tokens = min(counted[name], request.num_tokens) - count
        made = before(connector, output)
        for name, count in done.items():
            connector._requests[name].num_computed_tokens = count
        for job in made.stores:
            end = done[job.name] + output.num_scheduled_tokens[job.name]
            torn.update(key for _, _, key in job.blocks if len(key) > end)
        if any(torn & {key for _, _, key in job.blocks} for job in made.loads):
            fired()
        return made


@bug(
    "vllm-project/vllm#26813",
    "llama-loads-refused",
    "failed_load_counted_loaded",
    "prefix_not_computed",
)
def blocks_of_a_failed_load_stay_in_the_prefix_cache(fired: Fired) -> None:
    """A request whose load fails is ended with an error. Its blocks were put into the prefix cache when they were given to it, and nobody takes those out that did not come: the next one with this beginning hits a block in which
    nothing has been stored."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    empty: set[int] = set()

    @replaces(KVCacheManager, "evict_blocks")
    def evict_blocks(before, manager, blocks):
        empty.update(blocks)

    before_forward(lambda runner, output: reads(runner, output, empty) and fired())


@bug("tenstorrent/tt-metal#45184", "hybrid-page16", "slot_mapping", "kv_write_lost", origin="TT-Transformers (vLLM)")
def window_layers_look_up_the_whole_position_in_a_short_table(fired: Fired) -> None:
    """The table of the layers with a window has as many entries as a window has blocks, and zeros behind them. A step of one token looks its slot up there by its place in the whole request: from the window's length on it is
    stored in block 0, which is nobody's."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    windows: dict[int, int] = {}  # by group

    def look(runner, output):
        windows.update(
            (number, group.kv_cache_spec.sliding_window)
            for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            if "Sliding" in type(group.kv_cache_spec).__name__
        )

    before_forward(look)

    @replaces(MultiGroupBlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, tables, count, starts, positions):
        before(tables, count, starts, positions)
        for group, window in windows.items():
            table = tables[group]
            entries = -(-window // table.block_size)
            for row in range(count):
                first, last = int(starts[row]), int(starts[row + 1])
                place = int(positions[first])
                if last - first == 1 and place // table.block_size >= entries:
                    fired()
                    table.slot_mapping.gpu[first] = place % table.block_size


@bug(
    "vllm-project/tpu-inference#2779",
    "recurrent-back",
    "state_restored_for_other_prefix",
    origin="TPU inference (vLLM)",
)
def state_of_a_resumed_request_is_not_reset(fired: Fired) -> None:
    """The recurrent state of a request that is new begins with zeros. One that was put back is not new when it comes again: it is computed from its first token on, and goes on from what lies in the place that it is given,
    another request's state or its own from before."""
    from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

    again: set[int] = set()  # rows

    def look(runner, output):
        batch = runner.input_batch
        back = output.scheduled_cached_reqs.resumed_req_ids
        again.clear()
        again.update(
            row for row, name in enumerate(batch.req_ids) if name in back and not batch.num_computed_tokens_cpu[row]
        )

    before_forward(look)

    @replaces(ShortConvAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        made = before(builder, *args, **kwargs)
        for row in again:
            if row >= made.num_decodes and made.has_initial_states_p is not None:
                fired()
                made.has_initial_states_p[row - made.num_decodes] = True
        return made


@bug("ROCm/ATOM#408", "qwen-chunks", "attention_seq_len_wrong", origin="ATOM")
def length_of_a_chunk_is_the_whole_prompts(fired: Fired) -> None:
    """A prompt is computed in chunks, and what attention is told of a chunk's length is that of the whole prompt. The chunk's tokens look at places behind them, where nothing has been stored yet, and at
    blocks that the request has not been given."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_build_attention_metadata")
    def build(before, runner, *args, **kwargs):
        batch = runner.input_batch
        given = kwargs.get("num_scheduled_tokens") or {}
        for row, name in enumerate(batch.req_ids):
            prompt = int(batch.num_prompt_tokens[row])
            if int(batch.num_computed_tokens_cpu[row]) + given.get(name, prompt) < prompt:
                fired()
                runner.seq_lens[row] = prompt
                runner.optimistic_seq_lens_cpu[row] = prompt
        return before(runner, *args, **kwargs)


@bug("jundot/omlx#2443", "qwen-suffixes", "prefix_not_computed", "kv_write_lost", origin="oMLX")
def hit_is_dropped_and_its_length_is_kept(fired: Fired) -> None:
    """A request that hits its beginning, and has a long rest to compute, goes another way than the others: it gets blocks of its own for all that it has, and the blocks that it has hit are dropped. It goes on behind the
    hit all the same, and the beginning of its context has never been computed."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    holes: set[str] = set()

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, count, hit=0, blocks=None, *args, **kwargs):
        hit = kwargs.pop("num_new_computed_tokens", hit)
        blocks = kwargs.pop("new_computed_blocks", blocks)
        if not hit or request.num_tokens - hit < LONG_REST:
            return before(
                manager, request, count, *args, num_new_computed_tokens=hit, new_computed_blocks=blocks, **kwargs
            )
        given = before(manager, request, hit + count, *args, **kwargs)
        if given is not None:
            holes.add(request.request_id)
        return given

    before_forward(lambda runner, output: holes & set(output.num_scheduled_tokens) and fired())


LONG_REST = 24  # tokens
