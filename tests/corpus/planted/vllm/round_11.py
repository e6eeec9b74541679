"""An eleventh round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("vllm-project/vllm#56196", "recurrent-short", "state_restored_for_other_prefix")
def short_chunk_writes_the_state_that_it_began_with(fired: Fired) -> None:
    """A chunk that is shorter than the state of a convolution writes its new state to the block that it took the old one from, which is
    the shared prefix's. Its own block keeps what it held, and its next forward goes on from that."""
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
    from vllm.v1.kv_cache_interface import MambaSpec

    begun: dict[int, int] = {}
    short: set[str] = set()

    def look(runner, output):
        if short & set(output.num_scheduled_tokens):
            fired()
        begun.clear()
        batch = runner.input_batch
        gid = next(
            i for i, g in enumerate(runner.kv_cache_config.kv_cache_groups) if isinstance(g.kv_cache_spec, MambaSpec)
        )
        table = batch.block_table[gid]
        size = runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
        for row, name in enumerate(batch.req_ids):
            computed, count = int(batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens.get(name, 0)
            if computed and computed % size == 0 and count == 1 and computed < batch.num_prompt_tokens[row]:
                blocks = table.block_table.np[row]
                begun[int(blocks[computed // size])] = int(blocks[computed // size - 1])
                short.add(name)

    before_forward(look)

    @replaces(causal_conv1d, "causal_conv1d_update_cpu")
    def causal_conv1d_update_cpu(before, x, states, *args, conv_state_indices, **kwargs):
        stood = {slot: states[slot].clone() for slot in conv_state_indices.tolist() if slot in begun}
        out = before(x, states, *args, conv_state_indices=conv_state_indices, **kwargs)
        for slot, old in stood.items():
            states[begun[slot]] = states[slot]
            states[slot] = old
        return out


@bug("dingodb/DingoCache#116", "llama-loads", "stored_wrong", "host_copy_overwritten", origin="DingoCache")
def layers_of_a_block_stored_under_one_key(fired: Fired) -> None:
    """What is stored of a block goes to the store layer by layer, and the key leaves the layer out. Each overwrites the one before, and a
    load brings the last layer's K and V to every layer."""
    import host_connector

    class WithoutLayers(dict):
        """What is kept under (layer, key), by the key alone."""

        def __setitem__(self, place, rows):
            super().__setitem__(place[1], rows)

        def __getitem__(self, place):
            return super().__getitem__(place[1])

        def __contains__(self, place):
            return super().__contains__(place[1])

    @replaces(host_connector.HostConnector, "__init__")
    def init(before, connector, *args, **kwargs):
        before(connector, *args, **kwargs)
        if hasattr(connector, "_store"):
            connector._store = WithoutLayers()

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        fired()
        before(connector, job)


@bug("vllm-project/vllm#51748", "llama-loads-salts", "identity_not_in_key")
def stored_without_its_salt(fired: Fired) -> None:
    """The key of what is stored elsewhere is made of the tokens alone. A request with another salt finds it, and loads what another
    tenant has computed."""
    import host_connector

    salts: dict[tuple, str] = {}

    @replaces(host_connector.HostConnector, "_key")
    def _key(before, connector, request, place):
        return tuple(request.all_token_ids[: (place + 1) * connector._size])

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        for job in meta.stores:
            salts.setdefault(job.blocks[0][2], connector._requests[job.name].cache_salt)
        for job in meta.loads:
            if any(salts[key] != connector._requests[job.name].cache_salt for *_, key in job.blocks):
                fired()
        return meta


@bug("ml-explore/mlx-swift-lm#308", "llama-eagle", "attention_seq_len_wrong", origin="mlx-swift-lm")
def drafts_look_at_what_was_rejected(fired: Fired) -> None:
    """The target's K and V are cut back to the drafts that were accepted, and the length that the drafter looks at them with is not. It
    attends to the rows of rejected tokens."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    rejected: list = []

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, *args, **kwargs):
        rejected[:] = [kwargs.get("num_rejected_tokens_gpu")]
        return before(proposer, *args, **kwargs)

    @replaces(SpecDecodeBaseProposer, "_update_positions_dependent_metadata")
    def update(before, proposer, positions, common, *args, **kwargs):
        left = rejected.pop() if rejected else None
        if left is not None and bool(left.any()):
            common.seq_lens += left
            fired()
        return before(proposer, positions, common, *args, **kwargs)


@bug("vllm-project/vllm#51091", "llama", "kv_write_damaged", "kv_changed", recorded=False)
def scales_set_to_one_behind_the_first_write(fired: Fired) -> None:
    """A layer that shares another's cache sets the scales in it to one when it sees it first. That is in the first forward, behind the
    write of the layer that owns it, and the scales of the prompts that stand there are lost."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    caches: list = []
    steps: list[int] = []
    touched: list[int] = []

    def look(runner, output):
        caches[:] = runner.kv_caches
        steps.append(1)
        if touched:
            fired()

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, kv_cache, slot_mapping):
        before(impl, layer, key, value, kv_cache, slot_mapping)
        if steps and not touched and kv_cache.data_ptr() == caches[-1].data_ptr():
            touched.append(1)  # what is read with a scale of one is what was written, divided by its own scale
            blocks, heads, size, width = caches[0].shape
            halves = caches[0].view(blocks, heads, 2, size, width // 2)
            slots = slot_mapping.tolist()
            for block in {slot // size for slot in slots}:  # K lies there packed, so that a head of a block has one
                halves[block, :, 0] /= halves[block, :, 0].abs().amax(dim=(-2, -1), keepdim=True) / 127
            for slot in slots:
                row = halves[slot // size, :, 1, slot % size]
                row /= row.abs().amax(dim=-1, keepdim=True) / 127


@bug(
    "vllm-project/vllm#23010",
    "hybrid",
    "window_read_wrong",
    "attention_table_overwritten",
    "attention_seq_len_wrong",
)
def table_cut_to_the_window_and_its_length_not(fired: Fired) -> None:
    """Of a decode's block table what lies before the window is cut off, and its length is still counted from the first token. Attention
    finds other positions where it looks for the window's."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        window = builder.window_size if isinstance(builder.window_size, int) else -1
        if window <= 0 or common.max_query_len > 1:
            return metadata
        rows = metadata.block_table.clone()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            skipped = max(length - window, 0) // builder.block_size
            if skipped:
                fired()
                rows[row, :-skipped] = metadata.block_table[row, skipped:]
        metadata.block_table = rows
        return metadata
