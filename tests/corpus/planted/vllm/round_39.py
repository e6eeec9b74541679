"""A thirty-ninth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "NVIDIA/TensorRT-LLM#10183",
    "hybrid-floors",
    "hit_before_written",
    "prefix_not_computed",
    "stale_prefix_hit",
    origin="TensorRT-LLM",
)
def longest_hit_of_all_windows_counts(fired: Fired) -> None:
    """Layers with a window and layers without one look for a prefix each among their own blocks, and one length is
    taken for all of them: the longest. Where blocks of the window have gone to others meanwhile, the layers with a
    window get new blocks for tokens that count as computed, and read what lies in there."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    longer: list[bool] = [False]
    hurt: set[str] = set()

    @replaces(HybridKVCacheCoordinator, "find_longest_cache_hit")
    def find_longest_cache_hit(before, coordinator, hashes, most):
        blocks, length, behind = before(coordinator, hashes, most)
        longer[0] = bool(behind)
        if not behind:
            return blocks, length, behind
        found = list(blocks)
        for spec, groups, manager, _ in coordinator.attention_groups:
            if isinstance(spec, FullAttentionSpec):
                own, _ = manager.find_longest_cache_hit(
                    block_hashes=hashes,
                    max_length=length + behind,
                    kv_cache_group_ids=groups,
                    block_pool=coordinator.single_type_managers[groups[0]].block_pool,
                    kv_cache_spec=spec,
                    drop_eagle_block=False,
                    alignment_tokens=coordinator.scheduler_block_size,
                )
                for group, hit in zip(groups, own, strict=True):
                    found[group] = hit
        return tuple(found), length + behind, 0

    @replaces(KVCacheManager, "get_computed_blocks")
    def get_computed_blocks(before, manager, request, *args, **kwargs):
        longer[0] = False
        made = before(manager, request, *args, **kwargs)
        (hurt.add if longer[0] else hurt.discard)(request.request_id)
        return made

    before_forward(lambda runner, output: hurt & set(output.num_scheduled_tokens) and fired())


@bug(
    "vllm-project/vllm-ascend#16149",
    "qwen-loads-split",
    "failed_load_counted_loaded",
    "read_before_landed",
    "copy_failed",
    origin="vLLM Ascend",
)
def later_layers_are_never_asked_for(fired: Fired) -> None:
    """The layers of who computes a prompt are spread over several stages, and who loads it only knows the addresses of
    the first one. It gets the K and V of the first layers, and takes the prompt to be there; for the later layers it
    goes on with what was in its blocks before."""
    from host_connector import HostConnector

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        for group, block, key in job.blocks:
            names = connector._groups[group].layer_names
            known = names[: (len(names) + 1) // 2]
            for name, rows in connector._blocks_of(group, block):
                if name in known:
                    rows.copy_(connector._store[name, key])
        fired()


@bug(
    "gittensor-ai-lab/sparkinfer#150",
    "qwen-admits",
    "row_reassigned_in_flight",
    "slot_mapping",
    "attention_table_overwritten",
    origin="SparkInfer",
)
def captured_step_goes_on_in_the_row_of_who_has_left(fired: Fired) -> None:
    """A step that decodes one sequence is captured once, with the address of the row in which that sequence has its
    table. It is played again when the sequence has left and another one is alone, in a row of its own: it writes and
    reads by the row that was captured, in which the blocks of who has left still stand."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    places: dict[str, int] = {}  # of a request, its row in what the kernels see
    rows: dict[int, object] = {}  # what stands in such a row, also when its request has left
    captured: list[int] = []
    names: list[str] = []

    def look(runner, output):
        batch = runner.input_batch
        names[:] = batch.req_ids
        for gone in set(places) - set(names):
            del places[gone]
        for row, name in enumerate(names):
            if name not in places:
                places[name] = min(set(range(len(names) + len(places))) - set(places.values()))
            rows[places[name]] = batch.block_table[0].block_table.np[row].copy()

    before_forward(look)

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        metadata = before(builder, common_prefix_len, common, *args, **kwargs)
        if common.num_reqs == 1 and common.max_query_len == 1 and len(names) == 1:
            if not captured:
                captured.append(places[names[0]])
            row, last = rows[captured[0]].tolist(), int(common.seq_lens[0]) - 1
            place, at = divmod(last, builder.block_size)
            if metadata.block_table[0, : place + 1].tolist() != row[: place + 1]:
                fired()
                metadata.block_table = metadata.block_table.clone()
                metadata.block_table[0, : place + 1] = torch.tensor(row[: place + 1])
                metadata.slot_mapping[0] = row[place] * builder.block_size + at
        return metadata
