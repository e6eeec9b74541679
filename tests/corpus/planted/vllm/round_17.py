"""A seventeenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("vllm-project/vllm-gaudi#642", "llama-async", "next_token_swap", "future_map_overrun", origin="vLLM Gaudi")
def last_steps_tokens_copied_in_the_order_of_now(fired: Fired) -> None:
    """The tokens that the step before has sampled are still on the device when the next one is made ready, and are copied from the front, as many as there are decodes.
    Where the rows have moved since, requests are fed what was sampled for one another."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    last: list[str] = []  # who was in the rows of the step before
    sampled: list[int] = []  # for each of them

    @replaces(GPUModelRunner, "_sample")
    def _sample(before, runner, *args, **kwargs):
        made = before(runner, *args, **kwargs)
        sampled[:] = made.sampled_token_ids[:, 0].tolist()
        return made

    @replaces(GPUModelRunner, "_prepare_input_ids")
    def _prepare_input_ids(before, runner, output, count, total, ends):
        done = before(runner, output, count, total, ends)
        names, ids = runner.input_batch.req_ids[:count], runner.input_ids.gpu
        decodes = [row for row, name in enumerate(names) if name in last and output.num_scheduled_tokens[name] == 1]
        for row, token in zip(decodes, list(sampled), strict=False):
            if int(ids[int(ends[row]) - 1]) != token:
                fired()
                ids[int(ends[row]) - 1] = token
        last[:] = names
        return done


@bug("vllm-project/vllm#46204", "llama-loads-parts", "layout_misread")
def heads_and_tokens_change_places_on_the_way(fired: Fired) -> None:
    """One side of a transfer keeps a block's heads before its tokens, and the connector takes it for one that has the tokens first. All bytes arrive, and the rows of a
    head are spread over the heads."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        for gid, block, _ in job.blocks:
            for _, rows in connector._blocks_of(gid, block):
                heads, tokens, width = rows.shape
                turned = rows.reshape(tokens, heads, width).transpose(0, 1)
                if bool((turned != rows).any()):
                    fired()
                    rows.copy_(turned.clone())


@bug(
    "inference-sim/inference-sim#200",
    "hybrid-preempt",
    "page_leaked",
    origin="inference-sim",
    late="it does no harm, and is seen when no request is left",
)
def what_was_taken_before_it_failed_is_kept(fired: Fired) -> None:
    """Blocks are taken one after the other, and when there is none left the request is told that it cannot have any. Those that were taken already are in nobody's table
    and do not go back."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    lost: list = []

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        if given is None and not lost and manager.block_pool.get_num_free_blocks():
            lost.extend(manager.block_pool.get_new_blocks(1))
            fired()
        return given


@bug("NVIDIA/TensorRT-LLM#15727", "hybrid-loads", "stored_wrong", "load_of_other_prefix", origin="TensorRT-LLM")
def chunk_of_a_window_is_cut_at_the_lists_end(fired: Fired) -> None:
    """Which blocks of a group with a window belong to a chunk is counted from the end of the group's list, and the list has a block already for what comes next. Each
    block of such a group is sent in the place of the one before it."""
    import host_connector
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    wrong: set = set()

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        for job in meta.stores:
            groups = connector._manager.get_blocks(job.name).blocks
            for at, (gid, block, key) in enumerate(job.blocks):
                place = len(key) // connector._size
                windowed = isinstance(connector._groups[gid].kv_cache_spec, SlidingWindowSpec)
                if windowed and place < len(groups[gid]) and not groups[gid][place].is_null:
                    job.blocks[at] = (gid, groups[gid][place].block_id, key)
                    if groups[gid][place].block_id != block:
                        wrong.add(key)
        return meta

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        if wrong & {key for *_, key in job.blocks}:
            fired()
        before(connector, job)


@bug("lablup/mlxcel#994", "llama-eagle", "position_off", origin="mlxcel", reads=17)
def drafter_is_cut_back_too_far_at_each_rejection(fired: Fired) -> None:
    """When drafts are rejected, the drafter's cache is cut back by two tokens more than were wrong, and what is missing is never made up for. From round to round it
    stands farther behind the request."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    names: list[str] = []
    behind: dict[str, int] = {}
    before_forward(lambda runner, _: names.__setitem__(slice(None), runner.input_batch.req_ids))

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, *args, **kwargs):
        rejected, common = kwargs.get("num_rejected_tokens_gpu"), kwargs.get("common_attn_metadata")
        starts = common.query_start_loc.tolist()
        positions = kwargs["target_positions"].clone()
        for row, name in enumerate(names[: len(starts) - 1]):
            gap = behind.get(name, 0)
            if gap:
                fired()
                own = positions[starts[row] : starts[row + 1]]
                own.copy_((own - gap).clamp(min=0))
            if rejected is not None and row < len(rejected) and int(rejected[row]):
                behind[name] = gap + 2
        return before(proposer, *args, **{**kwargs, "target_positions": positions})


@bug("sgl-project/sglang#37975", "llama-parts", "attention_seq_len_wrong", origin="SGLang")
def lengths_stay_as_they_were_captured(fired: Fired) -> None:
    """A graph of a batch's size reads where each request ends from a buffer of its own, and when it is replayed the ends are written to the one that is used without
    graphs. Attention goes by the lengths of the first batch of that size."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    captured: dict = {}

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        if common.max_query_len == 1:
            kept = captured.setdefault(common.num_reqs, common.seq_lens.clone())
            if bool((kept != common.seq_lens).any()):
                fired()
                common = common.replace(seq_lens=kept.clone())
        return before(builder, common_prefix_len, common, *args, **kwargs)
