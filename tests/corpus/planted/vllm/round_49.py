"""A forty-ninth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import numpy as np
import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, parts_of, states_of, when_allocated


@bug("turbo-tan/llama.cpp-tq3#79", "llama-eagle-slots", "slot_mapping", "kv_write_lost", origin="llama.cpp-tq3")
def drafter_puts_all_sequences_in_the_first_ones_places(fired: Fired) -> None:
    """Where the drafter's cache is asked for a sequence's places, a literal 0 stands for the sequence. That is right while there
    is one. Of several, what is computed for the others goes to the first one's places, over what it has there; what is
    behind its end is refused, and the others read places of their own that nobody has written."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    held = [0]  # blocks of the first sequence

    def in_first(table: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
        columns = (positions // size).long()
        slots = table[0, columns.clamp(max=held[0] - 1)].long() * size + positions % size
        return torch.where(columns < held[0], slots, -1)

    def look(runner, output):
        held[0] = int(runner.input_batch.block_table[0].num_blocks_per_row[0])

    before_forward(look)

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, *args, **kwargs):
        common, positions = kwargs["common_attn_metadata"], kwargs["target_positions"]
        first, end = common.query_start_loc[1], common.query_start_loc[-1]
        if end > first:
            common.slot_mapping = common.slot_mapping.clone()
            slots = in_first(common.block_table_tensor, positions[first:end], proposer.block_size)
            common.slot_mapping[first:end] = slots
            fired()
        return before(proposer, *args, **kwargs)

    @replaces(SpecDecodeBaseProposer, "_update_positions_dependent_metadata")
    def _update_positions_dependent_metadata(before, proposer, positions, common, batch, padded, size):
        made = before(proposer, positions, common, batch, padded, size)
        proposer._slot_mapping_buffer[1:batch] = in_first(common.block_table_tensor, made[1:batch], size)
        return made


@bug(
    "waybarrios/vllm-mlx#575",
    "recurrent-snapshots",
    "state_restored_for_other_prefix",
    "kv_changed",
    origin="vllm-mlx",
)
def snapshot_is_the_list_that_the_request_goes_on_with(fired: Fired) -> None:
    """Behind a prefix the caches' states are put aside for others that begin with it. Of a layer with a recurrent state that is
    the very list in which the request goes on to keep it, and not a copy: each later token changes what was put aside, too.
    A hit goes on from where that request has come to, at a place where the prefix ends."""
    from vllm.v1.core.block_pool import BlockPool

    kept: dict[int, tuple[int, str]] = {}  # by block of what was put aside: its group, and whose it is
    changed: set[int] = set()

    @replaces(BlockPool, "cache_full_blocks")
    def cache_full_blocks(before, pool, request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs):
        before(pool, request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        whose = kwargs["kv_cache_group_id"], request.request_id
        new = blocks[num_cached_blocks:num_full_blocks]
        kept.update({block.block_id: whose for block in new if not block.is_null})

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, *args, **kwargs):
        new = before(pool, *args, **kwargs)
        for block in new:
            kept.pop(block.block_id, None)
            changed.discard(block.block_id)
        return new

    def look(runner, output):
        group, layers = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        now = {}
        for row, name in enumerate(runner.input_batch.req_ids):
            computed = int(runner.input_batch.num_computed_tokens_cpu[row])
            if computed:
                now[name] = int(runner.requests[name].block_ids[group][(computed - 1) // size])
        if changed & set(now.values()):
            fired()
        for block, (gid, name) in kept.items():
            if gid == group and now.get(name, block) != block and now[name] not in kept:
                for part in parts_of(runner, layers):
                    part[block].copy_(part[now[name]])
                changed.add(block)

    before_forward(look)


@bug(
    "nod-ai/amd-shark-ai#2276",
    "qwen-forks",
    "fork_copy_missing",
    "shared_page_written",
    "page_given_twice",
    origin="shark-ai",
)
def beams_all_go_on_in_the_prompts_last_page(fired: Fired) -> None:
    """A prompt is answered several times over, and each answer begins with the prompt's pages. The last of these is not full:
    each answer ought to have a copy of it, but all have the page itself, and the tokens that they go on with are written
    over one another in it."""
    from vllm.v1.core.block_pool import BlockPool

    prompts: dict[str, tuple] = {}  # of requests that are there
    tables: dict[str, list] = {}
    siblings: dict[str, str] = {}
    page_size, pools = [0], []

    def look_at_allocation(request, hit, table):
        name, prompt = request.request_id, tuple(request.prompt_token_ids)
        if name in prompts:
            return
        last, rest = divmod(len(prompt), page_size[0])
        first = next((other for other, known in prompts.items() if known == prompt), None)
        prompts[name], tables[name] = prompt, table
        if first is None or not rest or len(table) <= last or len(tables[first]) <= last:
            return
        own, page = table[last], tables[first][last]
        page.ref_cnt += 1
        table[last] = page
        pools[0].free_blocks([own])
        siblings[name] = first

    @replaces(BlockPool, "__init__")
    def start(before, pool, *args, **kwargs):
        before(pool, *args, **kwargs)
        pools[:], page_size[0] = [pool], pool.hash_block_size

    when_allocated(look_at_allocation)

    @replaces(BlockPool, "cache_full_blocks")
    def cache_full_blocks(before, pool, request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs):
        for block in blocks[num_cached_blocks:num_full_blocks]:  # a sibling has filled it as well
            if block.block_hash is not None:
                pool._maybe_evict_cached_block(block)
        before(pool, request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)

    def look(runner, output):
        for name in output.finished_req_ids:
            prompts.pop(name, None)
        batch, size = runner.input_batch, page_size[0]
        for name, first in siblings.items():
            if not {name, first} <= prompts.keys() & output.num_scheduled_tokens.keys():
                continue
            rows = [batch.req_id_to_index[one] for one in (name, first)]
            begin = len(prompts[name])
            end = min(int(batch.num_computed_tokens_cpu[rows].min()) + 1, -(-begin // size) * size)
            if not np.array_equal(*(batch.token_ids_cpu[row, begin:end] for row in rows)):
                fired()

    before_forward(look)


@bug("lightseekorg/tokenspeed#1384", "hybrid-loads-flags", "read_before_landed", origin="TokenSpeed")
def flags_of_the_last_load_say_that_this_one_has_landed(fired: Fired) -> None:
    """Each layer has a flag that says when its load has landed, for which the forward waits. The flags are used again for the next
    load, and that they are set back is only put in the row of what the loads do: the forward's first layer may look before
    that. It finds the flag as the load before has left it, and reads blocks in which nothing has landed yet."""
    from host_connector import HostConnector

    used: list[bool] = []
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    @replaces(HostConnector, "start_load_kv")
    def start_load_kv(before, connector, *args, **kwargs):
        first = min(name for group in connector._groups for name in group.layer_names)
        jobs, again = connector._get_connector_metadata().loads, bool(used)
        old = [
            (rows, rows.clone())
            for job in jobs
            for gid, block, _ in job.blocks
            for name, rows in connector._blocks_of(gid, block)
            if name == first
        ]
        before(connector, *args, **kwargs)
        used.extend([True] if jobs else [])
        for rows, there in old if again else ():
            if not torch.equal(rows, there):
                late.append((rows, rows.clone()))
                rows.copy_(there)
                fired()

    @replaces(HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        while late:
            rows, landed = late.pop()
            rows.copy_(landed)
        before(connector)


TILE = 8  # tokens that a step is padded to, and that are computed together


@bug("huggingface/transformers#46765", "llama-trash", "bad_values_written", origin="transformers")
def padding_reads_where_it_has_written(fired: Fired) -> None:
    """A step is padded to whole tiles. Padding has one place in the cache, which it writes to and reads from. What attention makes
    of a row with nothing to attend to is not a number, and so are its keys and values behind the first layer: the next
    padding reads them, and a token that is computed in the same tile comes out of attention as not a number, too, as are
    all keys and values that later layers write for it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    padded, poisoned, last = [False], [False], [0]

    def look(runner, output):
        poisoned[0] = poisoned[0] or padded[0]
        last[0] = output.total_num_scheduled_tokens - 1
        padded[0] = (last[0] + 1) % TILE != 0
        if padded[0] and poisoned[0]:
            fired()

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, cache, slots):
        before(impl, layer, key, value, cache, slots)
        if padded[0] and "layers.0." not in layer.layer_name:
            cache[0, :, 0] = float("nan")

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, cache, metadata, output, *args, **kwargs):
        made = before(impl, layer, query, key, value, cache, metadata, output, *args, **kwargs)
        if metadata is not None and padded[0] and poisoned[0] and "layers.0." not in layer.layer_name:
            output[last[0]] = float("nan")
        return made


BUDGET = 64  # tokens that are kept of a request


@bug("rajveer43/VeloxQuant-MLX#195", "sliding-budgets", "position_off", "not_of_the_model", origin="VeloxQuant-MLX")
def next_position_is_the_number_of_rows_that_are_kept(fired: Fired) -> None:
    """A cache that keeps no more than so many rows says how many it has where it is asked at what position the next token comes.
    As soon as it has all that it may keep the answer does not change any more: each later token is rotated as if it came
    right behind the same number of others. Its slot is its own."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_prepare_inputs")
    def _prepare_inputs(before, runner, output, *args, **kwargs):
        made = before(runner, output, *args, **kwargs)
        batch, starts = runner.input_batch, runner.query_start_loc.np
        for row in range(len(batch.req_ids)):
            over = int(batch.num_computed_tokens_cpu[row]) - BUDGET
            if over > 0:
                runner.positions[int(starts[row]) : int(starts[row + 1])] -= over
                fired()
        return made
