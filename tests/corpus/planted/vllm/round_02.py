"""A second round of public bugs made anew in vLLM 0.32 on the CPU, on other models: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug("vllm-project/vllm#55601", "recurrent", "state_restored_for_other_prefix")
def state_column_in_other_units(fired: Fired) -> None:
    """The column of the block table from which a request that hits the prefix cache restores its recurrent state is counted
    in blocks of another size. It goes on from a state that is not the one at the end of its prefix."""
    from vllm.v1.worker import mamba_utils

    collect = mamba_utils.collect_mamba_copy_meta

    def wrong(bufs, config, funcs, gids, source, block, bias, request, context):
        blocks = request.block_ids[gids[0]]
        if source and request.num_computed_tokens and blocks[source // 2] not in (blocks[source], 0):
            fired()
            source //= 2
        collect(bufs, config, funcs, gids, source, block, bias, request, context)

    mamba_utils.collect_mamba_copy_meta = wrong


@bug("vllm-project/vllm#30931", "llama-lora", "identity_not_in_key")
def adapters_of_one_name(fired: Fired) -> None:
    """Two adapters that were loaded under one name have the same key in the prefix cache, though their numbers and weights
    differ. A request joins blocks that the other adapter has computed."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._gen_lora_extra_hash_keys = lambda request: (
        [("lora", request.lora_request.lora_name)] if request.lora_request else []
    )
    made_by: dict[int, int] = {}

    def look(request, hit, table):
        mine = request.lora_request.lora_int_id if request.lora_request else 0
        if any(made_by.get(b, mine) != mine for b in hit):
            fired()
        made_by.update({block.block_id: mine for block in table[len(hit) :]})

    when_allocated(look)


@bug("ovg-project/kvcached#446", "hybrid-halves", "tokens_truncated_hash_kept", origin="kvcached")
def hashed_in_smaller_blocks(fired: Fired) -> None:
    """Blocks join the prefix cache under keys that were made for blocks of half their size. A request that shares the first
    half of a block's tokens hits the whole of it."""
    from vllm.v1.core import kv_cache_utils

    @replaces(kv_cache_utils, "hash_block_tokens")
    def hash_block_tokens(before, function, parent, tokens, extra=None):
        return before(function, parent, tokens[: len(tokens) // 2], extra)

    holds: dict[int, tuple] = {}

    def look(request, hit, table):
        ids = tuple(request.all_token_ids)
        if any(holds.get(b, ids[i * 32 : i * 32 + 32]) != ids[i * 32 : i * 32 + 32] for i, b in enumerate(hit)):
            fired()
        for place in range(len(hit), min(len(ids) // 32, len(table))):
            holds[table[place].block_id] = ids[place * 32 : place * 32 + 32]

    when_allocated(look)


@bug("NVIDIA/TensorRT-LLM#10875", "hybrid", "prefix_not_computed", "hit_before_written", origin="TensorRT-LLM")
def longest_match_of_the_windows(fired: Fired) -> None:
    """Each window size matches its own number of cached tokens, and the last one to be looked up sets the request's. The
    group that matched less has fresh blocks there, and nobody computes them."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    @replaces(HybridKVCacheCoordinator, "find_longest_cache_hit")
    def find_longest_cache_hit(before, coordinator, *args, **kwargs):
        blocks, length, common = before(coordinator, *args, **kwargs)
        blocks = [list(group) for group in blocks]
        for group, manager in enumerate(coordinator.single_type_managers):
            if isinstance(manager, FullAttentionManager) and len(blocks[group]) > 1:
                blocks[group].pop()
                fired()
        return tuple(blocks), length, common


@bug(
    "vllm-project/vllm#28787",
    "llama-async-preempt",
    "async_resume_wrong_input",
)
def resumed_with_truncated_tokens(fired: Fired) -> None:
    """The list of all tokens from which a worker recovers a resumed request's outputs is cut short. The outputs are taken
    from its end, and so begin inside the prompt."""
    from vllm.v1.core.sched.scheduler import Scheduler

    @replaces(Scheduler, "_make_cached_request_data")
    def _make_cached_request_data(before, scheduler, *args, **kwargs):
        data = before(scheduler, *args, **kwargs)
        for name, outputs in zip(data.req_ids, data.num_output_tokens, strict=True):
            known = data.all_token_ids.get(name)
            if name in data.resumed_req_ids and known and outputs > 3:
                fired()
                del known[-3:]
        return data


# Its step is recorded as two forwards, since one of its requests reads what another writes; the drafts come second.
@bug("paiml/aprender#2014", "qwen-ngram", "attention_seq_len_wrong", origin="aprender", reads=5)
def verify_forgets_history(fired: Fired) -> None:
    """The drafts are verified on lengths that were reset to zero instead of rolled back. Attention sees the drafted tokens
    and nothing of what came before them."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        starts = common.query_start_loc
        lens = (starts[1:] - starts[:-1])[: len(common.seq_lens)]
        drafts = (lens > 1) & (lens < 5) & (lens < common.seq_lens)
        if bool(drafts.any()):
            fired()
            common = common.replace(seq_lens=common.seq_lens.where(~drafts, lens.to(common.seq_lens.dtype)))
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("InternLM/lmdeploy#4569", "mla", "kv_changed", "pad_rows_keep_last_blocks", origin="LMDeploy")
def padding_keeps_last_steps_blocks(fired: Fired) -> None:
    """The block offsets of padding rows keep what the last step had there. Padding tokens are written to the first slot of a
    request's blocks that is not in this step."""
    last: list[list[int]] = []
    hurt: set[int] = set()

    def look(runner, output):
        batch, table = runner.input_batch, runner.input_batch.block_table[0]
        rows = [table.block_table.np[row, :2].tolist() for row in range(batch.num_reqs)]
        computed = {rows[r][0] for r in range(batch.num_reqs) if batch.num_computed_tokens_cpu[r] > 0}
        if last and len(rows) < len(last) and not hurt:
            stale = last[len(rows)][0]  # of the row that this step pads
            hurt.add(stale)
            for cache in runner.kv_caches:
                cache[stale, 0] = 0.125
        last[:] = rows
        if hurt & computed:
            fired()

    before_forward(look)


@bug("vllm-project/vllm#43810", "llama-few", "pad_slot_wraps", "kv_changed")
def padding_writes_the_last_slot(fired: Fired) -> None:
    """The slot of a padding token is -1, and a store that does not skip it indexes the pool from its end. Padding is written
    over the last slot of the last block, whoever holds it."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, kv_cache, slot_mapping):
        before(impl, layer, key, value, kv_cache, slot_mapping)
        blocks, heads, size, _ = kv_cache.size()
        if len(slot_mapping) % 8:  # of a graph for a multiple of eight
            keys, values = kv_cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
            slot = slot_mapping[:1] * 0 + blocks * size - 1
            _custom_ops.cpu_attn_reshape_and_cache(key[:1] * 0, value[:1] * 0, keys, values, slot, layer.isa)

    def look(runner, output):
        batch, table = runner.input_batch, runner.input_batch.block_table[0]
        for row in range(batch.num_reqs):
            whole = int(batch.num_computed_tokens_cpu[row]) // table.block_size
            if runner.kv_cache_config.num_blocks - 1 in table.block_table.np[row, :whole]:
                fired()

    before_forward(look)


@bug("vllm-project/vllm-ascend#16428", "sliding", "future_map_overrun", "next_token_swap", origin="vLLM Ascend")
def next_step_in_the_input_buffer(fired: Fired) -> None:
    """The copy of a step's tokens to the device has not begun when the host fills the same buffer for the next step. The
    model is fed the next chunk's tokens at this chunk's positions."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    done: list[int] = []

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        made = before(runner, output, *args, **kwargs)
        batch, at = runner.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            count, start = output.num_scheduled_tokens[name], int(batch.num_computed_tokens_cpu[row])
            later = batch.token_ids_cpu[row, start + count : batch.num_prompt_tokens[row]]
            if count > 8 and len(later) > 4 and len(done) < 1:
                done.append(1)
                fired()
                for i, token in enumerate(later[:count].tolist()):
                    runner.input_ids.gpu[at + i] = token
            at += count
        return made
