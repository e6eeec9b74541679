"""A twelfth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug("vllm-project/vllm#26661", "llama-preempt", "req_to_token")
def resumed_behind_its_old_blocks(fired: Fired) -> None:
    """A request that was preempted comes back in a step that still knows the blocks that it had, and its new ones are put behind them. The
    row begins with blocks that it has given back, and its tokens go there."""
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    had: dict[str, list[list[int]]] = {}

    @replaces(GPUModelRunner, "_update_states")
    def _update_states(before, runner, output):
        for name in output.scheduled_cached_reqs.resumed_req_ids:
            had[name] = [list(blocks) for blocks in runner.requests[name].block_ids]
        made = before(runner, output)
        had.clear()
        return made

    @replaces(InputBatch, "add_request")
    def add_request(before, batch, request):
        old = had.get(request.req_id)
        if old is not None:
            new = [list(blocks) for blocks in request.block_ids]
            room = batch.block_table[0].max_num_blocks_per_req
            request.block_ids = tuple((first + last)[:room] for first, last in zip(old, new, strict=True))
            if request.block_ids[0][: len(new[0])] != new[0]:
                fired()
        return before(batch, request)


@bug("vllm-project/vllm#34616", "llama-loads-late", "prefix_not_computed", "failed_load_counted_loaded")
def load_is_counted_to_its_blocks_end(fired: Fired) -> None:
    """What a load beside the forwards has brought is counted in the blocks that it was given. It ends inside one, and the tokens behind its
    end count as computed, too: nobody computes them."""
    import host_connector
    from vllm.v1.core.sched.scheduler import Scheduler

    short = 5
    rounded: set[str] = set()

    @replaces(host_connector.HostConnector, "get_num_new_matched_tokens")
    def get_num_new_matched_tokens(before, connector, request, computed):
        count, beside = before(connector, request, computed)
        return (count - short if beside and count > short else count), beside

    @replaces(host_connector.HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, count):
        before(connector, request, blocks, -(-count // connector._size) * connector._size)

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        *_, (gid, block, _) = job.blocks
        stood = [(rows, rows[:, connector._size - short :].clone()) for _, rows in connector._blocks_of(gid, block)]
        before(connector, job)
        for rows, old in stood:
            rows[:, connector._size - short :] = old

    @replaces(Scheduler, "_update_waiting_for_remote_kv")
    def _update_waiting_for_remote_kv(before, scheduler, request):
        size = scheduler.cache_config.block_size
        whole = min(-(-request.num_computed_tokens // size) * size, request.num_tokens)
        if whole != request.num_computed_tokens:
            rounded.add(request.request_id)
            request.num_computed_tokens = whole
        before(scheduler, request)

    before_forward(lambda runner, output: rounded & set(output.num_scheduled_tokens) and fired())


@bug("LMCache/LMCache#4783", "llama-salts", "identity_not_in_key", origin="LMCache", reads=29)
def identity_cut_to_a_few_bits(fired: Fired) -> None:
    """What a block's tokens do not say is put into its key as the few last bits of a digest. Two identities have the same ones, and a request
    hits what was computed for the other."""
    from hashlib import blake2b

    from vllm.v1.core import kv_cache_utils

    salts: dict[int, str] = {}

    @replaces(kv_cache_utils, "generate_block_hash_extra_keys")
    def generate(before, request, start, end, mm):
        keys, mm = before(request, start, end, mm)
        if keys is None:
            return keys, mm
        return tuple((kind, blake2b(str(value).encode()).digest()[-1] % 2) for kind, value in keys), mm

    def look(request, hit, table):
        if any(salts.get(block, request.cache_salt) != request.cache_salt for block in hit):
            fired()
        for block in table[len(hit) :]:
            salts[block.block_id] = request.cache_salt

    when_allocated(look)


@bug("vllm-project/vllm#40859", "recurrent", "state_restored_for_other_prefix")
def decodes_looked_for_behind_the_prefills(fired: Fired) -> None:
    """In a batch of both the decodes come first, and a layer with a recurrent state takes them for the last. They go on from the states of
    the requests that stand there, and overwrite them."""
    import torch
    from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

    @replaces(ShortConvAttentionMetadataBuilder, "build")
    def build(before, builder, *args, **kwargs):
        metadata = before(builder, *args, **kwargs)
        decodes, prefills = metadata.num_decodes, metadata.num_prefills
        if decodes and prefills:
            fired()
            rows = [metadata.state_indices_tensor_d.flatten(), metadata.state_indices_tensor_p.flatten()]
            metadata.state_indices_tensor_d = torch.cat(rows)[prefills:][:decodes].view_as(
                metadata.state_indices_tensor_d
            )
        return metadata


@bug("vllm-project/vllm#51031", "llama", "slot_mapping")
def slots_in_blocks_of_another_size(fired: Fired) -> None:
    """The kernel that works out slots keeps the size of a block that was first asked for, and the attention backend has set another. Tokens
    are written where its blocks would be, and read where they are."""
    from vllm.v1.worker.block_table import BlockTable

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        before(table, num_reqs, starts, positions)
        size, rows = table.block_size // 2, table.block_table.gpu
        for row in range(num_reqs):
            for at in range(int(starts[row]), int(starts[row + 1])):
                place = int(positions[at])
                block = int(rows[row, min(place // size, rows.shape[1] - 1)])
                table.slot_mapping.gpu[at] = block * size + place % size
        fired()


@bug(
    "vllm-project/vllm#35092",
    "llama-loads-late",
    "host_copy_overwritten",
    "load_of_other_prefix",
    "stored_wrong",
)
def stored_while_it_is_loaded(fired: Fired) -> None:
    """A request's blocks are given to be stored when it gets them, and they are being loaded from the same store beside the forwards. What
    stood in them before goes over the good copy, and the load brings that."""
    import host_connector
    import torch

    asked: list = []
    spoilt: set = set()
    loaded: set[str] = set()

    @replaces(host_connector.HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, count):
        known = len(connector._jobs)
        before(connector, request, blocks, count)
        asked.extend(host_connector.Job(job.name, list(job.blocks)) for job in connector._jobs[known:] if job.beside)

    @replaces(host_connector.HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        meta.stores += asked
        asked.clear()
        return meta

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        held = dict(connector._store)
        before(connector)
        spoilt.update(
            key for place, rows in held.items() for key in place[1:] if not torch.equal(rows, connector._store[place])
        )

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        if spoilt & {key for *_, key in job.blocks}:
            loaded.add(job.name)

    before_forward(lambda runner, output: loaded & set(output.num_scheduled_tokens) and fired())


@bug("LMCache/LMCache#2966", "llama-loads", "failed_load_counted_loaded", origin="LMCache")
def counted_while_it_is_being_put(fired: Fired) -> None:
    """Behind the first block that a store does not have, its other side is asked for the rest alone, and counts blocks whose put has not
    ended. The load finds nothing there, and the request goes on as if it had."""
    import host_connector

    class Putting(dict):
        """What is kept under (layer, key): the puts of second blocks never end."""

        def __setitem__(self, place, rows):
            if len(place[1]) != 64:
                super().__setitem__(place, rows)

    @replaces(host_connector.HostConnector, "__init__")
    def init(before, connector, *args, **kwargs):
        before(connector, *args, **kwargs)
        if hasattr(connector, "_store"):
            connector._store = Putting()

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        name = connector._groups[0].layer_names[0]
        there = [block for block in job.blocks if (name, block[2]) in connector._store]
        if len(there) < len(job.blocks):
            fired()
        before(connector, host_connector.Job(job.name, there))


@bug("lablup/mlxcel#215", "sliding", "free_too_early", "page_given_twice", origin="mlxcel")
def trimmed_to_what_is_in_the_window(fired: Fired) -> None:
    """A table is looked up by a token's place from the first on, and trimmed to as many blocks as the tokens in the window need. What has slid
    out at the front is cut off at the end once more: the last block is given back, and its request goes on in it."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    trimmed: set[str] = set()

    @replaces(SlidingWindowManager, "remove_skipped_blocks")
    def remove_skipped_blocks(before, manager, name, *args, **kwargs):
        made = before(manager, name, *args, **kwargs)
        blocks = manager.req_to_blocks.get(name, [])
        gone = sum(block.is_null for block in blocks)
        tail = [block for block in blocks[len(blocks) - gone :] if not block.is_null]
        if gone and tail and not trimmed:
            trimmed.add(name)
            blocks[-len(tail) :] = [manager._null_block] * len(tail)
            manager.block_pool.free_blocks(tail)
        return made

    before_forward(lambda runner, output: trimmed & set(output.num_scheduled_tokens) and fired())


@bug("jundot/omlx#2363", "qwen-ngram-page32", "position_off", origin="oMLX", reads=5)
def drafts_stand_where_the_first_does(fired: Fired) -> None:
    """The positions of a step are made of where each row begins, and that goes to all tokens of the row. Drafts that are checked behind a token
    are computed at the token's position, and those that are accepted stay so in the cache."""
    from vllm.v1.worker.block_table import BlockTable

    rows: list[int] = []

    def look(runner, output):
        drafted = output.scheduled_spec_decode_tokens
        rows[:] = [row for row, name in enumerate(runner.input_batch.req_ids) if drafted.get(name)]
        if rows:
            fired()

    before_forward(look)

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        before(table, num_reqs, starts, positions)
        for row in rows:
            first, end = int(starts[row]), int(starts[row + 1])
            positions[first:end] = positions[first].clone()
