"""A ninth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("kvcache-ai/Mooncake#4153", "llama-loads-parts", "load_of_other_prefix", origin="Mooncake")
def found_by_the_first_of_its_tokens(fired: Fired) -> None:
    """A store is asked for a part of a large block, and finds the block by the tokens that the part has. What comes is the whole of
    another prompt's block, whose end is not this one's."""
    import host_connector

    whole: dict[tuple, tuple] = {}

    @replaces(host_connector.HostConnector, "_key")
    def _key(before, connector, request, place):
        return tuple(request.all_token_ids[: place * connector._size + 4])

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        for job in meta.stores:
            tokens, at = connector._requests[job.name].all_token_ids, len(job.blocks[0][2]) - 4 + connector._size
            whole.setdefault(job.blocks[0][2], tuple(tokens[:at]))
        for job in meta.loads:
            tokens = connector._requests[job.name].all_token_ids
            if any(whole[key] != tuple(tokens[: len(whole[key])]) for *_, key in job.blocks):
                fired()
        return meta


@bug(
    "lightseekorg/tokenspeed#974",
    "llama-eagle",
    "groups_alias",
    "kv_changed",
    "kv_write_damaged",
    "kv_write_lost",
    origin="tokenspeed",
)
def draft_layers_counted_from_the_targets_first(fired: Fired) -> None:
    """The layers of a draft model are counted from none in the target's pool, not behind the target's last. The draft's K and V go over
    those of the target's first layer."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    steps: list[int] = []

    @replaces(GPUModelRunner, "initialize_kv_cache_tensors")
    def initialize(before, runner, *args, **kwargs):
        made = before(runner, *args, **kwargs)
        layers = runner.compilation_config.static_forward_context
        drafts = set(runner.drafter._draft_attn_layer_names)
        first = next(name for name in layers if name not in drafts)
        for name in drafts:
            layers[name].kv_cache = layers[first].kv_cache
        return made

    def look(runner, output):
        steps.append(1)
        if len(steps) > 1:
            fired()

    before_forward(look)


@bug(
    "vllm-project/vllm#54647",
    "hybrid-loads",
    "load_landed_elsewhere",
    "failed_load_counted_loaded",
    "layout_misread",
)
def all_layers_are_of_the_first_group(fired: Fired) -> None:
    """A connector takes every layer for one of the first group. What it loads for the layers of another group goes to the first
    group's blocks, and the blocks of the other stay as they were."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def load(before, connector, job):
        fired()
        for gid, block, key in job.blocks:
            for group in connector._groups if gid == 0 else ():
                for name in group.layer_names:
                    if (name, key) in connector._store:
                        connector._caches[name][block].copy_(connector._store[name, key])


@bug(
    "vllm-project/vllm-ascend#13863",
    "qwen-ngram",
    "position_off",
    "prefix_not_computed",
    "slot_mapping",
    origin="vLLM Ascend",
)
def accepted_counts_of_the_rows_before(fired: Fired) -> None:
    """The counts of accepted drafts stand in the rows of the step before, and are read by the rows of this one. A request that has moved
    to another's row counts a draft more than it had accepted, for that step."""
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    moved: set[str] = set()
    rows: list[int] = []

    @replaces(InputBatch, "condense")
    def condense(before, batch):
        names = list(batch._req_ids)
        before(batch)
        moved.update(name for row, name in enumerate(batch._req_ids) if name and names[row] != name and name in names)

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
            ends = int(batch.num_computed_tokens_cpu[row]) + output.num_scheduled_tokens[name]
            if name in moved and ends % 64 > output.num_scheduled_tokens[name]:
                rows.append(row)
        moved.clear()
        if rows:
            fired()
        made = before(runner, output, *args, **kwargs)
        for row in rows:
            runner.seq_lens[row] += 1
        return made


@bug("vllm-project/vllm#43569", "llama", "hit_before_written")
def registered_and_not_taken_back(fired: Fired) -> None:
    """The blocks of a chunk join the prefix cache when they are given out. The request is put back before the step runs, and its blocks
    stay in the cache: it comes again and hits what nobody has computed."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    empty: set[int] = set()

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        hit = kwargs.get("new_computed_blocks")
        if given is not None and hit is not None and empty & {b.block_id for b in hit.blocks[0]}:
            fired()
        if given is not None and not empty and request.num_tokens > 70 and manager.usage > 0.04:
            table = manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
            empty.update(block.block_id for block in table)
            manager.free(request)
            return None
        return given
