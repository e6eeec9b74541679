"""A nineteenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("vllm-project/vllm#53982", "hybrid", "slot_mapping", "commit_beyond_allocation", "kv_write_lost")
def slots_are_looked_up_behind_the_end_of_a_narrow_row(fired: Fired) -> None:
    """The table of a group with a window is narrower than a sequence is long, and what looks up the slots does not ask whether there is such a column. Tokens behind the end of
    a row get the blocks that stand in the next one, which are another request's."""
    import torch
    from vllm.v1.worker import block_table

    columns = 3
    narrow: list = []

    @replaces(block_table.MultiGroupBlockTable, "compute_slot_mapping")
    def all_groups(before, tables, *args, **kwargs):
        narrow[:] = tables.block_tables[-1:]
        before(tables, *args, **kwargs)

    @replaces(block_table.BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, count, starts, positions):
        before(table, count, starts, positions)
        if not narrow or table is not narrow[0]:
            return
        rows = torch.arange(count).repeat_interleave(starts[: count + 1].diff().long())
        at = positions[: len(rows)].long()
        place = at // table.block_size
        beyond = (place >= columns) & (rows + 1 < table.max_num_reqs)
        if bool(beyond.any()):
            fired()
            block = table.block_table.gpu[rows[beyond] + 1, place[beyond] - columns].long()
            table.slot_mapping.gpu[: len(rows)][beyond] = block * table.block_size + at[beyond] % table.block_size


@bug(
    "vllm-project/vllm-ascend#11334",
    "llama-preempt",
    "kv_write_lost",
    "slot_mapping",
    "prefix_not_computed",
    origin="vLLM Ascend",
    late="what a chunk reads of itself is not looked at",
)
def chunk_behind_the_prompt_is_taken_for_a_decode(fired: Fired) -> None:
    """Whether a request is past its prefill is told by its prompt's length. One that was preempted computes what it has answered, too, and a chunk that begins behind its prompt
    is taken for a decode: its first token is stored, and the others are not."""
    from vllm.v1.worker.block_table import BlockTable

    lost: list[int] = []  # places in the batch

    def look(runner, output):
        batch, at = runner.input_batch, 0
        lost.clear()
        for row, name in enumerate(batch.req_ids):
            count = output.num_scheduled_tokens[name]
            if count > 1 and batch.num_computed_tokens_cpu[row] >= batch.num_prompt_tokens[row]:
                lost.extend(range(at + 1, at + count))
                fired()
            at += count

    before_forward(look)

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, *args, **kwargs):
        before(table, *args, **kwargs)
        table.slot_mapping.gpu[lost] = -1


@bug("vllm-project/vllm#55112", "delta-units", "copy_failed", "prefix_not_computed")
def shorter_view_says_how_much_of_a_block_is_copied(fired: Fired) -> None:
    """Layers with states and layers with attention lie over one another in one tensor, and a copy goes through each address once. The states' view comes first and is shorter:
    of a block of the attention its beginning is copied, and the rest stays as it was."""
    from vllm.v1.worker import gpu_model_runner

    runners: list = []
    damaged: set[int] = set()

    @replaces(gpu_model_runner, "copy_kv_cache_blocks_inplace")
    def copy_kv_cache_blocks_inplace(before, caches, count, copies):
        layers = runners[-1].compilation_config.static_forward_context.values()
        views = [one.kv_cache for one in layers if getattr(one, "kv_cache", None) is not None]
        parts = [view.unflatten(0, (count, -1)) for view in views if hasattr(view, "unflatten") and view.dim() == 4]
        targets = [target for _, target in copies]
        held = [part[targets].clone() for part in parts]
        before(caches, count, copies)
        for part, old in zip(parts, held, strict=True):
            _, pieces, _, tokens, _ = part.shape
            for piece in range(pieces):
                first = max(0, pieces * tokens // 4 - piece * tokens)
                new = part[targets, piece, :, first:]
                if new.numel() and bool((new != old[:, piece, :, first:]).any()):
                    part[targets, piece, :, first:] = old[:, piece, :, first:]
                    damaged.update(targets)

    def look(runner, output):
        size = runner.cache_config.block_size
        if damaged and any(new.num_computed_tokens % size for new in output.scheduled_new_reqs):
            fired()

    before_forward(look)

    @replaces(gpu_model_runner.GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        runners[:] = [runner]
        return before(runner, output)


@bug(
    "NVIDIA/TensorRT-LLM#16280",
    "qwen-ngram-page32",
    "commit_beyond_allocation",
    "slot_mapping",
    "req_to_token",
    origin="TensorRT-LLM",
)
def drafts_reach_beyond_what_was_reserved(fired: Fired) -> None:
    """How many blocks a step needs is counted from what the host knows, and the step writes as many tokens more as were drafted. When these go over a block's end, there is no
    block in the table yet, and they are written where its empty entries point."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    beyond: set[str] = set()

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, count, *args, **kwargs):
        end = request.num_computed_tokens + count
        drafts = end - request.num_tokens if request.num_output_tokens and request.num_computed_tokens else 0
        given = before(manager, request, count - max(0, drafts), *args, **kwargs)
        if given is not None and drafts > 0:
            group = manager.coordinator.single_type_managers[0]
            if len(group.req_to_blocks[request.request_id]) * group.block_size < end:
                beyond.add(request.request_id)
        return given

    def look(runner, output):
        if beyond & set(output.num_scheduled_tokens):
            fired()
        beyond.clear()

    before_forward(look)


@bug("vllm-project/vllm#32118", "recurrent-ones", "state_restored_for_other_prefix")
def first_token_of_a_prompt_is_taken_for_a_decode(fired: Fired) -> None:
    """A step has room for one token of a new prompt, and whoever has one token in a step is taken for a decode. It goes on from the state that lies in its slot, which is that of
    whom the slot belonged to before."""
    from vllm.v1.attention.backends import mamba_attn
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(mamba_attn, "split_decodes_and_prefills")
    def split_decodes_and_prefills(before, common, *args, **kwargs):
        made = before(common, *args, **{**kwargs, "treat_short_extends_as_decodes": True})
        counts = common.query_start_loc_cpu.diff()[: made[0]]
        if bool((common.seq_lens[: made[0]] == counts).any()):
            fired()
        return made

    @replaces(GPUModelRunner, "_zero_block_ids")
    def _zero_block_ids(before, runner, blocks):
        """It was before blocks were cleared."""


@bug("vllm-project/vllm#33377", "llama-aborts", "double_free", "free_too_early", "page_given_twice")
def aborted_request_is_freed_when_it_ends_as_well(fired: Fired) -> None:
    """A request is aborted and its blocks go back, and it is found among those that have ended and gives them back once more. What it has shared loses a count that is somebody
    else's, and goes to the free list while it is read."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks):  # an engine that counts below nought ends at once
        left: list = []
        for block in blocks:
            if block.ref_cnt > sum(other is block for other in left):
                left.append(block)
        before(pool, left)

    lost: set[int] = set()
    holders: dict[str, set[int]] = {}
    wrong: set[str] = set()

    @replaces(Scheduler, "finish_requests")
    def finish_requests(before, scheduler, names, status, *args, **kwargs):
        manager = scheduler.kv_cache_manager
        group = manager.coordinator.single_type_managers[0]
        names = [names] if isinstance(names, str) else names
        held = {name: list(group.req_to_blocks.get(name, ())) for name in names or ()}
        done = before(scheduler, names, status, *args, **kwargs)
        for blocks in held.values():
            again = [block for block in reversed(blocks) if block.ref_cnt > 0 and not block.is_null]
            lost.update(block.block_id for block in again)
            manager.block_pool.free_blocks(again)
        return done

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        if given is not None:
            new = {block.block_id for block in given.blocks[0] or ()}
            own = manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
            holders[request.request_id] = {block.block_id for block in own}
            for name, blocks in holders.items():
                if name != request.request_id and lost & new & blocks:
                    wrong.update((name, request.request_id))
        return given

    @replaces(KVCacheManager, "free")
    def free(before, manager, request):
        holders.pop(request.request_id, None)
        wrong.discard(request.request_id)
        before(manager, request)

    before_forward(lambda runner, output: len(wrong & set(output.num_scheduled_tokens)) > 1 and fired())


@bug("vllm-project/vllm#14649", "llama-eagle", "kv_write_lost", "prefix_not_computed")
def what_was_drafted_is_not_computed_anew(fired: Fired) -> None:
    """While it drafts, the drafter goes by its own hidden states, and what it stores is to be overwritten when the target has computed the real ones. For drafts that were
    accepted it is not: K and V of a guess stay in the drafter's cache."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, *args, **kwargs):
        common, rejected = kwargs["common_attn_metadata"], kwargs.get("num_rejected_tokens_gpu")
        if rejected is not None:
            starts, slots = common.query_start_loc.tolist(), common.slot_mapping.clone()
            for row, gone in enumerate(rejected.tolist()):
                accepted = starts[row + 1] - starts[row] - gone - 1
                if 0 < accepted <= 3 and starts[row + 1] - starts[row] <= 4:
                    fired()
                    slots[starts[row] : starts[row] + min(accepted, 2)] = -1
            kwargs["common_attn_metadata"] = common.replace(slot_mapping=slots)
        return before(proposer, *args, **kwargs)
