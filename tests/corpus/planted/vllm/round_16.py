"""A sixteenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug("vllm-project/vllm#46281", "recurrent", "prefix_not_computed")
def attention_lost_the_hits_last_block(fired: Fired) -> None:
    """The layers with a state hit a prefix whole, attention has its last block dropped, and the longer length is what is said to be hit. The request goes on behind a
    block that attention got new, and whose tokens nobody computes."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    short: set[str] = set()

    @replaces(HybridKVCacheCoordinator, "find_longest_cache_hit")
    def find_longest_cache_hit(before, coordinator, hashes, most):
        blocks, length, uncached = before(coordinator, hashes, most)
        for group in coordinator.attention_groups:
            if isinstance(group.spec, FullAttentionSpec):
                for gid in group.group_ids:
                    del blocks[gid][-1:]
        return blocks, length, uncached

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        hit = kwargs.get("new_computed_blocks")
        given = before(manager, request, *args, **kwargs)
        if given is not None and hit is not None and len({len(group) for group in hit.blocks}) > 1:
            short.add(request.request_id)
        return given

    before_forward(lambda runner, output: short & set(output.num_scheduled_tokens) and fired())


@bug("vllm-project/vllm#53250", "llama-loads-few", "failed_load_counted_loaded")
def sent_once_and_asked_for_again(fired: Fired) -> None:
    """K and V of a prompt are sent one time, and that they have been sent is not looked at when they are asked for again. The second load is counted like the first,
    nothing comes, and the request goes on in what its blocks held before."""
    import host_connector

    consumed: set = set()

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        again = [block for block in job.blocks if block[2] in consumed]
        consumed.update(key for *_, key in job.blocks)
        if again:
            fired()
            job = host_connector.Job(job.name, [block for block in job.blocks if block not in again])
        before(connector, job)


@bug("taco-project/FlexKV#186", "llama-loads-wide", "stored_wrong", origin="FlexKV")
def fragments_of_a_store_in_the_wrong_order(fired: Fired) -> None:
    """A store takes its source blocks in two fragments, and puts the later one first. Targets are in the order of the tokens, and each block is stored in another
    one's place."""
    import host_connector

    wrong: set = set()

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        stores: dict[str, list] = {}
        for job in connector._get_connector_metadata().stores:
            stores.setdefault(job.name, []).extend(job.blocks)
        before(connector)
        for blocks in stores.values():
            if len(blocks) > 1:
                keys = [key for *_, key in blocks]
                wrong.update(keys)
                for name in connector._groups[0].layer_names:
                    rows = [connector._store[name, key] for key in keys]
                    for key, other in zip(keys, rows[1:] + rows[:1], strict=True):
                        connector._store[name, key] = other

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        if wrong & {key for *_, key in job.blocks}:
            fired()
        before(connector, job)


@bug("vllm-project/tpu-inference#3449", "llama-few", "kv_changed", origin="TPU inference")
def rows_that_have_ended_are_written_for_a_window_more(fired: Fired) -> None:
    """Some steps run on the device in one go, and a request that ends in their middle is carried on as a masked row whose K and V are written all the same. Its blocks
    have been given back by then, and the row goes over what their new owner has written."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    ended: list[tuple[int, int]] = []  # block and offset of what a row that has ended still writes
    spoilt: set[tuple[int, int]] = set()

    @replaces(Scheduler, "_free_request")
    def free_request(before, scheduler, request, *args, **kwargs):
        blocks = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0]
        for place in range(request.num_computed_tokens, request.num_computed_tokens + 2):
            number, offset = divmod(place, scheduler.cache_config.block_size)
            if number < len(blocks):
                ended.append((blocks[number].block_id, offset))
        return before(scheduler, request, *args, **kwargs)

    def computed(runner, block, offset):
        batch, table = runner.input_batch, runner.input_batch.block_table[0]
        for row in range(len(batch.req_ids)):
            count = int(batch.num_computed_tokens_cpu[row])
            own = table.block_table.np[row, : -(-count // table.block_size)].tolist()
            if block in own and own.index(block) * table.block_size + offset < count:
                return batch.req_ids[row]
        return None

    def look(runner, output):
        if any(computed(runner, *place) in output.num_scheduled_tokens for place in spoilt):
            fired()
        spoilt.clear()

    before_forward(look)

    @replaces(GPUModelRunner, "execute_model")
    def execute_model(before, runner, output, *args, **kwargs):
        done = before(runner, output, *args, **kwargs)
        if output.total_num_scheduled_tokens:
            for block, offset in ended:
                for layer in runner.compilation_config.static_forward_context.values():
                    layer.kv_cache[block][:, offset] = layer.kv_cache[block][:, offset].roll(1, -1)
            spoilt.update(ended)
            ended.clear()
        return done


@bug("vllm-project/vllm-ascend#16775", "llama-few", "kv_write_lost", "kv_write_damaged", origin="vLLM Ascend")
def slots_cut_to_the_ranks_own_tokens(fired: Fired) -> None:
    """K and V of a prefill have been gathered from all ranks when they are written, and the list of slots is cut to as many as one rank has tokens. What is behind is
    not written, and its slots keep what stood in them."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    mixed: list[bool] = []

    def look(runner, output):
        counts = output.num_scheduled_tokens.values()
        mixed[:] = [True] if len(counts) > 1 and max(counts) > 1 and min(counts) == 1 else []
        if mixed:
            fired()

    before_forward(look)

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, cache, slots):
        if mixed:
            own = -(-int(slots.numel()) // 2)
            key, value, slots = key[:own], value[:own], slots[:own]
        return before(impl, layer, key, value, cache, slots)


@bug("vllm-project/vllm-ascend#10032", "qwen-ngram", "attention_seq_len_wrong", origin="vLLM Ascend")
def lengths_from_before_the_drafts_were_checked(fired: Fired) -> None:
    """A step is made ready before it is known how many drafts of the one before were right. What it computes is corrected later, and the lengths that attention goes by
    are not: it looks at what was rejected, behind the request's end."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    hoped: dict[str, int] = {}  # of a request, how many tokens it has if all drafts are right
    rejected: list[int] = []

    def look(runner, output):
        batch = runner.input_batch
        rejected.clear()
        for row, name in enumerate(batch.req_ids):
            done = int(batch.num_computed_tokens_cpu[row])
            rejected.append(max(0, hoped.get(name, done) - done))
            hoped[name] = done + output.num_scheduled_tokens.get(name, 0)

    before_forward(look)

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        if any(rejected) and len(rejected) == len(common.seq_lens):
            fired()
            common = common.replace(seq_lens=common.seq_lens + common.seq_lens.new_tensor(rejected))
        return before(builder, common_prefix_len, common, *args, **kwargs)
