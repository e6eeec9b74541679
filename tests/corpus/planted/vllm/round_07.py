"""A seventh round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, reads, when_allocated


@bug("vllm-project/vllm#49377", "llama", "tokens_truncated_hash_kept")
def hash_of_a_token_that_was_cut_off(fired: Fired) -> None:
    """A session is cut back inside a block and goes on with another token, and the block's hash stays that of the token that was
    cut off. The block joins the prefix cache under it, and a request with the old token hits the new one's K and V."""
    from vllm.v1.core.sched.scheduler import Scheduler

    kept: dict[str, set[int]] = {}

    @replaces(Scheduler, "add_request")
    def add_request(before, scheduler, request):
        if not kept:
            kept[request.request_id] = set()
            last = scheduler.block_size - 1
            tokens = list(request.prompt_token_ids)
            tokens[last] = 3 + (tokens[last] + 101) % 597
            request.prompt_token_ids, request._all_token_ids[last] = tokens, tokens[last]
        before(scheduler, request)

    def look(request, hit, table):
        if request.request_id in kept:
            kept[request.request_id].add(table[0].block_id)
        elif any(blocks & set(hit) for blocks in kept.values()):
            fired()

    when_allocated(look)


@bug("vllm-project/vllm#47724", "llama-lora", "computed_with_other_weights")
def adapter_loaded_into_a_slot_in_use(fired: Fired) -> None:
    """An adapter that is added while others decode is put into a slot that a request in flight computes with. From then on its
    tokens are computed with another tenant's weights."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    steps: list[int] = []

    @replaces(InputBatch, "make_lora_inputs")
    def make_lora_inputs(before, batch, scheduled, sampled):
        prompt, tokens, wanted = before(batch, scheduled, sampled)
        if batch.num_reqs and {one.lora_int_id for one in wanted} == {2}:
            steps.append(1)
            if len(steps) > 6:
                if len(steps) > 7:
                    fired()
                first = int(scheduled[0])
                tokens = (1,) * first + tokens[first:]
        return prompt, tokens, wanted


@bug("vllm-project/vllm#55227", "llama-churn", "attention_table_overwritten")
def strangers_counted_as_sharers(fired: Fired) -> None:
    """Blocks that are yet to be given back have users still while their requests are gone, and a block with as many users as there
    are requests is taken for a prefix of all. Attention reads the first request's blocks for every one."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.core.sched.scheduler import Scheduler

    gone: list[str] = []

    @replaces(Scheduler, "_free_request")
    def free_request(before, scheduler, request, *args, **kwargs):
        gone.append(request.request_id)
        return before(scheduler, request, *args, **kwargs)

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        rows = metadata.block_table
        if gone and rows.shape[0] > 1 and int(common.seq_lens.min()) > builder.block_size:
            metadata.block_table = rows.clone()
            metadata.block_table[:, 0] = rows[0, 0]
            if not bool((rows[:, 0] == rows[0, 0]).all()):
                fired()
        return metadata


@bug(
    "vllm-project/vllm#32255",
    "llama-loads-late",
    "abort_frees_during_transfer",
    "load_landed_elsewhere",
)
def aborted_while_it_is_loaded(fired: Fired) -> None:
    """A request is aborted while its blocks are loaded beside the forwards, and the blocks are given back at once. The load lands
    in them when they are another request's."""
    import host_connector
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.request import RequestStatus

    aborted: set[str] = set()
    landed: set[int] = set()

    @replaces(LLMEngine, "step")
    def step(before, engine):
        scheduler = engine.engine_core.engine_core.scheduler
        waiting = [r for r in scheduler.requests.values() if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        if waiting and scheduler.running and not aborted:
            aborted.add(waiting[0].request_id)
            engine.abort_request([waiting[0].request_id], internal=True)
        return before(engine)

    @replaces(Scheduler, "_free_request")
    def free_request(before, scheduler, request, delay_free_blocks=False):
        return before(scheduler, request, delay_free_blocks=delay_free_blocks and request.request_id not in aborted)

    @replaces(Scheduler, "_update_from_kv_xfer_finished")
    def update_from_kv_xfer_finished(before, scheduler, output):
        if output.finished_recving:
            output.finished_recving = {name for name in output.finished_recving if name in scheduler.requests}
        before(scheduler, output)

    @replaces(host_connector.HostConnector, "start_load_kv")
    def start_load_kv(before, connector, *args, **kwargs):
        for job in connector._get_connector_metadata().loads:
            job.left = 9
        before(connector, *args, **kwargs)

    @replaces(host_connector.HostConnector, "_load")
    def load(before, connector, job):
        before(connector, job)
        if job.name in aborted:
            landed.update(block for _, block, _ in job.blocks)

    before_forward(lambda runner, output: reads(runner, output, landed) and fired())


@bug(
    "NVIDIA/TensorRT-LLM#8830",
    "llama-loads",
    "load_of_other_prefix",
    "host_copy_overwritten",
    origin="TensorRT-LLM",
)
def front_of_the_queue_instead_of_the_match(fired: Fired) -> None:
    """A matched block on the host is at the front of its free queue when room is made for it, and what it changes places with has
    K and V of its own. The request goes on from those, which are another prompt's."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def load(before, connector, job):
        wanted = [key for *_, key in job.blocks]
        others = [key for _, key in connector._store if key[:32] != wanted[0][:32] and len(key) == 32]
        if others:
            fired()
            job = host_connector.Job(job.name, [(*job.blocks[0][:2], others[0]), *job.blocks[1:]])
        before(connector, job)


@bug("tenstorrent/vllm-tt-plugin#68", "llama", "next_token_swap", origin="vllm-tt-plugin")
def sampled_tokens_by_row(fired: Fired) -> None:
    """Sampled tokens are put in the state of the requests by their rows in the live batch, which are not those of the forward that
    sampled them. Two requests go on from one another's tokens."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    steps: list[int] = []

    @replaces(GPUModelRunner, "_bookkeeping_sync")
    def bookkeeping(before, runner, *args, **kwargs):
        made = before(runner, *args, **kwargs)
        batch = runner.input_batch
        if batch.num_reqs > 2 and all(len(runner.requests[name].output_token_ids) > 1 for name in batch.req_ids[:2]):
            steps.append(1)
            ends = [int(batch.num_tokens_no_spec[row]) - 1 for row in (0, 1)]
            first, second = (batch.token_ids_cpu[row, end].item() for row, end in enumerate(ends))
            if len(steps) > 2 and first != second:
                for row, token in enumerate((second, first)):
                    batch.token_ids_cpu[row, ends[row]] = token
                    runner.requests[batch.req_ids[row]].output_token_ids[-1] = token
                runner.swapped = True
        return made

    before_forward(lambda runner, output: getattr(runner, "swapped", False) and fired())
