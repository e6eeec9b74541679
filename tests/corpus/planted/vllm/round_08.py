"""An eighth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug("Anbeeld/beellama.cpp#27", "llama-churn", "position_off", "seq_len_backwards", origin="beellama.cpp")
def count_of_the_row_before(fired: Fired) -> None:
    """A request moves down into the row of one that has ended, and the count of computed tokens that stands there is not replaced
    by its own. For a step it goes on where the other one stood."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    @replaces(InputBatch, "condense")
    def condense(before, batch):
        names, counts = list(batch._req_ids), batch.num_computed_tokens_cpu.copy()
        before(batch)
        for row, name in enumerate(batch._req_ids):
            if row < len(names) and name is not None and names[row] != name and name in names:
                if counts[row] != batch.num_computed_tokens_cpu[row]:
                    fired()
                batch.num_computed_tokens_cpu[row] = counts[row]


@bug("tenstorrent/tt-xla#5778", "hybrid", "req_to_token", "row_reassigned_in_flight", origin="tt-xla")
def one_table_of_two_is_moved(fired: Fired) -> None:
    """A request moves down into the row of one that has ended, and of the tables of its groups only the first moves with it. In the
    others it goes on through the blocks of the one that has ended."""
    from vllm.v1.worker.block_table import MultiGroupBlockTable

    moved: list[int] = []

    @replaces(MultiGroupBlockTable, "move_row")
    def move_row(before, tables, source, target):
        tables.block_tables[0].move_row(source, target)
        moved.append(target)

    before_forward(lambda runner, output: moved and fired())


@bug("vllm-project/vllm#54397", "sliding", "swa_window_off_by_one", "prefix_not_computed")
def hit_of_a_part_of_the_window(fired: Fired) -> None:
    """The number of blocks that a hit needs behind a sliding window is rounded down. A request joins a prefix of whose window the
    first part has no block, and reads the placeholder there."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    @replaces(SlidingWindowManager, "_contiguous_blocks_for_hit")
    def contiguous(before, window_size, block_size, use_eagle):
        return max(1, (window_size - 1) // block_size)

    when_allocated(lambda request, hit, table: len(hit) > 1 and hit[-1] and not hit[-2] and fired())


@bug("vllm-project/vllm#51113", "recurrent", "state_restored_for_other_prefix")
def state_cached_under_a_later_boundary(fired: Fired) -> None:
    """A chunk of a prompt ends in the middle of a block and leaves its recurrent state in that block's place. When the next chunk has
    filled the block, the state joins the prefix cache as the one at the block's end. A hit goes on from it."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    @replaces(Scheduler, "_mamba_block_aligned_split")
    def split(before, scheduler, request, count, *args, **kwargs):
        return count

    held: dict[int, int] = {}

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, count, *args, **kwargs):
        given, hit = before(manager, request, count, *args, **kwargs), kwargs.get("num_new_computed_tokens", 0)
        groups = manager.coordinator.single_type_managers
        states = next(g for g in groups if isinstance(g, MambaManager))
        blocks, size = states.req_to_blocks.get(request.request_id, []), states.block_size
        if given is not None:
            start = request.num_computed_tokens + hit
            if hit and held.get(blocks[start // size - 1].block_id, start) != start:
                fired()
            place = -(-(start + count) // size) - 1
            held[blocks[place].block_id] = start + count
        return given


@bug(
    "vllm-project/vllm#57128",
    "llama-eagle-parts",
    "tokens_truncated_hash_kept",
    "chunk_tail_predicted_token",
    recorded=False,
)
def last_block_of_a_draft_hit_kept(fired: Fired) -> None:
    """The draft model's K and V of a token are made with the token behind it, so that the last block of a hit must be computed anew
    for it. That block is kept, and where the prompts part right behind it its last slot is for another prompt's token."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    follows: dict[int, int] = {}
    parted: list[str] = []

    find = FullAttentionManager.find_longest_cache_hit
    FullAttentionManager.find_longest_cache_hit = staticmethod(
        lambda *args, **kwargs: find(*args, **{**kwargs, "drop_eagle_block": False})
    )

    def look(request, hit, table):
        tokens = request.all_token_ids
        if hit and follows.get(hit[-1], -1) not in (-1, tokens[len(hit) * 32]):
            parted.append(request.request_id)
        for place, block in enumerate(table[len(hit) :], len(hit)):
            if (place + 1) * 32 < len(tokens):
                follows[block.block_id] = tokens[(place + 1) * 32]

    when_allocated(look)

    @replaces(SpecDecodeBaseProposer, "set_inputs_first_pass")
    def set_inputs_first_pass(before, proposer, *args, **kwargs):
        if parted:
            fired()
        return before(proposer, *args, **kwargs)


@bug("dingodb/DingoCache#354", "llama-loads", "load_of_other_prefix", "stored_wrong", origin="DingoCache")
def blocks_of_a_later_chunk_counted_from_one(fired: Fired) -> None:
    """A connector takes what a step names of a request's blocks for the whole list, and counts the places of a later chunk one too
    high. A block is stored under the key of the one before it, and loaded as that."""
    import host_connector

    wrong: set = set()

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        later = set(output.scheduled_cached_reqs.req_ids)
        for job in meta.stores:
            groups = connector._manager.get_blocks(job.name).blocks
            place = len(job.blocks[0][2]) // connector._size
            if job.name in later and all(place < len(g) for g in groups):
                job.blocks = [(gid, groups[gid][place].block_id, key) for gid, _, key in job.blocks]
                wrong.add(job.blocks[0][2])
        return meta

    @replaces(host_connector.HostConnector, "_load")
    def load(before, connector, job):
        if wrong & {key for *_, key in job.blocks}:
            fired()
        before(connector, job)


@bug("LMCache/LMCache#3389", "llama-loads", "failed_load_counted_loaded", "layer_changed", origin="LMCache")
def last_layer_is_not_loaded(fired: Fired) -> None:
    """Blocks are loaded layer by layer, each layer's load is begun by the one before it, and nobody begins that of the last. Its K
    and V are what stood in the blocks."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def load(before, connector, job):
        fired()
        last = {gid: connector._groups[gid].layer_names[-1] for gid, *_ in job.blocks}
        kept = {(gid, b): connector._caches[last[gid]][b].clone() for gid, b, _ in job.blocks}
        before(connector, job)
        for (gid, block), rows in kept.items():
            connector._caches[last[gid]][block].copy_(rows)
