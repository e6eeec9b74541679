"""A twentieth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


def _lengths(change) -> None:
    """Give attention other lengths: `change(builder, common metadata)` returns them, or None."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common_attn_metadata, *args, **kwargs):
        lengths = change(builder, common_attn_metadata)
        if lengths is not None:
            common_attn_metadata = common_attn_metadata.replace(seq_lens=lengths)
        return before(builder, common_prefix_len, common_attn_metadata, *args, **kwargs)


@bug("vllm-project/vllm#48659", "llama", "attention_seq_len_wrong", "attention_table_overwritten")
def second_half_of_a_batch_gets_the_lengths_of_the_first(fired: Fired) -> None:
    """A batch of decodes is cut into two halves, and what attention is told is kept under a key that does not say which half it was made for. The second half gets its own
    blocks, and the lengths of the first."""

    def change(builder, common):
        count = common.num_reqs
        if common.max_query_len != 1 or count < 4:
            return None
        lengths, half = common.seq_lens.clone(), (count + 1) // 2
        lengths[half:count] = common.seq_lens[: count - half]
        if bool((lengths[:count] != common.seq_lens[:count]).any()):
            fired()
        return lengths

    _lengths(change)


@bug("vllm-project/vllm-gaudi#393", "llama", "attention_seq_len_wrong", origin="vLLM Gaudi")
def context_that_ends_inside_a_block_is_one_longer(fired: Fired) -> None:
    """The context of a prompt's later chunk is made of whole blocks, and where it ends inside one, a token too many is taken of it. Attention of such a chunk goes one token
    beyond what the request has."""

    def change(builder, common):
        counts = common.query_start_loc.diff()[: common.num_reqs]
        context = common.seq_lens[: common.num_reqs] - counts
        longer = (counts > 1) & (context > 0) & (context % builder.block_size != 0)
        if not bool(longer.any()):
            return None
        fired()
        lengths = common.seq_lens.clone()
        lengths[: common.num_reqs] += longer.to(lengths.dtype)
        return lengths

    _lengths(change)


@bug(
    "vllm-project/vllm-ascend#14301",
    "sliding-churn",
    "page_given_twice",
    "double_free",
    "free_too_early",
    origin="vLLM Ascend",
)
def block_that_stands_for_none_is_freed(fired: Fired) -> None:
    """What has left the window is replaced in a request's table by the block that stands for none, and when the request goes, that one is put on the free list with the others.
    It is given out like any block, and again whenever such a request goes, to whoever asks next."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    holders: set[str] = set()

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks):
        blocks = list(blocks)
        before(pool, blocks)
        none = pool.null_block
        if any(block is none for block in blocks) and none.next_free_block is None:
            pool.free_block_queue.prepend_n([none])

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, count):
        pool.null_block.ref_cnt = 0  # nobody keeps its count
        return before(pool, count)

    @replaces(SingleTypeKVCacheManager, "allocate_new_blocks")
    def allocate_new_blocks(before, manager, name, *args, **kwargs):
        given = before(manager, name, *args, **kwargs)
        if any(block.is_null for block in given):
            holders.add(name)
        return given

    @replaces(SingleTypeKVCacheManager, "pop_blocks_for_free")
    def pop_blocks_for_free(before, manager, name):
        holders.discard(name)
        return before(manager, name)

    before_forward(lambda runner, output: len(holders & set(output.num_scheduled_tokens)) > 1 and fired())


@bug("vllm-project/vllm#37827", "llama-loads-fails", "failed_load_counted_loaded", reads=31)
def sharer_of_a_block_that_did_not_come_goes_on(fired: Fired) -> None:
    """A load fails, and the request that asked for it computes the block itself. Another one has joined the same block in the same step, and whoever finds the block marked
    already is passed over: what it has computed with what lay there is kept."""
    from vllm.v1.core.sched.scheduler import Scheduler

    @replaces(Scheduler, "_update_requests_with_invalid_blocks")
    def update(before, scheduler, requests, invalid, scheduled, *args, **kwargs):
        requests = list(requests)
        counts = {request.request_id: request.num_computed_tokens for request in requests}
        affected, tokens, evicted = before(scheduler, requests, invalid, scheduled, *args, **kwargs)
        marked: set[int] = set()
        for request in requests:
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            bad = invalid & set(blocks)
            if bad and bad <= marked and request.request_id in affected:
                request.num_computed_tokens = counts[request.request_id]
                affected.discard(request.request_id)
            marked |= bad
        return affected, tokens, evicted

    def look(runner, output):
        jobs = getattr(output.kv_connector_metadata, "loads", ())
        bad = {job.blocks[-1][1] for job in jobs if job.fails and job.blocks}
        joined = [name for name in output.num_scheduled_tokens if bad & set(runner.requests[name].block_ids[0])]
        if len(joined) > 1:
            fired()

    before_forward(look)


@bug(
    "NovaSky-AI/SkyRL#1824",
    "llama-weights-running",
    "cache_kept_over_new_weights",
    "computed_with_other_weights",
    origin="SkyRL",
    late="who runs on with what older weights have made is not judged",
)
def cache_is_not_emptied_while_somebody_runs(fired: Fired) -> None:
    """New weights come while requests run, and the prefix cache is to be emptied. Whoever asks for it does not say that those who run are to be put back, and it is refused
    because of them, which nobody looks at: they go on with what the old weights made, and others hit it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    refused: list[bool] = []

    @replaces(Scheduler, "reset_prefix_cache")
    def reset_prefix_cache(before, scheduler, reset_running_requests=False, reset_connector=False):
        done = before(scheduler, False, reset_connector)
        if reset_running_requests and not done:
            refused.append(True)
        return done

    before_forward(lambda runner, output: refused and fired())


@bug(
    "ovg-project/kvcached#398",
    "recurrent-little",
    "state_restored_for_other_prefix",
    "kv_write_lost",
    origin="kvcached",
)
def block_nought_belongs_to_a_request(fired: Fired) -> None:
    """The block that stands for none is taken from the pool without a look at its number, and it is not block 0. Block 0 goes to a request, and the kernels of the states pass over
    it as they pass over padding: its state is neither read nor written."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import MambaSpec

    @replaces(BlockPool, "__init__")
    def init(before, pool, *args, **kwargs):
        before(pool, *args, **kwargs)
        first, other = pool.blocks[0], pool.blocks[10]
        pool.free_block_queue.remove(other)
        first.is_null, other.is_null, pool.null_block = False, True, other
        pool.free_block_queue.prepend_n([first])

    def look(runner, output):
        batch = runner.input_batch
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            if not isinstance(group.kv_cache_spec, MambaSpec):
                continue
            table = batch.block_table[number]
            for row in range(batch.num_reqs):
                done = int(batch.num_computed_tokens_cpu[row])
                one = output.num_scheduled_tokens[batch.req_ids[row]] == 1  # what is computed by the kernel for decodes
                if done and one and not table.block_table.np[row, (done - 1) // table.block_size]:
                    fired()

    before_forward(look)


def _rows_wrong(runner, output) -> bool:
    """Whether a row of the first table is not what its request was given."""
    batch = runner.input_batch
    table = batch.block_table[0]
    for row, name in enumerate(batch.req_ids):
        end = int(batch.num_computed_tokens_cpu[row]) + output.num_scheduled_tokens[name]
        blocks = runner.requests[name].block_ids[0][: -(-end // table.block_size)]
        if table.block_table.np[row, : len(blocks)].tolist() != list(blocks):
            return True
    return False


@bug("vllm-project/vllm#13977", "llama", "req_to_token", "slot_mapping", "attention_table_overwritten")
def row_moves_up_and_its_count_does_not(fired: Fired) -> None:
    """Where a request's next block stands in its row is no longer told by the caller, but by a count that the table keeps of each row. A request moves up into the row of one that
    has ended, and the count stays where it was: its next block takes the place of its first."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "move_row")
    def move_row(before, table, src, tgt):
        count = int(table.num_blocks_per_row[tgt])
        before(table, src, tgt)
        table.num_blocks_per_row[tgt] = count

    before_forward(lambda runner, output: _rows_wrong(runner, output) and fired())


@bug(
    "vllm-project/vllm#47936",
    "llama",
    "attention_table_overwritten",
    "slot_mapping",
    "req_to_token",
    "row_reassigned_in_flight",
)
def moved_row_is_not_copied_to_the_device(fired: Fired) -> None:
    """Of the block table only rows that have been given blocks since the last step are copied to the device, and one that moved up into another's place is not among them. Until it
    gets its next block, it writes and reads through what the one before had there."""
    from vllm.v1.worker.block_table import BlockTable

    dirty: dict[int, set[int]] = {}

    @replaces(BlockTable, "append_row")
    def append_row(before, table, blocks, row):
        if blocks:
            dirty.setdefault(id(table), set()).add(row)
        before(table, blocks, row)

    @replaces(BlockTable, "commit_block_table")
    def commit_block_table(before, table, count):
        buffer = table.block_table
        if buffer.gpu.data_ptr() == buffer.cpu.data_ptr():  # the device's is the host's here
            buffer.gpu = buffer.cpu.clone()
        rows = sorted(dirty.pop(id(table), ()))
        buffer.gpu[rows] = buffer.cpu[rows]
        for row in range(count):
            held = int(table.num_blocks_per_row[row])
            if bool((buffer.gpu[row, :held] != buffer.cpu[row, :held]).any()):
                fired()


@bug(
    "vllm-project/vllm-gaudi#360",
    "llama",
    "future_map_overrun",
    "chunk_tail_predicted_token",
    "next_token_swap",
    "async_resume_wrong_input",
    origin="vLLM Gaudi",
)
def next_chunk_ends_with_what_the_last_one_predicted(fired: Fired) -> None:
    """The next step is made before the tokens of this one are known, and they are put in afterwards at the end of what each request has in it. One whose prompt goes on in chunks
    is not left out: its next chunk ends with what was predicted behind the last one."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    predicted: dict[str, int] = {}

    @replaces(GPUModelRunner, "_bookkeeping_sync")
    def _bookkeeping_sync(before, runner, output, sampled, *args, **kwargs):
        tokens, chunks = sampled.sampled_token_ids[:, 0].tolist(), runner.discard_request_mask.np
        predicted.clear()
        predicted.update({name: tokens[row] for row, name in enumerate(runner.input_batch.req_ids) if chunks[row]})
        return before(runner, output, sampled, *args, **kwargs)

    @replaces(GPUModelRunner, "_prepare_input_ids")
    def _prepare_input_ids(before, runner, output, num_reqs, count, ends):
        before(runner, output, num_reqs, count, ends)
        for row, name in enumerate(runner.input_batch.req_ids):
            last = int(ends[row]) - 1
            if name in predicted and int(runner.input_ids.gpu[last]) != predicted[name]:
                fired()
                runner.input_ids.gpu[last] = predicted[name]
