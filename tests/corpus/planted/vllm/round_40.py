"""A fortieth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from dataclasses import replace

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


def _keys_and_values(rows):
    """Return views of a block's K and V, each by head, token and dimension."""
    heads, size, width = rows.shape
    flat = rows.view(heads, 2 * size, width // 2)
    return flat[:, :size].view(heads, width // 2, size).transpose(1, 2), flat[:, size:]


@bug(
    "sgl-project/sglang#35171",
    "llama-yarn",
    "not_of_the_model",
    origin="SGLang",
    late="not found: too few tokens stand at three other positions, by which angles are learnt",
)
def angles_beyond_the_tables_end_are_not_scaled(fired: Fired) -> None:
    """The table of angles is as long as the model says, and is made longer for the context that is reserved. The rows
    that are added are computed as if the model had plain rotary embeddings: the rotation's own scaling gets the base
    in its place, and their size is not corrected. Tokens beyond the first table are rotated by angles that no
    position has."""
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

    own = 128  # rows that are there before

    @replaces(YaRNScalingRotaryEmbedding, "_compute_cos_sin_cache")
    def _compute_cos_sin_cache(before, rotation):
        table = before(rotation)
        places = torch.arange(own, len(table), dtype=torch.float32)
        angles = torch.outer(places, rotation._compute_inv_freq(rotation.base))
        return torch.cat((table[:own], torch.cat((angles.cos(), angles.sin()), dim=-1)))

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            if batch.num_computed_tokens_cpu[row] + output.num_scheduled_tokens.get(name, 0) > own:
                fired()

    before_forward(look)


@bug(
    "sgl-project/sglang-jax#1066",
    "llama-eagle",
    "commit_beyond_allocation",
    "kv_write_lost",
    "kv_write_damaged",
    origin="SGLang-JAX",
)
def drafters_pool_is_smaller_than_the_numbers_it_gets(fired: Fired) -> None:
    """The drafter has a pool of its own, and takes its slots by the numbers that the target's allocator gives out.
    Its pool was sized before the target's was made larger: what is written to a number beyond its end is dropped, and
    what is read there is the last that it has."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    blocks = 22
    layers: set[str] = set()
    drafts: list[bool] = []

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, cache, slots):
        if layer.layer_name in layers:
            slots = slots.masked_fill(slots >= blocks * cache.shape[2], -1)
        before(impl, layer, key, value, cache, slots)

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, cache, metadata, *args, **kwargs):
        if layer.layer_name in layers and metadata is not None:
            metadata = replace(metadata, block_table=metadata.block_table.clamp(max=blocks - 1))
        return before(impl, layer, query, key, value, cache, metadata, *args, **kwargs)

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, *args, **kwargs):
        layers.update(proposer._draft_attn_layer_names)
        drafts.append(True)
        try:
            return before(proposer, *args, **kwargs)
        finally:
            drafts.clear()

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        metadata = before(builder, *args, **kwargs)
        for row, length in enumerate(metadata.seq_lens.tolist() if drafts else ()):
            if bool((metadata.block_table[row, : -(-length // builder.block_size)] >= blocks).any()):
                fired()
        return metadata


@bug(
    "sgl-project/sglang#19086",
    "llama-loads-shifts",
    "transfer_wrong_stride",
    "layout_misread",
    "load_landed_elsewhere",
    origin="SGLang",
)
def heads_that_two_ranks_have_are_counted_twice(fired: Fired) -> None:
    """Who computes prompts has more ranks than there are heads of K and V, so that two ranks have the same one; who
    receives has one rank with all heads. How many heads there are in all is taken to be a rank's times the ranks, and
    each rank puts its head as far on as if all of them were different: the second copy over the next head, and the
    later ones into the next token's place."""
    from host_connector import HostConnector

    copies = 2

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        for rank in range(copies * 2):
            for group, block, key in job.blocks:
                for name, rows in connector._blocks_of(group, block):
                    heads, size = rows.shape[:2]
                    later, place = divmod(rank, heads)
                    sent = _keys_and_values(connector._store[name, key])
                    for mine, theirs in zip(_keys_and_values(rows), sent, strict=True):
                        mine[place, later:] = theirs[rank // copies, : size - later]
                    if later and block + 1 < len(connector._caches[name]):  # the last token's goes to the next page
                        for mine, theirs in zip(
                            _keys_and_values(connector._caches[name][block + 1]), sent, strict=True
                        ):
                            mine[place, 0] = theirs[rank // copies, -1]
        fired()


@bug("ggml-org/llama.cpp#28498", "qwen-loads-files", "layout_misread", "stored_wrong", origin="llama.cpp")
def saved_cache_does_not_say_that_it_is_rotated(fired: Fired) -> None:
    """K and V are rotated before they are kept, so that they lose less there, and whether they are is not written
    down beside them. They are restored where nothing is rotated, and taken as they are."""
    from host_connector import HostConnector

    turn = torch.ones(1, 1)
    while len(turn) < 32:
        turn = torch.cat((torch.cat((turn, turn), 1), torch.cat((turn, -turn), 1)))
    turn /= len(turn) ** 0.5

    @replaces(HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        for job in connector._get_connector_metadata().stores:
            for group, block, key in job.blocks:
                for name, _ in connector._blocks_of(group, block):
                    for part in _keys_and_values(connector._store[name, key]):
                        part.copy_(part @ turn)

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        fired()


@bug(
    "InfiniTensor/InfiniLM#553",
    "qwen-narrow",
    "bad_values_written",
    origin="InfiniLM",
)
def scales_of_the_cache_are_never_set(fired: Fired) -> None:
    """The cache keeps K and V in eight bits, with one scale each. The scales are made and nothing is put into them,
    so that they are 0: what is kept says nothing of what was computed, and all that is read is 0."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def unset(layer):
        layer._k_scale_float = layer._v_scale_float = torch.finfo(torch.float32).tiny  # the kernel here refuses 0

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, *args, **kwargs):
        unset(layer)
        before(impl, layer, *args, **kwargs)

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, *args, **kwargs):
        unset(layer)
        return before(impl, layer, *args, **kwargs)

    before_forward(lambda runner, output: output.num_scheduled_tokens and fired())


@bug("ROCm/ATOM#2154", "delta-handed", "state_restored_for_other_prefix", origin="ATOM")
def states_are_not_sent_with_the_pages(fired: Fired) -> None:
    """Who computes a prompt hands over its pages of K and V, and the recurrent states are in a pool of their own that
    the transfer was never told of. Who goes on has the attention layers' prefix, and begins with a state of zeros in
    the others."""
    from vllm.v1.worker import mamba_utils

    @replaces(mamba_utils, "preprocess_mamba")
    def preprocess_mamba(before, output, config, cache, columns, batch, requests, layers, *args, **kwargs):
        before(output, config, cache, columns, batch, requests, layers, *args, **kwargs)
        groups = next(one for one in (*args, *kwargs.values()) if hasattr(one, "mamba_group_ids")).mamba_group_ids
        for new in output.scheduled_new_reqs:
            if new.num_computed_tokens:
                for group in groups:
                    block = requests[new.req_id].block_ids[group][columns[new.req_id]]
                    for name in config.kv_cache_groups[group].layer_names:
                        for part in layers[name].kv_cache:
                            part[block].zero_()
                fired()


@bug(
    "LMCache/LMCache#2263",
    "llama-loads-overlaps",
    "prefix_not_computed",
    origin="LMCache",
)
def what_is_loaded_is_counted_from_the_chunks_beginning(fired: Fired) -> None:
    """What is kept is in chunks of several blocks, and what the request has itself may end inside one. That number is
    rounded down to a chunk before what is to be loaded is counted: the part of the chunk that is there already counts
    twice, and as many tokens behind the last chunk are taken to be computed, which nobody has."""
    from host_connector import HostConnector, Job

    whole: dict[str, tuple[int, int]] = {}  # of a request, the first block that is loaded and the one behind the last
    hurt: set[str] = set()

    @replaces(HostConnector, "get_num_new_matched_tokens")
    def get_num_new_matched_tokens(before, connector, request, computed):
        count, beside = before(connector, request, computed)
        chunk = 2 * connector._size
        hit, there = (computed + count) // chunk * chunk, computed // chunk * chunk
        if hit <= computed:
            connector._matched.pop(request.request_id, None)
            return 0, False
        whole[request.request_id] = there // connector._size, hit // connector._size
        if there < computed:
            hurt.add(request.request_id)
        return hit - there, beside

    @replaces(HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, external):
        if not external:
            return
        _, beside = connector._matched.pop(request.request_id)
        wanted = [
            (group, held[place].block_id, connector._key(request, place))
            for group, held in enumerate(blocks.blocks)
            for place in range(*whole[request.request_id])
        ]
        connector._jobs.append(Job(request.request_id, wanted, beside))

    before_forward(lambda runner, output: hurt & set(output.num_scheduled_tokens) and fired())


@bug(
    "ml-explore/mlx#3949",
    "qwen-clamps",
    "bad_values_written",
    origin="MLX",
)
def only_the_first_row_of_a_decode_is_rotated(fired: Fired) -> None:
    """Where each sequence of a batch has one new token, rotation takes a shorter way, which goes over the heads of one
    sequence and forgets that there are more. Queries and keys of all rows but the first are left as the new buffer has
    them: zeros are stored as their keys."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    decodes: list[bool] = [False]

    @replaces(RotaryEmbedding, "forward")
    def forward(before, rotation, positions, *args, **kwargs):
        rotated = before(rotation, positions, *args, **kwargs)
        if decodes[0]:
            for part in rotated:
                part[1:].zero_()
        return rotated

    def look(runner, output):
        counts = output.num_scheduled_tokens.values()
        decodes[0] = len(counts) > 1 and set(counts) == {1}
        if decodes[0]:
            fired()

    before_forward(look)
