"""A forty-third round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import copy

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward

BUDGET, CLOSE = 6, 7  # how many tokens of an answer are thought, and the token that ends that


@bug(
    "aosama/astronomical#260",
    "qwen-budgets",
    "next_token_swap",
    "not_of_the_model",
    origin="Astronomical",
    late="what is shown in place of what was sampled is not recorded, and shows at the next hit",
)
def token_that_ends_the_thinking_is_only_shown(fired: Fired) -> None:
    """When an answer has thought for as long as it may, its next token is replaced by the one that ends thinking. That is
    done where tokens are handed to who asked, after the sampled one has been taken for the next step's input: the
    answer, and the keys of its blocks, have a token that the model has never seen, and its slot has the other one."""
    from vllm.v1.core.sched.scheduler import Scheduler

    given: dict[str, int] = {}  # of a request: how many tokens of its answer there are
    hurt: set[str] = set()

    @replaces(Scheduler, "update_from_output")
    def update_from_output(before, scheduler, output, made):
        tokens = [list(one) for one in made.sampled_token_ids]
        for name, row in made.req_id_to_index.items():
            if row >= len(tokens) or not tokens[row]:
                continue
            given[name] = given.get(name, 0) + 1
            if given[name] == BUDGET and tokens[row][0] != CLOSE:
                tokens[row][0] = CLOSE
                hurt.add(name)
        made.sampled_token_ids = tokens
        return before(scheduler, output, made)

    before_forward(lambda runner, output: hurt & set(output.num_scheduled_tokens) and fired())


BEHIND = 3  # blocks that the last layer begins behind the first one's


@bug(
    "1bit-MONSTER/1bit-MONSTER#990",
    "llama-wraps",
    "groups_alias",
    "kv_changed",
    "layer_changed",
    "kv_write_damaged",
    origin="1bit-MONSTER",
)
def start_of_a_layer_is_counted_in_too_narrow_a_number(fired: Fired) -> None:
    """All layers' caches lie one behind another in one piece of memory, and where a layer begins is the product of its number
    and of sizes, in a number that is too narrow for it. It goes round for the last layer, which begins within
    the first one's: each of them writes over what the other has."""
    from vllm.v1.worker import gpu_model_runner

    @replaces(gpu_model_runner, "allocate_kv_cache")
    def allocate_kv_cache(before, *args, **kwargs):
        caches = before(*args, **kwargs)
        first, second, *_, last = sorted(caches, key=lambda name: caches[name].storage_offset())
        start, step = caches[first].storage_offset(), caches[first].stride(0)
        limit = caches[last].storage_offset() - start - BEHIND * step
        for name in (second, last):
            cache = caches[name]
            place = start + (cache.storage_offset() - start) % limit
            caches[name] = torch.as_strided(cache, cache.shape, cache.stride(), place)
        return caches

    owner: dict[tuple[int, int], str] = {}  # of a place in the first layer's memory: who wrote there last

    def look(runner, output):
        batch, table = runner.input_batch, runner.input_batch.block_table[0]

        def places(row, first, end):
            for position in range(first, end):
                block, inside = divmod(position, table.block_size)
                yield int(table.block_table.np[row, block]), inside

        rows = []
        for row, name in enumerate(batch.req_ids):
            computed = int(batch.num_computed_tokens_cpu[row])
            rows.append((row, computed, computed + output.num_scheduled_tokens.get(name, 0)))
        for row, computed, end in rows:
            owner.update(dict.fromkeys(places(row, computed, end), "first"))
        if any(owner.get(place) == "last" for row, computed, _ in rows for place in places(row, 0, computed)):
            fired()
        for row, computed, end in rows:
            owner.update({(block + BEHIND, inside): "last" for block, inside in places(row, computed, end)})
        read = ((block + BEHIND, inside) for row, computed, _ in rows for block, inside in places(row, 0, computed))
        if any(owner.get(place) == "first" for place in read):
            fired()

    before_forward(look)


@bug(
    "gittensor-ai-lab/sparkinfer#615",
    "delta-hits",
    "layout_misread",
    origin="SparkInfer",
    late="not found: what a kernel makes of a state's bytes is not recorded",
)
def decodes_take_the_columns_of_a_state_for_its_rows(fired: Fired) -> None:
    """The state that a prompt leaves is a square for each head, and decodes go on from it in the same memory. They count
    its places the other way around: each goes on from the state with rows and columns changed, adds its token to
    that, and puts it back as it has read it. Decodes agree with one another, and not with prompts."""
    from vllm import _custom_ops

    @replaces(_custom_ops, "fused_sigmoid_gating_delta_rule_update_cpu")
    def fused_sigmoid_gating_delta_rule_update_cpu(before, *, initial_state_source, initial_state_indices, **kwargs):
        states, slots = initial_state_source, initial_state_indices.long()
        states[slots] = states[slots].transpose(-1, -2).contiguous()
        made = before(initial_state_source=states, initial_state_indices=initial_state_indices, **kwargs)
        states[slots] = states[slots].transpose(-1, -2).contiguous()
        return made

    def look(runner, output):
        batch = runner.input_batch
        for row, name in enumerate(batch.req_ids):
            if batch.num_computed_tokens_cpu[row] and output.num_scheduled_tokens.get(name) == 1:
                fired()

    before_forward(look)


PUT_OFF = 4  # steps until a store that found no room is tried again


@bug("vllm-project/vllm#42959", "hybrid-loads-late-stores", "stored_wrong")
def block_that_has_left_the_window_is_stored_when_there_is_room(fired: Fired) -> None:
    """A block is to be stored when it is full. If the host has no room then, it is tried again some steps later, with the
    number that the block had. Layers with a window have let go of it by then, and the request or another one has
    written other tokens to it: these are stored under the first one's key."""
    from host_connector import HostConnector

    waiting: dict[tuple, list] = {}  # by key: jobs, and how many steps are left
    truth: dict[tuple, torch.Tensor] = {}  # by layer and key: what should have been stored
    wrong: set[tuple] = set()

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        meta.put_off, now = [], []
        for job in meta.stores:
            key = job.blocks[0][2]
            if key in waiting:
                connector._known.discard(key)
            elif len(key) // connector._size % 2:  # no room for every other one
                waiting[key] = [job, PUT_OFF]
                meta.put_off.append(job)
                connector._known.discard(key)
            else:
                now.append(job)
        for key, entry in list(waiting.items()):
            job, left = entry
            if job.name not in output.num_scheduled_tokens:  # has ended, and given all its blocks back
                del waiting[key]
            elif left:
                entry[1] -= 1
            else:
                del waiting[key]
                connector._known.add(key)
                now.append(job)
        meta.stores = now
        return meta

    @replaces(HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        meta = connector._get_connector_metadata()
        for job in meta.put_off:
            for group, block, key in job.blocks:
                truth.update({(name, key): rows.clone() for name, rows in connector._blocks_of(group, block)})
        for job in meta.stores:
            for group, block, key in job.blocks:
                for name, _ in connector._blocks_of(group, block):
                    if (name, key) in truth and not torch.equal(truth[name, key], connector._store[name, key]):
                        wrong.add((group, key))

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        if any((group, key) in wrong for group, _, key in job.blocks):
            fired()


@bug("RBLN-SW/vllm-rbln#677", "qwen-columns", "attention_seq_len_wrong", origin="vllm-rbln")
def each_part_of_the_context_is_read_for_the_first_rows(fired: Fired) -> None:
    """Decodes attend to their contexts part by part, and for each part the kernel is told how many requests come so far. It
    takes these for the first rows of the batch, as they are where the longest come first, and rows are not sorted:
    a long one behind shorter ones does not see the end of its context, nor its last token."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        if common.max_query_len == 1 and common.num_reqs > 1:
            part, lengths = builder.block_size, common.seq_lens.tolist()
            seen = list(lengths)
            for row, length in enumerate(lengths):
                for begin in range(0, length, part):
                    if row >= sum(one > begin for one in lengths):
                        seen[row] = begin
                        break
            if seen != lengths:
                fired()
                common = copy.copy(common)
                common.seq_lens = common.seq_lens.new_tensor(seen)
        return before(builder, common_prefix_len, common, *args, **kwargs)
