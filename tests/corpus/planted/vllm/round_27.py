"""A twenty-seventh round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, states_of, when_adopted


@bug("vllm-project/vllm#44250", "llama-lora-loads", "identity_not_in_key", origin="vLLM (LMCache)")
def key_of_the_host_knows_no_adapter(fired: Fired) -> None:
    """What is kept on the host is found by tokens and salt, and the adapter that a request runs with is not asked for. A tenant with another adapter loads K and V that the first one's adapter has made."""
    import host_connector

    owners: dict[tuple, str] = {}  # by key, whose adapter made what lies there

    def whose(request) -> str:
        return request.lora_request.lora_name if request.lora_request else ""

    @replaces(host_connector.HostConnector, "_key")
    def _key(before, connector, request, place):
        key = tuple(request.all_token_ids[: (place + 1) * connector._size])
        return (request.cache_salt, *key) if request.cache_salt else key

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        made = before(connector, output)
        for job in made.stores:
            owners.update({key: whose(connector._requests[job.name]) for _, _, key in job.blocks})
        for job in made.loads:
            request = connector._requests[job.name]
            if any(owners[key] != whose(request) for _, _, key in job.blocks):
                fired()
        return made


@bug("vllm-project/vllm#47724", "llama-lora-added", "computed_with_other_weights")
def adapters_change_places_and_the_batch_is_the_same(fired: Fired) -> None:
    """The list that says in which place each token's adapter lies is made anew when the batch has changed. An adapter that is added while requests run takes another's place, and the next step puts both of theirs where there is room:
    the batch is as it was, the list is kept, and each tenant is computed with the other's adapter."""
    from vllm.lora.model_manager import LoRAModelManager

    layout: list[tuple] = []  # places, as they were when the list was made

    @replaces(LoRAModelManager, "_set_adapter_mapping")
    def make_list(before, manager, mapping):
        layout[:] = [tuple(manager.lora_index_to_id)]
        before(manager, mapping)

    @replaces(LoRAModelManager, "set_adapter_mapping")
    def set_adapter_mapping(before, manager, mapping):
        manager._last_slot_layout = tuple(manager.lora_index_to_id)
        if manager._last_mapping == mapping and layout and layout[0] != tuple(manager.lora_index_to_id):
            fired()
        before(manager, mapping)


@bug("Blaizzy/mlx-vlm#1741", "mrope-chunks", "position_off", origin="MLX-VLM")
def each_chunk_is_fed_where_the_prompt_begins(fired: Fired) -> None:
    """A model whose positions have several dimensions gets those of the whole prompt, computed once. When the prompt is computed in chunks, each takes as many as it has tokens from their front: all chunks but the first
    are rotated as if they were where the prompt begins."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_calc_mrope_positions")
    def _calc_mrope_positions(before, runner, output):
        before(runner, output)
        at = 0
        for row, name in enumerate(runner.input_batch.req_ids):
            request = runner.requests[name]
            done, count = int(runner.input_batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens[name]
            part = min(count, max(0, len(request.prompt_token_ids) - done))
            if part and done:
                fired()
                runner.mrope_positions.cpu[:, at : at + part] = request.mrope_positions[:, :part]
            at += count


@bug("vllm-project/vllm-omni#6442", "llama-sleeps", "kv_changed", "stale_prefix_hit", origin="vLLM-Omni")
def what_sleeps_forgets_its_memory_and_not_its_keys(fired: Fired) -> None:
    """An engine that sleeps gives the memory of its cache away and has new memory, all zeros, when it wakes up. The keys of the prefix cache are kept: requests that come then hit blocks in which there is nothing."""
    from vllm.v1.core.block_pool import BlockPool

    empty: set = set()

    @replaces(BlockPool, "reset_prefix_cache")
    def reset_prefix_cache(before, pool):
        empty.update(block.block_id for block in pool.blocks if block.block_hash is not None)
        return True

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, count):
        blocks = before(pool, count)
        empty.difference_update(block.block_id for block in blocks)
        return blocks

    when_adopted(empty, fired)


@bug("vllm-project/vllm#32255", "llama-loads-aborts", "abort_frees_during_transfer")
def blocks_of_an_aborted_load_go_to_others_while_it_comes(fired: Fired) -> None:
    """A request that is aborted while it waits for what it loads gives its blocks back at once, and nobody stops the load. It lands some steps later in blocks that another request has been given and has written by then."""
    import host_connector
    from vllm.v1.core.sched.scheduler import Scheduler

    gone: set[str] = set()
    landed: set[int] = set()

    @replaces(Scheduler, "_free_request")
    def _free_request(before, scheduler, request, delay_free_blocks=False):
        if delay_free_blocks:
            gone.add(request.request_id)
        return before(scheduler, request)

    @replaces(Scheduler, "_update_from_kv_xfer_finished")
    def _update_from_kv_xfer_finished(before, scheduler, output):
        output.finished_recving = {name for name in output.finished_recving or () if name in scheduler.requests}
        before(scheduler, output)

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        if job.name in gone:
            landed.update(block for _, block, _ in job.blocks)

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            table, done = batch.block_table[0], int(batch.num_computed_tokens_cpu[row])
            mine = table.block_table.np[row, : -(-done // table.block_size)].tolist()
            if landed & set(mine) and name in output.num_scheduled_tokens:
                fired()

    before_forward(look)


@bug("RBLN-SW/vllm-rbln#1128", "qwen-ngram-five", "commit_beyond_allocation", origin="vLLM RBLN")
def blocks_are_given_for_the_tokens_and_not_for_the_drafts(fired: Fired) -> None:
    """A request is given blocks for the tokens that it has, and its drafts are not counted. Where they begin a block, its table has none there yet: they are stored where the row's old end points, and
    are not found again if they are accepted."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    lost: set[tuple[str, int]] = set()  # places of drafts that had no block

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, count, *args, **kwargs):
        drafts = max(0, request.num_computed_tokens + count - request.num_tokens)
        given = before(manager, request, count - drafts, *args, **kwargs)
        if given is not None:  # what was not accepted is computed now
            before_this = request.num_computed_tokens
            lost.difference_update({one for one in lost if one[0] == request.request_id and one[1] >= before_this})
        if drafts and given is not None:
            own = manager.coordinator.single_type_managers[0]
            room = len(own.req_to_blocks[request.request_id]) * own.block_size
            end = request.num_computed_tokens + count
            lost.update((request.request_id, place) for place in range(room, end))
        return given

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            done = int(batch.num_computed_tokens_cpu[row])
            if any(one == name and place < done for one, place in lost):
                fired()

    before_forward(look)


@bug(
    "syv-ai/qwen38-27b-rtx3090#43",
    "delta-long",
    "state_restored_for_other_prefix",
    origin="vLLM (chunked prefill of hybrid models)",
)
def state_is_left_behind_when_a_chunk_begins_a_block(fired: Fired) -> None:
    """A step that begins a block goes on from the state that the block before it ends with, which is copied into the new one first. That is left out for steps of several tokens, as if each of them were a prompt's first: a chunk
    goes on from what another request has left in its block."""
    from vllm.v1.worker import mamba_utils

    counts: dict[str, int] = {}

    @replaces(mamba_utils, "preprocess_mamba")
    def preprocess_mamba(before, output, *args, **kwargs):
        counts.clear()
        counts.update(output.num_scheduled_tokens)
        return before(output, *args, **kwargs)

    @replaces(mamba_utils, "collect_mamba_copy_meta")
    def collect_mamba_copy_meta(before, *args):
        if counts[args[7].req_id] == 1:
            before(*args)

    def look(runner, output):
        group, _ = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            done, count = int(batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens[name]
            if done and count > 1 and (done - 1) // size != (done + count - 1) // size:
                fired()

    before_forward(look)


@bug("vllm-project/vllm#28787", "llama-chunks-back", "async_resume_wrong_input", origin="vLLM (async scheduling)")
def tokens_of_a_resumed_request_end_with_its_first_chunk(fired: Fired) -> None:
    """A request that has been put back comes again with its tokens, so that the worker knows its answer, and gets them only up to the end of the chunk that is computed now. The last of these are taken for its answer: the places
    behind the prompt have tokens of the prompt."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    right: dict[str, list[int]] = {}  # all tokens of requests that have come again

    @replaces(Scheduler, "_make_cached_request_data")
    def _make_cached_request_data(before, scheduler, *args):
        made = before(scheduler, *args)
        counts = args[2]
        for name, tokens in made.all_token_ids.items():
            right[name] = list(tokens)
            made.all_token_ids[name] = tokens[: scheduler.requests[name].num_computed_tokens + counts[name]]
        return made

    @replaces(GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        again = output.scheduled_cached_reqs
        for name, answered in zip(again.req_ids, again.num_output_tokens, strict=True):
            if answered and name in again.all_token_ids:  # as a worker does that has not kept the answer
                runner.requests[name].output_token_ids = again.all_token_ids[name][-answered:]
        return before(runner, output)

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            done = int(batch.num_computed_tokens_cpu[row])
            end = min(done + output.num_scheduled_tokens[name], len(right.get(name, ())))
            if end > done and batch.token_ids_cpu[row, done:end].tolist() != right[name][done:end]:
                fired()

    before_forward(look)
