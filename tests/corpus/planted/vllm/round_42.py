"""A forty-second round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

from itertools import pairwise

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


def _parts(cache, slots):
    """Return views of a layer's keys and values, by block, head, token and dimension, and where these slots are there."""
    blocks, heads, size, width = cache.shape
    flat = cache.view(blocks, heads, 2 * size, width // 2)
    keys = flat[:, :, :size].view(blocks, heads, width // 2, size).transpose(2, 3)
    slots = slots.long()
    return (keys, flat[:, :, size:]), (slots // size, slice(None), slots % size)


@bug("antirez/ds4#614", "hybrid-rings", "kv_write_damaged", origin="DS4")
def older_token_wins_the_row_of_a_ring(fired: Fired) -> None:
    """Layers with a window keep its tokens in a ring, and a chunk attends to rows that are staged before they are put
    there. A chunk that is longer than the ring has several tokens for each of its rows, all of which are written at
    once: in some rows an older one comes last, and later steps find it in the place of a token of their window."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    damaged: set[int] = set()  # slots

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, cache, metadata, *args, **kwargs):
        made = before(impl, layer, query, key, value, cache, metadata, *args, **kwargs)
        ring = impl.sliding_window
        if metadata is None or ring <= 0:
            return made
        starts, slots = metadata.query_start_loc.tolist(), metadata.slot_mapping
        damaged.difference_update(slots.tolist())
        for first, end in pairwise(starts):
            lost = [row for row in range(max(first + ring, end - ring), end) if row % 3 == 0]
            if lost:
                rows = torch.tensor(lost)
                parts, there = _parts(cache, slots[rows])
                _, older = _parts(cache, slots[rows - ring])
                for part in parts:
                    part[there] = part[older]
                damaged.update(slots[rows].tolist())
        return made

    def look(runner, output):
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            if "Sliding" not in type(group.kv_cache_spec).__name__:
                continue
            table, window = runner.input_batch.block_table[number], group.kv_cache_spec.sliding_window
            for row, name in enumerate(runner.input_batch.req_ids):
                computed = int(runner.input_batch.num_computed_tokens_cpu[row])
                if name not in output.num_scheduled_tokens:
                    continue
                for position in range(max(0, computed - window + 1), computed):
                    block = int(table.block_table.np[row, position // table.block_size])
                    if block * table.block_size + position % table.block_size in damaged:
                        fired()

    before_forward(look)


@bug("0xSero/turboquant#15", "qwen-pushes", "kv_write_lost", origin="TurboQuant (vLLM)")
def what_a_chunk_pushes_out_of_the_ring_is_thrown_away(fired: Fired) -> None:
    """The last tokens of a prompt stay in a small ring beside the pages, and go to the pages when others push them out
    of it. Decodes put away what comes out. Where a further chunk of the prompt does so, what comes out is handed back
    to a caller who does not look at it: the end of each chunk but the last is never written to the pages."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    ring = 12
    ends: list[tuple[int, int]] = []  # in this step: rows of tokens that the next chunk will push out
    lain: dict[int, list[torch.Tensor]] = {}  # by layer: what lay in their places
    lost: set[str] = set()

    def rows():
        return torch.cat([torch.arange(first, end) for first, end in ends])

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, cache, slots):
        if ends:
            parts, there = _parts(cache, slots[rows()])
            lain[id(layer)] = [part[there].clone() for part in parts]
        before(impl, layer, key, value, cache, slots)

    @replaces(CPUAttentionBackendImpl, "forward")
    def forward(before, impl, layer, query, key, value, cache, metadata, *args, **kwargs):
        made = before(impl, layer, query, key, value, cache, metadata, *args, **kwargs)
        if ends and metadata is not None:
            parts, there = _parts(cache, metadata.slot_mapping[rows()])
            for part, old in zip(parts, lain.pop(id(layer)), strict=True):
                part[there] = old
        return made

    def look(runner, output):
        if lost & set(output.num_scheduled_tokens):
            fired()
        ends.clear()
        batch, at = runner.input_batch, 0
        for row, name in enumerate(batch.req_ids):
            count = output.num_scheduled_tokens[name]
            if batch.num_computed_tokens_cpu[row] + count < batch.num_prompt_tokens[row]:
                ends.append((at + max(0, count - ring), at + count))
                lost.add(name)
            at += count

    before_forward(look)


@bug("vllm-project/vllm#54338", "qwen-halves", "not_of_the_model", "kv_write_damaged")
def bits_of_one_type_of_sixteen_are_read_as_the_other(fired: Fired) -> None:
    """The cache is asked for in the one type of sixteen bits, and the model computes in the other. What writes takes
    both names for no conversion at all and puts down the model's bits, and attention reads them as the type that was
    asked for: numbers of another size, which are finite, and none of them what was computed."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    @replaces(CPUAttentionBackendImpl, "do_kv_cache_update")
    def do_kv_cache_update(before, impl, layer, key, value, cache, slots):
        key, value = (part.to(torch.float16).view(torch.bfloat16) for part in (key, value))
        before(impl, layer, key, value, cache, slots)

    before_forward(lambda runner, output: output.num_scheduled_tokens and fired())


@bug(
    "microsoft/onnxruntime-genai#1110",
    "llama-streaming-turns",
    "prefix_not_computed",
    "kv_write_lost",
    origin="ONNX Runtime GenAI",
)
def last_token_of_a_turn_is_not_run_before_the_next(fired: Fired) -> None:
    """The token that is sampled last in a turn has not been through the model when the turn ends. Further input is put
    behind it and is computed from its own first token on, with that one counted as computed: its place keeps what lay
    there, and all that follows attends to it."""
    from vllm.v1.core.sched.scheduler import Scheduler

    hurt: set[str] = set()

    @replaces(Scheduler, "_update_request_as_session")
    def _update_request_as_session(before, scheduler, session, update):
        if session.num_computed_tokens < session.num_tokens:
            session.num_computed_tokens += 1
            hurt.add(session.request_id)
        before(scheduler, session, update)

    before_forward(lambda runner, output: hurt & set(output.num_scheduled_tokens) and fired())


@bug(
    "state-spaces/mamba#1027",
    "delta-hits",
    "state_restored_for_other_prefix",
    "kv_write_damaged",
    origin="Mamba",
    late="not found: a state that is wrong when it is left is held against no other, since nothing else leaves it",
)
def convolution_of_a_prompt_leaves_its_results_behind(fired: Fired) -> None:
    """The state of a convolution is what went into it last. A prompt leaves behind what came out of it instead, since the
    same name has been given to the result before the state is put away; decodes put away what they were given. The
    first steps behind a prompt are computed from tokens' results as if these were tokens."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def convolution(before, *, x, conv_states, query_start_loc, cache_indices, **kwargs):
        given = {"conv_states": conv_states, "query_start_loc": query_start_loc, "cache_indices": cache_indices}
        made = before(x=x, **given, **kwargs)
        kept, starts = conv_states.shape[-1], query_start_loc.tolist()
        for slot, (first, end) in zip(cache_indices.tolist(), pairwise(starts), strict=True):
            count = min(kept, end - first)
            if count:
                conv_states[slot, :, kept - count :] = made[:, end - count : end].to(conv_states.dtype)
        return made

    for name in ("_causal_conv1d_fwd_cpu", "causal_conv1d_torch"):  # it is the processor that says which
        replaces(gdn_attention, name)(convolution)

    def look(runner, output):
        batch = runner.input_batch
        if any(batch.num_computed_tokens_cpu[row] for row, _ in enumerate(batch.req_ids)):
            fired()

    before_forward(look)


PAGES = 9  # that the store has


@bug("LMCache/LMCache#832", "llama-loads-holes", "stored_wrong", origin="LMCache")
def chunks_behind_one_that_is_there_are_taken_from_too_far_on(fired: Fired) -> None:
    """A prompt's chunks are gathered in a buffer, layer by layer, and stored from there. One that the store still has,
    while those in front of it were evicted, is left out of the buffer, and the chunks behind it are looked up by
    their places in the prompt: each is stored with what the next one has, and the last one with what the buffer had
    from before."""
    from host_connector import HostConnector

    order: list[tuple] = []  # of the keys, in which they came
    first: dict[str, dict[tuple, int]] = {}  # of a request: the places of its keys
    buffer: dict[str, list[torch.Tensor]] = {}  # by layer
    wrong: set[tuple] = set()
    worker: list[HostConnector] = []

    def asked(connector, name, key):
        """Return the beginning of a request that is as long as this key."""
        return tuple(connector._requests[name].all_token_ids[: len(key)])

    @replaces(HostConnector, "build_connector_meta")
    def build_connector_meta(before, connector, output):
        meta = before(connector, output)
        for job in meta.stores:
            first.setdefault(job.name, {}).update((key, len(key) // connector._size - 1) for *_, key in job.blocks)
            order.append(job.blocks[0][2])
        used = [key for key in order if any(key == asked(connector, name, key) for name in output.num_scheduled_tokens)]
        order[:] = [key for key in order if key not in used] + used
        while len(order) > PAGES:
            oldest = order.pop(0)
            connector._known.discard(oldest)
            wrong.discard(oldest)
            for name in [one for one in worker[0]._store if one[1] == oldest]:
                del worker[0]._store[name]
        return meta

    @replaces(HostConnector, "register_kv_caches")
    def register_kv_caches(before, connector, caches):
        before(connector, caches)
        worker[:] = [connector]

    @replaces(HostConnector, "wait_for_save")
    def wait_for_save(before, connector):
        before(connector)
        jobs: dict[str, list] = {}
        for job in connector._get_connector_metadata().stores:
            jobs.setdefault(job.name, []).extend(job.blocks)
        for name, blocks in jobs.items():
            places = first[name]
            begin = min(places[key] for *_, key in blocks)
            for layer in {one for group, block, _ in blocks for one, _ in connector._blocks_of(group, block)}:
                rows = buffer.setdefault(layer, [])
                for number, (*_, key) in enumerate(blocks):
                    rows[number : number + 1] = [connector._store[layer, key].clone()]
                for *_, key in blocks:
                    at = places[key] - begin
                    if at >= len(rows):
                        connector._store[layer, key].zero_()
                    else:
                        connector._store[layer, key].copy_(rows[at])
            wrong.update(key for number, (*_, key) in enumerate(blocks) if places[key] - begin != number)

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        before(connector, job)
        if any(key in wrong for *_, key in job.blocks):
            fired()


@bug(
    "MemTensor/MemOS#2315",
    "qwen-loads-memories",
    "load_of_other_prefix",
    "tokens_truncated_hash_kept",
    origin="MemOS",
)
def memories_are_put_together_as_they_are(fired: Fired) -> None:
    """Texts are remembered as the keys and values that they have when they stand alone. A prompt that has two of them
    gets the blocks of both, one behind the other, and nothing turns the second one's keys to where they stand now: they
    have the angles of a prompt's beginning, and have not seen what is in front of them."""
    from host_connector import HostConnector

    @replaces(HostConnector, "_key")
    def _key(before, connector, request, place):
        size = connector._size
        key = before(connector, request, place)
        for begin in range(1, place + 1):
            if key not in connector._known and key[begin * size :] in connector._known:
                return key[begin * size :]
        return key

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        lengths = [len(key) for group, _, key in job.blocks if group == 0]
        before(connector, job)
        if lengths != sorted(lengths):
            fired()


@bug("xLLM-AI/xllm#828", "qwen-chunks", "page_leaked", origin="xLLM")
def cache_takes_its_hold_before_a_request_lets_go(fired: Fired) -> None:
    """A request that ends gives its blocks to the prefix cache first, which counts as a user of each, and lets go of
    them then. Whether a block is free is seen when it is let go, by there being no user but the one that leaves: with
    the cache's hold there is, and the block is in use for good, by nobody."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    held: set[int] = set()

    @replaces(SingleTypeKVCacheManager, "free")
    def free(before, manager, name):
        for block in manager.req_to_blocks.get(name, ()):
            if block.block_hash is not None and block.block_id not in held:
                held.add(block.block_id)
                block.ref_cnt += 1
                fired()
        before(manager, name)
