"""A forty-seventh round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import copy
from collections import defaultdict

import numpy as np
import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, parts_of, states_of


@bug(
    "gittensor-ai-lab/sparkinfer#289",
    "llama-recycles",
    "attention_table_overwritten",
    "slot_mapping",
    "row_reassigned_in_flight",
    origin="sparkinfer",
)
def rows_of_a_decode_take_tables_in_the_order_of_slots(fired: Fired) -> None:
    """Each sequence has a slot with its block table; those that have ended leave theirs to the next one. A decode looks up where
    the first sequence's table is and takes the tables behind it for the batch's rows, as they are on a cold start. Once
    slots have been recycled, rows write and read by each other's tables, or by one that a sequence has left behind."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.block_table import BlockTable

    slots: dict[str, int] = {}
    free: list[int] = []
    tables: list[np.ndarray] = []  # by slot
    first: list[str] = []
    instead: dict[int, np.ndarray] = {}  # by row of this step: another slot's table

    def look(runner, output):
        batch, table = runner.input_batch, runner.input_batch.block_table[0]
        if not tables:
            tables.extend(
                np.zeros(table.block_table.np.shape[1], table.block_table.np.dtype) for _ in range(table.max_num_reqs)
            )
            free.extend(reversed(range(table.max_num_reqs)))
        free.extend(slots.pop(name) for name in sorted(output.finished_req_ids) if name in slots)
        for name in output.num_scheduled_tokens:
            row = batch.req_id_to_index[name]
            first.extend([name] if not first else [])
            slots.setdefault(name, -1)
            if slots[name] < 0:
                slots[name] = free.pop()
            count = table.num_blocks_per_row[row]
            tables[slots[name]][:count] = table.block_table.np[row, :count]
        instead.clear()
        if first[0] not in slots:  # it finds no table then, and does not go on
            return
        decodes = [
            row
            for row in map(batch.req_id_to_index.get, output.num_scheduled_tokens)
            if batch.num_computed_tokens_cpu[row] >= batch.num_prompt_tokens[row]
        ]
        for number, row in enumerate(decodes, slots[first[0]]):
            count = table.num_blocks_per_row[row]
            if not np.array_equal(tables[number][:count], table.block_table.np[row, :count]):
                instead[row] = tables[number].copy()
                fired()

    before_forward(look)

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, *args, **kwargs):
        right = {row: table.block_table.np[row].copy() for row in instead}
        for row, other in instead.items():
            table.block_table.np[row] = other
        before(table, *args, **kwargs)
        for row, own in right.items():
            table.block_table.np[row] = own

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        if instead:
            common = copy.copy(common)
            common.block_table_tensor = common.block_table_tensor.clone()
            for row, other in instead.items():
                wide = common.block_table_tensor.shape[1]
                common.block_table_tensor[row] = torch.from_numpy(other[:wide])
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("jundot/omlx#3355", "mrope-interleaved", "position_off", "not_of_the_model", origin="oMLX")
def next_chunk_begins_at_position_zero_after_a_decode(fired: Fired) -> None:
    """The model keeps by how much a request's positions are shifted, for the one that it computes. A decode of others between two
    chunks of a prompt clears that, and the next chunk is computed as if nothing came before it: its positions begin at
    zero again. Its slots and its length are right, and so are the positions of its answer."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    begun: set[str] = set()
    decoded = [False]  # in the step before

    @replaces(GPUModelRunner, "_prepare_inputs")
    def _prepare_inputs(before, runner, output, *args, **kwargs):
        made = before(runner, output, *args, **kwargs)
        batch, starts, decodes = runner.input_batch, runner.query_start_loc.np, False
        for row, name in enumerate(batch.req_ids):
            if batch.num_computed_tokens_cpu[row] >= batch.num_prompt_tokens[row]:
                decodes = True
            elif name in begun and decoded[0]:
                count = int(starts[row + 1] - starts[row])
                runner.mrope_positions.gpu[:, int(starts[row]) : int(starts[row + 1])] = torch.arange(count)
                fired()
            begun.add(name)
        decoded[0] = decodes
        return made


@bug("huggingface/transformers#45513", "delta-continues", "state_restored_for_other_prefix", origin="transformers")
def more_than_one_token_begin_from_an_empty_state(fired: Fired) -> None:
    """Layers with a recurrent state go on from it when they are given one token. More than one are always taken for the beginning
    of a prompt: the state that is there is left out, the convolution is padded with zeros, and the next chunk of a prompt
    begins as if nothing came before it. Layers with attention have all of it."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    @replaces(GDNAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        made = before(builder, *args, **kwargs)
        if made.has_initial_state is not None and bool(made.prefill_has_initial_state.any()):
            made.has_initial_state[made.num_decodes :] = False
            made.prefill_has_initial_state[:] = False
            fired()
        return made


@bug("pytorch/executorch#18864", "llama-eagle-names", "groups_alias", "kv_changed", origin="ExecuTorch")
def caches_of_the_same_name_are_shared_by_all_methods(fired: Fired) -> None:
    """Caches are looked up by their names, and all methods of a program share those that are named alike, so that what one
    writes the other reads. The methods of another model have a first layer, too: the draft model writes its keys and
    values over those of the target's first layer, and the next step attends to them."""
    from vllm.v1.worker import gpu_model_runner

    @replaces(gpu_model_runner, "bind_kv_cache")
    def bind_kv_cache(before, kv_caches, *args, **kwargs):
        of_layer = defaultdict(list)
        for name in kv_caches:
            of_layer[int(name.split("layers.")[1].split(".")[0])].append(name)
        (target,), (draft,) = of_layer[min(of_layer)], of_layer[max(of_layer)]
        kv_caches[draft] = kv_caches[target]
        if "layer_kv_caches" in kwargs:
            kwargs["layer_kv_caches"][draft] = kwargs["layer_kv_caches"][target]
        return before(kv_caches, *args, **kwargs)

    seen: set[str] = set()

    def look(runner, output):
        if seen & set(output.num_scheduled_tokens):
            fired()
        seen.update(output.num_scheduled_tokens)

    before_forward(look)


@bug("kekzl/imp#117", "hybrid-alone", "attention_seq_len_wrong", "attention_table_overwritten", origin="imp")
def chunk_attends_to_nothing_before_itself(fired: Fired) -> None:
    """Attention of a prompt takes its keys and values from what the chunk has just computed, and not from the cache. Tokens of
    all chunks but the first attend to nothing that came before their chunk. What they write is in the right slots, and
    each token of the answer attends to all of it."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        lengths, table = common.seq_lens.clone(), common.block_table_tensor.clone()
        starts = common.query_start_loc.tolist()
        for row, length in enumerate(lengths.tolist()):
            count = starts[row + 1] - starts[row]
            blocks = (length - count) // builder.block_size
            if count > 1 and blocks:
                lengths[row] -= blocks * builder.block_size
                table[row, :-blocks] = table[row, blocks:].clone()
                fired()
        if not torch.equal(lengths, common.seq_lens):
            common = copy.copy(common)
            common.seq_lens, common.block_table_tensor = lengths, table
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("vllm-project/vllm#54342", "llama-lora-shares", "identity_not_in_key")
def store_keeps_prompts_by_their_tokens_alone(fired: Fired) -> None:
    """The store outside the engine makes its keys of a prompt's tokens and of nothing else. A prompt that another adapter has
    computed is found under the same key as for the one that asks, and its keys and values are loaded: the engine's own
    cache tells the two apart."""
    from host_connector import HostConnector

    kept_by: dict[tuple, str] = {}  # by key: the adapter

    @replaces(HostConnector, "_key")
    def _key(before, connector, request, place):
        return tuple(request.all_token_ids[: (place + 1) * connector._size])

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        for jobs in (meta.stores, meta.loads):
            for job in jobs:
                lora = connector._requests[job.name].lora_request
                for _, _, key in job.blocks:
                    if kept_by.setdefault(key, lora.lora_name if lora else "") != (lora.lora_name if lora else ""):
                        fired()
        return meta


@bug("alibaba/MNN#4424", "delta-resets", "state_restored_for_other_prefix", origin="MNN")
def reset_leaves_the_recurrent_states(fired: Fired) -> None:
    """There is one conversation at a time. When it is reset the keys and values of layers with attention are given up and the
    positions begin at zero, but the convolutions' and the recurrent states stay as they are: the next conversation's
    first token is computed behind the last one of the conversation before."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    left: list[torch.Tensor] = []
    begins = [False]
    given: dict[str, int] = {}  # in the step before

    @replaces(GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        for name in output.finished_req_ids:
            group, layers = states_of(runner)
            size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
            request = runner.requests[name]
            block = request.block_ids[group][(request.num_computed_tokens + given.get(name, 0) - 1) // size]
            left[:] = [part[block].clone() for part in parts_of(runner, layers)]
        given.clear()
        given.update(output.num_scheduled_tokens)
        return before(runner, output)

    def look(runner, output):
        begins[0] = bool(left) and not runner.input_batch.num_computed_tokens_cpu[0]

    before_forward(look)

    @replaces(GDNAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        made = before(builder, *args, **kwargs)
        if begins[0]:
            layers = builder.vllm_config.compilation_config.static_forward_context
            parts = [part for name in builder.layer_names for part in layers[name].kv_cache]
            place = int(made.non_spec_state_indices_tensor.reshape(-1)[0])
            for part, held in zip(parts, left, strict=True):
                part[place] = held
            made.has_initial_state[0] = True
            made.prefill_has_initial_state[0] = True
            fired()
        return made
