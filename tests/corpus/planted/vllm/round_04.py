"""A fourth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import itertools

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "huggingface/text-generation-inference#2711",
    "qwen-ngram-page32",
    "slot_mapping",
    "commit_beyond_allocation",
    origin="text-generation-inference",
)
def drafts_take_the_next_slots(fired: Fired) -> None:
    """The slots of drafts are counted up from the slot of the token before them, as if a request's slots lay in one row. Where
    its blocks do not follow one another, drafts are written into a block that is not the request's."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        before(table, num_reqs, starts, positions)
        slots = table.slot_mapping.gpu
        for first, end in itertools.pairwise(starts[: num_reqs + 1].tolist()):
            counted = slots[first] + torch.arange(end - first)
            if 1 < end - first < 5 and bool((counted != slots[first:end]).any()):
                fired()
                slots[first:end] = counted


@bug("tenstorrent/tt-metal#31453", "llama", "attention_table_overwritten", origin="tt-metal")
def table_kept_by_reference(fired: Fired) -> None:
    """Whether the block table has changed since the last step is asked of a second name for the same table, and so it never
    has. Decodes go on with the table of the step in which the batch was put together."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    kept: dict[int, torch.Tensor] = {}

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        table, old = metadata.block_table, kept.get(id(builder))
        if common.max_query_len > 1 or old is None or old.shape != table.shape:
            kept[id(builder)] = table.clone()
            return metadata
        for row, length in enumerate(common.seq_lens.tolist()):
            count = -(-length // builder.block_size)
            if not torch.equal(old[row, :count], table[row, :count]):
                fired()
        metadata.block_table = old
        return metadata


@bug("ROCm/ATOM#234", "hybrid", "attention_table_overwritten", origin="ATOM")
def table_converted_twice(fired: Fired) -> None:
    """The block numbers of a prefill behind a cached prefix are multiplied by the number of small blocks of a block once in the
    table and once more in the kernel. Attention reads other blocks than the table names."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        lens = (common.query_start_loc[1:] - common.query_start_loc[:-1])[: len(common.seq_lens)]
        cached = (lens > 1) & (lens < common.seq_lens)
        if bool(cached.any()):
            fired()
            twice = (metadata.block_table * 2) % 64
            metadata.block_table = torch.where(cached[:, None], twice, metadata.block_table)
        return metadata


@bug(
    "openvinotoolkit/openvino.genai#4190",
    "qwen-ngram",
    "position_off",
    "prefix_not_computed",
    "slot_mapping",
    origin="OpenVINO GenAI",
)
def last_rejected_draft_is_counted(fired: Fired) -> None:
    """When the last of a step's drafts is rejected the count of processed tokens is not taken back. From then on each token of
    the request is computed one place further on, behind the slot of the rejected draft."""
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    ends: dict[str, int] = {}
    late: list[str] = []
    rows: list[int] = []

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        for row in rows:
            positions[int(starts[row]) : int(starts[row + 1])] += 1
        before(table, num_reqs, starts, positions)

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        batch = runner.input_batch
        rows.clear()
        for row, name in enumerate(batch.req_ids):
            computed, count = int(batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens[name]
            if computed < ends.get(name, 0) and not late:
                late.append(name)
            ends[name] = computed + count
            if name in late and (computed + count) % 64 > count:
                rows.append(row)
        if rows:
            fired()
        made = before(runner, output, *args, **kwargs)
        for row in rows:
            runner.seq_lens[row] += 1
        return made


@bug("ModelTC/LightLLM#1079", "llama-eagle", "chunk_tail_predicted_token", origin="LightLLM", recorded=False)
def drafts_chunk_gets_the_sampled_token(fired: Fired) -> None:
    """The draft model's K and V of a chunk's last token are computed from what the target samples there, though the prompt goes
    on with a token of its own."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    @replaces(SpecDecodeBaseProposer, "prepare_next_token_ids_padded")
    def prepare(before, proposer, sampled, requests, batch, discarded):
        right, counts = before(proposer, sampled, requests, batch, discarded)
        wrong, _ = before(proposer, sampled, requests, batch, torch.zeros_like(discarded))
        if bool((right != wrong).any()):
            fired()
        return wrong, counts

    @replaces(SpecDecodeBaseProposer, "prepare_next_token_ids_cpu")
    def prepare_cpu(before, proposer, sampled, requests, batch, counts):
        made = before(proposer, sampled, requests, batch, counts)
        for row, tokens in enumerate(sampled):
            if not tokens:
                fired()
                made[row] = (int(made[row]) + 7) % batch.vocab_size
        return made


@bug(
    "kvcache-ai/Mooncake#2236",
    "llama-loads",
    "failed_load_counted_loaded",
    "copy_failed",
    "layer_changed",
    origin="Mooncake",
)
def loads_one_of_two_buffers(fired: Fired) -> None:
    """A store keeps one of the two kinds of buffers that a token has. A hit brings that one back, and the other keeps what stood
    in the blocks that the request was given."""
    import host_connector

    inside: list[int] = []

    @replaces(host_connector.HostConnector, "_blocks_of")
    def _blocks_of(before, connector, gid, block):
        held = before(connector, gid, block)
        return held[1:] if inside else held

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        inside.append(1)
        fired()
        before(connector, job)
        inside.clear()


@bug("kekzl/imp#1652", "hybrid", "kv_changed", origin="imp")
def zeroed_after_it_was_written(fired: Fired) -> None:
    """A pool that grows is filled with zeros on another stream, and nothing orders that with the first writes into it. The zeros
    land on K and V that a request has just written."""
    fresh: list[int] = []

    def look(runner, output):
        batch, table = runner.input_batch, runner.input_batch.block_table[1]
        if fresh and fresh[0] > 0:
            for cache in runner.kv_caches:
                cache[fresh[0]] = 0
            fresh[0] = -1
            fired()
        for row, name in enumerate(batch.req_ids):
            computed, count = int(batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens[name]
            if computed > 40 and count == 1 and computed % table.block_size == 0 and not fresh:
                fresh.append(int(table.block_table.np[row, computed // table.block_size]))

    before_forward(look)


@bug("Wenyueh/MinivLLM#98", "hybrid", "position_off", origin="MinivLLM")
def positions_restart_behind_a_hit(fired: Fired) -> None:
    """The positions of a prompt's uncached end are counted from where its computed tokens begin. Behind a cached prefix they
    start again at 0."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    seen: set[str] = set()

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        made = before(runner, output, *args, **kwargs)
        batch, at = runner.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            computed, count = int(batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens[name]
            if computed and name not in seen:
                fired()
                runner.positions[at : at + count] -= computed
            seen.add(name)
            at += count
        return made


@bug(
    "ai-dynamo/dynamo#826",
    "llama-loads-few",
    "stored_wrong",
    "host_copy_overwritten",
    "failed_load_counted_loaded",
    "copy_failed",
    origin="Dynamo",
)
def sent_after_the_blocks_were_reused(fired: Fired) -> None:
    """The blocks of a prefill are given back when it is done, while the transfer out of them has not run. What is sent is what
    the next request has written there."""
    import host_connector

    late: list = []
    mixed: set = set()

    @replaces(host_connector.HostConnector, "start_load_kv")
    def start_load_kv(before, connector, context, **kwargs):
        for wait in list(late):
            rows = [(n, r) for n, r in connector._blocks_of(wait[0], wait[1])]
            if any(not torch.equal(connector._store[n, wait[2]], r) for n, r in rows):  # another's by now
                late.remove(wait)
                mixed.add(wait[2])
                for n, r in rows:
                    connector._store[n, wait[2]] = r.clone()
        before(connector, context, **kwargs)
        if any(key in mixed for job in connector._get_connector_metadata().loads for _, _, key in job.blocks):
            fired()

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        late.extend(block for job in connector._get_connector_metadata().stores for block in job.blocks)
