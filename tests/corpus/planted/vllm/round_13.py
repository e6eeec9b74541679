"""A thirteenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from typing import Any

from bugs import Fired, bug, replaces

from .marks import before_forward, parts_of, reads, states_of


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
        gid, _ = states_of(runner)
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
        gid, layers = states_of(runner)
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
                for part in parts_of(runner, layers):
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
        gid, _ = states_of(runner)
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
        gid, layers = states_of(runner)
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


@bug("vllm-project/vllm#50276", "mla", "kv_changed")
def zeroed_with_a_stride_too_small(fired: Fired) -> None:
    """Blocks that are given out are zeroed before they are used, and where one begins is worked out by the bytes of a page and not by what lies
    between two of them. The nought goes over a block that somebody has."""
    from vllm.v1.core.block_pool import BlockPool

    asked: list[int] = []
    zeroed: set[int] = set()

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, *args, **kwargs):
        blocks = before(pool, *args, **kwargs)
        asked.extend(block.block_id for block in blocks)
        return blocks

    def look(runner, output):
        caches = [layer.kv_cache for layer in runner.compilation_config.static_forward_context.values()]
        for block in asked:
            place = block * 3 // 4
            if place and place not in asked:
                for cache in caches:
                    cache[place] = 0
                zeroed.add(place)
        zeroed.difference_update(asked)
        asked.clear()
        if reads(runner, output, zeroed):
            fired()

    before_forward(look)


@bug("vllm-project/vllm#51595", "llama-loads-late", "read_before_landed")
def first_of_two_connectors_says_that_it_is_done(fired: Fired) -> None:
    """Two connectors load parts of a request beside the forwards, and that one has ended is passed on as it comes. The request goes on when the first
    says so, and the second one's part has yet to land."""
    import host_connector

    early: set[str] = set()
    late: set[str] = set()

    @replaces(host_connector.HostConnector, "get_finished")
    def get_finished(before, connector, finished):
        for job in list(connector._under_way):
            if job.left == 1 and job.name not in early and len(job.blocks) > 1:
                half = len(job.blocks) // 2
                early.add(job.name)
                connector._under_way.append(host_connector.Job(job.name, job.blocks[half:], True, left=3))
                job.blocks = job.blocks[:half]
        sent, done = before(connector, finished)
        left = {job.name for job in connector._under_way}
        late.update(name for name in done or () if name in left)
        return sent, {name for name in done or () if name in left or name not in early} or None

    before_forward(lambda runner, output: late & set(output.num_scheduled_tokens) and fired())


@bug("vllm-project/vllm#26385", "llama-async-preempt", "async_resume_wrong_input")
def resumed_with_the_tokens_that_the_runner_knew(fired: Fired) -> None:
    """A request is preempted while its last token is still on its way, and the runner is not told its tokens anew when it comes back. In the place of
    that token it is fed what its row held there before."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stale: dict[str, tuple[int, int]] = {}

    @replaces(GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        rows = runner.input_batch.token_ids_cpu.copy() if output.scheduled_cached_reqs.resumed_req_ids else None
        made = before(runner, output)
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            request = runner.requests[name]
            if request.output_token_ids:
                place = request.num_prompt_tokens + len(request.output_token_ids) - 1
                stale[name] = (place, int(rows[runner.input_batch.req_id_to_index[name], place]))
        return made

    def look(runner, output):
        batch = runner.input_batch
        for name, (place, token) in list(stale.items()):
            row = batch.req_id_to_index.get(name)
            count = output.num_scheduled_tokens.get(name, 0)
            first = 0 if row is None else int(batch.num_computed_tokens_cpu[row])
            if row is not None and first <= place < first + count:
                if int(batch.token_ids_cpu[row, place]) != token:
                    batch.token_ids_cpu[row, place] = token
                    fired()
                del stale[name]

    before_forward(look)


@bug("vllm-project/vllm#43059", "llama-loads-alone", "failed_load_counted_loaded")
def load_of_a_step_without_a_forward_is_passed_over(fired: Fired) -> None:
    """A connector loads nothing where there is no attention to run, and a step in which all requests wait for their loads has none. It says that it is
    done all the same, and the requests go on from blocks that nobody filled."""
    import host_connector

    missed: set[str] = set()

    @replaces(host_connector.HostConnector, "start_load_kv")
    def start_load_kv(before, connector, forward_context, **kwargs):
        jobs = connector._get_connector_metadata().loads
        if forward_context.attn_metadata is not None or not jobs:
            before(connector, forward_context, **kwargs)
            return
        for job in jobs:
            missed.add(job.name)
            connector._under_way.append(host_connector.Job(job.name, [], True))

    before_forward(lambda runner, output: missed & set(output.num_scheduled_tokens) and fired())
