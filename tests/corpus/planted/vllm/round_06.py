"""A sixth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("vllm-project/vllm#17103", "llama", "kv_changed")
def sleep_keeps_the_prefix_cache(fired: Fired) -> None:
    """An idle engine is put to sleep, which discards its K and V, and woken up again. The prefix cache still lists its blocks,
    and the next requests hit them."""
    steps: list[int] = []

    def look(runner, output):
        steps.append(1)
        if len(steps) > 1 and not output.scheduled_cached_reqs.req_ids and len(output.scheduled_new_reqs) > 1:
            for cache in runner.kv_caches:
                cache.zero_()
            if any(new.num_computed_tokens for new in output.scheduled_new_reqs):
                fired()

    before_forward(look)


@bug(
    "NVIDIA/TensorRT-LLM#18554",
    "llama-loads",
    "load_landed_elsewhere",
    "load_of_other_prefix",
    origin="TensorRT-LLM",
)
def first_block_left_out_of_the_list(fired: Fired) -> None:
    """The list of blocks that a transfer goes to is one too long and is cut at its beginning, which takes the prompt's first block
    out of it. What belongs to a block lands in the one behind it."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        if len(job.blocks) > 1:
            fired()
            shifted = zip(job.blocks[1:], job.blocks, strict=False)
            job = host_connector.Job(job.name, [(gid, block, key) for (gid, block, _), (*_, key) in shifted])
        before(connector, job)


@bug(
    "vllm-project/vllm#49250",
    "llama-loads",
    "failed_load_counted_loaded",
    "prefix_not_computed",
)
def failed_load_is_not_taken_back(fired: Fired) -> None:
    """A load fails, and the scheduler takes back the count of the request's computed tokens. The runner keeps its own count and
    goes on behind the blocks that have not come."""
    import host_connector
    from vllm.v1.core.sched.scheduler import Scheduler

    ends: dict[str, int] = {}

    @replaces(host_connector.HostConnector, "__init__")
    def init(before, connector, *args, **kwargs):
        before(connector, *args, **kwargs)
        connector._fail_every = 1

    @replaces(Scheduler, "schedule")
    def schedule(before, scheduler, *args, **kwargs):
        output = before(scheduler, *args, **kwargs)
        for new in output.scheduled_new_reqs:
            ends[new.req_id] = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            count, known = output.num_scheduled_tokens[name], cached.num_computed_tokens[i]
            back = min(ends.get(name, 0) - known, count - 1)
            if back > 0 and name not in cached.resumed_req_ids:
                output.num_scheduled_tokens[name] -= back
                output.total_num_scheduled_tokens -= back
                cached.num_computed_tokens[i] += back
                fired()
            ends[name] = known + count
        return output


@bug("tenstorrent/vllm-tt-plugin#103", "llama-churn", "req_to_token", "slot_mapping", origin="vllm-tt-plugin")
def stale_tail_of_a_reused_row(fired: Fired) -> None:
    """A request that moves to another row of the batch in the middle of its prefill brings its own entries alone, and the row's
    tail goes on naming another running request's blocks. The next chunk is computed over those."""
    done: list[int] = []

    def look(runner, output):
        batch, table = runner.input_batch, runner.input_batch.block_table[0]
        for row, name in enumerate(batch.req_ids):
            computed, count = int(batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens[name]
            first = -(-computed // table.block_size)
            if computed and count > table.block_size and batch.num_reqs > 1 and not done:
                other = 1 if row == 0 else 0
                held = table.block_table.np[other, : table.num_blocks_per_row[other]]
                theirs = [int(b) for b in held if b not in table.block_table.np[row, :first]]
                if theirs and first < table.num_blocks_per_row[row]:
                    done.append(1)
                    table.block_table.np[row, first] = theirs[-1]
                    fired()

    before_forward(look)


@bug("sgl-project/sglang-jax#20", "llama", "attention_table_overwritten", origin="sglang-jax")
def rows_packed_without_padding(fired: Fired) -> None:
    """The pages of a batch's requests lie in one list behind one another, and where a request's begin is counted in tokens that were
    not rounded up to pages. The second and later requests read what belongs to the ones before."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        size, lens = builder.block_size, common.seq_lens.tolist()
        counts = [-(-length // size) for length in lens]
        packed = [b for row, n in enumerate(counts) for b in metadata.block_table[row, :n].tolist()]
        table, at = metadata.block_table.clone(), 0
        for row, n in enumerate(counts):
            table[row, :n] = torch.tensor(packed[at // size : at // size + n])
            at += lens[row]
        if not torch.equal(table, metadata.block_table):
            fired()
            metadata.block_table = table
        return metadata


@bug("antonellof/ferrox#37", "llama", "position_off", "slot_mapping", origin="ferrox")
def prompt_run_again_behind_its_prefix(fired: Fired) -> None:
    """The batched prefill of a request that has hit a prefix begins at the prompt's first token all the same. It is written behind
    the prefix, which is where the request's cache ends."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        made = before(runner, output, *args, **kwargs)
        batch, at = runner.input_batch, 0
        fresh = {new.req_id: new for new in output.scheduled_new_reqs}
        for name in batch.req_ids:
            count, new = output.num_scheduled_tokens[name], fresh.get(name)
            if new is not None and new.num_computed_tokens:
                fired()
                again = torch.tensor(new.prompt_token_ids[:count], dtype=torch.int32)
                runner.input_ids.gpu[at : at + count] = again
                runner.positions[at : at + count] -= new.num_computed_tokens
            at += count
        return made


@bug(
    "EricLBuehler/mistral.rs#552",
    "llama-churn",
    "commit_beyond_allocation",
    "req_to_token",
    "slot_mapping",
    origin="mistral.rs",
)
def last_block_for_all_that_is_beyond(fired: Fired) -> None:
    """A decode whose position lies behind the end of its block table takes the table's last block once more. It writes over the
    tokens that the request has in that block."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "append_row")
    def append_row(before, table, block_ids, row):
        held = int(table.num_blocks_per_row[row])
        if len(block_ids) == 1 and held > 1:
            fired()
            block_ids = [int(table.block_table.np[row, held - 1])]
        before(table, block_ids, row)
