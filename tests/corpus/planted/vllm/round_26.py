"""A twenty-sixth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, reads


@bug("vllm-project/vllm-ascend#16664", "llama", "slot_mapping", origin="vLLM Ascend")
def slots_of_eight_bytes_are_read_as_of_four(fired: Fired) -> None:
    """Slots are kept as numbers of eight bytes, and the kernel that stores K and V of a batch with a prompt reads numbers of four. Each token gets the lower or the upper half of the number of one that
    stands further in front: every other one goes to slot 0, and the rest where the first half of the batch belongs."""
    import torch
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, query_start_loc, positions):
        before(table, num_reqs, query_start_loc, positions)
        starts = query_start_loc[: num_reqs + 1]
        if int(starts.diff().max()) > 1:
            fired()
            right = table.slot_mapping.gpu[: int(starts[-1])]
            right.copy_(right.to(torch.int64).view(torch.int32)[: right.numel()].clone())


@bug("vllm-project/vllm#57356", "qwen-ngram", "future_map_overrun", "next_token_swap", "async_resume_wrong_input")
def drafts_are_checked_and_what_stood_in_their_places_is_fed(fired: Fired) -> None:
    """Drafts are put into the list of tokens, and that their places have tokens now is not noted. The model is fed what stood there in the step before, and the drafts themselves are checked: one that is accepted has
    K and V of another token."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    last: list = []
    fed: dict[str, dict[int, int]] = {}  # by request and place

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            done = int(batch.num_computed_tokens_cpu[row])
            for place, token in fed.pop(name, {}).items():
                if place < done and int(batch.token_ids_cpu[row, place]) != token:
                    fired()
        made = before(runner, output, *args, **kwargs)
        ids, end = runner.input_ids.gpu, 0
        for row, name in enumerate(batch.req_ids):
            end += output.num_scheduled_tokens[name]
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            place = int(batch.num_computed_tokens_cpu[row]) + output.num_scheduled_tokens[name] - drafts
            for i in range(end - drafts, end):
                if last:
                    ids[i] = last[0][i]
                fed.setdefault(name, {})[place + i - end + drafts] = int(ids[i])
        last[:] = [ids.clone()]
        return made


@bug("vllm-project/vllm#16160", "llama", "kv_changed", origin="vLLM (R-KV)")
def what_is_kept_of_a_long_request_is_moved_together_in_shared_blocks(fired: Fired) -> None:
    """When a request has become long, some of its tokens are dropped, and K and V of those that are kept move up to its front, over what was there. Its first blocks are those of a prefix that others have as well: they
    find other tokens in them than they have computed or hit."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    kept: dict[int, dict[int, tuple]] = {}  # by layer and slot: K and V as they lie there
    long: list[list[int]] = []  # blocks of requests that are in their last step
    moved: set[int] = set()

    def look(runner, output):
        if reads(runner, output, moved):
            fired()
        long.clear()
        for name, count in output.num_scheduled_tokens.items():
            request = runner.requests[name]
            answered, most = len(request.output_token_ids), request.sampling_params.max_tokens
            if count == 1 and answered == most - 1 and request.num_tokens > 80:
                long.append(request.block_ids[0][:2])

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, kv_cache, slot_mapping):
        before(impl, layer, key, value, kv_cache, slot_mapping)
        mine = kept.setdefault(id(impl), {})
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                mine[slot] = key[i].clone(), value[i].clone()

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
        made = before(impl, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)
        if attn_metadata is not None:
            size, mine = int(kv_cache.shape[2]), kept.get(id(impl), {})
            for blocks in long:
                slots = [block * size + i for block in blocks for i in range(size)]
                keys, values = (torch.stack([mine[slot][half] for slot in slots[::2]]) for half in (0, 1))
                impl.do_kv_cache_update(layer, keys, values, kv_cache, torch.tensor(slots[:size]))
                moved.add(blocks[0])
        return made


@bug(
    "NVIDIA/TensorRT-LLM#12648",
    "llama-twins",
    "free_too_early",
    "eviction_of_locked_page",
    "page_given_twice",
    "double_free",
    origin="TensorRT-LLM",
)
def block_is_held_by_its_key_and_let_go_by_its_number(fired: Fired) -> None:
    """A block that joins the prefix cache is held for a step, so that it can be stored elsewhere. It is looked up by its key, and where another block has the same tokens already, that one is held; let go is the request's
    own, which is free from then on while the request goes on with it."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    held: list = []
    loose: dict[int, str] = {}  # by number, whose it is
    given: set[int] = set()

    @replaces(BlockPool, "cache_full_blocks")
    def cache_full_blocks(before, pool, *, request, blocks, num_cached_blocks, num_full_blocks, **kwargs):
        ends = {"num_cached_blocks": num_cached_blocks, "num_full_blocks": num_full_blocks}
        before(pool, request=request, blocks=blocks, **ends, **kwargs)
        for number in range(num_cached_blocks, num_full_blocks):
            found = pool.get_cached_block(request.block_hashes[number], [0])
            if found:
                pool.touch(found)
                held.append((pool, request.request_id, found[0], blocks[number]))

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks):
        before(pool, [block for block in blocks if block.ref_cnt > 0])  # the count does not go below nought

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, count):
        blocks = before(pool, count)
        given.update(block.block_id for block in blocks if block.block_id in loose)
        return blocks

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler, *args, **kwargs):
        for pool, name, found, own in held:
            pool.free_blocks([own])
            if found is not own and own.ref_cnt == 0:
                loose[own.block_id] = name
        held.clear()
        return before(scheduler, *args, **kwargs)

    def look(runner, output):
        for block in given:
            name = loose[block]
            if name in output.num_scheduled_tokens and block in runner.requests[name].block_ids[0]:
                fired()

    before_forward(look)


@bug("vllm-project/vllm#50731", "llama-streaming", "async_resume_wrong_input", "future_map_overrun", "next_token_swap")
def further_input_grows_the_list_that_the_worker_has(fired: Fired) -> None:
    """The worker is given the scheduler's own list of a request's prompt, and further input that comes while the request is still answered makes it longer. When the request is put back and its row is made anew, what it
    was answered is put behind the longer list: it is computed with the next input in the places of its answer."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    further: dict[str, list[int]] = {}
    right: dict[str, dict[int, int]] = {}  # by place, what belongs there

    @replaces(Scheduler, "add_request")
    def add_request(before, scheduler, request):
        if request.request_id in scheduler.requests and request.resumable:
            further[request.request_id] = list(request.prompt_token_ids)
        before(scheduler, request)

    @replaces(Scheduler, "_update_request_as_session")
    def update(before, scheduler, session, update):
        before(scheduler, session, update)
        further.pop(session.request_id, None)
        right.pop(session.request_id, None)

    @replaces(InputBatch, "add_request")
    def add_row(before, batch, request):
        row = before(batch, request)
        answered, first = list(request.output_token_ids), request.num_prompt_tokens
        if answered and request.req_id in further:
            found = (further[request.req_id] + answered)[: len(answered)]
            batch.token_ids_cpu[row, first : first + len(answered)] = found
            right[request.req_id] = dict(enumerate(answered, first))
        return row

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            done = int(batch.num_computed_tokens_cpu[row])
            for place in range(done, done + output.num_scheduled_tokens[name]):
                token = int(batch.token_ids_cpu[row, place])
                if right.get(name, {}).get(place, token) != token:
                    fired()

    before_forward(look)
