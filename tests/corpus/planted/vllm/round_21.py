"""A twenty-first round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug(
    "modelscope/ms-swift#6343",
    "llama-lora-reload",
    "cache_kept_over_new_weights",
    "identity_not_in_key",
    origin="ms-swift",
)
def cache_is_emptied_for_the_base_model_alone(fired: Fired) -> None:
    """The prefix cache is emptied when the model's weights are synchronized, and it is forgotten where only an adapter's are. The adapter comes again under its name with other
    weights, and its requests hit what the old ones have made."""
    from vllm.v1.core.sched.scheduler import Scheduler

    old: set[int] = set()
    made: set[int] = set()

    @replaces(Scheduler, "reset_prefix_cache")
    def reset_prefix_cache(before, scheduler, *args, **kwargs):
        old.update(made)
        return True

    def look(request, hit, table):
        if old & set(hit):
            fired()
        fresh = {block.block_id for block in table[len(hit) :]}
        old.difference_update(fresh)
        made.update(fresh)

    when_allocated(look)


@bug(
    "vllm-project/vllm#39833",
    "recurrent-short",
    "future_map_overrun",
    "async_resume_wrong_input",
    "next_token_swap",
)
def slot_of_a_new_request_keeps_the_last_sampled_token(fired: Fired) -> None:
    """The token that each request goes on with stands in a slot, which is filled behind a prefill and not when a new request is given it. One whose prompt is there already but for
    its last token begins with a decode, and is fed what the one before in its slot has sampled last."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    slots: dict[str, int] = {}
    sampled_last: dict[int, int] = {}

    @replaces(GPUModelRunner, "_prepare_input_ids")
    def _prepare_input_ids(before, runner, output, num_reqs, count, ends):
        before(runner, output, num_reqs, count, ends)
        for name in output.finished_req_ids:
            slots.pop(name, None)
        for row, name in enumerate(runner.input_batch.req_ids[:num_reqs]):
            if name not in slots:
                slots[name] = min(set(range(len(slots) + 1)) - set(slots.values()))
            request = runner.requests[name]
            ready = request.num_computed_tokens == request.num_prompt_tokens - 1 > 0
            stale = sampled_last.get(slots[name])
            if ready and output.num_scheduled_tokens[name] == 1 and stale is not None:
                last = int(ends[row]) - 1
                if int(runner.input_ids.gpu[last]) != stale:
                    fired()
                runner.input_ids.gpu[last] = stale

    @replaces(GPUModelRunner, "_bookkeeping_sync")
    def _bookkeeping_sync(before, runner, output, sampled, *args, **kwargs):
        tokens, chunks = sampled.sampled_token_ids[:, 0].tolist(), runner.discard_request_mask.np
        for row, name in enumerate(runner.input_batch.req_ids):
            if not chunks[row]:
                sampled_last[slots[name]] = tokens[row]
        return before(runner, output, sampled, *args, **kwargs)


@bug("vllm-project/vllm#56525", "recurrent-together", "state_restored_for_other_prefix", "hit_before_written", reads=2)
def state_is_hit_in_the_step_that_is_to_write_it(fired: Fired) -> None:
    """A block with a state joins the prefix cache when the step that is to write it is put together, and what keeps others away from it until then is cleared too early. Another
    request goes on from it at once, and what it begins with is what the block held before."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    to_write: set[int] = set()  # blocks whose states this step is to write

    @replaces(MambaManager, "new_step_starts")
    def new_step_starts(before, manager):
        before(manager)
        to_write.clear()

    @replaces(MambaManager, "cache_blocks")
    def cache_blocks(before, manager, request, *args, **kwargs):
        held = manager.req_to_blocks[request.request_id]
        old = {block.block_id for block in held if block.block_hash is not None}
        before(manager, request, *args, **kwargs)
        to_write.update(block.block_id for block in held if block.block_hash is not None and block.block_id not in old)
        manager.cached_blocks_this_step.clear()

    @replaces(MambaManager, "add_local_computed_blocks")
    def add_local_computed_blocks(before, manager, name, blocks, *args, **kwargs):
        if blocks and blocks[-1].block_id in to_write:
            fired()
        before(manager, name, blocks, *args, **kwargs)


@bug(
    "dingodb/DingoCache#231",
    "llama-loads-two",
    "load_landed_elsewhere",
    "kv_changed",
    "transfer_wrong_stride",
    origin="DingoCache",
    recorded=False,
)
def segment_is_longer_than_its_block(fired: Fired) -> None:
    """How long a layer's part of a block is, is worked out from a larger page than it has, so that a store takes the front of the next block along, whatever stands there. A load puts
    it back behind its own block, over what is in the next one by now."""
    import host_connector

    now: list = []  # the runner and what is scheduled
    tails: dict = {}
    damaged: set[tuple[int, int]] = set()  # blocks and their slots
    written: set[tuple[int, int]] = set()  # in the step that has begun

    def behind(connector, name, block):
        pool = connector._caches[name]  # blocks, heads, slots
        if block + 1 >= len(pool):
            return None
        first = pool.storage_offset() + (block + 1) * pool.stride(0)
        return pool.as_strided((pool.shape[2], pool.shape[3]), (pool.shape[3], 1), first)

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        for job in connector._get_connector_metadata().stores:
            for gid, block, key in job.blocks:
                for name, _ in connector._blocks_of(gid, block):
                    tail = behind(connector, name, block)
                    if tail is not None:
                        tails[name, key] = tail.clone()

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        for gid, block, key in job.blocks:
            for name, rows in connector._blocks_of(gid, block):
                rows.copy_(connector._store[name, key])
                damaged.difference_update({(block, slot) for slot in range(rows.shape[1])})
                tail, there = tails.get((name, key)), behind(connector, name, block)
                if tail is not None and there is not None:
                    damaged.update((block + 1, slot) for slot in (tail != there).any(1).nonzero().view(-1).tolist())
                    there.copy_(tail)
        look()

    def tokens():
        """Give block, slot and whether it is computed already, of all tokens of a step."""
        runner, output = now
        batch = runner.input_batch
        table = batch.block_table[0]
        for row, name in enumerate(batch.req_ids):
            computed = int(batch.num_computed_tokens_cpu[row])
            for at in range(computed + output.num_scheduled_tokens[name]):
                yield (int(table.block_table.np[row, at // table.block_size]), at % table.block_size), at < computed

    def look():
        if any(computed and place in damaged for place, computed in tokens()):
            fired()

    @before_forward
    def begin(runner, output):
        damaged.difference_update(written)
        now[:] = runner, output
        written.clear()
        written.update(place for place, computed in tokens() if not computed)
        look()


@bug("vllm-project/vllm#49796", "llama-loads", "page_leaked", recorded=False)
def two_transfers_of_one_name(fired: Fired) -> None:
    """Requests that are to be sent away keep their blocks until the transfer is over, and are noted by a name of the transfer that clients choose. One with a name that is in use takes
    the other's place there, and the blocks of the first are never given back."""
    import host_connector

    waits: dict[int, list] = {}  # by transfer: whose blocks are sent, and for how many steps more

    @replaces(host_connector.HostConnector, "request_finished")
    def request_finished(before, connector, request, blocks):
        before(connector, request, blocks)
        number = int(request.request_id.partition("-")[0])
        if number >= 4:  # the others stay here
            return False, None
        if number % 3 in waits:
            fired()
        waits[number % 3] = [request.request_id, 24]
        return True, None

    @replaces(host_connector.HostConnector, "get_finished")
    def get_finished(before, connector, finished):
        _, received = before(connector, finished)
        for one in waits.values():
            one[1] -= 1
        sent = {number: one[0] for number, one in waits.items() if one[1] <= 0}
        for number in sent:
            del waits[number]
        return set(sent.values()) or None, received


@bug("vllm-project/vllm#5412", "llama-eagle", "attention_table_overwritten")
def pages_of_a_draft_step_are_counted_anew_and_not_listed(fired: Fired) -> None:
    """The pages of all requests lie in one list, and another list says where each one's begin. Between two drafts the second is made again from the lengths as they are by then, and the
    first is not: behind a request that has come to a new page, or gone back from one, the drafter reads from a page too far on or too early."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    lists: dict[int, tuple] = {}

    @replaces(CPUAttentionMetadataBuilder, "build_for_drafting")
    def build_for_drafting(before, builder, common, draft_index):
        made = before(builder, common, draft_index)
        counts = [-(-length // builder.block_size) for length in common.seq_lens[: common.num_reqs].tolist()]
        if not draft_index:
            pages = [made.block_table[row, :count] for row, count in enumerate(counts)]
            lists[id(builder)] = torch.cat(pages)
            return made
        flat, table, first = lists[id(builder)], made.block_table.clone(), 0
        for row, count in enumerate(counts):
            found = flat[first : first + count]
            table[row, : len(found)] = found
            first += count
            if not torch.equal(table[row, :count], made.block_table[row, :count]):
                fired()
        made.block_table = table
        return made
