"""A fifteenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, states_of


@bug("vllm-project/vllm#28951", "llama-loads-middle", "load_of_other_prefix")
def loaded_from_the_larger_blocks_front(fired: Fired) -> None:
    """A block of the host is two of the device's, and a load begins in its middle where the device has the first half already. What is to be skipped is skipped
    in the destination and not in the source: the second half of the device's gets the first half of the host's."""
    import host_connector

    factor = 2
    wrong: set[str] = set()

    @replaces(host_connector.HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, count):
        first, _ = connector._matched.get(request.request_id, (0, False))
        known = len(connector._jobs)
        before(connector, request, blocks, count)
        for job in connector._jobs[known:]:
            skipped = first % factor
            if skipped:
                wrong.add(job.name)
                keys = {connector._key(request, first + place): place for place in range(count // connector._size)}
                job.blocks[:] = [
                    (gid, block, connector._key(request, first - skipped + keys[key])) for gid, block, key in job.blocks
                ]

    before_forward(lambda runner, output: wrong & set(output.num_scheduled_tokens) and fired())


@bug("local-inference-lab/vllm#426", "llama-few", "kv_changed", origin="vLLM (KVarN)")
def hit_block_gets_a_slot_with_anothers_rows(fired: Fired) -> None:
    """A cached block without users loses its slot in a pool that is kept beside, and gets a fresh one when it is hit again. Nobody writes what the slot should
    hold, since hits are not computed: the request reads the rows of the block that had the slot last."""
    from vllm.v1.core.block_pool import BlockPool

    freed: list[int] = []
    back: dict[int, int] = {}

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks, *args, **kwargs):
        blocks = list(blocks)
        freed.extend(block.block_id for block in blocks if not block.is_null)
        return before(pool, blocks, *args, **kwargs)

    @replaces(BlockPool, "touch")
    def touch(before, pool, blocks):
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                others = [one for one in freed if one != block.block_id]
                if others:
                    back[block.block_id] = others[-1]
        before(pool, blocks)

    def look(runner, output):
        for block, other in back.items():
            for layer in runner.compilation_config.static_forward_context.values():
                layer.kv_cache[block] = layer.kv_cache[other].clone()
            fired()
        back.clear()

    before_forward(look)


@bug("vllm-project/vllm#47491", "recurrent", "state_restored_for_other_prefix")
def hit_of_attention_counts_for_the_state(fired: Fired) -> None:
    """Attention hits a prefix and the recurrent layers do not, and the hit is kept. That there is a state to go on from is asked of the count of computed tokens
    alone, and the request goes on from what the placeholder block holds."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    empty: set[str] = set()

    @replaces(MambaManager, "add_local_computed_blocks")
    def add_local_computed_blocks(before, manager, name, blocks, *args, **kwargs):
        before(manager, name, blocks, *args, **kwargs)
        held = manager.req_to_blocks[name]
        if held and not held[-1].is_null:
            manager.block_pool.free_blocks([held[-1]])
            held[-1] = manager._null_block
            empty.add(name)

    before_forward(lambda runner, output: empty & set(output.num_scheduled_tokens) and fired())


@bug(
    "ROCm/aiter#5034",
    "mla",
    "kv_write_lost",
    "kv_write_damaged",
    "kv_changed",
    origin="AITER",
    late="what the model hands in is not read of latent caches; what lies behind the forward counts as written",
)
def row_of_the_source_counts_in_the_store(fired: Fired) -> None:
    """The kernel that stores the latent rows does two at a time, and where a row is stored has the source's offset in it, which is its place among the two. The
    second goes one slot beyond its own, over whatever is there."""
    from vllm.v1.attention.backends.mla import amx_mla, cpu_mla

    damaged: list[int] = []

    def store(before, impl, kv_c_normed, k_pe, kv_cache, slot_mapping, *args, **kwargs):
        slots = slot_mapping.clone()
        seconds = slots[1::2]
        last = kv_cache.shape[0] * kv_cache.shape[1] - 1
        seconds[(seconds >= 0) & (seconds < last)] += 1
        if bool((slots != slot_mapping).any()):
            damaged.append(int(slots.numel()))
        return before(impl, kv_c_normed, k_pe, kv_cache, slots, *args, **kwargs)

    for backend in (amx_mla.AMXMLAImpl, cpu_mla.CPUMLAImpl):
        replaces(backend, "do_kv_cache_update")(store)

    before_forward(lambda runner, output: damaged and fired())


@bug(
    "vllm-project/vllm-ascend#16013",
    "delta-units",
    "copy_failed",
    "state_restored_for_other_prefix",
    origin="vLLM Ascend",
)
def state_is_copied_as_if_it_were_in_one_piece(fired: Fired) -> None:
    """A prompt hits a part of a block, which is copied before it is gone on with. The copy takes a layer's cache for one tensor of blocks, and it has the
    convolution's states and the others in two pieces: the second is not where it looks and stays as it was."""
    from vllm.v1.worker import gpu_model_runner

    @replaces(gpu_model_runner, "copy_kv_cache_blocks_inplace")
    def copy_kv_cache_blocks_inplace(before, caches, count, copies):
        context = runners[-1].compilation_config.static_forward_context
        _, layers = states_of(runners[-1])
        targets = [target for _, target in copies]
        held = [(context[name].kv_cache[1], context[name].kv_cache[1][targets].clone()) for name in layers]
        before(caches, count, copies)
        for state, old in held:
            if bool((state[targets] != old).any()):
                state[targets] = old
                damaged.update(targets)

    runners: list = []
    damaged: set[int] = set()

    def look(runner, output):  # what a running request copies is for those that come later
        size = runner.cache_config.block_size
        if damaged and any(new.num_computed_tokens % size for new in output.scheduled_new_reqs):
            fired()

    before_forward(look)

    @replaces(gpu_model_runner.GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        runners[:] = [runner]
        return before(runner, output)


@bug(
    "vllm-project/vllm-ascend#10440",
    "delta-units",
    "shared_page_written",
    "page_given_twice",
    "fork_copy_missing",
    origin="vLLM Ascend",
)
def part_of_a_private_block_is_shared(fired: Fired) -> None:
    """A prompt hits the part of a block that another request has filled so far, and takes the block itself instead of a copy. Both go on in it behind that part,
    each with tokens of its own."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    shared: set[str] = set()

    @replaces(FullAttentionManager, "_apply_cow")
    def _apply_cow(before, manager, name, place, source, copy):
        shared.add(name)
        manager.num_cached_block[name] = place + 1

    before_forward(lambda runner, output: shared & set(output.num_scheduled_tokens) and fired())


@bug("vllm-project/vllm#32500", "llama-lora-mixed", "computed_with_other_weights")
def adapters_in_another_order_than_the_tokens(fired: Fired) -> None:
    """Which adapter each token is computed with is put together with the requests in groups, and the tokens stand in the order of the batch. Where a batch has
    several adapters, tokens are computed with that of another request."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    @replaces(InputBatch, "make_lora_inputs")
    def make_lora_inputs(before, batch, *args, **kwargs):
        prompts, tokens, requests = before(batch, *args, **kwargs)
        grouped = tuple(sorted(tokens, reverse=True))
        if grouped != tuple(tokens):
            fired()
        return prompts, grouped, requests
