"""A twenty-fifth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug("NeuraLegion/shainet#110", "llama", "kv_changed", "kv_write_damaged", origin="SHAInet")
def keys_are_rotated_once_more_whenever_they_are_read(fired: Fired) -> None:
    """Keys go into the cache rotated for their places, and the code that reads them rotates all that is there as if it were not. It does so in place: each forward of a request turns the keys of its prefix on by their
    places once more, and whoever shares that prefix finds them so."""
    import torch
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    ropes: list = []
    kept: dict[int, dict[int, tuple]] = {}  # by layer and slot: K and V as they lie there

    @replaces(RotaryEmbedding, "__init__")
    def init(before, rope, *args, **kwargs):
        before(rope, *args, **kwargs)
        ropes.append(rope)

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, kv_cache, slot_mapping):
        before(impl, layer, key, value, kv_cache, slot_mapping)
        mine = kept.setdefault(id(impl), {})
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                mine[slot] = key[i].clone(), value[i].clone()

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
        if attn_metadata is not None and ropes:
            size, places = int(kv_cache.shape[2]), {}
            counts = attn_metadata.query_start_loc.diff().tolist()
            for row, (end, count) in enumerate(zip(attn_metadata.seq_lens.tolist(), counts, strict=False)):
                blocks = attn_metadata.block_table[row].tolist()
                places |= {blocks[place // size] * size + place % size: place for place in range(end - count)}
            found = [(slot, place) for slot, place in places.items() if slot in kept.get(id(impl), {})]
            if found:
                keys, values = (torch.stack([kept[id(impl)][slot][half] for slot, _ in found]) for half in (0, 1))
                turned, _ = ropes[0].forward_native(torch.tensor([place for _, place in found]), keys.flatten(1), None)
                slots = torch.tensor([slot for slot, _ in found])
                impl.do_kv_cache_update(layer, turned.view_as(keys), values, kv_cache, slots)
        return before(impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

    def look(runner, output):
        batch = runner.input_batch
        if any(int(batch.num_computed_tokens_cpu[row]) for row in range(batch.num_reqs)):
            fired()

    before_forward(look)


@bug("openvinotoolkit/openvino#37381", "llama", "kv_changed", "kv_write_damaged", origin="OpenVINO")
def scales_are_moved_by_the_strides_of_the_larger_batch(fired: Fired) -> None:
    """When a batch has more rows than it ever had, what is kept moves into a larger buffer, and the scales that go with it are taken from the old one by the strides of the new one. The first row's are right; the K and V
    of the others are read and kept by scales that are not theirs from then on."""
    most = [0]

    def look(runner, output):
        batch = runner.input_batch
        count, grown = batch.num_reqs, 0 < most[0] < batch.num_reqs
        most[0] = max(most[0], count)
        if not grown:
            return
        table = batch.block_table[0]

        def held(row: int) -> set[int]:
            computed = int(batch.num_computed_tokens_cpu[row])
            return set(table.block_table.np[row, : -(-computed // table.block_size)].tolist())

        moved = set().union(*(held(row) for row in range(1, count))) - held(0)
        for cache in runner.kv_caches:
            for block in moved:
                cache[block] *= 1.375
        if moved:
            fired()

    before_forward(look)


@bug("PaddlePaddle/FastDeploy#5502", "llama-aborts", "stale_prefix_hit", origin="FastDeploy")
def what_a_preempted_request_had_is_cached_when_its_output_comes(fired: Fired) -> None:
    """When outputs are handled, the blocks that a request has filled join the prefix cache. One that has been put back has given its blocks away and is not left out: until it runs again they are entered for its tokens,
    whoever has them by then, and it hits what others have written there."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    had: list[tuple] = []  # request, and the blocks that it had
    pools: list = []

    @replaces(Scheduler, "_preempt_request")
    def _preempt_request(before, scheduler, request, *args, **kwargs):
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        full = request.num_computed_tokens // manager.block_size
        had.append((request, list(manager.req_to_blocks[request.request_id])[:full]))
        pools[:] = [scheduler.kv_cache_manager.block_pool]
        before(scheduler, request, *args, **kwargs)

    @replaces(Scheduler, "update_from_output")
    def update_from_output(before, scheduler, *args, **kwargs):
        made = before(scheduler, *args, **kwargs)
        had[:] = [one for one in had if one[0].status == RequestStatus.PREEMPTED]
        for request, blocks in had:
            for key, block in zip(request.block_hashes, blocks, strict=False):
                whole = make_block_hash_with_group_id(key, 0)
                if block.block_hash != whole and pools[0].cached_block_hash_to_block.get_one_block(whole) is None:
                    pools[0].cached_block_hash_to_block.insert(whole, block)
        return made

    def look(request, hit, _):
        for key, number in zip(request.block_hashes, hit, strict=False):
            if pools and pools[0].blocks[number].block_hash != make_block_hash_with_group_id(key, 0):
                fired()

    when_allocated(look)


@bug("vllm-project/vllm#41133", "llama", "future_map_overrun", "async_resume_wrong_input", "next_token_swap")
def end_of_a_prompt_in_chunks_is_set_back_to_what_is_computed(fired: Fired) -> None:
    """Where a request's known tokens end in its row is set anew in each step from how many have been computed, and in the middle of a prompt that is less than the prompt has. What is sampled behind the last chunk is put
    where that chunk began, and the decode takes its token from behind the prompt, where nobody has put one."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        made = before(runner, output)
        batch, cached = runner.input_batch, output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            row = batch.req_id_to_index[name]
            if computed < int(batch.num_prompt_tokens[row]):
                batch.num_tokens_no_spec[row] = computed
        return made

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            request, first = runner.requests[name], int(batch.num_computed_tokens_cpu[row])
            own = [*request.prompt_token_ids, *request.output_token_ids]
            fed = batch.token_ids_cpu[row, first : first + output.num_scheduled_tokens[name]].tolist()
            if fed != own[first : first + len(fed)]:
                fired()

    before_forward(look)


@bug("vllm-project/vllm-gaudi#1370", "recurrent", "state_restored_for_other_prefix", origin="vLLM Gaudi")
def prompts_of_a_batch_all_keep_the_last_ones_state(fired: Fired) -> None:
    """Of the states behind the chunks of a batch the last one is kept, and when the batch has several prompts, it is that of the last one for all of them. The others go on from it."""
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
    from vllm.v1.kv_cache_interface import MambaSpec

    wrong: set[int] = set()

    @replaces(causal_conv1d, "causal_conv1d_fn_cpu")
    def causal_conv1d_fn_cpu(before, x, weight, bias, states, starts, slots, *args, **kwargs):
        made = before(x, weight, bias, states, starts, slots, *args, **kwargs)
        numbers = slots.tolist()
        for slot in numbers[:-1]:
            states[slot].copy_(states[numbers[-1]].clone())
            wrong.add(slot)
        wrong.discard(numbers[-1])
        return made

    def look(runner, output):
        batch = runner.input_batch
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            if not isinstance(group.kv_cache_spec, MambaSpec):
                continue
            table = batch.block_table[number]
            for row in range(batch.num_reqs):
                done = int(batch.num_computed_tokens_cpu[row])
                if done and int(table.block_table.np[row, (done - 1) // table.block_size]) in wrong:
                    fired()

    before_forward(look)


@bug(
    "NVIDIA/TensorRT-LLM#18957",
    "hybrid",
    "slot_mapping",
    "attention_table_overwritten",
    "groups_alias",
    origin="TensorRT-LLM",
)
def pages_of_smaller_layers_are_addressed_by_the_stride_of_the_larger(fired: Fired) -> None:
    """Layers whose pages are half as large are given the table that was made for the others, whose numbers count pages of theirs. What belongs in a page is written twice as far into the pool and read from there, over
    the page that has that number."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    config: list = []

    def elsewhere(pages):
        twice = pages * 2
        return twice.where(twice < config[0].num_blocks, pages)

    @replaces(MultiGroupBlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, tables, num_reqs, query_start_loc, positions):
        before(tables, num_reqs, query_start_loc, positions)
        if config:
            table = tables[1]
            slots = table.slot_mapping.gpu[: positions.shape[0]]
            right = slots.clone()
            pages = elsewhere(right // table.block_size) * table.block_size + right % table.block_size
            slots.copy_(pages.where(right >= 0, right))
            if bool((slots != right).any()):
                fired()

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common_attn_metadata, *args, **kwargs):
        common = common_attn_metadata
        if config and builder.layer_names[0] in config[0].kv_cache_groups[1].layer_names:
            common = common.replace(block_table_tensor=elsewhere(common.block_table_tensor))
        return before(builder, common_prefix_len, common, *args, **kwargs)

    def look(runner, output):
        config[:] = [runner.kv_cache_config]

    before_forward(look)
