"""A thirty-fifth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, states_of, when_allocated


@bug("vllm-project/vllm#10507", "qwen-oldest", "eviction_of_locked_page", "page_given_twice", "stale_prefix_hit")
def new_blocks_are_taken_before_the_hit_ones_are_held(fired: Fired) -> None:
    """A request that hits its beginning takes the new blocks that it needs first, and only then holds the ones that it has hit. These lie among the free ones until then: when they are the oldest there, the request is given
    one of its own hit blocks for the tokens behind them, and writes over its prefix."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    waits: list[list] = []  # blocks to be held when the new ones have been given

    @replaces(BlockPool, "touch")
    def touch(before, pool, blocks):
        if waits:
            waits[-1] += [(before, pool, blocks)]
        else:
            before(pool, blocks)

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, *args, **kwargs):
        waits.append([])
        given = before(manager, *args, **kwargs)
        for hold, pool, blocks in waits.pop():
            hold(pool, blocks)
        return given

    def look(request, hit, table):
        own = [block.block_id for block in table]
        if set(hit) & set(own[len(hit) :]):
            fired()

    when_allocated(look)


@bug(
    "vllm-project/vllm-ascend#15900",
    "hybrid-loads-stages",
    "layout_misread",
    "load_landed_elsewhere",
    origin="vLLM Ascend",
)
def layers_of_a_stage_are_paired_by_their_order(fired: Fired) -> None:
    """Who computes prompts is split into stages, each of which has a list of its own layers; who receives has all of them in one list. The two are paired by place: what the second stage sends for its first layer is put into the first layer of all,
    and the like. The bytes are whole, and each lies in another layer than the one it was computed by."""
    import host_connector

    owner = host_connector.HostConnector

    def stage(connector, name):  # the layer that stands at the same place of the other half of its group's
        layers = next(group.layer_names for group in connector._groups if name in group.layer_names)
        half = len(layers) // 2
        return layers[(layers.index(name) + half) % (2 * half)] if layers.index(name) < 2 * half else name

    @replaces(owner, "_load")
    def _load(before, connector, job):
        for gid, block, key in job.blocks:
            for name, rows in connector._blocks_of(gid, block):
                sent = connector._store[stage(connector, name), key]
                if not sent.equal(connector._store[name, key]):
                    fired()
                rows.copy_(sent)


@bug("vllm-project/vllm#46694", "llama-eagle-loads", "load_landed_elsewhere")
def blocks_for_drafts_are_counted_with_those_that_are_loaded(fired: Fired) -> None:
    """Blocks for the drafts to come are given together with those that a load fills. The load goes by the end of what was given, as many blocks as the other side has: it lands one block too far on, in the last place in the block for drafts,
    and the first place stays as it was."""
    import host_connector
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    beside: set[str] = set()
    moved: set[str] = set()

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        if kwargs.get("delay_cache_blocks"):
            kwargs["num_lookahead_tokens"] = 3
            beside.add(request.request_id)
        return before(manager, request, *args, **kwargs)

    @replaces(host_connector.HostConnector, "update_state_after_alloc")
    def update_state_after_alloc(before, connector, request, blocks, external):
        before(connector, request, blocks, external)
        if not external or request.request_id not in beside:
            return
        job = connector._jobs[-1]
        (held,) = blocks.blocks
        last = held[-len(job.blocks) :]
        if [block.block_id for block in last] != [block for _, block, _ in job.blocks]:
            moved.add(request.request_id)
        job.blocks = [(gid, block.block_id, key) for (gid, _, key), block in zip(job.blocks, last, strict=True)]

    before_forward(lambda runner, output: moved & set(output.num_scheduled_tokens) and fired())


@bug(
    "vllm-project/tpu-inference#3412",
    "delta-hits",
    "state_restored_for_other_prefix",
    origin="TPU inference (vLLM)",
)
def hit_goes_on_from_a_state_slot_that_has_just_been_given_out(fired: Fired) -> None:
    """Each request has one slot for its recurrent state, which is given out when it is admitted. A request that hits its beginning is told that it has a state to go on from, and reads its slot: there is the state of whoever had it last,
    and that of its own prefix stays where it is."""
    from vllm.v1.worker import mamba_utils

    fresh: set[str] = set()

    @replaces(mamba_utils, "preprocess_mamba")
    def preprocess_mamba(before, output, *args, **kwargs):
        fresh.clear()
        fresh.update(new.req_id for new in output.scheduled_new_reqs if new.num_computed_tokens)
        return before(output, *args, **kwargs)

    @replaces(mamba_utils, "collect_mamba_copy_meta")
    def collect_mamba_copy_meta(before, *args):
        if args[7].req_id not in fresh:
            before(*args)

    def look(runner, output):
        group, _ = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
        for new in output.scheduled_new_reqs:
            done, count = new.num_computed_tokens, output.num_scheduled_tokens[new.req_id]
            if done and (done - 1) // size != (done + count - 1) // size:
                fired()

    before_forward(look)


@bug(
    "ovg-project/kvcached#424", "llama-strides", "kv_write_damaged", "kv_changed", "layer_changed", origin="kvcached",
    late="what overlaps is not what the first bytes of a slot show, and of the other places each slot shows one",
)  # fmt: skip
def pages_lie_closer_than_they_are_long(fired: Fired) -> None:
    """A quantised cache keeps the scales of its rows in its pages, which makes these longer. The allocator works out their distance without the scales: each page's end lies on the next page's beginning, and what is written to one
    of them is written to the other."""
    import torch
    from vllm.v1.worker import gpu_model_runner

    @replaces(gpu_model_runner, "allocate_kv_cache")
    def allocate_kv_cache(before, *args, **kwargs):
        made = before(*args, **kwargs)
        for name, view in made.items():
            first, *others = view.stride()
            made[name] = torch.as_strided(
                view, view.shape, (first - 2 * view.shape[-1], *others), view.storage_offset()
            )
        return made

    # Two channels of all keys of a block, those of its first head, lie on the last values of the block before it.
    written: set[int] = set()
    damaged: set[int] = set()

    def lies_on(slot):
        block, place = divmod(slot, 64)
        ends = [(block - 1) * 64 + end + place // 32 for end in (60, 62)]
        if place < 60:
            return ends
        return ends + [(block + 1) * 64 + 32 * (place % 2) + at for at in range(32)]

    def look(runner, output):
        batch = runner.input_batch
        read: list[int] = []
        for row, name in enumerate(batch.req_ids):
            blocks = batch.block_table[0].block_table.np[row]
            done, count = int(batch.num_computed_tokens_cpu[row]), output.num_scheduled_tokens[name]
            slots = [int(blocks[place // 64]) * 64 + place % 64 for place in range(done + count)]
            read += slots
            written.update(slots[done:])
            damaged.difference_update(slots[done:])
            damaged.update(other for slot in slots[done:] for other in lies_on(slot) if other in written)
        if damaged.intersection(read):
            fired()

    before_forward(look)


@bug("PaddlePaddle/FastDeploy#7727", "sliding-offsets", "position_off", origin="FastDeploy")
def place_of_a_chunk_counts_what_is_there_and_what_is_fed(fired: Fired) -> None:
    """Where a chunk begins is worked out from two lengths, that of what is in the cache and that of what is fed now, and both are added. A prompt that begins with its first token has nothing in the cache and is not
    touched by it; one that goes on behind a prefix or an earlier chunk is fed positions that lie its own length too far on."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    @replaces(GPUModelRunner, "_prepare_inputs")
    def prepare(before, runner, output, *args, **kwargs):
        made = before(runner, output, *args, **kwargs)
        first = 0
        for row, name in enumerate(runner.input_batch.req_ids):
            count = output.num_scheduled_tokens[name]
            computed = int(runner.input_batch.num_computed_tokens_cpu[row])
            prompt = int(runner.input_batch.num_prompt_tokens[row])
            if 0 < computed < prompt:
                fired()
                runner.positions[first : first + count] += count
            first += count
        return made
