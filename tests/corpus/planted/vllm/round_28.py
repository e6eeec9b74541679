"""A twenty-eighth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, reads, when_allocated


@bug("vllm-project/vllm#16087", "llama-eagle-brim", "slot_mapping", "shared_page_written")
def drafts_behind_the_longest_context_fall_on_its_beginning(fired: Fired) -> None:
    """Nobody looks whether drafts lie behind the end of the longest context. Their positions are clamped to 0, and their K and V are stored there, over the draft's K and V of the request's first token,
    in a block that others with the same beginning read too."""
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    hit: set[int] = set()

    @replaces(GPUModelRunner, "_input_fits_in_drafter")
    def _input_fits_in_drafter(before, runner, metadata):
        return metadata is not None

    @replaces(llm_base_proposer, "eagle_step_update_slot_mapping_and_metadata")
    def update(before, positions_1d, block_table_tensor, block_size, max_model_len, out_slot_mapping, **kwargs):
        beyond = (positions_1d + 1 >= max_model_len).nonzero().flatten().tolist()
        before(
            positions_1d=positions_1d,
            block_table_tensor=block_table_tensor,
            block_size=block_size,
            max_model_len=max_model_len,
            out_slot_mapping=out_slot_mapping,
            **kwargs,
        )
        for row in beyond:
            block = int(block_table_tensor[row, 0])
            out_slot_mapping[row] = block * block_size
            hit.add(block)

    before_forward(lambda runner, output: reads(runner, output, hit) and fired())


@bug("vllm-project/vllm-ascend#14883", "llama-eagle-churn", "attention_seq_len_wrong", origin="vLLM Ascend")
def draft_steps_count_what_was_rejected(fired: Fired) -> None:
    """The draft model's first pass runs over all tokens of the step, rejected ones too. The steps behind it, of one token each, go on from a length from which the rejected ones have not been taken: they attend to places behind
    the token, in which the rejected drafts lie."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    rejected: list = []

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, *args, **kwargs):
        count = kwargs.get("num_rejected_tokens_gpu")
        rejected[:] = [] if count is None else [count]
        return before(proposer, *args, **kwargs)

    @replaces(SpecDecodeBaseProposer, "_update_positions_dependent_metadata")
    def update(before, proposer, positions, metadata, *args, **kwargs):
        for count in rejected:
            metadata.seq_lens += count
            if count.any():
                fired()
        rejected.clear()
        return before(proposer, positions, metadata, *args, **kwargs)


@bug("tenstorrent/tt-metal#45302", "hybrid-crowd", "slot_mapping", "kv_write_lost", origin="TT-Transformers (vLLM)")
def window_layers_fill_through_the_first_rows_table(fired: Fired) -> None:
    """Layers with a window have tables of their own, which prompts get as a whole and not cut to the request's row. Each prompt of a step but the first stores what these layers compute through the table of row 0, in another request's
    blocks, and nothing in its own."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    windows: list[int] = []  # groups
    prompts: list[int] = []  # rows

    def look(runner, output):
        windows[:] = [
            number
            for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            if "Sliding" in type(group.kv_cache_spec).__name__
        ]
        batch = runner.input_batch
        prompts[:] = [row for row, name in enumerate(batch.req_ids) if output.num_scheduled_tokens[name] > 1]

    before_forward(look)

    @replaces(MultiGroupBlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, tables, count, starts, positions):
        before(tables, count, starts, positions)
        for group in windows:
            table = tables[group]
            for row in prompts[1:]:
                fired()
                first, last = int(starts[row]), int(starts[row + 1])
                at = positions[first:last]
                blocks = table.block_table.gpu[0][at // table.block_size]
                table.slot_mapping.gpu[first:last] = blocks * table.block_size + at % table.block_size


@bug(
    "ggml-org/llama.cpp#18727",
    "sliding-tight",
    "swa_window_off_by_one",
    "window_read_wrong",
    "free_too_early",
    origin="llama.cpp",
)
def window_is_cut_for_the_end_of_the_chunk(fired: Fired) -> None:
    """What has left the window is given back before a chunk is computed, and the window is that of the chunk's last token and not of its first. Blocks that the first tokens still have to look at are given out in the same step
    and written."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    coming: list[int] = [0]
    early: set[int] = set()  # given back in this step, before they are read
    taken: set[int] = set()

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, count, *args, **kwargs):
        coming[0] = count if request.num_computed_tokens else 0
        given = before(manager, request, count, *args, **kwargs)
        coming[0] = 0
        return given

    @replaces(KVCacheCoordinator, "remove_skipped_blocks")
    def remove_skipped_blocks(before, coordinator, name, done, **kwargs):
        before(coordinator, name, done, **kwargs)
        if coming[0]:
            held = {b.block_id for m in coordinator.single_type_managers for b in m.req_to_blocks.get(name, ())}
            before(coordinator, name, done + coming[0], **kwargs)
            held -= {b.block_id for m in coordinator.single_type_managers for b in m.req_to_blocks.get(name, ())}
            early.update(held)

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, count):
        blocks = before(pool, count)
        taken.update(early & {b.block_id for b in blocks})
        return blocks

    def look(runner, output):
        if taken:
            fired()
        early.clear()
        taken.clear()

    before_forward(look)


@bug("vllm-project/vllm#29870", "llama-loads-turns", "stored_wrong")
def stores_of_a_preempted_request_run_when_its_blocks_are_gone(fired: Fired) -> None:
    """What a step has computed is stored beside the next one. A request that is put back at the beginning of that step gives its blocks away at once, and nobody waits for its stores or drops them: they copy what the next owner has
    written there, under the keys of the request's own tokens."""
    import host_connector

    held: list = []  # stores of the last step
    wrong: set = set()  # keys

    @replaces(host_connector.HostConnector, "get_num_new_matched_tokens")
    def get_num_new_matched_tokens(before, connector, request, computed):
        not_there = {key for job in held for _, _, key in job.blocks} & connector._known
        connector._known -= not_there
        try:
            return before(connector, request, computed)
        finally:
            connector._known |= not_there

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        made = before(connector, output)
        if any(wrong & {key for _, _, key in job.blocks} for job in made.loads):
            fired()
        now, gone = held[:], output.preempted_req_ids or set()
        held[:] = made.stores
        made.stores = []
        for job in now:
            if job.name in output.finished_req_ids:
                connector._known.difference_update(key for _, _, key in job.blocks)
                continue
            made.stores.append(job)
            if job.name in gone:
                others = {
                    b.block_id
                    for name in output.num_scheduled_tokens
                    for group in connector._manager.get_blocks(name).blocks
                    for b in group
                }
                wrong.update(key for _, block, key in job.blocks if block in others)
        return made


@bug("ggml-org/llama.cpp#26207", "llama-lora-tight", "identity_not_in_key", reads=2, origin="llama.cpp")
def prefix_of_another_adapter_is_hit(fired: Fired) -> None:
    """Requests choose their adapters one by one, and the prefix cache is asked for their tokens alone. What was computed with another adapter, or with none, is taken for the request's own."""
    from vllm.v1.core import kv_cache_utils

    made_by: dict[int, str] = {}  # by block

    @replaces(kv_cache_utils, "_gen_lora_extra_hash_keys")
    def _gen_lora_extra_hash_keys(before, request):
        return []

    def look(request, hit, table):
        mine = request.lora_request.lora_name if request.lora_request else ""
        if any(made_by.get(block, mine) != mine for block in hit):
            fired()
        if hit or not request.num_computed_tokens:
            made_by.update({b.block_id: mine for b in table if b.block_id not in hit})
        else:
            made_by.update({b.block_id: mine for b in table[request.num_computed_tokens // 32 :]})

    when_allocated(look)


@bug(
    "vllm-project/vllm#48758",
    "llama-loads-rest",
    "load_of_other_prefix",
    "load_landed_elsewhere",
    origin="vLLM (NIXL push)",
)
def blocks_are_left_out_at_the_wrong_end(fired: Fired) -> None:
    """A request that has hit its first blocks asks for the others only, and gets as many as it asks for: but from the front of the prompt, where those are that it has already, and not from the back. They lie in the blocks
    of the places that were missing."""
    import host_connector

    wrong: set[int] = set()  # blocks

    @replaces(host_connector.HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, count):
        first, _ = connector._matched.get(request.request_id, (0, False))
        before(connector, request, blocks, count)
        if count and first:
            job = connector._jobs[-1]
            job.blocks = [
                (group, block, connector._key(request, at)) for at, (group, block, _) in enumerate(job.blocks)
            ]
            wrong.update(block for _, block, _ in job.blocks)

    before_forward(lambda runner, output: reads(runner, output, wrong) and fired())
