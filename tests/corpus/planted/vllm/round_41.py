"""A forty-first round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward, states_of


@bug("ggml-org/llama.cpp#27994", "qwen-columns", "attention_table_overwritten", origin="llama.cpp")
def cells_of_a_position_are_those_of_the_last_sequence_that_has_it(fired: Fired) -> None:
    """All sequences share one pool of cells, and attention finds those of a whole block of positions in an index that is
    made for each step. The index knows positions and not sequences: whoever lies further on in the pool takes the
    entry, and the others attend to a stranger's tokens there. What is written goes where it should."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        whole = (metadata.seq_lens // builder.block_size).tolist()
        table = metadata.block_table.clone()
        for column in range(max(whole, default=0)):
            rows = [row for row, count in enumerate(whole) if count > column]
            table[rows, column] = metadata.block_table[rows, column].max()
        if not torch.equal(table, metadata.block_table):
            fired()
        metadata.block_table = table
        return metadata


@bug("sgl-project/sglang#32555", "delta-turns", "state_restored_for_other_prefix", origin="SGLang")
def states_of_a_decode_are_kept_in_the_first_slot(fired: Fired) -> None:
    """When an answer comes to the end of a block, the state is to be kept for others in a slot of its own. The slots are
    put in front of a buffer that is as long as the largest batch, and are read from its end, where there are zeros:
    the state goes to slot 0, and the prefix is listed with a slot in which lies what was there before."""
    from vllm.v1.worker import mamba_utils

    lain: dict[tuple[str, int], list[torch.Tensor]] = {}  # what lay in a request's block when it came to it
    spoilt: set[int] = set()

    @replaces(mamba_utils, "preprocess_mamba")
    def preprocess_mamba(before, output, config, cache, columns, batch, requests, layers, *args, **kwargs):
        group, names = next(
            (number, one.layer_names)
            for number, one in enumerate(config.kv_cache_groups)
            if "Mamba" in type(one.kv_cache_spec).__name__
        )
        parts = [part for name in names for part in layers[name].kv_cache]
        size = config.kv_cache_groups[group].kv_cache_spec.block_size
        came_from = {name: columns.get(name) for name in batch.req_ids}
        for name in batch.req_ids:
            request = requests[name]
            now = (request.num_computed_tokens + output.num_scheduled_tokens[name] - 1) // size
            if came_from[name] != now:
                block = request.block_ids[group][now]
                spoilt.discard(block)
                lain[name, now] = [part[block].clone() for part in parts]
        before(output, config, cache, columns, batch, requests, layers, *args, **kwargs)
        given = {b for new in output.scheduled_new_reqs for b in new.block_ids[group]}
        given |= {b for ids in output.scheduled_cached_reqs.new_block_ids if ids for b in ids[group]}
        for name in batch.req_ids:
            request, last = requests[name], came_from[name]
            if last is None or columns[name] == last or request.num_computed_tokens <= request.num_prompt_tokens:
                continue
            block = request.block_ids[group][last]
            if block and block not in given:
                spoilt.add(block)
                for part, before_it in zip(parts, lain[name, last], strict=True):
                    part[0] = part[block]
                    part[block] = before_it

    def look(runner, output):
        group, _ = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        for new in output.scheduled_new_reqs:
            if new.num_computed_tokens and new.block_ids[group][(new.num_computed_tokens - 1) // size] in spoilt:
                fired()

    before_forward(look)


@bug(
    "vllm-project/vllm#28677",
    "qwen-loads-kernels",
    "load_landed_elsewhere",
    "transfer_wrong_stride",
    "failed_load_counted_loaded",
)
def blocks_of_the_scheduler_are_taken_for_those_of_the_kernel(fired: Fired) -> None:
    """The kernel's blocks are half as large as those that the scheduler counts, and the transfer has registered memory
    by the kernel's. It is given the scheduler's numbers and takes them as they are, at both ends: of each block, one
    half of another one is fetched, and is put over a half of one that has nothing to do with it."""
    from host_connector import HostConnector

    sent: dict[tuple, torch.Tensor] = {}

    def at(connector, name, number):
        cache = connector._caches[name]
        return cache.view(len(cache) * 2, -1)[number]

    @replaces(HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        for job in connector._get_connector_metadata().stores:
            for group, block, key in job.blocks:
                for name, _ in connector._blocks_of(group, block):
                    sent[name, key] = at(connector, name, block).clone()

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        for group, block, key in job.blocks:
            for name, _ in connector._blocks_of(group, block):
                at(connector, name, block).copy_(sent[name, key])
        fired()


@bug("lightseekorg/tokenspeed#1107", "llama-eagle-steps", "slot_mapping", origin="TokenSpeed")
def all_steps_of_a_draft_write_to_the_requests_one_place(fired: Fired) -> None:
    """Keys and values of a draft are written ahead by places that the drafter has for each of its steps. They are taken
    from what the group of layers has for the batch instead, in which a request has one place: each further step
    writes over the one before it, and later steps read what lies in the places that nobody has written."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    place: list[torch.Tensor] = []

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, *args, **kwargs):
        place.clear()
        return before(proposer, *args, **kwargs)

    @replaces(SpecDecodeBaseProposer, "_update_positions_dependent_metadata")
    def _update_positions_dependent_metadata(before, proposer, positions, common, batch, padded, size):
        if not place:
            rows = torch.arange(batch)
            blocks = common.block_table_tensor[rows, (positions[:batch] // size).long()].long()
            place.append(blocks * size + positions[:batch] % size)
        made = before(proposer, positions, common, batch, padded, size)
        proposer._slot_mapping_buffer[:batch] = place[0]
        fired()
        return made


PAGES = 6  # that the store has


@bug(
    "kvcache-ai/Mooncake#850",
    "qwen-loads-slow",
    "host_copy_overwritten",
    "load_of_other_prefix",
    origin="Mooncake",
)
def lease_ends_before_the_read_does(fired: Fired) -> None:
    """Who reads from the store has a lease, for which nothing that it reads is evicted, and the lease has an end. A read
    that takes longer goes on in pages that have been given to other prompts since, and nobody looks at the lease when
    it is over: its first layers are of the prompt that was asked for, and its later ones of another."""
    from host_connector import LATER, HostConnector

    page_of: dict[tuple, int] = {}  # of a key, in the order in which they came
    held: dict[int, dict[str, torch.Tensor]] = {}  # what is in a page, by layer
    asked: dict[str, dict[tuple, int]] = {}  # by request: the pages that its read was told
    worker: list[HostConnector] = []

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        leased = set()
        for job in meta.loads:
            asked[job.name] = {key: page_of[key] for *_, key in job.blocks}
            leased.update(asked[job.name])
        for job in meta.stores:
            for *_, key in job.blocks:
                if len(page_of) < PAGES:
                    page_of[key] = len(page_of)
                    continue
                oldest = next(old for old in page_of if old not in leased)
                page_of[key] = page_of.pop(oldest)
                connector._known.discard(oldest)
                for name in [one for one in worker[0]._store if one[1] == oldest]:
                    del worker[0]._store[name]
        return meta

    @replaces(HostConnector, "register_kv_caches")
    def register_kv_caches(before, connector, caches):
        before(connector, caches)
        worker[:] = [connector]

    @replaces(HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        for job in connector._get_connector_metadata().stores:
            for group, block, key in job.blocks:
                rows = {name: connector._store[name, key] for name, _ in connector._blocks_of(group, block)}
                held[page_of[key]] = rows

    def read(connector, job, first):
        """Read the first half of a job's layers, or the second."""
        for group, block, key in job.blocks:
            layers = connector._blocks_of(group, block)
            half = len(layers) // 2
            for name, rows in layers[:half] if first else layers[half:]:
                rows.copy_(held[asked[job.name][key]][name])

    @replaces(HostConnector, "get_finished")
    def get_finished(before, connector, finished):
        for job in connector._under_way:
            if job.left == LATER:
                read(connector, job, True)
        return before(connector, finished)

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        read(connector, job, False)
        if any(page_of.get(key) != page for key, page in asked[job.name].items()):
            fired()


@bug(
    "sgl-project/sglang#24743",
    "hybrid-graphs",
    "pad_rows_keep_last_blocks",
    "kv_changed",
    "layer_changed",
    origin="SGLang",
)
def padding_keeps_its_places_in_the_window_layers(fired: Fired) -> None:
    """A decode is run as one of the next larger size that has been captured. The places of the rows that are added are
    set back to none for the layers that see everything, and the list of places for the layers with a window is not:
    there, these rows are written again to where their last owners had a token, whoever has that by now."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    fed: dict[int, tuple] = {}  # of a row: its last token and position
    places: dict[tuple[int, str], int] = {}  # of a row and layer

    @replaces(GPUModelRunner, "_model_forward")
    def _model_forward(before, runner, *args, **kwargs):
        context, batch = get_forward_context(), runner.input_batch
        ids, count = kwargs.get("input_ids"), batch.num_reqs
        if context.attn_metadata is None or ids is None or len(ids) != count:
            return before(runner, *args, **kwargs)
        if any(metadata.max_query_len > 1 for metadata in context.attn_metadata.values()):
            return before(runner, *args, **kwargs)
        positions, slots = kwargs["positions"], context.slot_mapping
        size = next(size for size in (1, 2, 4, 8) if size >= count)
        added = [row for row in range(count, size) if row in fed]
        windowed = {
            name: number
            for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if "Sliding" in type(group.kv_cache_spec).__name__
        }
        for row, (token, position) in enumerate(zip(ids.tolist(), positions.tolist(), strict=True)):
            fed[row] = token, position
            places.update({(row, name): int(slots[name][row]) for name in slots})
        if not added:
            return before(runner, *args, **kwargs)
        for name, number in windowed.items():
            table = batch.block_table[number]
            for row in range(count):
                for block, inside in (divmod(places[one, name], table.block_size) for one in added):
                    where = table.block_table.np[row, : int(positions[row]) // table.block_size + 1].tolist()
                    if block in where and where.index(block) * table.block_size + inside < int(positions[row]):
                        fired()
        kwargs["input_ids"] = torch.cat((ids, ids.new_tensor([fed[row][0] for row in added])))
        kwargs["positions"] = torch.cat((positions, positions.new_tensor([fed[row][1] for row in added])))
        context.slot_mapping = {
            name: torch.cat((one, one.new_tensor([places[row, name] if name in windowed else -1 for row in added])))
            for name, one in slots.items()
        }
        try:
            return before(runner, *args, **kwargs)[:count]
        finally:
            context.slot_mapping = slots

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, cache, metadata, output, *args, **kwargs):
        count = len(output) if metadata is None else metadata.num_actual_tokens
        if count < len(output):  # a row that is added sees itself
            alone = value[count:].repeat_interleave(impl.num_queries_per_kv, dim=1)
            output[count:] = alone.reshape(output[count:].shape)
        return before(impl, layer, query, key, value, cache, metadata, output, *args, **kwargs)
