"""A thirty-second round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from bugs import Fired, bug, replaces

from .marks import before_forward, parts_of, states_of, when_allocated


@bug("kekzl/imp#967", "hybrid-floors", "swa_window_off_by_one", origin="imp")
def window_is_counted_in_whole_blocks_from_the_end(fired: Fired) -> None:
    """What a layer with a window may give back is counted in blocks from the end of the request, as many as the window has. Its attention begins where the window begins, which is mostly inside the block before these: that
    block is given back and filled by others while it is still looked at."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    since: dict[tuple, int] = {}  # group, request and place in its table: the step in which it had it first
    wrote: dict[int, tuple[int, str]] = {}  # of a block: in which step it was written last, and by whom
    steps = [0]

    @replaces(SlidingWindowManager, "get_num_skipped_tokens")
    def get_num_skipped_tokens(before, manager, num_computed_tokens):
        size = manager.block_size
        last = -(-(num_computed_tokens + 1) // size) - -(-manager.sliding_window // size)
        return max(before(manager, num_computed_tokens), last * size)

    def look(runner, output):
        batch = runner.input_batch
        steps[0] += 1
        written: dict[int, str] = {}
        for gid, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            size, window = group.kv_cache_spec.block_size, getattr(group.kv_cache_spec, "sliding_window", None)
            for row, name in enumerate(batch.req_ids):
                if name not in output.num_scheduled_tokens:
                    continue
                past = int(batch.num_computed_tokens_cpu[row])
                table = batch.block_table[gid].block_table.np[row]
                end = past + output.num_scheduled_tokens[name]
                written |= {int(table[place]): name for place in range(past // size, -(-end // size))}
                for place in range(max(0, past - window + 1) // size if window else 0, -(-past // size)):
                    had = since.setdefault((gid, name, place), steps[0])
                    step, other = wrote.get(int(table[place]), (0, name))
                    if window and other != name and step > had:
                        fired()
        wrote.update({block: (steps[0], name) for block, name in written.items()})

    before_forward(look)


@bug("NovaSky-AI/SkyRL#2246", "qwen-synced", "cache_kept_over_new_weights", origin="SkyRL")
def setting_that_asks_for_an_empty_cache_is_not_read_where_weights_are_synced(fired: Fired) -> None:
    """A trainer sends new weights to an engine that runs beside it, on a way of its own. The setting that has the prefix cache emptied behind that is only read on the other way, so that the cache stays: a prompt that
    begins like an old one hits K and V of the weights before."""
    from vllm.entrypoints.llm import LLM

    stale: set[int] = set()
    written: set[int] = set()

    @replaces(LLM, "reset_prefix_cache")
    def reset_prefix_cache(before, llm, *args, **kwargs):
        stale.update(written)
        return True

    def look(request, hit, table):
        if stale.intersection(hit):
            fired()
        own = {block.block_id for block in table}
        written.update(own)
        stale.difference_update(own - set(hit))

    when_allocated(look)


@bug("jundot/omlx#3086", "recurrent-tails", "state_restored_for_other_prefix", origin="oMLX")
def state_at_the_end_of_the_prompt_is_kept_as_that_of_the_last_full_block(fired: Fired) -> None:
    """When a prompt has been computed, its last full block is kept together with the recurrent state as it is at that time. The prompt goes on for some tokens behind that block, and the state has taken them in already: who goes on
    from the block's end starts with a state that knows tokens which are not his."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    late: set[int] = set()
    number: list[int] = [0]

    @replaces(GPUModelRunner, "execute_model")
    def execute_model(before, runner, output, *args, **kwargs):
        made = before(runner, output, *args, **kwargs)
        batch = runner.input_batch
        number[0], layers = states_of(runner)
        size = runner.kv_cache_config.kv_cache_groups[number[0]].kv_cache_spec.block_size
        for row, name in enumerate(batch.req_ids):
            end = int(batch.num_computed_tokens_cpu[row]) + output.num_scheduled_tokens.get(name, 0)
            if end != int(batch.num_prompt_tokens[row]) or end < size or not end % size:
                continue
            full, live = batch.block_table[number[0]].block_table.np[row, end // size - 1 : end // size + 1].tolist()
            for part in parts_of(runner, layers) if full and live else ():
                if not part[full].equal(part[live]):
                    late.add(full)
                part[full] = part[live]
        return made

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_slots(before, manager, request, *args, **kwargs):
        given = before(manager, request, *args, **kwargs)
        blocks = kwargs.get("new_computed_blocks")
        if given is not None and blocks is not None and late & {b.block_id for b in blocks.blocks[number[0]]}:
            fired()
        return given


@bug("LMCache/LMCache#683", "qwen-loads-disk", "layout_misread", origin="LMCache")
def file_is_read_as_if_all_keys_came_before_all_values(fired: Fired) -> None:
    """Layer by layer, what is stored has each token's keys and its values side by side. What comes back from the disk is taken for the other form, in which all keys of a block come first and then all values: half of the
    tokens get their keys from what were values, and all of them stand at other places."""
    import host_connector

    @replaces(host_connector.HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        wrong = False
        for gid, block, key in job.blocks:
            for name, rows in connector._blocks_of(gid, block):
                right = connector._store[name, key]
                halves = right.unflatten(-1, (2, -1)).flatten(1, 2)  # of each token its keys, then its values
                rows.copy_(halves.unflatten(1, (2, -1)).transpose(1, 2).flatten(2))
                wrong |= not rows.equal(right)
        if wrong:
            fired()
