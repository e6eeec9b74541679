"""A thirtieth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "ModelEngine-Group/unified-cache-management#283",
    "qwen-resumes",
    "async_resume_wrong_input",
    "next_token_swap",
    origin="UCM (vLLM)",
)
def resumed_request_has_lost_its_last_token_in_the_runner(fired: Fired) -> None:
    """When a request comes again that had been put back, the runner cuts its answer to the length that the scheduler knows, and cuts off one token too many. The scheduler counts it, and in its place the request is
    fed what another one has left in this row."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    lost: dict[str, int] = {}  # token

    @replaces(GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            if answer := runner.requests[name].output_token_ids:
                lost[name] = answer.pop()
        return before(runner, output)

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            count = output.num_scheduled_tokens.get(name, 0)
            place = int(batch.num_tokens_no_spec[row])
            if name in lost and int(batch.num_computed_tokens_cpu[row]) + count > place:
                if int(batch.token_ids_cpu[row, place]) != lost[name]:
                    fired()
                del lost[name]

    before_forward(look)


@bug("vllm-project/vllm-omni#6739", "hybrid-weights", "cache_kept_over_new_weights", origin="vLLM-Omni")
def reset_of_the_prefix_cache_is_still_to_be_written(fired: Fired) -> None:
    """Whoever trains a model gives the engine new weights and has the prefix cache emptied. The call is taken, says nothing and does nothing: requests that go on with what has been asked before hit K and V of the old
    weights."""
    from vllm.entrypoints.llm import LLM
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    pools, old = [], set()  # blocks of the old weights

    @replaces(LLM, "reset_prefix_cache")
    def reset_prefix_cache(before, llm, *args, **kwargs):
        old.update(block.block_id for pool in pools for block in pool.blocks if block.block_hash is not None)
        return True

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, *args, **kwargs):
        if pool not in pools:
            pools.append(pool)
        blocks = before(pool, *args, **kwargs)
        old.difference_update(block.block_id for block in blocks)
        return blocks

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        hit = kwargs.get("new_computed_blocks")
        if given is not None and hit is not None and old & {b.block_id for group in hit.blocks for b in group}:
            fired()
        return given


@bug(
    "vllm-project/tpu-inference#2431",
    "delta-reused",
    "state_restored_for_other_prefix",
    origin="TPU inference (vLLM)",
)
def new_prompt_begins_with_the_state_that_lies_there(fired: Fired) -> None:
    """The kernel of the recurrent layers is not told which prompts have a state to begin with, and takes what lies in the place of each. A new prompt goes on from the last state of whoever had this place before it."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    @replaces(GDNAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        made = before(builder, *args, **kwargs)
        if made.has_initial_state is not None:
            layers = builder.vllm_config.compilation_config.static_forward_context
            parts = [part for name in builder.layer_names for part in layers[name].kv_cache]
            places = made.non_spec_state_indices_tensor.reshape(len(made.has_initial_state), -1)[:, 0].tolist()
            for place, begins in zip(places, made.has_initial_state.tolist(), strict=True):
                if not begins and any(part[place].any() for part in parts):
                    fired()
            for known in (made.has_initial_state, made.prefill_has_initial_state):
                if known is not None:
                    known.fill_(True)
        return made


@bug("vllm-project/vllm#52709", "delta-churn", "kv_changed", "layer_changed")
def zeroing_of_a_new_block_begins_where_the_layer_lies(fired: Fired) -> None:
    """Blocks that are given out anew are filled with zeros, layer by layer. For a layer that does not lie at the beginning, what is filled begins by so much behind the block's beginning, and ends by so much behind its end: the
    first tokens of the next block are gone, and that is another request's."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    wiped: set[int] = set()

    @replaces(CPUModelRunner, "_zero_block_ids")
    def _zero_block_ids(before, runner, blocks):
        context = runner.compilation_config.static_forward_context
        for group in runner.kv_cache_config.kv_cache_groups:
            if not isinstance(group.kv_cache_spec, FullAttentionSpec):
                continue
            for number, name in enumerate(group.layer_names):
                kv = context[name].kv_cache
                stride, last = kv.stride(0), kv.shape[0]
                offset = stride * number // len(group.layer_names)
                for block in blocks:
                    length = min(stride, last * stride - block * stride - offset)
                    begin = kv.storage_offset() + block * stride + offset
                    filled = torch.as_strided(kv, (length,), (1,), begin)
                    if filled[stride - offset :].any():
                        wiped.add(block + 1)
                    filled.zero_()
        wiped.difference_update(blocks)

    def look(runner, output):
        batch = runner.input_batch
        for group, table in zip(runner.kv_cache_config.kv_cache_groups, batch.block_table.block_tables, strict=True):
            if isinstance(group.kv_cache_spec, FullAttentionSpec):
                for row, name in enumerate(batch.req_ids):
                    computed = -(-int(batch.num_computed_tokens_cpu[row]) // table.block_size)
                    if name in output.num_scheduled_tokens and wiped & {*table.block_table.np[row, :computed].tolist()}:
                        fired()

    before_forward(look)
