"""A thirty-seventh round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward


@bug(
    "NovaSky-AI/SkyRL#2250",
    "llama-lora-cold",
    "computed_with_other_weights",
    "cache_kept_over_new_weights",
    "identity_not_in_key",
    origin="SkyRL",
)
def scale_of_an_adapter_is_applied_once_more_when_it_is_loaded_again(fired: Fired) -> None:
    """Adapters stay in memory, and one that has been evicted is made anew of what is kept there. What is handed to the engine are the very tensors that are kept, into which it multiplies the adapter's scale as it loads them: from the
    second load on it is applied once more, under the same name."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    staged: dict[tuple[int, str], object] = {}
    loads: dict[int, int] = {}

    @replaces(WorkerLoRAManager, "_load_adapter")
    def _load_adapter(before, manager, request):
        made = before(manager, request)
        for name, layer in made.loras.items():
            layer.lora_b = staged.setdefault((request.lora_int_id, name), layer.lora_b)
        loads[request.lora_int_id] = loads.get(request.lora_int_id, 0) + 1
        return made

    def look(runner, output):
        asked = [runner.requests[name].lora_request for name in output.num_scheduled_tokens]
        if any(one is not None and loads.get(one.lora_int_id, 0) > 1 for one in asked):
            fired()

    before_forward(look)


@bug("vllm-project/tpu-inference#2366", "delta-hits", "state_restored_for_other_prefix", origin="tpu-inference")
def states_beyond_the_last_slot_are_all_in_it(fired: Fired) -> None:
    """There are fewer slots for recurrent states than there are blocks, and a block's number says which one is whose. Numbers beyond the last slot are cut down to it: all requests that have such a block keep their states in
    the one slot, each over the others'."""
    from vllm.v1.attention.backends import gdn_attn

    last = 12
    names: list[str] = []
    past: list[int] = []
    writer: list[str] = [""]  # of the last slot

    @replaces(gdn_attn, "mamba_get_block_table_tensor")
    def mamba_get_block_table_tensor(before, *args, **kwargs):
        table = before(*args, **kwargs)
        slots = table[: len(names), 0].tolist()
        if any(slot > last and done and writer[0] != name for name, done, slot in zip(names, past, slots, strict=True)):
            fired()
        writer.extend(name for name, slot in zip(names, slots, strict=True) if slot >= last)
        del writer[:-1]
        return table.clamp(max=last)

    def look(runner, output):
        names[:] = runner.input_batch.req_ids
        past[:] = runner.input_batch.num_computed_tokens_cpu[: len(names)].tolist()

    before_forward(look)


@bug("vllm-project/vllm#57816", "llama-loads-restart", "stored_wrong")
def new_table_of_a_request_comes_behind_the_one_that_it_gave_back(fired: Fired) -> None:
    """What is to be stored is looked up in a table that grows with each step's new blocks. A request that had been put back comes with a whole new table, which is put behind the one that it has given back: under a
    block's key is stored what lies in another one's."""
    from host_connector import HostConnector

    tables: dict[str, list[list[int]]] = {}
    wrong: set[tuple] = set()

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta, cached = before(connector, output), output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            tables[new.req_id] = [list(ids) for ids in new.block_ids]
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for table, ids in zip(tables[name], more or (), strict=False):
                table += ids
        for job in meta.stores:
            right = job.blocks
            job.blocks = [(gid, tables[job.name][gid][len(key) // connector._size - 1], key) for gid, _, key in right]
            wrong.update(new[2] for old, new in zip(right, job.blocks, strict=True) if old[1] != new[1])
        return meta

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        if any(key in wrong for *_, key in job.blocks):
            fired()
        before(connector, job)


@bug(
    "ai-dynamo/dynamo#15079",
    "qwen-loads-stops",
    "failed_load_counted_loaded",
    "read_before_landed",
    origin="Dynamo",
)
def transfer_that_failed_is_complete(fired: Fired) -> None:
    """A transfer that ends with an error is taken off the list of those under way like any other, and its request is told that it is complete. Nobody hears of the error: the request goes on from blocks into which nothing
    has come."""
    from host_connector import HostConnector

    failed: set[str] = set()

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        if job.fails:
            failed.add(job.name)
        else:
            before(connector, job)

    before_forward(lambda runner, output: failed & set(output.num_scheduled_tokens) and fired())
