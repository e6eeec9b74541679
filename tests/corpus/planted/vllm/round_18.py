"""An eighteenth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, when_allocated


@bug("vllm-project/vllm#44701", "llama-lora-salts", "identity_not_in_key")
def salt_is_called_as_an_adapter_is(fired: Fired) -> None:
    """An adapter's name and a cache salt go into a block's key as bare strings, and nothing says which is which. A request of the base model whose salt is an adapter's name
    hits the first block that was computed with the adapter."""
    from vllm.v1.core import kv_cache_utils

    @replaces(kv_cache_utils, "generate_block_hash_extra_keys")
    def generate_block_hash_extra_keys(before, request, first, *args, **kwargs):
        keys, media = before(request, first, *args, **kwargs)
        return (None if keys is None else tuple(key[1] for key in keys)), media

    def look(request, hit, _):
        if hit and request.lora_request is None and request.cache_salt == "tenant 1":
            fired()

    when_allocated(look)


@bug("vllm-project/vllm#53142", "recurrent", "state_restored_for_other_prefix")
def column_of_a_state_is_counted_in_other_blocks(fired: Fired) -> None:
    """In which column of the table the state lies that a request goes on from is counted in blocks of the attention's size, and the layers with states have smaller ones. What
    is copied to go on from is the state of an earlier column."""
    from vllm.v1.worker import mamba_utils

    @replaces(mamba_utils, "preprocess_mamba")
    def preprocess_mamba(before, output, config, cache, columns, batch, requests, *args, **kwargs):
        copies = next(one for one in (*args, *kwargs.values()) if hasattr(one, "mamba_spec"))
        for name in batch.req_ids:
            last = requests[name].num_computed_tokens - 1
            size = copies.mamba_spec.block_size
            if name not in columns and last >= 0 and last // (2 * size) != last // size:
                columns[name] = last // (2 * size)
                fired()
        before(output, config, cache, columns, batch, requests, *args, **kwargs)


@bug("vllm-project/vllm#46951", "llama-loads-back", "stored_wrong", "load_of_other_prefix", "host_copy_overwritten")
def block_is_given_away_while_it_is_sent(fired: Fired) -> None:
    """Blocks are sent to the host beside the forwards, and the connector is not told of all that are given to somebody else meanwhile. What arrives under a block's key is
    what its next owner has written."""
    import host_connector

    waits: list = []  # steps, key, and of each layer its name and rows
    right: dict = {}
    wrong: set = set()

    def send(connector, wanted=()):
        for one in [one for one in waits if one[0] <= 0 or one[1] in wanted]:
            waits.remove(one)
            for name, rows in one[2]:
                connector._store[name, one[1]] = rows.clone()
                if bool((rows != right.pop((name, one[1]))).any()):
                    wrong.add(one[1])

    @replaces(host_connector.HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        for one in waits:
            one[0] -= 1
        for job in connector._get_connector_metadata().stores:
            for gid, block, key in job.blocks:
                layers = connector._blocks_of(gid, block)
                right.update({(name, key): rows.clone() for name, rows in layers})
                waits.append([90, key, layers])
        send(connector)

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        send(connector, {key for *_, key in job.blocks})
        if wrong & {key for *_, key in job.blocks}:
            fired()
        before(connector, job)


@bug("LMCache/LMCache#5166", "llama-loads", "transfer_wrong_stride", "load_landed_elsewhere", origin="LMCache")
def padding_between_blocks_is_left_out(fired: Fired) -> None:
    """Between the blocks of the pool there is padding, and a transfer reckons a block's place as if there were none. What comes back lands before its block, the farther the
    higher its number is: over the end of the block before, and its own end stays as it was."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        for gid, block, key in job.blocks:
            for name, rows in connector._blocks_of(gid, block):
                if block:
                    fired()
                pool = connector._caches[name]
                first = pool.storage_offset() + block * (rows.numel() - rows.shape[-1])
                pool.as_strided((rows.numel(),), (1,), first).copy_(connector._store[name, key].reshape(-1))


@bug("vllm-project/vllm#42695", "llama-loads-weights", "cache_kept_over_new_weights")
def what_is_in_the_store_outlives_the_weights(fired: Fired) -> None:
    """New weights come and the caches are to be emptied, and the one behind the connector is left out unless it is asked for. What was stored under the old weights is loaded
    for requests that are computed with the new ones."""
    import host_connector
    from vllm.v1.core.sched.scheduler import Scheduler

    old: set = set()

    @replaces(Scheduler, "reset_prefix_cache")
    def reset_prefix_cache(before, scheduler, *args, **kwargs):
        if not old:
            old.update(scheduler.connector._known)
        return before(scheduler, *args[:1])

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        if old & {key for *_, key in job.blocks}:
            fired()
        before(connector, job)


@bug("vllm-project/vllm-ascend#14055", "llama-preempt", "free_too_early", "page_given_twice", origin="vLLM Ascend")
def blocks_go_back_under_the_last_step(fired: Fired) -> None:
    """A request whose end is known gives its blocks back while its last step is under way. Those who wait are given them at once, and write into them in the forward that still
    reads them."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    gone: dict[str, set[int]] = {}
    both: set[str] = set()

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        if given is None:
            return given
        new = {block.block_id for block in given.blocks[0] or ()}
        both.update(name for name, blocks in gone.items() if blocks & new)
        last = request.num_output_tokens + 1 >= request.max_tokens
        if last and request.num_output_tokens and request.num_computed_tokens + 1 == request.num_tokens:
            held = manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
            gone[request.request_id] = {block.block_id for block in held}
            manager.free(request)
        return given

    def look(_, output):
        if both & set(output.num_scheduled_tokens):
            fired()
        gone.clear()
        both.clear()

    before_forward(look)
