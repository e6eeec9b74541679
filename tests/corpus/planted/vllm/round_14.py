"""A fourteenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, parts_of, states_of


@bug("LMCache/LMCache#4991", "llama-loads", "stored_wrong", origin="LMCache")
def failed_store_stays_in_the_index(fired: Fired) -> None:
    """A store fails in the middle, which is logged and nothing more: the object keeps its key. A lookup finds it, and what is loaded ends where
    the store did; behind that comes what the buffer was made of."""
    import host_connector

    broken: set = set()

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        held = set(connector._store)
        before(connector)
        for place in connector._store.keys() - held:
            _name, key = place
            if len(key) == 2 * connector._size:
                connector._store[place][:, connector._size // 2 :] = 0
                broken.add(key)

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        if broken & {key for *_, key in job.blocks}:
            fired()
        before(connector, job)


@bug(
    "vllm-project/vllm-ascend#13501",
    "sliding",
    "swa_window_off_by_one",
    "free_too_early",
    origin="vLLM Ascend",
    late="not found: others hold the block that is given back too early, so it does no harm",
)
def window_slides_by_what_is_scheduled(fired: Fired) -> None:
    """What has left the window is given back by the count of tokens that are scheduled, and the last of these is still to be computed. Its window
    begins in the block that is given back."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    early: set[str] = set()

    @replaces(SlidingWindowManager, "remove_skipped_blocks")
    def remove_skipped_blocks(before, manager, name, computed, *args, **kwargs):
        blocks = manager.req_to_blocks.get(name, [])
        gone = sum(block.is_null for block in blocks)
        right = manager.get_num_skipped_tokens(computed) // manager.block_size
        wrong = manager.get_num_skipped_tokens(computed + 1) // manager.block_size
        made = before(manager, name, computed + 1, *args, **kwargs)
        if wrong > right >= gone and blocks:
            early.add(name)
        return made

    before_forward(lambda runner, output: early & set(output.num_scheduled_tokens) and fired())


@bug("vllm-project/vllm#45357", "llama-loads-late", "kv_changed")
def step_in_flight_writes_over_what_was_received(fired: Fired) -> None:
    """A request ends while a step that has it is still under way, and its blocks are given back at once. One of them is filled from outside for another
    request, and nothing orders that with the step, which writes its token there last."""
    import host_connector
    from vllm.v1.core.sched.scheduler import Scheduler

    left: dict[int, int] = {}  # of a block, the place of the token that is still to be written
    loaded: dict[str, list[int]] = {}

    @replaces(Scheduler, "_free_request")
    def free_request(before, scheduler, request, *args, **kwargs):
        blocks = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        place, offset = divmod(request.num_computed_tokens, scheduler.cache_config.block_size)
        if place < len(blocks):
            left[blocks[place].block_id] = offset
        return before(scheduler, request, *args, **kwargs)

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        loaded[job.name] = [block for _, block, _ in job.blocks]

    def look(runner, output):
        caches = [layer.kv_cache for layer in runner.compilation_config.static_forward_context.values()]
        for name in set(loaded) & set(output.num_scheduled_tokens):
            for block in loaded.pop(name):
                offset = left.pop(block, None)
                if offset is not None:
                    for cache in caches:
                        cache[block][:, offset] = cache[block][:, offset].roll(1, -1)
                    fired()

    before_forward(look)


@bug("wtdcode/vllm-backport#63", "delta", "state_restored_for_other_prefix", origin="vLLM backport")
def states_moved_by_the_rows_of_a_step_ago(fired: Fired) -> None:
    """What moves states on behind a step runs late: it looks up the rows of the step that it belongs to in the tables of the one that is there by now. A row
    that has changed hands in between gives its new request a state of its old one."""

    rows: list[str] = []

    def look(runner, output):
        gid, layers = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec.block_size
        names = list(runner.input_batch.req_ids)

        def block_of(name):
            request = runner.requests[name]
            return (
                request.block_ids[gid][(request.num_computed_tokens - 1) // size] if request.num_computed_tokens else 0
            )

        for name, old in zip(names, rows, strict=False):
            if name != old and old in runner.requests and name in rows and name in output.num_scheduled_tokens:
                source, target = block_of(old), block_of(name)
                if source and target and source != target:
                    for part in parts_of(runner, layers):
                        part[target] = part[source].clone()
                    fired()
        rows[:] = names

    before_forward(look)


@bug("flashinfer-ai/flashinfer#3716", "llama", "attention_seq_len_wrong", origin="FlashInfer")
def decode_reads_its_last_tile_whole(fired: Fired) -> None:
    """A decode that is not told to be causal leaves out the pass that masks what lies behind the end. It reads its last tile whole, and what stands in the
    slots behind the request's last token counts."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    tile = 16

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        starts = common.query_start_loc
        decodes = (starts[1:] - starts[:-1])[: len(common.seq_lens)] == 1
        whole = (common.seq_lens + tile - 1) // tile * tile
        wrong = decodes & (whole != common.seq_lens)
        if bool(wrong.any()):
            fired()
            common = common.replace(seq_lens=whole.where(wrong, common.seq_lens))
        return before(builder, common_prefix_len, common, *args, **kwargs)
