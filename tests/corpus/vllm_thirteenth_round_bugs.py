"""A thirteenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces
from vllm_marks import before_forward


def _states(runner: Any) -> tuple[int, list[str]]:
    """Return the number of the group with recurrent states, and its layers."""
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if "Mamba" in type(group.kv_cache_spec).__name__:
            return number, group.layer_names
    raise LookupError("no recurrent states")


def _parts(runner: Any, layers: list[str]) -> list[Any]:
    """Return the tensors of all layers' states, block by block."""
    return [part for name in layers for part in runner.compilation_config.static_forward_context[name].kv_cache]


@bug("alibaba/MNN#4495", "delta", "state_restored_for_other_prefix", origin="MNN")
def decode_writes_the_saved_prefix_again(fired: Fired) -> None:
    """What is to be done with a prefix's file is not put back when the prompt has been saved, and every later step saves once more. The state
    that is kept for the prefix is that of an answer's last token."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    spoilt: set[int] = set()
    given: dict[int, int] = {}  # how often a block was given out
    seen: dict[tuple[str, int], int] = {}

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, *args, **kwargs):
        blocks = before(pool, *args, **kwargs)
        for block in blocks:
            given[block.block_id] = given.get(block.block_id, 0) + 1
        return blocks

    def look(runner, output):
        gid, _ = _states(runner)
        for new in output.scheduled_new_reqs:
            size = runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
            hit = -(-new.num_computed_tokens // size)
            if hit and new.block_ids[gid][hit - 1] in spoilt:
                fired()
            spoilt.difference_update(new.block_ids[gid][hit:])

    before_forward(look)

    @replaces(GPUModelRunner, "execute_model")
    def execute_model(before, runner, output, *args, **kwargs):
        done = before(runner, output, *args, **kwargs)
        if not output.total_num_scheduled_tokens:
            return done
        gid, layers = _states(runner)
        size = runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
        for name, count in output.num_scheduled_tokens.items():
            request = runner.requests[name]
            last = (request.num_computed_tokens + count - 1) // size
            saved = (request.num_prompt_tokens - 1) // size - 1
            blocks = request.block_ids[gid]
            if count == 1 and 0 <= saved < last and blocks[saved] and blocks[last]:
                times = given.get(blocks[saved], 0)
                if seen.setdefault((name, blocks[saved]), times) != times:
                    continue
                spoilt.add(blocks[saved])
                for part in _parts(runner, layers):
                    part[blocks[saved]] = part[blocks[last]].clone()
        return done


@bug("vllm-project/vllm#57605", "delta", "state_restored_for_other_prefix")
def state_of_a_block_that_is_not_there_yet(fired: Fired) -> None:
    """The block behind a boundary is not in a request's row yet when its first token is computed, and the entry still has what a row before had
    there. The token's state goes on from that block's, and is left in it."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    used: list[int] = []

    @replaces(GDNAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        made = before(builder, common_prefix_len, common, *args, **kwargs)
        places, size = made.non_spec_state_indices_tensor, builder.kv_cache_spec.block_size
        stale = [block for block in used if block not in places.tolist()]
        for row in range(made.num_decodes):
            if (int(common.seq_lens[row]) - 1) % size == 0 and stale:
                fired()
                places = made.non_spec_state_indices_tensor = places.clone()
                places[row] = stale[-1]
        used.extend(block for block in places.tolist() if block not in used)
        return made


@bug("vllm-project/vllm#51837", "delta", "groups_alias", "kv_changed")
def states_and_halves_of_kv_share_pages(fired: Fired) -> None:
    """Layers of attention and of states share a pool whose page is a block, and attention keeps all keys before all values: a block's keys are
    half of another page. What is written as a state there goes over the keys of a block that somebody else has."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    spoilt: set[int] = set()
    attends: dict[int, bool] = {}  # whether a block was given to the layers of attention last

    def look(runner, output):
        gid, _ = _states(runner)
        for name in output.num_scheduled_tokens:
            for group, blocks in enumerate(runner.requests[name].block_ids):
                for block in blocks:
                    if attends.get(block) is not (group != gid):
                        spoilt.discard(block)
                    attends[block] = group != gid
        if _has(runner, output, spoilt):
            fired()

    before_forward(look)

    @replaces(GPUModelRunner, "execute_model")
    def execute_model(before, runner, output, *args, **kwargs):
        done = before(runner, output, *args, **kwargs)
        if not output.total_num_scheduled_tokens:
            return done
        gid, layers = _states(runner)
        context = runner.compilation_config.static_forward_context
        state = context[layers[0]].kv_cache[1]
        first = runner.kv_cache_config.kv_cache_groups[_attention(runner)].layer_names[0]
        cache = context[first].kv_cache
        size = runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
        for name, count in output.num_scheduled_tokens.items():
            request = runner.requests[name]
            block = request.block_ids[gid][(request.num_computed_tokens + count - 1) // size]
            page = block + block % 2 * 2 - 1  # the other half of a pair of pages
            if attends.get(page):
                rows = cache[page].view(-1)
                part = state[block].to(cache.dtype).reshape(-1)[: rows.numel()]
                rows[: part.numel()] = part
                spoilt.add(page)
        return done


def _attention(runner: Any) -> int:
    """Return the number of the first group of attention."""
    return next(
        number
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
        if "Mamba" not in type(group.kv_cache_spec).__name__
    )


def _has(runner: Any, output: Any, blocks: set[int]) -> bool:
    """Whether a request of a step has one of certain blocks of attention among those that it has computed already."""
    batch, gid = runner.input_batch, _attention(runner)
    table = batch.block_table[gid]
    return any(
        blocks
        & set(table.block_table.np[row, : -(-int(batch.num_computed_tokens_cpu[row]) // table.block_size)].tolist())
        for row, name in enumerate(batch.req_ids)
        if name in output.num_scheduled_tokens
    )


@bug("vllm-project/vllm#48534", "llama-loads", "read_before_landed")
def forward_does_not_wait_for_a_layers_read(fired: Fired) -> None:
    """What a layer waits for before it reads its cache says nothing of reads that are still under way. The forward reads what stood in the
    blocks before, and what was to come lands when it is over."""
    import host_connector

    late: list = []

    @replaces(host_connector.HostConnector, "start_load_kv")
    def start_load_kv(before, connector, forward_context, **kwargs):
        jobs = connector._get_connector_metadata().loads
        if jobs:
            fired()
        late.extend(jobs)

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        while late:
            connector._load(late.pop())
        before(connector)
