"""A forty-eighth round of public bugs made anew in vLLM 0.32 on the CPU: recorded before any rule was run on them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from bugs import Fired, bug, replaces

from .marks import before_forward


def _overwritten(fired: Fired) -> Callable[[Any, Any], None]:
    """Return what looks, before a step's inputs are made, whether a request reads a block that another has written since."""
    wrote: dict[int, str] = {}  # by block: who wrote there last
    knows: dict[tuple[str, int], str | None] = {}  # what is right for a request's blocks

    def look(runner: Any, output: Any) -> None:
        batch, read, writes, twice = runner.input_batch, [], {}, False
        for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
            table, window = batch.block_table[number], getattr(group.kv_cache_spec, "sliding_window", None)
            for row, name in enumerate(batch.req_ids):
                computed = int(batch.num_computed_tokens_cpu[row])
                last = computed + output.num_scheduled_tokens.get(name, 0) - 1
                if last < computed:
                    continue
                held = [int(block) for block in table.block_table.np[row, : last // table.block_size + 1]]
                first = max(0, computed - window + 1) // table.block_size if window else 0
                for block in filter(None, held[first : -(-computed // table.block_size)]):
                    knows.setdefault((name, block), wrote.get(block))
                    read.append((name, block))
                for block in held[computed // table.block_size :]:
                    twice = twice or writes.setdefault(block, name) != name
                    wrote[block] = knows[name, block] = name
        if twice or any(wrote.get(block) != knows[name, block] for name, block in read):
            fired()

    return look


@bug("NVIDIA/Megatron-LM#2584", "qwen-suspends", "page_given_twice", origin="Megatron-LM")
def count_of_free_blocks_is_set_back_and_the_stack_is_not(fired: Fired) -> None:
    """Free blocks are a stack: those on top are taken, those that come back are put over what lies there. When the engine is
    suspended all requests give up their blocks and only the count is set back to the full one. What lies above the old
    top is what requests before have left behind: some blocks are there twice, and two resumed requests get them."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    stack: list[int] = []
    count = [0]
    suspended = [False]

    @replaces(BlockPool, "get_new_blocks")
    def get_new_blocks(before, pool, wanted):
        if not stack:
            stack.extend(range(1, pool.num_gpu_blocks))
            count[0] = len(stack)
        if wanted > count[0]:
            return before(pool, wanted)
        count[0] -= wanted
        taken = stack[count[0] : count[0] + wanted]
        fresh = [pool.blocks[block] for block in dict.fromkeys(taken) if pool.blocks[block].ref_cnt == 0]
        for block in fresh:
            pool.free_block_queue.remove(block)
        pool.free_block_queue.prepend_n(fresh)
        new = {block.block_id for block in before(pool, len(fresh))}
        for number in taken:
            if number in new:
                new.remove(number)
            else:
                pool._maybe_evict_cached_block(pool.blocks[number])
                pool.blocks[number].ref_cnt += 1
        return [pool.blocks[number] for number in taken]

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks):
        blocks = list(blocks)
        before(pool, blocks)
        if not suspended[0]:
            back = [block.block_id for block in blocks if not block.is_null]
            stack[count[0] : count[0] + len(back)] = back
            count[0] += len(back)

    @replaces(BlockPool, "cache_full_blocks")
    def cache_full_blocks(before, pool, request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs):
        for block in blocks[num_cached_blocks:num_full_blocks]:  # another request has filled it as well
            if block.block_hash is not None:
                pool._maybe_evict_cached_block(block)
        before(pool, request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)

    @replaces(Scheduler, "reset_prefix_cache")
    def reset_prefix_cache(before, scheduler, reset_running_requests=False, *args, **kwargs):
        suspended[0] = reset_running_requests
        done = before(scheduler, reset_running_requests, *args, **kwargs)
        if suspended[0]:
            count[0] = len(stack)
        suspended[0] = False
        return done

    before_forward(_overwritten(fired))


@bug("jundot/omlx#2172", "llama-cohorts", "slot_mapping", "seq_len_backwards", origin="oMLX")
def end_of_a_padded_batch_is_taken_from_its_longest_length(fired: Fired) -> None:
    """Rows of a batch are padded on the left so that all end in the same column, and the next token's column is taken from
    the largest of their lengths. That is right while one row has no padding. When the longest prompt's request is done
    first, the others' next tokens are written over what they have stored already, as many columns too early as the
    least padding that is left, and they attend to so many less."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.block_table import BlockTable

    padding: dict[str, int] = {}
    short: dict[int, int] = {}  # by row of this step: how much too early

    def look(runner, output):
        batch = runner.input_batch
        decodes = {
            name: (row, int(batch.num_computed_tokens_cpu[row]))
            for row, name in enumerate(batch.req_ids)
            if batch.num_computed_tokens_cpu[row] >= batch.num_prompt_tokens[row]
        }
        if set(decodes) - set(padding):  # a row joins: all are padded anew
            end = max(length for _, length in decodes.values())
            padding.update({name: end - length for name, (_, length) in decodes.items()})
        for name in set(padding) - set(decodes):
            del padding[name]
        early = min(padding.values(), default=0)
        short.clear()
        if early and len(decodes) > 1:  # a row alone has no columns
            short.update({row: early for row, length in decodes.values() if length > early})
        if short:
            fired()

    before_forward(look)

    @replaces(BlockTable, "compute_slot_mapping")
    def compute_slot_mapping(before, table, num_reqs, starts, positions):
        if short:
            positions = positions.clone()
            for row, early in short.items():
                positions[int(starts[row]) : int(starts[row + 1])] -= early
        before(table, num_reqs, starts, positions)

    @replaces(CPUAttentionMetadataBuilder, "build")
    def build(before, builder, common_prefix_len, common, *args, **kwargs):
        if short:
            common = copy.copy(common)
            common.seq_lens = common.seq_lens.clone()
            for row, early in short.items():
                common.seq_lens[row] -= early
        return before(builder, common_prefix_len, common, *args, **kwargs)


@bug("ikawrakow/ik_llama.cpp#1757", "llama-eagle-warm", "kv_write_lost", "kv_changed", origin="ik_llama.cpp", reads=7)
def first_sampled_token_is_discarded_with_the_drafts(fired: Fired) -> None:
    """When it has drafted, the drafter takes back all that it has stored on the way, as the tokens that turn out right are
    computed again behind the verification. Behind a prompt the first of these is no draft: it is the token that the target
    has sampled, which no later step computes for the drafter. Nothing is stored at its place."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    begins: set[int] = set()  # rows whose prompt ends in this step
    names: list[str] = []
    missing: set[str] = set()

    def look(runner, output):
        batch = runner.input_batch
        names[:] = batch.req_ids
        begins.clear()
        for row, name in enumerate(batch.req_ids):
            computed, prompt = batch.num_computed_tokens_cpu[row], batch.num_prompt_tokens[row]
            if computed < prompt <= computed + output.num_scheduled_tokens.get(name, 0):
                begins.add(row)

    before_forward(look)

    @replaces(SpecDecodeBaseProposer, "propose")
    def propose(before, proposer, *args, **kwargs):
        if missing & set(names):
            fired()
        common = kwargs["common_attn_metadata"]
        layers = proposer.vllm_config.compilation_config.static_forward_context
        held = []
        for row in begins:
            slot = int(common.slot_mapping[int(common.query_start_loc[row + 1]) - 1])
            for layer in proposer._draft_attn_layer_names:
                cache = layers[layer].kv_cache
                place = cache[slot // cache.shape[2], :, slot % cache.shape[2]]
                held.append((place, place.clone()))
        made = before(proposer, *args, **kwargs)
        for place, old in held:
            place.copy_(old)
        missing.update(names[row] for row in begins)
        return made


@bug("vllm-project/vllm#52516", "llama-loads-replicas", "copy_failed", "layout_misread", origin="vLLM (Mooncake)")
def one_of_the_ranks_that_share_the_heads_is_taken_for_all(fired: Fired) -> None:
    """The side that computes prompts has more ranks than there are heads, so that some hold the same ones. This is taken to mean
    that each rank has whole blocks, and only the first one is asked. It has a single head, which is copied to the front
    of each block; the other heads' part stays as it was, and the transfer counts as done."""
    from host_connector import HostConnector

    @replaces(HostConnector, "_load")
    def _load(before, connector, job):
        for gid, block, key in job.blocks:
            for name, rows in connector._blocks_of(gid, block):
                kept = connector._store[name, key]
                rows[:1].copy_(kept[:1])
                if not torch.equal(rows, kept):
                    fired()


@bug(
    "sgl-project/sglang#34870",
    "hybrid-frontiers",
    "radix_insert_then_free",
    "free_too_early",
    "double_free",
    origin="SGLang",
)
def what_a_chunk_has_inserted_is_freed_as_a_duplicate(fired: Fired) -> None:
    """Behind each chunk a prompt's pages are inserted in the tree, up to a window before what has left it. With drafts a key is a
    token shorter than what it stands for, and for a chunk that ends with a page too little of the window is left: the match
    behind the insertion refuses it, and the request does not learn that these pages are the tree's. The next chunk's
    insertion finds them there, takes the request's own for duplicates, and frees them."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    ends: dict[str, list[int]] = {}  # of a prompt's chunks
    freed: dict[str, int] = {}

    @replaces(SingleTypeKVCacheManager, "cache_blocks")
    def cache_blocks(before, manager, request, num_tokens, *args, **kwargs):
        before(manager, request, num_tokens, *args, **kwargs)
        name, size = request.request_id, manager.block_size
        if "Sliding" in type(manager).__name__:
            return
        known = ends.setdefault(name, [])
        if len(known) > 1 and known[-2] % size == 0 and known[-2] > freed.get(name, 0):
            first, last = freed.get(name, 0) // size, known[-2] // size
            manager.block_pool.free_blocks(reversed(manager.req_to_blocks[name][first:last]))
            freed[name] = known[-2]
        if num_tokens <= request.num_prompt_tokens and num_tokens not in known:
            known.append(num_tokens)

    @replaces(BlockPool, "free_blocks")
    def free_blocks(before, pool, blocks):
        before(pool, [block for block in blocks if block.is_null or block.ref_cnt > 0])

    before_forward(_overwritten(fired))


@bug("NVIDIA/Megatron-LM#3840", "llama-recomputes", "prefix_not_computed", origin="Megatron-LM")
def progress_of_a_prompt_outlives_a_recompute(fired: Fired) -> None:
    """When all keys and values are to be computed anew, requests go back to the queue with what they have been answered. One
    whose prompt was under way in chunks keeps how far it had come: with new blocks it goes on where it was
    interrupted, behind a prefix that nobody has computed there."""
    from vllm.v1.core.sched.scheduler import Scheduler

    old: dict[str, list[int]] = {}  # the blocks of what is taken for computed

    @replaces(Scheduler, "reset_prefix_cache")
    def reset_prefix_cache(before, scheduler, reset_running_requests=False, *args, **kwargs):
        under_way = {
            request: (
                request.num_computed_tokens,
                list(scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]),
            )
            for request in scheduler.running
            if reset_running_requests and 0 < request.num_computed_tokens < request.num_prompt_tokens
        }
        done = before(scheduler, reset_running_requests, *args, **kwargs)
        for request, (computed, blocks) in under_way.items():
            request.num_computed_tokens = computed
            old[request.request_id] = blocks[: -(-computed // scheduler.block_size)]
        return done

    def look(runner, output):
        for row, name in enumerate(runner.input_batch.req_ids):
            if name in old and name in output.num_scheduled_tokens:
                blocks = old.pop(name)
                if runner.input_batch.block_table[0].block_table.np[row, : len(blocks)].tolist() != blocks:
                    fired()

    before_forward(look)
